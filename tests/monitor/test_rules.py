"""Each rule by value: the step at which it fires, and the healthy steps at which it does not."""

from __future__ import annotations

import math
import re
import shutil
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_device import DEVICE, fake_device

from nmoe.config.commands import RLConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_run, load_run_with
from nmoe.config.problems import ConfigError
from nmoe.config.tables.monitor import (
    DiskSection,
    ExpertsSection,
    IdleSection,
    MemorySection,
    MismatchSection,
    MonitorSection,
    ProbeSection,
    SlowDiskSection,
    SolveRateSection,
    StalledSection,
    TruncationSection,
)
from nmoe.errors import DivergenceError, UserError
from nmoe.monitor import machine
from nmoe.monitor.machine import DiskRule, IdleRule, MemoryRule, Pauses, SlowDiskRule, StalledRule, Suspension
from nmoe.monitor.mismatch import MismatchRule
from nmoe.monitor.monitor import CALM_STEPS, Monitor
from nmoe.monitor.rewards import ProbeRule, SolveRateRule
from nmoe.monitor.rules import monitor_of
from nmoe.monitor.samples import TruncationRule
from nmoe.monitor.update import ExpertsRule

HEALTHY = {
    "reward_mean": 0.5,
    "reward_std": 0.4,
    "advantage_std": 0.9,
    "skipped": 0.0,
    "grad_norm": 0.3,
    "truncated": 0.1,
    "ppo_clip_ratio": 0.1,
    "ppo_kl": 0.001,
    "entropy_mean": 0.8,
    "correctness": 0.4,
    "response_length_mean": 100.0,
    "format_ok": 0.9,
    "high_reward_but_wrong": 0.0,
    "mismatch_abs_mean": 0.0,
    "time_step_s": 2.0,
}


def fired(rows: Sequence[Mapping[str, float]], probes: Mapping[int, Mapping[str, float]] = {}) -> list[tuple[int, str]]:
    """The steps, from 1, and the rules that fire under the default settings of a run of the speedrun's RL."""
    monitor = monitor_of(load_run(Path("speedrun"), RLConfig), 0, Path())
    return [
        (step, alert.rule)
        for step, row in enumerate(rows, start=1)
        for alert in monitor.observe({"step": step, **row}, probes.get(step))
        if alert.remedies
    ]


def rows(count: int, **changes: float) -> list[dict[str, float]]:
    return [{**HEALTHY, **changes} for _ in range(count)]


def test_healthy_steps_set_off_nothing() -> None:
    assert fired(rows(49)) == [], "at step 50 the reward is flat"
    assert fired(rows(100, correctness=0.9)) == []
    assert fired([{"step": 1, "loss": 2.0}] * 20) == [], "metrics that a recipe does not have are no symptom"


@pytest.mark.parametrize(
    ("changes", "rule", "step"),
    [
        ({"truncated": 0.51}, "truncation", 25),
        ({"ppo_clip_ratio": 0.41}, "clip", 23),
        ({"grad_norm": 0.0}, "grad_norm", 23),
        ({"grad_norm": 101.0}, "grad_norm", 23),
        ({"skipped": 1.0}, "reward_stuck", 30),
        ({"advantage_std": 0.0}, "reward_stuck", 30),
        ({"ppo_kl": 0.2}, "kl", 22),
        ({"ppo_kl": -0.01}, "kl", 30),
        ({"correctness": 0.04}, "solve_rate", 30),
        ({"log_ratio_raw_max": 5.1}, "ratios", 23),
        ({"ratio_max": 10.1}, "ratios", 23),
        ({"update_clip_ratio": 0.41}, "clip", 23),
        ({"update_kl": 0.11}, "kl", 22),
        ({"update_log_ratio_max": 5.1}, "ratios", 23),
        ({"update_log_ratio_min": -5.1}, "ratios", 23),
        ({"update_ratio_max": 10.1}, "ratios", 23),
        ({"reference_kl": 1.1}, "reference", 23),
        ({"reference_log_ratio_abs_p99": 8.1}, "reference", 23),
        ({"entropy_mean": 0.07}, "entropy", 25),
        ({"response_length_mean": 33.0}, "length", 25),
        ({"response_length_mean": 301.0}, "length", 25),
        ({"format_ok": 0.49}, "format", 25),
        ({"format_ok": 0.65}, "format", 25),
        ({"high_reward_but_wrong": 0.21}, "reward_hacking", 25),
        ({"mismatch_abs_mean": 1e-9}, "mismatch", 22),
        ({"time_step_s": 301.0}, "stalled", 21),
    ],
)
def test_a_symptom_fires_once_at_its_step(changes: dict[str, float], rule: str, step: int) -> None:
    assert fired([*rows(20), *rows(30, **changes)])[:1] == [(step, rule)]
    assert [name for _, name in fired([*rows(20), *rows(29, **changes)])].count(rule) == (step < 50)
    # One step less, and it does not.
    assert fired([*rows(20), *rows(step - 21, **changes), *rows(20)]) == []


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (0.04, "only 4.0% of the answers are right"),
        (0.19, "19.0% of the answers are right, outside 20% to 60%: too hard problems"),
        (0.2, None),
        (0.6, None),
        (0.61, "61.0% of the answers are right, outside 20% to 60%: too easy problems"),
    ],
)
def test_a_band_of_solve_rates_has_two_sides(rate: float, said: str | None) -> None:
    assert SolveRateRule(SolveRateSection(band=(0.2, 0.6))).symptom({"correctness": rate}) == said
    assert (SolveRateRule(SolveRateSection()).symptom({"correctness": rate}) is None) == (rate != 0.04), "no band"
    assert SolveRateRule(SolveRateSection(band=(0.2, 0.6))).symptom({}) is None


