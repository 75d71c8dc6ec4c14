"""Runs with rewards of one's own: they are trained on, what they cannot judge is masked, and what is no reward stops the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe.errors import InfrastructureError, UserError
from nmoe.rl.replay_bundle import replay_command
from nmoe.runs.ledger import read_lines, read_metrics

Reinforce = Callable[..., Path]

SMALL = ("--run.steps=3", "--batch.prompts_per_step=4", "--batch.group_size=4", "--batch.max_refills=0")
MODULE = '''
from nmoe.envs.rewards.reward import UnavailableError

def ones(completions, **_):
    """Of the answer's digits, how many are 1."""
    return [float(completion[-1]["content"].count("1")) for completion in completions]

def breaks(completions, trainer_state, **_):
    return [float("nan") if trainer_state.global_step == 1 and place == 2 else 0.0 for place in range(len(completions))]

async def sometimes(prompts, completions, **_):
    if int(prompts[0][-1]["content"][-1]) % 2:
        raise UnavailableError("the service sleeps")
    return await never_late(completions)

async def never_late(completions, **_):
    return [float(len(completion[-1]["content"])) for completion in completions]

async def nobody(completions, **_):
    raise UnavailableError("the service is gone")
'''


def rewards(function: str, weight: float) -> str:
    return f'[[environment.rewards]]\nname = "mine"\ntype = "function"\ncall = "run_rewards:{function}"\nweight = {weight}\n'


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "run_rewards", raising=False)


# documented: nmoe replay --allow-user-code
def test_rewards_are_in_the_score_the_samples_the_metrics_and_the_replays(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, "--monitor.replay_sample_rate=1.0", text=rewards("ones", 0.5))
    for row in read_metrics(run):
        assert row["reward_left_out/mine"] == 0
        assert row["reward_mean"] == pytest.approx(row["correctness"] + 0.5 * row["reward/mine"])
    for step in (1, 2, 3):
        for sample in read_lines(run / f"samples/step_{step:06d}.jsonl"):
            final = (sample["answer"] or "") if sample["failure"] == "ok" else ""
            assert sample["components"]["mine"] == final.count("1")
            assert sample["weights"]["mine"] == 0.5
            assert sample["reward"] == sample["components"]["correctness"] + 0.5 * sample["components"]["mine"]
            assert sample["trainer_state"] == {"global_step": step - 1, "max_steps": 3}
    bundle = next(path for path in sorted((run / "replay").iterdir()) if "-sampled-" in path.name)
    assert "rewards      mine asked again: the same" in list(replay_command(bundle, None, None, allow_user_code=True))


def test_a_value_that_is_no_reward_stops_the_run_with_its_sample(reinforce: Reinforce, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"run_rewards\.py:8, run_rewards:breaks\) returned nan as value 3 of 4"
    ) as caught:
        reinforce(*SMALL, text=rewards("breaks", 1.0))
    assert caught.value.exit_code == 2
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert len(read_metrics(run)) == 1, "nothing was trained on it"
    record = read_lines(run / "failures.jsonl")[-1]
    assert (record["step"], record["index"], record["failure"]) == (2, 2, "grader_error")
    assert "returned nan" in record["reason"]
    assert any(path.name.startswith("step_000002-grader_error-") for path in (run / "replay").iterdir())


def test_groups_that_could_not_be_judged_are_masked_and_counted(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, text=rewards("sometimes", 1.0))
    lost = [record for record in read_lines(run / "failures.jsonl") if record["failure"] == "grader_error"]
    assert lost
    for record in lost:
        assert int(record["question"][-1]) % 2
        assert record["reason"] == "reward 'mine': the service sleeps"
    for row in read_metrics(run):
        of_step = [record for record in lost if record["step"] == row["step"]]
        assert row["grader_error_rate"] == len(of_step) / 16
        assert row["failures/grader_error"] == len(of_step) if of_step else "failures/grader_error" not in row


def test_a_run_whose_rewards_are_all_out_of_reach_stops(reinforce: Reinforce, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="step 1: every sample was lost to the infrastructure"):
        reinforce(*SMALL, text=rewards("nobody", 1.0))
    assert not list(tmp_path.rglob("checkpoints/step_*"))
