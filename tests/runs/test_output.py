"""What a command prints while it runs is in log.txt, as it was printed; a notebook's own output is not."""

import io
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from nmoe.errors import UserError
from nmoe.runs.output import logged, of_a_command
from nmoe.runs.progress import Progress


def test_lines_and_the_error_that_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError):
        print_and_fail(log)
    assert (sys.stdout, sys.stderr) == before
    lines = log.read_text().splitlines()
    assert lines[:5] == ["one line", "red", "at 99%", "no end", "Traceback (most recent call last):"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    shown = capsys.readouterr()
    assert shown.out == "one line\n"
    assert shown.err == "\x1b[31mred\x1b[0m\nat 1%\rat 50%\rat 99%\nno end", "the terminal sees what it saw"


def print_and_fail(log: Path) -> None:
    with of_a_command(), logged(log):
        print("one", "line")
        assert log.read_text() == "one line\n", "at once"
        sys.stderr.write("\x1b[31mred\x1b[0m\nat 1%\rat 50%\rat 99%\nno end")
        assert 1 / 0


def test_a_program_prints_for_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    with suppress(UserError), logged(log):
        print("mine")
        raise UserError("no such file")
    assert log.read_text() == "error: no such file\n"
    assert capsys.readouterr().out == "mine\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    log, out = tmp_path / "log.txt", io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console = Console(file=out, force_terminal=True) if terminal else None
    with of_a_command(), Progress(2, log, "grpo", console=console) as progress, logged(log):
        progress.step(1, {"reward": 0.5})
        print("between")
        progress.step(2, {"reward": 0.75})
    assert [line.split("  ")[0] for line in log.read_text().splitlines()] == ["grpo 1/2", "between", "grpo 2/2"]
    assert "between" in out.getvalue()
    assert sys.stdout is out


def test_a_kill_leaves_what_was_printed_and_warned_of(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    code = f"""
import os, pathlib, signal, warnings
from nmoe.runs.output import logged, of_a_command
with of_a_command(), logged(pathlib.Path({str(log)!r})):
    print("before the kill")
    warnings.warn("careful")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert log.read_text().startswith("before the kill\n")
    assert "UserWarning: careful" in log.read_text()
    assert done.stdout == "before the kill\n", "stdout is not held back in a pipe either"
