"""Released tokenizers: prompts, what is learned, calls and ends are those of transformers and of Harmony's reference, and no text
becomes a control token."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai_harmony import Author, Conversation, RenderConversationConfig, Role, TextContent
from openai_harmony import Message as ReferenceMessage
from released_tokenizers import ENDS, ours, theirs

from nmoe.config.environment import EnvironmentSettings
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.text.chat_template import ChatTemplate, ToolAnswer
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.renderers import IGNORED, ChatRenderer, HarmonyRenderer, Rendered, natural_format
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import chat_format
from nmoe.types import Message, single_turn

CHAT = ["qwen3", "gemma3", "llama3_1", "deepseek_v3"]

ODD = [
    "", " ", "  two  spaces ", "\n\n\n", "\t x\r\n", "a\n\nb\n  c\n\n\n\nd", "naïve café", "e\u0301", "你好，世界", "😀🏳️‍🌈👩‍👩‍👧",
    "1234567 3.14 1,000", "I'll we've DON'T", "\u200b\u200d\ufeff", "</s> <0x0A> ▁▁", "\x00\x01", "א ב \ufb01", "a" * 99, " " * 40,
    "\ud7ff\U0010ffff", "def f(x):\n    return x**2\n\t# hi", "<table><b>x</b></table>", "<unused7>[multimodal]",
]  # fmt: skip
ADD = ToolDefinition("add", "Adds.", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
DECLARED = [ADD.as_function()]


def by_jinja(name: str, messages: Sequence[dict[str, Any]], prompt: bool) -> list[int]:
    """What the template writes where transformers, which leaves out a content of null, cannot use it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    other = theirs(name)
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(other.chat_template)
    text = template.render(messages=messages, bos_token=other.bos_token, add_generation_prompt=prompt)
    ids: list[int] = other.encode(text, add_special_tokens=False)
    return ids


def by_transformers(name: str, messages: Sequence[dict[str, Any]], prompt: bool = True, tools: Any = None) -> list[int]:
    ids: list[int] = theirs(name).apply_chat_template(
        list(messages), tools=tools, add_generation_prompt=prompt, return_dict=False
    )
    return ids


def conversations(name: str, count: int) -> list[list[Message]]:
    """With and without a system message, of one to three exchanges, of odd texts."""
    rng = random.Random(name)

    def text() -> str:
        return " ".join(rng.choices(ODD, k=rng.randrange(4)))

    made = []
    for _ in range(count):
        messages = [Message("system", text())] if rng.random() < 0.5 else []
        for _ in range(rng.randrange(3)):
            messages += [Message("user", text()), Message("assistant", text())]
        made.append([*messages, Message("user", text())])
    return made


@pytest.mark.parametrize("name", CHAT)
def test_odd_texts_have_the_ids_of_transformers(name: str) -> None:
    tokenizer, other = ours(name), theirs(name)
    assert tokenizer.vocab_size == len(other)
    for text in ODD:
        ids = other.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == other.decode(ids, clean_up_tokenization_spaces=False)
    barred = [one for one in tokenizer.added_tokens if "|" in one or "｜" in one]
    assert not set(tokenizer.encode("".join(barred))) & {*tokenizer.added_tokens.values()}
    named = "".join(f"{control}\n\nx " for control in other.all_special_tokens)
    assert tokenizer.encode(named, control_tokens=True) == other.encode(named, add_special_tokens=False)
    assert [*tokenizer.opening_ids] == other.encode("")


@pytest.mark.parametrize("name", CHAT)
def test_prompts_are_those_of_transformers(name: str) -> None:
    renderer = ChatRenderer(ours(name))
    for messages in conversations(name, 40):
        dicts = [{"role": one.role, "content": one.content} for one in messages]
        assert renderer.prompt_ids(messages) == by_transformers(name, dicts)


