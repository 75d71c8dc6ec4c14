"""The checks of `benchmarks/found_faults.py`, by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

Result = tuple[str, bool]
"""What a check saw, in one line, and whether that is as wanted."""


@dataclass(frozen=True)
class Check:
    """One fault: its number in the list of found faults, what is checked, what is wanted, and the function that looks.

    Example: `Check(7, "an unevaluated expression as the answer of GSM8K", "0 of 5 accepted", run)`, where `run()` gives
    `("0 of 5 accepted", True)`.
    """

    item: int
    what: str
    wanted: str
    run: Callable[[], Result]


CHECKS: dict[str, Check] = {}


def check(item: int, what: str, wanted: str) -> Callable[[Callable[[], Result]], Callable[[], Result]]:
    """Names a function as a check. It runs in a process of its own, in an empty folder, with one thread."""

    def add(run: Callable[[], Result]) -> Callable[[], Result]:
        name = run.__name__
        assert name not in CHECKS, f"two checks are called {name}"
        CHECKS[name] = Check(item, what, wanted, run)
        return run

    return add


def load() -> None:
    """Imports every file of checks beside this one."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
