"""Text that arrives in parts, and the JSON values and tagged pairs in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r"[^ \t\r\n:,0-9A-Za-z+.\-]")
_KEY = re.compile(r"\s*<arg_key>")
_BETWEEN = re.compile(r"</arg_key>\s*<arg_value>")
_SCALAR = re.compile(r"[0-9A-Za-z+.\-]*")


class Source:
    """The part of a turn's text that has arrived and is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.taken = 0  # characters before `text`

    def add(self, text: str) -> None:
        self.text += text

    def take(self, count: int) -> str:
        """Removes the first characters, and returns them."""
        taken, self.text = self.text[:count], self.text[count:]
        self.taken += len(taken)
        return taken

    def first(self, tags: Sequence[str]) -> tuple[int, str] | None:
        """Returns the position of the first tag, and the tag."""
        found = [(at, tag) for tag in tags if (at := self.text.find(tag)) >= 0]
        return min(found, default=None)

    def certain(self, tags: Sequence[str]) -> int:
        """Returns the number of characters before the end that cannot be the beginning of a tag."""
        return len(self.text) if self.ended else certain(self.text, tags)


def certain(text: str, tags: Sequence[str]) -> int:
    """Returns the length of the text without an end that could be the beginning of a tag."""
    longest = max((len(tag) for tag in tags), default=1)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[start:]) for tag in tags):
            return start
    return len(text)


class JsonExtent:
    """Finds the end of a JSON value in a text that arrives in parts. `end` is the position after the value, None while it is not
    known; `broken` says that there is no valid value."""

    def __init__(self, start: int = 0) -> None:
        self.end: int | None = None
        self.broken = False
        self._start: int | None = None
        self._at = start
        self._depth = 0
        self._in_string = False

    @property
    def known(self) -> bool:
        """Whether end or fault is known."""
        return self.broken or self.end is not None

    def look(self, text: str, ended: bool) -> None:
        """Looks at a longer text, which begins with the text before."""
        while not self.known:
            if not self._step(text, ended):
                break
        if ended and not self.known:
            self.broken = True

    def _step(self, text: str, ended: bool) -> bool:
        """Reads up to the next character that matters; returns False where more text is needed."""
        if self._start is None:
            space = _SPACE.match(text, self._at)
            self._at = space.end() if space else self._at
            if self._at == len(text):
                return False
            self._start = self._at
            if text[self._at] not in '{["':
                return self._scalar(text, ended)
        elif self._depth == 0 and not self._in_string:
            return self._scalar(text, ended)
        found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, self._at)
        if found is None:
            self._at = len(text)
            return False
        one = found[0]
        if one == "\\":
            if found.end() == len(text):
                self._at = found.start()
                return False
            self._at = found.end() + 1
            return True
        self._at = found.end()
        if self._in_string and one != '"':
            self.broken = True
        elif one == '"':
            self._in_string = not self._in_string
        elif one in "{[":
            self._depth += 1
        elif one in "}]":
            self._depth -= 1
        else:
            self.broken = True
        if not self.broken and self._depth <= 0 and not self._in_string:
            self._close(text)
        return True

    def _scalar(self, text: str, ended: bool) -> bool:
        found = _SCALAR.match(text, self._at)
        self._at = found.end() if found else self._at
        if self._at == len(text) and not ended:
            return False
        self._close(text)
        return True

    def _close(self, text: str) -> None:
        assert self._start is not None, "a value that ends has begun"
        try:
            self.end = _DECODER.raw_decode(text, self._start)[1]
        except (ValueError, RecursionError):
            self.broken = True


class TaggedPairs:
    """Reads the pairs <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> from `position` on, in a text that grows. No text is
    searched twice, because a long value arrives in many parts, and a call may have thousands of tags."""

    def __init__(self, position: int) -> None:
        self.position = position
        self._searched = position
        self._between: re.Match[str] | None = None

    def next(self, text: str) -> tuple[str, str] | None:
        """Returns key and value of the next pair; None while the text does not have all of it."""
        opening = _KEY.match(text, self.position)
        if opening is None:
            return None
        if self._between is None:
            start = max(self._searched, opening.end())
            self._between = _BETWEEN.search(text, start)
            if self._between is None:
                # The last closing tag counts as searched once something else than a value's tag follows it.
                last = text.rfind("</arg_key>", start)
                waits = last >= 0 and "<arg_value>".startswith(text[last + len("</arg_key>") :].lstrip())
                self._searched = last if waits else max(start, len(text) - len("</arg_key>") + 1)
                return None
            self._searched = self._between.end()
        closing = text.find("</arg_value>", self._searched)
        if closing < 0:
            self._searched = max(self._searched, len(text) - len("</arg_value>") + 1)
            return None
        pair = text[opening.end() : self._between.start()], text[self._between.end() : closing]
        self.position = self._searched = closing + len("</arg_value>")
        self._between = None
        return pair
