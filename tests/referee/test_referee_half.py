"""Log-probabilities in half precision: how far rounding goes, and parts of a sample that are of other weights."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from referee_servers import drawn_checkpoint

from nmoe.referee.checks.logprobs import stream
from nmoe.referee.checks.publishes import _judge_span
from nmoe.referee.command import judge_of
from nmoe.referee.diagnosis import ROUGH, TOLERANCE, Diagnosis, Rounding
from nmoe.referee.judge import Judge, Seen
from nmoe.referee.publishing import moved
from nmoe.referee.target import Asked, Choice

# How many of 60 tokens are of the weights before the publication.
TOKENS, OLD = 60, 25


@pytest.mark.parametrize(
    ("tolerance", "steady", "off", "explained"),
    [
        (TOLERANCE, False, [1e-5] * 20, True),
        (TOLERANCE, True, [0.0] * 19 + [2e-4], False),
        (ROUGH, True, [0.09] * 20, True),
        (ROUGH, True, [0.11] * 20, False),
        (ROUGH, True, [2.9] * 7, True),
        (ROUGH, True, [3.1], False),
        (ROUGH, True, [float("nan")], False),
        (ROUGH, False, [0.29] * 8, True),
        (ROUGH, False, [0.31] * 8, False),
        (ROUGH, True, [], True),
    ],
)
def test_rounding_has_a_largest_difference_and_a_mean(
    tolerance: float, steady: bool, off: list[float], explained: bool
) -> None:
    assert Rounding.of(tolerance, steady).explains(torch.tensor(off, dtype=torch.float64)) is explained


@pytest.fixture(scope="module", params=["moe_untied", "dense_tied"])
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """A judge in bfloat16 that has just published."""
    checkpoint = drawn_checkpoint(tmp_path_factory.mktemp("half") / "model", request.param, seed=1)
    judge, _ = judge_of(checkpoint, "bfloat16")
    judge.before, judge.present = judge.first, moved(judge, 5)
    return judge


def noted(judge: Judge, said: int, old: int = OLD) -> list[tuple[str, str]]:
    """What the referee says of a sample of which `old` tokens are of the old weights, and `said` are said to be."""
    diagnosis, draw, asked = Diagnosis(judge, ROUGH), random.Random(4), Asked((3, 4, 5), max_tokens=TOKENS)
    choice = Choice(0, [draw.randrange(96) for _ in range(TOKENS)], [], "length")
    seen = Seen(asked, choice)
    before_n, after_n = diagnosis.right([seen], weights=judge.before)[0], diagnosis.right([seen])[0]
    choice.logprobs = torch.cat([before_n[:old], after_n[old:]]).tolist()
    choice.spans = [("1", 0, said), ("2", said, TOKENS)]
    notes, court = list[tuple[str, str]](), SimpleNamespace(judge=judge, diagnosis=diagnosis, findings=[])
    court.note = lambda fault, seen, right, *_, **__: notes.append((fault, right))
    reply: Any = None
    got: Any = court
    assert _judge_span(got, reply, seen, "1", "2") or said in (0, TOKENS)
    return notes


def test_parts_of_the_right_weights_are_no_fault(judge: Judge) -> None:
    assert noted(judge, OLD) == []
    assert noted(judge, 0, old=0) == []


@pytest.mark.parametrize("said", [0, 12, 40, TOKENS])
def test_a_part_of_other_weights_is_a_wrong_span(judge: Judge, said: int) -> None:
    """Also where it is a small part of the tokens that are said to be of these weights."""
    ((fault, right),) = noted(judge, said)
    assert fault == "wrong_version_span"
    assert right == f"about the first {OLD}: they are of the old weights, and no others"


@pytest.mark.parametrize(("off", "faults"), [(0.05, []), (0.5, ["unexplained"])])
def test_a_stream_is_compared_by_its_mean_too(judge: Judge, off: float, faults: list[str]) -> None:
    whole = Choice(0, list(range(20)), [-2.0] * 20, "length")
    streamed = replace(whole, logprobs=[-2.0 - off] * 20)
    replies = iter([SimpleNamespace(choices=[whole]), SimpleNamespace(choices=[streamed])])
    notes = list[str]()

    async def sample(_: Any) -> Any:
        return next(replies)

    court: Any = SimpleNamespace(
        needs_streams=lambda: None,
        asked=lambda *_, **settings: Asked((1, 2), **settings),
        sample=sample,
        diagnosis=Diagnosis(judge, ROUGH),
        note=lambda fault, *_: notes.append(fault),
    )

    async def check() -> None:
        await stream(court)

    asyncio.run(check())
    assert notes == faults
