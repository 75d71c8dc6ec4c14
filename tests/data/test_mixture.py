"""Mixtures by weight with exact continuation, and which records are held out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.commands import SFTConfig
from nmoe.config.loader import load_run_with
from nmoe.data.examples import ExampleMixture, Examples, split_together
from nmoe.data.held_out import held_out, prompt_of, refuse_empty
from nmoe.data.mixture import Mixture
from nmoe.data.records import Conversation, PromptCompletion, Text
from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage
from nmoe.text.renderers import Rendered

LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4)


def examples_of(*records: tuple[str, list[int]]) -> Examples:
    """A record for each prompt, whose tokens are all learned."""
    examples = Examples()
    for prompt, ids in records:
        examples.records += 1
        sequence = Rendered()
        sequence.learn(ids)
        examples.add(sequence, prompt)
    return examples


@given(LENGTHS, st.data(), st.integers(0, 9), st.integers(1, 20))
def test_shares_epochs_and_continuation(lengths: list[list[int]], data: st.DataObject, seed: int, budget: int) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=len(lengths), max_size=len(lengths)))
    mixture = Mixture(lengths, weights, seed, "")
    positions, steps = [mixture.position], []
    for _ in range(12):
        steps.append(mixture.next_indices(budget))
        positions.append(mixture.position)
    for step in steps:
        assert len(step) == 1 or sum(lengths[source][index] for source, index in step) <= budget
    for source, own in enumerate(lengths):
        taken = [index for step in steps for which, index in step if which == source]
        for begin in range(0, len(taken) - len(own) + 1, len(own)):
            assert sorted(taken[begin : begin + len(own)]) == list(range(len(own)))
    tokens = [sum(lengths[s][i] for step in steps for s, i in step if s == source) for source in range(len(lengths))]
    longest = max(map(max, lengths))
    for source, weight in enumerate(weights):
        ahead = tokens[source] - weight / sum(weights) * sum(tokens)
        assert -longest * (len(lengths) - 1) <= ahead <= longest
    for at, ((before, after), step) in enumerate(zip(pairwise(positions), steps, strict=True)):
        again = Mixture(lengths, weights, seed, "")
        again.position = before
        assert again.next_indices(budget) == step, at
        assert again.position == after


def test_examples_with_their_source() -> None:
    sources = [examples_of(("a", [1, 2, 3]), ("b", [4, 5, 6])), examples_of(("c", [7, 8, 9]))]
    mixture = ExampleMixture(sources, [1.0, 1.0], seed=0)
    taken = [(source, example.ids.tolist()) for source, example in mixture.take(8)]
    assert [source for source, _ in taken] == [0, 1, 0, 1]
    assert sorted(taken) == [(0, [1, 2, 3]), (0, [4, 5, 6]), (1, [7, 8, 9]), (1, [7, 8, 9])]
    assert mixture.sequences_and_tokens == [(2, 4), (1, 2)]


def test_the_fingerprint_sees_examples_weights_and_their_order() -> None:
    one, other = examples_of(("a", [1, 2])), examples_of(("a", [1, 3]))
    prints = [
        ExampleMixture(sources, weights, 0).fingerprint
        for sources, weights in (([one, other], [1.0, 2.0]), ([other, one], [1.0, 2.0]), ([one, other], [1.0, 3.0]))
    ]
    assert len(set(prints)) == 3
    assert ExampleMixture([one, other], [1.0, 2.0], 5).fingerprint == prints[0]


def test_a_prompt_of_two_sources_is_held_out_of_both() -> None:
    names = [f"p{number}" for number in range(40)]
    sources = [
        examples_of(*((name, [1, number]) for number, name in enumerate(names))),
        examples_of(*((name, [2, number]) for number, name in enumerate(names[::2]))),
    ]
    (train, held), (train_2, held_2) = split_together(sources, 0.25, seed=3)

    def numbers(part: Examples) -> set[int]:
        return {int(example.ids[1]) for example in part.listed()}

    assert numbers(train) | numbers(held) == set(range(40))
    assert len(held) + len(held_2) == 15
    assert {number * 2 for number in numbers(held_2)} == {number for number in numbers(held) if number % 2 == 0}
    assert not {number * 2 for number in numbers(train_2)} & numbers(held)


def test_one_source_is_split_as_before() -> None:
    source = examples_of(*((f"p{number}", [number, 1]) for number in range(20)))
    alone, together = source.split(0.2, 1), split_together([source], 0.2, 1)[0]
    for one, other in zip(alone, together, strict=True):
        assert one.fingerprint == other.fingerprint
    assert len(alone[1]) == 4
    with pytest.raises(UserError, match="leaves none to train on"):
        examples_of(("a", [1, 2]), ("b", [1, 2])).split(0.99, 0)
    assert np.array_equal(alone[0][0].ids, source[0].ids) or np.array_equal(alone[1][0].ids, source[0].ids)


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
