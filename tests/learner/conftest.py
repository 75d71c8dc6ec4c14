"""What the tests of this room share: small models, and batches of random tokens with every column."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from nmoe.learner.batch import Batch, token_weights

__all__ = ["tiny_model"]


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., Batch]:
    """Makes a batch of these lengths, of which the first third of every sequence is prompt."""

    def make(lengths: Sequence[int], seed: int = 0, vocab_size: int = 48, **columns: Any) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(lengths)
        scored_T = torch.cat([torch.arange(length) >= length // 3 for length in lengths])
        given: dict[str, Any] = {"advantages_T": torch.randn(tokens, generator=generator)}
        return Batch(
            lengths=tuple(lengths),
            inputs_T=torch.randint(vocab_size, (tokens,), generator=generator),
            targets_T=torch.randint(vocab_size, (tokens,), generator=generator),
            scored_T=scored_T,
            weights_T=token_weights("sequence", scored_T, lengths),
            **(given | columns),
        )

    return make