@pytest.mark.parametrize("name", CHAT)
def test_reasoning_in_an_earlier_turn_is_treated_as_the_template_does(name: str) -> None:
    """Qwen3's template drops it; the others know no reasoning and keep what stands there."""
    said = Message("assistant", "<think>\nbecause\n</think>\n\n42")
    messages = [Message("user", "6 * 7?"), said, Message("user", "sure?")]
    prompt = ChatRenderer(ours(name)).prompt_ids(messages)
    assert prompt == by_transformers(name, [{"role": one.role, "content": one.content} for one in messages])
    assert ("because" in ours(name).decode(prompt)) == (name != "qwen3")


@pytest.mark.parametrize("name", CHAT)
def test_the_ends_of_a_turn_are_those_of_tokenizer_and_generation_config(name: str) -> None:
    named = ENDS[name] if isinstance(ENDS[name], list) else [ENDS[name]]
    assert ours(name).end_ids == tuple(dict.fromkeys([theirs(name).eos_token_id, *named]))  # type: ignore[misc]
    assert ChatRenderer(ours(name)).stop_ids == ours(name).end_ids


def runs(rendered: Rendered) -> list[tuple[list[int], list[int]]]:
    """What is before each run of learned tokens, and the run."""
    edges = [
        place
        for place in range(1, len(rendered.ids) + 1)
        if place == len(rendered.ids) or (rendered.labels[place] == IGNORED) != (rendered.labels[place - 1] == IGNORED)
    ]
    starts = [place for place in edges[:-1] if rendered.labels[place] != IGNORED]
    return [(rendered.ids[:start], rendered.ids[start : min(e for e in edges if e > start)]) for start in starts]


def as_dict(message: ChatMessage, wire: bool = False) -> dict[str, Any]:
    """As transformers' documentation has it, or as it is on the wire of an API: arguments as text, and no content beside calls."""
    taken: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        taken["reasoning_content"] = message.reasoning
    if message.calls:
        taken["content"] = message.content or (None if wire else "")
        taken["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False) if wire else call.arguments,
                },
            }
            for call in message.calls
        ]
    return taken


@pytest.mark.parametrize("name", CHAT)
def test_turns_are_learned_up_to_their_end_behind_what_transformers_asks_with(name: str) -> None:
    tokenizer = ours(name)
    for messages in conversations(name, 25):
        # A turn that begins with a line break is joined with the opening's in one text, and never as it is sampled.
        chat = [ChatMessage(one.role, one.content.strip()) for one in messages]
        chat.append(ChatMessage("assistant", f"w{messages[0].content}w"))
        (rendered,) = ChatRenderer(tokenizer).supervise(tuple(chat))
        dicts = [as_dict(one) for one in chat]
        assert rendered.ids == by_transformers(name, dicts, prompt=False)
        places = [index for index, one in enumerate(chat) if one.role == "assistant"]
        found = runs(rendered)
        assert [before for before, _ in found] == [by_transformers(name, dicts[:index]) for index in places]
        for (_, turn), index in zip(found, places, strict=True):
            assert turn[-1] in tokenizer.end_ids
            assert not set(turn[:-1]) & set(tokenizer.end_ids)
            assert tokenizer.decode(turn[:-1]).endswith(tokenizer.decode(tokenizer.encode(chat[index].content)))


def test_reasoning_is_learned_where_qwen_shows_it() -> None:
    tokenizer = ours("qwen3")
    messages = (
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b", reasoning="hm"),
        ChatMessage("user", "c"),
        ChatMessage("assistant", "d", reasoning="so"),
    )
    alone, last = ChatRenderer(tokenizer).supervise(messages)
    dicts = [as_dict(one) for one in messages]
    assert alone.ids == by_transformers("qwen3", dicts[:2], prompt=False)
    assert last.ids == by_transformers("qwen3", dicts, prompt=False)
    assert [tokenizer.decode(turn) for one in (alone, last) for _, turn in runs(one)] == [
        "<think>\nhm\n</think>\n\nb<|im_end|>",
        "<think>\nso\n</think>\n\nd<|im_end|>",
    ]


