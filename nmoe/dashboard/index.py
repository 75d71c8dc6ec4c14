"""The index of a run's samples: a table in sqlite with the offset of each in samples/, and the columns that it is filtered by.

The index is a cache outside of the run, which is only read. It is built from the newest step backwards, a little at a time, so that
the first rows are there at once; later only new files are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.dashboard.runs import stamp_of
from nmoe.runs.storage import step_of

_VERSION = "5"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (step INTEGER PRIMARY KEY, stamp TEXT, torn TEXT);
CREATE TABLE IF NOT EXISTS samples (
    step INTEGER, line INTEGER, start INTEGER, size INTEGER, grp INTEGER, number INTEGER, problem TEXT, source TEXT, reward REAL,
    failure TEXT, outcome TEXT, tokens INTEGER, oldest INTEGER, newest INTEGER, left_out TEXT, wrong INTEGER,
    solved INTEGER,
    PRIMARY KEY (step, line)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_reward ON samples (reward, step);
CREATE INDEX IF NOT EXISTS by_problem ON samples (problem, reward, solved, step);
CREATE INDEX IF NOT EXISTS by_failure ON samples (failure, step);
CREATE INDEX IF NOT EXISTS by_failure_and_reward ON samples (failure, reward, step);
CREATE INDEX IF NOT EXISTS by_failure_and_tokens ON samples (failure, tokens, step);
CREATE INDEX IF NOT EXISTS by_tokens ON samples (tokens, step);
CREATE INDEX IF NOT EXISTS by_wrong ON samples (wrong, step);
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT);
"""
_COLUMNS = 17
_SHOWN = "step, line, grp, number, problem, reward, failure, outcome, tokens, oldest, newest, left_out, wrong"
ORDERS = {
    "newest": "step DESC, line",
    "oldest": "step, line",
    "reward": "reward DESC, step DESC, line",
    "-reward": "reward, step DESC, line",
    "tokens": "tokens DESC, step DESC, line",
    "-tokens": "tokens, step DESC, line",
    "problem": "problem, step DESC, line",
}
# CPU seconds of a text search before it returns its rows and the step where it goes on.
SEARCH_S = 0.06
# Rows that are counted; more are "10,000 or more".
COUNTED = 10_000


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nmoe" / "dashboard"


@dataclass(frozen=True)
class Query:
    """What samples are asked for: values of columns, bounds, a text, and the order."""

    equal: Mapping[str, Any]
    at_least: Mapping[str, float]
    at_most: Mapping[str, float]
    text: str = ""
    order: str = "newest"

    def where(self) -> tuple[str, list[Any]]:
        parts = [f"{name} = ?" for name in self.equal]
        parts += [f"{name} >= ?" for name in self.at_least] + [f"{name} <= ?" for name in self.at_most]
        values = [*self.equal.values(), *self.at_least.values(), *self.at_most.values()]
        return (f" WHERE {' AND '.join(parts)}" if parts else ""), values


