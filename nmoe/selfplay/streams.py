"""The files of training data (streams) that self-play writes as JSON lines, and its counts.

Lines are appended during a step. A checkpoint records the length of each stream, and a resumed run truncates the streams to it.
The lines of an interrupted step are then written again, identically, so that none is missing or doubled.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nmoe.errors import UserError
from nmoe.runs.storage import append_whole, storage_errors, write_atomically

VERIFIER, META_VERIFIER, GENERATOR = (
    "proof_verifier_train.jsonl",
    "proof_meta_verifier_train.jsonl",
    "proof_generator_train.jsonl",
)
STREAMS = (VERIFIER, META_VERIFIER, GENERATOR)
COUNTS = "counts.json"


class Streams:
    """The streams in one directory, and counts by group and name: `streams.counts["outcomes"]["accepted_0.5"]`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.counts: dict[str, Counter[str]] = {}

    def append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends records to the stream of this name, one JSON line each. Raises StorageError."""
        # ASCII escapes, because Unicode's line separators would end a line in readers of text.
        lines = b"".join(json.dumps(record, allow_nan=False).encode("ascii") + b"\n" for record in records)
        append_whole(self._directory / name, lines)

    def count(self, group: str, counts: Mapping[str, int]) -> None:
        self.counts.setdefault(group, Counter()).update(counts)

    def write_counts(self) -> None:
        """Writes counts.json. Raises StorageError."""
        content = {group: dict(sorted(self.counts[group].items())) for group in sorted(self.counts)}
        write_atomically(self._directory / COUNTS, (json.dumps(content, indent=1) + "\n").encode())

    def state(self) -> dict[str, Any]:
        """Flushes the streams to disk and returns their lengths in bytes and the counts, as JSON values for a checkpoint."""
        ends = {}
        for name in STREAMS:
            path = self._directory / name
            with storage_errors(path), path.open("ab") as file:
                os.fsync(file.fileno())
                ends[name] = file.tell()
        return {"ends": ends, "counts": {group: dict(counts) for group, counts in self.counts.items()}}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Truncates the streams to the lengths in `state`, or to nothing without a state, and restores the counts. Raises UserError
        for a stream that is shorter.
        """
        for name in STREAMS:
            path, end = self._directory / name, 0 if state is None else state["ends"][name]
            with storage_errors(path), path.open("ab") as file:
                if (size := file.tell()) < end:
                    raise UserError(
                        f"{path}: has {size:,} bytes, and the last checkpoint was made with {end:,}; put the file back"
                    )
                file.truncate(end)
        self.counts = {} if state is None else {name: Counter(counts) for name, counts in state["counts"].items()}
        self.write_counts()

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """Yields the records of a stream, in order."""
        with (self._directory / name).open("rb") as file:
            yield from map(json.loads, file)
