"""Which records are held out: whole prompts, by their hash, near the share that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.commands import SFTConfig
from nmoe.config.loader import load_run_with
from nmoe.data.held_out import held_out, prompt_of, refuse_empty
from nmoe.data.records import Conversation, PromptCompletion, Text
from nmoe.errors import UserError
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


def test_a_number_of_records_is_held_out_as_a_share_of_as_many_is() -> None:
    prompts = [str(number) for number in range(200)]
    assert held_out(prompts, 16, 3) == held_out(prompts, 0.08, 3)
    assert len(held_out(prompts, 16, 3)) == 16
    assert len(held_out(prompts, 1, 3)) == 1
    assert len(held_out([f"{number % 10}" for number in range(200)], 30, 3)) == 20, "whole prompts, of 20 records each"
    with pytest.raises(UserError, match="of 200 records 200 held out leaves none to train on"):
        refuse_empty("records", 200, len(held_out(prompts, 200, 3)), 200)


def test_what_is_neither_a_share_nor_a_number_is_refused(tmp_path: Path) -> None:
    records = {"path": "train.jsonl", "held_out": 1.5}
    tables: dict[str, Any] = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "m"},
        "records": records,
        "eval": [{"every_steps": 1}],
    }
    with pytest.raises(
        UserError, match=r"\[records\] held_out = 1.5: is neither a share, below 1, nor a number of records"
    ):
        load_run_with(None, SFTConfig, tables, "sft.toml", "sft")
    tables["records"] = {**records, "held_out": 16}
    assert load_run_with(None, SFTConfig, tables, "sft.toml", "sft").records.held_out == 16


def test_what_a_record_asks() -> None:
    asked = prompt_of(PromptCompletion("1", (ASKED,), (SAID,)))
    assert prompt_of(Conversation("2", (ASKED, SAID))) == asked
    assert prompt_of(Conversation("3", (ASKED, ChatMessage("assistant", "41"), ASKED, SAID))) == asked
    assert prompt_of(PromptCompletion("4", (ChatMessage("user", " 6 *\u00a0\n7? "),), (SAID,))) == asked
    assert prompt_of(Conversation("5", (ChatMessage("system", "Be brief."), ASKED, SAID))) == asked
    assert prompt_of(Conversation("6", (ChatMessage("user", "\uff16 * 7?"), SAID))) == asked, "a wide 6"
    assert prompt_of(Text("7", "6 * 7?")) == asked
    # A greeting by the assistant is no answer.
    assert prompt_of(Conversation("8", (ChatMessage("assistant", "Hello!"), ASKED, SAID))) == asked
    # A prompt of several turns asks in all of them; without a turn of the user's, what is said is the question.
    turns = (ASKED, SAID, ChatMessage("user", "And 8 * 7?"))
    assert prompt_of(PromptCompletion("9", turns, (SAID,))) == f"{asked}\x1eand 8 * 7?"
    assert prompt_of(Conversation("10", (SAID, SAID))) == "42\x1e42"
    assert prompt_of(PromptCompletion("11", (ChatMessage("system", "Sing."),), (SAID,))) == "sing."


def test_two_system_messages_do_not_make_a_question_two() -> None:
    records = [
        PromptCompletion(f"{system}{n}", (ChatMessage("system", system), ChatMessage("user", f"{n} + 1?")), (SAID,))
        for n in range(200)
        for system in ("Be brief.", "Be kind.")
    ]
    drawn = held_out([prompt_of(record) for record in records], 0.1, 0)
    asked: dict[bool, set[str]] = {True: set(), False: set()}
    for place, record in enumerate(records):
        asked[place in drawn].add(record.prompt[1].content)
    assert len(drawn) == 40
    assert not asked[True] & asked[False]
