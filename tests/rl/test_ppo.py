"""PPO on a few steps of a tiny model: what its critic is, what it refuses, and that a resumed run goes on number for number."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nmoe.envs.grade import Grader
from nmoe.errors import UserError
from nmoe.model.checkpoint import load_model
from nmoe.model.head import Head
from nmoe.recipes.run_loop import Step
from nmoe.rl.train import PolicyGradient
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.types import Grade, Problem, Turn

Reinforce = Callable[..., Path]

SMALL = ("--run.steps=4", "--batch.prompts_per_step=6", "--batch.group_size=2", "--checkpoint.every_steps=9")
TIMES = ("time_", "tokens_per_second")


def numbers(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(run)]


def contents(run: Path) -> dict[str, bytes]:
    """Every file of the last checkpoint."""
    directory = resolve_checkpoint(run)
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}


CRITIC = ("--algorithm.advantage=gae", "--critic.learning_rate=1e-3", "--critic.warmup_steps=1")
SHARED = ("--algorithm.advantage=gae", "--critic.shared=true", "--critic.learning_rate=1e-3")


@pytest.mark.parametrize(
    ("keys", "inside"),
    [
        (
            (*CRITIC, "--batch.updates_per_step=2", "--batch.passes_per_step=2"),
            {"critic/model.safetensors", "critic/head.json"},
        ),
        ((*SHARED, "--algorithm.kl_coef=0.1", "--algorithm.kl_in=reward"), {"head.safetensors"}),
        (
            (*SHARED, "--lora.rank=4", "--optimizer.learning_rate=1e-2"),
            {"head.safetensors", "adapter_model.safetensors"},
        ),
        (
            ("--algorithm.kl_coef=0.1", "--algorithm.reference_every_steps=1", "--algorithm.correction=tis"),
            {"reference/model.safetensors"},
        ),
    ],
    ids=["critic of its own", "shared critic", "shared critic of an adapter", "renewed reference"],
)
def test_an_interrupted_run_goes_on_number_for_number(
    reinforce: Reinforce, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], inside: set[str]
) -> None:
    whole = reinforce(*SMALL, *keys, "--run.name=whole")
    step_of = PolicyGradient.step

    def stop_after_two(self: PolicyGradient, step: int) -> Step:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return step_of(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(PolicyGradient, "step", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            reinforce(*SMALL, *keys, "--run.name=broken")
    broken = reinforce(*SMALL, *keys, "--run.name=broken", "--run.resume=true")
    assert len(numbers(whole)) == 4
    assert numbers(broken) == numbers(whole)
    expected, found = contents(whole), contents(broken)
    assert inside <= found.keys()
    assert found == expected


def test_the_policy_moves_once_its_critic_is_warm(reinforce: Reinforce) -> None:
    rows = read_metrics(reinforce(*SMALL, *CRITIC))
    assert ["grad_norm" in row for row in rows] == [False, True, True, True]
    assert all(row["critic_grad_norm"] > 0 and row["skipped"] == 0 for row in rows)
    first = rows[0]
    assert (first["value_mean"], first["explained_variance"]) == (0, 0)
    # lambda below 1 and a critic that says 0: the return of the last token is the reward, of those before less.
    assert 0 < first["return_mean"] < first["reward_mean"]
    # Groups all alike teach too: nothing is dropped.
    assert all((row["groups"], row["groups_zero_variance"], row["refills"]) == (6, 0, 0) for row in rows)


def test_a_verifier_of_steps_makes_groups_alike_worth_training_on(
    reinforce: Reinforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes are all 0; of every answer the last step is judged, by how long the answer is."""
    grade = Grader.grade

    async def with_steps(self: Grader, problem: Problem, turns: Sequence[Turn], *rest: Any, **more: Any) -> Grade:
        tokens = len(turns[0].sample.token_ids)
        judged = await grade(self, problem, turns, *rest, **more)
        return replace(judged, score=0.0, step_rewards=((0, 0.5), (tokens - 1, tokens / 20)))

    monkeypatch.setattr(Grader, "grade", with_steps)
    alike = read_metrics(reinforce(*SMALL, "--run.name=alike", "--run.steps=1", "--algorithm.step_reward_coef=0"))
    assert (alike[0]["skipped"], alike[0]["groups_zero_variance"]) == (1, alike[0]["groups"])
    (row,) = read_metrics(reinforce(*SMALL, "--run.name=grpo", "--run.steps=1"))
    assert (row["reward_max"], row["skipped"], row["groups_zero_variance"]) == (0, 0, 0)
    assert row["advantage_std"] > 0.1
    (row,) = read_metrics(reinforce(*SMALL, "--run.name=ppo", "--run.steps=1", *SHARED, "--critic.trace_decay=1"))
    # The first token is worth all that comes, those after it the last step alone.
    assert row["return_mean"] == pytest.approx(
        row["response_length_mean"] / 20 + 0.5 / row["response_length_mean"], abs=0.03
    )


