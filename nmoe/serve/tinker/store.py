"""Saved weights on disk: `tinker://MODEL/weights/NAME` with the optimizer, `tinker://MODEL/sampler_weights/NAME` to sample from."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from nmoe.parsing import json_of
from nmoe.serve.tinker.errors import TinkerError

Kind = Literal["weights", "sampler_weights"]
_KINDS: dict[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
_ABOUT, _RUN = "tinker.json", "run.json"


def now() -> str:
    return datetime.now(UTC).isoformat()


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
        }


class Store:
    """The saved weights below a directory, and a record of each model that has been trained."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def note_run(self, model_id: str, about: Mapping[str, Any]) -> None:
        """Records a model when it is made."""
        directory = self._of(model_id)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _RUN).write_text(json.dumps(about) + "\n")

    def runs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the ids and records of all models, the newest first."""
        found = list(self.root.glob(f"*/{_RUN}"))
        for file in sorted(found, key=lambda one: one.stat().st_mtime, reverse=True):
            yield file.parent.name, json_of(file.read_bytes())

    def run(self, model_id: str) -> dict[str, Any]:
        """Returns a model's record. Raises TinkerError (404)."""
        try:
            record: dict[str, Any] = json_of((self._of(model_id) / _RUN).read_bytes())
        except FileNotFoundError:
            raise TinkerError(f"there is no training run {model_id!r}", 404) from None
        return record

    def save(
        self, model_id: str, kind: Kind, name: str, write: Callable[[Path], None], about: Mapping[str, Any]
    ) -> Saved:
        """Has `write` fill a directory, which gets its name once it is whole. Raises TinkerError for a name that is none."""
        directory = self._of(model_id) / kind / self._checked(name)
        directory.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
        try:
            write(fresh)
            (fresh / _ABOUT).write_text(json.dumps({**about, "time": now()}) + "\n")
            old = directory.parent / f".old-{fresh.name}"
            if directory.exists():
                directory.rename(old)
            fresh.rename(directory)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return self._saved(model_id, kind, directory)

    def find(self, path: str, *kinds: Kind) -> Saved:
        """Returns the weights of a path. Raises TinkerError for a path that is none, and 404 where nothing lies."""
        parts = path.removeprefix("tinker://").split("/")
        wanted = kinds or tuple(_KINDS)
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in wanted:
            raise TinkerError(f"path = {path!r}: must be tinker://MODEL/{' or '.join(wanted)}/NAME")
        kind: Kind = "weights" if parts[1] == "weights" else "sampler_weights"
        directory = self._of(parts[0]) / kind / self._checked(parts[2])
        if not (directory / _ABOUT).exists():
            raise TinkerError(f"there are no weights at {path}", 404)
        return self._saved(parts[0], kind, directory)

    def saved(self, model_id: str) -> list[Saved]:
        """Returns all weights of a model, the newest first."""
        found = [
            self._saved(model_id, kind, file.parent)
            for kind in _KINDS
            for file in (self._of(model_id) / kind).glob(f"[!.]*/{_ABOUT}")
        ]
        return sorted(found, key=lambda one: str(one.about["time"]), reverse=True)

    def delete(self, path: str) -> None:
        shutil.rmtree(self.find(path).directory)

    def _saved(self, model_id: str, kind: Kind, directory: Path) -> Saved:
        return Saved(model_id, kind, directory.name, directory, json_of((directory / _ABOUT).read_bytes()))

    def _of(self, model_id: str) -> Path:
        return self.root / self._checked(model_id)

    @staticmethod
    def _checked(name: str) -> str:
        if not _NAME.fullmatch(name):
            raise TinkerError(f"name {name!r}: must be letters, digits and _.:-, at most 200")
        return os.fspath(name)
