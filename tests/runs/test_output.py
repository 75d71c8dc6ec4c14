"""What a run prints: its lines, its errors and its progress."""

import io
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from nmoe.errors import UserError
from nmoe.runs.output import logged, of_a_command
from nmoe.runs.progress import Progress, counting


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


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_steps(log: Path, console: Console, seconds_per_step: float, total: int = 30, done: int = 0) -> None:
    clock = Clock()
    with Progress(total, log, "grpo", done, console, clock) as progress:
        for step in range(done + 1, total + 1):
            clock.now += seconds_per_step
            progress.step(step, {"reward": step / 100})
            if step == 3:
                progress.note("saved [3] " + "x" * 200)


def test_plain_lines_are_first_last_and_every_ten_seconds(tmp_path: Path) -> None:
    out = io.StringIO()
    run_steps(tmp_path / "log.txt", Console(file=out, width=80), seconds_per_step=1.0)
    lines = out.getvalue().splitlines()
    assert lines == [
        "grpo 1/30  reward 0.010  left 0:00:29",
        "saved [3] " + "x" * 200,
        "grpo 11/30  reward 0.110  left 0:00:19",
        "grpo 21/30  reward 0.210  left 0:00:09",
        "grpo 30/30  reward 0.300  left 0:00:00",
    ]
    assert (tmp_path / "log.txt").read_text() == out.getvalue()


def test_what_comes_before_the_first_step_is_not_its_pace(tmp_path: Path) -> None:
    clock = Clock()
    with Progress(30, tmp_path / "log.txt", "grpo", 0, Console(file=io.StringIO()), clock) as progress:
        clock.now += 100.0  # kernels are compiled, the baseline is evaluated
        progress.begin(0)
        clock.now += 1.0
        progress.step(1, {})
    assert (tmp_path / "log.txt").read_text() == "grpo 1/30    left 0:00:29\n"


def test_numbers_have_the_format_of_their_name(tmp_path: Path) -> None:
    numbers = {"correctness": 0.125, "format": 1.0, "length": 61.6, "tokens/s": 5200.4, "mismatch": 3.2e-8, "loss": 2.0}
    with Progress(10, tmp_path / "log.txt", "sft", console=Console(file=io.StringIO())) as progress:
        progress.step(10, numbers)
    shown = "correctness 12.5%  format 100.0%  length 62  tokens/s 5,200  mismatch 3.2e-08  loss 2"
    assert (tmp_path / "log.txt").read_text() == f"sft 10/10  {shown}  left 0:00:00\n"


@pytest.mark.parametrize(
    ("done", "seconds_per_step", "left"), [(0, 60.0, "1:39:00"), (60, 3.0, "0:01:57"), (0, 7200.0, "198:00:00")]
)
def test_time_left_follows_the_pace_of_this_process(
    tmp_path: Path, done: int, seconds_per_step: float, left: str
) -> None:
    run_steps(tmp_path / "log.txt", Console(file=io.StringIO()), seconds_per_step, total=100, done=done)
    assert (tmp_path / "log.txt").read_text().splitlines()[0].endswith(f"left {left}")


def test_time_left_follows_a_pace_that_changes(tmp_path: Path) -> None:
    clock = Clock()
    with Progress(100, tmp_path / "log.txt", "grpo", 0, Console(file=io.StringIO()), clock) as progress:
        for step in range(1, 51):
            clock.now += 1.0 if step <= 25 else 20.0
            progress.step(step, {})
    assert (tmp_path / "log.txt").read_text().splitlines()[-1] == "grpo 50/100    left 0:16:40"  # 50 steps of 20 s


def test_a_terminal_shows_one_live_line_and_the_log_plain_ones(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    run_steps(tmp_path / "log.txt", console, seconds_per_step=1.0)
    last = [line for line in out.getvalue().splitlines() if "grpo" in line][-1]
    assert "30/30" in last
    assert "left 0:00:00 reward 0.300" in last
    assert "grpo 11/30" not in out.getvalue()
    assert (tmp_path / "log.txt").read_text().splitlines()[2] == "grpo 11/30  reward 0.110  left 0:00:19"
    assert "\x1b" not in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, "grpo  3/80 left 0:01:17 reward 0.500  c…"),
        (60, "grpo  3/80 left 0:01:17 reward 0.500  correctness 12.5%  fo…"),
    ],
)
def test_a_narrow_terminal_keeps_the_step_and_the_time_left(tmp_path: Path, width: int, shown: str) -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    with Progress(80, tmp_path / "log.txt", "grpo", 0, console, clock) as progress:
        for step in range(1, 4):
            clock.now += 1.0
            progress.step(step, {"reward": 0.5, "correctness": 0.125, "format": 0.9, "tokens/s": 5200.0, "loss": 2.0})
    lines = [line for line in out.getvalue().replace("\r", "\n").splitlines() if "3/80" in line]
    assert lines[-1].removeprefix("\x1b[2K").rstrip() == shown


def test_the_log_of_an_earlier_start_is_kept(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("earlier\n")
    with Progress(1, tmp_path / "log.txt", "grpo", console=Console(file=io.StringIO())) as progress:
        progress.note("again \ud800")
    assert (tmp_path / "log.txt").read_text() == "earlier\nagain \\ud800\n"


def test_a_count_says_its_pace_and_the_time_left_every_half_minute() -> None:
    out, clock = io.StringIO(), Clock()
    # 40 problems were done before an interruption: they are no part of the pace.
    with counting("problems", 240, Console(file=out, width=80), clock) as count:
        for done in range(41, 141):
            clock.now += 0.5
            count(done)
    assert out.getvalue() == "problems 100/240  2 a second  left 0:01:10\n"
