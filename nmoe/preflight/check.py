"""The result of one check of a configuration: a status and a line of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from nmoe.errors import UserError

_NAME_WIDTH = 20


@dataclass(frozen=True)
class Check:
    """The result of a check, a line of `nmoe preflight`: `Check("learning rate", "ok", "100% of its peak 0.0005 by step 20")`.

    `status` is "fail" if the run would be wrong or end early, "warn" if something deserves attention, else "ok". `text`
    states in one line the value that was checked, and for "fail" and "warn" the remedy.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str

    def __str__(self) -> str:
        return f"{self.status:<5} {self.name:<{_NAME_WIDTH}} {self.text}"


def checked(name: str, check: Callable[[], Check]) -> Iterator[Check]:
    """Runs a check and yields its result; if the check raises UserError, yields a failed check with the error's message."""
    try:
        yield check()
    except UserError as error:
        yield failure(name, error)


def failure(name: str, error: Exception) -> Check:
    """Returns a failed check with the error's message on one line."""
    return Check(name, "fail", " ".join(str(error).split()))
