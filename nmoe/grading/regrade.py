"""`nmoe grade FILE.jsonl`: grades recorded predictions, one JSON line in and one out.

{"gold": "\\frac{1}{2}", "prediction": "0.5", "id": "algebra/7"}
{"id": "algebra/7", "verdict": "correct", "layer": "numeric", "reason": "the same number"}

A line may have a "question". Its prediction is then graded as a task grades an answer: it has to be worked out.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TextIO

from nmoe.data.rows import read_lines, read_rows
from nmoe.errors import UserError
from nmoe.grading.extraction import content_of, from_final, joined_boxes, last_number, unreadable
from nmoe.grading.math.answers import grade_each
from nmoe.grading.math.question import DEFAULT, Policy
from nmoe.grading.prose import from_prose
from nmoe.text.harmony import read_completion
from nmoe.types import Verdict

Extract = Literal["whole", "boxed", "prose", "last_number", "harmony"]
_EXAMPLE = '{"gold": "18", "prediction": "18"}'
_NO_ANSWER = {
    "whole": "the prediction is empty",
    "boxed": r"no \boxed{} that closes",
    "prose": "no box, no formula, no number",
    "last_number": "no number",
    "harmony": "no well-formed completion with a final message",
}


@dataclass(frozen=True)
class Line:
    """One line of a file of predictions. `name` is {"id": ...} or, without an id, {"line": 17}; `question` is None if the line has
    none.
    """

    name: dict[str, Any]
    gold: str
    prediction: str
    question: str | None


def regrade(
    file: str, extract: Extract, out: TextIO, policy: Policy = DEFAULT, *, skip_unreadable: bool = False
) -> None:
    """Grades every line of `file` ("-" is stdin), writes one verdict per line to `out`, and a summary to stderr.

    All lines are read and checked before any is graded. Raises UserError with file and line for a line that is not an object
    with the strings `gold` and `prediction`, and `question` if it has one. Raises UserError naming every unreadable gold answer;
    with `skip_unreadable` those lines are skipped and counted instead.
    """
    records = read_lines("stdin", sys.stdin.buffer) if file == "-" else read_rows(file, form="jsonl")
    lines, faults = [], []
    for where, record in records:
        line = _line(where, record)
        fault = unreadable(line.gold)
        if fault is None:
            lines.append(line)
        else:
            faults.append(f"{where}: {fault}")
    if faults and not skip_unreadable:
        named = "\n".join(faults)
        raise UserError(
            f"{named}\n{len(faults)} of {len(lines) + len(faults)} golds cannot be read: give answers alone, or leave "
            "these lines out with --skip-unreadable"
        )
    if not lines:
        raise UserError(
            f"{file}: no lines{' with a gold that can be read' if faults else ''}; each is an object like {_EXAMPLE}"
        )
    began = time.perf_counter()
    verdicts: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    for line, verdict in zip(lines, _verdicts(lines, extract, policy), strict=True):
        verdicts[verdict.outcome] += 1
        layers[verdict.layer] += 1
        shown = {"verdict": verdict.outcome, "layer": verdict.layer, "reason": verdict.reason}
        out.write(json.dumps(line.name | shown) + "\n")
    elapsed_s = time.perf_counter() - began
    shares = ", ".join(f"{name} {count / len(lines):.1%}" for name, count in layers.most_common())
    skipped = f"; {len(faults)} skipped, whose gold cannot be read" if faults else ""
    print(
        f"{len(lines)} graded in {elapsed_s:.1f} s: {verdicts['correct']} correct ({verdicts['correct'] / len(lines):.1%}), "
        f"{verdicts['incorrect']} incorrect, {verdicts['error']} error; settled by layer: {shares}{skipped}",
        file=sys.stderr,
    )


def answer_of(prediction: str, extract: Extract) -> str | None:
    """Extracts the answer from a prediction; None if there is none."""
    if extract == "whole":
        return prediction.strip() or None
    if extract == "boxed":
        boxes = joined_boxes(prediction)
        return content_of(boxes) or None if boxes else None
    if extract == "prose":
        return from_prose(prediction).answer
    if extract == "last_number":
        return last_number(prediction)
    completion = read_completion(prediction)
    if completion.error is not None or completion.end != "return" or completion.final is None:
        return None
    return from_final(completion.final, bare_final=False).answer


def _verdicts(lines: list[Line], extract: Extract, policy: Policy) -> Iterator[Verdict]:
    answers = [answer_of(line.prediction, extract) for line in lines]
    graded = grade_each(
        (line.gold, answer, replace(policy, question=line.question))
        for line, answer in zip(lines, answers, strict=True)
        if answer is not None
    )
    for answer in answers:
        yield Verdict.of(False, "extraction", _NO_ANSWER[extract]) if answer is None else next(graded)


def _line(where: str, record: Mapping[str, Any]) -> Line:
    for field in ("gold", "prediction", *(("question",) if "question" in record else ())):
        if field not in record:
            raise UserError(f"{where}: no field {field!r}; a line is {_EXAMPLE}")
        if not isinstance(record[field], str):
            shown = json.dumps(record[field])[:80]
            raise UserError(f"{where}: {field!r} is {shown}, not a string; a line is {_EXAMPLE}")
    name = {"id": record["id"]} if "id" in record else {"line": int(where.rpartition(":")[2])}
    return Line(name, record["gold"], record["prediction"], record.get("question"))
