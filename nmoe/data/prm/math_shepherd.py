"""Reads Math-Shepherd: steps labelled by whether sampled completions from there reach the answer (Wang et al. 2024,
arXiv:2312.08935).

A record holds `input`, the problem and its steps with the tag ки behind each, `label`, the same text with + or - instead of each
tag, and `task`. Wrong means here that completions no longer reached the answer: an estimate, and weaker evidence than a person's
label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nmoe.data.prm.labelled import LabelledSteps, StepDataset
from nmoe.data.rows import Row
from nmoe.errors import UserError

TAG = "ки"
_FIRST_STEP = "Step 1:"
_NUMBERING = re.compile(r"^\s*Step \d+:")


def is_math_shepherd(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("label"), str) and TAG in str(record.get("input"))


def read_math_shepherd(rows: Iterable[Row]) -> StepDataset:
    """Reads every record as a solution that ends at its first wrong step. Empty steps and all later ones, and steps after the first
    wrong one, are dropped and counted. Raises UserError, with file and line, for a record of another form."""
    reading = StepDataset()
    for where, record in rows:
        reading.records += 1
        try:
            problem, steps, labels = _tagged(record)
        except ValueError as error:
            raise UserError(f"{where}: not a record of Math-Shepherd: {error}") from None
        finished = True
        if not all(steps):
            end = steps.index("")
            reading.dropped["empty steps, and the steps after them"] += len(steps) - end
            steps, labels, finished = steps[:end], labels[:end], False
        if "-" in labels:
            end = labels.index("-") + 1
            reading.dropped["steps after the first wrong one"] += len(steps) - end
            rest, steps, labels, finished = steps[end:], steps[:end], labels[:end], False
        else:
            rest = []
        if steps:
            solution = LabelledSteps.of_record(problem, steps, labels, finished, where, rest)
            reading.solutions.append(solution)
    return reading


def _tagged(record: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    """Parses a record into problem, steps without their numbers, and labels. Raises ValueError."""
    text, labelled = record.get("input"), record.get("label")
    if not isinstance(text, str) or not isinstance(labelled, str):
        raise ValueError("`input` and `label` are texts")
    *parts, tail = text.split(TAG)
    if not parts:
        raise ValueError(f"no step ends in the tag {TAG!r}")
    if tail.strip():
        raise ValueError(f"text behind the last tag: {tail.strip()[:60]!r}")
    labels, position = [], 0
    for part in parts:
        after = position + len(part)
        if labelled[position:after] != part or labelled[after : after + 1] not in ("+", "-"):
            raise ValueError(
                f"`label` is not `input` with + or - in place of {TAG!r}: {labelled[position : after + 10]!r}"
            )
        labels.append(labelled[after])
        position = after + 1
    if labelled[position:].strip():
        raise ValueError(f"`label` goes on behind the last step: {labelled[position : position + 60]!r}")
    problem, marker, first = parts[0].partition(_FIRST_STEP)
    if not marker or not problem.strip():
        raise ValueError(f"no problem before {_FIRST_STEP!r}")
    return problem.strip(), [first.strip(), *(_NUMBERING.sub("", part).strip() for part in parts[1:])], labels
