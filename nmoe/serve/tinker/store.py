"""Saved weights on disk: `tinker://MODEL/weights/NAME` with the optimizer, `tinker://MODEL/sampler_weights/NAME` to sample from."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from nmoe.parsing import json_of
from nmoe.runs.storage import sync, write_atomically
from nmoe.serve.tinker.errors import TinkerError

Kind = Literal["weights", "sampler_weights"]
_KINDS: dict[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
_ABOUT, _RUN = "tinker.json", "run.json"
# Hidden directories: weights that others replace, that are being written, and that are being removed.
_OLD, _NEW, _GONE = ".old-", ".new-", ".gone-"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def expiry(ttl_seconds: int | None) -> str | None:
    """Returns the time so many seconds from now; without them None."""
    return None if ttl_seconds is None else (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()


def _expired(about: Mapping[str, Any]) -> bool:
    # Times of one zone in one form sort as texts.
    return about.get("expires") is not None and str(about["expires"]) <= now()


def _record(file: Path) -> dict[str, Any] | None:
    """Reads a record; None if there is none, or it is damaged."""
    try:
        record = json_of(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return record if isinstance(record, dict) and "time" in record else None


@dataclass(frozen=True)
class Saved:
    """Saved weights, and what the client said about them."""

    model_id: str
    kind: Kind
    name: str
    directory: Path
    about: Mapping[str, Any]

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def described(self) -> dict[str, Any]:
        """Returns the protocol's record of a checkpoint."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": _KINDS[self.kind],
            "time": self.about["time"],
            "tinker_path": self.path,
            "size_bytes": sum(file.stat().st_size for file in self.directory.iterdir()),
            "public": False,
            "user_metadata": self.about.get("user_metadata"),
            "expires_at": self.about.get("expires"),
        }


class Store:
    """The saved weights below a directory, and a record of each model that has been trained."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / ".state"

    def mend(self) -> None:
        """Puts back, or removes, what a killed server left hidden. For the one server that writes below this directory."""
        for old in self.root.glob(f"*/*/{_OLD}*"):
            named = old.with_name(old.name.removeprefix(_OLD))
            if named.exists():
                shutil.rmtree(old)
            else:
                old.rename(named)
        for left in [*self.root.glob(f"*/*/{_NEW}*"), *self.root.glob(f"*/*/{_GONE}*")]:
            shutil.rmtree(left)

    def note_run(self, model_id: str, about: Mapping[str, Any]) -> None:
        """Records a model when it is made."""
        directory = self._of(model_id)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / _RUN, (json.dumps(about) + "\n").encode())
        sync(directory)
        sync(self.root)

    def runs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the ids and records of all models, the newest first; not of one whose record is damaged."""
        found = list(self.root.glob(f"*/{_RUN}"))
        for file in sorted(found, key=lambda one: one.stat().st_mtime, reverse=True):
            if (record := _record(file)) is not None:
                yield file.parent.name, record

    def run(self, model_id: str) -> dict[str, Any]:
        """Returns a model's record. Raises TinkerError (404)."""
        if (record := _record(self._of(model_id) / _RUN)) is None:
            raise TinkerError(f"there is no training run {model_id!r}", 404)
        return record

    def save(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        write: Callable[[Path], None],
        about: Mapping[str, Any],
        overwrite: bool,
    ) -> Saved:
        """Has `write` fill a directory, which gets its name once it is whole and on the disk. Raises TinkerError for a name that is
        none, and without `overwrite` for one in use. Weights that the same `request` of `about` has saved before are they."""
        directory = self._of(model_id) / kind / self._checked(name)
        there = self._saved(model_id, kind, directory)
        if there is not None and there.about.get("request") == about["request"]:
            return there
        if not overwrite and there is not None:
            path = f"tinker://{model_id}/{kind}/{name}"
            raise TinkerError(f"path = {name!r}: there are weights at {path}; choose another name, or set overwrite")
        directory.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=_NEW, dir=directory.parent))
        try:
            write(fresh)
            record = {**about, "time": now()}
            (fresh / _ABOUT).write_text(json.dumps(record) + "\n")
            for file in (*fresh.iterdir(), fresh):
                sync(file)
            old = directory.with_name(_OLD + name)
            shutil.rmtree(old, ignore_errors=True)
            if directory.exists():
                directory.rename(old)
            try:
                fresh.rename(directory)
            except OSError:
                if old.exists():
                    old.rename(directory)
                raise
            for parent in (directory.parent, directory.parent.parent, self.root):
                sync(parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return Saved(model_id, kind, name, directory, record)

    def find(self, path: str, *kinds: Kind) -> Saved:
        """Returns the weights of a path. Raises TinkerError for a path that is none, and 404 where nothing lies."""
        parts = path.removeprefix("tinker://").split("/")
        wanted = kinds or tuple(_KINDS)
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in wanted:
            raise TinkerError(f"path = {path!r}: must be tinker://MODEL/{' or '.join(wanted)}/NAME")
        kind: Kind = "weights" if parts[1] == "weights" else "sampler_weights"
        directory = self._of(parts[0]) / kind / self._checked(parts[2])
        if (found := self._saved(parts[0], kind, directory)) is None:
            raise TinkerError(f"there are no weights at {path}", 404)
        return found

    def saved(self, model_id: str) -> list[Saved]:
        """Returns all weights of a model, the newest first."""
        found = [
            self._saved(model_id, kind, file.parent)
            for kind in _KINDS
            for file in (self._of(model_id) / kind).glob(f"[!.]*/{_ABOUT}")
        ]
        there = [one for one in found if one is not None]
        return sorted(there, key=lambda one: str(one.about["time"]), reverse=True)

    def expire(self) -> None:
        """Removes the weights whose time is over."""
        for file in self.root.glob(f"*/*/[!.]*/{_ABOUT}"):
            if _expired(_record(file) or {}):
                with suppress(FileNotFoundError):  # replaced meanwhile
                    self._remove(file.parent)

    def delete(self, path: str) -> None:
        self._remove(self.find(path).directory)

    @staticmethod
    def _remove(directory: Path) -> None:
        """Removes weights, so that a part of them never has their name."""
        # A full disk has no room for another directory, but it has for another name.
        gone = directory.with_name(_GONE + secrets.token_hex(8))
        directory.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    @staticmethod
    def _saved(model_id: str, kind: Kind, directory: Path) -> Saved | None:
        """Returns the weights in a directory; None if there are none, or their time is over."""
        about = _record(directory / _ABOUT)
        return None if about is None or _expired(about) else Saved(model_id, kind, directory.name, directory, about)

    def _of(self, model_id: str) -> Path:
        return self.root / self._checked(model_id)

    @staticmethod
    def _checked(name: str) -> str:
        if not _NAME.fullmatch(name):
            raise TinkerError(f"name {name!r}: must be letters, digits and _.:-, at most 200")
        return os.fspath(name)
