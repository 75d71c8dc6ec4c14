"""Packing: budgets kept, nothing lost, best fit where it matters, and the same packs again from any position."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.data.packing import PackedStream, best_fit


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
