"""Turns read while they are sampled: the same pieces for every division of the tokens, no text lost, and calls as they were
written."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from chat_templates import QWEN_CONTROLS, QWEN_TAGS, save
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.errors import UserError
from nmoe.text.calls.pieces import Piece
from nmoe.text.calls.scan import TaggedPairs
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.renderers import ChatRenderer
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import ChatFormat, chat_format

ADD = ToolDefinition(
    "add", "Adds.", {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}
)
LLAMA_TAGS = ("<|begin_of_text|>", "<|python_tag|>", "<|eom_id|>", "<|eot_id|>")
DEEPSEEK_TAGS = (
    *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"),
)
MISTRAL_TAGS = ("<s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
HERMES_CALL = '<tool_call>{"name": "add", "arguments": '
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
DEEPSEEK_END = "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.fixture(scope="session")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, ChatFormat]]:
    """One of each family. The tags of calls are control tokens where the released tokenizers have them so."""

    def made(name: str, template: str | None, controls: tuple[str, ...], tags: tuple[str, ...] = ()) -> Tokenizer:
        return Tokenizer.load(save(tmp_path_factory.mktemp(name), template, controls, tags))

    tokenizers = {
        "hermes": made("hermes", TEMPLATE + "{# <tool_call> #}", QWEN_CONTROLS, QWEN_TAGS),
        "llama3": made("llama3", TEMPLATE, LLAMA_TAGS),
        "deepseek": made("deepseek", TEMPLATE, DEEPSEEK_TAGS),
        "mistral": made("mistral", TEMPLATE, MISTRAL_TAGS),
        "glm": made("glm", TEMPLATE + "{# <tool_call> <arg_key> #}", QWEN_CONTROLS, QWEN_TAGS),
        "text": made("text", None, QWEN_CONTROLS),
        "harmony": Tokenizer.train(["assistant analysis commentary to=functions.add json final"] * 5, 350),
    }
    return {name: (one, chat_format(one, "text" if name == "text" else "auto")) for name, one in tokenizers.items()}


def read(
    form: ChatFormat, ids: Sequence[int], cuts: Sequence[int] = (), tools: tuple[ToolDefinition, ...] = (ADD,)
) -> list[Piece]:
    reader, start, pieces = form.reader([], tools), 0, list[Piece]()
    for cut in (*sorted(cuts), len(ids)):
        pieces += reader.feed(ids[start:cut])
        start = cut
    return [*pieces, *reader.end("stop")]


def joined(pieces: Sequence[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and the calls' names and arguments."""
    texts, calls = {"reasoning": "", "content": ""}, list[list[str]]()
    for piece in pieces:
        if piece.kind == "call":
            assert (piece.call, piece.text) == (len(calls), "")
            calls.append([piece.name or "", ""])
        elif piece.kind == "arguments":
            assert piece.call == len(calls) - 1
            calls[-1][1] += piece.text
        else:
            assert piece.text
            texts[piece.kind] += piece.text
    return texts["reasoning"], texts["content"], [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            '<think>\nhm\n</think>\n\nLet me.\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "s": "</tool_call>"}}\n'
            '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>',
            ("hm", "Let me.", [("add", '{"x": 1, "s": "</tool_call>"}'), ("add", '{"x": 2}')]),
        ),
        ("hermes", f"a\n{HERMES_CALL}{{}}}}</tool_call>\nb\n", ("", "a\n\nb\n", [("add", "{}")])),
        ("hermes", '<tool_call>{"arguments": {"x": 3}, "name": "add"}</tool_call>', ("", "", [("add", '{"x": 3}')])),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', ("", "", [("now", "{}")])),
        ("hermes", f'{HERMES_CALL}"{{\\"x\\": 1}}"}}</tool_call>', ("", "", [("add", '{"x": 1}')])),
        ("hermes", f'{HERMES_CALL}{{"x": {{"y": "}}"', ("", "", [("add", '{"x": {"y": "}"')])),
        ("hermes", 'a <tool_call>{"name": "add", "arg', ("", 'a <tool_call>{"name": "add", "arg', [])),
        ("hermes", "a <tool_call>nothing</tool_call> b", ("", "a <tool_call>nothing</tool_call> b", [])),
        (
            "hermes",
            f"<think>{HERMES_CALL}{{}}}}</tool_call></think>42",
            (f"{HERMES_CALL}{{}}}}</tool_call>", "42", []),
        ),
        ("hermes", "no < tags <tool", ("", "no < tags <tool", [])),
        ("hermes", " two\n", ("", " two\n", [])),
        (
            "llama3",
            '<|python_tag|>{"name": "add", "parameters": {"x": 1}}; {"name": "add", "parameters": {"x": 2}}',
            ("", "", [("add", '{"x": 1}'), ("add", '{"x": 2}')]),
        ),
        ("llama3", '{"name": "add", "parameters": {"x": 1}}', ("", "", [("add", '{"x": 1}')])),
        (
            "llama3",
            '{"type": "function", "name": "add", "parameters": {"x": 1}}',
            ("", "", [("add", '{"x": 1}')]),
        ),
        ("llama3", '{"name": "Bob", "age": 1} is he', ("", '{"name": "Bob", "age": 1} is he', [])),
        ("llama3", '{"answer": 42}', ("", '{"answer": 42}', [])),
        ("llama3", "<|python_tag|>print(1)", ("", "print(1)", [])),
        ("llama3", "<|python_tag|>{bad} x", ("", "{bad} x", [])),
        (
            "deepseek",
            f'Ok.{DEEPSEEK_CALL}{{"x": 1}}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
            f'{{"x": "```"}}{DEEPSEEK_END}',
            ("", "Ok.", [("add", '{"x": 1}'), ("add", '{"x": "```"}')]),
        ),
        (
            "deepseek",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>'
            'b<｜tool▁sep｜>{"y": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            ("", "", [("add", '{"x": 1}'), ("b", '{"y": 2}')]),
        ),
        ("deepseek", f"{DEEPSEEK_CALL}{{bad{DEEPSEEK_END}", ("", "", [("add", "{bad")])),
        ("deepseek", "<think>\nhm\n</think>\n\n<｜tool▁calls▁begin｜>no", ("hm", "no", [])),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "add", "arguments": {}}]',
            ("", "", [("add", '{"x": 1}'), ("add", "{}")]),
        ),
        (
            "mistral",
            'Ok[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]abcdefghi[ARGS]{"y": 2}',
            ("", "Ok", [("add", '{"x": 1}'), ("b", '{"y": 2}')]),
        ),
        ("mistral", "[TOOL_CALLS]nothing", ("", "nothing", [])),
        (
            "glm",
            "Ok\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>2</arg_value>\n"
            "</tool_call>\n<tool_call>now</tool_call>",
            ("", "Ok", [("add", '{"x": 1, "s": "2"}'), ("now", "{}")]),
        ),
        (
            "glm",
            "<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>a</tool_call> b",
            ("", "", [("add", '{"s": "a</tool_call> b"')]),
        ),
        ("glm", '<tool_call>{"name": 1}</tool_call>', ("", '<tool_call>{"name": 1}</tool_call>', [])),
        ("glm", "<tool_call>\nw\n", ("", "", [("w", "")])),
        ("llama3", "<|python_tag|>{<|python_tag|><|python_tag|>\n", ("", "{", [])),
        ("text", "<think>a</think> <tool_call>", ("", "<think>a</think> <tool_call>", [])),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Ok<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>',
            ("hm", "Ok", [("add", '{"x": 1}')]),
        ),
        ("harmony", "<|channel|>final<|message|>4", ("", "4", [])),
        ("harmony", "<|channel|>analy", ("", "", [])),
        ("harmony", "Hello<|return|>", ("", "Hello", [])),
        ("harmony", "<|channel|>final<|message|>a<|start|>b<|end|>c", ("", "abc", [])),
    ],
)
def test_turns_are_read_as_they_are_written(
    formats: dict[str, tuple[Tokenizer, ChatFormat]],
    name: str,
    text: str,
    expected: tuple[str, str, list[tuple[str, str]]],
) -> None:
    tokenizer, form = formats[name]
    assert form.name == name
    ids = tokenizer.encode(text, control_tokens=True)
    assert joined(read(form, ids)) == expected
    assert joined(read(form, ids, range(len(ids)))) == expected


