"""Reads the fields of a request's body: each is checked where it is taken, and what nothing takes is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

from nmoe.errors import shown
from nmoe.web.openai.errors import ApiError

T = TypeVar("T")

INERT = (
    "store",
    "metadata",
    "user",
    "service_tier",
    "prediction",
    "web_search_options",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "verbosity",
    "parallel_tool_calls",
    "modalities",
    "audio",
    "moderation",
    "suffix",
)
"""Fields of OpenAI's API that change nothing here: accepted, and named in the header of the reply, or refused if the server is
strict."""

IGNORED = "x-nmoe-ignored"
"""The header with the fields of a request that changed nothing."""


class Fields:
    """The fields of a JSON object. A field that is null counts as missing, as in OpenAI's API. Every method that returns a value
    raises ApiError for one of another form, with the field's name; `where` is the path of the object in the body."""

    def __init__(self, table: dict[str, Any], strict: bool = False, where: str = "") -> None:
        self._left = {name: value for name, value in table.items() if value is not None}
        self.strict, self._where = strict, where
        self.ignored: list[str] = []

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def has(self, name: str) -> bool:
        return name in self._left

    def any(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def take(self, name: str, kind: type[T], default: Any = None) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.refuse(name, value, f"must be {_NAMES[kind]}")
        return value

    def text(self, name: str, default: str | None = None) -> Any:
        return self.take(name, str, default)

    def boolean(self, name: str, default: bool = False) -> bool:
        return bool(self.take(name, bool, default))

    def integer(self, name: str, default: Any, low: float = -math.inf, high: float = math.inf) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, value, f"must be a whole number{_between(low, high)}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, value, f"must be a number{_between(low, high)}")
        return float(value)

    def choice(self, name: str, values: Iterable[str], default: Any = None) -> Any:
        value = self.text(name)
        if value is not None and value not in values:
            self.refuse(name, value, f"must be {' or '.join(values)}")
        return default if value is None else value

    def ids(self, name: str) -> list[int] | None:
        value = self.take(name, list)
        if value is not None and not all(type(one) is int and 0 <= one < 2**31 for one in value):
            self.refuse(name, value, "must be a list of token ids")
        return value

    def table(self, name: str) -> Fields | None:
        value = self.take(name, dict)
        return None if value is None else Fields(value, self.strict, self.path(name))

    def zero_is_unset(self, name: str) -> None:
        """Lets a 0 count as missing, and names the field as ignored, unless the server is strict."""
        if not self.strict and self._left.get(name) == 0 and self._left[name] is not False:
            del self._left[name]
            self.ignored.append(self.path(name))

    def ignore(self, name: str) -> None:
        """Takes a field that changes nothing, if it is there."""
        if self._left.pop(name, None) is None:
            return
        if self.strict:
            raise ApiError(f"{self.path(name)}: changes nothing here, which --strict refuses", self.path(name))
        self.ignored.append(self.path(name))

    def finish(self) -> None:
        """Refuses fields that nothing has taken."""
        for name in INERT if not self._where else ():
            self.ignore(name)
        if self._left:
            name = min(self._left)
            raise ApiError(
                f"{self.path(name)}: unknown, or nothing that this server does; leave it out",
                self.path(name),
                "unknown_parameter",
            )

    def refuse(self, name: str, value: object, reason: str) -> None:
        raise ApiError(f"{self.path(name)} = {shown(value)}: {reason}", self.path(name), "invalid_value")


_NAMES: dict[Any, str] = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


def _between(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return ""
    return f", at least {low:g}" if math.isinf(high) else f" from {low:g} to {high:g}"
