"""Reads one sample while its tokens come: as text or as the pieces of a turn, up to its end or a stop string."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from nmoe.engine.api import Delta, RawLogprob
from nmoe.serve.openai.names import TokenNames
from nmoe.serve.openai.stops import Stops
from nmoe.text.turns import Piece, TurnReader
from nmoe.types import FinishReason, Sample

_Utf8 = getincrementaldecoder("utf-8")


class TextReader:
    """Reads tokens as plain text. The tokens in `silent` have no text: ends, and control tokens unless they are asked for. A
    character is held back until all of its bytes are there."""

    held = ""

    def __init__(self, names: TokenNames, silent: Collection[int]) -> None:
        self._bytes_of, self._whole, self._silent, self._decoder = names.bytes_of, names.whole, silent, _Utf8("replace")

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        bytes_of, silent = self._bytes_of, self._silent
        if len(token_ids) == 1 and not self._decoder.buffer and token_ids[0] not in silent:
            # Nearly all steps: one token of whole characters, behind whole characters.
            text = self._whole(token_ids[0])
            if text is not None:
                return [Piece("content", text)] if text else []
        text = self._decoder.decode(b"".join([bytes_of(one) for one in token_ids if one not in silent]))
        return [Piece("content", text)] if text else []

    def end(self, finish_reason: FinishReason) -> list[Piece]:
        text = self._decoder.decode(b"", final=True)
        return [Piece("content", text)] if text else []


@dataclass(slots=True)
class Addition:
    """What the tokens of one step add to a choice: pieces of the turn, the tokens, and their raw log-probabilities if those are
    asked for. `finish` is set on its last one, and `reason` is then vLLM's `stop_reason`:
    the stop string or token that ended it, or why the server did."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    raws: list[RawLogprob] = field(default_factory=list)
    finish: str | None = None
    reason: str | int | None = None
    sample: Sample | None = None


class Choice:
    """One sample of a reply while it is read. `begun` are the pieces of the turn that the prompt holds already, of which a call may
    go on; `announced` says that the reply has them, too.

    `stopped` says that a stop string was found, after which its sample should be aborted. `why` is the reason for an abort that
    has another cause. `named_ends` are the stop tokens that the request named, beside the format's own.
    """

    def __init__(
        self,
        index: int,
        reader: TurnReader,
        stops: Stops | None,
        named_ends: Collection[int] = (),
        begun: Sequence[Piece] = (),
        announced: bool = False,
    ) -> None:
        self.index = index
        self.stopped = False
        self.why = "abort"
        self.tokens = 0
        self._reader, self._stops, self._named_ends = reader, stops, named_ends
        calls = [piece for piece in begun if piece.kind == "call"]
        self._calls = len(calls)
        self._begun = {} if announced else {piece.call: piece for piece in calls}

    def feed(self, deltas: Sequence[Delta]) -> Addition:
        added, last = Addition(self.index, [], [], []), deltas[-1]
        if self._stops is None:
            self._read(added, deltas)
        else:
            for delta in deltas:
                if self.stopped:
                    break
                self._read(added, (delta,))
        if last.finish_reason is not None:
            self._end(added, last.finish_reason, last)
        return added

    def _read(self, added: Addition, deltas: Sequence[Delta]) -> None:
        # An aborted sample ends without a further token.
        token_ids = [delta.token_id for delta in deltas if delta.token_id is not None]
        added.token_ids += token_ids
        if deltas[0].raw is not None:
            added.raws += [delta.raw for delta in deltas if delta.raw is not None]
        self.tokens += len(token_ids)
        self._append(added, self._reader.feed(token_ids))
        if self._stops is not None and not self.stopped and (text := self._stops.cut(self._reader.held)) is not None:
            # A stop string of white space ends the answer at once, even if a tag would follow it.
            self.stopped = True
            if text:
                added.pieces.append(Piece("content", text))

    def _append(self, added: Addition, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "call":
                self._calls += 1
            elif piece.kind == "arguments" and (call := self._begun.pop(piece.call, None)) is not None:
                added.pieces.append(call)  # or the reply would have arguments of nothing
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
        added.sample = last.sample


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins neighbouring texts of one kind, so that a step has few chunks."""
    if len(pieces) < 2:
        return list(pieces)
    joined = list[Piece]()
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and piece.kind == last.kind != "call" and piece.call == last.call:
            joined[-1] = Piece(last.kind, last.text + piece.text, last.call, last.name)
        else:
            joined.append(piece)
    return joined


def texts(pieces: Sequence[Piece], kind: str) -> str:
    if len(pieces) == 1:
        return pieces[0].text if pieces[0].kind == kind else ""
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def tool_calls(pieces: Sequence[Piece], id_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """Returns the calls among the pieces of a turn, each with its id."""
    calls = dict[int, dict[str, Any]]()
    for piece in pieces:
        if piece.call is None:
            continue
        if piece.kind == "call":
            function = {"name": piece.name, "arguments": ""}
            calls[piece.call] = {"id": id_of(piece.call), "type": "function", "function": function}
        else:
            calls[piece.call]["function"]["arguments"] += piece.text
    return list(calls.values())