PARTS = {
    "hermes": (HERMES_CALL, '{"x": 1}', "}", "</tool_call>", "<tool_call>", '{"name": "add"}', '"arguments": '),
    "llama3": ("<|python_tag|>", '{"name": "add", "parameters": ', '{"x": 1}', "}", "; ", "<|eom_id|>"),
    "deepseek": (*DEEPSEEK_TAGS, "function", "add", "\n```json\n", '{"x": 1}', "\n```"),
    "mistral": (*MISTRAL_TAGS, " [", '{"name": "add", "arguments": ', '{"x": 1}', "}", ",", "]", "add"),
    "glm": ("<tool_call>add", "\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", "s"),
    "text": QWEN_CONTROLS,
    "harmony": (
        *("<|channel|>", "analysis", "final", "commentary", " to=functions.add", "<|message|>", "<|end|>"),
        *("<|start|>assistant", "<|call|>", "<|return|>", '{"x": 1}'),
    ),
}
COMMON = ("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "😀", "é", '"', "\\", "{", "[", "w", "<")


@pytest.mark.parametrize("name", PARTS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_division_gives_the_same_and_no_text_is_lost(
    formats: dict[str, tuple[Tokenizer, ChatFormat]], name: str, data: st.DataObject
) -> None:
    tokenizer, form = formats[name]
    parts = data.draw(st.lists(st.sampled_from([*PARTS[name], *COMMON]), max_size=14))
    ids = tokenizer.encode("".join(parts), control_tokens=True)
    for _ in range(data.draw(st.integers(0, 2))):  # half a character, or an id that is no token
        ids.insert(data.draw(st.integers(0, len(ids))), data.draw(st.integers(-1, tokenizer.vocab_size)))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    whole = joined(read(form, ids))
    assert whole == joined(read(form, ids, cuts)) == joined(read(form, ids, range(len(ids))))
    reasoning, content, calls = whole
    everything = reasoning + content + "".join(name + arguments for name, arguments in calls)
    assert everything.count("w") >= "".join(parts).count("w") - (name == "harmony") * len(parts)
    for tag in (one for one in tokenizer.added_tokens if one not in QWEN_TAGS):
        assert tag not in everything
    everything.encode()  # no half of a surrogate


_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@given(
    st.lists(st.sampled_from(["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "k", "\n", " "]), max_size=12),
    st.lists(st.integers(0, 100), max_size=6),
)
def test_pairs_are_found_however_their_text_arrives(parts: list[str], cuts: list[int]) -> None:
    text, expected, at = "<arg_key>" + "".join(parts), list[tuple[str, ...]](), 0
    while (found := _PAIR.match(text, at)) is not None:
        expected.append(found.groups())
        at = found.end()
    for lengths in ([*sorted(cuts), len(text)], range(len(text) + 1)):
        pairs, read_pairs = TaggedPairs(0), list[tuple[str, str]]()
        for length in lengths:
            while (pair := pairs.next(text[:length])) is not None:
                read_pairs.append(pair)
        assert (read_pairs, pairs.position) == (expected, at)


def test_many_tags_of_no_pair_are_read_in_a_moment(formats: dict[str, tuple[Tokenizer, ChatFormat]]) -> None:
    tokenizer, form = formats["glm"]
    text = "<tool_call>add\n<arg_key>" + "</arg_key><arg_value>" * 20_000
    before = time.thread_time()
    _, content, calls = joined(read(form, tokenizer.encode(text)))
    assert time.thread_time() - before < 5  # the square of their number takes more than a minute
    value = text.removeprefix("<tool_call>add\n<arg_key></arg_key><arg_value>")
    assert (content, calls) == ("", [("add", json.dumps({"": value})[:-1])])


@settings(deadline=None, max_examples=100)
@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(st.text(max_size=8) | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=2)),
        max_size=3,
    ),
    name=st.sampled_from(["add", "a_b", "now"]),
)
@pytest.mark.parametrize("family", ["hermes", "llama3", "deepseek", "mistral"])
def test_arguments_and_training_read_the_same_calls(
    formats: dict[str, tuple[Tokenizer, ChatFormat]], family: str, arguments: dict[str, object], name: str
) -> None:
    tokenizer, form = formats[family]
    said = json.dumps(arguments, ensure_ascii=False)
    text = {
        "hermes": f'<tool_call>{{"name": "{name}", "arguments": {said}}}</tool_call>',
        "llama3": f'<|python_tag|>{{"name": "{name}", "parameters": {said}}}',
        "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{said}{DEEPSEEK_END}",
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {said}}}]',
    }[family]
    # What is a control token is written as one; the arguments are text.
    ids: list[int] = []
    for index, part in enumerate(text.split(said) if len(arguments) else [text]):
        ids += [*(tokenizer.encode(said) if index else []), *tokenizer.encode(part, control_tokens=True)]
    (call,) = joined(read(form, ids, range(len(ids))))[2]
    assert (call[0], json.loads(call[1])) == (name, arguments)
    (trained,) = ChatRenderer(tokenizer).calls(0, [*ids, form.stop_ids[0]])
    assert (trained.name, json.loads(trained.arguments), trained.fault) == (name, arguments, "")


