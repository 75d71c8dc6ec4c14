"""Reads the problems for self-play from one of these sources; answers in the records are ignored.

    prm800k[:PATH]                  the problems of PRM800K: from the hub, a local copy, or the file or directory PATH
    math_shepherd[:PATH]            the problems of Math-Shepherd, likewise
    hf:NAME[:SUBSET]:SPLIT          a dataset of the hub, or a local copy of one
    deepseek_math_v2_inputs:PATH    DeepSeek-Math-V2's inputs: a JSON list of {id, question, answer, contest, problem_idx}
    jsonl:PATH                      one object per line

The text of a problem is in the first of the fields `problem`, `question`, `prompt` and `input` that a record has, unless the
settings name another. Records with the same question (`nmoe.text.conversation`) give one problem; the dropped duplicates are
counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nmoe.config.tables.pools import SelfplayPool
from nmoe.data.prm import PRM800K, read_labelled
from nmoe.data.rows import Row, read_rows
from nmoe.envs.pools.pool import Shuffled, fingerprint_of
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.proofs import UNKNOWN
from nmoe.errors import UserError
from nmoe.text.conversation import question_key
from nmoe.types import Problem

TASK = "proof_generation"
QUESTION_FIELDS = ("problem", "question", "prompt", "input")
# Names of the datasets of labelled steps, on the hub or below $NMOE_DATASETS.
LABELLED = {"prm800k": PRM800K, "math_shepherd": "peiyi9979/Math-Shepherd"}
SOURCES = (
    "prm800k[:PATH]",
    "math_shepherd[:PATH]",
    "hf:NAME[:SUBSET]:SPLIT",
    "deepseek_math_v2_inputs:PATH",
    "jsonl:PATH",
)


class OpenProblems(Shuffled):
    """An order of a source's distinct problems, shuffled by the seed; `records` were read, and `duplicates` of them dropped."""

    def __init__(self, name: str, problems: list[Problem], seed: int, records: int) -> None:
        content = fingerprint_of(*(problem.question for problem in problems))
        super().__init__(name, len(problems), problems.__getitem__, seed, content)
        self.records = records
        self.duplicates = records - len(problems)


def open_problems(name: str, settings: SelfplayPool) -> OpenProblems:
    """Reads the problems of a source and drops duplicates.

    Raises UserError for a source that is unknown, unreadable or empty, and for a record without a problem, with its line.
    """
    found: dict[str, Problem] = {}
    records = 0
    for where, record in _rows(settings.source):
        if records == settings.max_examples:
            break
        question = _question(where, record, settings.problem_field)
        if (key := question_key(question)) not in found:
            prompt, gold, metadata = TASKS[TASK].pose(question, UNKNOWN, record)
            metadata = {"record": records, **_origin(record), **metadata}
            found[key] = Problem(f"{name}/{records}", TASK, prompt, gold, name, metadata)
        records += 1
    if not found:
        raise UserError(f"{settings.source}: no records; self-play needs at least one problem")
    return OpenProblems(name, list(found.values()), settings.seed, records)


def _rows(source: str) -> Iterator[Row]:
    kind, _, rest = source.partition(":")
    parts = rest.split(":")
    if kind in LABELLED and (rest or ":" not in source):
        reading = read_labelled(rest or LABELLED[kind], "train")
        return ((solution.where, {"problem": solution.problem}) for solution in reading.solutions)
    if kind == "deepseek_math_v2_inputs" and rest:
        return _inputs(rest)
    if kind == "jsonl" and rest:
        return read_rows(rest, form="jsonl")
    if kind == "hf" and len(parts) in (2, 3) and all(parts):
        return read_rows(parts[0], subset=parts[1] if len(parts) == 3 else None, split=parts[-1])
    raise UserError(f"{source!r} is not a source of problems; those are {', '.join(SOURCES)}")


def _inputs(path: str) -> Iterator[Row]:
    """Reads DeepSeek-Math-V2's inputs strictly, so that a truncated file, or one of another kind, is not mistaken for a short list
    of problems.
    """
    for where, record in read_rows(path, form="json"):
        if not isinstance(record.get("id"), str | int) or isinstance(record.get("id"), bool):
            raise UserError(f"{where}: no 'id'; DeepSeek-Math-V2's inputs are a list of {{id, question, answer, ...}}")
        yield where, {"question": record.get("question"), "input_id": str(record["id"])}


def _question(where: str, record: Mapping[str, Any], field: str | None) -> str:
    if field is None:
        field = next((name for name in QUESTION_FIELDS if name in record), None)
    if field is None or field not in record:
        wanted = f"no field {field!r}" if field else f"none of the fields {', '.join(QUESTION_FIELDS)}"
        raise UserError(
            f"{where}: {wanted}; the fields are {', '.join(map(repr, record)) or 'none'}: set selfplay.problem_field"
        )
    text = record[field]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: field {field!r} holds {repr(text)[:80]}, not the text of a problem")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: field {field!r} holds a lone surrogate, which is not a character") from None
    return text.strip()


def _origin(record: Mapping[str, Any]) -> dict[str, str]:
    return {"input_id": record["input_id"]} if "input_id" in record else {}
