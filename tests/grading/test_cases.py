"""Golds as real datasets have them (cases.txt), and every row of the policy's tables in docs/guides/grading.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from nmoe.grading.math.answers import grade_answers
from nmoe.grading.math.question import Policy
from nmoe.grading.regrade import Extract, answer_of

LEAST_OF_A_CLASS, LEAST_OF_ALL = 0.9, 0.98
EXTRACT: dict[str, Extract] = {"boxes": "boxed", "hedges": "boxed", "prose": "prose"}


class Case(NamedTuple):
    of: str
    question: str | None
    gold: str
    right: str
    wrong: str


def _read() -> list[Case]:
    text = (Path(__file__).parent / "cases.txt").read_text()
    text = re.sub(r"<U\+([0-9A-F]{4})>", lambda match: chr(int(match[1], 16)), text)
    cases = []
    for part in text.split("\n## ")[1:]:
        title, *lines = part.strip().split("\n")
        for line in lines:
            question, asked, pair = line.rpartition(" ∴ ")
            gold, _, rest = pair.partition(" ⇒ ")
            right, _, wrong = rest.replace("⏎", "\n").partition(" ✗ ")
            assert all((gold, right, wrong)), line
            cases.append(Case(title.partition(":")[0], question if asked else None, gold, right, wrong))
    return cases


CASES = _read()
CLASSES = sorted({case.of for case in CASES})


@pytest.fixture(scope="module")
def accepted() -> dict[tuple[Case, str], bool]:
    found = {}
    for question in dict.fromkeys(case.question for case in CASES):
        asked = [(case, text) for case in CASES if case.question == question for text in (case.right, case.wrong)]
        answers = [answer_of(text, EXTRACT.get(case.of, "whole")) or "" for case, text in asked]
        pairs = ((case.gold, answer) for (case, _), answer in zip(asked, answers, strict=True))
        verdicts = grade_answers(pairs, Policy(question=question))
        found |= {one: verdict.outcome == "correct" for one, verdict in zip(asked, verdicts, strict=True)}
    return found


def test_every_class_has_its_cases() -> None:
    assert len(CLASSES) == 32
    for of in CLASSES:
        assert len({case[1:] for case in CASES if case.of == of}) >= 15, of


def test_right_answers_are_understood(accepted: dict[tuple[Case, str], bool]) -> None:
    shares = {}
    for of in CLASSES:
        cases = [case for case in CASES if case.of == of]
        missed = [case for case in cases if not accepted[case, case.right]]
        shares[of] = 1 - len(missed) / len(cases)
        print(f"\n{of:>10} {shares[of]:6.1%} of {len(cases)}", *(f"\n    {one.gold} ⇒ {one.right}" for one in missed))
    right = sum(accepted[case, case.right] for case in CASES)
    print(f"\n{'all':>10} {right / len(CASES):6.1%} of {len(CASES)}")
    assert {of: share for of, share in shares.items() if share < LEAST_OF_A_CLASS} == {}
    assert right / len(CASES) >= LEAST_OF_ALL


def test_no_near_miss_is_accepted(accepted: dict[tuple[Case, str], bool]) -> None:
    assert [case for case in CASES if accepted[case, case.wrong]] == []


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
