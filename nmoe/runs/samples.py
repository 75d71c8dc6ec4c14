r"""Formats a run's samples, and the answers that its evaluations keep, as lines of text for the console and for reports.

A policy can write control characters, which a terminal obeys. They are shown as escapes, `\x1b` for an escape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.errors import UserError
from nmoe.runs import PROBLEMS
from nmoe.runs.ledger import read_lines
from nmoe.runs.storage import step_name, step_of
from nmoe.text.printable import printable

CONSOLE_CHARACTERS = 400
# Of a text of more lines than these two together, its first and last lines are shown.
_HEAD, _TAIL = 8, 4

Record = Mapping[str, Any]


def shortened(text: str, characters: int) -> str:
    """Cuts a text to about `characters`: its beginning and end, with the number of characters left out between them."""
    left = len(text) - characters
    if left <= 0:
        return text
    head = characters - characters // 3
    return f"{text[:head]} ... {left:,} characters left out ... {text[head + left :]}"


def sample_lines(record: Record, characters: int | None = None) -> Iterator[str]:
    """Yields the lines that show one sample. Prompt and completion are shortened to `characters` each; None shows them whole.

        step 20, sample 0 of sort/152: reward 0.1 (format 1 x 0.1, correctness 0 x 1)
          incorrect: different text; answer '3086', right answer '0368'
          prompt:
            Sort: 3086
          completion:
            <|channel|>final<|message|>3086<|return|>

    All lines but the first are indented, so that no text can pass for a line of the run's log.
    """
    yield heading_of(record)
    yield from (f"  {line}" for line in reasons(record))
    for name, text in (("prompt", prompt_of(record)), ("completion", str(record.get("text", "")))):
        yield f"  {name}:"
        lines = printable(text if characters is None else shortened(text, characters)).split("\n")
        if characters is not None and (left := len(lines) - _HEAD - _TAIL) > 0:
            lines[_HEAD:-_TAIL] = [f"... {left:,} lines left out ..."]
        yield from (f"    {line}" for line in lines)


def heading_of(record: Record) -> str:
    """Returns the first line of a sample: `step 20, sample 0 of sort/152: reward 0.1 (format 1 x 0.1, correctness 0 x 1)`."""
    weights, components = record.get("weights") or {}, record.get("components") or {}
    parts = [f"{name} {value:.4g} x {weights[name]:.4g}" for name, value in components.items() if weights.get(name)]
    reward = record.get("reward")
    said = f"reward {reward:.4g}" if isinstance(reward, int | float) else "no reward"
    of = printable(str(record.get("problem", "?"))).replace("\n", "\\n")
    made = f" ({', '.join(parts)})" if parts else ""
    return f"step {record['step']}, sample {record.get('index', 0)} of {of}: {said}{made}"


def reasons(record: Record) -> Iterator[str]:
    """Yields a line with the reasons for the sample's reward: failure, verdict, answer and right answer, and a reward function's
    report."""
    verdict, failure = record.get("verdict"), record.get("failure", "ok")
    answer, gold = record.get("answer"), record.get("gold")
    found = [] if failure == "ok" else [str(failure)]
    if verdict is not None:
        found.append(f"{verdict['outcome']}: {verdict['reason']}")
    elif answer is None and not found:
        found.append("no answer found")
    if answer is not None:
        found.append(f"answer {shortened(answer, CONSOLE_CHARACTERS)!r}")
    if gold:
        found.append(f"right answer {shortened(str(gold), CONSOLE_CHARACTERS)!r}")
    if record.get("reason"):
        found.append(str(record["reason"]))
    yield printable("; ".join(found)).replace("\n", "\\n")


def prompt_of(record: Record) -> str:
    """Returns the question, after the messages before it, each as `system: Be brief.`."""
    history = record.get("history") or ()
    said = [f"{message['role']}: {message['content']}" for message in history]
    return "\n".join([*said, f"user: {record.get('question', '')}"]) if said else str(record.get("question", ""))


def latest_samples(run: Path, problems: int = PROBLEMS) -> list[Record]:
    """Returns samples of the latest steps that recorded any, the newest step first: for each of `problems` problems the sample with
    the highest reward and, if it differs, the one with the lowest. Raises UserError, naming file and line, for a line that is no
    record."""
    found: dict[str, list[Record]] = {}
    for file in reversed(_files(run)):
        if len(found) >= problems:
            break
        by_problem: dict[str, list[Record]] = {}
        for record in read_lines(file):
            by_problem.setdefault(str(record.get("problem", "?")), []).append(record)
        for problem, records in by_problem.items():
            if problem not in found and len(found) < problems:
                found[problem] = _ends(records)
    return [record for records in found.values() for record in records]


def _ends(records: Sequence[Record]) -> list[Record]:
    def reward(record: Record) -> float:
        return float(record.get("reward") or 0.0)

    highest, lowest = max(records, key=reward), min(records, key=reward)
    return [highest] if reward(highest) == reward(lowest) else [highest, lowest]


def show_samples(run: Path, step: int | None, problems: int, characters: int) -> Iterator[str]:
    """Yields the lines of `nmoe runs samples`: all samples of a step, or `latest_samples` if `step` is None. `characters` of 0
    shows them whole.

    Raises UserError if the run has no samples, or none of the step.
    """
    files = _files(run)
    if not files:
        raise UserError(
            f"{run}: no samples there; nmoe rl train and nmoe selfplay record samples of their steps in samples/"
        )
    if step is None:
        records: Sequence[Record] = latest_samples(run, problems)
    else:
        file = run / "samples" / f"{step_name(step)}.jsonl"
        if not file.exists():
            first, last = (step_of(one.stem) for one in (files[0], files[-1]))
            raise UserError(f"--step={step}: {run} has no samples of it; those it has are of steps {first} to {last}")
        records = read_lines(file)
    for number, record in enumerate(records):
        if number:
            yield ""
        yield from sample_lines(record, characters or None)


def _files(run: Path) -> list[Path]:
    return sorted((run / "samples").glob("step_*.jsonl"))


COMPLETIONS = 200
"""The largest number of completions whose answers an evaluation keeps, from its first problems."""
CHARACTERS = 300
"""The largest number of characters of a question, right answer or answer that an evaluation keeps."""


def how_ended(result: Mapping[str, Any]) -> str:
    """Returns how many completions of a result failed, by the class of failure: `44 of 50 were cut at 12 new tokens, 3
    parse_error`.

    "" if none did, and for results without this information.
    """
    failures = result.get("failures") or {}
    limit = (result.get("sampling") or {}).get("max_tokens")
    at = "the end of the context" if limit is None else f"{limit:,} new tokens"
    cut = failures.get("truncated", 0)
    said = [f"{cut} of {sum(failures.values())} {'was' if cut == 1 else 'were'} cut at {at}"] if cut else []
    said += [f"{count} {name}" for name, count in failures.items() if name not in ("ok", "truncated")]
    return ", ".join(said)


def show_answers(run: Path, step: int | None, problems: int) -> Iterator[str]:
    """Yields the lines of `nmoe runs samples --eval`: the answers that the evaluation of a step recorded, the wrong ones first.

    Without a `step`, shows the last evaluation that recorded any. Raises UserError if no answers were recorded, or none
    at that step.
    """
    from nmoe.runs.record import read_evaluations  # here, so that `nmoe runs samples` does not wait for torch

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
    """Yields lines with a result and the answers to `problems` of its problems, the wrong ones first:

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
    """Returns a problem's answers with each text shortened to CHARACTERS."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(one) for one in value]
        return shortened(value, CHARACTERS) if isinstance(value, str) else value

    return {key: short(value) for key, value in answers.items()}


def _line(text: str) -> str:
    return printable(text).replace("\n", "\\n")
