"""Choosing sequences: packs within budgets, mixtures by weight, continuation from any position, and records held out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import qwen
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.commands import SFTConfig
from nmoe.config.loader import load_run_with
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.examples import ExampleMixture, Examples, read_examples, split_together
from nmoe.data.held_out import held_out, prompt_of, refuse_empty
from nmoe.data.packing import Mixture, PackedStream, best_fit
from nmoe.data.pairs import answer_pair, completion_pair, read_pairs
from nmoe.data.records import Conversation, PromptCompletion, Text
from nmoe.errors import UserError
from nmoe.recipes.preferences import completion_batch, reward_batch
from nmoe.recipes.sft import example_batch
from nmoe.text.conversation import ChatMessage
from nmoe.text.renderers import ChatRenderer, Rendered
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier.form import DiscriminativeForm, GenerativeForm, form_batch


def by_definition(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing, word for word: each goes where the least room is left, or opens a pack."""
    packs: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rooms = [capacity - sum(lengths[i] for i in pack) - lengths[index] for pack in packs]
        fitting = [room for room in rooms if room >= 0]
        if fitting:
            packs[rooms.index(min(fitting))].append(index)
        else:
            packs.append([index])
    return packs


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(10, 30))
def test_packs_are_those_of_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    packs = best_fit(lengths, capacity)
    expected = by_definition(lengths, capacity)
    loads = [sorted(sum(lengths[i] for i in pack) for pack in each) for each in (packs, expected)]
    assert loads[0] == loads[1]
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(len(pack) == 1 or sum(lengths[i] for i in pack) <= capacity for pack in packs)
    if lengths and max(lengths) <= capacity:
        assert len(packs) <= math.ceil(11 / 9 * math.ceil(sum(lengths) / capacity) * 2)


def test_small_sequences_fill_the_gaps() -> None:
    assert best_fit([2, 6, 3, 7, 4, 8], 10) == [[5, 0], [3, 2], [1, 4]]
    assert best_fit([5, 12, 5], 10) == [[1], [0, 2]]  # one that exceeds the budget stands alone
    assert best_fit([], 10) == []


def stream(seed: int = 0, lengths: tuple[int, ...] = tuple(range(1, 40))) -> PackedStream:
    return PackedStream(lengths, 64, seed, "print")


def test_each_epoch_has_every_sequence_once_in_packs_of_its_own() -> None:
    packs = stream()
    epochs = [[packs.take() for _ in range(packs.steps_per_epoch)] for _ in range(3)]
    for epoch in epochs:
        assert sorted(index for pack in epoch for index in pack) == list(range(39))
    assert len({str(epoch) for epoch in epochs}) == 3
    assert packs.position == 3 * packs.steps_per_epoch
    assert packs.utilisation == pytest.approx(sum(range(1, 40)) / (13 * 64))
    assert packs.steps_per_epoch == 13
    assert stream(seed=1).take() != stream().take()


@pytest.mark.parametrize("position", [0, 5, 13, 20])
def test_a_position_goes_on_where_it_was(position: int) -> None:
    whole = stream()
    packs = [whole.take() for _ in range(30)]
    resumed = stream()
    resumed.position = position
    assert [resumed.take() for _ in range(30 - position)] == packs[position:]


def test_a_step_mixes_lengths_that_best_fit_puts_apart() -> None:
    lengths = [20] * 3000 + [60] * 1000  # a pack of 80 tokens is one of each, or four short ones
    packs = PackedStream(lengths, 1280, 0, "print")
    steps = [packs.take() for _ in range(packs.steps_per_epoch)]
    assert packs.utilisation == pytest.approx(1.0, abs=0.01)
    assert all(sum(lengths[index] for index in step) <= 1280 for step in steps)
    assert sorted(index for step in steps for index in step) == list(range(4000))
    long_ones = [sum(lengths[index] == 60 for index in step) for step in steps]
    assert len(steps) == 94
    assert min(long_ones) >= 4  # of 10.6 in the mean; one pack a step would have had steps without any


ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo!"}
LATER = {"role": "user", "content": "thanks " * 20}
# Inputs of the template's <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n and what follows up to <|im_end|>, which is
# the last token that is predicted.


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return qwen(tmp_path / "tokenizer")


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., DatasetSettings]:
    def write(record: dict[str, Any]) -> DatasetSettings:
        (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
        return DatasetSettings(path=str(tmp_path / "data.jsonl"))

    return write


@pytest.mark.parametrize("tail", [[], [LATER]], ids=["a line break follows", "a message follows"])
def test_an_example_fits_the_context_that_its_inputs_fill(
    tail: list[dict[str, str]], tokenizer: Tokenizer, written: Callable[..., DatasetSettings]
) -> None:
    settings, renderer = written({"messages": [ASKED, SAID, *tail]}), ChatRenderer(tokenizer)
    prompt = renderer.prompt_ids([Message("user", "hi")])
    # The template writes empty reasoning, unless more follows.
    said = tokenizer.encode("yo!", control_tokens=True) if tail else tokenizer.encode(
        "<think>\n\n</think>\n\nyo!", control_tokens=True
    )  # fmt: skip
    inputs = [*prompt, *said]  # <|im_end|> is predicted from the last of these
    (example,) = read_examples(settings, renderer, tokenizer, len(inputs)).listed()
    assert example_batch([example]).inputs_T.tolist() == inputs
    with pytest.raises(UserError, match=rf"1 are longer than its context of {len(inputs) - 1} tokens"):
        read_examples(settings, renderer, tokenizer, len(inputs) - 1)


@pytest.mark.parametrize(("make", "batch"), [(completion_pair, completion_batch), (answer_pair, reward_batch)])
def test_a_pair_fits_the_context_that_the_inputs_of_its_longer_side_fill(
    make: Any, batch: Any, tokenizer: Tokenizer, written: Callable[..., DatasetSettings]
) -> None:
    settings = written({"prompt": [ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "no, not that"}]})
    renderer = ChatRenderer(tokenizer)
    (pair,) = read_pairs(settings, renderer, make, 10**6).pairs
    longest = max(batch([pair]).lengths)
    assert longest == max(pair.positions)
    assert len(read_pairs(settings, renderer, make, longest).pairs) == 1
    with pytest.raises(UserError, match=rf"longer than the model's context of {longest - 1} tokens"):
        read_pairs(settings, renderer, make, longest - 1)


