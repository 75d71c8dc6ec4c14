"""Reads Harmony turns: the channel `analysis` is reasoning, a message to a recipient a call, and every other message text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nmoe.text.calls.pieces import Piece
from nmoe.text.harmony import CHANNEL, Harmony
from nmoe.text.streaming import StreamParser, decoder_of
from nmoe.types import FinishReason, Message

NAMESPACE = "functions"
"""The namespace in which Harmony declares and calls tools: `functions.NAME`."""


def called(recipient: str) -> str:
    """Returns the name of the tool that a recipient of Harmony's is."""
    namespace, _, name = recipient.partition(".")
    return name if namespace == NAMESPACE and name else recipient


class HarmonyReader:
    """The `TurnReader` of Harmony. Messages of one kind are joined by line breaks. From the first token that breaks the format on,
    everything is text of the answer."""

    held = ""

    def __init__(self, harmony: Harmony) -> None:
        self._harmony = harmony
        self._parser = StreamParser(harmony)
        self._header: list[int] = []
        self._kind: Literal["content", "reasoning", "arguments"] | None = None
        self._calls = 0
        self._said: set[str] = set()
        self._broken = False
        self._rest = decoder_of(harmony.tokenizer)

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        pieces = list[Piece]()
        for token_id in token_ids:
            if self._broken:
                self._feed_rest(token_id, pieces)
            else:
                self._feed(token_id, pieces)
        return pieces

    def end(self, finish_reason: FinishReason) -> list[Piece]:
        pieces = list[Piece]()
        if self._broken:
            self._add("content", self._rest.flush(), pieces)
        elif self._kind is not None:
            self._add(self._kind, self._parser.flush(), pieces)
        elif not any(self._harmony.control_tokens.get(one) == CHANNEL for one in self._header):
            self._unread(pieces)  # a header that breaks off after its channel holds no text
        return pieces

    def _feed(self, token_id: int, pieces: list[Piece]) -> None:
        if self._kind is None:
            self._header.append(token_id)
        event = self._parser.feed(token_id)
        if event is None:
            return
        if event.kind == "header":
            assert event.message is not None, "a header has a message"
            self._header.clear()
            self._open(event.message, pieces)
        elif event.kind == "error":
            self._broken = True
            if self._kind is None:
                self._unread(pieces)
            else:
                self._add(self._kind, self._parser.flush(), pieces)
                self._kind = None
                self._feed_rest(token_id, pieces)
        else:
            assert self._kind is not None, "content follows a header"
            self._add(self._kind, event.text, pieces)
            if event.kind == "message":
                self._kind = None

    def _open(self, header: Message, pieces: list[Piece]) -> None:
        if header.recipient is not None:
            pieces.append(Piece("call", "", self._calls, called(header.recipient)))
            self._calls += 1
            self._kind = "arguments"
            return
        self._kind = "reasoning" if header.channel == "analysis" else "content"
        if self._kind in self._said:
            self._add(self._kind, "\n", pieces)

    def _unread(self, pieces: list[Piece]) -> None:
        """Gives what stands where a header should stand."""
        text = [one for one in self._header if one not in self._harmony.control_tokens]
        self._header.clear()
        self._add("content", self._harmony.tokenizer.decode(text), pieces)

    def _feed_rest(self, token_id: int, pieces: list[Piece]) -> None:
        if token_id in self._harmony.control_tokens:
            self._add("content", self._rest.flush(), pieces)
        else:
            self._add("content", self._rest.push(token_id), pieces)

    def _add(self, kind: Literal["content", "reasoning", "arguments"], text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Piece(kind, text, self._calls - 1 if kind == "arguments" else None))
            self._said.add(kind)
