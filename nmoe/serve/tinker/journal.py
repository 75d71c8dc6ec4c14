"""What a server has taken on, on disk: after a kill it goes on where it was.

Sessions, samplers, and the training requests with their results are rows of a table; adapters lie in files that the rows name. A
model is kept after a step together with its optimizer, and the requests since then are run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.errors import StorageError, UserError
from nmoe.runs.storage import bytes_free, make_directory

# A client whose server has been away for longer has given up: the SDK sends a request for five minutes.
_AWAY_S = 3600.0
_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, base TEXT, about TEXT, seen REAL);
CREATE TABLE IF NOT EXISTS models (id TEXT PRIMARY KEY, session TEXT, directory TEXT, seq INTEGER);
CREATE TABLE IF NOT EXISTS samplers
  (id TEXT PRIMARY KEY, session TEXT, model TEXT, rank INTEGER, attention INTEGER, mlp INTEGER, file TEXT, path TEXT);
CREATE TABLE IF NOT EXISTS requests
  (id TEXT PRIMARY KEY, session TEXT, model TEXT, seq INTEGER, kind TEXT, digest BLOB, body BLOB, outcome BLOB, media TEXT);
"""
FORGOTTEN = "forgotten"
"""In place of a media type: the result was dropped."""
UNLOAD = 2**62
"""In place of a sequence id, after all others."""

Statement = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Request:
    """A request of a model. Without `media` it is not done; without a `body` it need not be run again."""

    request_id: str
    model_id: str
    seq_id: int
    kind: str
    digest: bytes
    body: bytes | None
    outcome: bytes | None
    media: str | None


