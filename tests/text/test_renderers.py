"""What is learned of a record: token for token what transformers renders and masks, and of Harmony what a policy would sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import LLAMA, LLAMA_CONTROLS, QWEN, QWEN_CONTROLS, QWEN_TAGS, qwen, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmoe.data.examples import render
from nmoe.data.records import Conversation, PromptCompletion, Text
from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.harmony import CONTROL_TOKENS
from nmoe.text.renderers import IGNORED, ChatRenderer, HarmonyRenderer, Rendered, make_renderer
from nmoe.text.tokenizer import Tokenizer

ADD = ToolDefinition(
    "add", "Adds two numbers.", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
)
CALLS = """
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
"""
# Qwen3's template with calls.
PLAIN = QWEN.replace("        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"", CALLS + "{{- '\\n' }}\n    {%- elif message.role == \"tool\"")  # noqa: E501  # fmt: skip


def loaded(directory: Path, template: str, controls: tuple[str, ...], tags: tuple[str, ...] = ()) -> Tokenizer:
    return Tokenizer.load(save(directory, template, controls, tags))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return loaded(tmp_path_factory.mktemp("plain"), PLAIN, QWEN_CONTROLS, QWEN_TAGS)


@pytest.fixture(scope="module")
def marked_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("marked"), SIMPLE_MARKED, QWEN_CONTROLS, QWEN_TAGS)


SIMPLE_MARKED = """
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SIMPLE = SIMPLE_MARKED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def by_transformers(directory: Path, messages: list[dict[str, Any]], tools: tuple[ToolDefinition, ...]) -> Rendered:
    from transformers import AutoTokenizer

    out = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        messages,
        tools=[tool.as_function() for tool in tools] or None,
        return_assistant_tokens_mask=True,
        return_dict=True,
        date_string="26 Jul 2024",
    )
    ids = list(out["input_ids"])
    masks = out["assistant_masks"]
    return Rendered(ids, [id_ if mask else IGNORED for id_, mask in zip(ids, masks, strict=True)])


def as_dict(message: ChatMessage) -> dict[str, Any]:
    taken: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        taken["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
        ]
    return taken


words = st.text(st.sampled_from('abé 你7.<>{}"'), min_size=1, max_size=12).map(lambda text: "w" + text.strip() + "w")
answers = st.builds(ChatMessage, st.just("assistant"), words)
calls = st.builds(
    lambda text, x: (
        ChatMessage("assistant", text, calls=(FunctionCall("add", {"x": x, "y": text}),)),
        ChatMessage("tool", str(x)),
    ),
    words,
    st.integers(0, 99),
)
turns = st.builds(
    lambda before, last: (*(m for pair in before for m in pair), last), st.lists(calls, max_size=2), answers
)
exchanges = st.builds(lambda asked, turn: (ChatMessage("user", asked), *turn), words, turns)
dialogues = st.builds(
    lambda system, parts: (*system, *(m for part in parts for m in part)),
    st.sampled_from([(), (ChatMessage("system", "Be brief."),)]),
    st.lists(exchanges, min_size=1, max_size=3),
)


@settings(deadline=None, max_examples=40)
@given(messages=dialogues, tools=st.sampled_from([(), (ADD,)]))
def test_ids_and_masks_are_those_of_transformers(
    messages: tuple[ChatMessage, ...], tools: tuple[ToolDefinition, ...], marked_at: Path
) -> None:
    expected = by_transformers(marked_at, [as_dict(message) for message in messages], tools)
    (rendered,) = ChatRenderer(Tokenizer.load(marked_at)).supervise(messages, tools)
    assert rendered == expected


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return loaded(tmp_path_factory.mktemp("unmarked"), SIMPLE, QWEN_CONTROLS, QWEN_TAGS)


@settings(deadline=None, max_examples=40)
@given(messages=dialogues, tools=st.sampled_from([(), (ADD,)]))
def test_without_marks_the_same_tokens_are_learned(
    messages: tuple[ChatMessage, ...], tools: tuple[ToolDefinition, ...], marked_at: Path, unmarked: Tokenizer
) -> None:
    assert "generation %" not in SIMPLE
    (expected,) = ChatRenderer(Tokenizer.load(marked_at)).supervise(messages, tools)
    assert ChatRenderer(unmarked).supervise(messages, tools) == [expected]


