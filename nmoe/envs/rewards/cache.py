"""Texts on disk under keys made of their questions' content: a file each, whole or absent, that any number of runs may share."""

from __future__ import annotations

import json
import os
from pathlib import Path

from nmoe.runs.storage import storage_errors


class Cache:
    """`directory/ab/abcd....json` holds {"content": "..."}."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: str) -> str | None:
        """The text under a key; None where there is none, or where something else wrote the file."""
        try:
            content = json.loads(self._path(key).read_text(encoding="utf-8"))["content"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return content if isinstance(content, str) else None

    def put(self, key: str, content: str) -> None:
        """Raises StorageError."""
        path = self._path(key)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"content": content}), encoding="utf-8")
            os.replace(partial, path)

    def _path(self, key: str) -> Path:
        return self._directory / key[:2] / f"{key}.json"
