"""The corpus of the five stages: all that they reward occurs, at the shares that it says, and none of it always."""

from __future__ import annotations

import asyncio
from itertools import chain

import pytest

from nmoe.config.packaged import ENVIRONMENTS
from nmoe.envs.environment import Environment
from nmoe.envs.pools.generated import split_of
from nmoe.speedrun.corpus import corpus_texts
from nmoe.speedrun.stage_corpus import THINKS, THOUGHTS, UNANSWERED, StageDocuments
from nmoe.speedrun.tool_corpus import tool_texts
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Problem, Sample, Turn

ENVIRONMENT = ENVIRONMENTS / "five_stages.toml"
DOCUMENTS = 600


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(chain(corpus_texts(0, 200), tool_texts(ENVIRONMENT, 0, 100)), 512)


def test_every_stage_has_something_to_find(tokenizer: Tokenizer) -> None:
    documents = list(StageDocuments(ENVIRONMENT, tokenizer).documents(0, DOCUMENTS))
    assert documents == list(StageDocuments(ENVIRONMENT, tokenizer).documents(0, DOCUMENTS))
    found = {"format": 0, "reasoning": 0, "call": 0, "correct": 0}
    lengths = set()
    for ids in documents:
        text = tokenizer.decode(ids)
        question = text.partition("Add: ")[2].partition("<|end|>")[0]
        assert split_of("add", f"Add: {question}") == "train"
        said = text.partition("Add: ")[2]
        thoughts = [thought for thought in THOUGHTS if f"analysis<|message|>{thought}<|end|>" in said]
        lengths |= set(thoughts)
        _, formed, answer = said.partition("<|channel|>final<|message|>")
        found["format"] += bool(formed)
        found["reasoning"] += bool(formed and thoughts)
        found["call"] += "to=functions.python" in said
        found["correct"] += answer == f"{sum(map(int, question.split(' + ')))}<|return|>"
    shares = {name: count / DOCUMENTS for name, count in found.items()}
    assert lengths == set(THOUGHTS)
    assert shares["format"] == pytest.approx(1 - UNANSWERED, abs=0.06)
    assert shares["reasoning"] == pytest.approx((1 - UNANSWERED) * THINKS, abs=0.06)
    assert 0.4 < shares["call"] < 0.8
    assert 0.05 < shares["correct"] < 0.4


def test_an_answer_on_no_channel_has_no_form(tokenizer: Tokenizer) -> None:
    """What the corpus calls unanswered is what the first stage's gate counts as broken."""
    environment, harmony = Environment.from_toml(ENVIRONMENT, tokenizer), Harmony(tokenizer)
    problem = Problem("p", "add", "Add: 1111 + 2222", "3333", "p")
    formed = harmony.render_completion([Message("assistant", "3333", "final")])
    broken = formed[formed.index(tokenizer.special_id("<|message|>")) :]
    for ids, form in ((formed, 1.0), (broken, 0.0)):
        turn = Turn((), Sample(ids, [0.0] * len(ids), [], "stop"))
        grade = asyncio.run(environment.grade(problem, (turn,), 96))
        assert (grade.components["format"], grade.score) == (form, form)
