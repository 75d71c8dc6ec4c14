"""Harmony against its reference, for prompts and for training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    HarmonyEncodingName,
    RenderConversationConfig,
    Role,
    StreamableParser,
    TextContent,
    ToolDescription,
    load_harmony_encoding,
)
from openai_harmony import Message as ReferenceMessage

from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.harmony import CHANNELS, CONTROL_TOKENS, Completion
from nmoe.text.renderers import IGNORED, HarmonyRenderer
from nmoe.text.renderers.harmony import render_tools
from nmoe.text.streaming import StreamParser
from nmoe.types import Message

RETURN, CONSTRAIN, CHANNEL, START, END, MESSAGE, CALL = 200002, 200003, 200005, 200006, 200007, 200008, 200012

contents = st.lists(st.sampled_from([*CONTROL_TOKENS, "<|", "assistant", " "]) | st.text(max_size=12), max_size=6).map(
    "".join
)
channels = st.sampled_from(CHANNELS)
# A recipient "all" is the reference's default, which it leaves out; here None is.
identifiers = st.from_regex(r"[a-z_]{1,8}(\.[a-z_0-9]{1,8})?", fullmatch=True).filter(lambda word: word != "all")
tool_names = identifiers.filter(lambda word: word not in ("system", "developer", "user", "assistant"))
# What the reference can both write and read: it does not read names of roles, nor a content type without recipient.
plain = st.builds(Message, st.sampled_from(["system", "developer", "user"]), contents)
speech = st.builds(Message, st.just("assistant"), contents, channel=st.none() | channels)
calls = st.builds(
    Message,
    st.just("assistant"),
    contents,
    channel=st.none() | channels,
    recipient=identifiers,
    content_type=st.none() | st.sampled_from(["json", "code"]),
)
answers = st.builds(
    Message, st.just("tool"), contents, channel=st.none() | channels, recipient=st.just("assistant"), name=tool_names
)
conversations = st.lists(plain | speech | calls | answers, min_size=1, max_size=5)


def to_reference(message: Message) -> ReferenceMessage:
    return ReferenceMessage(
        author=Author(role=Role(message.role), name=message.name),
        content=[TextContent(text=message.content)],
        channel=message.channel,
        recipient=message.recipient,
        content_type=message.content_type,
    )


def from_reference(message: ReferenceMessage) -> Message:
    # The reference keeps the control token in the content type that it reads.
    content_type = None if message.content_type is None else message.content_type.removeprefix("<|constrain|>")
    return Message(
        message.author.role.value,
        message.content[0].text,
        message.channel,
        message.recipient,
        message.author.name,
        content_type,
    )


def reference_render(reference, messages: list[Message]) -> list[int]:
    return reference.encoding.render_conversation(
        Conversation.from_messages([to_reference(message) for message in messages]),
        config=RenderConversationConfig(auto_drop_analysis=False),
    )


def test_a_conversation_written_by_hand(reference_harmony):
    messages = [
        Message("user", "hi"),
        Message("assistant", "{}", "commentary", "functions.x", content_type="json"),
        Message("tool", "4", "commentary", "assistant", "functions.x"),
        Message("assistant", "4", "final"),
    ]
    ids = [
        *(START, 1428, MESSAGE, 3686, END),  # user, hi
        *(START, 173781, CHANNEL, 12606, 815, 316, 28, 44580, 3700, 220),  # assistant, comment|ary| to|=|functions|.x|_
        *(CONSTRAIN, 4108, MESSAGE, 12083, CALL),  # json, {}
        *(START, 44580, 3700, CHANNEL, 12606, 815, 316, 28, 173781, MESSAGE, 19, END),  # functions|.x ... assistant, 4
        *(START, 173781, CHANNEL, 17196, MESSAGE, 19, END),  # final, 4
    ]
    assert reference_harmony.render(messages) == ids
    assert reference_harmony.parse(ids) == messages
    assert reference_harmony.stop_ids == (RETURN, CALL)


@given(messages=conversations)
@example([Message("assistant", "x", "analysis", "python", content_type="code")])
@settings(deadline=None, max_examples=150)
def test_render_and_parse_agree(reference, reference_harmony, messages):
    ids = reference_render(reference, messages)
    assert reference_harmony.render(messages) == ids
    assert reference_harmony.parse(ids) == messages
    assert [*map(from_reference, reference.encoding.parse_messages_from_completion_tokens(ids))] == messages


@given(message=plain, name=identifiers)
@settings(deadline=None)
def test_named_roles_are_written_alike(reference, reference_harmony, message, name):
    named = Message(message.role, message.content, name=name)
    ids = reference_render(reference, [named])
    assert reference_harmony.render([named]) == ids
    assert reference_harmony.parse(ids) == [named]


@given(messages=st.lists(speech, min_size=1, max_size=3))
@settings(deadline=None)
def test_prompt_and_completion_agree(reference, reference_harmony, messages):
    question = Message("user", "why?")
    prompt = reference.encoding.render_conversation_for_completion(
        Conversation.from_messages([to_reference(question)]), Role.ASSISTANT
    )
    assert reference_harmony.render_prompt([question]) == prompt
    *earlier, last = messages
    turn = [*earlier, Message("assistant", last.content, "final")]
    turn = [Message("assistant", message.content, message.channel or "analysis") for message in turn]
    trained = reference.encoding.render_conversation_for_training(
        Conversation.from_messages([to_reference(message) for message in [question, *turn]]),
        config=RenderConversationConfig(auto_drop_analysis=False),
    )
    assert prompt + reference_harmony.render_completion(turn) == trained
    assert reference_harmony.parse(trained) == [question, *turn]


def test_what_is_accepted_is_read_as_the_reference_reads_it(reference, reference_harmony):
    """Ours is the stricter parser: where it finds no error, the reference finds the same messages."""
    authors = ["", " ", " to=f", " to=f json", " to=f to=g", " x", "s"]
    ends = ["", " ", " to=f", " to=f json"]
    channel_parts = ["", *(f"<|channel|>{channel}{end}" for channel in CHANNELS for end in ends)]
    constrain_parts = ["", "<|constrain|>json", " <|constrain|>json", " <|constrain|>json x"]
    closings = ["<|return|>", "<|call|>", "<|end|>", ""]
    accepted = 0
    for parts in itertools.product(authors, channel_parts, constrain_parts, ["<|message|>x"], closings):
        ids = reference.encoding.encode("".join(parts), allowed_special="all")
        completion = reference_harmony.parse_completion(ids)
        # The reference takes a content type for the recipient where there is none.
        if completion.error is None and (completion.messages[0].recipient or not completion.messages[0].content_type):
            parsed = reference.encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
            assert [*map(from_reference, parsed)] == list(completion.messages)
            accepted += 1
    # No recipient: 2 authors x 3 channels x 2 ends = 12. Before the channel: 3 x 2 x (3 without bare type + 1 with) = 24.
    # After the channel: 2 authors x 3 channels x (3 + 1) = 24.
    assert accepted == 12 + 24 + 24


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_the_reference_vocabulary_with_random_ids(reference_harmony, data):
    ids = data.draw(
        st.lists(st.sampled_from([RETURN, CONSTRAIN, CHANNEL, START, END, MESSAGE, CALL]) | st.integers(0, 201_100))
    )
    completion = reference_harmony.parse_completion(ids)
    parser = StreamParser(reference_harmony)
    for id_ in ids:
        parser.feed(id_)
    assert parser.completion() == completion


def test_streamed_text_is_the_reference_s(reference, reference_harmony):
    ids = reference.encoding.encode("<|channel|>final<|message|>naïve 你好 🏳️‍🌈🦄 done<|return|>", allowed_special="all")
    parser, other = StreamParser(reference_harmony), StreamableParser(reference.encoding, Role.ASSISTANT)
    ours = theirs = ""
    for id_ in ids:
        event = parser.feed(id_)
        ours += event.text if event is not None else ""
        theirs += other.process(id_).last_content_delta or ""
        assert ours == theirs
    assert ours == "naïve 你好 🏳️‍🌈🦄 done"


@pytest.mark.parametrize("unknown", [201_089, 10**6, -1])
def test_an_id_outside_the_vocabulary(reference_harmony, unknown):
    assert reference_harmony.parse_completion([CHANNEL, unknown]) == Completion(
        (), None, f"token 1: id {unknown} is outside the vocabulary of 201089"
    )


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


words = st.text(st.sampled_from("ab é<|>end7"), min_size=1, max_size=8).map(lambda text: f"w{text}w")


def spoken(content: str, channel: str, **more: str | None) -> ReferenceMessage:
    return ReferenceMessage(
        author=Author(role=Role.ASSISTANT), content=[TextContent(text=content)], channel=channel, **more
    )


def other(role: Role, content: str, name: str | None = None, **more: str) -> ReferenceMessage:
    return ReferenceMessage(author=Author(role=role, name=name), content=[TextContent(text=content)], **more)


@given(
    asked=words,
    first=words,
    second=words,
    thought=words,
    answered=words,
    calls=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_sequences_are_those_of_the_reference(reference, asked, first, second, thought, answered, calls):
    """Two exchanges; the reference keeps the analysis of the last, drops that of the first, and returns at the end alone."""
    messages = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", asked),
        ChatMessage("assistant", first, reasoning=thought),
        ChatMessage("user", asked),
    ]
    history = [
        other(Role.SYSTEM, "Be brief."),
        other(Role.USER, asked),
        spoken(thought, "analysis"),
        spoken(first, "final"),
        other(Role.USER, asked),
    ]
    if calls:
        messages += [
            ChatMessage("assistant", "", reasoning=thought, calls=(FunctionCall("f", '{"x": 1}', "c1"),)),
            ChatMessage("tool", answered, call_id="c1"),
        ]
        history += [
            spoken(thought, "analysis"),
            spoken('{"x": 1}', "commentary", recipient="functions.f", content_type="json"),
            other(Role.TOOL, answered, "functions.f", channel="commentary", recipient="assistant"),
        ]
    messages.append(ChatMessage("assistant", second))
    history.append(spoken(second, "final"))
    alone, last = HarmonyRenderer(reference).supervise(tuple(messages))
    encoding = reference.encoding
    # Asked to train, the reference drops the analysis that stands before the first final message, of one exchange alone too.
    kept = RenderConversationConfig(auto_drop_analysis=False)
    assert alone.ids == encoding.render_conversation_for_training(Conversation.from_messages(history[:4]), config=kept)
    assert last.ids == encoding.render_conversation_for_training(Conversation.from_messages(history))
    for sequence, turns in ((alone, 1), (last, 2 if calls else 1)):
        prompt = sequence.labels.index(next(label for label in sequence.labels if label != IGNORED))
        until = history[: 2 if sequence is alone else 5]
        assert sequence.ids[:prompt] == encoding.render_conversation_for_completion(
            Conversation.from_messages(until), Role.ASSISTANT
        )
        stops = [label for label in sequence.labels if label in (200002, 200012)]
        assert stops == [200012] * (turns - 1) + [200002]