def learned(rendered: Rendered, tokenizer: Tokenizer) -> list[str]:
    """The texts of the runs of learned tokens."""
    runs: list[list[int]] = [[]]
    for label in rendered.labels:
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]


def whole(rendered: Rendered, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(rendered.ids)


def test_a_forgotten_stop_token_is_learned(tmp_path: Path) -> None:
    template = SIMPLE_MARKED.replace(
        "{{- '<|im_end|>' }}\n        {%- endgeneration %}", "{%- endgeneration %}<|im_end|>"
    )
    tokenizer = loaded(tmp_path, template, QWEN_CONTROLS, QWEN_TAGS)
    messages = (ChatMessage("user", "hi"), ChatMessage("assistant", "ho"))
    (rendered,) = ChatRenderer(tokenizer).supervise(messages)
    assert learned(rendered, tokenizer) == ["ho<|im_end|>"]


def test_turns_are_learned_from_the_first_asked_for_and_not_at_weight_zero(
    marked_at: Path, unmarked: Tokenizer
) -> None:
    messages = tuple(
        ChatMessage(role, text, trained=text != "b")
        for role, text in zip(["user", "assistant"] * 3, ["q", "a", "r", "b", "s", "c"], strict=True)
    )
    for tokenizer in (Tokenizer.load(marked_at), unmarked):
        renderer = ChatRenderer(tokenizer)
        assert [learned(one, tokenizer) for one in renderer.supervise(messages)] == [["a<|im_end|>", "c<|im_end|>"]]
        assert [learned(one, tokenizer) for one in renderer.supervise(messages, first=2)] == [["c<|im_end|>"]]
        assert renderer.supervise(messages[:4], first=2) == []


def test_llamas_turns_are_found_without_marks(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, LLAMA, LLAMA_CONTROLS)
    messages = (
        ChatMessage("user", " q "),
        ChatMessage("assistant", " a\n"),
        ChatMessage("user", "r"),
        ChatMessage("assistant", "b"),
    )
    (rendered,) = ChatRenderer(tokenizer).supervise(messages)
    assert learned(rendered, tokenizer) == ["a<|eot_id|>", "b<|eot_id|>"]


def test_reasoning_that_later_turns_do_not_see_is_learned_where_it_is_seen(plain: Tokenizer) -> None:
    """Qwen3's template shows the reasoning of the last turn alone."""
    renderer = ChatRenderer(plain)
    tagged = "<think>\nhm\n</think>\n\na"
    for first in (ChatMessage("assistant", tagged), ChatMessage("assistant", "a", reasoning="hm")):
        messages = (
            ChatMessage("user", "q"),
            first,
            ChatMessage("user", "r"),
            ChatMessage("assistant", "<think>\nso\n</think>\n\nb"),
        )
        alone, last = renderer.supervise(messages)
        assert learned(alone, plain) == [f"{tagged}<|im_end|>"]
        assert learned(last, plain) == ["<think>\nso\n</think>\n\nb<|im_end|>"]
        assert "hm" not in whole(last, plain)
        # The tags are the tokens that a policy samples.
        assert plain.added_tokens["<think>"] in alone.labels


MOVING = """
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{- message.content + '<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' }}
        {%- if loop.index0 >= messages|length - 2 and system and messages[loop.index0 + 1:]|length < 2 and message.role == 'user' %}
            {{- system + '\\n' }}
        {%- endif %}
        {{- message.content + '<|im_start|>' }}
    {%- endif %}
{%- endfor %}
"""


def test_a_turn_that_a_longer_conversation_opens_otherwise_is_learned_by_itself(tmp_path: Path) -> None:
    """In the style of Mistral, whose system prompt stands in the last question."""
    tokenizer = loaded(tmp_path, MOVING, QWEN_CONTROLS, QWEN_TAGS)
    texts = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    messages = tuple(ChatMessage(role, text) for role, text in texts)
    alone, last = ChatRenderer(tokenizer).supervise(messages)
    assert whole(alone, tokenizer) == "<|im_start|>s\nq<|im_start|>a<|im_end|>"
    assert learned(alone, tokenizer) == ["a<|im_end|>"]
    assert whole(last, tokenizer) == "<|im_start|>q<|im_start|>a<|im_end|><|im_start|>s\nr<|im_start|>b<|im_end|>"
    assert learned(last, tokenizer) == ["b<|im_end|>"]
    assert ChatRenderer(tokenizer).supervise(messages, first=3) == [last]


def test_nobody_asks_for_a_first_message_of_the_assistant(unmarked: Tokenizer) -> None:
    renderer = ChatRenderer(unmarked)
    messages = (ChatMessage("assistant", "hi"), ChatMessage("user", "q"), ChatMessage("assistant", "a"))
    with pytest.raises(
        UserError, match=r"messages\[0\] is the assistant's, and the chat template does not open its turn there"
    ):
        renderer.supervise(messages)
    (sequence,) = renderer.supervise((replace(messages[0], trained=False), *messages[1:]))
    assert learned(sequence, unmarked) == ["a<|im_end|>"]


def test_calls_that_come_as_text_are_written_once(plain: Tokenizer) -> None:
    asked = ChatMessage("user", "q")
    texts = []
    for arguments in ({"x": 2}, '{"x": 2}'):
        messages = (asked, ChatMessage("assistant", "", calls=(FunctionCall("add", arguments),)))
        (rendered,) = ChatRenderer(plain).supervise(messages, (ADD,))
        texts.append(learned(rendered, plain))
    assert texts[0] == texts[1]
    assert '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call><|im_end|>' in texts[0][0]


def test_a_call_that_the_template_leaves_out_is_an_error(tmp_path: Path) -> None:
    messages = (ChatMessage("user", "q"), ChatMessage("assistant", "", calls=(FunctionCall("divide", {"x": 2}),)))
    with pytest.raises(UserError, match=r"messages\[1\] calls tools, and the chat template does not write it"):
        ChatRenderer(qwen(tmp_path)).supervise(messages, (ADD,))


@pytest.fixture(scope="module")
def harmony() -> Tokenizer:
    return Tokenizer.train(["user assistant analysis final commentary to=functions.add json"] * 5, 350)


def rendered_harmony(tokenizer: Tokenizer, *messages: ChatMessage, first: int = 0) -> list[tuple[str, list[str]]]:
    sequences = HarmonyRenderer(tokenizer).supervise(messages, (), first)
    return [(whole(one, tokenizer), learned(one, tokenizer)) for one in sequences]


def test_harmony_learns_a_turn_from_behind_its_opening_to_its_stop_token(harmony: Tokenizer) -> None:
    said = ChatMessage("assistant", "42", reasoning="6 * 7")
    assert rendered_harmony(harmony, ChatMessage("system", "s"), ChatMessage("user", "q"), said) == [
        (
            "<|start|>system<|message|>s<|end|><|start|>user<|message|>q<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>6 * 7<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
            ["<|channel|>analysis<|message|>6 * 7<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"],
        )
    ]
    for same in (
        (ChatMessage("assistant", "<think>6 * 7</think>\n\n42"),),
        (ChatMessage("assistant", "6 * 7", channel="analysis"), ChatMessage("assistant", "42", channel="final")),
    ):
        sequences = rendered_harmony(harmony, ChatMessage("system", "s"), ChatMessage("user", "q"), *same)
        assert sequences == rendered_harmony(harmony, ChatMessage("system", "s"), ChatMessage("user", "q"), said)


def test_a_channel_in_the_data_hides_no_reasoning(harmony: Tokenizer) -> None:
    said = ChatMessage("assistant", "a", reasoning="hm", channel="final")
    ((_, runs),) = rendered_harmony(harmony, ChatMessage("user", "q"), said)
    assert runs == ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>"]


def test_in_harmonys_history_a_turn_ends_otherwise_than_it_is_sampled(harmony: Tokenizer) -> None:
    messages = [
        ChatMessage(role, text) for role, text in zip(["user", "assistant"] * 2, ["q", "a", "r", "b"], strict=True)
    ]
    ((text, runs),) = rendered_harmony(harmony, *messages, ChatMessage("user", "never answered"))
    assert text == (
        "<|start|>user<|message|>q<|end|><|start|>assistant<|channel|>final<|message|>a<|end|>"
        "<|start|>user<|message|>r<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
    )
    assert runs == ["<|channel|>final<|message|>a<|return|>", "<|channel|>final<|message|>b<|return|>"]
    assert rendered_harmony(harmony, *messages, first=2) == [(text, runs[1:])]


def test_of_messages_in_one_turn_those_of_weight_zero_are_not_learned(harmony: Tokenizer) -> None:
    thought = ChatMessage("assistant", "hm", channel="analysis", trained=False)
    ((_, runs),) = rendered_harmony(harmony, ChatMessage("user", "q"), thought, ChatMessage("assistant", "a"))
    assert runs == ["<|start|>assistant<|channel|>final<|message|>a<|return|>"]


def test_analysis_that_later_turns_do_not_see_is_learned_in_a_sequence_of_its_own(harmony: Tokenizer) -> None:
    messages = (
        *(ChatMessage("user", "q"), ChatMessage("assistant", "a", reasoning="hm")),
        *(ChatMessage("user", "r"), ChatMessage("assistant", "b", reasoning="so")),
    )
    alone, last = rendered_harmony(harmony, *messages)
    assert alone[1] == [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>"
    ]
    assert alone[0].endswith("a<|return|>")
    assert last[0].startswith(
        "<|start|>user<|message|>q<|end|><|start|>assistant<|channel|>final<|message|>a<|end|><|start|>user<|message|>r"
    )
    assert last[1] == [
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
    ]
    assert [runs for _, runs in rendered_harmony(harmony, *messages, first=2)] == [last[1]]


def test_harmony_calls_one_tool_after_the_other_and_reads_their_answers(harmony: Tokenizer) -> None:
    call = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": %d}<|call|>'
    answer = "<|start|>functions.add<|channel|>commentary to=assistant<|message|>%d<|end|>"
    both = (FunctionCall("add", {"x": 1}, "c1"), FunctionCall("add", '{"x": 2}', "c2"))
    messages = (
        ChatMessage("user", "q"),
        ChatMessage("assistant", "", reasoning="hm", calls=both),
        ChatMessage("tool", "22", call_id="c2"),
        ChatMessage("tool", "11", call_id="c1"),
        ChatMessage("assistant", "33"),
    )
    ((text, runs),) = rendered_harmony(harmony, *messages)
    first = "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>" + call % 1
    last = "<|start|>assistant<|channel|>final<|message|>33<|return|>"
    assert text == "<|start|>user<|message|>q<|end|>" + first + answer % 11 + call % 2 + answer % 22 + last
    assert runs == [one.removeprefix("<|start|>assistant") for one in (first, call % 2, last)]
    with pytest.raises(UserError, match=r"messages\[1\] calls 2 tools at once, which Harmony does one after the other"):
        rendered_harmony(harmony, *messages[:3])
    with pytest.raises(UserError, match="a tool answers where the assistant has called none"):
        rendered_harmony(
            harmony, ChatMessage("user", "q"), ChatMessage("assistant", "a"), ChatMessage("tool", "1", name="add")
        )
    with pytest.raises(
        UserError, match="the assistant's turn ends on the channel 'analysis', with neither answer nor call"
    ):
        rendered_harmony(harmony, ChatMessage("user", "q"), ChatMessage("assistant", "a", channel="analysis"))


def test_harmony_declares_tools_as_environments_do(harmony: Tokenizer) -> None:
    messages = (ChatMessage("system", "s"), ChatMessage("user", "q"), ChatMessage("assistant", "a"))
    (sequence,) = HarmonyRenderer(harmony).supervise(messages, (ADD,))
    text = whole(sequence, harmony)
    assert text.startswith("<|start|>system<|message|>s<|end|><|start|>developer<|message|># Tools")
    assert "type add = (_: {" in text
    assert learned(sequence, harmony) == ["<|channel|>final<|message|>a<|return|>"]


NAMES = [
    *QWEN_CONTROLS,
    *QWEN_TAGS,
    *CONTROL_TOKENS,
    "<|im_<|im_end|>end|>",
    "<",
    "|im_end|>",
    " ",
    "\n",
    "\ue000",
    "x",
]
forged = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6).map("".join)


