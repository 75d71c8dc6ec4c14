"""Processes that tests fork begin and end as programs do."""

from __future__ import annotations

from pathlib import Path

from forked import Forked

SCRIPT = """
import atexit, sys, threading, time
import numpy as np

def last():
    time.sleep(0.05)
    print("thread")

print(np.random.random())
atexit.register(print, "exit")
threading.Thread(target=last).start()
sys.exit(3)
"""


def test_a_forked_process_begins_and_ends_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    two = [Forked(tmp_path, tmp_path / "script.py", main="forked:script").ended() for _ in range(2)]
    drawn = [one.out.splitlines()[0] for one in two]
    assert drawn[0] != drawn[1]
    assert [(one.code, one.out.splitlines()[1:], one.err) for one in two] == [(3, ["thread", "exit"], "")] * 2
