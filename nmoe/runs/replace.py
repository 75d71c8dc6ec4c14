"""Deletes the output of an earlier command: only files that it made, and never a run that another process is writing.

Other files in the way are named, and deleted only if the user agrees.
"""

import hashlib
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from nmoe.config.commands import COMMANDS
from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs.directory import RunLock
from nmoe.runs.running import LOCK
from nmoe.runs.storage import storage_errors

# What readers of a run write beside its records, and can write again.
_DERIVED = (LOCK, "report.md", "plots")


def fingerprint(path: Path) -> str:
    """Returns a digest of a file, or of all files of a directory with their names, which changes with any file that is added,
    removed or edited. A run's lock and report are left out."""
    found = hashlib.sha256()
    files = sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]
    for file in files:
        name = file.relative_to(path)
        if name.parts[:1] and name.parts[0] in _DERIVED:
            continue
        if file.is_symlink():
            content = str(file.readlink()).encode()
        elif file.is_file():
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").digest()
        else:
            content = b"directory"
        found.update(f"{name.as_posix()}\0".encode(errors="surrogateescape") + content + b"\0")
    return found.hexdigest()


def continued_by_hand(run: Path) -> bool:
    """Returns whether the run's last start was by a training command, such as `nmoe rl train`. False for a path that is no run."""
    try:
        record = json_of((run / "provenance.json").read_text())
        argv = [record, *record["resumed"]][-1]["argv"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return any(" ".join(argv[1 : 1 + words]) in COMMANDS for words in (1, 2))


def refuse_held(paths: Iterable[Path], remedy: str) -> None:
    """Raises UserError if another process is writing a run at or below one of the paths."""
    with ExitStack() as held:
        _hold(paths, held, remedy)


def delete(paths: Sequence[Path], remedy: str) -> None:
    """Deletes files and directories, all or none: the runs among them are locked first. For a link, only the link is deleted.
    Raises UserError, with the remedy, for a run that another process is writing, and StorageError."""
    with ExitStack() as held:
        _hold(paths, held, remedy)
        for path in paths:
            print(f"replacing {path}")
            with storage_errors(path):
                if path.is_symlink() or not path.is_dir():
                    path.unlink(missing_ok=True)
                else:
                    # Hidden first: a deletion that is killed leaves no part of a run under its name.
                    hidden = path.with_name(f".{path.name}.removed")
                    shutil.rmtree(hidden, ignore_errors=True)
                    shutil.rmtree(path.rename(hidden))


def agree_to_delete(paths: Sequence[Path], why: str, flag: str, given: bool) -> None:
    """Returns if the user agrees to delete the paths: by the `flag`, if it is `given`, or by an answer in a terminal. Otherwise
    raises UserError. Deletes nothing."""
    if not paths or given:
        return
    named = "\n".join(f"  {path}" for path in paths)
    if sys.stdin.isatty() and sys.stdout.isatty():
        print(f"{why}\n{named}")
        try:
            answer = input("Delete them? [y/N] ")
        except EOFError:  # Ctrl-D
            print()
            answer = ""
        if answer.strip().lower() in ("y", "yes"):
            return
        raise UserError("nothing was deleted")
    raise UserError(f"{why}\n{named}\nMove them, name another directory with --out, or pass {flag} to delete them")


def _hold(paths: Iterable[Path], held: ExitStack, remedy: str) -> None:
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            continue
        for lock in sorted(path.rglob(LOCK)):
            held.callback(RunLock(lock, remedy).release)
