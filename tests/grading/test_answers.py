"""Grading through the workers: asynchronous and not, and one comparison for answers that come twice."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from nmoe.grading.math import answers
from nmoe.grading.math.answers import grade_answer, grade_answers, symbolic_workers
from nmoe.grading.math.policy import DEFAULT, Policy
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
