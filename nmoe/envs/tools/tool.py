"""A tool: a typed function that a policy calls. The policy sees its name, type hints and docstring.

    async def lookup(word: Annotated[str, Field(description="an English word")], senses: int = 1) -> str:
        "Looks a word up in the dictionary."

Arguments arrive as JSON, and pydantic checks them against the hints. A parameter with the hint `Sandbox` receives the
trajectory's sandbox and is hidden from the policy. A plain `def` runs in its own thread and cannot be stopped there: code
that may hang belongs in an `async def`, or in the sandbox. (docs/guides/tools.md)
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from nmoe.errors import UserError, cut
from nmoe.sandbox.api import Sandbox
from nmoe.text.conversation import ToolDefinition
from nmoe.types import Failure

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

# A longer reason does not help the policy.
_REASON_CHARS = 500


@dataclass(frozen=True)
class ToolOutput:
    """A tool's output: text, or bytes in UTF-8, and how the call went. `reason` explains a failure to the policy.

    A function returns one if a plain value is not enough: `ToolOutput("", "command_not_found", "gcc: not here")`.
    """

    content: str | bytes
    failure: Failure = "ok"
    reason: str = ""


class ArgumentsError(Exception):
    """The policy's arguments are not JSON, or do not match the function's parameters. The policy is shown the message."""


class Tool:
    """A function that a policy can call, with the name, description and argument schema that declare it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Builds the tool's declaration from the function's name, type hints and docstring. Raises UserError, which names the
        fault, for an invalid name, for missing hints or docstring, and for parameters without a JSON form.
        """
        where = f"tool {function.__module__}:{function.__qualname__}"
        self.function = function
        self.name = function.__name__
        description = inspect.getdoc(function)
        if not NAME.fullmatch(self.name):
            raise UserError(f"{where}: a tool's name is letters, digits and _, at most 64, not {self.name!r}")
        if not description:
            raise UserError(f"{where}: has no docstring; the policy reads it to know what the tool does")
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise UserError(
                f"{where}: {error}; import what the hints name at run time, not for type checking"
            ) from error
        self.sandbox_parameter: str | None = None
        fields: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise UserError(f"{where}: takes *args, **kwargs or positional-only arguments, which have no JSON form")
            if parameter.name not in hints:
                raise UserError(f"{where}: parameter {parameter.name!r} has no type hint")
            if hints[parameter.name] is Sandbox:
                self.sandbox_parameter = parameter.name
            elif parameter.default is parameter.empty:
                fields[parameter.name] = hints[parameter.name]
            else:
                fields[parameter.name] = NotRequired[hints[parameter.name]]
                defaults[parameter.name] = parameter.default
        arguments = with_config(ConfigDict(extra="forbid"))(TypedDict(self.name, fields))  # type: ignore[operator]
        try:
            self._arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
            schema = self._arguments.json_schema()
        except PydanticUserError as error:
            raise UserError(f"{where}: a hint has no JSON form: {error.message}") from error
        self.definition = ToolDefinition(self.name, description, simplified(schema, defaults) if fields else None)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def parse(self, arguments: str) -> dict[str, Any]:
        """Parses the function's arguments; an empty text means no arguments. Raises ArgumentsError for any invalid text."""
        try:
            return self._arguments.validate_json(arguments.strip() or "{}")
        except ValidationError as error:
            said = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ") for one in error.errors()[:3]]
            raise ArgumentsError(shortened("; ".join(said))) from error


def as_output(value: Any) -> ToolOutput:
    """Converts a function's return value to output: text unchanged, None as empty, anything else as JSON."""
    if isinstance(value, ToolOutput):
        return value
    if isinstance(value, str | bytes):
        return ToolOutput(value)
    return ToolOutput("" if value is None else json.dumps(value, ensure_ascii=False, default=str))


def shortened(text: str) -> str:
    """Returns the reason of a failure as one line of at most 500 characters."""
    return cut(" ".join(text.split()), _REASON_CHARS)


def simplified(schema: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Simplifies a JSON schema of arguments: references resolved, `X | None` as nullable, defaults that JSON can express, no
    titles.
    """
    definitions = schema.get("$defs", {})

    def walk(node: Any, seen: tuple[str, ...] = ()) -> Any:
        if isinstance(node, list):
            return [walk(one, seen) for one in node]
        if not isinstance(node, Mapping):
            return node
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            rest = {key: value for key, value in node.items() if key != "$ref"}
            # A recursive type has no finite form.
            return walk({"type": "object"} if name in seen else {**definitions[name], **rest}, (*seen, name))
        options = [one for one in node.get("anyOf", ()) if one != {"type": "null"}]
        if len(options) == 1:
            rest = {key: value for key, value in node.items() if key != "anyOf"}
            return walk({**options[0], **rest, "nullable": True}, seen)
        walked: dict[str, Any] = {}
        for key, value in node.items():
            if key == "properties":
                walked[key] = {name: walk(one, seen) for name, one in value.items()}
            elif key == "description":
                walked[key] = " ".join(value.split())
            elif key not in ("title", "$defs"):
                walked[key] = walk(value, seen)
        return walked

    simple: dict[str, Any] = walk(schema)
    simple.pop("description", None)  # the function's docstring already describes the arguments as a whole
    for name, default in defaults.items():
        try:
            simple["properties"][name]["default"] = json.loads(json.dumps(default, allow_nan=False))
        except (TypeError, ValueError):
            continue  # JSON cannot express this default; the parameter stays optional
    return simple