class Journal:
    """The rows, and the directory of the files that they name. Statements are written in the order in which they come, many at
    a time. Used on the event loop's thread only."""

    def __init__(self, directory: Path) -> None:
        """Opens or begins a journal. Raises UserError if another server has it."""
        make_directory(directory, "choose another directory by --saved")
        self.directory = directory
        # Held until the process ends, however it does.
        try:
            fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory.parent}: another server keeps its clients' models there; choose another directory by --saved"
            ) from None
        try:
            self._rows = sqlite3.connect(directory / "journal.sqlite", check_same_thread=False, isolation_level=None)
            # With FULL a row outlives the machine's power, too.
            self._rows.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; {_TABLES}")
        except sqlite3.Error as error:
            raise UserError(f"{directory}: its journal cannot be read: {error}; move the directory away") from None
        self._waiting = list[Statement]()
        self._turn = asyncio.Lock()

    def post(self, statement: str, *values: Any) -> None:
        """Has a statement written with the next `flush`."""
        self._waiting.append((statement, values))

    async def flush(self) -> None:
        """Returns once all statements so far are on the disk. Raises StorageError if it takes none; they are tried again then."""
        # Whoever waits may be cancelled; the writing goes on.
        await asyncio.shield(self._flush())

    async def _flush(self) -> None:
        async with self._turn:
            batch, self._waiting = self._waiting, []
            if not batch:  # those before have written it
                return
            try:
                await asyncio.to_thread(self._write, batch)
            except sqlite3.Error as error:
                self._waiting = batch + self._waiting
                free = bytes_free(self.directory)
                raise StorageError(f"{self.directory}: cannot be written: {error} ({free:,} bytes free)") from error

    def _write(self, batch: list[Statement]) -> None:
        self._rows.execute("BEGIN")
        try:
            for statement, values in batch:
                self._rows.execute(statement, values)
            self._rows.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._rows.execute("ROLLBACK")
            raise

    def begin_session(self, session_id: str, base: str, about: Mapping[str, Any]) -> None:
        self.post("INSERT INTO sessions VALUES (?, ?, ?, ?)", session_id, base, json.dumps(about), time.time())

    def seen(self, session_id: str) -> None:
        self.post("UPDATE sessions SET seen = ? WHERE id = ?", time.time(), session_id)

    def end_session(self, session_id: str) -> None:
        for table in ("models", "samplers", "requests"):
            self.post(f"DELETE FROM {table} WHERE session = ?", session_id)
        self.post("DELETE FROM sessions WHERE id = ?", session_id)

    def take(self, request: Request, session_id: str) -> None:
        """Notes a request; one that was noted before stays as it is."""
        self.post(
            "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL)",
            request.request_id, session_id, request.model_id, request.seq_id, request.kind, request.digest, request.body,
        )  # fmt: skip

    def done(self, request_id: str, outcome: bytes, media: str, again: bool) -> None:
        """Notes a result. The body is kept if the request has to be run `again` after a kill."""
        body = "body" if again else "NULL"
        self.post(f"UPDATE requests SET outcome = ?, media = ?, body = {body} WHERE id = ?", outcome, media, request_id)

    def forget(self, request_id: str) -> None:
        """Drops a result. The row stays until the model is kept, since its sequence id is over."""
        self.post("UPDATE requests SET outcome = NULL, media = ? WHERE id = ? AND media NOTNULL", FORGOTTEN, request_id)

    def keep_model(self, model_id: str, session_id: str, directory: str, seq_id: int) -> None:
        """Notes where a model lies as it is after a request: those before need not be run again."""
        self.post("INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?)", model_id, session_id, directory, seq_id)
        self.post("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", model_id, seq_id)
        self.post(
            "DELETE FROM requests WHERE model = ? AND seq < ? AND seq > 0 AND media = ?", model_id, seq_id, FORGOTTEN
        )

    def drop_model(self, model_id: str) -> None:
        self.post("DELETE FROM models WHERE id = ?", model_id)

    def add_sampler(self, sampler_id: str, session_id: str, *about: Any) -> None:
        """Notes a sampler: its model, the rank, attention and mlp of its adapter, the file of its values, and the path of saved
        weights, each None if it has none."""
        self.post("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", sampler_id, session_id, *about)

    def move_samplers(self, before: str, after: str) -> None:
        """Gives the samplers whose values lie in one file the values of another."""
        self.post("UPDATE samplers SET file = ? WHERE file = ?", after, before)

    def sessions(self, base: str) -> list[tuple[str, dict[str, Any]]]:
        """Returns the sessions over a base whose clients may still be there, and ends the others."""
        found = list(self._rows.execute("SELECT id, base, about, seen FROM sessions ORDER BY rowid"))
        for session_id, _, _, seen in found:
            if seen < time.time() - _AWAY_S:
                self.end_session(session_id)
        since = time.time() - _AWAY_S
        return [(one, json.loads(about)) for one, of, about, seen in found if of == base and seen >= since]

    def requests(self, session_id: str) -> list[Request]:
        """Returns a session's requests by their sequence ids."""
        columns = "id, model, seq, kind, digest, body, outcome, media"
        return [
            Request(*row)
            for row in self._rows.execute(
                f"SELECT {columns} FROM requests WHERE session = ? ORDER BY seq",
                (session_id,),
            )
        ]

    def models(self, session_id: str) -> dict[str, tuple[str, int]]:
        """Returns for each model the directory where it lies, and the sequence id of the last request before."""
        rows = self._rows.execute("SELECT id, directory, seq FROM models WHERE session = ?", (session_id,))
        return {model_id: (directory, seq_id) for model_id, directory, seq_id in rows}

    def samplers(self, session_id: str) -> list[tuple[Any, ...]]:
        """Returns the rows of `add_sampler`, without the session."""
        columns = "id, model, rank, attention, mlp, file, path"
        return list(self._rows.execute(f"SELECT {columns} FROM samplers WHERE session = ?", (session_id,)))

    def fresh_directory(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="model-", dir=self.directory))

    def tidy(self) -> None:
        """Removes the rows of no session and the files of no row: what a kill left. At the start."""
        for table in ("models", "samplers", "requests"):
            self._rows.execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions)")
        named = {row[0] for row in self._rows.execute("SELECT directory FROM models UNION SELECT file FROM samplers")}
        for found in [*self.directory.glob("model-*"), *self.directory.glob("values-*")]:
            if found.name not in named:
                shutil.rmtree(found) if found.is_dir() else found.unlink()
