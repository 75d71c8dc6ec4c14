"""What a server has taken on, on disk: after a kill it goes on where it was.

Sessions, samplers, and the training requests with their results are rows of a table; adapters lie in files that the rows name. A
model is kept after a step together with its optimizer, and the requests since then are run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.errors import StorageError, UserError
from nmoe.runs.storage import bytes_free, make_directory, storage_errors
from nmoe.serve.tinker.order import MOST

# A client whose server has been away for longer has given up: the SDK sends a request for five minutes.
_AWAY_S = 3600.0
# Seconds until rows that the disk refused are tried again.
_AGAIN_S = 1.0
# Of the tables below. A journal of another version is refused.
_VERSION = 1
_TABLES = f"""
CREATE TABLE sessions (id TEXT PRIMARY KEY, base TEXT, about TEXT, seen REAL);
CREATE TABLE models (id TEXT PRIMARY KEY, session TEXT, directory TEXT, seq INTEGER);
CREATE TABLE samplers
  (id TEXT PRIMARY KEY, session TEXT, model TEXT, rank INTEGER, attention INTEGER, mlp INTEGER, file TEXT, path TEXT);
CREATE TABLE requests
  (id TEXT PRIMARY KEY, session TEXT, model TEXT, seq INTEGER, kind TEXT, digest BLOB, media TEXT, diverged INTEGER, sum BLOB,
   next INTEGER, body BLOB, outcome BLOB);
