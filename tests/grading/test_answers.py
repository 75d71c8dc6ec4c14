"""Grading through the workers, golds out of known datasets' fields, and MATH's 5,000 test answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from nmoe.errors import UserError
from nmoe.grading.extraction import extract_gold
from nmoe.grading.math import answers
from nmoe.grading.math.answers import grade_answer, grade_answers, symbolic_workers
from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.question import DEFAULT, Policy
from nmoe.grading.regrade import answer_of
from nmoe.types import Verdict

HANGS = "9^{9^{9^{9}}}"


def test_the_layers_in_turn() -> None:
    pairs = [("5", "5"), ("0.5", "1/2"), ("(1, 2)", "(1, 3)"), ("x+1", "1+x"), ("x+1", "x+2")]
    pairs.append((r"\sin x", r"\cos x"))
    found = list(grade_answers(pairs))
    assert [(verdict.layer, verdict.outcome) for verdict in found] == [
        ("exact", "correct"),
        ("numeric", "correct"),
        ("structure", "incorrect"),
        ("symbolic", "correct"),
        ("structure", "incorrect"),  # another value for certain, so that no worker is asked
        ("symbolic", "incorrect"),
    ]

    async def all_of_them() -> list[Verdict]:
        return await asyncio.gather(*(grade_answer(gold, answer) for gold, answer in pairs))

    assert asyncio.run(all_of_them()) == found


def test_lists_are_sets_where_asked_for() -> None:
    async def both() -> list[str]:
        pair = r"\sqrt{8}, 3", r"3, 2\sqrt{2}"
        policies = Policy(answer_order="as_gold"), Policy()
        return [(await grade_answer(*pair, policy)).outcome for policy in policies]

    assert asyncio.run(both()) == ["incorrect", "correct"]


def test_many_pairs_come_back_in_order() -> None:
    pairs = [(f"x+{i}", f"{i + i % 2}+x") for i in range(300)]
    outcomes = [verdict.outcome for verdict in grade_answers(pairs)]
    assert outcomes == ["incorrect" if i % 2 else "correct" for i in range(300)]


def test_an_answer_that_comes_twice_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen samples with the same hostile answer cost one deadline, not sixteen."""
    pool, submitted = symbolic_workers(), []
    submit = pool.submit
    monkeypatch.setattr(pool, "submit", lambda *arguments: submitted.append(arguments) or submit(*arguments))
    outcomes = [verdict.reason for verdict in grade_answers([("x+7", HANGS)] * 16)]
    assert outcomes == ["deadline: took longer than the deadline"] * 16
    assert submitted == [("x+7", HANGS, *DEFAULT.arguments)]


def test_whoever_is_cancelled_cancels_nobody_else() -> None:
    async def one_of_two() -> Verdict:
        first, second = (asyncio.ensure_future(grade_answer("x+8", HANGS)) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert asyncio.run(one_of_two()).outcome == "incorrect"


def test_an_error_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers that a comparison gets are killed; asked again, it is settled."""
    pool = symbolic_workers()
    list(grade_answers([("x", "x+y-y")]))
    pair = "x+9", HANGS

    async def killed() -> Verdict:
        grading = asyncio.ensure_future(grade_answer(*pair))
        while not grading.done():
            for pid in pool.pids():
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        return await grading

    assert asyncio.run(killed()).outcome == "error"
    assert (*pair, *DEFAULT.arguments) not in answers._replies
    assert asyncio.run(grade_answer(*pair)).outcome == "incorrect"


@pytest.mark.parametrize(
    ("extractor", "field", "gold"),
    [
        ("none", " 42 \n", "42"),
        ("gsm8k_hash", "6 * 3 = <<6*3=18>>18 eggs\n#### 1,018", "1,018"),
        ("gsm8k_hash", "#### 3 was wrong\n#### -4\n", "-4"),
        ("boxed", r"The area is $\boxed{\frac{\sqrt{3}}{2}}$.", r"\frac{\sqrt{3}}{2}"),
        ("last_number", "It was 17, now 18.", "18"),
    ],
)
def test_extract_gold(extractor: str, field: str, gold: str) -> None:
    assert extract_gold(extractor, field) == gold


@pytest.mark.parametrize(
    ("extractor", "field", "reason"),
    [
        ("none", "  ", "finds no text"),
        ("gsm8k_hash", "18", "finds no '#### ANSWER' in '18'"),
        ("gsm8k_hash", "18 ####", "finds no '#### ANSWER'"),
        ("boxed", r"\boxed{5", r"finds no \\boxed\{ANSWER\} that closes"),
        ("boxed", r"\boxed{ }", "finds no"),
        ("last_number", "five " * 100, r"'\.\.\.e five .{60,70}'; mend the record"),
    ],
)
def test_a_gold_that_is_not_there_is_an_error(extractor: str, field: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        extract_gold(extractor, field)


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
    began = time.thread_time()
    verdicts = list(grade_answers(zip(golds, answers, strict=True)))
    assert time.thread_time() - began < 10
    accepted = [pair for *pair, verdict in zip(golds, answers, verdicts, strict=True) if verdict.outcome == "correct"]
    same = [[normalize(_LEFT_OUT.sub("", text)) for text in pair] for pair in accepted]
    assert [pair for pair, texts in zip(accepted, same, strict=True) if texts[0] != texts[1]] == []
    # The workers get few: most that differ are told apart at once.
    assert sum(verdict.layer == "symbolic" for verdict in verdicts) < 200
