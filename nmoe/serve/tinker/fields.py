"""Fields of a JSON body of Tinker's protocol, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nmoe.errors import shown
from nmoe.parsing import json_of
from nmoe.serve.tinker.errors import TinkerError

_MOST = 2**63 - 1
MOST_BYTES = 16 * 2**20
"""Of a JSON body."""


class Fields:
    """The fields of an object. Each method returns one, or its default where it is absent or null; without a default it has to be
    there. Raises TinkerError for a value of another type."""

    def __init__(self, body: Mapping[str, Any], where: str = "") -> None:
        self._body, self._where = body, where

    def _take(self, name: str, kinds: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self._body.get(name)
        if value is None:
            if default is ...:
                raise TinkerError(f"{self._where}{name}: is missing")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise TinkerError(f"{self._where}{name} = {shown(value)}: must be {what}")
        return value

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def text(self, name: str, default: Any = ...) -> Any:
        return self._take(name, str, "a text", default)

    def flag(self, name: str, default: bool = False) -> bool:
        taken: bool = self._take(name, bool, "true or false", default)
        return taken

    def whole(self, name: str, default: Any = ..., least: int = 0, most: int = _MOST) -> Any:
        value = self._take(name, int, "a whole number", default)
        if value is not None and not least <= value <= most:
            raise TinkerError(f"{self._where}{name} = {shown(value)}: must be {least} to {most}")
        return value

    def number(self, name: str, default: Any = ..., least: float = 0.0, below: float = math.inf) -> float:
        value = self._take(name, (int, float), "a number", default)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not least <= number < below:
            raise TinkerError(f"{self._where}{name} = {shown(value)}: must be {least:g} or more, and below {below:g}")
        return number

    def table(self, name: str, default: Any = ...) -> Fields:
        value = self._take(name, dict, "an object", {} if default is None else default)
        return Fields(value, f"{self._where}{name}.")

    def items(self, name: str, default: Any = ...) -> list[Any]:
        value: list[Any] = self._take(name, list, "a list", default)
        return value

    def raw(self, name: str) -> Any:
        return self._body.get(name)


def fields_of(body: bytes) -> Fields:
    """Returns the fields of a body. Raises TinkerError if it is no JSON object."""
    try:
        parsed = json_of(body)
    except ValueError as error:
        raise TinkerError(f"the body is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise TinkerError("the body is not a JSON object")
    return Fields(parsed)
