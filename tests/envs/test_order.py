"""Orders are pure functions of the position: permutations by epoch, and mixtures that hold their weights."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.envs.pools.pool import Mixture, Shuffled, floor_sum, stable_hash
from nmoe.types import Problem


class Counting:
    """The order whose problem at position i is i."""

    size = None
    read_as = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fingerprint = name

    def at(self, position: int) -> Problem:
        return Problem(f"{self.name}/{position}", "add", str(position), "0", self.name)


def shuffled(size: int, seed: int, content: str = "") -> Shuffled:
    return Shuffled("demo", size, Counting("demo").at, seed, content)


def mixture(weights: list[float], seed: int = 0) -> Mixture:
    return Mixture("demo", [Counting(str(index)) for index in range(len(weights))], weights, seed)


def test_the_hash_is_the_same_everywhere() -> None:
    # The first 8 bytes of `printf 'a\x1f1' | sha256sum`.
    assert stable_hash("a", 1) == 0x839E11A421D370BE


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 3))
def test_each_epoch_has_every_problem_once(size: int, seed: int, epoch: int) -> None:
    order = shuffled(size, seed)
    seen = [int(order.at(epoch * size + index).question) for index in range(size)]
    assert sorted(seen) == list(range(size))
    # Looking elsewhere in between changes nothing.
    assert [int(order.at(epoch * size + index).question) for index in reversed(range(size))] == seen[::-1]


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[str]:
        order = shuffled(30, seed)
        return [order.at(number * 30 + index).question for index in range(30)]

    assert len({tuple(epoch(seed, number)) for seed in (0, 1) for number in (0, 1, 2)}) == 6
    assert epoch(0, 0) != [str(index) for index in range(30)]


def test_fingerprints_tell_orders_apart() -> None:
    assert shuffled(3, 0, "a").fingerprint == shuffled(3, 0, "a").fingerprint
    orders = [shuffled(3, 0, "a"), shuffled(4, 0, "a"), shuffled(3, 1, "a"), shuffled(3, 0, "b")]
    assert len({order.fingerprint for order in orders}) == 4
    mixtures = [mixture([1, 2]), mixture([2, 1]), mixture([1, 2], seed=1), mixture([1, 2, 3])]
    assert len({order.fingerprint for order in mixtures}) == 4


@given(st.integers(0, 40), st.integers(1, 30), st.integers(0, 90), st.integers(-90, 90))
def test_floor_sum(n: int, modulus: int, step: int, start: int) -> None:
    assert floor_sum(n, modulus, step, start) == sum((start + i * step) // modulus for i in range(n))


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(WEIGHTS, st.integers(0, 2**63 - 1), st.sampled_from([(1, 0, 5), (2, 1, 5), (3, 0, 5), (8, 5, 10)]))
def test_a_mixture_holds_its_weights_at_every_nth_position(
    weights: list[float], seed: int, every: tuple[int, int, int]
) -> None:
    stride, first, allowed = every
    order = mixture(weights, seed)
    counts = [0] * len(weights)
    for taken in range(1, 400):
        counts[int(order.at(first + (taken - 1) * stride).source)] += 1
        for count, weight in zip(counts, weights, strict=True):
            # Independent draws would stray by 30 (three standard deviations) at an even share.
            assert abs(count - taken * weight / sum(weights)) <= allowed


def test_a_mixture_holds_its_weights_after_a_million() -> None:
    order = mixture([0.3, 0.7])
    assert order.count(0, 1_000_000) == pytest.approx(300_000, abs=5)
    assert order.count(0, 1_000_000) + order.count(1, 1_000_000) == 1_000_000


@given(WEIGHTS, st.integers(0, 2**63 - 1), st.integers(0, 200))
def test_each_source_of_a_mixture_goes_on_where_it_was(weights: list[float], seed: int, positions: int) -> None:
    order = mixture(weights, seed)
    seen: Counter[str] = Counter()
    for position in range(positions):
        problem = order.at(position)
        assert problem.question == str(seen[problem.source])
        seen[problem.source] += 1
    assert [order.count(index, positions) for index in range(len(weights))] == [
        seen[str(index)] for index in range(len(weights))
    ]


def test_a_seed_begins_the_mixture_elsewhere() -> None:
    beginnings = {tuple(mixture([1, 1], seed).at(i).source for i in range(12)) for seed in range(20)}
    assert len(beginnings) > 4
