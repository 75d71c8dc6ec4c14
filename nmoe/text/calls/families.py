"""The forms in which families of models write tool calls, each read while it arrives.

    hermes    <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>                       Hermes, Qwen3
    llama3    <|python_tag|>{"name": "add", "parameters": {"x": 1}}                               Llama 3.1 to 3.3
    deepseek  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add, then the JSON       DeepSeek-V3, R1
    mistral   [TOOL_CALLS][{"name": "add", "arguments": {"x": 1}}], or [TOOL_CALLS]add[ARGS]{"x": 1}
    glm       <tool_call>add, then <arg_key>x</arg_key><arg_value>1</arg_value></tool_call>         GLM-4.5, 4.6

A family is a generator: it reads from `Turn.source`, writes to `Turn.out`, and yields where it needs more text. Text
that turns out to be no call stays text. A call that was announced stays one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nmoe.parsing import json_of
from nmoe.text.calls.family import (
    BLANK,
    ArgumentsReader,
    Call,
    Family,
    FamilyName,
    ObjectReader,
    Steps,
    TaggedFamily,
    Turn,
    object_call,
)
from nmoe.text.calls.pieces import plain
from nmoe.text.calls.scan import JsonExtent, TaggedPairs, certain
from nmoe.text.conversation import CALL, END_CALL, TAGS

WRITTEN = (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""The tags that count by their text, whether or not they are tokens."""


class Hermes(TaggedFamily):
    """One JSON object between tags; in its strings a tag closes nothing. A call without a closing tag runs to the end."""

    name: FamilyName = "hermes"
    tags: tuple[str, ...] = ()
    openers: tuple[str, ...] = (CALL,)

    def read(self, turn: Turn) -> Steps:
        source, start = turn.source, len(CALL)
        reader = ObjectReader(turn, start, "arguments")
        while True:
            text = source.text
            closing = text.find(END_CALL, start)
            # Whether a tag stands in a string is known only where the object ends.
            reader.look(text, closing if closing >= 0 else certain(text, (END_CALL,)))
            if reader.extent.known:
                closing = text.find(END_CALL, start if reader.extent.end is None else reader.extent.end)
                if closing >= 0 or source.ended:
                    break
            yield
        end = len(text) if closing < 0 else closing
        turn.bodies.append(text[start:end])
        until = end if closing < 0 else end + len(END_CALL)
        if reader.finish(text, end):
            source.take(until)
            turn.out.tag()
        else:
            turn.fail(until)

    def call(self, body: str, turn: Turn) -> Call:
        try:
            json_of(body)
        except ValueError as error:
            return Call("", fault=f"a call is a JSON object between <tool_call> and </tool_call>: {error}")
        return object_call(body, "arguments")


class Llama3:
    """JSON objects after <|python_tag|> or at the beginning of a turn, with semicolons between several. Other text after the tag is
    code for Llama's own interpreter, and text here."""

    name: FamilyName = "llama3"
    tags: tuple[str, ...] = ("<|python_tag|>",)
    openers: tuple[str, ...] = ("<|python_tag|>",)

    def begin(self, turn: Turn) -> Steps:
        source = turn.source
        while _HALF_OBJECT.fullmatch(source.text) and not source.ended:
            yield
        if _OBJECT.match(source.text):
            yield from self._objects(turn, 0, tagged=False)

    def read(self, turn: Turn) -> Steps:
        yield from self._objects(turn, len(turn.mark(self.tags[0])), tagged=True)

    def _objects(self, turn: Turn, start: int, tagged: bool) -> Steps:
        """Reads objects from `start` on, behind a tag; leaves what follows them in the source."""
        source = turn.source
        while True:
            while not source.ended and not source.text[start:].lstrip(BLANK):
                yield
            begins = len(source.text) - len(source.text[start:].lstrip(BLANK))
            if source.text[begins : begins + 1] != "{":
                turn.out.tag()
                source.take(start)
                return
            reader = ObjectReader(turn, begins, "parameters")
            text, end = yield from reader.whole()
            called = reader.finish(text, end)
            if called or tagged:
                turn.bodies.append(text[begins:end])
            if not called:
                (turn.fail if tagged else turn.say)(end)
                return
            source.take(end)
            turn.out.tag()
            start = 0
            while not source.ended and not source.text.lstrip(BLANK + ";"):
                yield
            separated = len(source.text) - len(source.text.lstrip(BLANK + ";"))
            if ";" not in source.text[:separated] or source.text[separated : separated + 1] != "{":
                return
            source.take(separated)

    def call(self, body: str, turn: Turn) -> Call:
        return object_call(body, "parameters")


