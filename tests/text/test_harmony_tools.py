"""Tool declarations against the reference implementation, on schemas of every kind that functions come to."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import (
    DeveloperContent,
    HarmonyEncodingName,
    Role,
    ToolDescription,
    load_harmony_encoding,
)
from openai_harmony import Message as ReferenceMessage

from nmoe.text.conversation import ToolDefinition
from nmoe.text.harmony_tools import render_tools

ENCODING = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def reference(tools: list[ToolDefinition]) -> str:
    described = [ToolDescription.new(tool.name, tool.description, parameters=tool.parameters) for tool in tools]
    content = DeveloperContent.new().with_function_tools(described)
    message = ReferenceMessage.from_role_and_content(Role.DEVELOPER, content)
    text: str = ENCODING.decode(ENCODING.render(message))
    return text.removeprefix("<|start|>developer<|message|>").removesuffix("<|end|>")


def test_the_declarations_of_the_format_s_documentation() -> None:
    weather = ToolDefinition(
        "get_current_weather",
        "Gets the current weather in the provided location.",
        {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["location"],
        },
    )
    location = ToolDefinition("get_location", "Gets the location of the user.", None)
    assert render_tools([location, weather]) == (
        """# Tools

## functions

namespace functions {

// Gets the location of the user.
type get_location = () => any;

// Gets the current weather in the provided location.
type get_current_weather = (_: {
// The city and state, e.g. San Francisco, CA
location: string,
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

} // namespace functions"""
    )


WORDS = st.text("abcxyz_", min_size=1, max_size=6)
LINES = st.text("ab c.,'\"é", min_size=1, max_size=12)
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"type": st.just("string")}, optional={"default": LINES, "nullable": st.booleans()}),
    st.fixed_dictionaries({"type": st.just("string"), "enum": st.lists(WORDS, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"type": st.just("integer")}, optional={"default": st.integers(-9, 9)}),
    st.fixed_dictionaries({"type": st.just("number")}, optional={"default": st.sampled_from([0.5, -2.25])}),
    st.fixed_dictionaries({"type": st.just("boolean")}, optional={"default": st.booleans()}),
    st.just({"type": "array"}),
    st.just({"type": ["string", "integer", "null"]}),
    st.just({"anyOf": [{"type": "string"}, {"type": "number"}]}),
    st.just({"type": "object"}),
)


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    described = st.tuples(values, st.none() | LINES).map(
        lambda pair: pair[0] if pair[1] is None else {**pair[0], "description": pair[1]}
    )
    return st.dictionaries(WORDS, described, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
            }
        )
    )


SCHEMAS = st.recursive(
    LEAVES, lambda inner: objects(inner) | inner.map(lambda items: {"type": "array", "items": items}), max_leaves=6
)
TOOLS = st.builds(ToolDefinition, WORDS, st.lists(LINES, max_size=2).map("\n".join), st.none() | objects(SCHEMAS))


@settings(deadline=None)
@given(st.lists(TOOLS, min_size=1, max_size=3))
def test_declarations_agree_with_the_reference(tools: list[ToolDefinition]) -> None:
    assert render_tools(tools) == reference(tools)
