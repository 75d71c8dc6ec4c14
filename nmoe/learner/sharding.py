"""How ranks shard a decoder: block by block, with the experts shared among expert groups."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import Ranks


def share_model(
    model: Transformer, ranks: Ranks, device: torch.device | None = None, kept: Collection[nn.Parameter] = ()
) -> None:
    """Shards a model over the ranks in place and gives its experts their dispatcher; one that they share already stays as it is.
    A model on meta names the `device` that its parts will be allocated on. The `kept` parameters stay whole on every rank. Raises
    UserError as `Ranks.shard` does."""
    if ranks.share(model):
        return
    moes = model.moe_layers()
    dispatcher = ranks.shard(model, model.blocks, moes, model.config.routed_experts, kept, device)
    for moe in moes:
        moe.dispatcher, moe.sharded = dispatcher, ranks.size > 1