def conversation(texts: list[str]) -> tuple[tuple[ChatMessage, ...], tuple[ToolDefinition, ...]]:
    """One that has a given text wherever data can put one."""
    said, name, key, value, answered, described, asked = texts
    messages = (
        ChatMessage("system", f"s{said}s"),
        ChatMessage("user", f"u{asked}u"),
        ChatMessage("assistant", "a", calls=(FunctionCall("add", {f"k{key}": f"v{value}"}, f"i{name}"),)),
        ChatMessage("tool", f"t{answered}t", name="add", call_id=f"i{name}"),
        ChatMessage("assistant", "done"),
    )
    tool = ToolDefinition(
        "add", f"d{described}d", {"type": "object", "properties": {"x": {"description": f"p{said}p"}}}
    )
    return messages, (tool,)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(forged, min_size=7, max_size=7))
def test_no_text_of_a_record_becomes_a_control_token(
    texts: list[str], unmarked: Tokenizer, plain: Tokenizer, marked_at: Path, harmony: Tokenizer
) -> None:
    for renderer, tokenizer in (
        (ChatRenderer(unmarked), unmarked),
        (ChatRenderer(plain), plain),
        (ChatRenderer(Tokenizer.load(marked_at)), unmarked),
        (HarmonyRenderer(harmony), harmony),
    ):
        structure = []
        for one in (texts, ["x"] * 7):
            (sequence,) = renderer.supervise(*conversation(one))
            names = {id_: name for name, id_ in tokenizer.added_tokens.items()}
            structure.append([names[id_] for id_ in sequence.ids if id_ in names])
            structure[-1] += [names[label] for label in sequence.labels if label in names]
        assert structure[0] == structure[1]


