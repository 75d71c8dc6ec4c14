"""How these tests call the `nmoe` command, and what they get back."""

from __future__ import annotations

import sys
from dataclasses import dataclass

# What the script `nmoe` does, for a package that is not installed too.
NMOE = [sys.executable, "-c", "from nmoe.cli import main; main()"]


@dataclass(frozen=True)
class Result:
    """How a command ended and what it said."""

    code: int | str | None
    out: str
    err: str
