"""The policy of docs/guides/grading.md: every row of its tables is graded as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nmoe.grading.math.answers import grade_answers

PAGE = Path(__file__).parents[2] / "docs/guides/grading.md"
ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| (correct|incorrect) \|", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text())


def test_the_page_has_the_rows() -> None:
    assert len(ROWS) > 90
    assert len(ROWS) == sum(
        line.startswith("| `") and line.count("`") >= 4
        for line in PAGE.read_text().split("## Where")[0].split("## Policy")[1].splitlines()
    )


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], str]:
    pairs = [(gold, answer) for gold, answer, _ in ROWS]
    return dict(zip(pairs, (verdict.outcome for verdict in grade_answers(pairs)), strict=True))


@pytest.mark.parametrize(("gold", "answer", "outcome"), ROWS)
def test_row(gold: str, answer: str, outcome: str, outcomes: dict[tuple[str, str], str]) -> None:
    assert outcomes[gold, answer] == outcome
