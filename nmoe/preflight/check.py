"""What one check of a configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_NAME_WIDTH = 20


@dataclass(frozen=True)
class Check:
    """One line of `nmoe preflight`: `Check("learning rate", "ok", "100% of its peak 0.0005 by step 20")`.

    `status`: "fail" (the run would be wrong or end early), "warn" (worth a look), or "ok". `text` has the value and, unless all is
    well, the remedy, in one line.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str

    def __str__(self) -> str:
        return f"{self.status:<5} {self.name:<{_NAME_WIDTH}} {self.text}"
