"""Routing by task: how far apart the tasks of a step lie in the experts that their samples take."""

# Shapes: S sources, Y layers, E experts, K chosen experts, T positions.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nmoe.trajectory import Trajectory


def routing_by_source(trajectories: Sequence[Trajectory], experts: int) -> dict[str, NDArray[np.float64]]:
    """Each source's share of router picks per layer and expert, `[Y, E]`, where every layer's shares add up to 1.

    Counts the positions that predict a sample's tokens, and not those that only read its prompt. Samples without recorded routes
    count nowhere, and a source without any other is left out.
    """
    picks: dict[str, NDArray[np.int64]] = {}
    for trajectory in trajectories:
        for branch in trajectory.branches:
            if (routes := branch.routes) is None:
                continue
            routes_TYK = routes[len(branch.prompt_ids) - 1 :]
            layers = routes_TYK.shape[1]
            numbered = routes_TYK.astype(np.int64) + experts * np.arange(layers)[:, None]
            counts_YE = np.bincount(numbered.ravel(), minlength=layers * experts).reshape(layers, experts)
            source = trajectory.problem.source
            picks[source] = picks.get(source, np.zeros_like(counts_YE)) + counts_YE
    counted = {source: counts_YE for source, counts_YE in sorted(picks.items()) if counts_YE.any()}
    return {source: counts_YE / counts_YE.sum(-1, keepdims=True) for source, counts_YE in counted.items()}


def divergence(shares_SYE: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Jensen-Shannon divergence in nats of the sources' shares, `[Y]`: the entropy of their mean less the mean of their
    entropies (Lin 1991, eq. 5.1, with equal weights). 0 if all sources route alike, `ln S` if no two share an expert."""
    return _entropy(shares_SYE.mean(0)) - _entropy(shares_SYE).mean(0)


def routing_metrics(shares: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """`expert_load_divergence` of each layer, by the shares of `routing_by_source`, where there are two sources or more."""
    if len(shares) < 2:
        return {}
    # Rounding may leave a little less than 0.
    found_Y = divergence(np.stack([*shares.values()])).clip(0)
    return {f"expert_load_divergence/{layer}": float(value) for layer, value in enumerate(found_Y)}


def _entropy(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    terms: NDArray[np.float64] = -shares * np.log(np.where(shares > 0, shares, 1))
    return terms.sum(-1)