@pytest.mark.parametrize("band", ["[0.6, 0.2]", "[0.2]", "[0.2, 1.2]"])
def test_a_band_that_is_none_is_refused(band: str) -> None:
    with pytest.raises(ConfigError, match=r"solve_rate.*band.*two rates between 0 and 1, the lower one first"):
        load_run(Path("speedrun"), RLConfig, [f"--monitor.solve_rate.band={band}"])


def test_one_update_far_beyond_the_limit_is_told_at_once() -> None:
    dead = [{"skipped": 1.0, "reward_mean": 0.0, "correctness": 0.0}] * 3
    assert fired([*rows(20), *rows(1, update_kl=1.01), *dead]) == [(21, "kl")], "nothing is trained on after it"
    assert fired([*rows(20), *rows(1, update_kl=0.99), *rows(20)]) == []


def test_low_entropy_is_no_symptom_once_the_problems_are_solved() -> None:
    assert fired([*rows(20), *rows(30, entropy_mean=0.01, correctness=0.9)]) == []


def test_a_high_reward_for_wrong_answers_is_what_an_early_stage_asks_for() -> None:
    early = {"high_reward_but_wrong": 0.6, "weight/format": 1.0, "weight/correctness": 0.25}
    late = early | {"weight/correctness": 1.0}
    assert fired([*rows(30, **early)]) == []
    assert fired([*rows(30, **early), *rows(9, **late)]) == [(35, "reward_hacking")]


def differing(rule: MismatchRule, *steps: tuple[float, float]) -> list[bool]:
    """Whether the rule says something at each of these means and entropies."""
    seen = [rule.symptom({"mismatch_abs_mean": mean, "entropy_mean": entropy}) for mean, entropy in steps]
    return [said is not None for said in seen]


# A healthy run of SmolLM2-135M in bfloat16, its entropy and its mismatch at 18 of 30 steps of RL.
REAL = [
    (0.026, 1.55), (0.027, 1.61), (0.030, 1.55), (0.028, 1.66), (0.0275, 1.74), (0.032, 2.14), (0.030, 2.10),
    (0.0267, 1.66), (0.0229, 1.14), (0.0303, 1.09), (0.0223, 0.80), (0.0155, 0.42), (0.0203, 0.32), (0.0199, 0.23),
    (0.0157, 0.14), (0.0164, 0.19), (0.0124, 0.13), (0.0058, 0.06),
]  # fmt: skip


def test_the_mismatch_of_a_healthy_real_model_is_no_symptom() -> None:
    assert not any(differing(MismatchRule(MismatchSection(), "bfloat16"), *REAL))
    fp32 = [(mean / 5000, entropy) for mean, entropy in REAL]
    assert not any(differing(MismatchRule(MismatchSection()), *fp32)), "4 to 6e-6"


