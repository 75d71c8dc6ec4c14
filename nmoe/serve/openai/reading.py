"""Reads one sample while its tokens come: as text or as the pieces of a turn, up to its end or a stop string."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nmoe.engine.api import Delta
from nmoe.serve.openai.names import TokenNames
from nmoe.serve.openai.pieces import Piece
from nmoe.serve.openai.stops import Stops
from nmoe.types import FinishReason, Sample

_Utf8 = getincrementaldecoder("utf-8")


class Reader(Protocol):
    """Turns sampled tokens into pieces; joined, the pieces do not depend on how the tokens were divided."""

    def feed(self, token_ids: Sequence[int]) -> list[Piece]: ...

    def end(self, finish_reason: FinishReason) -> list[Piece]: ...


class TextReader:
    """Reads tokens as plain text. The tokens in `silent` have no text: ends, and control tokens unless they are asked for. A
    character is held back until all of its bytes are there."""

    def __init__(self, names: TokenNames, silent: Collection[int]) -> None:
        self._bytes_of, self._silent, self._decoder = names.bytes_of, silent, _Utf8("replace")

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        text = self._decoder.decode(b"".join(self._bytes_of(one) for one in token_ids if one not in self._silent))
        return [Piece("content", text)] if text else []

    def end(self, finish_reason: FinishReason) -> list[Piece]:
        text = self._decoder.decode(b"", final=True)
        return [Piece("content", text)] if text else []


@dataclass(slots=True)
class Addition:
    """What the tokens of one step add to a choice. `finish` is set on its last one, and `reason` is then vLLM's `stop_reason`:
    the stop string or token that ended it, or why the server did."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish: str | None = None
    reason: str | int | None = None
    sample: Sample | None = None


class Choice:
    """One sample of a reply while it is read.

    `stopped` says that a stop string was found, after which its sample should be aborted. `why` is the reason for an abort that
    has another cause. `named_ends` are the stop tokens that the request named, beside the format's own.
    """

    def __init__(self, index: int, reader: Reader, stops: Stops | None, named_ends: Collection[int] = ()) -> None:
        self.index = index
        self.stopped = False
        self.why = "abort"
        self.tokens = 0
        self._reader, self._stops, self._named_ends = reader, stops, named_ends
        self._calls = 0

    def feed(self, deltas: Sequence[Delta]) -> Addition:
        added = Addition(self.index)
        if self._stops is None:
            self._read(added, deltas)
        else:
            for delta in deltas:
                if self.stopped:
                    break
                self._read(added, (delta,))
        if (reason := deltas[-1].finish_reason) is not None:
            self._end(added, reason, deltas[-1])
        return added

    def _read(self, added: Addition, deltas: Sequence[Delta]) -> None:
        token_ids = [delta.token_id for delta in deltas if delta.token_id is not None]
        added.deltas += deltas[: len(token_ids)]  # the delta of an abort is the last one, and has no token
        self.tokens += len(token_ids)
        self._append(added, self._reader.feed(token_ids))

    def _append(self, added: Addition, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "call":
                self._calls += 1
            if self._stops is not None:
                if piece.kind == "content":
                    piece = Piece("content", self._stops.push(piece.text))
                    self.stopped = self._stops.found is not None
                elif text := self._stops.flush():
                    # No stop string goes on behind a call or reasoning.
                    added.pieces.append(Piece("content", text))
            if piece.text or piece.kind == "call":
                added.pieces.append(piece)
            if self.stopped:
                break

    def _end(self, added: Addition, reason: FinishReason, last: Delta) -> None:
        if not self.stopped:
            self._append(added, self._reader.end(reason))
            if self._stops is not None and (text := self._stops.flush()):
                added.pieces.append(Piece("content", text))
        if self.stopped:
            assert self._stops is not None, "they stopped it"
            added.finish, added.reason = "stop", self._stops.found
        elif reason == "stop":
            added.finish = "tool_calls" if self._calls else "stop"
            added.reason = last.token_id if last.token_id in self._named_ends else None
        else:
            added.finish, added.reason = "length", self.why if reason == "abort" else None


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins neighbouring texts of one kind, so that a step has few chunks."""
    joined = list[Piece]()
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and piece.kind == last.kind != "call" and piece.call == last.call:
            joined[-1] = Piece(last.kind, last.text + piece.text, last.call, last.name)
        else:
            joined.append(piece)
    return joined


def texts(pieces: Sequence[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def tool_calls(pieces: Sequence[Piece], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the calls among the pieces of a turn, each with its id."""
    calls = list[dict[str, Any]]()
    for piece in pieces:
        if piece.kind == "call":
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": ids[len(calls)], "type": "function", "function": function})
        elif piece.kind == "arguments":
            assert piece.call is not None, "arguments belong to a call"
            calls[piece.call]["function"]["arguments"] += piece.text
    return calls