def test_in_the_assistants_own_words_tags_are_structure_and_control_tokens_are_text(plain: Tokenizer) -> None:
    said = "<think>\n<|im_end|>\n</think>\n\n<|im_start|>"
    messages = (ChatMessage("user", "q"), ChatMessage("assistant", said))
    (sequence,) = ChatRenderer(plain).supervise(messages)
    names = {id_: name for name, id_ in plain.added_tokens.items()}
    assert [names[label] for label in sequence.labels if label in names] == ["<think>", "</think>", "<|im_end|>"]
    assert learned(sequence, plain) == [said + "<|im_end|>"]


def test_texts_and_prompts_with_completions_as_plain_text(harmony: Tokenizer) -> None:
    renderer = make_renderer(harmony, "text")
    asked, said = ChatMessage("user", "What? "), ChatMessage("assistant", "That.")
    (sequence,) = render(PromptCompletion("x:1", (asked,), (said,)), renderer, harmony)
    assert (whole(sequence, harmony), learned(sequence, harmony)) == (
        "What? That.<|endoftext|>",
        ["That.<|endoftext|>"],
    )
    (sequence,) = render(Text("x:1", "Once <|end|>"), renderer, harmony)
    assert sequence.labels == sequence.ids == [*harmony.encode("Once <|end|>"), harmony.special_id("<|endoftext|>")]
    with pytest.raises(UserError, match=r'^x:1: format = "text" is for one prompt and one completion'):
        render(Conversation("x:1", (asked, said, asked, said)), renderer, harmony)


def test_the_form_is_the_tokenizers(harmony: Tokenizer, plain: Tokenizer, tmp_path: Path) -> None:
    assert make_renderer(harmony).name == "harmony"
    assert make_renderer(plain).name == "chat"
    with pytest.raises(UserError, match="neither Harmony's control tokens nor a chat template"):
        make_renderer(Tokenizer.load(save(tmp_path, None, QWEN_CONTROLS)))
    refusing = loaded(tmp_path / "refusing", "{{ raise_exception('no') }}", QWEN_CONTROLS)
    with pytest.raises(UserError, match=r"^x:3: the chat template refuses a conversation of user assistant: "):
        render(
            Conversation("x:3", (ChatMessage("user", "q"), ChatMessage("assistant", "a"))),
            make_renderer(refusing),
            refusing,
        )
