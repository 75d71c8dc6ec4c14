"""A real disk that is small enough to fill."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_PRIVATE_MOUNTS = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs Python code in a process that sees an empty disk of 1 MiB at `tmp_path/disk`, the code's first argument.

    Skips the test where a user may not mount one.
    """
    disk, script = tmp_path / "disk", tmp_path / "code.py"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs '{disk}'"
    try:
        subprocess.run([*_PRIVATE_MOUNTS, mount], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("no user may mount a tmpfs here")

    def run(code: str) -> subprocess.CompletedProcess[str]:
        script.write_text(code)
        command = f"{mount} && exec '{sys.executable}' '{script}' '{disk}'"
        return subprocess.run([*_PRIVATE_MOUNTS, command], capture_output=True, text=True, check=False)

    return run
