"""How long the `nmoe` command takes before it does anything."""

import resource
import subprocess
import sys

HELP = [sys.executable, "-m", "nmoe", "--help"]


def test_help_takes_under_half_a_second_of_cpu() -> None:
    """The quickest of three: the first may have to compile and to read from disk."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run(HELP, capture_output=True, text=True, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "speedrun" in shown
    assert 0 < min(seconds) < 0.5