def test_a_mismatch_beyond_rounding_in_each_precision() -> None:
    """The bound grows with the root of the entropy, from one nat on: 0.05 and 1e-4, at 1.44 nats 0.06 and 1.2e-4."""
    for precision, bound in (("bfloat16", 0.05), ("float16", 0.05), ("float32", 1e-4)):
        for entropy, factor in ((0.1, 1.0), (1.0, 1.0), (1.44, 1.2), (4.0, 2.0)):
            above, below = (bound * factor * 1.01, entropy), (bound * factor * 0.99, entropy)
            assert differing(MismatchRule(MismatchSection(), precision), *[above] * 3) == [False, True, True]
            assert not any(differing(MismatchRule(MismatchSection(), precision), above, below, above, below))
    asked = MismatchRule(MismatchSection(above=0.01, steps=1), "bfloat16")
    assert differing(asked, (0.0101, 0.5), (0.0099, 0.5), (0.0199, 4.0), (0.0201, 4.0)) == [True, False, False, True]
    rule = MismatchRule(MismatchSection(), "bfloat16")
    seen = [rule.symptom({"mismatch_abs_mean": 0.08, "entropy_mean": 1.44}) for _ in range(2)]
    assert seen == [
        None,
        "engine and learner differ by 0.08 a token, 2 steps in a row, and 0.06 is the most that rounding explains",
    ]


def test_a_mismatch_that_grows_is_measured_against_the_lowest_level_so_far() -> None:
    """0.02 at 1.44 nats is 0.0167 at one nat, and 0.004 at 0.0576 nats the same."""
    start, sharp = [(0.02, 1.44)] * 6, [(0.004, 0.0576)] * 5
    rule = MismatchRule(MismatchSection(), "bfloat16")
    assert not any(differing(rule, *start, *sharp))
    assert differing(rule, *[(0.0159, 0.0576)] * 2) == [False, False], "under four times as much"
    assert differing(rule, *[(0.0161, 0.0576)] * 2) == [False, True], "though the run began with 0.02"
    assert not any(differing(rule, *start)), "a policy that is less sure differs by more"
    small = MismatchRule(MismatchSection(), "bfloat16")
    assert not any(differing(small, *[(1e-4, 1.0)] * 6, *[(0.0049, 1.0)] * 3)), "under a tenth of the bound"
    assert differing(small, *[(0.0051, 1.0)] * 2) == [False, True]
    # The level only falls: one that creeps up is seen, too.
    creeping = [(0.006 * 1.05**step, 1.0) for step in range(40)]
    assert differing(MismatchRule(MismatchSection(), "bfloat16"), *creeping).index(True) == 32


def test_a_resumed_run_finds_its_level_in_what_it_recorded() -> None:
    """Ten times as much as in eight quiet steps, of which the resumed run saw the last one and was shown the others."""
    quiet, loud = ({"mismatch_abs_mean": mean, "entropy_mean": 1.0} for mean in (0.003, 0.03))
    whole, resumed, new = (Monitor([MismatchRule(MismatchSection(), "bfloat16")]) for _ in range(3))
    for _ in range(7):
        whole.observe(quiet)
        resumed.recall(quiet)
    said = [[monitor.observe(row) for row in (quiet, loud, loud)] for monitor in (whole, resumed, new)]
    assert said[0] == said[1]
    assert [len(alerts) for alerts in said[1]] == [0, 0, 1]
    assert said[1][2][0].message.endswith("2 steps in a row, 10.0 times as much as before at the same entropy")
    assert [len(alerts) for alerts in said[2]] == [0, 0, 0], "without those steps there is no level"


def test_a_step_that_measures_no_mismatch_breaks_no_row() -> None:
    rule = MismatchRule(MismatchSection(), "bfloat16")
    far = {"mismatch_abs_mean": 0.2, "entropy_mean": 1.0}
    assert [rule.symptom(row) is None for row in (far, {"skipped": 1.0}, far)] == [True, True, False]


class Noting(dict[str, float]):
    """A step's metrics that note the names that a rule asks for."""

    asked: set[str]

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> float:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


def test_no_rule_passes_over_a_metric_that_is_not_finite() -> None:
    """For each rule: the metrics that it asks for in healthy steps, each of them broken. A comparison with NaN is false, so that
    the rule itself would see health."""
    evaluated = {"probe": 0.5, "probe_before": 0.5, "time_save_s": 1.0, "weight/correctness": 1.0, "has_boxed": 1.0}
    healthy = {**HEALTHY, **evaluated, **collapse(0.5)}
    config = load_run_with(Path("speedrun"), RLConfig, {"monitor": {"experts": {"warmup_steps": 0}}}, "mine.toml", "rl")
    for rule in [one.rule for one in monitor_of(config, 8, Path())._watched]:
        steps = Noting(healthy)
        steps.asked = set()
        for _ in range(12):
            rule.symptom(steps)
        assert steps.asked or rule.looks_around, rule.name
        for name in steps.asked:
            for value in (math.nan, math.inf, -math.inf):
                with pytest.raises(
                    DivergenceError, match=rf"^step 1: {re.escape(name)} is {value}; the step is not recorded"
                ):
                    Monitor([rule]).observe(healthy | {name: value})