def test_llamas_turn_with_calls_ends_in_another_token(formats: dict[str, tuple[Tokenizer, ChatFormat]]) -> None:
    tokenizer, form = formats["llama3"]
    assert form.stop_ids == (tokenizer.special_id("<|eot_id|>"), tokenizer.special_id("<|eom_id|>"))
    text = '<|python_tag|>{"name": "add", "parameters": {}}<|eom_id|>'
    turn = tokenizer.encode(text, control_tokens=True)
    (call,) = ChatRenderer(tokenizer).calls(0, turn)
    assert (call.name, call.arguments, call.fault) == ("add", "{}", "")


def test_without_tools_no_calls_are_read(formats: dict[str, tuple[Tokenizer, ChatFormat]]) -> None:
    tokenizer, form = formats["llama3"]
    text = '{"name": "add", "parameters": {"x": 1}}'
    assert joined(read(form, tokenizer.encode(text), tools=())) == ("", text, [])


def test_a_prompt_that_opens_the_reasoning_is_followed_by_it(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}"
    tokenizer = Tokenizer.load(save(tmp_path, template, QWEN_CONTROLS, QWEN_TAGS))
    form = chat_format(tokenizer)
    reader = form.reader(form.prompt_ids([ChatMessage("user", "q")]))
    pieces = [*reader.feed(tokenizer.encode("hm\n</think>\n\n42")), *reader.end("stop")]
    assert joined(pieces) == ("hm", "42", [])
    assert form.has_reasoning