class Index:
    """The index of one run's samples. Its methods may be called from several threads."""

    def __init__(self, run: Path, cache: Path | None) -> None:
        """`cache` is the folder of the index's file; None, or one that cannot be written, keeps it in memory."""
        self._samples = run / "samples"
        self._lock = threading.Lock()
        self._db, self._in_memory = _opened(run, cache), False
        self._known: dict[int, str] = dict(self._db.execute("SELECT step, stamp FROM files"))
        self._todo: list[tuple[int, str]] = []
        self._seen: object = None
        self.generation = 0
        self._totals: tuple[int, dict[str, Any]] | None = None

    def look(self) -> None:
        """Finds the files that are new or were written anew, and forgets those that are gone."""
        try:
            about = self._samples.stat()
            if self._seen == about.st_mtime_ns:
                return
            if self._seen is not None and self._next(about.st_mtime_ns):
                return
            found = {
                step: f"{entry.stat().st_size}:{entry.stat().st_mtime_ns}"
                for entry in os.scandir(self._samples)
                if entry.name.endswith(".jsonl") and (step := step_of(entry.name[:-6])) is not None
            }
            self._seen = about.st_mtime_ns
        except OSError:
            return  # deleted: the rows so far stay
        with self._lock:
            gone = [step for step in self._known if step not in found]
            if gone and found:
                try:
                    self._db.executemany("DELETE FROM samples WHERE step = ?", [(step,) for step in gone])
                    self._db.executemany("DELETE FROM files WHERE step = ?", [(step,) for step in gone])
                    self._db.commit()
                except sqlite3.Error:
                    self._go_on_in_memory()
                for step in gone:
                    self._known.pop(step, None)
                self.generation += 1
            self._todo = sorted((step, stamp) for step, stamp in found.items() if self._known.get(step) != stamp)

    def _next(self, seen: int) -> bool:
        """Finds the files of the steps after the newest one, and returns whether there are any. A look at the whole folder of a
        long run that goes on would cost more than all else."""
        newest = max([*self._known, *(step for step, _ in self._todo)], default=0)
        found = []
        while (stamp := stamp_of(self._samples / f"step_{newest + 1:06d}.jsonl")) is not None:
            newest += 1
            found.append((newest, f"{stamp[1]}:{stamp[2]}"))
        if found:
            with self._lock:
                self._todo += found
            self._seen = seen
        return bool(found)

    @property
    def is_empty(self) -> bool:
        return not self._known

    def build(self, seconds: float) -> bool:
        """Reads files that are not in the index yet, the newest first, for about so many CPU seconds; returns whether any are
        left."""
        end = time.thread_time() + seconds
        while self._todo and time.thread_time() < end:
            with self._lock:
                part = [self._todo.pop() for _ in range(min(20, len(self._todo)))]
                try:
                    for step, stamp in part:
                        self._add(step, stamp)
                    self._db.commit()
                except sqlite3.Error:
                    if self._in_memory:
                        raise
                    # The steps that the file has are read again, too: it may be torn.
                    self._todo = sorted({**self._known, **dict(self._todo), **dict(part)}.items())
                    self._go_on_in_memory()
                self.generation += 1
        return bool(self._todo)

    def _go_on_in_memory(self) -> None:
        """Leaves the file, which can no longer be written: the disk is full, or another dashboard writes it."""
        with suppress(sqlite3.Error):
            self._db.close()
        self._db, self._in_memory = _in_memory(), True
        self._known.clear()

    @property
    def missing(self) -> int:
        """The number of files that are not in the index yet."""
        return len(self._todo)

    def _add(self, step: int, stamp: str) -> None:
        torn: list[int] = []
        rows: list[tuple[Any, ...]] = []
        try:
            data = (self._samples / f"step_{step:06d}.jsonl").read_bytes()
        except OSError:
            return
        start = 0
        *lines, last = data.split(b"\n")
        for line, raw in enumerate([*lines, last] if last else lines):
            try:
                rows.append(_row_of(json.loads(raw), step, line, start, len(raw)))
            except (ValueError, TypeError, AttributeError, RecursionError):
                torn.append(line + 1)
            start += len(raw) + 1
        self._db.execute("DELETE FROM samples WHERE step = ?", (step,))
        self._db.executemany(f"INSERT INTO samples VALUES ({', '.join('?' * _COLUMNS)})", rows)
        self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (step, stamp, json.dumps(torn)))
        self._known[step] = stamp

    def torn(self) -> list[str]:
        """Names the lines that are no samples, `step_000010.jsonl:3`, the first twenty."""
        with self._lock:
            found = self._db.execute(
                "SELECT step, torn FROM files WHERE torn != '[]' ORDER BY step LIMIT 20"
            ).fetchall()
        return [f"step_{step:06d}.jsonl:{line}" for step, lines in found for line in json.loads(lines)][:20]

    def count(self, query: Query) -> int:
        """Counts the samples of a query without its text, up to COUNTED."""
        where, values = query.where()
        with self._lock:
            (count,) = self._db.execute(
                f"SELECT count(*) FROM (SELECT 1 FROM samples{where} LIMIT {COUNTED})", values
            ).fetchone()
        return int(count)

    def rows(self, query: Query, first: int, count: int) -> list[dict[str, Any]]:
        """Returns `count` samples of a query without its text, from the `first`-th on."""
        where, values = query.where()
        sql = f"SELECT {_SHOWN} FROM samples{where} ORDER BY {ORDERS[query.order]} LIMIT ? OFFSET ?"
        with self._lock:
            found = self._db.execute(sql, [*values, count, first]).fetchall()
        return [dict(zip(_SHOWN.split(", "), row, strict=True)) for row in found]

    def search(self, query: Query, before: tuple[int, int] | None, count: int) -> tuple[list[dict[str, Any]], Any]:
        """Returns samples whose text, question or answer contains the query's text, the newest first, and where a further search
        goes on: a pair of step and line, None at the end. It ends after `count` samples or SEARCH_S."""
        needle = json.dumps(query.text)[1:-1].encode()
        end = time.thread_time() + SEARCH_S
        found: list[dict[str, Any]] = []
        for row, raw in self._raw(query, before):
            if needle in raw and query.text in _texts(raw):
                found.append(row)
            if len(found) >= count or time.thread_time() > end:
                return found, (row["step"], row["line"])
        return found, None

    def _raw(self, query: Query, before: tuple[int, int] | None) -> Iterator[tuple[dict[str, Any], bytes]]:
        where, values = query.where()
        names = f"start, size, {_SHOWN}".split(", ")
        while True:
            after = "" if before is None else f"{' AND' if where else ' WHERE'} (step < ? OR (step = ? AND line > ?))"
            more = [] if before is None else [before[0], before[0], before[1]]
            sql = f"SELECT {', '.join(names)} FROM samples{where}{after} ORDER BY step DESC, line LIMIT 500"
            with self._lock:
                rows = [dict(zip(names, row, strict=True)) for row in self._db.execute(sql, [*values, *more])]
            data, of = b"", None
            for row in rows:
                if row["step"] != of:
                    of, data = row["step"], b""
                    with suppress(OSError):
                        data = (self._samples / f"step_{of:06d}.jsonl").read_bytes()
                start = row.pop("start")
                raw = data[start : start + row.pop("size")]
                before = (row["step"], row["line"])
                yield row, raw
            if len(rows) < 500:
                return

    def read(self, step: int, line: int) -> dict[str, Any] | None:
        """Returns a sample's record, read at its offset; None if there is none, or it is gone."""
        with self._lock:
            span = self._db.execute(
                "SELECT start, size FROM samples WHERE step = ? AND line = ?", (step, line)
            ).fetchone()
        if span is None:
            return None
        try:
            with (self._samples / f"step_{step:06d}.jsonl").open("rb") as file:
                file.seek(span[0])
                found = json.loads(file.read(span[1]))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def problems(self, order: str, count: int) -> list[dict[str, Any]]:
        """Returns the problems with the number of their samples, of those that were right, the mean reward and the last step: by
        `never`, those that were never solved, the most tried first; by `mean`, the lowest rewards first. Of open problems, which
        have no right answer, the number is None."""
        having = " HAVING solved = 0" if order == "never" else ""
        by = "tried DESC, problem" if order == "never" else "mean, tried DESC"
        sql = (
            "SELECT problem, count(*) AS tried, sum(solved) AS solved, avg(reward) AS mean, max(step) AS last "
            f"FROM samples GROUP BY problem{having} ORDER BY {by} LIMIT ?"
        )
        with self._lock:
            found = self._db.execute(sql, (count,)).fetchall()
        return [dict(zip(("problem", "tried", "solved", "mean", "last"), row, strict=True)) for row in found]

    def totals(self) -> dict[str, Any]:
        """Returns the number of samples, of their steps, of problems with a right answer, of those that were never solved, and of
        each failure."""
        if self._totals is not None and self._totals[0] == self.generation:
            return self._totals[1]
        generation = self.generation
        with self._lock:
            (samples,) = self._db.execute("SELECT count(*) FROM samples").fetchone()
            (steps,) = self._db.execute("SELECT count(*) FROM files").fetchone()
            problems, never = self._db.execute(
                "SELECT count(solved), sum(solved = 0) FROM (SELECT max(solved) AS solved FROM samples GROUP BY problem)"
            ).fetchone()
            failures = self._db.execute("SELECT failure, count(*) FROM samples GROUP BY failure").fetchall()
        found = {
            "samples": samples, "steps": steps, "problems": problems, "never_solved": never or 0, "failures": dict(failures),
        }  # fmt: skip
        self._totals = generation, found
        return found


