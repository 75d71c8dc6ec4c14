"""The result of one check of a configuration: ok, warn or fail, with a line of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from nmoe.errors import UserError

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


def checked(name: str, check: Callable[[], Check]) -> Iterator[Check]:
    """The result of a check; bad input that it meets is a failure of it."""
    try:
        yield check()
    except UserError as error:
        yield failure(name, error)


def failure(name: str, error: Exception) -> Check:
    """A failed check with the error's message in one line."""
    return Check(name, "fail", " ".join(str(error).split()))