CREATE INDEX requests_of_model ON requests (model, seq);
PRAGMA user_version = {_VERSION};
"""
FORGOTTEN = "forgotten"
"""In place of a media type: the result was dropped."""
UNLOAD = MOST
"""In place of a sequence id, after all others."""

Statement = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Request:
    """A request of a model as it came."""

    request_id: str
    model_id: str
    seq_id: int
    kind: str
    digest: bytes
    body: bytes


@dataclass(frozen=True)
class Row:
    """A request in the journal. Without `media` it is not done; with `body_bytes` it has to be run again after a kill, and then
    has to diverge if it `diverged`, else to give a result whose digest is `sum`. `next` was the model's next sequence id after
    it."""

    request_id: str
    model_id: str
    seq_id: int
    kind: str
    digest: bytes
    media: str | None
    diverged: bool
    sum: bytes | None
    next: int | None
    body_bytes: int


@dataclass(eq=False)
class Unit:
    """Statements about one session that are written together or not at all. A `taken` request that the disk refuses is dropped, and
    refused to its client; all else is tried again until the disk has room, or the session ends."""

    session_id: str
    statements: list[Statement]
    taken: bool = False
    written: bool = False
    dropped: bool = False
    refused: str = ""


class Journal:
    """The rows, and the directory of the files that they name. Units are written in the order in which they come, many at a time.
    Used on the event loop's thread only."""

    def __init__(self, directory: Path) -> None:
        """Opens or begins a journal. Raises UserError if another server has it, or it is damaged, and StorageError if the disk is
        full or cannot be written."""
        make_directory(directory, "choose another directory by --saved")
        self.directory = directory
        with storage_errors(directory):
            directory.chmod(0o700)  # other users may not read clients' data
        # Held until the process ends, however it does.
        try:
            fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory.parent}: another server keeps its clients' models there; choose another directory by --saved"
            ) from None
        except OSError as error:
            raise UserError(
                f"{directory}: cannot be locked: {error.strerror}; choose a local disk by --saved"
            ) from None
        try:
            self._rows = sqlite3.connect(directory / "journal.sqlite", check_same_thread=False, isolation_level=None)
            self._open()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise self._damaged(str(error)) from None
            raise self._full(str(error)) from None
        self._waiting, self._writing = list[Unit](), list[Unit]()
        self._turn = asyncio.Lock()

    def _open(self) -> None:
        # One process has the directory, so that none needs shared memory, which network file systems lack. With FULL a row outlives
        # the machine's power, too.
        self._rows.executescript(
            "PRAGMA locking_mode = EXCLUSIVE; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL; "
            f"PRAGMA synchronous = FULL; PRAGMA journal_size_limit = {64 * 2**20};"
        )
        ((found,),) = self._rows.execute("PRAGMA quick_check(1)")
        if found != "ok":
            raise self._damaged(found)
        with contextlib.suppress(sqlite3.Error):  # a full disk, which has no room to make room
            self._rows.executescript("PRAGMA incremental_vacuum")
        ((version,),) = self._rows.execute("PRAGMA user_version")
        ((tables,),) = self._rows.execute("SELECT COUNT(*) FROM sqlite_master")
        if not tables:
            self._rows.executescript(f"BEGIN; {_TABLES} COMMIT;")
        elif version != _VERSION:
            raise UserError(
                f"{self.directory}: its journal is of version {version}, and this nmoe writes {_VERSION}; serve it with the nmoe "
                "that began it, or move the directory away"
            )

    def _damaged(self, reason: str) -> UserError:
        return UserError(
            f"{self.directory}: its journal is damaged: {' '.join(reason.split())}; move the directory away; its clients begin anew"
        )

    def _full(self, reason: str) -> StorageError:
        return StorageError(
            f"{self.directory}: cannot be written: {reason} ({bytes_free(self.directory):,} bytes free); make room"
        )

    def post(self, session_id: str, *statements: Statement, taken: bool = False) -> Unit:
        """Has statements about a session written with the next round."""
        unit = Unit(session_id, list(statements), taken)
        self._waiting.append(unit)
        return unit

    async def flush(self) -> None:
        """Writes all units that wait, but those that the disk refuses."""
        # Whoever waits may be cancelled; the writing goes on.
        await asyncio.shield(self._flush())

    async def settled(self, *units: Unit) -> None:
        """Returns once units are on the disk. Raises StorageError if the disk refuses one, or its session ended before."""
        await self.flush()
        for unit in units:
            if not unit.written:
                raise self._full(unit.refused or "its session has ended")

    async def written(self, unit: Unit) -> None:
        """Returns once a unit is on the disk, however long that has no room, or its session has ended."""
        await self.flush()
        while not (unit.written or unit.dropped):
            await asyncio.sleep(_AGAIN_S)
            await self.flush()

    async def _flush(self) -> None:
        async with self._turn:
            batch, self._waiting = self._waiting, []
            self._writing = batch
            try:
                if batch:  # else those before have written it
                    await asyncio.to_thread(self._write, batch)
            finally:
                left = [one for one in batch if not (one.written or one.dropped)]
                for unit in batch:
                    if unit.written or unit.dropped:
                        unit.statements.clear()  # it is asked for as long as the result, and a body is large
                self._waiting, self._writing = left + self._waiting, []

    def _write(self, batch: list[Unit]) -> None:
        """Writes units at once, or else each that can be written: one that does not fit holds up no other session."""
        try:
            self._transact(batch)
        except Exception:
            refused = dict[str, str]()
            for unit in batch:
                try:
                    if unit.session_id in refused:  # the units of one session stay in their order
                        unit.refused = refused[unit.session_id]
                    else:
                        self._transact([unit])
                except Exception as error:
                    unit.refused = str(error)
                    if not unit.taken:
                        refused[unit.session_id] = unit.refused
                if unit.taken and not unit.written:
                    unit.dropped = True

    def _transact(self, batch: list[Unit]) -> None:
        self._rows.execute("BEGIN")
        try:
            for unit in batch:
                for statement, values in unit.statements:
                    self._rows.execute(statement, values)
            self._rows.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._rows.execute("ROLLBACK")
            raise
        for unit in batch:
            unit.written = True

    def begin_session(self, session_id: str, base: str, about: Mapping[str, Any]) -> Unit:
        values = (session_id, base, json.dumps(about), time.time())
        return self.post(session_id, ("INSERT INTO sessions VALUES (?, ?, ?, ?)", values))

    def seen(self, session_id: str) -> None:
        self.post(session_id, ("UPDATE sessions SET seen = ? WHERE id = ?", (time.time(), session_id)))

    def end_session(self, session_id: str) -> Unit:
        """Removes all rows of a session, and drops those that wait."""
        for unit in (*self._waiting, *self._writing):
            unit.dropped |= unit.session_id == session_id
        self._waiting = [one for one in self._waiting if not one.dropped]
        return self.post(session_id, *_end_of(session_id))

    def take(self, request: Request, session_id: str) -> Unit:
        """Notes a request; one that was noted before stays as it is."""
        values = (
            request.request_id, session_id, request.model_id, request.seq_id, request.kind, request.digest, request.body,
        )  # fmt: skip
        statement = "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?, NULL, 0, NULL, NULL, ?, NULL)"
        return self.post(session_id, (statement, values), taken=True)

    def done(
        self,
        request: Request,
        session_id: str,
        outcome: bytes,
        media: str,
        following: int,
        again: bool = False,
        diverged: bool = False,
        kept: str | None = None,
    ) -> Unit:
        """Notes a result, and the sequence id `following`. The body is kept if the request has to be run `again` after a kill. The
        model may have been `kept` as it is after it, in a directory: requests before need not be run again."""
        update = "outcome = ?, media = ?, next = ?, diverged = ?, sum = ?" + ("" if again else ", body = NULL")
        checked = hashlib.sha256(outcome).digest() if again else None
        values = (outcome, media, following, diverged, checked, request.request_id)
        statements: list[Statement] = [(f"UPDATE requests SET {update} WHERE id = ?", values)]
        if kept is not None:
            before = (request.model_id, request.seq_id)
            statements += [
                (
                    "INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?)",
                    (request.model_id, session_id, kept, request.seq_id),
                ),
                ("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", before),
                ("DELETE FROM requests WHERE model = ? AND seq < ? AND seq > 0 AND media = ?", (*before, FORGOTTEN)),
            ]
        return self.post(session_id, *statements)

    def unloaded(self, request: Request, session_id: str, outcome: bytes, media: str) -> Unit:
        """Notes that a model was unloaded: none of its requests is run again."""
        return self.post(
            session_id,
            ("UPDATE requests SET body = NULL WHERE model = ?", (request.model_id,)),
            ("DELETE FROM models WHERE id = ?", (request.model_id,)),
            ("UPDATE requests SET outcome = ?, media = ? WHERE id = ?", (outcome, media, request.request_id)),
        )

    def forget(self, request_id: str, session_id: str) -> None:
        """Drops a result. The row stays until the model is kept, since its sequence id is over."""
        statement = "UPDATE requests SET outcome = NULL, media = ? WHERE id = ? AND media NOTNULL"
        self.post(session_id, (statement, (FORGOTTEN, request_id)))

    def add_sampler(self, sampler_id: str, session_id: str, *about: Any) -> Unit:
        """Notes a sampler: its model, the rank, attention and mlp of its adapter, the file of its values, and the path of saved
        weights, each None if it has none."""
        statement = "INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        return self.post(session_id, (statement, (sampler_id, session_id, *about)))

    def move_samplers(self, session_id: str, before: str, after: str) -> None:
        """Gives the samplers whose values lie in one file the values of another."""
        self.post(session_id, ("UPDATE samplers SET file = ? WHERE file = ?", (after, before)))

    def end_old(self) -> None:
        """Removes the sessions whose clients must have given up. At the start."""
        since = (time.time() - _AWAY_S,)
        with self._started():
            for (session_id,) in list(self._rows.execute("SELECT id FROM sessions WHERE seen < ?", since)):
                for statement, values in _end_of(session_id):
                    self._rows.execute(statement, values)

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._full(str(error)) from None

    def sessions(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Returns all sessions: their ids, bases, and what clients said about them."""
        rows = self._rows.execute("SELECT id, base, about FROM sessions ORDER BY rowid")
        return [(session_id, base, json.loads(about)) for session_id, base, about in rows]

    def requests(self, session_id: str) -> list[Row]:
        """Returns a session's requests by their sequence ids."""
        columns = "id, model, seq, kind, digest, media, diverged, sum, next, IFNULL(LENGTH(body), 0)"
        rows = self._rows.execute(f"SELECT {columns} FROM requests WHERE session = ? ORDER BY seq", (session_id,))
        return [Row(*row) for row in rows]

    def body(self, request_id: str) -> bytes:
        return self._blob("body", request_id)

    def outcome(self, request_id: str) -> bytes:
        return self._blob("outcome", request_id)

    def _blob(self, column: str, request_id: str) -> bytes:
        ((found,),) = self._rows.execute(f"SELECT {column} FROM requests WHERE id = ?", (request_id,))
        return found or b""

    async def body_of(self, request_id: str) -> bytes:
        """Reads a body beside the event loop, between two rounds of writing."""
        async with self._turn:
            return await asyncio.to_thread(self.body, request_id)

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
        with self._started():
            for table in ("models", "samplers", "requests"):
                self._rows.execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions)")
        named = {row[0] for row in self._rows.execute("SELECT directory FROM models UNION SELECT file FROM samplers")}
        for found in [*self.directory.glob("model-*"), *self.directory.glob("values-*")]:
            if found.name not in named:
                shutil.rmtree(found) if found.is_dir() else found.unlink()


def _end_of(session_id: str) -> list[Statement]:
    tables = (("models", "session"), ("samplers", "session"), ("requests", "session"), ("sessions", "id"))
    return [(f"DELETE FROM {table} WHERE {column} = ?", (session_id,)) for table, column in tables]
