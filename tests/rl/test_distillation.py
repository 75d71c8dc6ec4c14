"""On-policy distillation: what a teacher says of a batch, a student that moves to its teacher, and teachers that are refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import answer
from tiny_models import tiny_model

from nmoe.config.tables.algorithm import DistillationSection
from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.launcher import LocalLauncher
from nmoe.engine.remote.process import addresses
from nmoe.engine.remote.served import served_engine
from nmoe.errors import InfrastructureError, UserError
from nmoe.learner.passes import batch_logprobs
from nmoe.model.transformer import Transformer
from nmoe.rl.engines import publish_checkpoint
from nmoe.rl.experience import policy_batch
from nmoe.rl.teacher import Teacher
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

__all__ = ["tiny_model"]

pytestmark = pytest.mark.usefixtures("forked_servers")
Reinforce = Callable[..., Path]

SMALL = ("--run.steps=3", "--batch.prompts_per_step=6", "--batch.group_size=2", "--checkpoint.every_steps=9")


class Recited:
    """An engine whose log-probability of a token is a hundredth of its id, negative; it remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], float]] = []

    def run(self, coroutine: Coroutine[Any, Any, list[list[float]]]) -> list[list[float]]:
        return asyncio.run(coroutine)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        self.asked.append((tuple(token_ids), temperature))
        return [-id_ / 100 for id_ in token_ids[1:]]


TRAJECTORIES = [
    answer(1.0, (7, 2), (-0.5, -0.25)),
    answer(0.0, (9,), (-1.0,)),
    answer(1.0, (30,), (-2.0,), prompt=(8,)),
]


def test_advantages_by_hand() -> None:
    batch = policy_batch(TRAJECTORIES, torch.tensor([3.0, -3.0, 1.0]), "token", 8)
    engine = Recited()
    advised, advantages, metrics = Teacher(DistillationSection(teacher="t", coef=2.0), engine, 0.7).advise(batch)
    assert engine.asked == [((5, 6, 7, 2), 0.7), ((5, 6, 9), 0.7), ((8, 30), 0.7)]
    # log pi - log teacher of tokens 7, 2, 9, 30
    differences = [-0.5 + 0.07, -0.25 + 0.02, -1.0 + 0.09, -2.0 + 0.30]
    assert advantages.tolist() == pytest.approx([-2 * d for d in differences], rel=1e-6)
    assert advised.advantages_T is not None
    assert advised.advantages_T[batch.scored_T].tolist() == advantages.tolist()
    assert metrics == {"teacher_kl": pytest.approx(sum(differences) / 4, rel=1e-6)}
    with_rewards = Teacher(DistillationSection(teacher="t", coef=2.0, reward_coef=0.5), engine, 0.7).advise(batch)[1]
    shares = [1.5, 1.5, -1.5, 0.5]
    assert with_rewards.tolist() == pytest.approx(
        [s - 2 * d for s, d in zip(shares, differences, strict=True)], rel=1e-6
    )
    before = replace(batch, old_logprobs_T=torch.full((batch.tokens,), -0.1))
    old = Teacher(DistillationSection(teacher="t"), engine, 1.0).advise(before)[1]
    assert old.tolist() == pytest.approx([0.1 - 0.07, 0.1 - 0.02, 0.1 - 0.09, 0.1 - 0.30], abs=1e-6)


def test_an_engine_s_scores_are_the_teacher_s_log_probabilities(tiny_model: Callable[..., Transformer]) -> None:
    model = tiny_model(seed=3)
    batch = policy_batch(TRAJECTORIES, torch.zeros(3), "token", 8)
    advantages = Teacher(DistillationSection(teacher="t"), NativeEngine(model, 4), 0.7).advise(batch)[1]
    assert batch.behaviour_logprobs_T is not None
    expected = batch_logprobs(model, batch.without_routes(), 1000, 0.7) - batch.behaviour_logprobs_T[batch.scored_T]
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-4)


def test_a_student_moves_to_its_teacher(reinforce: Reinforce, trained: Path) -> None:
    rows = read_metrics(reinforce("--run.steps=20", f"--distillation.teacher={trained}"))
    first, last = rows[0], rows[-1]
    assert first["teacher_kl"] > 0.05
    assert last["teacher_kl"] < first["teacher_kl"] / 3
    # No reward was looked at: what the teacher had learned from them came along.
    assert last["correctness"] > first["correctness"] + 0.2
    assert all((row["groups"], row["groups_zero_variance"], row["refills"]) == (16, 0, 0) for row in rows)


def test_the_base_is_no_teacher_to_itself(reinforce: Reinforce, base: Path) -> None:
    (row,) = read_metrics(reinforce(*SMALL, "--run.steps=1", f"--distillation.teacher={base}"))
    assert row["teacher_kl"] == pytest.approx(0.0, abs=1e-6)
    assert max(abs(row["advantage_min"]), abs(row["advantage_max"])) < 1e-4
    assert row["grad_norm"] < 1e-4


def test_teachers_that_do_not_fit_are_refused(base: Path, reinforce: Reinforce, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(resolve_checkpoint(base), other)
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(described | {"context_tokens": 32}))
    with pytest.raises(UserError, match="teacher's context is 32 tokens and the policy's 64"):
        reinforce(*SMALL, f"--distillation.teacher={other}")
    Tokenizer.train(["another text, of other words"] * 10, 300).save(other)
    with pytest.raises(
        UserError, match=r"other: the teacher in distillation\.teacher has other tokens than the policy"
    ):
        reinforce(*SMALL, f"--distillation.teacher={other}")
    with pytest.raises(UserError, match="nowhere"):
        reinforce(*SMALL, f"--distillation.teacher={tmp_path}/nowhere")
    assert not (tmp_path / "rl").exists()


def test_a_teacher_on_servers_is_the_teacher_of_this_process(
    reinforce: Reinforce, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMOE_ENGINE_KEY", "a key")
    exact = (*SMALL, "--model.numerics=exact", f"--distillation.teacher={trained}", "--distillation.reward_coef=0.5")
    here = read_metrics(reinforce(*exact, "--run.name=here"))
    section = RolloutEngineSection(kind="server", servers=2)
    servers = addresses(
        section, resolve_checkpoint(trained), "exact", "float32", True, "a key", LocalLauncher(tmp_path / "logs")
    )
    try:
        urls = [server.start() for server in servers]
        there = read_metrics(reinforce(*exact, "--run.name=there", f"--distillation.urls={urls}"))
        assert [deterministic(row) for row in there] == [deterministic(row) for row in here]
        assert here[0]["teacher_kl"] > 0.05
        with served_engine(urls[:1], resolve_checkpoint(trained), print) as fleet:
            assert len(fleet.run(fleet.score([1, 2, 3]))) == 2
            publish_checkpoint(tmp_path / "there", urls, print)
            with pytest.raises(
                InfrastructureError, match=r"version 1, context 64; .* began with nmoe, model .*, version 0"
            ):
                fleet.run(fleet.score([1, 2, 3]))
    finally:
        for server in servers:
            server.stop()
    with pytest.raises(
        UserError, match=r"distillation\.urls: .*ConnectionRefusedError.* start the server, or name another"
    ):
        reinforce(*exact, "--run.name=down", f"--distillation.urls={urls}")
    with pytest.raises(UserError, match=r"distillation\.urls.* names a server twice"):
        reinforce(*exact, "--run.name=down", f"--distillation.urls={urls * 2}")
    assert not (tmp_path / "down").exists()


def deterministic(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if "time_" not in name and name != "tokens_per_second"}
