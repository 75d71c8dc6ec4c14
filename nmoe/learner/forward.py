"""Forward passes of a batch, micro-batch by micro-batch."""

# Shapes: T predicting positions, S those that run, N scored positions, D width, K chosen experts, E experts, K outputs
# of a head.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nmoe.learner.batch import Batch, micro_batches
from nmoe.learner.objectives import Outputs
from nmoe.model.device import put
from nmoe.model.head import Head
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.parallel.ranks import Ranks


def split(
    batch: Batch, model: Transformer, tokens_per_microbatch: int, ranks: Ranks
) -> Iterator[tuple[Batch, Tensor, bool]]:
    """Yields this rank's micro-batches on the model's device, each with the places of its scored positions in the batch, `[N]` on
    the host, and whether it counts.

    All ranks run equally many, since they gather the weights of a sharded model together. A rank that has fewer runs the first one
    again, which must not count.
    """
    share = -(-batch.tokens // ranks.size)
    parts = list(micro_batches(batch, min(tokens_per_microbatch, share)))
    for first in range(0, len(parts), ranks.size):
        own = first + ranks.rank
        micro, rows_T = batch.select(parts[own] if own < len(parts) else parts[0])
        yield micro.to(model.device), rows_T[micro.scored_T], own < len(parts)


def scored_states(model: Transformer, micro: Batch, trace: RouterTrace) -> Tensor:
    """Final hidden states of the scored tokens, `[N, D]`. Fills the trace for all tokens of the micro-batch. Of rows that several
    sequences share, the recorded routes of the first sequence are replayed."""
    device = micro.inputs_T.device
    positions_T = put(micro.positions(), device)
    if (shared := micro.shared_rows()) is None:
        attend = PackedAttention(micro.lengths, device, model.exact)
        states_TD: Tensor = model(micro.inputs_T, positions_T, attend, trace)
        return states_TD[micro.scored_places]
    rows_S, place_T = shared
    attend = PackedAttention(micro.lengths, device, model.exact, shared)
    run = RouterTrace(replay=None if trace.replay is None else trace.replay[rows_S])
    states_SD: Tensor = model(micro.inputs_T[rows_S], positions_T[rows_S], attend, run)
    trace.chosen_TK += [chosen_SK[place_T] for chosen_SK in run.chosen_TK]
    trace.scores_TE += [scores_SE[place_T] for scores_SE in run.scores_TE]
    trace.biases_E += run.biases_E
    return states_SD[place_T[micro.scored_places]]


def score(
    model: Transformer,
    micro: Batch,
    trace: RouterTrace,
    temperature: float,
    head: Head | None = None,
    head_only: bool = False,
) -> Outputs:
    """Log-probabilities and entropies of the scored tokens, over the support that they were sampled from, and the outputs of the
    head there. With `head_only` the vocabulary is not computed."""
    states_ND = scored_states(model, micro, trace)
    head_NK = None if head is None else head(states_ND, model.exact)
    if head_only:
        nan_N = torch.full(states_ND.shape[:1], torch.nan, device=states_ND.device)
        return Outputs(nan_N, nan_N, head_NK)
    kept_NM = None if micro.kept_TM is None else micro.kept_TM[micro.scored_places]
    targets_N = micro.targets_T[micro.scored_places]
    logprobs_N, entropy_N = head_logprobs(states_ND, model.head_weight, targets_N, temperature, kept_NM, model.exact)
    return Outputs(logprobs_N, entropy_N, head_NK)


@torch.no_grad()
def batch_logprobs(
    model: Transformer, batch: Batch, tokens_per_microbatch: int, temperature: float, ranks: Ranks | None = None
) -> Tensor:
    """Log-probabilities of the batch's scored tokens, `[N]`, in its order, with recorded routes if the batch has them."""
    ranks = ranks or Ranks()
    parts, places = [], []
    for micro, places_N, counts in split(batch, model, tokens_per_microbatch, ranks):
        logprobs_N = score(model, micro, RouterTrace(replay=micro.routes_TYK), temperature).logprobs_N.cpu()
        if counts:
            parts.append(logprobs_N)
            places.append(places_N)
    return _in_order(ranks, parts, places)


@torch.no_grad()
def batch_head_outputs(
    model: Transformer, head: Head, batch: Batch, tokens_per_microbatch: int, ranks: Ranks | None = None
) -> Tensor:
    """Outputs of a head at the batch's scored tokens, `[N, K]`, in its order, with recorded routes if the batch has them."""
    ranks = ranks or Ranks()
    parts, places = [], []
    for micro, places_N, counts in split(batch, model, tokens_per_microbatch, ranks):
        head_NK = head(scored_states(model, micro, RouterTrace(replay=micro.routes_TYK)), model.exact).cpu()
        if counts:
            parts.append(head_NK)
            places.append(places_N)
    return _in_order(ranks, parts, places)


def _in_order(ranks: Ranks, parts: list[Tensor], places: list[Tensor]) -> Tensor:
    """Joins every rank's parts in the order of their places in the batch."""
    gathered = ranks.gather((parts, places))
    whole = torch.cat([part for parts, _ in gathered for part in parts])
    return whole[torch.cat([place for _, places in gathered for place in places]).argsort()]
