"""What Harmony learns of a record, against the reference's rendering for training on the o200k_harmony vocabulary."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import Author, Conversation, RenderConversationConfig, Role, TextContent
from openai_harmony import Message as ReferenceMessage

from nmoe.text.conversation import ChatMessage, FunctionCall
from nmoe.text.renderers import IGNORED, HarmonyRenderer

contents = st.text(st.sampled_from("ab é<|>end7"), min_size=1, max_size=8).map(lambda text: f"w{text}w")


def spoken(content: str, channel: str, **more: str | None) -> ReferenceMessage:
    return ReferenceMessage(
        author=Author(role=Role.ASSISTANT), content=[TextContent(text=content)], channel=channel, **more
    )


def other(role: Role, content: str, name: str | None = None, **more: str) -> ReferenceMessage:
    return ReferenceMessage(author=Author(role=role, name=name), content=[TextContent(text=content)], **more)


@given(asked=contents, first=contents, second=contents, thought=contents, answered=contents, calls=st.booleans())
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
