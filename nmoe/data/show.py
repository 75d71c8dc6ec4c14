"""Shows how records are tokenized and which tokens are learned (`nmoe data show`), or writes both to a file (`nmoe data export`).

A line of an export:

    {"input_ids": [5, 6, 7, 2], "labels": [-100, -100, 7, 2], "loss_mask": [0, 0, 1, 1]}

A label is the token to predict at its own position, as in transformers, whose models shift. The first token is never predicted, so
it is never a label.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path

import numpy as np

from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.examples import Example, Examples, read_examples, render
from nmoe.data.pairs import completion_pair
from nmoe.data.records import Preference, Prompt, Record, Records, Stepwise, read_records
from nmoe.data.rows import is_pattern
from nmoe.errors import StorageError, UserError
from nmoe.text.conversation import ChatMessage
from nmoe.text.printable import printable, token_table
from nmoe.text.renderers import IGNORED, Rendered, Renderer, RenderFormat, make_renderer
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

_LEARNED, _PLAIN = "\x1b[32m", "\x1b[0m"


def dataset_settings(
    path: str, kind: str | None, columns: Sequence[str], subset: str | None, split: str
) -> DatasetSettings:
    """Builds the dataset settings from command-line arguments, where a column is written "prompt=question". Raises UserError."""
    mapped = dict[str, str]()
    for column in columns:
        name, equals, value = column.partition("=")
        if not equals or not value:
            raise UserError(f"--column {column}: write COLUMN=NAME, such as prompt=question")
        mapped[name] = value
    given = {"path": path, "kind": kind, "columns": mapped, "subset": subset, "split": split}
    return parse(given, DatasetSettings, Locator(Place("the command line")))


def show_data(
    settings: DatasetSettings, directory: Path | None, form: RenderFormat, masks: bool, records_shown: int
) -> Iterator[str]:
    """Yields the report line by line, with the tokens of the tokenizer in `directory`; None stands for a byte tokenizer.

    Reads every record, and renders the kinds that are trained on. Raises UserError, with file and line, for a bad record.
    """
    records = read_records(settings)
    yield records.described
    if directory is None:
        tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY)
        yield "tokenizer: nmoe's own, untrained: each byte a token (--tokenizer takes a run, checkpoint or tokenizer directory)"
    else:
        tokenizer = Tokenizer.load(directory)
        yield f"tokenizer: {directory}"
    renderer = make_renderer(tokenizer, form)
    yield f"rendered as {renderer.name}"
    if masks:
        yield f"learned tokens are {'green' if _coloured() else 'between ⟦ and ⟧'}, and have mask 1"
    statistics = _Statistics()
    for number, record in enumerate(records, start=1):
        sequences = list(_sequences(record, renderer, tokenizer))
        statistics.add(record, sequences)
        if masks and number <= records_shown:
            yield ""
            yield f"{record.where}:"
            for name, sequence in sequences:
                yield from _shown(name, sequence, tokenizer)
    yield ""
    yield from statistics.lines(records)


def _sequences(record: Record, renderer: Renderer, tokenizer: Tokenizer) -> Iterator[tuple[str, Rendered]]:
    """Yields the training sequences of a record, each with a name ("" if there is only one).

    A prompt, or a solution with labels, is not trained on in this form; only its text is tokenized.
    """
    match record:
        case Preference():
            pair = completion_pair(record, renderer)
            yield from (("chosen", pair.chosen), ("rejected", pair.rejected))
        case Prompt():
            yield "", _read(record.prompt, tokenizer)
        case Stepwise():
            steps = (ChatMessage("assistant", step) for step in record.steps)
            yield "", _read((*record.prompt, *steps), tokenizer)
        case _:
            sequences = render(record, renderer, tokenizer)
            for number, sequence in enumerate(sequences, start=1):
                yield "" if len(sequences) == 1 else f"sequence {number} of {len(sequences)}", sequence


def _read(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> Rendered:
    sequence = Rendered()
    sequence.read([token_id for message in messages for token_id in tokenizer.encode(message.content)])
    return sequence


def _shown(name: str, sequence: Rendered, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields lines with a sequence's text, its learned parts marked, then with its tokens, and last with labels that differ from
    the token."""
    if name:
        yield f"  {name}:"
    opening, closing = (_LEARNED, _PLAIN) if _coloured() else ("⟦", "⟧")
    text = ""
    for ids, learned in _runs(sequence):
        decoded = printable(tokenizer.decode(ids))
        # A terminal colour is set again on every line.
        text += "\n".join(f"{opening}{line}{closing}" for line in decoded.split("\n")) if learned else decoded
    yield from (f"  | {line}" for line in text.split("\n"))
    yield from token_table(sequence.ids, [int(label != IGNORED) for label in sequence.labels], tokenizer)
    for position, (token_id, label) in enumerate(zip(sequence.ids, sequence.labels, strict=True)):
        if label not in (IGNORED, token_id):
            yield f"{position:>5} learned as {tokenizer.decode([label])}, which the history shows as {tokenizer.decode([token_id])}"


