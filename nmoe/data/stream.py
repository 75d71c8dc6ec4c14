"""Streams documents from the disk: cut into spans, shuffled in buffers, mixed by weight, and resumed at any position.

A source is divided into spans of about a 64th of the shuffle buffer. Each epoch takes the spans in another order, fills the buffer
with the next ones, and shuffles their documents. So a buffer has documents from 64 parts of the source. The memory has the buffer
that is handed out, and the one that is tokenised meanwhile. A source that fits into one buffer stays there, shuffled as a whole.

The order is a pure function of the files, the seed and the size of the buffer; a position is the epoch, the buffer in it, and the
offset in that. Before the first step every document is read and checked once, so that a torn one is named before anything is
trained, and a resumed run notices any document that changed.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from nmoe.data.documents import Document, DocumentReader, Found, Pieces
from nmoe.data.packing import furthest_behind
from nmoe.data.spans import Span, spans_of
from nmoe.data.tokenising import DocumentWorkers, Pending, Task
from nmoe.errors import UserError

SPANS_PER_BUFFER = 64


@dataclass(frozen=True)
class FileRecord:
    """The documents of a file, as a checkpoint records them: their number, and a digest of all their texts or token ids."""

    name: str
    documents: int
    digest: str


class DocumentSource:
    """The documents of one source: those that are held out, and an endless stream of the others.

    files: what each file holds, in order.
    bytes: the size of all text, about; it is in memory if the buffer has room for it.
    documents: the number of documents; in memory, the pieces to train on.
    tokens: the positions of an epoch; of a source that is not in memory, estimated from its first span.
    held_out: the last pieces of the source.
    taken: the positions handed out so far.
    """

    def __init__(
        self,
        path: str,
        workers: DocumentWorkers,
        seed: int,
        buffer_bytes: int,
        held_out_documents: int = 0,
        weight: float = 1.0,
        name: str = "",
    ) -> None:
        """Reads and checks all documents. Raises UserError, with file and line, for one that is torn, and if none is left to
        train on."""
        self.path, self.weight, self.name = path, weight, name
        self._workers, self._seed, self.buffer_bytes = workers, seed, buffer_bytes
        self._spans = spans_of(path, max(1, buffer_bytes // SPANS_PER_BUFFER))
        self.bytes = sum(span.size for span in self._spans)
        fits = self.bytes <= buffer_bytes
        if not fits:
            workers.need()
            print(f"{path}: checking all {self.bytes / 1e6:,.0f} MB of documents", file=sys.stderr, flush=True)
        task: Task = "read" if fits else "check"
        pending = [workers.submit(task, span) for span in self._spans]
        found = [one.result() for one in pending]
        self.documents = sum(one.documents for one in found)
        if not self.documents:
            raise UserError(f"{path}: holds no documents; each line must be a JSON object with `text` or `token_ids`")
        self.files = _file_records(self._spans, found)
        self._in_memory: Pieces | None = None
        if fits:
            pieces = Pieces.joined([one.pieces for one in found if one.pieces is not None])
            kept = len(pieces) - held_out_documents
            if kept < 1:
                raise self._none_left(held_out_documents, len(pieces))
            self.held_out = [pieces[index] for index in range(kept, len(pieces))]
            self._in_memory = pieces.first(kept)
            self.documents, self.tokens = kept, self._in_memory.tokens
        else:
            self.held_out = self._hold_out(held_out_documents)
            first = self._pieces(self._submit(self._spans[:1]))
            self.tokens = max(1, first.tokens * self.bytes // max(1, self._spans[0].size))
        self.taken = 0
        # The next document: its epoch, the buffer in this, and its offset there.
        self._epoch, self._buffer, self._offset = 0, 0, 0
        self._held: tuple[tuple[int, int], Pieces, list[int]] | None = None
        self._ahead: tuple[tuple[int, int], list[Pending]] | None = None

    def _none_left(self, held_out: int, documents: int) -> UserError:
        return UserError(
            f"{self.path}: data.held_out_documents = {held_out} leaves none of its {documents:,} documents to train on"
        )

    def _hold_out(self, count: int) -> list[Document]:
        """Takes the last pieces from the spans to train on."""
        held: list[Document] = []
        while len(held) < count and self._spans:
            last = self._spans.pop()
            pieces = self._pieces(self._submit([last]))
            kept = max(0, len(pieces) - (count - len(held)))
            held = [*(pieces[index] for index in range(kept, len(pieces))), *held]
            if kept:
                self._spans.append(replace(last, pieces=kept))
        if not self._spans:
            raise self._none_left(count, len(held))
        return held

    @property
    def position(self) -> dict[str, int]:
        return {"epoch": self._epoch, "buffer": self._buffer, "offset": self._offset, "tokens": self.taken}

    @position.setter
    def position(self, position: Mapping[str, int]) -> None:
        self._epoch, self._buffer, self._offset = (position[key] for key in ("epoch", "buffer", "offset"))
        self.taken = position["tokens"]

    def next(self) -> Document:
        """Returns the next document, and stays at it. Waits until its buffer is tokenised."""
        pieces, order = self._filled()
        return pieces[order[self._offset]]

    def advance(self) -> None:
        """Goes to the document after the next one."""
        pieces, order = self._filled()
        self.taken += pieces.positions(order[self._offset])
        self._offset += 1

    def _filled(self) -> tuple[Pieces, list[int]]:
        """Returns the documents of the present buffer and their order; goes to the next buffer if this one is used up."""
        epoch = self._epoch
        while self._epoch < epoch + 2:
            at = (self._epoch, self._buffer)
            if self._held is None or self._held[0] != at:
                self._held = None  # freed before the next one is joined
                self._held = (at, *self._fill(*at))
            if self._offset < len(self._held[2]):
                return self._held[1:]
            self._epoch, self._buffer, self._offset = *self._after(*at), 0
        raise self._none_left(len(self.held_out), len(self.held_out))

    def _after(self, epoch: int, buffer: int) -> tuple[int, int]:
        return (epoch, buffer + 1) if buffer + 1 < len(self._buffers(epoch)) else (epoch + 1, 0)

    def _fill(self, epoch: int, buffer: int) -> tuple[Pieces, list[int]]:
        if self._in_memory is not None:
            pieces, key = self._in_memory, f"{self._seed}/{epoch}"
        else:
            at, key = (epoch, buffer), f"{self._seed}/{epoch}/{buffer}"
            ahead = self._ahead[1] if self._ahead is not None and self._ahead[0] == at else None
            self._ahead = None
            pieces = self._pieces(ahead or self._submit(self._buffers(epoch)[buffer]))
            following = self._after(epoch, buffer)
            self._ahead = (following, self._submit(self._buffers(following[0])[following[1]]))
        order = list(range(len(pieces)))
        random.Random(key).shuffle(order)
        return pieces, order

    def _buffers(self, epoch: int) -> list[list[Span]]:
        """Returns the spans of each buffer of an epoch."""
        if self._in_memory is not None:
            return [self._spans]
        order = list(self._spans)
        random.Random(f"{self._seed}/{epoch}/spans").shuffle(order)
        buffers: list[list[Span]] = []
        room = 0
        for span in order:
            if not buffers or span.size > room:
                buffers.append([])
                room = self.buffer_bytes
            buffers[-1].append(span)
            room -= span.size
        return buffers

    def _submit(self, spans: Sequence[Span]) -> list[Pending]:
        return [self._workers.submit("read", span) for span in spans]

    def _pieces(self, pending: Sequence[Pending]) -> Pieces:
        found = (one.result().pieces for one in pending)
        return Pieces.joined([pieces for pieces in found if pieces is not None])


def _file_records(spans: Sequence[Span], found: Sequence[Found]) -> list[FileRecord]:
    parts: dict[str, list[Found]] = {}
    for span, one in zip(spans, found, strict=True):
        parts.setdefault(span.path, []).append(one)
    return [
        FileRecord(
            Path(path).name,
            sum(one.documents for one in of_file),
            hashlib.sha256("".join(one.digest for one in of_file).encode()).hexdigest()[:32],
        )
        for path, of_file in parts.items()
    ]


class DocumentMixture:
    """Hands out documents of several sources in proportion to their weights (`furthest_behind`).

    position: the positions of all sources; set it to continue from there.
    fingerprint: what the order of the documents depends on, besides the seed, as JSON has it.
    """

    def __init__(self, sources: Sequence[DocumentSource], reader: DocumentReader, held_out_documents: int = 0) -> None:
        self.sources = sources
        self.fingerprint: dict[str, Any] = {
            "tokenizer": reader.tokenizer.fingerprint,
            "context_tokens": reader.context_tokens,
            "held_out_documents": held_out_documents,
            "buffer_bytes": [source.buffer_bytes for source in sources],
            "weights": [source.weight for source in sources],
            "files": [[list(astuple(file)) for file in source.files] for source in sources],
        }

    @property
    def position(self) -> list[dict[str, int]]:
        return [source.position for source in self.sources]

    @position.setter
    def position(self, position: Sequence[Mapping[str, int]]) -> None:
        for source, of_source in zip(self.sources, position, strict=True):
            source.position = of_source

    def take(self, tokens: int) -> list[tuple[int, Document]]:
        """Returns the next documents, each with the index of its source: as many as stay within `tokens` positions, at least
        one."""
        taken: list[tuple[int, Document]] = []
        while True:
            number = furthest_behind([one.taken for one in self.sources], [one.weight for one in self.sources])
            source = self.sources[number]
            document = source.next()
            if taken and document.positions > tokens:
                return taken
            taken.append((number, document))
            tokens -= document.positions
            source.advance()

    def changes(self, recorded: Any) -> list[str]:
        """Returns what differs from the `fingerprint` of a checkpoint, as texts."""
        if not isinstance(recorded, dict) or recorded.keys() != self.fingerprint.keys():
            return ["the checkpoint is of a version of nmoe that recorded other things of its documents"]
        said = {
            "tokenizer": "the tokenizer is another one",
            "context_tokens": "the context has {now} tokens, was {before}",
            "held_out_documents": "data.held_out_documents is {now}, was {before}",
            "buffer_bytes": "data.shuffle_mb is another one",
            "weights": "the weights of the sources are {now}, were {before}",
        }
        changes = [
            text.format(now=self.fingerprint[key], before=recorded[key])
            for key, text in said.items()
            if self.fingerprint[key] != recorded[key]
        ]
        before = [FileRecord(*file) for source in recorded["files"] for file in source]
        now = [FileRecord(*file) for source in self.fingerprint["files"] for file in source]
        if (
            self.fingerprint["buffer_bytes"] != recorded["buffer_bytes"]
        ):  # a digest is one of the spans that this divides
            before, now = ([replace(file, digest="") for file in files] for files in (before, now))
        return changes + _changed_files(before, now)


def _changed_files(before: Sequence[FileRecord], now: Sequence[FileRecord]) -> list[str]:
    if before == now:
        return []
    were, are = _by_name(before), _by_name(now)
    found = [f"{name} is missing" for name in were.keys() - are.keys()]
    found += [f"{name} is new" for name in are.keys() - were.keys()]
    for name in were.keys() & are.keys():
        old, new = were[name], are[name]
        if old.documents != new.documents:
            found.append(f"{name} has {new.documents:,} documents, had {old.documents:,}")
        elif old != new:
            found.append(f"{name} has other documents, {new.documents:,} as before")
    return sorted(found) or ["the files are in another order"]


def _by_name(files: Sequence[FileRecord]) -> dict[str, FileRecord]:
    """Returns the files by name; of one name, of several directories, the second is "a.jsonl (2)"."""
    seen: Counter[str] = Counter()
    found = {}
    for file in files:
        seen[file.name] += 1
        found[file.name if seen[file.name] == 1 else f"{file.name} ({seen[file.name]})"] = file
    return found
