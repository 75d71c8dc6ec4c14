"""The parts of which the readers of calls are made: a turn while it is read, and arguments and JSON objects while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nmoe.parsing import json_of
from nmoe.text.calls.pieces import PieceWriter, plain
from nmoe.text.calls.scan import JsonExtent, Source
from nmoe.text.conversation import ToolDefinition

FamilyName = Literal["hermes", "llama3", "deepseek", "mistral", "glm"]

Steps = Generator[None, None, None]

BLANK = " \t\r\n"


@dataclass
class Turn:
    """A turn while it is read. `mark` gives for a tag's name the text that stands for it in the source. `bodies` collects the text
    of each call, and `outside` the text outside calls, with positions."""

    tools: Mapping[str, ToolDefinition]
    marks: Mapping[str, str] = field(default_factory=dict)
    source: Source = field(default_factory=Source)
    out: PieceWriter = field(default_factory=PieceWriter)
    bodies: list[str] = field(default_factory=list)
    outside: list[tuple[int, str]] = field(default_factory=list)

    def mark(self, tag: str) -> str:
        return self.marks.get(tag, tag)

    def say(self, count: int) -> None:
        """Takes text of the answer."""
        self.outside.append((self.source.taken, self.source.text[:count]))
        self.out.say("content", self.source.take(count))

    def fail(self, count: int) -> None:
        """Takes a call that turned out to be none: it is shown as text of the answer."""
        self.out.say("content", self.source.take(count))


@dataclass(frozen=True)
class Call:
    """A call as its text says it; `fault` says why it says none."""

    name: str
    arguments: Any = None
    fault: str = ""

    @property
    def text(self) -> str:
        """The arguments as JSON text."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


class Family(Protocol):
    """The form of the calls of one family. `tags` are the names of its control tokens. `read` reads a call, with the tag that
    opens it, at the beginning of the source; `begin` reads calls that may open a turn without a tag."""

    name: FamilyName
    tags: tuple[str, ...]
    openers: tuple[str, ...]

    def begin(self, turn: Turn) -> Steps: ...

    def read(self, turn: Turn) -> Steps: ...

    def call(self, body: str, turn: Turn) -> Call:
        """Reads the whole text of a call, which `read` collected."""


class TaggedFamily:
    """A family whose calls all begin with a tag."""

    def begin(self, turn: Turn) -> Steps:
        yield from ()


class ArgumentsReader:
    """Gives the arguments of the call opened last while they arrive: one JSON value from `start` on, or text that is none."""

    def __init__(self, out: PieceWriter, start: int, closing: str = BLANK) -> None:
        self._out, self._start, self._given, self._closing = out, start, start, closing
        self._extent = JsonExtent(start)

    def look(self, text: str, until: int) -> None:
        """Gives the certain part of the text up to `until`."""
        self._extent.look(text[:until], False)
        if self._extent.end is not None:
            self._close(text, self._extent.end)
        elif not self._extent.broken and text[self._start : self._start + 1] in ("{", "["):
            self._give(text, len(text[:until].rstrip(BLANK)))

    def finish(self, text: str, until: int) -> int:
        """Gives the rest up to `until`, where the call ends; returns the position after the arguments."""
        self._extent.look(text[:until], True)
        if self._extent.end is not None:
            self._close(text, self._extent.end)
            return self._extent.end
        self._give(text, len(text[:until].rstrip(self._closing)))
        return until

    def _close(self, text: str, end: int) -> None:
        value = text[self._start : end]
        if self._given == self._start and value.startswith('"'):
            said = json.loads(value)
            self._out.arguments(said if is_text(said) else value)
            self._given = end
        self._give(text, end)

    def _give(self, text: str, end: int) -> None:
        if end > self._given:
            self._out.arguments(text[self._given : end])
            self._given = end


def is_text(text: str) -> bool:
    """Returns whether the text has no lone surrogate, which JSON can escape and no encoding can write."""
    return plain(text) == text


def object_call(body: str, key: str) -> Call:
    """Reads a call that is one JSON object. Without `arguments` it has none; without Llama's `parameters` it is an answer."""
    try:
        call = json_of(body)
    except ValueError as error:
        return Call("", fault=str(error))
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not is_text(name):
        return Call("", fault=f'a call is a JSON object with a "name" and "{key}"')
    if key not in call and key == "parameters":
        return Call("", fault='a call is a JSON object with a "name" and "parameters"')
    return Call(name, call.get(key, {}))


class ObjectReader:
    """Reads a call that is a JSON object at `start`: gives its arguments while they arrive where the name stands first, which is
    usual, else all at once."""

    def __init__(self, turn: Turn, start: int, key: str) -> None:
        self.extent = JsonExtent(start)
        self.opened: ArgumentsReader | None = None
        self._turn, self._start, self._key = turn, start, key
        self._head = re.compile(rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)+")\s*,\s*"{key}"\s*:\s*(?=\S)')

    def look(self, text: str, until: int) -> None:
        """Gives the certain part of the text up to `until`."""
        self.extent.look(text, self._turn.source.ended)
        if self.opened is None and (head := self._head.match(text, self._start, until)) is not None:
            try:
                name = json.loads(head[1])
            except ValueError:
                return
            if is_text(name):
                self._turn.out.tag()
                self._turn.out.call(name)
                self.opened = ArgumentsReader(self._turn.out, head.end())
        if self.opened is not None:
            self.opened.look(text, until)

    def whole(self) -> Generator[None, None, tuple[str, int]]:
        """Looks until the object ends, or cannot be one; returns the text, and where the object ends in it."""
        source = self._turn.source
        while True:
            text = source.text
            self.look(text, len(text))
            if self.extent.broken and self.opened is None:
                return text, self._start + 1  # how much more there is depends on how the text arrived
            if self.extent.end is not None:
                return text, self.extent.end
            if source.ended:
                return text, len(text)
            yield

    def finish(self, text: str, until: int) -> bool:
        """Ends the call at `until`; returns whether it is one. What follows the object is text of the answer."""
        self.look(text, until)
        after = until
        if self.opened is not None:
            after = self.opened.finish(text, until)
        else:
            call = object_call(text[self._start : until], self._key)
            if call.fault or not call.name:
                return False
            self._turn.out.tag()
            self._turn.out.call(call.name)
            self._turn.out.arguments(call.text)
        if self.extent.end is not None and self.extent.end <= until:
            after = self.extent.end
        if rest := text[after:until].strip(BLANK + "}"):
            self._turn.out.say("content", rest)
        return True
