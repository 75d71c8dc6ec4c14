"""Processes that tests fork begin and end as programs do."""

from __future__ import annotations

from pathlib import Path

from forked import Forked, ended_cpu_s

SCRIPT = """
import atexit, os, sys, threading, time
import numpy as np

def last():
    time.sleep(0.05)
    print("thread")

print(np.random.random())
atexit.register(print, "exit")
threading.Thread(target=last).start()
print(os.getpid())
sys.exit(3)
"""


def test_a_forked_process_begins_and_ends_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    begun = [Forked(tmp_path, tmp_path / "script.py", main="forked:script") for _ in range(2)]
    two = [one.ended() for one in begun]
    (drawn, *said), (other, *_) = (one.out.splitlines() for one in two)
    assert drawn != other
    assert said == [str(begun[0].pid), "thread", "exit"]
    assert [(one.code, one.err) for one in two] == [(3, "")] * 2


def test_the_cpu_seconds_of_processes_that_have_ended_are_counted(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nwhile time.process_time() < 0.4: pass\n")
    Forked(tmp_path, tmp_path / "script.py", main="forked:script").ended()
    before = ended_cpu_s()
    Forked(tmp_path, tmp_path / "script.py", main="forked:script").ended()
    assert 0.3 <= ended_cpu_s() - before < 2
