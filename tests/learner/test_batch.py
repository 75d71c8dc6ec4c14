"""Packed batches: positions, selections, micro-batches, weights of tokens by hand, and prefixes that sequences share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import DENSE

from nmoe.config.tables.model import OptimizerSection
from nmoe.learner.batch import Batch, common_prefixes, micro_batches, token_weights
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer

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


# Three sequences of 3, 2 and 1 positions with 2, 1 and 0 scored ones.
SCORED = torch.tensor([False, True, True, False, True, False])
LENGTHS = (3, 2, 1)


def test_token_mean() -> None:
    assert token_weights("token", SCORED, LENGTHS).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3, 0])


def test_mean_over_sequences_of_their_own_means() -> None:
    assert token_weights("sequence", SCORED, LENGTHS).tolist() == pytest.approx([0, 1 / 6, 1 / 6, 0, 1 / 3, 0])


def test_constant_length() -> None:
    expected = [0, 1 / 30, 1 / 30, 0, 1 / 30, 0]
    assert token_weights("constant", SCORED, LENGTHS, 10).tolist() == pytest.approx(expected)
    with pytest.raises(ValueError, match="a length that has to be given"):
        token_weights("constant", SCORED, LENGTHS)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_nothing_scored_weighs_nothing(aggregation) -> None:
    assert token_weights(aggregation, torch.zeros(3, dtype=torch.bool), (2, 1)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [0, 1 / 3, 1 / 3, 0, 1 / 3, 0]),
        ("sequence", [0, 1 / 6, 1 / 6, 0, 1 / 6, 0]),
        ("constant", [0, 1 / 20, 1 / 20, 0, 1 / 20, 0]),
    ],
)
def test_the_branches_of_a_sample_count_as_one_sequence(aggregation, expected) -> None:
    """The first two sequences are branches of one sample of three scored tokens; there are two samples."""
    weights = token_weights(aggregation, SCORED, LENGTHS, 10, samples=(4, 4, 9))
    assert weights.tolist() == pytest.approx(expected)


SEQUENCES = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 3)), min_size=1, max_size=8
)


@given(SEQUENCES)
def test_every_sample_weighs_the_same_however_it_branches(sequences) -> None:
    scored = torch.tensor([bit for bits, _ in sequences for bit in bits])
    lengths, samples = [len(bits) for bits, _ in sequences], [sample for _, sample in sequences]
    weights = token_weights("sequence", scored, lengths, samples=samples).split(lengths)
    for sample in set(samples):
        whole = sum(float(part.sum()) for part, of in zip(weights, samples, strict=True) if of == sample)
        tokens = sum(sum(bits) for bits, of in sequences if of == sample)
        assert whole == pytest.approx(1 / len(set(samples)) if tokens else 0)


@given(SEQUENCES, st.sampled_from(["token", "sequence", "constant"]))
def test_samples_of_one_branch_are_sequences_to_the_bit(sequences, aggregation) -> None:
    scored = torch.tensor([bit for bits, _ in sequences for bit in bits])
    lengths = [len(bits) for bits, _ in sequences]
    alone = token_weights(aggregation, scored, lengths, 7)
    assert torch.equal(alone, token_weights(aggregation, scored, lengths, 7, samples=range(len(lengths))))


def arrays(*sequences: list[int]) -> list[np.ndarray]:
    return [np.array(sequence) for sequence in sequences]


def test_who_shares_what() -> None:
    assert common_prefixes(arrays([5, 6, 7, 8], [5, 6, 9], [4, 4]), 2) == ((0, 2), (0, 2), (2, 0))
    assert common_prefixes(arrays([5, 6, 7], [5, 6, 7], [5, 6, 7, 8]), 2) == ((0, 2), (0, 2), (0, 2))
    assert common_prefixes(arrays([5, 6], [5, 6]), 2) == ((0, 0), (1, 0))
    assert common_prefixes(arrays([5, 6, 7, 1], [3, 6, 7, 1]), 2) == ((0, 0), (1, 0))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(1, 4))
def test_what_is_shared_is_the_same(sequences: list[list[int]], shortest: int) -> None:
    for sequence, (group, shared) in zip(sequences, common_prefixes(arrays(*sequences), shortest), strict=True):
        assert sequence[:shared] == sequences[group][:shared]
        assert shared < len(sequence)


def test_sharing_changes_no_gradient() -> None:
    rng = np.random.default_rng(0)
    begin = rng.integers(0, 48, 12)
    sequences = [np.concatenate([begin, rng.integers(0, 48, size)]) for size in (3, 5, 4)] + [rng.integers(0, 48, 9)]
    lengths = tuple(len(ids) - 1 for ids in sequences)
    scored_T = torch.cat([torch.arange(length) >= 5 for length in lengths])
    plain = Batch(
        lengths=lengths,
        inputs_T=torch.from_numpy(np.concatenate([ids[:-1] for ids in sequences])),
        targets_T=torch.from_numpy(np.concatenate([ids[1:] for ids in sequences])),
        scored_T=scored_T,
        weights_T=token_weights("token", scored_T, lengths),
    )
    prefixes = common_prefixes([ids[:-1] for ids in sequences], 8)
    assert prefixes == ((0, 12), (0, 12), (0, 12), (3, 0))
    gradients, losses = [], []
    for batch in (plain, replace(plain, prefixes=prefixes)):
        model = Transformer(ModelConfig(**DENSE)).initialize(0)
        learner = Learner(model, OptimizerSection(learning_rate=1e-3), 1, 64)
        losses.append(learner.forward_backward(batch, cross_entropy).result().loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert abs(losses[0] - losses[1]) < 1e-6
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
