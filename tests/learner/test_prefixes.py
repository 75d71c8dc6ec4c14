"""Sequences that begin alike: who shares how much, and that sharing changes no gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import DENSE

from nmoe.config.tables.model import OptimizerSection
from nmoe.learner.batch import Batch, common_prefixes, token_weights
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer


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
