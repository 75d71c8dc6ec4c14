"""`nmoe simulate`: sizes come from the configuration, times from a run, and the advice from the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nmoe.cluster.simulate.flight import Flight
from nmoe.cluster.simulate.report import advice, lines, measured, rows, setting_of, with_faults
from nmoe.cluster.simulate.setting import Setting
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.errors import UserError

# Long-tailed lengths on one engine that has a slot for each sample of a step.
LONG = Setting(
    tickets=64 * 60,
    groups=64,
    samples=8,
    slots=512,
    mean_tokens=2000,
    most_tokens=16384,
    learn_s=60,
    sync_s=3,
    token_s=0.02,
    prefill_s=0,
)


def test_sizes_are_the_configurations() -> None:
    config = load_run(
        Path("speedrun"),
        RLConfig,
        [
            "--engine.kind=server",
            "--engine.servers=3",
            "--engine.max_sequences=17",
            "--async.max_staleness=2",
            "--async.overdue=drop",
            "--async.in_flight=drain",
            "--batch.prompts_per_step=5",
            "--batch.group_size=3",
            "--sampling.max_new_tokens=40",
            "--checkpoint.every_steps=7",
            "--run.seed=11",
        ],
    )
    assert setting_of(config) == Setting(
        tickets=400,
        seed=11,
        staleness=2,
        groups=5,
        samples=3,
        overdue="drop",
        in_flight="drain",
        engines=3,
        slots=17,
        mean_tokens=10.0,
        most_tokens=40,
        checkpoint_every=7,
    )


def test_small_staleness_waits_for_long_samples_and_dropping_prefers_short_ones() -> None:
    """The figures of another simulation of this regime: x2.0, x3.0 and x4.9 with wait at K = 1, 2, 4, and a bias of lengths of -11%
    and -12.5% with drop at K = 1, 2."""
    found = {(row.setting.staleness, row.setting.overdue): row for row in rows(LONG)}
    assert [found[k, "wait"].gain for k in (1, 2, 4)] == pytest.approx([2.0, 3.0, 4.9], rel=0.05)
    assert [found[k, "drop"].length_bias for k in (1, 2)] == pytest.approx([-0.12, -0.13], abs=0.02)
    assert all(abs(found[k, "wait"].length_bias) < 1e-9 for k in (1, 2, 4, 8))
    assert [max(found[k, "wait"].account.ages) for k in (1, 2, 4)] == [1, 2, 4]
    said = advice(list(found.values()))
    assert said.startswith('advice: async.max_staleness = 8 with overdue = "wait" is 5.9 times as fast')
    assert "what limits it is the trainer" in said
    assert 'overdue = "drop" would train on samples that are up to 14% shorter' in said


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (replace(LONG, token_s=1e-4), "leave async.max_staleness at 0"),
        (replace(LONG, slots=64), "the engines: add some"),
        (replace(LONG, sync_s=60.0), "publications take"),
    ],
)
def test_the_advice_names_what_limits_the_run(setting: Setting, words: str) -> None:
    assert words in advice(rows(setting))


def test_times_are_taken_from_a_run(tmp_path: Path) -> None:
    steps = [
        {
            "step": step,
            "time_learn_s": 4.0,
            "time_sync_s": 0.5,
            "time_rollout_s": 30.0 if step > 1 else 300.0,
            "response_length_mean": 200.0,
            "groups": 20,
            "groups_zero_variance": 5,
        }
        for step in (1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    taken = measured(tmp_path, replace(LONG, seed=5))
    assert (taken.learn_s, taken.sync_s, taken.mean_tokens, taken.equal) == (4.0, 0.5, 200.0, 0.25)
    # A simulated step without refills samples for as long as the run's did.
    alone = rows(replace(taken, equal=0.0, tickets=10 * 64))[0].account
    assert alone.trainer_wait_s / alone.steps == pytest.approx(30.0, rel=0.01)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(steps[0]) + "\n")
    with pytest.raises(UserError, match="fewer than two steps"):
        measured(tmp_path, LONG)


def test_faults_cost_time_and_too_few_groups_are_refused() -> None:
    engines = replace(LONG, engines=4, slots=128, tickets=64 * 10)
    faulty = with_faults(engines, 6.0)
    assert faulty.faults == with_faults(engines, 6.0).faults
    assert len(faulty.faults) > 10
    slow, quick = Flight(faulty).run(), Flight(engines).run()
    assert slow.seconds > quick.seconds
    assert slow.restarts > 0
    with pytest.raises(UserError, match="raise --tickets"):
        list(lines(replace(LONG, tickets=63)))
