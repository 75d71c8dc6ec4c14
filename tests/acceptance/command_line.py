"""How these tests call the `nmoe` command where a process has to be its own from the start."""

from __future__ import annotations

import sys

# What the script `nmoe` does, for a package that is not installed too.
NMOE = [sys.executable, "-c", "from nmoe.cli import main; main()"]