def _runs(sequence: Rendered) -> Iterator[tuple[list[int], bool]]:
    run: list[int] = []
    for position, (token_id, label) in enumerate(zip(sequence.ids, sequence.labels, strict=True)):
        learned = label != IGNORED
        run.append(token_id)
        if position + 1 == len(sequence.ids) or (sequence.labels[position + 1] != IGNORED) != learned:
            yield run, learned
            run = []


def _coloured() -> bool:
    return sys.stdout.isatty()


class _Statistics:
    """Counts records, tokens and labels, for the end of the report."""

    def __init__(self) -> None:
        self.records = 0
        self.tokens: dict[str, list[int]] = {}
        self.learned: dict[str, list[int]] = {}
        self.labels: Counter[str] = Counter()

    def add(self, record: Record, sequences: Iterable[tuple[str, Rendered]]) -> None:
        self.records += 1
        for name, sequence in sequences:
            side = name if isinstance(record, Preference) else ""
            self.tokens.setdefault(side, []).append(len(sequence.ids))
            self.learned.setdefault(side, []).append(sequence.learned)
        if isinstance(record, Stepwise):
            self.labels.update(label or "none" for label in record.labels)

    def lines(self, records: Records) -> Iterator[str]:
        sequences = sum(map(len, self.tokens.values()))
        yield f"{self.records:,} records of kind {records.kind} = {sequences:,} sequences"
        for side, tokens in self.tokens.items():
            of = f"of {side}: " if side else ""
            yield f"tokens {of}{_quantiles(tokens)}; {sum(tokens):,} in all"
            learned = self.learned[side]
            if sum(learned):
                yield f"learned {of}{_quantiles(learned)}; {sum(learned):,} in all, {sum(learned) / sum(tokens):.1%} of the tokens"
        if self.labels:
            yield "labels " + ", ".join(f"{label}: {count:,}" for label, count in self.labels.most_common())


def _quantiles(counts: Sequence[int]) -> str:
    least, half, most, longest = np.quantile(counts, [0, 0.5, 0.95, 1], method="lower")
    return f"least {least:,}, median {half:,}, 95% at most {most:,}, most {longest:,}"


_SLICE = re.compile(r"@\[[^]]*\]$")


def export_masked(
    settings: DatasetSettings, out: Path, directory: Path | None, form: RenderFormat, context_tokens: int | None
) -> Iterator[str]:
    """Writes a line for every training sequence to `out`, with the tokenizer in `directory` (None: a byte tokenizer). Yields lines
    about the sequences read and left out: as in training, sequences longer than `context_tokens`, if given, are left out.

    Raises UserError, with file and line, for a bad record, or for an `out` among the files that are read, and StorageError. `out`
    is written completely or not at all.
    """
    read = _SLICE.sub("", settings.path)
    if _is_read(out, read):
        raise UserError(f"{out}: is among the files that are read, {read}; name another file to write")
    tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY) if directory is None else Tokenizer.load(directory)
    renderer = make_renderer(tokenizer, form)
    examples = read_examples(settings, renderer, tokenizer, context_tokens or sys.maxsize)
    _write(out, examples)
    yield from examples.notes()
    yield f"{out}: {len(examples):,} sequences"


def _is_read(out: Path, read: str) -> bool:
    """Returns whether a file is, or would be once it is written, among the files that a name or pattern stands for."""
    target = out.resolve()
    if not is_pattern(read):
        return out.exists() and (target == Path(read).resolve() or Path(read).resolve() in target.parents)
    pattern = Path.cwd() / read
    if "**" in pattern.parts:
        # `**/` stands for no directory, too.
        return any(fnmatch(str(target), sign) for sign in (str(pattern), str(pattern).replace("**/", "")))
    parts = zip(target.parts, pattern.parts, strict=False)
    return len(target.parts) == len(pattern.parts) and all(fnmatchcase(part, sign) for part, sign in parts)


def masked(example: Example) -> dict[str, list[int]]:
    """Returns a sequence as a line of the export: `input_ids`, `labels` and `loss_mask`, all of the sequence's length."""
    labels = [IGNORED, *example.labels[1:].tolist()]
    return {
        "input_ids": example.ids.tolist(),
        "labels": labels,
        "loss_mask": [int(label != IGNORED) for label in labels],
    }


def _write(out: Path, examples: Examples) -> None:
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as file:
            for index in range(len(examples)):
                file.write(json.dumps(masked(examples[index])) + "\n")
        os.replace(partial, out)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {error.strerror or error}") from error
