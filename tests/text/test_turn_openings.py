"""Openings of a turn, and the reasoning effort that they name."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import QWEN, QWEN_CONTROLS, QWEN_TAGS, qwen, save
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import Conversation, ReasoningEffort, Role, SystemContent
from openai_harmony import Message as ReferenceMessage
from text.conftest import ReferenceTokenizer

from nmoe.data.pairs import answer_pair, completion_pair
from nmoe.data.records import Preference
from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.renderers import IGNORED, ChatRenderer, HarmonyRenderer, Rendered
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

OPENS = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
# Qwen3-Thinking: the last turn is written with its reasoning, earlier ones without.
THINKING = QWEN.replace("{{- '<|im_start|>assistant\\n' }}{%- endif %}\n", OPENS + "{%- endif %}\n")
HEADER = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
CLOSES = "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}" + OPENS + "{%- endif %}"
CALLS = "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{%- endfor %}"
# DeepSeek-R1: no turn is written with its reasoning, the last one neither.
R1 = HEADER + "{{- m.content.split('</think>')[-1].lstrip('\\n') }}" + CALLS + CLOSES
# ChatML with an opened prompt, which writes what it is given.
PLAIN = HEADER + "{{- m.content }}" + CLOSES
TEMPLATES = {"thinking": THINKING, "r1": R1, "plain": PLAIN}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save(tmp_path_factory.mktemp(name), template, QWEN_CONTROLS, QWEN_TAGS)
        for name, template in TEMPLATES.items()
    }


def runs(rendered: Rendered, tokenizer: Tokenizer) -> list[tuple[list[int], str]]:
    """What is before each run of learned tokens, and the run."""
    starts = [
        place
        for place, label in enumerate(rendered.labels)
        if label != IGNORED and rendered.labels[place - 1] == IGNORED
    ]
    found = []
    for start in starts:
        end = next((place for place in range(start, len(rendered.ids)) if rendered.labels[place] == IGNORED), None)
        found.append((rendered.ids[:start], tokenizer.decode(rendered.ids[start:end])))
    return found


words = st.text(st.sampled_from('abé 你7.<>{}"'), max_size=9).map(lambda text: "w" + text.strip() + "w")
exchanges = st.lists(st.tuples(words, words, st.none() | words), min_size=1, max_size=3)


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(["thinking", "r1", "plain"]), exchanges=exchanges)
def test_each_turn_is_learned_once_behind_the_prompt_that_transformers_gives(
    name: str, exchanges: list[tuple[str, str, str | None]], directories: dict[str, Path]
) -> None:
    from transformers import AutoTokenizer

    tokenizer, theirs = Tokenizer.load(directories[name]), AutoTokenizer.from_pretrained(directories[name])
    messages: list[ChatMessage] = []
    history: list[dict[str, str]] = []
    wanted = []
    for asked, said, thought in exchanges:
        messages += [ChatMessage("user", asked), ChatMessage("assistant", said, reasoning=thought)]
        history.append({"role": "user", "content": asked})
        prompt = theirs.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
        wanted.append((prompt, f"{thought or ''}\n</think>\n\n{said}<|im_end|>"))
        # Templates take the reasoning inside the content; PLAIN keeps it there.
        history.append(
            {"role": "assistant", "content": said if thought is None else f"<think>\n{thought}\n</think>\n\n{said}"}
        )
    found = [run for one in ChatRenderer(tokenizer).supervise(tuple(messages)) for run in runs(one, tokenizer)]
    assert sorted(found) == sorted(wanted)


def test_calls_are_learned_behind_the_opening_too(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["r1"])
    call = FunctionCall("add", {"x": 1})
    messages = (
        ChatMessage("user", "q"),
        ChatMessage("assistant", "", reasoning="hm", calls=(call,)),
        ChatMessage("tool", "1"),
        ChatMessage("assistant", "a"),
    )
    found = [run for one in ChatRenderer(tokenizer).supervise(messages) for run in runs(one, tokenizer)]
    asked = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    calling = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    assert [(tokenizer.decode(before), said) for before, said in found] == [
        (f"{asked}<think>\n", f"hm\n</think>\n\n{calling}<|im_end|>"),
        (
            f"{asked}{calling}<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "\n</think>\n\na<|im_end|>",
        ),
    ]
    plain = Tokenizer.load(directories["plain"])  # it writes no calls
    with pytest.raises(UserError, match=r"messages\[1\]"):
        ChatRenderer(plain).supervise(messages[:2])


def test_what_is_learned_is_read_as_well_formed(directories: dict[str, Path]) -> None:
    for directory in directories.values():
        renderer = ChatRenderer(Tokenizer.load(directory))
        messages = (ChatMessage("user", "q"), ChatMessage("assistant", "a", reasoning="hm"))
        (sequence,) = renderer.supervise(messages)
        turn = [label for label in sequence.labels if label != IGNORED]
        while turn[-1] not in renderer.stop_ids:  # the line break behind it
            turn.pop()
        for said in (turn, renderer.completion_ids("hm", "a")):
            answer = renderer.parse([said])
            assert (answer.text, answer.well_formed, answer.structure, answer.reasoned) == ("a", True, 1.0, True)
        # What opens the reasoning again, and what never closes it, has not the form.
        tokenizer = Tokenizer.load(directory)
        for text in ("<think>hm</think>a", "a"):
            ids = [*tokenizer.encode(text, control_tokens=True), renderer.stop_ids[0]]
            answer = renderer.parse([ids])
            assert not answer.well_formed
            assert answer.structure < 1


def test_pairs_have_one_sequence_a_side(directories: dict[str, Path]) -> None:
    for directory in directories.values():
        tokenizer = Tokenizer.load(directory)
        renderer = ChatRenderer(tokenizer)
        record = Preference(
            "x:1", (ChatMessage("user", "q"),), (ChatMessage("assistant", "a"),), (ChatMessage("assistant", "b"),), ()
        )
        prompt = renderer.prompt_ids([Message("user", "q")])
        for pair in (completion_pair(record, renderer), answer_pair(record, renderer)):
            assert pair is not None
            for side, said in ((pair.chosen, "a"), (pair.rejected, "b")):
                assert runs(side, tokenizer) == [(prompt, f"\n</think>\n\n{said}<|im_end|>")]


IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
USER = Message("user", "What is 6 * 7?")
ADD = ToolDefinition("add", "Adds.", None)


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_harmony_s_system_message_is_the_reference_s(effort: str, reference: ReferenceTokenizer) -> None:
    content = SystemContent.new().with_reasoning_effort(ReasoningEffort(effort.capitalize()))
    assert f"{content.model_identity}\nKnowledge cutoff: {content.knowledge_cutoff}" == IDENTITY
    conversation = Conversation.from_messages(
        [
            ReferenceMessage.from_role_and_content(Role.SYSTEM, content),
            ReferenceMessage.from_role_and_content(Role.USER, USER.content),
        ]
    )
    expected = reference.encoding.render_conversation_for_completion(conversation, Role.ASSISTANT)
    renderer = HarmonyRenderer(reference, (), effort)  # type: ignore[arg-type]
    assert renderer.prompt_ids([Message("system", IDENTITY), USER]) == expected


def test_without_a_system_message_there_is_one_and_tools_are_told_their_channel(reference: ReferenceTokenizer) -> None:
    text = reference.decode(HarmonyRenderer(reference, (ADD,), "high").prompt_ids([USER]))
    assert text.startswith(
        "<|start|>system<|message|>Reasoning: high\n\n# Valid channels: analysis, commentary, final. Channel must be included "
        "for every message.\nCalls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer"
    )
    plain = reference.decode(HarmonyRenderer(reference, (ADD,)).prompt_ids([USER]))
    assert plain.startswith("<|start|>developer"), "no effort, no system message"


def test_a_chat_template_is_given_it_or_refuses(tmp_path: Path) -> None:
    knows = "{% if reasoning_effort %}Effort: {{ reasoning_effort }}\n{% endif %}"
    tokenizer = qwen(tmp_path, knows + QWEN)
    plain = tokenizer.decode(ChatRenderer(tokenizer).prompt_ids([USER]))
    asked = tokenizer.decode(ChatRenderer(tokenizer, (), "low").prompt_ids([USER]))
    assert asked == f"Effort: low\n{plain}"
    with pytest.raises(UserError, match='reasoning_effort = "low": the chat template has no `reasoning_effort`'):
        ChatRenderer(qwen(tmp_path / "other"), (), "low")
