"""Preference pairs as tokens: two sequences with the same prompt, one with the preferred completion and one with the other.

A policy learns from the completions whole, reasoning included. A reward model is asked about answers in the form in which readers
see them, and therefore also trains on them: the last message of each side, without its reasoning, and without declarations of
tools.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.held_out import held_out, prompt_of, refuse_empty
from nmoe.data.records import Messages, Preference, read_records
from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage, split_reasoning
from nmoe.text.renderers import Rendered, Renderer


@dataclass(frozen=True)
class Pair:
    """A preference as two sequences, with the file and line of its record, and its prompt.

    Example: `Pair("pairs.jsonl:1", Rendered([5, 6, 7, 2], [-100, -100, 7, 2]), Rendered([5, 6, 9, 2], [-100, -100, 9, 2]))`.
    """

    where: str
    chosen: Rendered
    rejected: Rendered
    prompt: str = ""
    reads_last: bool = False
    """Whether the model also reads the last token of a side, at which a reward model gives its reward."""

    @property
    def sides(self) -> tuple[Rendered, Rendered]:
        return self.chosen, self.rejected

    @property
    def positions(self) -> tuple[int, int]:
        """The numbers of positions that a model runs for each side, which its context has to hold."""
        chosen, rejected = (side.positions + self.reads_last for side in self.sides)
        return chosen, rejected


MakePair = Callable[[Preference, Renderer], Pair | None]


def completion_pair(record: Preference, renderer: Renderer) -> Pair:
    """Renders a preference as prompt and whole completions, in which all messages of the assistant are learned. Raises UserError,
    with file and line."""
    pair = _pair(record, renderer, record.chosen, record.rejected)
    pair = replace(pair, chosen=pair.chosen.until_learned(), rejected=pair.rejected.until_learned())
    if pair.chosen == pair.rejected:
        raise UserError(f"{record.where}: 'chosen' and 'rejected' are the same tokens, so neither is preferred")
    return pair


def answer_pair(record: Preference, renderer: Renderer) -> Pair | None:
    """Renders a preference as prompt and answers without reasoning, for a reward model; None if the answers are equal. Raises
    UserError, with file and line."""
    chosen, rejected = (_answer(record.where, side) for side in (record.chosen, record.rejected))
    if chosen.content == rejected.content:
        return None
    return replace(_pair(replace(record, tools=()), renderer, (chosen,), (rejected,)), reads_last=True)


def render_answer(renderer: Renderer, prompt: Messages, answer: str) -> Rendered:
    """Renders the sequence that a reward model reads to judge an answer to this prompt. Raises UserError for a conversation that
    the format cannot express."""
    (rendered,) = renderer.supervise((*prompt, ChatMessage("assistant", answer)), (), len(prompt))
    return rendered


def _answer(where: str, side: Messages) -> ChatMessage:
    _, content = split_reasoning(side[-1])
    if not content.strip():
        raise UserError(
            f"{where}: the last message of a side has no text apart from reasoning and tool calls, so there is nothing to judge"
        )
    return ChatMessage("assistant", content)


def _pair(record: Preference, renderer: Renderer, chosen: Messages, rejected: Messages) -> Pair:
    sides = []
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        try:
            sequences = renderer.supervise((*record.prompt, *side), record.tools, len(record.prompt))
        except UserError as error:
            raise UserError(f"{record.where}: {name!r}: {error}") from None
        if len(sequences) != 1:
            raise UserError(
                f"{record.where}: {name!r} has several turns whose reasoning later ones do not see, which no single sequence "
                "holds; put all but the last into the prompt"
            )
        sides += sequences
    return Pair(record.where, sides[0], sides[1], prompt_of(record))


@dataclass(frozen=True)
class Pairs:
    """The preference pairs of a dataset, and lines for the user about its format and the pairs left out."""

    pairs: list[Pair]
    notes: list[str]

    @property
    def fingerprint(self) -> str:
        """A digest of all tokens and labels."""
        digest = hashlib.sha256()
        for pair in self.pairs:
            for side in pair.sides:
                digest.update(np.array([len(side.ids), *side.ids, *side.labels]).tobytes())
        return digest.hexdigest()

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs]:
        """Splits into training pairs and held-out pairs: about a `share` (at least one; from 1 on, that number), drawn by the seed,
        with all pairs of a prompt on the same side. Raises UserError if one of the two would be empty."""
        drawn = held_out([pair.prompt for pair in self.pairs], share, seed)
        parts: tuple[list[Pair], list[Pair]] = [], []
        for number, pair in enumerate(self.pairs):
            parts[number in drawn].append(pair)
        refuse_empty("pairs", len(self.pairs), len(drawn), share)
        return Pairs(parts[0], self.notes), Pairs(parts[1], [])


def read_pairs(settings: DatasetSettings, renderer: Renderer, make: MakePair, context_tokens: int) -> Pairs:
    """Reads the preference records of a dataset and makes a pair of each by `make`. Pairs with a side of more positions than the
    context are left out and counted, and also those for which `make` returns None. Raises UserError, with file and line, for a
    record that is no preference, and if no pair is left."""
    records = read_records(settings, ("preference",))
    pairs: list[Pair] = []
    overlong: list[str] = []
    alike: list[str] = []
    for record in records:
        assert isinstance(record, Preference), "no other kind is accepted here"
        pair = make(record, renderer)
        if pair is None:
            alike.append(record.where)
        elif max(pair.positions) > context_tokens:
            overlong.append(record.where)
        else:
            pairs.append(pair)
    notes = [f"{records.described}: {len(pairs):,} pairs, as {renderer.name}"]
    for left_out, why in (
        (overlong, f"longer than the model's context of {context_tokens:,} tokens"),
        (alike, "with equal answers once reasoning is left out"),
    ):
        if left_out:
            notes.append(f"left out: {len(left_out):,} pairs {why}, the first at {left_out[0]}")
    if not pairs:
        raise UserError(f"{settings.path}: no pair is left to train on; {'; '.join(notes[1:])}")
    return Pairs(pairs, notes)
