"""Per-token weights, by hand."""

import pytest
import torch

from nmoe.learner.aggregation import token_weights

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
