"""Forward passes of a batch, micro-batch by micro-batch."""

# Shapes: T predicting positions, S those that run, N scored positions, D width, K chosen experts, E experts, K outputs
# of a head.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nmoe.learner.batch import Batch, micro_batches
from nmoe.learner.objectives import Outputs
from nmoe.model.device import kind_of, put
from nmoe.model.head import Head
from nmoe.model.idle_threads import IDLE
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import collect, gang
from nmoe.parallel.ranks import Ranks

R = TypeVar("R")
# Values at scored tokens with the tokens' places in the batch, by micro-batch.
Scores = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Share:
    """What one rank runs of a batch of `tokens` tokens: micro-batches on the host, each with the places of its scored positions in
    the batch, `[N]`, and whether it counts.

    All ranks run equally many, since they gather the weights of a sharded model together. A rank that has fewer runs the
    smallest one again, which must not count.
    """

    parts: Sequence[tuple[Batch, Tensor, bool]]
    tokens: int


def deal(batch: Batch, tokens_per_microbatch: int, ranks: int) -> list[Share]:
    """A share for each rank, in turns."""
    micros = []
    for sequences in micro_batches(batch, tokens_per_microbatch, ranks):
        micro, rows_T = batch.select(sequences)
        micros.append((micro, rows_T[micro.scored_T]))
    idle = min(micros, key=lambda one: one[0].tokens)
    shares = []
    for rank in range(ranks):
        own = [(*part, True) for part in micros[rank::ranks]]
        missing = -(-len(micros) // ranks) - len(own)
        shares.append(Share([*own, *[(*idle, False)] * missing], batch.tokens))
    return shares


def on_each_rank(function: Callable[[Share], R], batch: Batch, tokens_per_microbatch: int, ranks: Ranks) -> list[R]:
    """Every rank's result for its share of the batch."""
    shares = deal(batch, tokens_per_microbatch, ranks.size)
    if gang().leads:
        return collect(function, shares)
    # One process; or all ranks are here, each with the whole batch.
    return ranks.gather(function(shares[ranks.rank]))


def scored_states(model: Transformer, micro: Batch, trace: RouterTrace) -> Tensor:
    """Final hidden states of the scored tokens, `[N, D]`. Fills the trace for all tokens of the micro-batch. Of rows that several
    sequences share, the recorded routes of the first sequence are replayed."""
    device = micro.inputs_T.device
    if kind_of(device).on_host:
        IDLE.look()
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
def share_logprobs(model: Transformer, share: Share, temperature: float) -> Scores:
    """Log-probabilities of a share's scored tokens, with recorded routes if the batch has them, and their places in the batch."""
    found = []
    for micro, places_N, counts in share.parts:
        on_device = micro.to(model.device)
        logprobs_N = score(model, on_device, RouterTrace(replay=on_device.routes_TYK), temperature).logprobs_N.cpu()
        if counts:
            found.append((logprobs_N, places_N))
    return found


@torch.no_grad()
def share_head_outputs(model: Transformer, head: Head, share: Share) -> Scores:
    """Outputs of a head at a share's scored tokens, with recorded routes if the batch has them, and their places in the batch."""
    found = []
    for micro, places_N, counts in share.parts:
        on_device = micro.to(model.device)
        states_ND = scored_states(model, on_device, RouterTrace(replay=on_device.routes_TYK))
        if counts:
            found.append((head(states_ND, model.exact).cpu(), places_N))
    return found


def in_order(found: Sequence[Scores]) -> Tensor:
    """Joins every rank's scores in the order of their places in the batch."""
    parts = [part for rank in found for part in rank]
    return torch.cat([scores for scores, _ in parts])[torch.cat([places for _, places in parts]).argsort()]


def batch_logprobs(model: Transformer, batch: Batch, tokens_per_microbatch: int, temperature: float) -> Tensor:
    """Log-probabilities of the batch's scored tokens, `[N]`, in its order, by a model of this process alone."""
    (share,) = deal(batch, tokens_per_microbatch, 1)
    return in_order([share_logprobs(model, share, temperature)])


def batch_head_outputs(model: Transformer, head: Head, batch: Batch, tokens_per_microbatch: int) -> Tensor:
    """Outputs of a head at the batch's scored tokens, `[N, K]`, in its order, by a model of this process alone."""
    (share,) = deal(batch, tokens_per_microbatch, 1)
    return in_order([share_head_outputs(model, head, share)])
