r"""Compares problems: digests, integer answers, and contamination (problems of an evaluation set in a training set).

A problem is contaminated if it has the text of an evaluated problem, or shares a run of words with one.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Literal

from nmoe.config.preparation import GivenSetSection
from nmoe.data.rows import Row, read_rows
from nmoe.errors import UserError
from nmoe.text.conversation import question_key

INTEGER = r"^\s*\$?\s*(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+))\s*\$?\s*$"
r"""A pattern for an integer as answers write it: `42`, ` -7 `, `$1,024$`. For Python's `re` and RE2 alike."""

_INTEGER = re.compile(INTEGER, re.ASCII)
_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_END_OF_FORMULA = re.compile(r"(\$\$?)[.\s]*")


def integer(answer: str) -> str | None:
    """Parses an answer as an integer, and returns it without commas and leading zeros: `"$1,024$"` gives `"1024"`; None for
    anything else."""
    match = _INTEGER.match(answer)
    if match is None:
        return None
    digits = match[1].replace(",", "")
    value = digits.lstrip("-").lstrip("0") or "0"
    return f"-{value}" if digits.startswith("-") and value != "0" else value


def digest(problem: str) -> bytes:
    """Returns the MD5 of the problem's key (`question_key`) without spaces and dollar signs, 16 bytes. Problems with equal digests
    count as the same, because collections differ in how they typeset one problem."""
    plain = question_key(problem).replace("$", "").replace(" ", "")
    return hashlib.md5(plain.encode(errors="replace"), usedforsecurity=False).digest()


def ends_in_box(solution: str, label: str) -> str | None:
    r"""Returns the solution rewritten to end in `\boxed{label}`; None if it has no box, or its last box is not the label.

    A last formula that is only the box becomes the box, and after any other end the box is repeated on its own line.
    """
    start = solution.rfind("\\boxed")
    match = None if start < 0 else _BOX.match(solution, start)
    if match is None or integer(match[1]) != label:
        return None
    box, before, after = f"\\boxed{{{label}}}", solution[:start], solution[match.end() :]
    if not after.strip(" \n."):
        return before + box
    formula = _END_OF_FORMULA.fullmatch(after)
    if formula is not None and before.endswith(formula[1]) and before.count("$") % 2 == len(formula[1]) % 2:
        return before.removesuffix(formula[1]) + box
    return f"{solution.rstrip()}\n\n{box}"


Match = Literal["exact", "ngram"]

PROBLEM_FIELDS = ("problem", "question", "context", "prompt", "input")
_WORD = re.compile(r"\w+")


class Contamination:
    """An index of the problems of evaluation sets, to find them in a training set. Two problems are the same if their digests are
    equal, and overlap if they share a run of `ngram` words, without case and punctuation (Brown et al. 2020, appendix C)."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self.names: list[str] = []
        self._digests: dict[bytes, int] = {}  # a bit for each set
        self._runs: dict[str, int] = {}
        self._counts: defaultdict[str, Counter[Match]] = defaultdict(Counter)
        self._by_source: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._problems: Counter[str] = Counter()

    def add(self, name: str, problem: str) -> None:
        """Adds a problem of the evaluation set `name`."""
        if name not in self.names:
            self.names.append(name)
        bit = 1 << self.names.index(name)
        self._problems[name] += 1
        hashed = digest(problem)
        self._digests[hashed] = self._digests.get(hashed, 0) | bit
        for run in _runs(problem, self._ngram):
            self._runs[run] = self._runs.get(run, 0) | bit

    def find(self, problem: str, hashed: bytes) -> dict[str, Match]:
        """Finds the evaluation sets that contain the problem, whose digest is `hashed` ("exact"), or share a run of words with it
        ("ngram")."""
        if not self.names:
            return {}
        exact, overlapping = self._digests.get(hashed, 0), 0
        for run in _runs(problem, self._ngram):
            if run in self._runs:
                overlapping |= self._runs[run]
        if not exact | overlapping:
            return {}
        found: dict[str, Match] = {}
        for index, name in enumerate(self.names):
            if exact >> index & 1:
                found[name] = "exact"
            elif overlapping >> index & 1:
                found[name] = "ngram"
        return found

    def count(self, found: dict[str, Match], source: str) -> None:
        """Adds a result of `find` to the counts; `source` names the source of the problem."""
        for name, match in found.items():
            self._counts[name][match] += 1
            self._by_source[name][source] += 1

    def summary(self) -> dict[str, object]:
        """Returns the counts by evaluation set: `{"gsm8k.jsonl": {"problems": 1319, "exact": 2, "ngram": 7, "by_source":
        {"orca_math": 9}}}`."""
        return {
            name: {
                "problems": self._problems[name],
                "exact": self._counts[name]["exact"],
                "ngram": self._counts[name]["ngram"],
                "by_source": dict(sorted(self._by_source[name].items())),
            }
            for name in self.names
        }


def given_problems(settings: GivenSetSection) -> Iterator[tuple[Row, str]]:
    """Yields the rows of an evaluation set, each with its problem's text. Raises UserError for a row without one, and for a set
    without rows."""
    empty = True
    for where, row in read_rows(settings.path, subset=settings.subset, split=settings.split):
        empty = False
        yield (where, row), field_of((where, row), settings.problem_field, PROBLEM_FIELDS, "problem")
    if empty:
        raise UserError(f"{settings.path}: no problems")


def field_of(row: Row, named: str | None, usual: tuple[str, ...], what: str) -> str:
    """Returns the text of a field: the one that is `named`, else the first of the `usual` ones. Raises UserError for a row without
    it."""
    where, fields = row
    name = named or next((one for one in usual if fields.get(one) is not None), None)
    value = None if name is None else fields.get(name)
    if value is None or isinstance(value, list | dict):
        there = ", ".join(map(repr, fields)) or "none"
        missing = repr(named) if named else " or ".join(map(repr, usual))
        raise UserError(f"{where}: no text {missing} for the {what}; the fields are {there}; name it in {what}_field")
    return str(value)


def _runs(problem: str, ngram: int) -> Iterator[str]:
    """Yields every run of `ngram` consecutive words of a problem, joined by spaces."""
    words = _WORD.findall(question_key(problem))
    if len(words) < ngram:
        return
    text = " ".join(words)
    start, ends = 0, []
    for word in words:
        start += len(word) + 1
        ends.append(start)
    begin = 0
    for first in range(len(words) - ngram + 1):
        yield text[begin : ends[first + ngram - 1] - 1]
        begin = ends[first]
