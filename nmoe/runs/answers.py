"""The answers that an evaluation of a run keeps in eval/: how the completions ended, and each problem's as lines to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nmoe.errors import UserError
from nmoe.runs.record import read_evaluations
from nmoe.runs.samples import shortened
from nmoe.text.printable import printable

COMPLETIONS = 200
"""The most completions whose answers an evaluation keeps, of its first problems."""
CHARACTERS = 300
"""The most characters of a question, gold or answer there."""


def how_ended(result: Mapping[str, Any]) -> str:
    """How many completions of a result failed, by the class of failure: `44 of 50 were cut at 12 new tokens, 3 parse_error`.

    Empty where none did, and for results that do not say."""
    failures = result.get("failures") or {}
    limit = (result.get("sampling") or {}).get("max_tokens")
    at = "the end of the context" if limit is None else f"{limit:,} new tokens"
    cut = failures.get("truncated", 0)
    said = [f"{cut} of {sum(failures.values())} {'was' if cut == 1 else 'were'} cut at {at}"] if cut else []
    said += [f"{count} {name}" for name, count in failures.items() if name not in ("ok", "truncated")]
    return ", ".join(said)


def show_answers(run: Path, step: int | None, problems: int) -> Iterator[str]:
    """The lines of `nmoe runs samples --eval`: the answers that the evaluation of a step kept, the wrong ones first. The default
    is the last evaluation that has any.

    Raises UserError where there are none."""
    found = [one for one in read_evaluations(run / "eval") if any(result.get("answers") for result in one["results"])]
    if not found:
        raise UserError(
            f"{run}: no evaluation there keeps answers; runs with an [[eval]] that samples write them to eval/"
        )
    record = next((one for one in found if one["step"] == step), None if step is not None else found[-1])
    if record is None:
        steps = ", ".join(str(one["step"]) for one in found)
        raise UserError(f"--step={step}: {run} kept no answers then; the evaluations with answers are of steps {steps}")
    for result in record["results"]:
        if result.get("answers"):
            yield from answer_lines(record["step"], result, problems)


def answer_lines(step: int, result: Mapping[str, Any], problems: int) -> Iterator[str]:
    """A result and the answers to so many of its problems, the wrong ones first:

    step 10, greedy_pass@1 on larger 0.0% of 50: 44 of 50 were cut at 12 new tokens
      larger/3: Which number is larger, 843 or 181?
        right answer '843'
        truncated: 'To determine which number is larger, we'
    """
    ended = how_ended(result)
    value = f"{result['mode']} on {result['dataset']} {result['value']:.1%} of {result['problems']:,}"
    yield _line(f"step {step}, {value}{f': {ended}' if ended else ''}")
    for answered in sorted(result["answers"], key=lambda one: all(one["correct"]))[:problems]:
        yield f"  {_line(str(answered['id']))}: {_line(str(answered['question']))}"
        yield f"    right answer {_line(repr(answered['gold']))}"
        for answer, correct, failure in zip(
            answered["answers"], answered["correct"], answered["failures"], strict=True
        ):
            verdict = failure if failure != "ok" else "right" if correct else "wrong"
            yield f"    {verdict}: {_line('no answer' if answer is None else repr(answer))}"


def bounded(answers: Mapping[str, Any]) -> dict[str, Any]:
    """A problem's answers with texts of at most CHARACTERS."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(one) for one in value]
        return shortened(value, CHARACTERS) if isinstance(value, str) else value

    return {key: short(value) for key, value in answers.items()}


def _line(text: str) -> str:
    return printable(text).replace("\n", "\\n")
