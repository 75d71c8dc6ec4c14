"""The policy of docs/guides/grading.md: every row of its tables is graded as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nmoe.grading.math.answers import grade_answers
from nmoe.grading.math.policy import Policy

PAGE = Path(__file__).parents[2] / "docs/guides/grading.md"
ROW = re.compile(r"^\| `((?:(?!` \|).)+)` \| `((?:(?!` \|).)+)` \| (correct|incorrect) \|", re.MULTILINE)
ASKED = re.compile(r"^\| `(.+?)` \| `(.+?)` \| `(.+?)` \| (correct|incorrect) \|", re.MULTILINE)
ROWS = [(None, *row) for row in ROW.findall(PAGE.read_text())] + ASKED.findall(PAGE.read_text())


def test_the_page_has_the_rows() -> None:
    assert len(ROWS) > 90
    assert len(ROWS) == sum(
        line.startswith("| `") and line.count("`") >= 4
        for line in PAGE.read_text().split("## Where")[0].split("## Policy")[1].splitlines()
    )


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str | None, str, str], str]:
    found = {}
    for question in dict.fromkeys(row[0] for row in ROWS):
        rows = [row[:3] for row in ROWS if row[0] == question]
        verdicts = grade_answers([(gold, answer) for _, gold, answer in rows], Policy(question=question))
        found |= {row: verdict.outcome for row, verdict in zip(rows, verdicts, strict=True)}
    return found


@pytest.mark.parametrize(("question", "gold", "answer", "outcome"), ROWS)
def test_row(
    question: str | None, gold: str, answer: str, outcome: str, outcomes: dict[tuple[str | None, str, str], str]
) -> None:
    assert outcomes[question, gold, answer] == outcome
