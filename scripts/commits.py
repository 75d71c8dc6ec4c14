"""Copies of this repository as it is at a commit, for the scripts that compare two of them."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]

BEFORE = "0067b0d"
"""The last commit before the rooms of nmoe/ were rebuilt: what the scripts compare with unless told otherwise."""

WORKING_TREE = "."
"""In place of a commit: the files as they lie here, changes that are not committed included."""


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A directory with the files of `commit`, deleted at the end; the repository itself for `WORKING_TREE`.

    The files come from `git archive`, so that a script that is killed leaves nothing behind in `.git`. Raises
    subprocess.CalledProcessError for a commit that does not exist.
    """
    if commit == WORKING_TREE:
        yield ROOT
        return
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory(prefix="nmoe-commit-") as directory:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(directory, filter="data")
        yield Path(directory)


def environment(tree: Path) -> dict[str, str]:
    """The variables under which a process imports `nmoe` from `tree`, computes with one thread and downloads nothing."""
    return {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def resolved(name: str) -> str:
    """The short hash that a name stands for now: HEAD may move on while a script runs. `WORKING_TREE` stays as it is."""
    if name == WORKING_TREE:
        return name
    command = ["git", "rev-parse", "--short", f"{name}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def subject(commit: str) -> str:
    """A commit's short hash and subject line, for reports."""
    if commit == WORKING_TREE:
        return "the working tree"
    command = ["git", "log", "-1", "--format=%h %s", commit]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