_OBJECT = re.compile(r'\s*\{\s*"(?:name|type|parameters)"')
_HALF_OBJECT = re.compile(r'\s*(?:\{\s*(?:"[a-z]{0,10})?)?')


class DeepSeek(TaggedFamily):
    """A name and a JSON object between control tokens, as V3 and R1 write it, with a fence around the object, or as V3.1 does."""

    name: FamilyName = "deepseek"
    tags: tuple[str, ...] = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    openers: tuple[str, ...] = tags[:2]

    def read(self, turn: Turn) -> Steps:
        source = turn.source
        outer, opening, _, closing, last = map(turn.mark, self.tags)
        if source.text.startswith(outer):
            source.take(len(outer))
        while True:
            while not source.ended and not source.text.lstrip(BLANK):
                yield
            blank = len(source.text) - len(source.text.lstrip(BLANK))
            while not source.ended and any(
                one.startswith(source.text[blank:]) and len(source.text) - blank < len(one) for one in (opening, last)
            ):
                yield
            if source.text.startswith(last, blank):
                source.take(blank + len(last))
                turn.out.tag()
                return
            if not source.text.startswith(opening, blank):
                return
            source.take(blank)
            yield from self._one(turn, opening, closing, last)

    def _one(self, turn: Turn, opening: str, closing: str, last: str) -> Steps:
        source, start, arguments = turn.source, len(opening), None
        while True:
            text = source.text
            found = min((at for tag in (closing, last, opening) if (at := text.find(tag, start)) >= 0), default=-1)
            ends = found >= 0 or source.ended
            until = found if found >= 0 else source.certain((closing, last, opening))
            if arguments is None and (head := self._head(turn, text[start:until], ends)) is not None:
                turn.out.tag()
                turn.out.call(head[0])
                arguments = ArgumentsReader(turn.out, start + head[1], BLANK + "`")
            if arguments is not None:
                arguments.look(text, until)
            if ends:
                break
            yield
        turn.bodies.append(text[start:until])
        if arguments is None:
            turn.fail(until)
        else:
            after = arguments.finish(text, until)
            source.take(until)
            if rest := text[after:until].strip(BLANK + "`"):
                turn.out.say("content", rest)
        if source.text.startswith(closing):
            source.take(len(closing))
        turn.out.tag()

    def _head(self, turn: Turn, body: str, whole: bool) -> tuple[str, int] | None:
        """Returns the name of a call, and where its arguments begin; None if this is not known yet."""
        kind, separator, rest = body.partition(turn.mark(self.tags[2]))
        if not separator:
            return None
        before = len(kind) + len(separator)
        if kind.strip() != "function":
            name = kind.strip()
        else:
            line = _FENCED.match(rest) or (_BARE.match(rest) if whole or _NOT_FENCED.match(rest) else None)
            if line is None:
                return None
            name, before, rest = line[1].strip(), before + line.end(), rest[line.end() :]
        space = len(rest) - len(rest.lstrip(BLANK))
        return None if not plain(name) or (space == len(rest) and not whole) else (plain(name), before + space)

    def call(self, body: str, turn: Turn) -> Call:
        head = self._head(turn, body, True)
        if head is None:
            return Call("", fault="a call is a name and a JSON object between the tokens for calls")
        text = body[head[1] :]
        extent = JsonExtent()
        extent.look(text, True)
        return Call(head[0], text.strip(BLANK + "`") if extent.end is None else text[: extent.end])


