"""`nmoe doctor` in a process of its own: on this machine as it is, and with everything on it made worse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import Result


# documented: nmoe doctor [--json]
def test_what_is_missing_is_named_with_its_remedy(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = command("doctor", "--json")
    assert (result.code, result.err) == (0, "")
    said = json.loads(result.out)
    assert said["usable"]
    assert list(said["findings"]) == [
        "packages", "extras", "processor", "threads", "compiler", "idle threads", "gpu", "kernels", "sandbox", "caches",
    ]  # fmt: skip
    assert said["findings"]["packages"]["torch"] == torch.__version__
    assert said["findings"]["compiler"] == {"command": "/nonexistent/c++", "path": None, "version": None}
    assert said["findings"]["kernels"]["compiled"] is False
    assert {
        "topic": "kernels",
        "kind": "faster",
        "text": "with the C++ kernels sampling takes a fifth of the time",
        "command": "unset CXX, or name a C++ compiler in it",
    } in said["advice"]
    assert said["findings"]["caches"]["compiled kernels"]["path"] == str(tmp_path / "cache/nmoe/kernels")


def test_lines_and_the_exit_code(nmoe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    from nmoe.preflight import doctor
    from nmoe.preflight.doctor import Advice, Finding

    found = [Finding("threads", "2 cores", {"cores": 2}, (Advice("faster", "stop others", "top"),))]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    lines = "threads  2 cores\n\nfaster:  stop others\n           top\n"
    assert nmoe("doctor") == Result(0, lines, "")
    found.append(Finding("torch", "none", {}, (Advice("needed", "get it", "pip install torch"),)))
    assert nmoe("doctor").code == 1