def test_harmony_writes_a_chat_without_the_reasoning_before_its_last_answer(
    formats: dict[str, tuple[Tokenizer, ChatFormat]],
) -> None:
    tokenizer, form = formats["harmony"]
    calls = (FunctionCall("add", '{"x": 1}', "c1"),)
    messages = [
        ChatMessage("user", "q"),
        ChatMessage("assistant", "", reasoning="hm", calls=calls),
        ChatMessage("tool", "2", call_id="c1"),
        ChatMessage("assistant", "2", reasoning="so"),
        ChatMessage("user", "r"),
        ChatMessage("assistant", "", reasoning="again", calls=calls),
        ChatMessage("tool", "3", call_id="c1"),
    ]
    call = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>'
    answer = "<|start|>functions.add<|channel|>commentary to=assistant<|message|>%d<|end|>"
    assert tokenizer.decode(form.prompt_ids(messages)) == (
        f"<|start|>user<|message|>q<|end|>{call}{answer % 2}<|start|>assistant<|channel|>final<|message|>2<|end|>"
        "<|start|>user<|message|>r<|end|><|start|>assistant<|channel|>analysis<|message|>again<|end|>"
        f"{call}{answer % 3}<|start|>assistant"
    )
    assert "# Tools" in tokenizer.decode(form.prompt_ids(messages, [ADD], effort="low"))
    with pytest.raises(UserError, match="a tool answers where the assistant has called none"):
        form.prompt_ids([ChatMessage("user", "q"), ChatMessage("assistant", ""), ChatMessage("tool", "1", name="add")])


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_tools_and_calls_nested_too_deeply_are_refused(
    name: str, formats: dict[str, tuple[Tokenizer, ChatFormat]]
) -> None:
    _, form = formats[name]
    question, deep = ChatMessage("user", "?"), {"type": "object", "properties": {"x": {"type": "string"}}}
    for _ in range(400):
        deep = {"type": "object", "properties": {"x": deep}}
    with pytest.raises(UserError, match=r"nested (more than 100 deep|too deeply); flatten"):
        form.prompt_ids([question], [ToolDefinition("add", "", deep)])
    if name == "hermes":
        call = ChatMessage("assistant", "", calls=(FunctionCall("add", json.dumps(deep), "1"),))
        with pytest.raises(UserError, match="the arguments of a call are nested too deeply; flatten"):
            form.prompt_ids([question, call])


def test_what_a_format_cannot_say_is_refused(formats: dict[str, tuple[Tokenizer, ChatFormat]]) -> None:
    asked = [ChatMessage("user", "q")]
    with pytest.raises(UserError, match="does not declare tools, so the model cannot know add"):
        formats["hermes"][1].prompt_ids(asked, [ADD])
    assert formats["hermes"][1].prompt_ids([ChatMessage("system", "Call add."), *asked], [ADD])
    with pytest.raises(UserError, match='format = "text" has no tools'):
        formats["text"][1].prompt_ids(asked, [ADD])
    with pytest.raises(UserError, match="knows no reasoning_effort"):
        formats["text"][1].prompt_ids(asked, effort="low")
    with pytest.raises(UserError, match="chat_template_kwargs are for a chat template"):
        formats["harmony"][1].prompt_ids(asked, arguments={"enable_thinking": False})
