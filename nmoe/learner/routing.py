"""Router statistics of a mixture-of-experts model over a batch, and two ways to balance the load of experts: a loss and a bias."""

# Shapes: T tokens, Y layers, E experts, K chosen experts.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmoe.model.moe import RouterTrace
from nmoe.model.transformer import Transformer


def count_load(trace: RouterTrace, experts: int) -> Tensor:
    """Counts the router's picks per layer and expert, `[Y, E]` int64 on the model's device. Counts the recorded picks where routes
    are replayed."""
    if trace.replay is not None:
        picks_YR = trace.replay.transpose(0, 1).flatten(1).long()
    else:
        picks_YR = torch.stack([chosen_TK.flatten() for chosen_TK in trace.chosen_TK])
    # `bincount` would wait for the device, to learn the length of its result.
    load_YE = torch.zeros(len(picks_YR), experts, dtype=torch.int64, device=picks_YR.device)
    return load_YE.scatter_add_(1, picks_YR, torch.ones_like(picks_YR))


def load_shares(load_YE: Tensor) -> Tensor:
    """Returns every expert's share of its layer's picks, `[Y, E]`."""
    return load_YE / load_YE.sum(-1, keepdim=True)


def auxiliary_loss(trace: RouterTrace, share_YE: Tensor, batch_tokens: int, coefficient: float) -> Tensor:
    """Computes the load-balancing loss of a micro-batch: `coef * E * sum_e f_e P_e`, averaged over layers (arXiv:2101.03961, eq.
    4-6).

    f_e is the expert's share of the picks of the whole batch, P_e its mean normalised router score. P_e is divided by the tokens of
    the whole batch, so that the parts of any split add up to the same loss.
    """
    layers, experts = share_YE.shape
    total = torch.zeros((), device=trace.scores_TE[0].device)
    for layer, scores_TE in enumerate(trace.scores_TE):
        mean_E = (scores_TE / scores_TE.sum(-1, keepdim=True)).sum(0) / batch_tokens
        total = total + (share_YE[layer].to(mean_E) * mean_E).sum()
    return coefficient * experts / layers * total


@torch.no_grad()
def entropy_sums(trace: RouterTrace) -> Tensor:
    """Sums the router's entropy in nats, of the normalised scores over experts, over all tokens: `[Y]` in fp64 on the model's
    device."""
    shares = (scores_TE / scores_TE.sum(-1, keepdim=True) for scores_TE in trace.scores_TE)
    return torch.stack([torch.special.entr(shares_TE).sum() for shares_TE in shares]).double()


@torch.no_grad()
def move_router_bias(model: Transformer, load_YE: Tensor) -> None:
    """Raises the routers' selection bias of experts with less than the mean load and lowers it for busier ones, by a fixed step
    (balancing without a loss, arXiv:2408.15664)."""
    rate = model.config.router_bias_rate
    if rate > 0:
        for moe, load_E in zip(model.moe_layers(), load_YE.double(), strict=True):
            moe.router.bias += rate * torch.sign(load_E.mean() - load_E).to(moe.router.bias)


@dataclass
class RoutingStatistics:
    """Router statistics summed over the tokens of a batch: load, entropy, and picks that differ from recorded routes; the methods
    give figures per layer."""

    load_YE: Tensor
    entropy_sum_Y: Tensor
    tokens: int = 0
    picks: int = 0
    flips: int = 0
    largest_flip_gap: float = 0.0

    @classmethod
    def empty(cls, layers: int, experts: int) -> RoutingStatistics:
        return cls(torch.zeros(layers, experts, dtype=torch.int64), torch.zeros(layers, dtype=torch.float64))

    def add(self, trace: RouterTrace, load_YE: Tensor, entropy_Y: Tensor) -> None:
        """Adds a micro-batch, whose load and entropies are on the host. With recorded routes, the host waits for the device."""
        self.load_YE += load_YE
        self.entropy_sum_Y += entropy_Y
        self.tokens += int(trace.chosen_TK[0].shape[0])
        self.picks += sum(chosen_TK.numel() for chosen_TK in trace.chosen_TK)
        if trace.replay is not None:
            self._compare(trace, trace.replay)

    def join(self, other: RoutingStatistics) -> None:
        """Adds the statistics of another part of the same batch."""
        self.load_YE += other.load_YE
        self.entropy_sum_Y += other.entropy_sum_Y
        self.tokens += other.tokens
        self.picks += other.picks
        self.flips += other.flips
        self.largest_flip_gap = max(self.largest_flip_gap, other.largest_flip_gap)

    def _compare(self, trace: RouterTrace, replay_TYK: Tensor) -> None:
        """Counts flips: picks of this pass that differ from the recorded ones. The gap of a flip is how far the recorded expert's
        score lies below the score of the expert picked here: tiny if rounding is the reason, and larger for a real disagreement."""
        own_TYK = torch.stack(trace.chosen_TK, 1)
        same_TYK = (own_TYK.unsqueeze(-1) == replay_TYK.long().unsqueeze(-2)).any(-1)
        if bool(same_TYK.all()):
            return
        for layer, scores_TE in enumerate(trace.scores_TE):
            for token in (~same_TYK[:, layer]).any(-1).nonzero().flatten().tolist():
                own, recorded = set(own_TYK[token, layer].tolist()), set(replay_TYK[token, layer].tolist())
                self.flips += len(own - recorded)
                scores_E = scores_TE[token].detach() + trace.biases_E[layer]
                gap = max(scores_E[list(own - recorded)]) - min(scores_E[list(recorded - own)])
                self.largest_flip_gap = max(self.largest_flip_gap, float(gap))

    def load_max_violation(self) -> list[float]:
        """Returns for each layer the busiest expert's load over the mean load, minus 1: 0 is perfect balance (arXiv:2408.15664, eq.
        4)."""
        load_YE = self.load_YE.double()
        return (load_YE.amax(-1) / load_YE.mean(-1) - 1).tolist()

    def load_shares(self) -> list[list[float]]:
        """Returns for each layer every expert's share of the picks."""
        load_YE = self.load_YE.double()
        return (load_YE / load_YE.sum(-1, keepdim=True)).tolist()

    def dead_experts(self) -> list[int]:
        """Returns for each layer the number of experts that no token of the batch picked."""
        return (self.load_YE == 0).sum(-1).tolist()

    def router_entropy(self) -> list[float]:
        """Returns for each layer the mean over tokens of the router's entropy in nats."""
        return (self.entropy_sum_Y / max(1, self.tokens)).tolist()

    def metrics(self) -> dict[str, Any]:
        """Returns all figures by the names of `docs/reference/metrics.md`, as `name/layer` where they are per layer."""
        metrics: dict[str, Any] = {
            "route_picks": float(self.picks),
            "route_flips": float(self.flips),
            "route_flip_gap_max": self.largest_flip_gap,
        }
        per_layer: dict[str, Sequence[float]] = {
            "expert_load_max_violation": self.load_max_violation(),
            "router_entropy": self.router_entropy(),
            "dead_experts": self.dead_experts(),
        }
        for name, values in per_layer.items():
            metrics |= {f"{name}/{layer}": float(value) for layer, value in enumerate(values)}
        for layer, shares_E in enumerate(self.load_shares()):
            metrics[f"expert_load/{layer}"] = [round(share, 5) for share in shares_E]
        return metrics
