"""Running a batch through a model, micro-batch by micro-batch."""

# Shapes: T predicting positions, S those that run, N scored positions, D width, K chosen experts, E experts.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nmoe.learner.batch import Batch, micro_batches
from nmoe.learner.objectives import Outputs
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer


def split(batch: Batch, model: Transformer, tokens_per_microbatch: int) -> Iterator[tuple[Batch, Tensor]]:
    """Micro-batches on the model's device, each with where its positions stood in the batch."""
    for sequences in micro_batches(batch, tokens_per_microbatch):
        micro, rows_T = batch.select(sequences)
        yield micro.to(model.embedding.weight.device), rows_T


def scored_states(model: Transformer, micro: Batch, trace: RouterTrace) -> Tensor:
    """Final hidden states of the scored tokens, `[N, D]`. The trace is filled for all of the micro-batch's tokens; of rows that
    sequences share the recorded routes of the first are replayed."""
    device = micro.inputs_T.device
    positions_T = micro.positions().to(device)
    if (shared := micro.shared_rows()) is None:
        attend = PackedAttention(micro.lengths, device, model.exact)
        states_TD: Tensor = model(micro.inputs_T, positions_T, attend, trace)
        return states_TD[micro.scored_T]
    rows_S, place_T = shared
    attend = PackedAttention(micro.lengths, device, model.exact, shared)
    run = RouterTrace(replay=None if trace.replay is None else trace.replay[rows_S])
    states_SD: Tensor = model(micro.inputs_T[rows_S], positions_T[rows_S], attend, run)
    trace.chosen_TK += [chosen_SK[place_T] for chosen_SK in run.chosen_TK]
    trace.scores_TE += [scores_SE[place_T] for scores_SE in run.scores_TE]
    trace.biases_E += run.biases_E
    return states_SD[place_T[micro.scored_T]]


def score(model: Transformer, micro: Batch, trace: RouterTrace, temperature: float) -> Outputs:
    """Log-probabilities and entropies of the scored tokens, under the support that they were sampled from."""
    states_ND = scored_states(model, micro, trace)
    kept_NM = None if micro.kept_TM is None else micro.kept_TM[micro.scored_T]
    targets_N = micro.targets_T[micro.scored_T]
    return Outputs(*head_logprobs(states_ND, model.head_weight, targets_N, temperature, kept_NM, model.exact))


@torch.no_grad()
def batch_logprobs(model: Transformer, batch: Batch, tokens_per_microbatch: int, temperature: float) -> Tensor:
    """Log-probabilities of the batch's scored tokens, `[N]`, in its order, over recorded routes where the batch has them."""
    parts, places = [], []
    for micro, rows_T in split(batch, model, tokens_per_microbatch):
        parts.append(score(model, micro, RouterTrace(replay=micro.routes_TYK), temperature).logprobs_N.cpu())
        places.append(rows_T[micro.scored_T.cpu()])
    return torch.cat(parts)[torch.cat(places).argsort()]
