"""`nmoe grade FILE.jsonl`: grades recorded predictions, one JSON line in and one out.

{"gold": "\\frac{1}{2}", "prediction": "0.5", "id": "algebra/7"}
{"id": "algebra/7", "verdict": "correct", "layer": "numeric", "reason": "the same number"}
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from nmoe.data.rows import read_lines, read_rows
from nmoe.errors import UserError
from nmoe.rl.grading.answers import grade_answers
from nmoe.rl.grading.extraction import from_final, last_boxed, last_number
from nmoe.rl.grading.normalization import MAX_ANSWER_CHARS, normalize
from nmoe.rl.grading.verdict import Verdict
from nmoe.text.harmony_text import read_completion

Extract = Literal["whole", "boxed", "last_number", "harmony"]
_EXAMPLE = '{"gold": "18", "prediction": "18"}'
_NO_ANSWER = {
    "whole": "the prediction is empty",
    "boxed": r"no \boxed{} that closes",
    "last_number": "no number",
    "harmony": "no well-formed completion with a final message",
}


@dataclass(frozen=True)
class Line:
    """What is asked about: `name` is {"id": ...} or, without one, {"line": 17}."""

    name: dict[str, Any]
    gold: str
    prediction: str


def regrade(file: str, extract: Extract, out: TextIO) -> None:
    """Grades every line of `file` ("-" is stdin), writes one line each to `out` and a summary to stderr.

    Everything is read and checked before anything is graded. Raises UserError with file and line for a line that is no object with
    the strings `gold` and `prediction`, or whose gold can not be compared with.
    """
    records = read_lines("stdin", sys.stdin.buffer) if file == "-" else read_rows(file, form="jsonl")
    lines = [_line(where, record) for where, record in records]
    if not lines:
        raise UserError(f"{file}: no lines; each is an object like {_EXAMPLE}")
    began = time.perf_counter()
    verdicts: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    for line, verdict in zip(lines, _verdicts(lines, extract), strict=True):
        verdicts[verdict.outcome] += 1
        layers[verdict.layer] += 1
        shown = {"verdict": verdict.outcome, "layer": verdict.layer, "reason": verdict.reason}
        out.write(json.dumps(line.name | shown) + "\n")
    elapsed_s = time.perf_counter() - began
    shares = ", ".join(f"{name} {count / len(lines):.1%}" for name, count in layers.most_common())
    print(
        f"{len(lines)} graded in {elapsed_s:.1f} s: {verdicts['correct']} correct ({verdicts['correct'] / len(lines):.1%}), "
        f"{verdicts['incorrect']} incorrect, {verdicts['error']} error; settled by layer: {shares}",
        file=sys.stderr,
    )


def answer_of(prediction: str, extract: Extract) -> str | None:
    """The answer in a prediction, None where there is none."""
    if extract == "whole":
        return prediction.strip() or None
    if extract == "boxed":
        box = last_boxed(prediction)
        return None if box is None else box.content or None
    if extract == "last_number":
        return last_number(prediction)
    completion = read_completion(prediction)
    if completion.error is not None or completion.end != "return" or completion.final is None:
        return None
    return from_final(completion.final, bare_final=False).answer


def _verdicts(lines: list[Line], extract: Extract) -> Iterator[Verdict]:
    answers = [answer_of(line.prediction, extract) for line in lines]
    found = ((line.gold, answer) for line, answer in zip(lines, answers, strict=True) if answer is not None)
    graded = grade_answers(found)
    for answer in answers:
        yield Verdict.of(False, "extraction", _NO_ANSWER[extract]) if answer is None else next(graded)


def _line(where: str, record: Mapping[str, Any]) -> Line:
    for field in ("gold", "prediction"):
        if not isinstance(record.get(field), str):
            shown = json.dumps(record.get(field))[:80]
            raise UserError(f"{where}: {field!r} is {shown}, not a string; a line is {_EXAMPLE}")
    gold = record["gold"]
    if not normalize(gold) or len(gold.strip()) > MAX_ANSWER_CHARS:
        raise UserError(
            f"{where}: the gold answer {gold[:60]!r} is empty without its typesetting, or longer than {MAX_ANSWER_CHARS} "
            "characters; give the answer alone"
        )
    name = {"id": record["id"]} if "id" in record else {"line": int(where.rpartition(":")[2])}
    return Line(name, gold, record["prediction"])
