"""Checks of found faults: what a run learns from, held-out data, labelled steps, and the figures that describe a run."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from found import Result, check


@check(
    15,
    "the gradient of step rewards by default, where the policy chooses how many steps it takes",
    "1.00 of the exact one, +0.344",
)
def more_good_steps() -> Result:
    """Before each of up to four steps the policy may stop; each earns 0 or 1 by a fair coin. Exact, over all groups of two."""
    import torch

    from nmoe.config.tables.algorithm import AlgorithmSection
    from nmoe.rl.advantages import Advantages
    from nmoe.rl.experience import policy_batch
    from nmoe.rl.group_rewards import GroupRewards
    from nmoe.trajectory import Group, Trajectory
    from nmoe.types import Grade, Problem, Sample, Sampling, Turn

    problem, sampling = Problem("p", "sort", "q", "a", "s"), Sampling(8)
    samples, chances, slopes = list[Trajectory](), list[float](), list[list[float]]()
    for steps in range(1, 5):
        for coins in itertools.product((0.0, 1.0), repeat=steps):
            # The first step is given. A token says whether another one comes; after the fourth there is no choice.
            tokens = steps if steps < 4 else 3
            sample = Sample([7] * (tokens + 1), [-1.0] * (tokens + 1), [0] * (tokens + 1), "stop")
            rewards = tuple(enumerate(coins))
            grade = Grade(0.0, {}, "ok", {"correctness": 0.0}, "", step_rewards=rewards)
            samples.append(Trajectory(problem, 0, (5, 6), (Turn((), sample),), grade, sampling))
            # Of the logit of "another step", at a chance of one half; the token of the first step is no choice.
            slopes.append([0.0] + [0.5] * (steps - 1) + [-0.5] * (steps < 4))
            chances.append(0.5 ** (steps + tokens))
    exact = sum(0.5 * number * 0.5 ** (number - 1) * 0.25 for number in range(1, 4))
    found = 0.0
    rewards, estimate = GroupRewards(AlgorithmSection(), 8), Advantages(AlgorithmSection(), 8)
    for one, two in itertools.product(range(len(samples)), repeat=2):
        group = Group(problem, (samples[one], samples[two]))
        batch = policy_batch(group.trajectories, None, "token", 8)
        experience = estimate(batch, [rewards.of(group)])
        assert experience is not None
        batch = experience.batch
        assert batch.advantages_T is not None
        slope = torch.tensor([*slopes[one], *slopes[two]])
        found += chances[one] * chances[two] * float((batch.advantages_T[batch.scored_T] * slope).sum()) / 2
    return f"{found / exact:.2f} of it, {found:+.3f}", abs(found / exact - 1) < 1e-3


@check(
    16,
    "a reward that returns None for two of four samples without a gold",
    "mean 1.5 over two samples, share masked 0.5",
)
def none_is_not_zero() -> Result:
    import nmoe

    def some(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if index % 3 == 0 else float(index) for index in range(len(completions))]

    run = nmoe.train_rl(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        env=[{"prompt": "Sing."}, {"prompt": "Hum."}],
        rewards=[some],
        config={
            "run": {"steps": 1, "name": "none", "directory": tempfile.mkdtemp()},
            "batch": {"prompts_per_step": 1, "group_size": 4},
            "sampling.max_new_tokens": 8,
        },
    )
    row = run.metrics[-1]
    mean, masked = row["reward_mean"], row["grader_error_rate"]
    return f"mean {mean}, share masked {masked}", (mean, masked) == (1.5, 0.5)


@check(
    17,
    "a learning rate 100 times too high, one update a step (the default): which of the rules kl, clip and ratios fire in six steps",
    "clip, kl, ratios; spikes.jsonl has lines",
)
def one_update_a_step() -> Result:
    import nmoe

    def vowels(completions: list[str], **columns: Any) -> list[float]:
        return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]

    run = nmoe.train_rl(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        env=[{"prompt": text} for text in ("Sing.", "Hum.", "Call.", "Sigh.")],
        rewards=[vowels],
        config={
            "run": {"steps": 6, "name": "fast", "directory": tempfile.mkdtemp(), "threads": 1},
            "batch": {"prompts_per_step": 4, "group_size": 8},
            "optimizer": {"learning_rate": 0.3, "warmup_steps": 0},
            "sampling.max_new_tokens": 16,
        },
    )
    names = {"kl", "clip", "ratios"}
    alerts, spikes = run.path / "alerts.jsonl", run.path / "spikes.jsonl"
    lines = alerts.read_text().splitlines() if alerts.exists() else []
    fired = sorted({json.loads(line).get("rule") for line in lines} & names)
    many = len(spikes.read_text().splitlines()) if spikes.exists() else 0
    return f"{', '.join(fired) or 'none'}; {many} spikes", set(fired) == names and many > 0


@check(
    18,
    "a probe out of the distribution that falls from 97% to 0% and stays there; and random orders of six equal evaluations",
    "ended; at most 5% of the orders ended",
)
def one_fall_that_stays() -> Result:
    """Of 100 problems, of which 60 are solved by chance at each of the six evaluations."""
    import random
    from types import SimpleNamespace

    from nmoe.eval.early_stopping import rates_of
    from nmoe.eval.probes import Probes

    def result(right: list[bool]) -> list[dict[str, Any]]:
        outcomes = {str(at): float(one) for at, one in enumerate(right)}
        mean = sum(right) / len(right)
        return [
            {
                "mode": "greedy_pass@1",
                "dataset": "ood",
                "value": mean,
                "outcomes": outcomes,
                "role": "out_of_distribution",
            }
        ]

    section = SimpleNamespace(fatal_drops=2, role="out_of_distribution", enough=None, patience=None)
    probe = SimpleNamespace(section=section, own=list)
    asked = Probes.__new__(Probes)
    asked._asked = [(probe, None)]  # type: ignore[list-item]
    assert rates_of(result([True])) == {"ood": 1.0}

    def ends(history: list[list[dict[str, Any]]]) -> bool:
        return any(asked.reason_to_end(history[:count]) for count in range(2, len(history) + 1))

    fall = ends([result([at < count for at in range(100)]) for count in (20, 97, 0, 0)])
    draw, ended = random.Random(0), 0
    for _ in range(200):
        fixed = [draw.random() < 0.5 for _ in range(40)]
        ended += ends([result(fixed + [draw.random() < 0.5 for _ in range(60)]) for _ in range(6)])
    return f"{'ended' if fall else 'went on'}; {ended / 200:.1%} of the orders ended", fall and ended <= 10


@check(
    18,
    "has_boxed at 80% and a rewarded wrong answer in a preset with pure exact match (numina_grpo): what the rules say",
    "format, reward_hacking (a bug)",
)
def rules_of_exact_match() -> Result:
    from pathlib import Path

    from nmoe.config.commands import RLConfig
    from nmoe.config.loader import load_run
    from nmoe.monitor.rules import monitor_of

    monitor = monitor_of(load_run(Path("numina_grpo"), RLConfig), 0, Path())
    row = {"reward_mean": 0.4, "advantage_std": 0.5, "correctness": 0.4, "format_ok": 0.95, "has_boxed": 0.8}
    alerts = [
        one
        for _ in range(6)
        for one in monitor.observe({**row, "high_reward_but_wrong": 0.01, "rewarded_but_wrong": 0.01})
    ]
    said = {alert.rule: "bug" in alert.message for alert in alerts}
    shown = ", ".join(f"{name}{' (a bug)' if bug else ''}" for name, bug in sorted(said.items()))
    return shown or "nothing", said == {"format": False, "reward_hacking": True}


@check(
    18,
    'rewards that are all alike under [monitor] first_steps = "stop"',
    "ended at step 10, where reward_stuck fires",
)
def first_steps_that_stop() -> Result:
    from pathlib import Path

    import nmoe
    from nmoe.errors import RunStoppedError

    def constant(completions: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    directory = tempfile.mkdtemp()
    try:
        nmoe.train_rl(
            {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
            env=[{"prompt": "Sing."}, {"prompt": "Hum."}],
            rewards=[constant],
            config={
                "run": {"steps": 12, "name": "first", "directory": directory, "threads": 1},
                "batch": {"prompts_per_step": 2, "group_size": 4},
                "sampling.max_new_tokens": 4,
                "monitor": {"first_steps": "stop", "truncation": {"level": "off"}},
            },
        )
    except RunStoppedError as error:
        taken = len((Path(directory) / "first" / "metrics.jsonl").read_text().splitlines())
        return f"ended at step {taken}", taken == 10 and "reward_stuck" in str(error)
    return "went on", False


@check(19, "coverage of a held-out loss's interval on 2, 10 and 50 sequences", "none on 2, 93% or more on 10 and 50")
def held_out_loss_covers() -> Result:
    from nmoe.recipes.sequence_losses import SequenceLosses, loss_result

    shown, holds = [], True
    for sequences in (2, 10, 50):
        rng, printed, covered = random.Random(0), 0, 0
        for _ in range(2000):
            counts = [rng.randint(20, 60) for _ in range(sequences)]
            losses = SequenceLosses(
                [str(place) for place in range(sequences)],
                [count * rng.gammavariate(8, 2 / 8) for count in counts],
                counts,
            )
            result = loss_result("held out", losses.mean, [(1.0, losses)])
            printed += "low" in result
            covered += "low" in result and result["low"] <= 2 <= result["high"]
        shown.append(f"{covered / printed:.1%} on {sequences}" if printed else f"none on {sequences}")
        holds = holds and (covered / printed >= 0.93 if printed else sequences == 2)
    return ", ".join(shown), holds


@check(19, "ten problems without a change", "they bound it to 20 to 35 points")
def unchanged_problems_bound_a_change() -> Result:
    from nmoe.statistics import paired_difference

    interval = paired_difference([1.0] * 10, [1.0] * 10).interval
    return f"[{interval.low:+.1%}, {interval.high:+.1%}]", interval.low < -0.2 < 0.2 < interval.high < 0.35


@check(19, "p-value of [.1, .2, .3] against [.4, .5, .6]", "0.25")
def signs_do_not_need_equal_floats() -> Result:
    from nmoe.statistics import paired_p_value

    found = paired_p_value([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    return f"{found:.3g}", abs(found - 0.25) < 1e-9


@check(19, "coverage of a verifier's accuracy of 98% on 10, 50 and 400 solutions of 4 steps", "93% or more")
def verifier_rate_covers() -> Result:
    from nmoe.verifier.judge import rate

    shown = {}
    for solutions in (10, 50, 400):
        rng, covered = random.Random(0), 0
        for _ in range(1000):
            share = [rng.betavariate(0.49, 0.01) for _ in range(solutions)]
            hits = [rng.random() < share[one] for one in range(solutions) for _ in range(4)]
            interval = rate(hits, [one for one in range(solutions) for _ in range(4)])[1]
            covered += interval.low <= 0.98 <= interval.high
        shown[solutions] = covered / 1000
    return ", ".join(f"{share:.1%} on {count}" for count, share in shown.items()), min(shown.values()) >= 0.93


@check(19, "`nmoe runs compare` of two seeds each whose correctness is 0.1, 0.9 and 0.7, 0.8", "bounds from -1 to 1")
def difference_of_shares_stays_in_range() -> Result:
    from nmoe.runs.comparison import compare_runs
    from nmoe.runs.directory import RunDirectory

    place = Path(tempfile.mkdtemp())
    for name, values in (("a", (0.1, 0.9)), ("b", (0.7, 0.8))):
        for seed, value in enumerate(values):
            config = f'[run]\nname = "{name}"\nsteps = 1\nseed = {seed + 10 * (name == "b")}\n'
            provenance = {"started_utc": "2026-01-02T03:04:05Z", "argv": ["nmoe", "rl", "train", "my.toml"]}
            with RunDirectory.create(place / f"{name}{seed}", config, provenance, resume=False) as run:
                run.ledger.metrics(1, {"correctness": value})
    (line,) = [one for one in compare_runs(f"{place}/a*", f"{place}/b*") if one.startswith("  correctness")]
    low, high = (float(part.strip("[,]")) for part in line.split()[4:6])
    return f"[{low:+.4g}, {high:+.4g}]", -1 <= low <= high <= 1


@check(20, "200 questions under two system messages: held-out records whose question is trained on", "0 of 40")
def a_system_message_makes_no_other_question() -> Result:
    from nmoe.data.held_out import held_out, prompt_of
    from nmoe.data.records import PromptCompletion
    from nmoe.text.conversation import ChatMessage

    records = [
        PromptCompletion(
            f"{system}{number}",
            (ChatMessage("system", system), ChatMessage("user", f"What is {number} + 1?")),
            (ChatMessage("assistant", str(number + 1)),),
        )
        for system in ("Be brief.", "Think first.")
        for number in range(200)
    ]
    drawn = held_out([prompt_of(record) for record in records], 0.1, 0)
    trained = {one.prompt[1].content for place, one in enumerate(records) if place not in drawn}
    leaked = sum(records[place].prompt[1].content in trained for place in drawn)
    return f"{leaked} of {len(drawn)}", leaked == 0


@check(
    20, "`nmoe rl train` with three training problems among those of an [[eval]]", "refused, with the number and one"
)
def evaluation_on_training_problems_is_refused() -> Result:
    import json

    from nmoe.config.commands import RLConfig
    from nmoe.config.loader import load_run_with
    from nmoe.errors import UserError
    from nmoe.preflight.preflight import refuse_to_start
    from nmoe.text.tokenizer import Tokenizer

    def pool(name: str, numbers: range) -> dict[str, object]:
        rows = [json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in numbers]
        Path(f"{name}.jsonl").write_text("".join(rows))
        source = {"type": "jsonl", "path": f"{name}.jsonl", "task_type": "math"}
        return {"env_id": name, "format": "boxed", "task_pool": source}

    Tokenizer.train((), 264).save(Path("tokenizer"))
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
    tables = {
        "run": {"steps": 4},
        "model": {"tokenizer": "tokenizer", "shape": shape | {"context_tokens": 4096}},
        "environment": pool("training", range(10)),
        "eval": [{"environment": pool("held_out", range(7, 17))}],
    }
    try:
        refuse_to_start(load_run_with(None, RLConfig, tables, "test", "run"))
    except UserError as error:
        said = str(error)
        return said[:140], "3 of 10 problems" in said and "what is" in said
    return "it begins", False


@check(
    21,
    "a labelled solution whose steps hold line breaks: trained and judged places",
    "the same places, the same tokens",
)
def steps_are_split_in_one_way() -> Result:
    import json

    from nmoe.data.prm import read_labelled, split_steps
    from nmoe.text.tokenizer import Tokenizer
    from nmoe.types import Message
    from nmoe.verifier.form import DiscriminativeForm

    steps = ["4+7=11.\nSo far 11.", "11+2=13.\n\n# Answer\n\n13"]
    Path("step.jsonl").write_text(json.dumps({"prompt": "Sum 4+7+2.", "completions": steps, "labels": [True, True]}))
    one = read_labelled("step.jsonl", "train").solutions[0]
    form = DiscriminativeForm(Tokenizer.train((), 264), "step")
    (shown,) = form.training([Message("user", one.problem)], one.steps, one.labels)
    (asked,) = form.question([Message("user", one.problem)], split_steps("\n".join(steps)), 10**6)
    same = shown.scored == asked.scored and shown.inputs[: len(asked.inputs)] == asked.inputs
    return f"trained at {shown.scored}, judged at {asked.scored}", same


_MUTANTS = (
    (
        "nmoe/engine/native/scheduler.py",
        "new_keys = not sequence.started or sequence.versions[0] == version",
        "new_keys = True",
        "tests/engine/test_llm_engine.py",
    ),
    ("nmoe/grading/math/forms.py", r', r"\ne"}' + "\n", "}\n", "tests/grading/test_equivalence.py"),
    (
        "nmoe/learner/routing.py",
        "max(self.largest_flip_gap, other.largest_flip_gap)",
        "min(self.largest_flip_gap, other.largest_flip_gap)",
        "tests/learner/test_routing.py",
    ),
)


@check(
    22, "three mutants: keys of a preempted sequence, `\\ne` as a relation, the largest flip gap over ranks", "3 killed"
)
def tests_kill_three_mutants() -> Result:
    import shutil
    import subprocess
    import sys

    import nmoe

    tree, killed = Path(nmoe.__file__).parents[1], 0
    for part in ("nmoe", "tests"):
        shutil.copytree(tree / part, part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(tree / "pyproject.toml", ".")
    for file, code, mistake, tests in _MUTANTS:
        text = Path(file).read_text()
        assert code in text, f"{file} has changed"
        Path(file).write_text(text.replace(code, mistake, 1))
        # The copy comes before an installed nmoe.
        run = f"import sys; sys.path.insert(0, '.'); import pytest; sys.exit(pytest.main(['-q', '-x', {tests!r}]))"
        ended = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
        assert ended.returncode in (0, 1), ended.stdout[-200:]
        killed += ended.returncode == 1
        Path(file).write_text(text)
    return f"{killed} killed", killed == len(_MUTANTS)