def test_solve_rates_filter_and_oversampling_leaves_a_surplus(reinforce: Reinforce) -> None:
    keys = (
        "--batch.group_size=4",
        "--batch.oversampling=2.5",
        "--batch.max_refills=2",
        "--batch.solve_rate=[0.2, 0.6]",
    )
    for row in read_metrics(reinforce(*SMALL, "--run.steps=3", *keys)):
        left = row["groups"] - row["groups_zero_variance"] - row["groups_outside_solve_rate"] - row["groups_surplus"]
        assert left == 6 or row["refills"] == 2
        assert row["groups_outside_solve_rate"] > 0
        assert row["groups"] >= 15
    assert any(row["groups_surplus"] for row in read_metrics(reinforce(*SMALL, "--run.name=two", *keys)))


def test_a_solve_rate_that_no_group_has_is_told_of(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, "--run.steps=1", "--batch.solve_rate=[0.99, 0.999]")
    (alert,) = read_lines(run / "alerts.jsonl")
    assert "rewards all alike or lies outside batch.solve_rate: no optimizer step was taken" in alert["message"]


def test_a_critic_that_does_not_fit_is_refused(base: Path, reinforce: Reinforce, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(resolve_checkpoint(base), other)
    Head(32, 1, "value").save(other)
    with pytest.raises(UserError, match=r"head\.json: a head for a model of width 32, and this model's width is 64"):
        reinforce(*SMALL, *CRITIC, f"--critic.path={other}")
    Head(64, 1, "reward").save(other)
    with pytest.raises(UserError, match=r"head\.json: a head of kind 'reward', where one of kind 'value' is wanted"):
        reinforce(*SMALL, *CRITIC, f"--critic.path={other}")
    (other / "head.json").unlink()
    described = json.loads((other / "config.json").read_text())
    assert described["context_tokens"] == 64
    (other / "config.json").write_text(json.dumps(described | {"context_tokens": 32}))
    with pytest.raises(UserError, match="critic's context_tokens is 32 and the policy's 64"):
        reinforce(*SMALL, *CRITIC, f"--critic.path={other}")
    assert not (tmp_path / "rl").exists()


def test_a_critic_goes_on_from_that_of_another_run(reinforce: Reinforce) -> None:
    first = reinforce(*SMALL, *CRITIC, "--run.name=first")
    started = reinforce(*SMALL, *CRITIC, "--run.steps=2", f"--critic.path={resolve_checkpoint(first) / 'critic'}")
    assert read_metrics(started)[0]["value_mean"] == pytest.approx(read_metrics(first)[-1]["value_mean"], abs=0.1)
    assert read_metrics(started)[0]["value_mean"] != 0
    assert load_model(resolve_checkpoint(first) / "critic").config == load_model(resolve_checkpoint(first)).config
