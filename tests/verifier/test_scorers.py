"""Reward models behind the scorer's protocol: what they read, passes and memory, and checkpoints that are none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, peaked_model

from nmoe.errors import UserError
from nmoe.learner.passes import batch_head_outputs
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.head import Head, HeadKind
from nmoe.recipes.preferences import last_token_batch
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier import scorers
from nmoe.verifier.scorers import RewardModel, load_scorer

QUESTION = [Message("user", "Sort: 21")]


def checkpoint(path: Path, kind: HeadKind | None = "reward", outputs: int = 1) -> Path:
    """A peaked model with a tokenizer and, unless `kind` is None, a head of random weights."""
    path.mkdir()
    tokenizer = Tokenizer.train(["Sort: 12 assistant final system user"] * 3, 300)
    tokenizer.save(path)
    shape = FAMILIES["qwen3"] | {"vocab_size": tokenizer.vocab_size}
    save_model(peaked_model(ModelConfig(**shape)), path)
    if kind is not None:
        head = Head(shape["hidden_size"], outputs, kind)
        with torch.no_grad():
            head.weight.normal_(generator=torch.Generator().manual_seed(3))
            head.bias.fill_(0.5)
        head.save(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    return RewardModel.load(checkpoint(tmp_path_factory.mktemp("scorer") / "reward"))


def score(model: RewardModel, *answers: str) -> list[float]:
    async def everything() -> list[float]:
        return list(await asyncio.gather(*(model.score(QUESTION, answer) for answer in answers)))

    return asyncio.run(everything())


def test_the_score_is_the_heads_output_at_the_turns_last_token(model: RewardModel, tmp_path: Path) -> None:
    harmony = Harmony(model._renderer._harmony.tokenizer)  # type: ignore[attr-defined]
    ids = harmony.render_prompt(QUESTION) + harmony.render_completion([Message("assistant", "12", channel="final")])
    expected = batch_head_outputs(model._model, model._head, last_token_batch([ids]), 1000)
    (found,) = score(model, "12")
    assert found == pytest.approx(float(expected), abs=1e-6)
    assert len({*score(model, "12", "21", "1")}) == 3


def test_calls_that_wait_together_share_a_pass(model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model._together._known.clear()
    passes: list[int] = []
    run = model._run
    monkeypatch.setattr(model, "_run", lambda taken: passes.append(len(taken)) or run(taken))
    together = score(model, "1", "12", "1", "longer answers 12 12")
    assert passes == [3]  # the same text is asked about once
    assert together[0] == together[2]
    assert score(model, "12") == [together[1]]
    assert passes == [3]  # and remembered
    model._together._known.clear()
    # To the bit: what else is in the pass does not matter.
    assert [score(model, answer)[0] for answer in ("1", "12", "longer answers 12 12")] == [
        together[0],
        *together[1:4:2],
    ]


def test_scores_are_remembered_up_to_a_bound(model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "REMEMBERED", 2)
    model._together._known.clear()
    score(model, "1", "2", "12")
    assert len(model._together._known) == 2


def test_what_fails_fails_for_all_who_wait_and_is_not_remembered(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model._together._known.clear()
    run = model._run

    def torn(taken: object) -> list[float]:
        raise OSError("torn")

    monkeypatch.setattr(model, "_run", torn)

    async def both() -> list[object]:
        return await asyncio.gather(*(model.score(QUESTION, "1") for _ in range(2)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(both())] == ["torn", "torn"]
    monkeypatch.setattr(model, "_run", run)
    assert len(score(model, "1")) == 1


def test_an_answer_beyond_the_context_is_refused(model: RewardModel) -> None:
    with pytest.raises(UserError, match=r"prompt and answer are \d+ tokens, and this reward model reads at most 64"):
        score(model, "1 2 " * 40)


def test_checkpoints_that_are_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this checkpoint has no head, and one of kind 'reward' is wanted"):
        load_scorer(checkpoint(tmp_path / "policy", None))
    with pytest.raises(UserError, match="a head of kind 'value', where one of kind 'reward' is wanted"):
        load_scorer(checkpoint(tmp_path / "critic", "value"))
    with pytest.raises(UserError, match="a reward is one number, and this head has 2 outputs"):
        load_scorer(checkpoint(tmp_path / "two", outputs=2))
    other = checkpoint(tmp_path / "wide")
    described = json.loads((other / "head.json").read_text())
    (other / "head.json").write_text(json.dumps(described | {"hidden_size": 64}))
    with pytest.raises(UserError, match="a head for a model of width 64, and this model's width is 32"):
        load_scorer(other)
    with pytest.raises(UserError, match="neither a checkpoint"):
        load_scorer(tmp_path / "nothing")