def test_what_is_not_finite_is_named_at_any_level_and_in_an_evaluation() -> None:
    monitor = Monitor([TruncationRule(TruncationSection(level="off"))])
    monitor.recall({"reward_mean": 0.5})
    with pytest.raises(
        DivergenceError, match=r"^step 2: update_kl is nan, probe is inf; .* lower optimizer.learning_rate"
    ):
        monitor.observe({"update_kl": math.nan, "reward_mean": 0.5, "expert_load": [0.5, 0.5]}, {"probe": math.inf})


def test_one_engine_of_eight_is_named() -> None:
    """The mean over all, 0.06, is a bf16 engine's rounding at an entropy of 2; that of the one is not."""
    rule = MismatchRule(MismatchSection(), "bfloat16", servers=True)
    each = {f"mismatch_abs_mean/engine_{number}": 0.4 if number == 3 else 0.01 for number in range(8)}
    row = {"mismatch_abs_mean": 0.06, "entropy_mean": 2.0} | each
    skipped = {"skipped": 1.0}
    assert [rule.symptom(one) is None for one in (row, skipped, row)] == [True, True, False]
    bound = 0.05 * 2**0.5
    said = (
        f"engine_3 of 8 and learner differ by 0.4 a token, 2 steps in a row, and {bound:.2g} is the most that rounding"
    )
    assert rule.symptom(row) == f"{said} explains"
    assert rule.remedies[1].startswith("start that server again")
    # Another one grows beyond its own level of five steps, below the bound.
    for _ in range(5):
        assert rule.symptom(row | {"mismatch_abs_mean/engine_3": 0.01}) is None
    grown = row | {"mismatch_abs_mean/engine_3": 0.01, "mismatch_abs_mean/engine_5": 0.05}
    assert rule.symptom(grown) is None
    assert rule.symptom(grown) == (
        "engine_5 of 8 and learner differ by 0.05 a token, 2 steps in a row, 5.0 times as much as before at the same entropy"
    )


def test_exact_numerics_leave_no_mismatch() -> None:
    rule = MismatchRule(MismatchSection(), exact=True)
    assert differing(rule, *[(0.0, 1.0)] * 9, (1e-9, 1.0), (1e-9, 1.0)) == [False] * 10 + [True]
    said = rule.symptom({"mismatch_abs_mean": 1e-9})
    assert said == "engine and learner differ by 1e-09 a token, 2 steps in a row, and with exact numerics by nothing"
    assert rule.remedies[0] == "report it"


def test_a_mismatch_after_steps_without_any_is_growth() -> None:
    rule = MismatchRule(MismatchSection(above=0.01), exact=True)
    assert differing(rule, *[(0.0, 1.0)] * 6, (0.002, 1.0)) == [False] * 7
    said = rule.symptom({"mismatch_abs_mean": 0.002, "entropy_mean": 1.0})
    assert said is not None
    assert said.endswith("2 steps in a row, where there was none before at the same entropy")


def test_remedies_for_a_mismatch_are_those_that_the_run_has() -> None:
    def remedies(experts: int, **settings: Any) -> str:
        tables = {"model": {"numerics": "fast"}} | settings
        config = load_run_with(Path("speedrun"), RLConfig, tables, "mine.toml", "rl")
        watched = monitor_of(config, experts, Path())._watched
        return "; ".join(next(one.rule for one in watched if one.rule.name == "mismatch").remedies)

    assert remedies(0) == (
        'set [model] numerics = "exact": rounding then makes no difference, a fault still does; '
        'correct for it: algorithm.correction = "tis"'
    )
    assert remedies(8).endswith("; look at route_flips")
    assert remedies(0, sampling={"top_p": 0.9}).endswith("; look at what top-p and top-k keep")
    assert "correction" not in remedies(0, algorithm={"correction": "tis"})
    assert remedies(0, model={"numerics": "exact"}).startswith("report it")


def noisy(step: int) -> float:
    """A deviation that repeats every two steps, of 0.1: the mean of ten has an error of 0.045."""
    return 0.1 if step % 2 else -0.1