_FENCED = re.compile(r"([^\n]*)\n\s*```(?:json)?[ \t]*\n")
_BARE = re.compile(r"([^\n]*)\n")
_NOT_FENCED = re.compile(r"[^\n]*\n\s*[^\s`]")


class Mistral(TaggedFamily):
    """A list of JSON objects after [TOOL_CALLS], or a name, [ARGS] and a JSON object for each call."""

    name: FamilyName = "mistral"
    tags: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openers: tuple[str, ...] = tags[:1]

    def read(self, turn: Turn) -> Steps:
        source, start = turn.source, len(turn.mark(self.tags[0]))
        while not source.ended and not source.text[start:].lstrip(BLANK):
            yield
        begins = len(source.text) - len(source.text[start:].lstrip(BLANK))
        if source.text[begins : begins + 1] == "[":
            yield from self._list(turn, begins + 1)
        else:
            yield from self._named(turn, start)

    def _list(self, turn: Turn, start: int) -> Steps:
        """Reads the objects of a list from `start` on."""
        source = turn.source
        while True:
            while not source.ended and not source.text[start:].lstrip(BLANK + ","):
                yield
            begins = len(source.text) - len(source.text[start:].lstrip(BLANK + ","))
            if source.text[begins : begins + 1] != "{":
                if turn.bodies and source.text[begins : begins + 1] in ("]", ""):
                    source.take(begins + 1)
                    turn.out.tag()
                else:
                    turn.fail(begins)
                return
            reader = ObjectReader(turn, begins, "arguments")
            text, end = yield from reader.whole()
            turn.bodies.append(text[begins:end])
            if not reader.finish(text, end):
                turn.fail(end)
                return
            source.take(end)
            turn.out.tag()
            start = 0

    def _named(self, turn: Turn, start: int) -> Steps:
        source, arguments = turn.source, None
        opening, separator, call_id = map(turn.mark, self.tags)
        while True:
            text = source.text
            found = text.find(opening, start)
            ends = found >= 0 or source.ended
            until = found if found >= 0 else source.certain((opening,))
            at = text.find(separator, start, until)
            if arguments is None and at >= 0 and (name := plain(text[start:at].split(call_id)[0]).strip()):
                turn.out.tag()
                turn.out.call(name)
                arguments = ArgumentsReader(turn.out, at + len(separator))
            if arguments is not None:
                arguments.look(text, until)
            if ends:
                break
            yield
        turn.bodies.append(text[start:until])
        if arguments is None:
            turn.fail(until)
            return
        after = arguments.finish(text, until)
        source.take(until)
        turn.out.tag()
        if rest := text[after:until].strip(BLANK):
            turn.out.say("content", rest)

    def call(self, body: str, turn: Turn) -> Call:
        name, separator, arguments = body.partition(turn.mark(self.tags[1]))
        if separator:
            name = plain(name.split(turn.mark(self.tags[2]))[0]).strip()
            return Call(name, arguments.strip()) if name else Call("", fault="a call has a name before its arguments")
        return object_call(body, "arguments")


