"""Packed batches: positions, selections and micro-batches."""

import itertools
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.learner.batch import Batch, micro_batches

MakeBatch = Callable[..., Batch]


def small() -> Batch:
    """Sequences [5, 6, 7, 2] and [8, 9, 2], prompts [5, 6] and [8]."""
    return Batch(
        lengths=(3, 2),
        inputs_T=torch.tensor([5, 6, 7, 8, 9]),
        targets_T=torch.tensor([6, 7, 2, 9, 2]),
        scored_T=torch.tensor([False, True, True, True, True]),
        weights_T=torch.tensor([0, 0.25, 0.25, 0.25, 0.25]),
        routes_TYK=torch.arange(10).view(5, 1, 2),
    )


def of_lengths(lengths: list[int], prefixes: tuple[tuple[int, int], ...] | None = None) -> Batch:
    zeros = torch.zeros(sum(lengths), dtype=torch.int64)
    return Batch(tuple(lengths), zeros, zeros, zeros.bool(), zeros.float(), prefixes=prefixes)


def test_positions_count_within_each_sequence() -> None:
    assert small().tokens == 5
    assert small().positions().tolist() == [0, 1, 2, 0, 1]


def test_select_takes_every_column_along() -> None:
    part, rows = small().select([1, 0])
    assert part.lengths == (2, 3)
    assert rows.tolist() == [3, 4, 0, 1, 2]
    assert part.inputs_T.tolist() == [8, 9, 5, 6, 7]
    assert part.targets_T.tolist() == [9, 2, 6, 7, 2]
    assert part.scored_T.tolist() == [True, True, False, True, True]
    assert part.weights_T.tolist() == [0.25, 0.25, 0, 0.25, 0.25]
    assert part.routes_TYK is not None
    assert part.routes_TYK[:, 0, 0].tolist() == [6, 8, 0, 2, 4]
    assert part.advantages_T is None
    alone, rows = small().select([1])
    assert (alone.lengths, alone.inputs_T.tolist(), rows.tolist()) == ((2,), [8, 9], [3, 4])
    assert alone.positions().tolist() == [0, 1]


def test_reference_logprobs_land_on_the_scored_tokens() -> None:
    batch = small().with_reference(torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    assert batch.reference_logprobs_T is not None
    assert batch.reference_logprobs_T.tolist() == [0, -1, -2, -3, -4]
    assert batch.inputs_T is small().inputs_T or batch.inputs_T.tolist() == [5, 6, 7, 8, 9]


def test_to_moves_every_column() -> None:
    moved = small().to(torch.device("meta"))
    columns = (moved.inputs_T, moved.targets_T, moved.scored_T, moved.weights_T, moved.routes_TYK)
    assert all(column is not None and column.device.type == "meta" for column in columns)
    assert moved.lengths == (3, 2)


def test_micro_batches_by_hand() -> None:
    # Longest first: 7 alone exceeds nothing of a budget of 8; 5 + 3 fill it; 3 + 2 + 2 stay below it.
    assert micro_batches(of_lengths([3, 7, 2, 5, 3, 2]), 8) == [[1], [3, 0], [4, 2, 5]]


def test_a_sequence_longer_than_the_budget_stands_alone() -> None:
    assert micro_batches(of_lengths([1, 20, 1]), 4) == [[1], [0, 2]]
    assert micro_batches(of_lengths([]), 4) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_micro_batches_part_the_sequences_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = micro_batches(of_lengths(lengths), budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= budget for part in parts)
    taken = [lengths[i] for part in parts for i in part]
    assert taken == sorted(taken, reverse=True)
    # None is cut before it has to be.
    for part, following in itertools.pairwise(parts):
        assert sum(lengths[i] for i in part) + lengths[following[0]] > budget


def test_several_ranks_get_even_micro_batches_by_hand() -> None:
    # Within a budget of half the tokens, 11, the first two fill lists of 9 and 10, and 3 are left over: one rank would run twice
    # as much as the other.
    lengths = [5, 4, 4, 3, 3, 3]
    assert micro_batches(of_lengths(lengths), 11) == [[0, 1], [2, 3, 4], [5]]
    assert micro_batches(of_lengths(lengths), 22, ranks=2) == [[0, 1, 2], [3, 4, 5]]
    assert micro_batches(of_lengths(lengths), 11, ranks=2) == [[0], [1], [2, 3], [4, 5]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 120), st.integers(2, 4))
def test_the_largest_micro_batch_of_several_ranks_is_the_smallest_possible(
    lengths: list[int], budget: int, ranks: int
) -> None:
    parts = micro_batches(of_lengths(lengths), budget, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    tokens = sorted(lengths, reverse=True)
    count = -(-len(micro_batches(of_lengths(lengths), budget)) // ranks) * ranks
    assert len(parts) <= count
    # Every way to cut the sorted lengths into that many pieces.
    cuts = (
        (0, *chosen, len(tokens))
        for pieces in range(1, min(count, len(tokens)) + 1)
        for chosen in itertools.combinations(range(1, len(tokens)), pieces - 1)
    )
    best = min(max(sum(tokens[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
    assert max(sum(lengths[i] for i in part) for part in parts) == best


def test_micro_batches_keep_those_together_that_share_a_prefix() -> None:
    prefixes = ((0, 2), (1, 2), (0, 2), (3, 2), (1, 2))
    # The first group's longest has 9 rows, the second's 8: the group's short ones come before other sequences.
    assert micro_batches(of_lengths([3, 8, 9, 5, 4], prefixes), 13) == [[2, 0], [1, 4], [3]]


def test_shared_rows_by_hand() -> None:
    batch = of_lengths([4, 3, 2, 3], ((0, 2), (1, 1), (0, 2), (0, 2)))
    rows, place = batch.shared_rows() or (None, None)
    assert rows is not None
    assert place is not None
    # Of the third sequence nothing is its own; of the fourth, its last row.
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 11]
    assert place.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 0, 1, 7]
    part, _ = batch.select([3, 1])
    assert part.prefixes == ((0, 2), (1, 1))
    assert part.shared_rows() is None  # alone of its group, and nothing else shares
    assert of_lengths([4, 3]).shared_rows() is None
