"""GRPO over conversations: a task that asks once more after each answer, so that a trajectory has branches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.conversation import AssistantTurn, ConversationTask, Response, State
from nmoe.envs.tasks.numeric import ReverseTask
from nmoe.rl.experience import policy_batch
from nmoe.rl.replay_bundle import replay_command
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import GradingError
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.types import Problem

Reinforce = Callable[..., Path]

SETTINGS = (
    "--run.steps=3",
    "--batch.prompts_per_step=4",
    "--batch.group_size=4",
    "--batch.max_refills=0",
    "--sampling.max_new_tokens=40",
    "--algorithm.aggregation=sequence",
    "--monitor.replay_sample_rate=1.0",
    "--eval.0.every_steps=3",
    "--eval.0.problems=6",
)


class ReverseTwice(ConversationTask, ReverseTask):
    """Asks for the reverse of three other digits after the first answer. Each right answer earns a half."""

    def start(self, problem: Problem) -> State:
        return {"digits": problem.question.removeprefix("Reverse: "), "asked": 1}

    def respond(self, problem: Problem, state: State, said: AssistantTurn, rng: random.Random) -> Response:
        reward = 0.5 if said.answer.strip() == state["digits"][::-1] else 0.0
        digits = "".join(rng.choice("0123456789") for _ in range(3))
        after = {"digits": digits, "asked": state["asked"] + 1}
        return Response(after, f"Reverse: {digits}" if state["asked"] == 1 else None, reward)


@pytest.fixture(autouse=True)
def _twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "reverse", ReverseTwice())


def test_a_run_learns_from_branches_and_its_trajectories_replay(
    reinforce: Reinforce, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = []

    def noted(*arguments: object) -> object:
        batches.append(policy_batch(*arguments))  # type: ignore[arg-type]
        return batches[-1]

    monkeypatch.setattr("nmoe.rl.update.policy_batch", noted)
    directory = reinforce(*SETTINGS)
    rows = read_metrics(directory)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["turns_mean"] > 1.05  # of 16 samples at least one has a second turn
        assert row["branches_mean"] == row["turns_mean"]
        # The learner's log-probabilities of every branch are those of the sampler.
        assert row["mismatch_abs_max"] <= 1e-4
        assert row["grad_norm"] > 0
    for batch in batches:
        assert batch.samples is not None
        assert len(batch.samples) > len(set(batch.samples))
    (results,) = [json.loads(path.read_text())["results"] for path in directory.glob("eval/step_000003.json")]
    assert results[0]["problems"] == 6
    samples = read_lines(directory / "samples/step_000001.jsonl")
    assert any(len(sample["exchanges"]) == 2 for sample in samples)
    first = [
        path for path in directory.glob("replay/step_000001-*") if len(read_bundle(path).trajectory().branches) == 2
    ]
    assert len(first) >= 3
    for path in first[:3]:
        lines = list(replay_command(path, base, None, allow_user_code=False))
        assert lines[-1] == "all the same"
        assert any(line.startswith("exchanges    2 turns that the task answered") for line in lines)
        (logprobs,) = [line for line in lines if line.startswith("logprobs")]
        tokens = sum(read_bundle(path).record["mask"])
        assert logprobs.startswith(f"logprobs     {tokens} tokens, apart by")


def test_a_resumed_run_goes_on_with_the_same_conversations(reinforce: Reinforce) -> None:
    # Turns are sampled with those that are ready then: only exact numerics give a row the same bits beside any others everywhere.
    settings = (*SETTINGS, "--model.numerics=exact")
    whole = reinforce(*settings, "--run.name=whole")
    parts = reinforce(*settings, "--run.name=parts", "--run.steps=1", "--optimizer.schedule_steps=3")
    assert reinforce(*settings, "--run.name=parts", "--run.resume=true", "--optimizer.schedule_steps=3") == parts
    for one, other in zip(read_metrics(whole), read_metrics(parts), strict=True):
        timed = {name for name in one if name.startswith("time_") or name.endswith("per_second")}
        assert {name: one[name] for name in one.keys() - timed} == {name: other[name] for name in one.keys() - timed}
    for step in (1, 2, 3):
        one, other = (read_lines(run / f"samples/step_{step:06}.jsonl") for run in (whole, parts))
        assert [sample["exchanges"] for sample in one] == [sample["exchanges"] for sample in other]
        assert [sample["token_ids"] for sample in one] == [sample["token_ids"] for sample in other]


def test_a_task_that_raises_stops_the_run_with_the_sample_saved(
    reinforce: Reinforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> Response:
        raise RuntimeError("no more digits")

    monkeypatch.setattr(ReverseTwice, "respond", broken)
    with pytest.raises(GradingError, match="answering a sample of problem reverse/") as error:
        reinforce(*SETTINGS, "--eval=[]")
    assert str(error.value.__cause__) == "no more digits"
    (line,) = (tmp_path / "rl/failures.jsonl").read_text().splitlines()
    assert json.loads(line)["failure"] == "grader_error"
    (bundle,) = (tmp_path / "rl/replay").glob("step_000001-*")
    saved, raised = read_bundle(bundle).trajectory(), error.value.trajectory
    assert (saved.token_ids, saved.exchanges, saved.problem) == (raised.token_ids, (), raised.problem)


def test_a_task_that_raises_in_an_evaluation_stops_the_run_with_the_sample_saved(
    reinforce: Reinforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> Response:
        raise RuntimeError("no more digits")

    monkeypatch.setattr(ReverseTwice, "respond", broken)
    with pytest.raises(GradingError) as error:
        reinforce(*SETTINGS)
    (line,) = (tmp_path / "rl/failures.jsonl").read_text().splitlines()
    saved = json.loads(line)
    assert (saved["step"], saved["failure"]) == (0, "grader_error")
    assert (saved["problem"], saved["token_ids"]) == (
        error.value.trajectory.problem.id,
        error.value.trajectory.token_ids,
    )
