"""Packing: budgets kept, nothing lost, the same packs from any position; and one length for all that fits a context."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import qwen
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.examples import read_examples
from nmoe.data.packing import PackedStream, best_fit
from nmoe.data.pairs import answer_pair, completion_pair, read_pairs
from nmoe.errors import UserError
from nmoe.recipes.preferences import completion_batch, reward_batch
from nmoe.recipes.sft import example_batch
from nmoe.text.renderers import ChatRenderer
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
