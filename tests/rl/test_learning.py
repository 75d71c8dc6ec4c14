"""That reinforcement learning learns, from nothing but the sign of its rewards: the real run, and its two negative controls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.eval.evaluate import evaluate
from nmoe.model.checkpoint import load_model
from nmoe.rl.advantages import DrGrpo
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

Reinforce = Callable[..., Path]

DOCS = Path(__file__).parents[2] / "docs/reference/metrics.md"


@pytest.fixture(scope="module")
def correctness(workshop: Path) -> Callable[[Path], float]:
    """The share of six answers to each held-out problem, sampled at temperature 1, that are right."""

    def correctness(run: Path) -> float:
        directory = resolve_checkpoint(run)
        tokenizer, model = Tokenizer.load(directory), load_model(directory)
        environment = Environment.from_toml(workshop / "reverse.toml", tokenizer).held_out()
        mean, *_ = evaluate(
            NativeEngine(model, 256),
            environment,
            model.config.context_tokens,
            problems=120,
            samples=6,
            temperature=1.0,
            max_new_tokens=20,
            seed=0,
        )
        return mean.value

    return correctness


def test_correctness_rises(base: Path, trained: Path, correctness: Callable[[Path], float]) -> None:
    before = correctness(base)
    assert 0.1 < before < 0.5
    assert correctness(trained) >= before + 0.3


def test_rewards_shuffled_within_the_batch_teach_nothing(
    base: Path, reinforce: Reinforce, correctness: Callable[[Path], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)

    def shuffled(self: DrGrpo, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        return dr_grpo(self, rewards_B[torch.randperm(len(rewards_B), generator=generator)], group_ids_B)

    dr_grpo = DrGrpo.of_samples
    monkeypatch.setattr(DrGrpo, "of_samples", shuffled)
    # Over four seeds of the shuffling the change was -4, -1, 2 and 5 points; rewards in their places give 30 and more.
    assert correctness(reinforce()) <= correctness(base) + 0.12


def test_the_sign_of_the_advantage_flipped_unlearns(
    base: Path, reinforce: Reinforce, correctness: Callable[[Path], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    dr_grpo = DrGrpo.of_samples
    monkeypatch.setattr(DrGrpo, "of_samples", lambda *given: -dr_grpo(*given))
    assert correctness(reinforce()) < correctness(base)


def test_engine_and_learner_agree_on_every_step(trained: Path) -> None:
    rows = read_metrics(trained)
    assert [row["step"] for row in rows] == list(range(1, 31))
    for row in rows:
        assert row["skipped"] == 0
        assert 0 <= row["mismatch_abs_mean"] <= 1e-6
        assert row["mismatch_abs_mean"] <= row["mismatch_abs_max"] <= 1e-4
        # One step on fresh samples: the ratio is 1 but for rounding, and nothing is clipped.
        assert abs(row["ppo_kl"]) <= 1e-6
        assert row["ppo_clip_ratio"] == 0
        assert row["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert any(row["mismatch_abs_mean"] > 0 for row in rows), "two computations, not one compared with itself"


def undocumented(*runs: Path) -> set[str]:
    """The names in the metrics of these runs that docs/reference/metrics.md does not have."""
    documented = {
        re.sub("[A-Z]+", "*", name)
        for line in DOCS.read_text().splitlines()
        if line.startswith("| `")
        for name in re.findall("`([^`]+)`", line.split("|")[1])
    }
    recorded = {
        name if name in documented else re.sub("/.*", "/*", name)
        for run in runs
        for row in read_metrics(run)
        for name in row
    }
    per_layer = {
        "expert_load/*",
        "expert_load_max_violation/*",
        "router_entropy/*",
        "dead_experts/*",
        "expert_load_divergence/*",
    }
    return recorded - documented - per_layer


def test_every_name_recorded_is_documented(base: Path, trained: Path, reinforce: Reinforce) -> None:
    small = ("--run.steps=1", "--batch.prompts_per_step=4", "--batch.group_size=4")
    judged = ("--algorithm.advantage=gae", "--critic.learning_rate=1e-3")
    corrected = ("--algorithm.correction=tis", "--algorithm.kl_coef=0.1", "--algorithm.kl_in=reward")
    ppo = reinforce(*small, *judged, *corrected)
    assert {"explained_variance", "correction_ess", "reference_kl"} <= read_metrics(ppo)[0].keys()
    assert undocumented(base, trained, ppo) == set()