def _opened(run: Path, cache: Path | None) -> sqlite3.Connection:
    """Opens the index of a run, empty if it was made by another version or of another run."""
    real = str(run.resolve())
    wanted = {"version": _VERSION, "run": real}
    if cache is not None:
        with suppress(OSError, sqlite3.Error):
            cache.mkdir(parents=True, exist_ok=True)
            file = cache / f"{hashlib.sha256(real.encode()).hexdigest()[:24]}.sqlite"
            for attempt in range(2):
                db = sqlite3.connect(file, check_same_thread=False, timeout=1)
                try:
                    db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;" + _SCHEMA)
                    about = dict(db.execute("SELECT name, value FROM about"))
                    if not about or about == wanted:
                        db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", wanted.items())
                        db.commit()
                        return db
                except sqlite3.Error:
                    if attempt:
                        raise
                db.close()
                file.unlink()
    return _in_memory()


def _in_memory() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.executescript(_SCHEMA)
    return db


def _row_of(record: dict[str, Any], step: int, line: int, start: int, size: int) -> tuple[Any, ...]:
    reward, verdict = record.get("reward"), record.get("verdict") or {}
    versions = [version for version in set(record.get("versions") or ()) if version >= 0]
    weights, extras = record.get("weights") or {}, record.get("extras") or {}
    outcome = verdict.get("outcome", "")
    # An answer to an open problem has no such component: it is neither right nor wrong.
    closed = "correctness" in (record.get("components") or {"correctness": 0.0})
    correctness = extras.get("correctness", float(outcome == "correct"))
    high = isinstance(reward, int | float) and reward > weights.get("correctness", 1.0) / 2
    row = (
        step, line, start, size, record.get("group", 0), record.get("index", 0), str(record.get("problem", "?")),
        str(record.get("source", "")), reward if isinstance(reward, int | float) else None, str(record.get("failure", "ok")),
        outcome, len(record.get("token_ids") or ()), min(versions, default=None), max(versions, default=None),
        record.get("left_out"), int(closed and correctness == 0 and high), int(outcome == "correct") if closed else None,
    )  # fmt: skip
    for value in row:
        _check(value)
    return row


def _check(value: Any) -> None:
    """Raises TypeError or ValueError for a value that sqlite does not take."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, int):
        if abs(value) >= 2**63:
            raise ValueError("more than 64 bits")
    elif not isinstance(value, float | None):
        raise TypeError("neither a number nor a text")


def _texts(raw: bytes) -> str:
    """Returns what a person reads of a sample: the texts that a search looks in."""
    try:
        record = json.loads(raw)
    except ValueError:
        return ""
    parts = (
        record.get("question"),
        record.get("gold"),
        record.get("text"),
        record.get("answer"),
        record.get("problem"),
    )
    outputs = (event.get("output") for event in record.get("tool_events") or ())
    return "\x00".join(str(part) for part in (*parts, *outputs) if part is not None)