def test_a_reward_that_does_not_rise_beyond_its_noise() -> None:
    flat = [{**HEALTHY, "reward_mean": 0.5 + noisy(step)} for step in range(200)]
    assert fired(flat) == [(50, "flat")], "told once"
    rising = [{**HEALTHY, "reward_mean": 0.5 + 0.004 * step + noisy(step)} for step in range(200)]
    assert fired(rising) == [], "the noise hides 0.004 a step for 34 steps, less than 50"
    slow = [{**HEALTHY, "reward_mean": 0.5 + 0.001 * step + noisy(step)} for step in range(200)]
    assert fired(slow)[0] == (50, "flat"), "0.001 a step is hidden for 134 steps"
    late = [*rising[:100], *({**HEALTHY, "reward_mean": 0.9 + noisy(step)} for step in range(100))]
    ((step, rule),) = fired(late)
    assert rule == "flat"
    assert 120 <= step <= 150, "at most 50 steps after the last rise, which is at most 34 before step 100"


def test_another_stage_of_the_curriculum_begins_anew() -> None:
    def stage(number: float, count: int) -> list[dict[str, float]]:
        return rows(count, curriculum_stage=number, reward_mean=1.0 - 0.2 * number)

    assert fired([*stage(0, 45), *stage(1, 45), *stage(2, 49)]) == []
    assert fired([*stage(0, 45), *stage(1, 60)]) == [(95, "flat")]