@pytest.mark.parametrize(
    "form", [lambda t: DiscriminativeForm(t, "step"), lambda t: GenerativeForm(t, "step")], ids=["head", "generative"]
)
def test_a_verifier_judges_in_use_what_it_fits_in_training(form: Any) -> None:
    tokenizer = Tokenizer.train(["2 + 2 = 4"], 300)
    made, messages, steps = form(tokenizer), [Message("user", "2+2?")], ["2+2=4", "so 4"]
    trained = form_batch([made.training(messages, steps, ["+", "-"])])
    longest = max(trained.lengths)
    fits, cut = (made.question(messages, steps, context) for context in (longest, longest - 1))
    judgements = [sum(len(one.counts or one.scored) if isinstance(made, DiscriminativeForm) else 1 for one in group) for group in (fits, cut)]  # noqa: E501  # fmt: skip
    classes = 1 if isinstance(made, DiscriminativeForm) else len(made.classes)
    assert judgements == [2 * classes, 1 * classes]
    assert max(form_batch([fits]).lengths) == longest


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


QUESTION, ANSWER = ChatMessage("user", "6 * 7?"), ChatMessage("assistant", "42")


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
    asked = prompt_of(PromptCompletion("1", (QUESTION,), (ANSWER,)))
    assert prompt_of(Conversation("2", (QUESTION, ANSWER))) == asked
    assert prompt_of(Conversation("3", (QUESTION, ChatMessage("assistant", "41"), QUESTION, ANSWER))) == asked
    assert prompt_of(PromptCompletion("4", (ChatMessage("user", " 6 *\u00a0\n7? "),), (ANSWER,))) == asked
    assert prompt_of(Conversation("5", (ChatMessage("system", "Be brief."), QUESTION, ANSWER))) == asked
    assert prompt_of(Conversation("6", (ChatMessage("user", "\uff16 * 7?"), ANSWER))) == asked, "a wide 6"
    assert prompt_of(Text("7", "6 * 7?")) == asked
    # A greeting by the assistant is no answer.
    assert prompt_of(Conversation("8", (ChatMessage("assistant", "Hello!"), QUESTION, ANSWER))) == asked
    # A prompt of several turns asks in all of them; without a turn of the user's, what is said is the question.
    turns = (QUESTION, ANSWER, ChatMessage("user", "And 8 * 7?"))
    assert prompt_of(PromptCompletion("9", turns, (ANSWER,))) == f"{asked}\x1eand 8 * 7?"
    assert prompt_of(Conversation("10", (ANSWER, ANSWER))) == "42\x1e42"
    assert prompt_of(PromptCompletion("11", (ChatMessage("system", "Sing."),), (ANSWER,))) == "sing."


def test_two_system_messages_do_not_make_a_question_two() -> None:
    records = [
        PromptCompletion(f"{system}{n}", (ChatMessage("system", system), ChatMessage("user", f"{n} + 1?")), (ANSWER,))
        for n in range(200)
        for system in ("Be brief.", "Be kind.")
    ]
    drawn = held_out([prompt_of(record) for record in records], 0.1, 0)
    asked: dict[bool, set[str]] = {True: set(), False: set()}
    for place, record in enumerate(records):
        asked[place in drawn].add(record.prompt[1].content)
    assert len(drawn) == 40
    assert not asked[True] & asked[False]
