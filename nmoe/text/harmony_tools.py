"""Declare tools in Harmony's developer message, as a TypeScript namespace.

Format: https://github.com/openai/harmony (docs/format.md, "Function calling"); the tests compare with that implementation. Of
JSON schema it supports the types that Python type hints produce: strings, enums of strings, numbers, booleans, arrays,
objects, lists of types, and `nullable`. Everything else becomes `any`, as in the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nmoe.text.conversation import ToolDefinition
from nmoe.types import Message

NAMESPACE = "functions"


def render_tools(tools: Sequence[ToolDefinition]) -> str:
    """The content of a developer message that declares the tools."""
    declarations = "\n\n".join(_declaration(tool) for tool in tools)
    return f"# Tools\n\n## {NAMESPACE}\n\nnamespace {NAMESPACE} {{\n\n{declarations}\n\n}} // namespace {NAMESPACE}"


def declare_tools(messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[Message]:
    """Inserts a developer message that declares the tools, if there are any, after the system messages."""
    first = next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))
    declared = [Message("developer", render_tools(tools))] if tools else []
    return [*messages[:first], *declared, *messages[first:]]


def _declaration(tool: ToolDefinition) -> str:
    comment = "".join(f"// {line}\n" for line in tool.description.splitlines())
    argument = "" if tool.parameters is None else f"_: {_type(tool.parameters, '')}"
    return f"{comment}type {tool.name} = ({argument}) => any;"


def _type(schema: Mapping[str, Any], indent: str) -> str:
    """The TypeScript type of a schema; an object's keys stand at `indent`."""
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join("number" if one == "integer" else one for one in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "string":
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema.get("enum", ())) or "string"
    if kind in ("number", "integer"):
        return "number"
    if kind == "boolean":
        return "boolean"
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if schema.get("items") else "Array<any>"
    return "any"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    lines = ["{"]
    if "description" in schema:
        lines.insert(0, f"{indent}// {schema['description']}")
    required = schema.get("required", ())
    for name, value in schema.get("properties", {}).items():
        if "description" in value:
            lines.append(f"{indent}// {value['description']}")
        optional = "" if name in required else "?"
        nullable = " | null" if value.get("nullable") else ""
        default = f" // default: {_default(value)}" if "default" in value else ""
        lines.append(f"{indent}{name}{optional}: {_type(value, indent + '    ')}{nullable},{default}")
    return "\n".join([*lines, f"{indent}}}"])


def _default(schema: Mapping[str, Any]) -> str:
    default = schema["default"]
    if isinstance(default, str):
        return default if "enum" in schema else f'"{default}"'
    return json.dumps(default, ensure_ascii=False, separators=(",", ":"))