CALLING = (
    ChatMessage("user", "1 + 2, twice"),
    ChatMessage("assistant", "", calls=(FunctionCall("add", {"x": 1}), FunctionCall("add", {"x": "你"}))),
    ChatMessage("tool", "3", name="add"),
    ChatMessage("tool", "4\n\nfive", name="add"),
    ChatMessage("assistant", "3 and 4"),
)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_calls_and_their_answers_are_those_of_the_template(name: str) -> None:
    wire = name == "deepseek_v3"  # whose template takes calls as an API writes them
    tokenizer, dicts = ours(name), [as_dict(one, wire) for one in CALLING]

    def expected(count: int, prompt: bool = True) -> list[int]:
        return by_jinja(name, dicts[:count], prompt) if wire else by_transformers(name, dicts[:count], prompt, DECLARED)

    (rendered,) = ChatRenderer(tokenizer).supervise(CALLING, (ADD,))
    assert rendered.ids == expected(5, prompt=False)
    (asked, call), (answered, said) = runs(rendered)
    assert (asked, answered) == (expected(1), expected(4))
    end = tokenizer.decode([tokenizer.end_ids[0]])
    assert tokenizer.decode(said).endswith(f"3 and 4{end}")
    assert tokenizer.decode(call).count("add") == 2
    assert tokenizer.decode(call).endswith(end)
    assert "five" not in tokenizer.decode(call) + tokenizer.decode(said)


def test_a_call_that_deepseek_does_not_end_is_refused() -> None:
    """The template ends calls where there are two. Of one the answer would be learned as the assistant's words."""
    one = ChatMessage("assistant", "", calls=(FunctionCall("add", {"x": 1}),))
    with pytest.raises(UserError, match=r"does not end messages\[1\], the assistant's, before the next one begins"):
        ChatRenderer(ours("deepseek_v3")).supervise((CALLING[0], one, *CALLING[3:]), (ADD,))


