"""Asynchronous runs: engine servers sample beside the trainer, and no group is lost, trained on twice or too old."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parallel.forked_ranks import on_ranks
from recipes.interrupted_runs import interrupted_at

from nmoe.errors import UserError
from nmoe.rl.asynchronous import AsyncRollouts
from nmoe.rl.replay_run import replay_run
from nmoe.rollout.collector import Stream
from nmoe.rollout.guards import Guards, Overdue
from nmoe.rollout.journal import read_journal
from nmoe.runs.ledger import read_lines, read_metrics

pytestmark = pytest.mark.usefixtures("forked_servers")
Reinforce = Callable[..., Path]
SERVERS = ("--engine.kind=server", "--engine.servers=2", "--model.numerics=exact")
CURRICULUM = """
[environment.curriculum]
window_steps = 1
[[environment.curriculum.stages]]
name = "format"
weights = { format = 1.0 }
gate = { metric = "format_ok", at_least = 0.05 }
[[environment.curriculum.stages]]
name = "correctness"
weights = { correctness = 1.0 }
"""
SMALL = ("--run.steps=6", "--batch.prompts_per_step=4", "--batch.group_size=4", *SERVERS)


def test_a_step_trains_on_groups_that_were_sampled_beside_the_one_before(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, "--async.max_staleness=1")
    rows = read_metrics(run)
    assert len(rows) == 6
    for row in rows:
        assert 0 <= row["staleness_mean"] <= row["staleness_max"] <= 1
        assert 0 <= row["staleness_p90"] <= row["staleness_max"]
        assert row["tokens_sampled"] == row["tokens_trained"] + row["tokens_void"] + row["tokens_in_flight"]
        assert row["groups_running"] + row["groups_ready"] <= 8
        assert 0 <= row["engine_idle_share"] <= 1
        assert row["trainer_wait_s"] == row["time_rollout_s"] < row["time_step_s"]
        assert (
            row["canary_abs_max"] == row.get("mismatch_abs_max", 0.0) == row.get("mismatch_mixed_abs_max", 0.0) == 0.0
        )
    assert max(row["staleness_max"] for row in rows) == 1, "something was sampled beside the trainer"
    assert rows[-1]["groups_running"] == rows[-1]["groups_ready"] == 0, "no group is sampled for a step after the last"
    assert 'correction = "tis"' in (run / "config.toml").read_text()
    trained = [one for step in range(1, 7) for one in read_lines(run / f"samples/step_{step:06}.jsonl")]
    assert len({one["seed"] for one in trained}) == len(trained) // 4


def test_an_interrupted_run_issues_outstanding_groups_again(reinforce: Reinforce) -> None:
    """With evaluations beside the stream, and overdue groups dropped."""
    more = (
        *SMALL,
        "--async.max_staleness=2",
        "--async.overdue=drop",
        "--async.in_flight=drain",
        "--batch.favour_unsolved=true",
        "--eval.0.every_steps=3",
        "--eval.0.problems=8",
        "--checkpoint.every_steps=2",
    )
    with interrupted_at(3):
        reinforce(*more)
    run = reinforce(*more, "--run.resume=true")
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["tokens_sampled"] == row["tokens_trained"] + row["tokens_void"] + row["tokens_in_flight"]
        assert row["staleness_max"] <= 2
    recorded = read_journal(run)
    assert recorded.begins == 2
    trained = [position for event in recorded.events if event["event"] == "train" for position in event["positions"]]
    void = [event["position"] for event in recorded.events if event["event"] == "end"]
    ended = trained + void
    assert len(set(ended)) == len(ended), "no group is trained on twice, or ends twice"
    assert sorted(ended) == list(range(len(ended))), "no group is lost, and none is left"
    assert len(list((run / "eval").glob("*.json"))) == 3


def test_a_stage_is_trained_and_judged_by_its_own_groups(reinforce: Reinforce) -> None:
    """A replay voids the same groups."""
    slow = ("--engine.servers=1", "--engine.max_sequences=4")
    run = reinforce(*SMALL, *slow, "--run.steps=3", "--async.max_staleness=4", text=CURRICULUM)
    rows = read_metrics(run)
    assert [row["curriculum_stage"] for row in rows] == [0, 1, 1]
    assert [row["weight/format"] for row in rows] == [1, 0, 0]
    assert rows[0]["reward_mean"] == rows[0]["format_ok"]
    assert [row["reward_mean"] == row["correctness"] for row in rows[1:]] == [True] * 2
    assert rows[0]["void_curriculum"] == 0
    events = read_journal(run).events
    void = [event["position"] for event in events if event["event"] == "end" and event["reason"] == "curriculum"]
    assert len(void) == sum(row["void_curriculum"] for row in rows)
    assert 8 <= len(void) <= 12, "all groups under way, of which at least K steps' were issued before the stage opened"
    said: list[str] = []
    replay_run(run, None, said.append)
    assert said[-2:] == ["metrics of 3 steps: the same", "all the same"]


BESIDE = (*SMALL, "--run.steps=3", "--engine.servers=1", "--async.max_staleness=1")


def learned_beside(rows: Sequence[Mapping[str, float]]) -> None:
    """Checks that a run with K = 1 trained on older samples too, by the right probabilities, and lost no token."""
    assert len(rows) == 3
    assert max(row["staleness_max"] for row in rows) == 1
    for row in rows:
        assert row["tokens_sampled"] == row["tokens_trained"] + row["tokens_void"] + row["tokens_in_flight"]
        assert (row["canary_abs_max"], row.get("mismatch_abs_max", 0.0)) == (0.0, 0.0)


def test_a_critic_learns_from_samples_that_came_beside(reinforce: Reinforce) -> None:
    """While it is warmed up alone, the samples are as old as the weights."""
    critic = ("--algorithm.advantage=gae", "--critic.learning_rate=1e-3", "--critic.warmup_steps=1")
    rows = read_metrics(reinforce(*BESIDE, *critic))
    learned_beside(rows)
    assert rows[0]["staleness_max"] == rows[1]["staleness_max"] == 0, "the first step moved the critic alone"
    assert all(row["critic_grad_norm"] > 0 for row in rows)


def test_a_teacher_scores_samples_that_came_beside(reinforce: Reinforce, trained: Path) -> None:
    teacher = f"--distillation.teacher={trained}"
    rows = read_metrics(reinforce(*BESIDE, teacher))
    learned_beside(rows)
    assert all(abs(row["teacher_kl"]) > 1e-4 for row in rows), "of the policy as its own teacher it is below 1e-6"


def test_two_ranks_train_beside_the_engines(workshop: Path, base: Path, tmp_path: Path) -> None:
    config, jobs = workshop / "rl.toml", tmp_path / "jobs.json"
    more = [f"--run.directory={tmp_path}", *BESIDE]
    jobs.write_text(json.dumps([["rl", str(config), more]]))
    on_ranks(2, "recipes_on_ranks.py", str(jobs))
    learned_beside(read_metrics(tmp_path / "rl"))


@pytest.mark.parametrize(("overdue", "version"), [("drop", 1), ("wait", 0)])
def test_the_error_of_a_group_is_raised_by_the_next_step(overdue: Overdue, version: int) -> None:
    """Also where the group is overdue, and where enough others are ready."""

    async def play(ticket: Any) -> Any:
        raise RuntimeError("the grader's own error")

    async def step() -> None:
        stream, guards = Stream(play, ()), Guards(1, 1, overdue)
        await stream.opened()
        for position in (0, 1):
            guards.issue(position, 0)
        guards.ready(1, 0)
        stream.start(SimpleNamespace(position=0))  # type: ignore[arg-type]
        sampler = object.__new__(AsyncRollouts)
        flow = asyncio.create_task(sampler._receive(stream))
        collector = SimpleNamespace(stream=lambda: stream)
        vars(sampler).update(
            _learner=SimpleNamespace(version=version), _guards=guards, _flow=flow, _collector=collector
        )
        await asyncio.wait([flow])
        with pytest.raises(RuntimeError, match="the grader's own error"):
            await sampler._next(version + 1)
        await stream.close()

    asyncio.run(step())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (),
            'async.max_staleness=1: engine.kind = "native" samples on the thread that trains; set engine.kind = "server"',
        ),
        (
            ("--engine.kind=server", "--engine.publish_every=2", "--algorithm.correction=tis"),
            "publish_every=2: samples have one way to be older than the learner: leave it out, and raise async.max_staleness",
        ),
        (("--engine.kind=server", "--engine.weights=group"), 'weights=group: "group" cannot send the last publication'),
        (
            ("--async.max_staleness=0", "--async.overdue=drop"),
            "async.overdue=drop: nothing is sampled beside the trainer",
        ),
    ],
)
def test_an_asynchronous_run_that_cannot_be_is_refused(
    reinforce: Reinforce, given: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        reinforce("--async.max_staleness=1", *given)
