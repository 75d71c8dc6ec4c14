"""What `scripts/environment.sh` installs, and what it says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/environment.sh"

# Stands in for the environment's interpreter: it has a torch of version $THERE, and notes what pip is asked.
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo "$THERE"; else echo "$PIP_ROOT_USER_ACTION $*" >>"$(dirname "$0")/asked"; fi
"""


@pytest.mark.parametrize(("there", "installed"), [("2.13.0", False), ("2.12.0", True)])
def test_torch_is_installed_only_where_it_is_not_there(there: str, installed: bool, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\n")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    said = subprocess.run(
        ["bash", "-euc", f'. "{SCRIPT}"; prepare_environment "{tmp_path}" report'],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "THERE": there},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    asked = (python.parent / "asked").read_text().splitlines()
    assert ("installing torch" in said) == installed
    assert any(line.endswith(" torch==2.13.0") for line in asked) == installed
    assert asked[-1].endswith(f"-e {tmp_path}[report]")
    assert all(line.startswith("ignore -m pip install") for line in asked), "pip's advice to root is silenced"
