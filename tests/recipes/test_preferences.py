"""Runs on preference pairs, from the tiny base: what DPO and a reward model learn, where they start from, and exact resumption."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe.config.commands import DPOConfig, RewardConfig
from nmoe.config.loader import load_run
from nmoe.data.pairs import Pair, completion_pair
from nmoe.errors import UserError
from nmoe.learner.passes import batch_logprobs
from nmoe.model.checkpoint import load_model
from nmoe.model.policy import load_policy
from nmoe.recipes.dpo import dpo
from nmoe.recipes.preferences import completion_batch, held_out_pairs, read_preferences
from nmoe.recipes.reward_model import train_reward_model
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.renderers import Rendered
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier.scorers import RewardModel

CONFIG = """
[run]
directory = "HERE"
steps = 16
threads = 1

[model]
path = "BASE"

[records]
path = "PAIRS"
tokens_per_step = 1024
held_out = 0.25

[optimizer]
learning_rate = 1e-3

[[eval]]
every_steps = 4

[checkpoint]
every_steps = 4
keep = 9
"""

Configure = Callable[..., Any]


def turn(thought: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant", "content": thought, "channel": "analysis"},
        {"role": "assistant", "content": answer, "channel": "final"},
    ]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits reversed are preferred to digits copied, as the base does either."""
    path, rng = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", random.Random(7)
    lines = []
    while len(lines) < 320:
        digits = "".join(rng.choices("0123456789", k=3))
        if digits == digits[::-1]:
            continue
        sides = {"chosen": turn("back", digits[::-1]), "rejected": turn("same", digits)}
        lines.append(json.dumps({"prompt": f"Reverse: {digits}"} | sides))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def large_answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of a large first digit are preferred, whatever was asked."""
    path, rng = tmp_path_factory.mktemp("large") / "large.jsonl", random.Random(7)
    lines = []
    for _ in range(320):
        large, small = rng.choice("56789") + rng.choice("0123456789"), rng.choice("01234") + rng.choice("0123456789")
        lines.append(json.dumps({"prompt": f"Reverse: {rng.randrange(100)}", "chosen": large, "rejected": small}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def configure(base: Path, pairs: Path, tmp_path: Path) -> Configure:
    def configure(*overrides: str, text: str = "", recipe: Any = dpo) -> DPOConfig | RewardConfig:
        file = tmp_path / "run.toml"
        filled = CONFIG.replace("HERE", str(tmp_path)).replace("BASE", str(base)).replace("PAIRS", str(pairs))
        file.write_text(filled + text)
        if recipe is train_reward_model:
            return load_run(file, RewardConfig, overrides)
        return load_run(file, DPOConfig, ("--preference.beta=0.2", *overrides))

    return configure


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["results"][0] for path in sorted((run / "eval").iterdir())]


def test_dpo_learns_what_was_preferred(configure: Configure, base: Path) -> None:
    config = configure()
    run = dpo(config)
    rows = read_metrics(run)
    # At the start the policy is the reference, and every pair's loss is log 2.
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    page = Path(__file__).parents[2] / "docs/reference/metrics.md"
    names = {
        "pairs",
        "held_out_accuracy",
        "held_out_margin",
        *(name for name in rows[0] if name.startswith("rewards/")),
    }
    assert all(f"| `{name}` |" in page.read_text() for name in names)
    # One batch's loss: 0.27 with AVX-512, 0.35 with AVX2.
    assert rows[-1]["loss"] < 0.5
    assert rows[-1]["rewards/chosen"] > rows[-1]["rewards/rejected"]
    assert rows[-1]["rewards/margins"] == pytest.approx(rows[-1]["rewards/chosen"] - rows[-1]["rewards/rejected"])
    last = evaluations(run)[-1]
    assert (last["mode"], last["problems"]) == ("pair_accuracy", 80)
    assert last["value"] >= 0.95
    assert rows[-1]["held_out_accuracy"] == last["value"]
    # The same, from the two checkpoints: beta (log pi / pi_ref (chosen) - log pi / pi_ref (rejected)).
    start, end = resolve_checkpoint(base), resolve_checkpoint(run)
    tokenizer = Tokenizer.load(start)
    held_out = read_preferences(config, tokenizer, completion_pair, 64).held_out
    batch = completion_batch(held_out)
    gains_N = batch_logprobs(load_model(end), batch, 4096, 1.0) - batch_logprobs(load_model(start), batch, 4096, 1.0)
    sums_B = torch.stack([part.sum() for part in batch.column(gains_N).split(list(batch.lengths))])
    margins_P = 0.2 * (sums_B[0::2] - sums_B[1::2]).double()
    assert rows[-1]["held_out_margin"] == pytest.approx(float(margins_P.mean()), rel=1e-4)
    assert last["value"] == float((margins_P > 0).double().mean())


def test_a_tie_is_half_right(configure: Configure) -> None:
    """Four prompts with a margin of 1, -1, 0 and 0: (1 + 1/2 + 1/2) of 4. Broken either way, 1 or 3 of 4 are right."""
    config = configure()
    pairs = [Pair(f"p:{n}", Rendered([n, 1], [-100, 1]), Rendered([n, 2], [-100, 2]), str(n)) for n in range(4)]
    found = held_out_pairs(torch.tensor([2.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.0, 0.0]), pairs, config)
    (result,) = found.results
    assert found.metrics == {"held_out_accuracy": 0.5, "held_out_margin": 0.0}
    assert list(result["outcomes"].values()) == [1.0, 0.0, 0.5, 0.5]
    # Clopper and Pearson: 1 - (1 - p)^4 = 0.025 at 1 of 4, and its mirror image at 3 of 4.
    assert result["low"] == pytest.approx(1 - 0.975**0.25)
    assert result["high"] == pytest.approx(0.975**0.25)
    assert found.note.endswith("of 4, 2 of them ties")
    start = held_out_pairs(torch.zeros(8), pairs, config)
    assert [start.results[0][name] for name in ("value", "low", "high")] == [0.5, 0.0, 1.0]
    assert start.note.endswith("50.0% [0.0%, 100.0%] of 4, 4 of them ties")


def test_an_adapters_reference_is_its_base(configure: Configure, base: Path) -> None:
    run = dpo(configure("--optimizer.learning_rate=1e-2", text="[lora]\nrank = 4\nalpha = 8\n"))
    rows = read_metrics(run)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["held_out_accuracy"] >= 0.9
    directory = resolve_checkpoint(run)
    assert not (directory / "model.safetensors").exists()
    _, lora = load_policy(directory)
    assert lora is not None
    with lora.disabled() as alone:
        torch.testing.assert_close(alone.embedding.weight, load_model(resolve_checkpoint(base)).embedding.weight)


def test_a_reward_model_scores_what_it_was_not_trained_on(configure: Configure, large_answers: Path) -> None:
    run = train_reward_model(
        configure(
            f"--records.path={large_answers}",
            "--run.steps=72",
            "--reward_model.centering=0.01",
            recipe=train_reward_model,
        )
    )
    rows = read_metrics(run)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # the head begins at zero
    start, *_, last = evaluations(run)
    # 0.93 to 1 over the seeds 0 to 3; chance is 0.5.
    assert last["value"] == rows[-1]["held_out_accuracy"] >= 0.8
    assert last["since_start"]["difference"] == pytest.approx(last["value"] - start["value"])
    assert len(last["outcomes"]) == last["problems"]
    assert rows[-1]["rewards/accuracies"] > 0.8
    directory = resolve_checkpoint(run)
    assert {"head.safetensors", "head.json"} <= {path.name for path in directory.iterdir()}
    scorer = RewardModel.load(run)

    async def scores() -> list[float]:
        return [await scorer.score([Message("user", "Reverse: 21")], answer) for answer in ("93", "13")]

    large, small = asyncio.run(scores())
    assert large > small


@pytest.mark.parametrize("recipe", [dpo, train_reward_model])
def test_a_resumed_run_goes_on_number_for_number(recipe: Any, configure: Configure, tmp_path: Path) -> None:
    whole = recipe(configure("--run.name=whole", "--run.steps=8", recipe=recipe))
    again = tmp_path / "again"
    shutil.copytree(whole, again, symlinks=True)
    shutil.rmtree(again / "checkpoints" / "step_000008")
    (again / "checkpoints" / "best").unlink()  # as where the kill came before the best checkpoint was marked
    config = (again / "config.toml").read_text()
    (again / "config.toml").write_text(config.replace('name = "whole"', 'name = "again"'))
    recipe(configure("--run.name=again", "--run.steps=8", "--run.resume=true", recipe=recipe))

    def kept(run: Path) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in row.items() if not name.startswith(("time_", "train_tokens"))}
            for row in read_metrics(run)
        ]

    assert kept(again) == kept(whole)
    assert len(kept(whole)) == 8
    assert (again / "checkpoints" / "best").readlink() == (whole / "checkpoints" / "best").readlink()
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        files = [run / "checkpoints" / "step_000008" / name for run in (whole, again)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_a_run_does_not_go_on_with_other_pairs(configure: Configure, pairs: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(pairs.read_text())
    overrides = [f"--records.path={own}", "--run.steps=4"]
    dpo(configure(*overrides))
    own.write_text(pairs.read_text().replace("Reverse: 1", "Reverse: 2", 1))
    with pytest.raises(UserError, match=r"own\.jsonl: not the documents that this run began with"):
        dpo(configure(*overrides, "--run.steps=6", "--run.resume=true"))


def test_epochs_in_place_of_steps(configure: Configure) -> None:
    config = configure("--run.steps=0", "--records.epochs=0.5", "--records.held_out=0", "--eval=[]")
    rows = read_metrics(dpo(config))
    assert sum(row["pairs"] for row in rows) == pytest.approx(160, abs=20)
    assert "held_out_accuracy" not in rows[-1]
