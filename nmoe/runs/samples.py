"""The samples of a run as lines of text: prompt, completion, reward, and why. On the console, in reports, by `nmoe runs samples`.

A policy writes what it likes, and a terminal obeys control characters: they are shown as escapes, `\\x1b` for an escape.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.errors import UserError
from nmoe.runs.ledger import read_lines
from nmoe.runs.sample_limits import PROBLEMS
from nmoe.runs.storage import step_name, step_of
from nmoe.text.printable import printable

CONSOLE_CHARACTERS = 400
# Of a text of more lines than these two together, its first and last lines are shown.
_HEAD, _TAIL = 8, 4

Record = Mapping[str, Any]


def shortened(text: str, characters: int) -> str:
    """The beginning and the end of a text that has more than so many characters, and how many are left out between them."""
    left = len(text) - characters
    if left <= 0:
        return text
    head = characters - characters // 3
    return f"{text[:head]} ... {left:,} characters left out ... {text[head + left :]}"


def sample_lines(record: Record, characters: int | None = None) -> Iterator[str]:
    """One sample, of which prompt and completion have at most so many characters each; None: all of them.

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
    """`step 20, sample 0 of sort/152: reward 0.1 (format 1 x 0.1, correctness 0 x 1)`."""
    weights, components = record.get("weights") or {}, record.get("components") or {}
    parts = [f"{name} {value:.4g} x {weights[name]:.4g}" for name, value in components.items() if weights.get(name)]
    reward = record.get("reward")
    said = f"reward {reward:.4g}" if isinstance(reward, int | float) else "no reward"
    of = printable(str(record.get("problem", "?"))).replace("\n", "\\n")
    made = f" ({', '.join(parts)})" if parts else ""
    return f"step {record['step']}, sample {record.get('index', 0)} of {of}: {said}{made}"


def reasons(record: Record) -> Iterator[str]:
    """Why the sample has its reward: the verdict, how it ended, and what a reward reported; each a line."""
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
    """The question, after the messages before it: `system: Be brief.` and so on."""
    history = record.get("history") or ()
    said = [f"{message['role']}: {message['content']}" for message in history]
    return "\n".join([*said, f"user: {record.get('question', '')}"]) if said else str(record.get("question", ""))


def latest_samples(run: Path, problems: int = PROBLEMS) -> list[Record]:
    """Samples of the last steps that recorded any, the newest step first: of each of so many problems the one with the highest and,
    where it differs, the one with the lowest reward. Raises UserError, naming file and line, for a line that is no record."""
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
    """The lines of `nmoe runs samples`: all samples of a step, or those of `latest_samples`. `characters` of 0 shows them whole.

    Raises UserError where the run has none.
    """
    files = _files(run)
    if not files:
        raise UserError(
            f"{run}: no samples there; nmoe rl train and nmoe selfplay record those of their steps in samples/"
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
