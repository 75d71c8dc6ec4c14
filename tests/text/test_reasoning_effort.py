"""The reasoning effort in prompts: openai-harmony's own system message, and what a chat template makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import QWEN, qwen
from openai_harmony import Conversation, ReasoningEffort, Role, SystemContent
from openai_harmony import Message as ReferenceMessage
from text.conftest import ReferenceTokenizer

from nmoe.errors import UserError
from nmoe.text.conversation import ToolDefinition
from nmoe.text.renderers import ChatRenderer, HarmonyRenderer
from nmoe.types import Message

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
