"""Directories of weights in memory, which the next run removes where their process is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe.engine.remote import shared_memory

MAKES = """
import sys, time
from pathlib import Path
from nmoe.engine.remote.shared_memory import new_directory
made = new_directory(1, Path(sys.argv[1]))
(made / "weights").write_text("all of them")
print(made.name, flush=True)
time.sleep(60)
"""


def test_weights_of_dead_processes_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", tmp_path)
    killed = subprocess.Popen([sys.executable, "-c", MAKES, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    left, mine = killed.stdout.readline().strip(), shared_memory.new_directory(1, None).name
    number, began, namespace = mine.split("_")[2:5]
    assert number == str(os.getpid())
    of_others = f"nmoe_weights_{number}_{began}1_{int(namespace) + 1}_container"
    before = f"nmoe_weights_{number}_{int(began) - 1}_{namespace}_number_taken_again"
    for name in (of_others, before, "nmoe_weights_12_older", "something_else"):
        (tmp_path / name).mkdir()
    kept = {mine, of_others, "nmoe_weights_12_older", "something_else"}
    shared_memory.remove_left()
    assert {one.name for one in tmp_path.iterdir()} == kept | {left}, "its process runs"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    shared_memory.remove_left()
    assert {one.name for one in tmp_path.iterdir()} == kept


def test_weights_of_another_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", tmp_path)
    mine = shared_memory.new_directory(1, None)
    dead = mine.rename(tmp_path / mine.name.replace(f"_{os.getpid()}_", "_4194305_"))  # above the kernel's largest
    monkeypatch.setattr(os, "getuid", lambda: dead.stat().st_uid + 1)
    shared_memory.remove_left()
    assert dead.exists()
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", tmp_path)
    shared_memory.remove_left()
    assert not dead.exists()
