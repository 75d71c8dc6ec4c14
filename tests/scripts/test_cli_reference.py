"""The page on the command line is what the commands say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


# documented: python scripts/cli_reference.py
def test_the_page_is_what_the_commands_say() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts/cli_reference.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs/reference/cli.md").read_text()
    assert page == printed, "run: python scripts/cli_reference.py > docs/reference/cli.md"
    assert "## `nmoe env check`" in page, "commands of groups"
    assert "| `--samples` | `8` |" in page, "options with their defaults"
    assert "| `--format auto\\|harmony\\|chat\\|text` |" in page, "choices"
