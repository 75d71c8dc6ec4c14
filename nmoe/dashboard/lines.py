"""Follows a JSON-lines file: reads each record once, as the file grows, and begins again if it was written anew."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20


class Lines:
    """The records of a file, read so far. `generation` counts how often the file was begun again, for readers that hold a position
    in it: a resumed run cuts its records back. `torn` holds the numbers of lines that are no JSON objects, the first ten."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.generation = 0
        self.torn: list[int] = []
        self._of: tuple[int, int] | None = None
        self._offset = self._number = 0

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the records that came since the last call, each with the offset of its line. If the file was begun anew or has
        gone, `generation` is higher before the first one is yielded."""
        try:
            file = self.file.open("rb")
        except OSError:
            self._begin(None)
            return
        with file:
            about = os.fstat(file.fileno())
            of = (about.st_dev, about.st_ino)
            if of != self._of or about.st_size < self._offset:
                self._begin(of)
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    at, self._offset, self._number = self._offset, self._offset + len(line) + 1, self._number + 1
                    try:
                        record = json.loads(line)
                    except (ValueError, RecursionError):
                        record = None
                    if isinstance(record, dict):
                        yield at, record
                    elif len(self.torn) < 10:
                        self.torn.append(self._number)

    def _begin(self, of: tuple[int, int] | None) -> None:
        if self._of is not None:
            self.generation += 1
        self._of, self._offset, self._number, self.torn = of, 0, 0, []
