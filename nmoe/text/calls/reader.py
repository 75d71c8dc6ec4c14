"""Reads turns of chat templates: reasoning between think tags, text, and calls in the form of a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nmoe.text.calls.families import WRITTEN
from nmoe.text.calls.family import Family, Steps, Turn
from nmoe.text.calls.pieces import Piece
from nmoe.text.conversation import END_THINK, THINK, ToolDefinition
from nmoe.text.streaming import IncrementalDecoder
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import FinishReason

# A lone surrogate, which no decoded text contains.
_FIRST_MARK = 0xDC80


class TextTurn:
    """Reads the text of a turn while it arrives. Without a family no calls are read; without `tags` everything is text."""

    def __init__(
        self,
        family: Family | None,
        tools: Mapping[str, ToolDefinition],
        marks: Mapping[str, str],
        *,
        opened: bool = False,
        tags: bool = True,
    ) -> None:
        self.turn = Turn(tools, marks)
        self._family, self._opened, self._tags = family, opened, tags
        self._steps = self._read()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        self.turn.source.add(text)
        next(self._steps)
        return self.turn.out.taken()

    def end(self) -> list[Piece]:
        self.turn.source.ended = True
        for _ in self._steps:
            raise AssertionError("a turn that has ended needs no more text")
        self.turn.out.end()
        return self.turn.out.taken()

    def read(self, text: str) -> None:
        """Reads a whole turn."""
        self.turn.source.add(text)
        self.end()

    def _read(self) -> Steps:
        turn, family, openers = self.turn, self._family, list[str]()
        source = turn.source
        yield
        if self._tags:
            yield from self._reasoning()
        if family is not None:
            openers = [turn.mark(opener) for opener in family.openers]
            yield from family.begin(turn)
        while True:
            if found := source.first(openers):
                turn.say(found[0])
                assert family is not None, "only a family has openers"
                yield from family.read(turn)
                continue
            turn.say(source.certain(openers))
            if source.ended:
                return
            yield

    def _reasoning(self) -> Steps:
        """Reads the reasoning at the beginning of a turn, if there is any."""
        source, out = self.turn.source, self.turn.out
        while not source.ended and THINK.startswith(source.text.lstrip()) and source.text.lstrip() != THINK:
            yield
        begins = source.text.lstrip().startswith(THINK)
        if begins:
            source.take(source.text.index(THINK) + len(THINK))
        elif not self._opened:
            return
        out.tag()
        while True:
            if found := source.first([END_THINK]):
                out.say("reasoning", source.take(found[0]))
                source.take(len(END_THINK))
                out.tag()
                return
            out.say("reasoning", source.take(source.certain([END_THINK])))
            if source.ended:
                return
            yield


class Marks:
    """What each structural token of a tokenizer stands for in the text of a turn: tags that are control tokens for marks, which no
    text can forge; other control tokens and the ends of a turn for nothing; other tags for their names."""

    def __init__(self, tokenizer: Tokenizer, family: Family | None, stop_ids: Sequence[int]) -> None:
        added = tokenizer.added_tokens
        there = [tag for tag in (family.tags if family else ()) if tag in added]
        self.tags = {tag: chr(_FIRST_MARK + number) for number, tag in enumerate(there)}
        tags = {added[tag]: mark for tag, mark in self.tags.items()}
        written = {added[tag] for tag in WRITTEN if tag in added}
        silent = ((tokenizer.control_ids | tokenizer.shown_ids) - written) | set(stop_ids)
        self.texts = dict.fromkeys(silent, "") | tags

    def spelled(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
        """Returns the whole text of a turn, with the names of control tokens that are no tags."""
        if not self.tags:
            return tokenizer.decode(token_ids)
        tags = {tokenizer.added_tokens[tag]: mark for tag, mark in self.tags.items()}
        texts, start = list[str](), 0
        for index, token_id in enumerate(token_ids):
            if token_id in tags:
                texts += [tokenizer.decode(token_ids[start:index]), tags[token_id]]
                start = index + 1
        return "".join([*texts, tokenizer.decode(token_ids[start:])])

    def names(self, text: str) -> str:
        """Returns the text with the tags' names in the place of their marks."""
        for tag, mark in self.tags.items():
            text = text.replace(mark, tag)
        return text

    def text(self, token_ids: Sequence[int], decoder: IncrementalDecoder) -> str:
        """Returns the text of these tokens as far as it is complete."""
        texts, start = list[str](), 0
        for index, token_id in enumerate(token_ids):
            if token_id in self.texts:
                texts += [decoder.push_all(token_ids[start:index]), decoder.flush(), self.texts[token_id]]
                start = index + 1
        texts.append(decoder.push_all(token_ids[start:]))
        return "".join(texts)


class TemplateReader:
    """The `TurnReader` of chat templates and of plain text."""

    def __init__(self, decoder: IncrementalDecoder, marks: Marks, turn: TextTurn) -> None:
        self._decoder, self._marks, self._turn = decoder, marks, turn

    @property
    def held(self) -> str:
        return self._turn.turn.out.held

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        return self._turn.feed(self._marks.text(token_ids, self._decoder))

    def end(self, finish_reason: FinishReason) -> list[Piece]:
        return [*self._turn.feed(self._decoder.flush()), *self._turn.end()]
