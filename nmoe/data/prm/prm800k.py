"""Reads PRM800K: steps labelled by people (Lightman et al. 2023, arXiv:2305.20050; https://github.com/openai/prm800k).

A record is one labelling of a solution: `question` with the problem and, in phase 2, the whole generated solution, and `label`
with, for each step, its possible `completions`, of which one was chosen to continue from, or a `human_completion` if none was good
enough. Phase 1 offers several completions a step; phase 2 one, and ends at the first wrong step, where both are null. A rating is
-1, 0, 1 or null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nmoe.data.prm.labelled import LabelledSteps, StepDataset
from nmoe.data.rows import Row
from nmoe.errors import UserError

_LABEL_OF: dict[int, str] = {1: "+", 0: "0", -1: "-"}
_REASONS = ("found_error", "solution", "bad_problem", "give_up")


def is_prm800k(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("question"), Mapping) and isinstance(record.get("label"), Mapping)


def read_prm800k(rows: Iterable[Row]) -> StepDataset:
    """Reads every record as a solution, and its rated but not chosen completions, after the steps before them, as alternative
    solutions.

    Dropped are rows of quality control and screening, bad problems, flagged completions with the steps after them, completions that
    were neither rated nor chosen, and empty steps. Raises UserError, with file and line, for a record of another form.
    """
    reading = StepDataset()
    for where, record in rows:
        reading.records += 1
        try:
            reading.solutions += _solutions(where, record, reading.dropped)
        except _MalformedError as error:
            raise UserError(f"{where}: not a record of PRM800K: {error}") from None
    return reading


class _MalformedError(Exception):
    pass


def _solutions(where: str, record: Mapping[str, Any], dropped: Counter[str]) -> list[LabelledSteps]:
    question, label = _object(record.get("question"), "question"), _object(record.get("label"), "label")
    problem, written = question.get("problem"), label.get("steps")
    if not isinstance(problem, str) or not isinstance(written, list):
        raise _MalformedError("question.problem is a text, and label.steps a list")
    reason = label.get("finish_reason")
    if reason not in _REASONS:
        raise _MalformedError(f"label.finish_reason is {reason!r}, not one of {', '.join(_REASONS)}")
    if record.get("is_quality_control_question"):
        dropped["rows of quality control"] += 1
        return []
    if record.get("is_initial_screening_question"):
        dropped["rows of screening"] += 1
        return []
    if reason == "bad_problem" or not problem.strip():
        dropped["bad problems"] += 1
        return []
    steps: list[str] = []
    labels: list[str | None] = []
    alternatives: list[LabelledSteps] = []
    finished = reason == "solution"
    for number, step in enumerate(written):
        taken, others = _read_step(step, f"label.steps[{number}]")
        for completion in others:
            if _dropped(completion, dropped):
                continue
            if completion.label is None:
                dropped["completions without a rating"] += 1
                continue
            path, rated = (*steps, completion.text), (*labels, completion.label)
            alternatives.append(LabelledSteps.of_record(problem, path, rated, False, where, alternative=True))
        if taken is None or _dropped(taken, dropped):
            finished = False
            break
        steps.append(taken.text)
        labels.append(taken.label)
        if taken.label == "-":
            finished = False
            dropped["steps after the first wrong one"] += len(written) - number - 1
            break
    rest: list[str] = []
    if labels and labels[-1] == "-":
        generated = question.get("pre_generated_steps") or []
        if generated[: len(steps)] == steps:
            rest = generated[len(steps) :]
            dropped["steps after the first wrong one"] += len(rest)
    whole = LabelledSteps.of_record(problem, steps, labels, finished, where, rest)
    return [whole, *alternatives] if any(one is not None for one in labels) else alternatives


@dataclass(frozen=True)
class _Completion:
    text: str
    label: str | None
    flagged: bool


def _dropped(completion: _Completion, dropped: Counter[str]) -> bool:
    """Returns whether a completion is dropped (flagged or empty), and counts it if so."""
    if completion.flagged:
        dropped["flagged completions"] += 1
    elif not completion.text.strip():
        dropped["empty steps"] += 1
    return completion.flagged or not completion.text.strip()


def _read_step(step: Any, key: str) -> tuple[_Completion | None, list[_Completion]]:
    """Returns the completion that the solution continues from or ends in (None if there is none), and the other ones."""
    listed = _object(step, key).get("completions") or []
    if not isinstance(listed, list):
        raise _MalformedError(f"{key}.completions is not a list")
    completions = [_read_completion(one, f"{key}.completions[{i}]") for i, one in enumerate(listed)]
    chosen, human = step.get("chosen_completion"), step.get("human_completion")
    if chosen is not None:
        if type(chosen) is not int or not 0 <= chosen < len(completions):
            raise _MalformedError(
                f"{key}.chosen_completion is {chosen!r}, and there are {len(completions)} completions"
            )
        return completions[chosen], completions[:chosen] + completions[chosen + 1 :]
    if human is not None:
        written = _read_completion({"text": human} if isinstance(human, str) else human, f"{key}.human_completion")
        # A person wrote it because no completion was right, so it is right, though seldom rated.
        return replace(written, label=written.label or "+"), completions
    # If a wrong step ends the solution, no completion was chosen.
    wrong = next((one for one in completions if one.label == "-"), None)
    return wrong, [one for one in completions if one is not wrong]


def _read_completion(completion: Any, key: str) -> _Completion:
    if not isinstance(completion, Mapping) or not isinstance(completion.get("text"), str):
        raise _MalformedError(f"{key} has no text")
    rating = completion.get("rating")
    if rating is not None and (type(rating) is not int or rating not in _LABEL_OF):
        raise _MalformedError(f"{key}.rating is {rating!r}, not -1, 0, 1 or null")
    return _Completion(
        completion["text"], None if rating is None else _LABEL_OF[rating], bool(completion.get("flagged"))
    )


def _object(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _MalformedError(f"{key} is {type(value).__name__}, not an object")
    return value
