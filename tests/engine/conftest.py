"""What the tests of this room share: small models, prompts, and a plain forward pass to hold the engine against."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from nmoe.engine.api import Request
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.types import Sampling

__all__ = ["tiny_model"]


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Request]:
    """Makes a request for samples of a prompt of random tokens; the name settles prompt and seed."""

    def make(name: str, prompt_tokens: int, n: int, max_new_tokens: int, **sampling) -> Request:
        seed = sum(map(ord, name)) * 1000 + prompt_tokens
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(48, (prompt_tokens,), generator=generator).tolist()
        return Request(tuple(prompt), n, Sampling(max_new_tokens, **({"seed": seed} | sampling)), name)

    return make


@pytest.fixture(scope="session")
def full_forward() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Logits that predict each token of a completion, `[N, V]`, and every pick `[T, layers, K]`, from one plain forward pass
    without a cache."""

    @torch.no_grad()
    def forward(model: Transformer, prompt_ids: tuple[int, ...], token_ids: list[int]) -> tuple[Tensor, Tensor | None]:
        ids = torch.tensor([*prompt_ids, *token_ids])[:-1]
        trace = RouterTrace()
        states = model(ids, torch.arange(len(ids)), PackedAttention([len(ids)], ids.device, model.exact), trace)
        return model.logits(states[len(prompt_ids) - 1 :]), trace.routes() if trace.chosen_TK else None

    return forward