class Glm(TaggedFamily):
    """A name and pairs of tags between tags. A value is JSON, or the text of a parameter that the tool declares as text."""

    name: FamilyName = "glm"
    tags: tuple[str, ...] = ()
    openers: tuple[str, ...] = (CALL,)

    def read(self, turn: Turn) -> Steps:
        source, position, name, given, pairs = turn.source, len(CALL), "", 0, TaggedPairs(0)
        while True:
            text = source.text
            if not name and (head := _GLM_NAME.match(text, position)) is not None:
                name = head[1]
                turn.out.tag()
                turn.out.call(name)
                position = head.end()
                pairs = TaggedPairs(position)
            while name and (pair := pairs.next(text)) is not None:
                key, value = pair
                said = f"{json.dumps(key)}: {json.dumps(self._value(turn, name, key, value))}"
                turn.out.arguments(("{" if given == 0 else ", ") + said)
                position, given = pairs.position, given + 1
            closing = _GLM_END.match(text, position) if name else None
            if closing is not None or source.ended or (name and not self._may_continue(text[position:])):
                break
            if not name and not _GLM_HALF_NAME.match(text, position):
                break
            yield
        if not name:
            while (end := source.text.find(END_CALL, len(CALL))) < 0 and not source.ended:
                yield
            text = source.text
            turn.bodies.append(text[len(CALL) : end if end >= 0 else len(text)])
            turn.fail(len(text) if end < 0 else end + len(END_CALL))
            return
        turn.bodies.append(text[len(CALL) : position if closing is None else closing.start()])
        if closing is not None:
            turn.out.arguments("{}" if given == 0 else "}")
            source.take(closing.end())
            turn.out.tag()
            return
        # An argument that never ends belongs to the call all the same.
        if half := _GLM_HALF.match(text, position):
            lead = "{" if given == 0 else ", "
            turn.out.arguments(f"{lead}{json.dumps(half[1])}: {json.dumps(half[2])}")
            position = len(text)
        source.take(position)
        turn.out.tag()

    def _may_continue(self, rest: str) -> bool:
        """Returns whether the text can be the beginning of a pair or of the end."""
        rest = rest.lstrip(BLANK)
        return any(tag.startswith(rest) or rest.startswith(tag) for tag in ("<arg_key>", END_CALL))

    def _value(self, turn: Turn, name: str, key: str, text: str) -> Any:
        tool = turn.tools.get(name)
        properties = (tool.parameters or {}).get("properties") if tool is not None else None
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        try:
            return json_of(text)
        except ValueError:
            return text

    def call(self, body: str, turn: Turn) -> Call:
        head = _GLM_NAME.match(body + END_CALL)
        if head is None:
            return Call("", fault="a call is a name with arguments between <tool_call> and </tool_call>")
        name, pairs, arguments = head[1], TaggedPairs(head.end()), dict[str, Any]()
        while (pair := pairs.next(body)) is not None:
            arguments[pair[0]] = self._value(turn, name, *pair)
        if body[pairs.position :].strip():
            return Call("", fault="the arguments of a call are <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
        return Call(name, arguments)


_GLM_NAME = re.compile(r"[ \t\r\n]*([^\s<{\[\"]+)[ \t\r]*(?:\n|(?=<arg_key>|</tool_call>))")
_GLM_HALF_NAME = re.compile(r"[ \t\r\n]*[^\s<{\[\"]*[ \t\r]*(?:<(?:a(?:r(?:g(?:_(?:k(?:ey?)?)?)?)?)?|/[a-z_]*)?)?\Z")
_GLM_END = re.compile(r"\s*</tool_call>")
_GLM_HALF = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)\Z", re.DOTALL)

_FAMILIES: Sequence[Family] = (Hermes(), Llama3(), DeepSeek(), Mistral(), Glm())
FAMILIES: Mapping[str, Family] = {one.name: one for one in _FAMILIES}


def family_of(template: str, added_tokens: Mapping[str, int]) -> Family:
    """Returns the family whose calls a chat template or, where it names none, the tokenizer's control tokens have; else Hermes."""
    tagged = {name: set(FAMILIES[name].openers) for name in ("deepseek", "mistral", "llama3")}
    if "<arg_key>" in template:
        return FAMILIES["glm"]
    if CALL in template:
        return FAMILIES["hermes"]
    for holds in (template, added_tokens):
        for name, tags in tagged.items():
            if any(tag in holds for tag in tags):
                return FAMILIES[name]
    return FAMILIES["hermes"]
