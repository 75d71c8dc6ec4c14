"""Training examples: records rendered as tokens and labels, stored in flat arrays of eight bytes per token."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nmoe.config.tables.recipes import DatasetSettings, Kind
from nmoe.data.held_out import held_out, prompt_of, refuse_empty
from nmoe.data.packing import Mixture
from nmoe.data.records import Conversation, PromptCompletion, Record, Text, read_records
from nmoe.errors import UserError
from nmoe.text.renderers import IGNORED, Rendered, Renderer
from nmoe.text.renderers.base import end_of_text
from nmoe.text.tokenizer import Tokenizer

TRAINED_KINDS: tuple[Kind, ...] = ("messages", "prompt_completion", "text")
_SHOWN_RECORDS = 3


@dataclass(frozen=True)
class Example:
    """One training sequence up to its last learned token: `ids` and `labels` of equal length, as in `Rendered`."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]


class Examples:
    """The training examples of a dataset, with counts of the records that were left out."""

    def __init__(self) -> None:
        self._ids, self._labels = array("i"), array("i")
        self._ends, self._records = array("q", [0]), array("q")
        self._prompts: dict[int, str] = {}
        self.described: list[str] = []
        self.records = 0
        self.overlong: list[str] = []

    def add(self, rendered: Rendered, prompt: str) -> None:
        """Adds a sequence, which ends in a learned token, for the record read last; `prompt` is the record's question."""
        self._prompts[self.records] = hashlib.sha256(prompt.encode(errors="replace")).hexdigest()
        self._ids.extend(rendered.ids)
        self._labels.extend(rendered.labels)
        self._ends.append(len(self._ids))
        self._records.append(self.records)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Example:
        part = slice(self._ends[index], self._ends[index + 1])
        return Example(np.frombuffer(self._ids, np.int32)[part], np.frombuffer(self._labels, np.int32)[part])

    def listed(self) -> list[Example]:
        """Returns all examples, in order."""
        return [self[index] for index in range(len(self))]

    @property
    def lengths(self) -> list[int]:
        """The number of positions that the model runs for each example, one less than the tokens."""
        return [self._ends[index + 1] - self._ends[index] - 1 for index in range(len(self))]

    @property
    def learned(self) -> int:
        """The number of tokens that are predicted; a sequence's first token never is."""
        labels = np.frombuffer(self._labels, np.int32) if len(self) else np.empty(0, np.int32)
        firsts = np.frombuffer(self._ends, np.int64)[:-1]
        return int((labels != IGNORED).sum() - (labels[firsts] != IGNORED).sum())

    @property
    def fingerprint(self) -> str:
        """A digest of all tokens, labels and lengths."""
        digest = hashlib.sha256()
        for column in (self._ids, self._labels, self._ends):
            digest.update(column.tobytes())
        return digest.hexdigest()

    def notes(self) -> list[str]:
        """Returns lines for the user about the records read and left out."""
        lengths = self.lengths
        lines = [
            *self.described,
            f"{self.records:,} records = {len(self):,} sequences of {sum(lengths):,} tokens, {self.learned:,} of them learned",
        ]
        if self.overlong:
            shown = ", ".join(self.overlong[:_SHOWN_RECORDS]) + (", ..." if len(self.overlong) > _SHOWN_RECORDS else "")
            lines.append(f"left out, longer than the model's context: {len(self.overlong):,} sequences ({shown})")
        return lines

    def split(self, share: float, seed: int) -> tuple[Examples, Examples]:
        """Splits into training examples and held-out ones. `share` below 1 is the share of the records that is held out, at least
        one of them; from 1 on it is their number. They are drawn by the seed, and all records of a prompt are on the same side.
        Raises UserError if one of the two would be empty."""
        return split_together([self], share, seed)[0]

    def _parted(self, drawn: set[int]) -> tuple[Examples, Examples]:
        """Splits into the examples of records that are not in `drawn`, and of those that are."""
        parts = Examples(), Examples()
        for index, record in enumerate(self._records):
            part, run = parts[record in drawn], slice(self._ends[index], self._ends[index + 1])
            part._ids.extend(self._ids[run])
            part._labels.extend(self._labels[run])
            part._ends.append(len(part._ids))
            part._records.append(record)
            part._prompts[record] = self._prompts[record]
        for part in parts:
            part.records = len(part._prompts)
        return parts


def split_together(sources: Sequence[Examples], share: float, seed: int) -> list[tuple[Examples, Examples]]:
    """Splits several sources as `Examples.split` does; a prompt that several sources have is held out of all of them or none."""
    records = [(index, record) for index, source in enumerate(sources) for record in source._prompts]
    prompts = [prompt for source in sources for prompt in source._prompts.values()]
    drawn = {records[index] for index in held_out(prompts, share, seed)}
    refuse_empty("records", len(records), len(drawn), share)
    return [
        source._parted({record for of_source, record in drawn if of_source == index})
        for index, source in enumerate(sources)
    ]


class ExampleMixture(Mixture):
    """Hands out examples of several sources in proportion to their weights. `fingerprint` is a digest of all examples, source by
    source, and of the weights."""

    def __init__(self, sources: Sequence[Examples], weights: Sequence[float], seed: int) -> None:
        self._sources = sources
        digest = hashlib.sha256()
        for source, weight in zip(sources, weights, strict=True):
            digest.update(f"{weight!r}/{len(source)}/{source.fingerprint}".encode())
        super().__init__([source.lengths for source in sources], weights, seed, digest.hexdigest())

    def take(self, tokens: int) -> list[tuple[int, Example]]:
        """Returns the next examples, each with the index of its source: as many as stay within `tokens` positions, at least one."""
        return [(source, self._sources[source][index]) for source, index in self.next_indices(tokens)]


def read_examples(settings: DatasetSettings, renderer: Renderer, tokenizer: Tokenizer, context_tokens: int) -> Examples:
    """Reads the records of a dataset and renders them as training examples. An example with more positions than the context is left
    out and counted.

    Raises UserError, with file and line, for a record that is wrong or cannot be rendered, and if no example is left.
    """
    examples = Examples()
    records = read_records(settings, TRAINED_KINDS)
    examples.described.append(f"{records.described}, rendered as {renderer.name}")
    for record in records:
        examples.records += 1
        for rendered in render(record, renderer, tokenizer):
            learned = rendered.until_learned()
            if learned.positions > context_tokens:
                examples.overlong.append(record.where)
            elif learned.positions > 0:
                examples.add(learned, prompt_of(record))
    if len(examples) == 0:
        left_out = f"; {len(examples.overlong):,} are longer than its context of {context_tokens:,} tokens"
        raise UserError(f"{settings.path}: no record with a token to train on{left_out if examples.overlong else ''}")
    return examples


def render(record: Record, renderer: Renderer, tokenizer: Tokenizer) -> list[Rendered]:
    """Renders a text, conversation or completion as training sequences. Raises UserError, with file and line of the record."""
    try:
        match record:
            case Text():
                sequence = Rendered()
                sequence.learn([*tokenizer.encode(record.text), end_of_text(tokenizer)])
                return [sequence]
            case Conversation():
                return renderer.supervise(record.messages, record.tools)
            case PromptCompletion():
                messages = (*record.prompt, *record.completion)
                return renderer.supervise(messages, record.tools, len(record.prompt))
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from None
    raise AssertionError(f"a {type(record).__name__} is not learned as it stands")
