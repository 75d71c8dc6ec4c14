"""Which records are held out: whole prompts, by their hash, near the share that was asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nmoe.data.held_out import held_out, prompt_of
from nmoe.data.records import Conversation, PromptCompletion, Text
from nmoe.text.conversation import ChatMessage

ASKED, SAID = ChatMessage("user", "6 * 7?"), ChatMessage("assistant", "42")


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40), st.floats(0.01, 0.9), st.integers(0, 3))
def test_prompts_are_taken_whole(prompts: list[str], share: float, seed: int) -> None:
    drawn = held_out(prompts, share, seed)
    of_drawn, others = (
        {prompts[place] for place in range(len(prompts)) if (place in drawn) == wanted} for wanted in (1, 0)
    )
    assert not of_drawn & others
    wanted = max(1, round(share * len(prompts)))
    smallest = min(map(prompts.count, prompts))
    assert len(drawn) <= max(wanted, smallest)
    assert bool(drawn) == (len(set(prompts)) > 1 or wanted == len(prompts))
    assert drawn == held_out(prompts, share, seed)


def test_the_seed_decides_and_a_record_more_moves_few() -> None:
    prompts = [str(number) for number in range(200)]
    first = held_out(prompts, 0.1, 0)
    assert len(first) == 20
    assert len(first & held_out(prompts, 0.1, 1)) < 10
    assert len(first & held_out([*prompts, "more"], 0.1, 0)) >= 19


def test_what_a_record_asks() -> None:
    asked = prompt_of(PromptCompletion("1", (ASKED,), (SAID,)))
    assert prompt_of(Conversation("2", (ASKED, SAID))) == asked
    assert prompt_of(Conversation("3", (ASKED, ChatMessage("assistant", "41"), ASKED, SAID))) == asked
    assert prompt_of(PromptCompletion("4", (ChatMessage("user", " 6 * 7? "),), (SAID,))) == asked
    assert prompt_of(Conversation("5", (ChatMessage("system", "Be brief."), ASKED, SAID))) != asked
    assert prompt_of(Text("6", "Once")) == "Once"
    # Greetings by the assistant are no prompt that conversations share.
    greeting = ChatMessage("assistant", "Hello!")
    assert prompt_of(Conversation("7", (greeting, ASKED, SAID))) != prompt_of(Conversation("8", (greeting, ASKED)))
