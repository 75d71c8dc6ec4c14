"""Reads the messages and tools of a chat request."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nmoe.errors import shown
from nmoe.parsing import MOST_NESTED, is_deep
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.web.openai.errors import ApiError
from nmoe.web.openai.fields import Fields

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields: Fields) -> list[ChatMessage]:
    """Reads `messages`. A list of texts as content is joined; `developer` counts as `system`."""
    given = fields.take("messages", list)
    if not given:
        raise ApiError("messages: must be a list of at least one message", "messages")
    messages = list[ChatMessage]()
    names = dict[str, str]()  # of functions, by the ids of their calls
    for index, one in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(one, dict):
            raise ApiError(f"{where} = {shown(one)}: must be an object", where)
        table = Fields(one, fields.strict, where)
        message = _message(table, names)
        table.finish()
        # Each field once, without the message's index, because a header of replies has them all.
        ignored = ["messages" + path.removeprefix(where) for path in table.ignored]
        fields.ignored += [path for path in ignored if path not in fields.ignored]
        messages.append(message)
    return messages


def _message(table: Fields, names: dict[str, str]) -> ChatMessage:
    role = table.choice("role", _ROLES)
    if role is None:
        raise ApiError(f"{table.path('role')}: is missing; one of {', '.join(_ROLES)}", table.path("role"))
    content = _content(table, role)
    if role == "assistant":
        for inert in ("name", "refusal", "annotations", "audio"):
            table.ignore(inert)
        reasoning = table.text("reasoning_content")
        other = table.text("reasoning")  # vLLM's newer name
        calls = _calls(table, names)
        if content is None and not calls:
            raise ApiError(f"{table.path('content')}: is missing", table.path("content"))
        return ChatMessage(role, content or "", reasoning=reasoning or other, calls=calls)
    if content is None:
        raise ApiError(f"{table.path('content')}: is missing", table.path("content"))
    if role == "tool":
        call_id = table.text("tool_call_id")
        name = table.text("name") or names.get(call_id or "")
        if call_id is None:
            raise ApiError(f"{table.path('tool_call_id')}: is missing", table.path("tool_call_id"))
        return ChatMessage(role, content, name=name, call_id=call_id)
    table.ignore("name")
    return ChatMessage("system" if role == "developer" else role, content)


def _content(table: Fields, role: str) -> str | None:
    given = table.any("content")
    if given is None or isinstance(given, str):
        return given
    path = table.path("content")
    if not isinstance(given, list):
        raise ApiError(f"{path} = {shown(given)}: must be a text or a list of parts", path)
    texts = list[str]()
    for index, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        key = "refusal" if kind == "refusal" and role == "assistant" else "text"
        if kind not in ("text", key) or not isinstance(part.get(key), str):
            raise ApiError(f"{path}[{index}] = {shown(part)}: only parts of type text are read", f"{path}[{index}]")
        texts.append(part[key])
    return "".join(texts)


def _calls(table: Fields, names: dict[str, str]) -> tuple[FunctionCall, ...]:
    calls = list[FunctionCall]()
    for index, one in enumerate(table.take("tool_calls", list, [])):
        path = f"{table.path('tool_calls')}[{index}]"
        function = one.get("function") if isinstance(one, dict) else None
        name, arguments = (
            (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
        )
        if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(one.get("id"), str)):
            raise ApiError(
                f"{path} = {shown(one)}: must have an id, and a function with a name and arguments, all texts", path
            )
        names[one["id"]] = name
        calls.append(FunctionCall(name, arguments, one["id"]))
    return tuple(calls)


def read_tools(fields: Fields) -> list[ToolDefinition]:
    """Reads `tools` and `tool_choice`; there are none under `tool_choice: "none"`."""
    tools = [_tool(one, f"tools[{index}]") for index, one in enumerate(fields.take("tools", list, []))]
    old = [_function(one, f"functions[{index}]") for index, one in enumerate(fields.take("functions", list, []))]
    called = fields.any("function_call", "auto")
    if old and called != "none":
        raise ApiError("functions: OpenAI has replaced them by tools; send those", "functions")
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            raise ApiError(f"tools: {name} is there more than once", "tools")
    choice = fields.any("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(
            f"tool_choice = {shown(choice)}: nothing here can make the model call a tool; it is auto or none",
            "tool_choice",
        )
    return [] if choice == "none" else tools


def _tool(one: Any, path: str) -> ToolDefinition:
    if not isinstance(one, dict) or one.get("type") != "function":
        raise ApiError(f"{path} = {shown(one)}: must be an object of type function", path)
    if unknown := sorted(one.keys() - {"type", "function"}):
        raise ApiError(f"{path}.{unknown[0]}: unknown; leave it out", f"{path}.{unknown[0]}", "unknown_parameter")
    return _function(one.get("function"), f"{path}.function")


def _function(function: Any, path: str) -> ToolDefinition:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(f"{path} = {shown(function)}: must be an object with a name", path)
    if unknown := sorted(function.keys() - {"name", "description", "parameters", "strict"}):
        raise ApiError(f"{path}.{unknown[0]}: unknown; leave it out", f"{path}.{unknown[0]}", "unknown_parameter")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None):
        raise ApiError(f"{path}.description = {shown(description)}: must be a text", f"{path}.description")
    if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
        raise ApiError(
            f"{path}.parameters = {shown(parameters)}: must be the JSON schema of an object", f"{path}.parameters"
        )
    if is_deep(parameters):
        raise ApiError(f"{path}.parameters: nested more than {MOST_NESTED} deep", f"{path}.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise ApiError(f"{path}.strict = {shown(function['strict'])}: must be true or false", f"{path}.strict")
    return ToolDefinition(function["name"], description or "", parameters)
