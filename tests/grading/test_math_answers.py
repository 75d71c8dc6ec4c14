"""MATH's 5,000 test answers: each is found in its own solution, and no other is taken for it."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest

from nmoe.grading.math.answers import grade_answers
from nmoe.grading.math.normalization import normalize
from nmoe.grading.regrade import answer_of

DATA = Path(__file__).parents[3] / "shared" / "eval_data" / "math.jsonl"
# What an answer may leave out or add: a name, a unit.
_LEFT_OUT = re.compile(r"^[a-z] *=|\\text\{[^{}]*\}|\^\{?\\circ\}?|\\%| ")


@pytest.fixture(scope="module")
def records() -> list[dict[str, str]]:
    if not DATA.exists():
        pytest.skip("shared/eval_data is not beside the repository")
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def test_every_answer_is_that_of_its_solution(records: list[dict[str, str]]) -> None:
    pairs = [(one["answer"], answer_of(one["chain_of_thought"], "boxed") or "") for one in records]
    wrong = [pair for pair, verdict in zip(pairs, grade_answers(pairs), strict=True) if verdict.outcome != "correct"]
    assert len(pairs) == 5000
    # Solutions that box several values one by one, where the data set has kept the last of them alone for the gold.
    assert [pair for pair in wrong if "boxed" not in pair[1]] == []
    assert len(wrong) == 7


def test_no_answer_is_another(records: list[dict[str, str]]) -> None:
    golds = [one["answer"] for one in records]
    answers = random.Random(0).sample(golds, len(golds))
    began = time.process_time()
    verdicts = list(grade_answers(zip(golds, answers, strict=True)))
    assert time.process_time() - began < 10
    accepted = [pair for *pair, verdict in zip(golds, answers, verdicts, strict=True) if verdict.outcome == "correct"]
    same = [[normalize(_LEFT_OUT.sub("", text)) for text in pair] for pair in accepted]
    assert [pair for pair, texts in zip(accepted, same, strict=True) if texts[0] != texts[1]] == []
    # The workers get few: most that differ are told apart at once.
    assert sum(verdict.layer == "symbolic" for verdict in verdicts) < 200