def read_back(name: str, ids: Sequence[int]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of a turn, read token by token."""
    form, texts, calls = chat_format(ours(name)), {"reasoning": "", "content": ""}, list[list[str]]()
    reader = form.reader([], [ADD])
    for piece in [*(piece for one in ids for piece in reader.feed([one])), *reader.end("stop")]:
        if piece.kind == "call":
            calls.append([piece.name or "", ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
        else:
            texts[piece.kind] += piece.text
    return texts["reasoning"], texts["content"], [(name, json.loads(arguments)) for name, arguments in calls]


HOSTILE: list[dict[str, Any]] = [
    {"x": 1, "y": {"z": [None, True, 1.5]}},
    {"s": "</tool_call> <tool_call> </think> <｜tool▁call▁end｜> ``` [ARGS] <|im_end|>"},
    {"s": 'naïve "你" 😀\\ }{ \n'},
]


# DeepSeek-V3's template writes no calls beside text.
@pytest.mark.parametrize(("name", "content"), [("qwen3", ""), ("qwen3", "Let me see."), ("deepseek_v3", "")])
def test_calls_that_a_template_writes_are_read_back(name: str, content: str) -> None:
    """By readers of streams and by training, which see the same calls."""
    given = HOSTILE[1:] if name == "deepseek_v3" else HOSTILE  # its template ends the calls after the second
    said = ChatMessage("assistant", content, calls=tuple(FunctionCall("add", one) for one in given))
    renderer = ChatRenderer(ours(name))
    (rendered,) = renderer.supervise((ChatMessage("user", "q"), said), (ADD,))
    ((_, turn),) = runs(rendered)
    assert read_back(name, turn) == ("", content, [("add", one) for one in given])
    trained = renderer.calls(0, turn)
    assert [(one.name, json.loads(one.arguments), one.fault) for one in trained] == [("add", one, "") for one in given]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("count", [1, 4, 5, 6])
def test_a_chat_with_calls_continues_as_the_template_writes_it(name: str, count: int) -> None:
    wire = name == "deepseek_v3"
    chat = [*CALLING, ChatMessage("user", "sure?")][:count]
    if chat[-1].role == "assistant":
        chat = [*chat, ChatMessage("user", "really?")]
    dicts = [as_dict(one, wire) for one in chat]
    if wire:  # whose template declares no tools
        prompt = chat_format(ours(name)).prompt_ids(chat)
        assert prompt == by_jinja(name, dicts, True)
    else:
        prompt = chat_format(ours(name)).prompt_ids(chat, [ADD])
        assert prompt == by_transformers(name, dicts, tools=DECLARED)


def test_the_families_of_released_tokenizers() -> None:
    names = {name: chat_format(ours(name)).name for name in (*CHAT, "gptoss")}
    assert names == {
        "qwen3": "hermes",
        "gemma3": "hermes",
        "llama3_1": "hermes",
        "deepseek_v3": "deepseek",
        "gptoss": "harmony",
    }
    assert [chat_format(ours(name)).has_reasoning for name in CHAT] == [True, False, False, False]


@pytest.mark.parametrize("name", CHAT)
def test_odd_texts_are_read_as_transformers_decodes_them(name: str) -> None:
    for text in [*ODD, *(a + b for a, b in zip(ODD, ODD[5:], strict=False))]:
        ids = ours(name).encode(text)
        assert read_back(name, ids) == ("", theirs(name).decode(ids, clean_up_tokenization_spaces=False), [])


@pytest.mark.parametrize("name", ["gemma3", "llama3_1"])
def test_templates_without_calls_say_so(name: str) -> None:
    with pytest.raises(UserError, match=r"must alternate|calls tools, and the chat template does not write it"):
        ChatRenderer(ours(name)).supervise(CALLING, (ADD,))


def test_tools_that_the_prompt_does_not_show_are_refused() -> None:
    asked = Message("user", "1 + 2?")
    assert ChatRenderer(ours("qwen3"), [ADD]).prompt_ids([asked]) == by_transformers(
        "qwen3", [{"role": "user", "content": asked.content}], tools=DECLARED
    )
    for name in ("llama3_1", "deepseek_v3"):
        renderer = ChatRenderer(ours(name), [ADD])
        with pytest.raises(UserError, match="does not declare tools, so the policy cannot know add; describe each by"):
            renderer.prompt_ids([asked])
        assert renderer.prompt_ids([Message("system", "Call add.")])
    with pytest.raises(UserError, match="must alternate"):
        ChatRenderer(ours("gemma3"), [ADD])


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "deepseek_v3"])
def test_a_round_of_calls_continues_as_the_whole_conversation_is_written(name: str) -> None:
    tokenizer = ours(name)
    template = ChatTemplate(tokenizer, [ADD])
    messages = [Message("system", "Call add."), Message("user", "1 + 2?")]
    turn = "<think>\nhm\n</think>\n\nlet me"
    answers = [ToolAnswer("add", "3", "0/0"), ToolAnswer("add", "a\n\nb", "0/1")]
    ids = [
        *template.prompt_ids(messages),
        *template.completion_ids(turn),
        *template.continuation_ids(messages, [answers]),
    ]
    whole = [{"role": one.role, "content": one.content} for one in messages]
    whole += [{"role": "assistant", "content": turn}, *({"role": "tool", "content": one.content} for one in answers)]
    assert tokenizer.decode(ids) == tokenizer.decode(by_transformers(name, whole, tools=DECLARED))


@pytest.mark.parametrize("thinks", [True, False])
def test_arguments_of_a_template_are_those_of_transformers(thinks: bool) -> None:
    table = {
        "env_id": "e",
        "task_pool": {"type": "generated", "task_type": "sort", "difficulty": [4, 4]},
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    environment = Environment.from_settings(EnvironmentSettings.model_validate(table), ours("qwen3"))
    problem = environment.pool.order.at(0)
    asked = [{"role": "user", "content": problem.question}]
    prompt = environment.prompts.ids(problem)
    assert prompt == theirs("qwen3").apply_chat_template(
        asked, add_generation_prompt=True, return_dict=False, enable_thinking=thinks
    )
    said = ours("qwen3").decode(prompt)
    assert said.endswith("<|im_start|>assistant\n" + ("" if thinks else "<think>\n\n</think>\n\n"))
    # An answer without reasoning is well-formed, and graded, either way.
    ids = [*ours("qwen3").encode(problem.gold), ours("qwen3").end_ids[0]]
    assert asyncio.run(environment.grader.grade(problem, single_turn(ids), 64)).score == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enable_thinkin": False}, "chat_template_kwargs.enable_thinkin: the chat template has no such name"),
        ({"messages": []}, "chat_template_kwargs.messages: the template is given it already"),
        ({"reasoning_effort": "low"}, "chat_template_kwargs.reasoning_effort: the template is given it already"),
    ],
)
def test_arguments_that_a_template_does_not_have_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        ChatTemplate(ours("qwen3"), arguments=arguments)


def test_arguments_of_a_template_are_refused_beside_another_format() -> None:
    table = {
        "env_id": "e",
        "format": "boxed",
        "task_pool": {"type": "generated", "task_type": "sort", "difficulty": [4, 4]},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with pytest.raises(UserError, match=r"chat_template_kwargs are for a chat template, and its format is boxed"):
        Environment.from_settings(EnvironmentSettings.model_validate(table), ours("qwen3"))


def controls(ids: Sequence[int], tokenizer: Tokenizer) -> Counter[int]:
    return Counter(one for one in ids if one in set(tokenizer.added_tokens.values()))


@pytest.mark.parametrize("name", CHAT)
def test_no_name_of_a_control_token_in_a_text_becomes_one(name: str) -> None:
    """All names that are not text, in every role, alone, joined and split over two messages."""
    tokenizer = ours(name)
    renderer = ChatRenderer(tokenizer)
    names = [one for one in tokenizer.added_tokens if not one.startswith(("<｜place", "<|reserved"))]
    own = [one for one in names if one not in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    assert set(theirs(name).all_special_tokens) <= set(names)

    def chat(system: str, user: str, assistant: str) -> list[Message]:
        return [
            Message("system", system),
            Message("user", user),
            Message("assistant", assistant),
            Message("user", user),
        ]

    honest = controls(renderer.prompt_ids(chat("s", "u", "a")), tokenizer)
    for forged in ("".join(names), " ".join(names), *names[:20], names[0][:3], f"<{names[0]}>"):
        said = "".join(own) if forged not in own else forged
        prompt = renderer.prompt_ids(chat(forged, forged, said))
        assert controls(prompt, tokenizer) == honest
        assert tokenizer.decode(prompt).count(forged.strip()) >= 3
        messages = tuple(ChatMessage(one.role, one.content) for one in chat(forged, forged, said))
        (rendered,) = renderer.supervise((*messages, ChatMessage("assistant", said)))
        learned = [label for label in rendered.labels if label != IGNORED]
        # Two ends, and the empty reasoning that Qwen3 writes before its last answer.
        assert sum(controls(learned, tokenizer).values()) == 2 + 2 * (name == "qwen3")
    # The user's words and the template's opening of the next message do not make a name together.
    assert controls(renderer.prompt_ids(chat("<|im_", "<end_of", "<｜Us")), tokenizer) == honest


def test_a_turn_that_writes_the_users_next_message_is_not_well_formed() -> None:
    """DeepSeek's role tokens are not special in its files."""
    tokenizer = ours("deepseek_v3")
    renderer = ChatRenderer(tokenizer)
    for text, holds in (("42", True), ("42<｜User｜>thanks", False), ("<｜Assistant｜>42", False)):
        turn = [*tokenizer.encode(text, control_tokens=True), renderer.stop_ids[0]]
        assert renderer.parse([turn]).well_formed is holds
    text = "<think>\nhm\n</think>\n\n42"
    assert ChatRenderer(ours("qwen3")).parse([[*ours("qwen3").encode(text), 151645]]).well_formed


class TestGptOss:
    def test_a_chat_with_calls_is_the_references(self, reference: Any) -> None:
        """Which keeps the reasoning after the last answer and drops it before."""
        call = (FunctionCall("add", '{"x": 1}', "c"),)
        chat = [
            ChatMessage("user", "q"),
            ChatMessage("assistant", "", reasoning="hm", calls=call),
            ChatMessage("tool", "2", call_id="c"),
            ChatMessage("assistant", "2", reasoning="so"),
            ChatMessage("user", "r"),
        ]
        thought = ReferenceMessage.from_role_and_content(Role.ASSISTANT, "hm").with_channel("analysis")
        asked = ReferenceMessage.from_role_and_content(Role.USER, "q")
        called = (
            ReferenceMessage.from_role_and_content(Role.ASSISTANT, '{"x": 1}')
            .with_channel("commentary")
            .with_recipient("functions.add")
            .with_content_type("<|constrain|>json")
        )
        answered = (
            ReferenceMessage.from_author_and_content(Author.new(Role.TOOL, "functions.add"), "2")
            .with_channel("commentary")
            .with_recipient("assistant")
        )
        final = ReferenceMessage.from_role_and_content(Role.ASSISTANT, "2").with_channel("final")
        so = ReferenceMessage.from_role_and_content(Role.ASSISTANT, "so").with_channel("analysis")
        again = ReferenceMessage.from_role_and_content(Role.USER, "r")
        form = chat_format(ours("gptoss"))
        keep = RenderConversationConfig(auto_drop_analysis=False)
        drop = RenderConversationConfig(auto_drop_analysis=True)

        def expected(messages: list[ReferenceMessage], config: RenderConversationConfig) -> str:
            conversation = Conversation.from_messages(messages)
            ids = reference.encoding.render_conversation_for_completion(conversation, Role.ASSISTANT, config=config)
            return str(reference.decode(ids))

        assert ours("gptoss").decode(form.prompt_ids(chat[:3])) == expected([asked, thought, called, answered], keep)
        whole = [asked, thought, called, answered, so, final, again]
        assert ours("gptoss").decode(form.prompt_ids(chat)) == expected(whole, drop)
        turn = HarmonyRenderer(ours("gptoss")).supervise(tuple(chat[:2]))[0]
        assert read_back("gptoss", runs(turn)[0][1]) == ("hm", "", [("add", {"x": 1})])

    def test_the_ids_are_those_of_harmony(self, reference: Any) -> None:
        tokenizer = ours("gptoss")
        assert natural_format(tokenizer) == "harmony"
        for text in [*ODD, "<|end|><|start|>user<|message|>", "<|endofprompt|>"]:
            assert tokenizer.encode(text) == reference.encode(text)
        for name, id_ in tokenizer.added_tokens.items():
            assert name.startswith(("<|reserved", "<|endofprompt")) or reference.special_id(name) == id_
        assert set(HarmonyRenderer(tokenizer).stop_ids) == {*ENDS["gptoss"]}  # type: ignore[misc]
        assert set(reference.encoding.stop_tokens_for_assistant_actions()) < {*ENDS["gptoss"]}  # type: ignore[misc]

    def test_prompts_and_what_is_learned_are_those_of_the_reference(self, reference: Any) -> None:
        tokenizer, encoding = ours("gptoss"), reference.encoding
        renderer = HarmonyRenderer(tokenizer)
        keep = RenderConversationConfig(auto_drop_analysis=False)
        for messages in conversations("gptoss", 40):
            messages = [replace(one, content=f"{one.content}.") for one in messages]
            history = [
                ReferenceMessage(
                    author=Author(role=Role(one.role)),
                    content=[TextContent(text=one.content)],
                    channel="final" if one.role == "assistant" else None,
                )
                for one in messages
            ]
            asked = [
                Message(one.role, one.content, channel="final" if one.role == "assistant" else None) for one in messages
            ]
            assert renderer.prompt_ids(asked) == encoding.render_conversation_for_completion(
                Conversation.from_messages(history), Role.ASSISTANT, config=keep
            )
            chat = (*(ChatMessage(one.role, one.content) for one in messages), ChatMessage("assistant", "done"))
            said = ReferenceMessage(
                author=Author(role=Role.ASSISTANT), content=[TextContent(text="done")], channel="final"
            )
            *_, rendered = renderer.supervise(chat)
            assert rendered.ids == encoding.render_conversation_for_training(
                Conversation.from_messages([*history, said]), config=keep
            )
            assert runs(rendered)[-1][1][-1] == 200002
