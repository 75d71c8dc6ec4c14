"""Whether a run goes on: asked of the list of locks, and without taking one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from nmoe.runs import running
from nmoe.runs.running import is_running


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[IO[str]]:
    """The lock file of a run of this process, not yet locked."""
    with (tmp_path / ".lock").open("w") as file:
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file


def test_a_run_goes_on_while_its_process_holds_the_lock(tmp_path: Path, lock: IO[str]) -> None:
    assert not is_running(tmp_path), "the number is another process's by now"
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert is_running(tmp_path)
    fcntl.flock(lock, fcntl.LOCK_UN)
    assert not is_running(tmp_path)
    (tmp_path / ".lock").write_text("4194305\n")  # above the highest number of a process
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert not is_running(tmp_path)
    assert not is_running(tmp_path / "none")


def test_the_question_takes_no_lock(tmp_path: Path, lock: IO[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the kernel's own list: where temporary files lie in a layered file system, it numbers them otherwise.
    held = f"1: FLOCK  ADVISORY  WRITE {os.getpid()} fe:00:{os.fstat(lock.fileno()).st_ino} 0 EOF\n"
    listed = tmp_path / "locks"
    listed.write_text(held.replace("WRITE", "READ"))
    monkeypatch.setattr(running, "_LOCKS", listed)
    taken: list[Any] = []
    monkeypatch.setattr(running.fcntl, "flock", lambda *arguments: taken.append(arguments))
    assert not is_running(tmp_path), "another reader holds it"
    listed.write_text(held)
    assert is_running(tmp_path)
    assert taken == []


@pytest.mark.parametrize("listed", [None, "1: FLOCK  ADVISORY  WRITE {pid} 00:2a:17 0 EOF\n"])
def test_without_a_list_that_has_the_file_the_lock_is_tried(
    tmp_path: Path, lock: IO[str], monkeypatch: pytest.MonkeyPatch, listed: str | None
) -> None:
    locks = tmp_path / "locks"
    if listed is not None:
        locks.write_text(listed.format(pid=os.getpid()))
    monkeypatch.setattr(running, "_LOCKS", locks)
    assert not is_running(tmp_path)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert is_running(tmp_path)
