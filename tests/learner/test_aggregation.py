"""Per-token weights, by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nmoe.learner.batch import token_weights

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