def test_gradients_that_rise_from_stretch_to_stretch() -> None:
    rising = [{**HEALTHY, "grad_norm": 0.1 * 3 ** (step // 10)} for step in range(40)]
    assert fired(rising) == [(40, "grad_norm_rise")]
    assert fired([{**HEALTHY, "grad_norm": 0.1 * 2 ** (step // 10)} for step in range(40)]) == [], (
        "to less than ten times"
    )


def test_a_probe_that_is_worse_than_before_in_two_evaluations() -> None:
    better = [{**HEALTHY, "reward_mean": 0.01 * step} for step in range(40)]
    lost = {"probe": 0.0, "probe_before": 0.967}
    assert fired(better, {10: {"probe": 0.967}, 20: lost, 30: lost}) == [(30, "probe")], "one fall that stays"
    assert fired(better, {10: {"probe": 0.5}, 20: lost, 30: {"probe": 0.46}, 40: lost}) == [], "not in a row"
    assert fired(better, {10: {"probe": 0.5}, 20: {"probe": 0.4}, 30: {"probe": 0.3}}) == [], "may be chance"
    assert fired(rows(40), {10: {"probe": 0.5}, 20: lost, 30: lost}) == [(30, "probe")], "the reward need not rise"
    little = {"probe": 0.485, "probe_before": 0.5}
    assert fired(better, {10: {"probe": 0.5}, 20: little, 30: little}) == [], (
        "more than chance, of thousands of problems"
    )
    monitor = Monitor([ProbeRule(ProbeSection(steps=1))])
    rising, flat = better[39], HEALTHY
    monitor.observe(better[0])
    assert monitor.observe(rising, lost)[0].message == (
        "held-out problems are solved at 0.0% after 96.7%, which is more than chance, while the reward rises"
    )
    assert not Monitor([ProbeRule(ProbeSection(steps=1))]).observe(flat, lost)[0].message.endswith("rises")
    of_loss = {"probe": -2.25, "probe_before": -2.0}
    (alert,) = Monitor([ProbeRule(ProbeSection(steps=1))]).observe(flat, of_loss)
    assert alert.message == "the held-out loss is 2.2500 after 2.0000, which is more than chance"
    assert not Monitor([ProbeRule(ProbeSection(steps=1))]).observe(flat, {"probe": -1.99, "probe_before": -2.0})


def preset(text: str = "", task: str = "sort", name: str = "sort") -> RLConfig:
    """The speedrun's RL on another environment, whose file is this text."""
    pool = (
        {"type": "generated", "task_type": task}
        if task == "sort"
        else {"type": "jsonl", "path": "p", "task_type": task}
    )
    environment = {"env_id": name, "task_pool": pool, **tomllib.loads(text)}
    config = load_run(Path("speedrun"), RLConfig)
    return config.model_copy(update={"environment": EnvironmentSettings.model_validate(environment)})


JUDGE = '[[rewards]]\nname = "f"\ntype = "function"\ncall = "m:f"\n'


@pytest.mark.parametrize(
    ("text", "task", "boxed", "step"),
    [
        ('format = "boxed"', "sort", 0.89, 5),  # right answers alone, which belong in a box
        ('system_by_format.chat = "Answer in the form \\\\boxed{answer}."', "sort", 0.89, 5),
        ('format = "boxed"', "sort", 0.91, None),
        ("", "sort", 0.0, None),  # nobody asked for a box
        ('format = "boxed"\n[rubric]\nformat = 0.5', "sort", 0.5, None),  # the format is learned
        ('format = "boxed"\n' + JUDGE, "sort", 0.5, None),
        ('format = "boxed"\n' + JUDGE, "open", 0.0, None),
    ],
)
def test_boxes_are_watched_where_right_answers_alone_are_rewarded(
    text: str, task: str, boxed: float, step: int | None
) -> None:
    monitor = monitor_of(preset(text, task), 0, Path())
    seen = [[one.rule for one in monitor.observe({**HEALTHY, "has_boxed": boxed})] for _ in range(8)]
    assert [place for place, rules in enumerate(seen, start=1) if "format" in rules] == ([] if step is None else [step])


@pytest.mark.parametrize(
    ("text", "task", "watched"), [("", "sort", True), (JUDGE, "sort", True), (JUDGE, "open", False)]
)
def test_a_lost_form_is_a_symptom_wherever_there_are_right_answers(text: str, task: str, watched: bool) -> None:
    monitor = monitor_of(preset(text, task), 0, Path())
    seen = [alert.rule for _ in range(5) for alert in monitor.observe({**HEALTHY, "format_ok": 0.3})]
    assert ("format" in seen) == watched


def test_a_rewarded_wrong_answer_under_exact_match_is_a_bug() -> None:
    row = {**HEALTHY, "rewarded_but_wrong": 0.001}
    exact = monitor_of(preset("[rubric]\ncorrectness = 1.0\nefficiency = 0.2"), 0, Path())
    assert exact.observe(HEALTHY) == []
    (alert,) = exact.observe(row)
    assert alert.message == (
        "0.1% of the samples are wrong and rewarded above the mean, though right answers alone are: this is a bug"
    )
    assert monitor_of(preset("[rubric]\ncorrectness = 1.0\nformat = 0.2"), 0, Path()).observe(row) == []
    assert monitor_of(preset(JUDGE), 0, Path()).observe(row) == []


@pytest.mark.parametrize(
    ("changes", "step"),
    [({"truncated": 0.6}, 5), ({"grad_norm": 0.0}, 3), ({"advantage_std": 0.0}, 10), ({"format_ok": 0.2}, 5),
     ({"update_clip_ratio": 0.5}, 3), ({"entropy_mean": 0.0001}, None)],
)  # fmt: skip
def test_smoke_rules_end_a_run_in_its_first_steps(changes: dict[str, float], step: int | None) -> None:
    config = preset()
    stopping = config.model_copy(update={"monitor": MonitorSection(first_steps="stop")})
    for one, levels in ((config, {"warn"}), (stopping, {"stop"})):
        monitor = monitor_of(one, 0, Path())
        seen = [monitor.observe(row) for row in rows(10, **changes)]
        if step is not None:
            assert {alert.level for alert in seen[step - 1]} == levels
            assert seen[step - 1][0].message.endswith(", within the first 10 steps") == (levels == {"stop"})
        assert not [alert for alerts in seen[: (step or 11) - 1] for alert in alerts]
    late = monitor_of(stopping, 0, Path())
    seen = [alert.level for row in [*rows(10), *rows(10, **changes)] for alert in late.observe(row)]
    assert "stop" not in seen
    off = stopping.model_copy(
        update={"monitor": MonitorSection.model_validate({"first_steps": "stop", "truncation": {"level": "off"}})}
    )
    assert not [1 for row in rows(8, truncated=0.9) for _ in monitor_of(off, 0, Path()).observe(row)]


def collapse(violation: float, dead: float = 0.0) -> dict[str, float]:
    return {"expert_load_max_violation/0": 0.2, "dead_experts/0": 0.0} | {
        "expert_load_max_violation/3": violation,
        "dead_experts/3": dead,
    }


def test_experts_that_collapse_after_the_uneven_start() -> None:
    monitor = Monitor([ExpertsRule(ExpertsSection(), 8)])
    said = [monitor.observe(collapse(3.0)) for _ in range(70)]
    assert [place for place, alerts in enumerate(said, start=1) if alerts] == [65], (
        "60 steps to balance the load, 5 with the symptom"
    )
    assert said[64][0].message == (
        "experts collapse in layer 3 (its busiest expert has 4.0 times its share, 0% have nothing to do), 5 steps in a row"
    )
    over = [monitor.observe(collapse(0.3)) for _ in range(5)]
    assert [alert.message for alerts in over for alert in alerts] == [
        "the alert of experts is over: 5 steps without its symptom"
    ]
    dead = [monitor.observe(collapse(0.3, dead=4)) for _ in range(5)]
    assert [len(alerts) for alerts in dead] == [0, 0, 0, 0, 1]


def test_idle_experts_count_before_the_load_is_balanced() -> None:
    monitor = Monitor([ExpertsRule(ExpertsSection(), 8)])
    said = [monitor.observe(collapse(3.0, dead=6)) for _ in range(20)]
    assert [place for place, alerts in enumerate(said, start=1) if alerts] == [15]


def test_the_start_of_a_healthy_speedrun_raises_no_alarm() -> None:
    """The loads of layers 1 and 2 of the packaged speedrun's base, every fifth step, and the most idle experts of four seeds."""
    monitor = Monitor([ExpertsRule(ExpertsSection(), 8)])
    recorded = [2.8, 2.8, 2.7, 2.7, 2.5, 2.5, 2.1, 2.1, 1.7, 1.7, 1.7, 1.2, 1.0]
    assert not [alert for load in recorded for _ in range(5) for alert in monitor.observe(collapse(load, dead=3))]


def test_a_rule_is_armed_again_after_its_all_clear() -> None:
    monitor = Monitor([TruncationRule(TruncationSection(steps=2, level="stop"))])
    bad, good = {"truncated": 0.9}, {"truncated": 0.0}
    seen = [monitor.observe(row) for row in [bad] * 4 + [good] * CALM_STEPS + [bad] * 2]
    assert [(place, alerts[0].level) for place, alerts in enumerate(seen) if alerts] == [
        (1, "stop"),
        (8, "warn"),
        (10, "stop"),
    ]
    off = Monitor([TruncationRule(TruncationSection(level="off"))])
    assert not any(off.observe(bad) for _ in range(10))


def test_a_full_disk_and_one_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = {"bytes": 2_000_000_000}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free["bytes"]))
    rule = DiskRule(DiskSection(), tmp_path)
    assert rule.symptom({}) is None
    free["bytes"] = 999_000_000
    assert rule.symptom({}) == "1.00 GB are free where the run is written"

    def gone(path: Path) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", gone)
    assert rule.symptom({}) is None


def test_a_disk_that_is_full_when_a_run_is_resumed_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    monitor = Monitor([DiskRule(DiskSection(), tmp_path), TruncationRule(TruncationSection(steps=3))])
    for _ in range(2):
        monitor.recall({"truncated": 1.0})
    assert [alert.rule for alert in monitor.observe({"truncated": 1.0})] == ["disk", "truncation"]


def test_a_disk_that_a_run_waits_for() -> None:
    rule = SlowDiskRule(SlowDiskSection(seconds=10.0, share=0.5))
    steps = [{"time_step_s": 15.0}, {"time_step_s": 15.0}]
    fast, long, short = ({"time_step_s": 15.0, "time_save_s": seconds} for seconds in (14.9, 15.1, 9.9))
    assert [rule.symptom(row) for row in (*steps, fast)] == [None] * 3, "under half of the 30 s of the steps before"
    assert [rule.symptom(row) for row in (*steps[:1], long)] == [
        None,
        "saving held the run up for 15 s, and the steps before it took 30 s",
    ]
    assert rule.symptom(short) is None, "under ten seconds, though more than half of the one step before"
    twice = SlowDiskRule(SlowDiskSection(steps=2))
    assert [twice.symptom(long) is None for _ in range(3)] == [True, False, False]


def test_the_memory_of_a_device_at_a_steps_peak(tmp_path: Path) -> None:
    rule = MemoryRule(MemorySection(), DEVICE)
    with fake_device() as kind:
        kind.memory_share = 0.95
        assert rule.symptom({}) is None
        kind.memory_share = 0.951
        assert rule.symptom({}) == "95.1% of the memory of meta:7 was in use"
        monitor = Monitor([rule])
        assert [len(monitor.observe({})) for _ in range(3)] == [0, 1, 0], "at the second step, once"


def test_a_device_that_has_nothing_to_do_for_minutes() -> None:
    with fake_device() as kind:
        pauses = Pauses(DEVICE, now=0.0)
        for now in range(5, 100, 5):
            kind.busy = now in (30, 95)
            pauses.look(float(now))
        assert pauses.take() == 60.0, "from 30 to 90, which is when it was last seen idle"
        assert pauses.take() == 0.0
        kind.busy = False
        for now in (100, 200):
            pauses.look(float(now))
        assert pauses.take() == 105.0
        pauses.look(300.0)
        assert pauses.take() == 205.0, "a pause goes on from one step to the next"
        kind.busy = None  # type: ignore[assignment]
        pauses.look(400.0)
        assert pauses.take() == 0.0, "a device that cannot tell is no symptom"


def test_the_idle_rule_looks_from_a_thread_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LOOK_S", 0.01)
    with fake_device() as kind:
        kind.busy = False
        rule = IdleRule(IdleSection(seconds=0.05), DEVICE)
        (thread,) = [one for one in threading.enumerate() if one.name == "idle-device"]
        deadline, said = time.monotonic() + 10, None
        while said is None and time.monotonic() < deadline:
            time.sleep(0.02)
            said = rule.symptom({})
        assert said is not None
        assert said.startswith("meta:7 had nothing to do for 0 s")
        del rule
        thread.join(10)
        assert not thread.is_alive()


def test_a_cpu_has_no_rules_of_a_device() -> None:
    watched = monitor_of(load_run(Path("speedrun"), RLConfig), 0, Path())._watched
    assert not {"memory", "idle"} & {one.rule.name for one in watched}


def test_a_stall_is_told_by_the_median_of_the_steps_before() -> None:
    rule = StalledRule(StalledSection(seconds=1.0, factor=10.0))
    assert [rule.symptom({"time_step_s": seconds}) for seconds in (9.0, 1.0, 1.0, 1.2, 1.1, 1.0, 10.9)][:6] == [
        None
    ] * 6
    assert StalledRule(StalledSection(seconds=1.0)).symptom({"time_step_s": 100.0}) is None, "nothing to compare with"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"truncation": {"abov": 0.8}}, r"\[monitor.truncation\] abov = 0.8: unknown key"),
        ({"truncaton": {"above": 0.8}}, r"\[monitor.truncaton\].*unknown"),
        ({"kl": {"level": "halt"}}, r'\[monitor.kl\] level = "halt"'),
        ({"flat": {"steps": 5}}, r"\[monitor.flat\] steps = 5"),
    ],
)
def test_a_table_with_a_mistake_is_one_message(table: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        load_run_with(Path("speedrun"), RLConfig, {"monitor": table}, "mine.toml", "rl")
    assert "\n" not in str(error.value)


def test_a_suspension_is_a_late_beat_of_a_process_that_did_not_compute() -> None:
    suspension = Suspension(now=0.0, cpu=0.0)
    for now in (2.0, 4.0, 20.0):  # the last is late, by less than counts
        suspension.beat(now, cpu=now)
    assert suspension.take(21.0, cpu=21.0) == 0.0
    suspension.beat(383.0, cpu=21.5)
    assert suspension.take(384.0, cpu=22.0) == 360.0, "362 s without a beat, of which 2 are between any two"
    assert suspension.take(385.0, cpu=23.0) == 0.0
    suspension.beat(745.0, cpu=350.0)
    assert suspension.take(746.0, cpu=351.0) == 0.0, "it computed meanwhile: a call that let no other thread run"
    assert suspension.take(846.0, cpu=351.0) == 98.0, "asked before the thread's own beat"


def test_a_step_is_not_stalled_by_a_process_that_was_stopped() -> None:
    rule = StalledRule(StalledSection(seconds=30.0))
    for _ in range(5):
        rule.symptom({"time_step_s": 1.0})
    rule._suspension._beat -= 60.0  # as after SIGSTOP for a minute
    assert rule.symptom({"time_step_s": 61.0}) is None
    assert rule.symptom({"time_step_s": 61.0}) == "the step took 61 s, and 1.0 s is usual"


def test_the_beats_end_with_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BEAT_S", 0.01)
    before = {one for one in threading.enumerate() if one.name == "suspension"}
    rule = StalledRule(StalledSection())
    (thread,) = {one for one in threading.enumerate() if one.name == "suspension"} - before
    time.sleep(0.05)
    del rule
    thread.join(10)
    assert not thread.is_alive()


def test_every_rule_has_its_table_its_source_and_its_remedies() -> None:
    with fake_device():
        monitor = monitor_of(load_run(Path("speedrun"), RLConfig), 8, Path())
    names = {one.rule.name for one in monitor._watched}
    tables = {name for name, field in MonitorSection.model_fields.items() if hasattr(field.annotation, "model_fields")}
    assert names == tables
    playbook = (Path(__file__).parents[2] / "docs" / "playbook.md").read_text()
    for one in monitor._watched:
        assert one.rule.source
        assert one.rule.remedies
        assert f"`{one.rule.name}`" in playbook, "the playbook names every rule"
