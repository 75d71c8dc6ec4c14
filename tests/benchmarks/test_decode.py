"""The decode benchmark's own parts: what it refuses before it installs anything, and the processes its sides live in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def arguments(*given: str) -> subprocess.CompletedProcess[str]:
    """Without site-packages: the check runs before any environment exists."""
    command = [sys.executable, "-S", str(BENCHMARKS / "decode_workload.py"), *given]
    return subprocess.run(command, capture_output=True, text=True)


def test_chosen_sides_are_printed_in_the_order_they_are_known_in() -> None:
    assert arguments("--sides", "bare,nmoe").stdout.split() == ["nmoe", "bare"]
    assert arguments().stdout.split() == ["nmoe", "generate", "vllm", "bare"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--sides", "nmoe,trl"], "argument --sides: 'trl' is none of nmoe, generate, vllm, bare"),
        (["--models", ""], "argument --models: '' is none of qwen3_5m, qwen3_moe_14m, qwen3_0p1b, smollm2_135m"),
        (["--sequences", "65"], "argument --sequences: '65' is none of 1, 16, 64, 256"),
        (["--rounds", "1"], "--rounds 1: at least 2, quartiles need two values"),
        (["--sides", "vllm", "--dtypes", "fp32"], "nothing to time: vllm is measured in bf16 alone"),
    ],
)
def test_bad_arguments_end_with_one_message(given: list[str], message: str) -> None:
    done = arguments(*given)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == f"benchmarks/decode.sh: error: {message}"


def in_benchmarks(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60)


def test_a_side_answers_from_another_process_with_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "echo_side.py").write_text(
        "import os\n"
        "from side import answer\n"
        "def serve(connection, greeting):\n"
        "    print('not among the measurements')\n"
        "    answer(connection, lambda name: (greeting + name, os.environ['COLOUR'], os.getpid()))\n"
    )
    done = in_benchmarks(
        f"import os, sys; sys.path.insert(0, {str(tmp_path)!r}); import echo_side; from side import Side\n"
        f"with Side(echo_side.serve, 'hello ', environment={{'COLOUR': 'red', 'PYTHONPATH': {str(tmp_path)!r}}}) as side:\n"
        "    text, colour, pid = side.ask('you')\n"
        "    print(text, colour, pid != os.getpid(), pid == side.process.pid)\n"
        "print(side.process.returncode)\n"
    )
    assert done.stdout.splitlines() == ["hello you red True True", "0"]
    assert "not among the measurements" in done.stderr


def test_a_side_that_dies_is_heard_of(tmp_path: Path) -> None:
    (tmp_path / "dying_side.py").write_text("def serve(connection):\n    raise RuntimeError('out of luck')\n")
    done = in_benchmarks(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dying_side; from side import Side\n"
        f"with Side(dying_side.serve, environment={{'PYTHONPATH': {str(tmp_path)!r}}}) as side:\n"
        "    side.ask('anything')\n"
    )
    assert done.returncode == 1
    assert "out of luck" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(("EOFError", "BrokenPipeError", "ConnectionResetError"))
