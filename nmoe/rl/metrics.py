"""Computes the metrics of a step's rollouts, by the names of `docs/reference/metrics.md`, and how much the tasks of a step differ
in the experts that their tokens are routed to."""

# Shapes: B samples, S sources, Y layers, E experts, K chosen experts, T positions.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.envs.grade import COMPONENTS
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.conversation import AnsweringTask
from nmoe.envs.tasks.text import OpenTask
from nmoe.trajectory import Trajectory
from nmoe.types import FAILURES


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Computes rewards and rates over all judged samples of the step, dropped groups included, and lengths and failures over all
    samples. Raises RuntimeError if no sample was judged."""
    everything, trajectories = trajectories, [t for t in trajectories if t.trainable]
    failures = Counter(t.grade.failure for t in everything)
    if not trajectories:
        raise RuntimeError(f"every sample of the step was lost to the infrastructure: {dict(failures)}")
    rewards_B = torch.tensor([t.grade.score for t in trajectories], dtype=torch.float64)
    metrics = {f"reward_{name}": value for name, value in _moments(rewards_B).items()}
    metrics["reward_p90"] = float(rewards_B.quantile(0.9))
    for name in trajectories[0].grade.extras:
        metrics[name] = _mean([t.grade.extras[name] for t in trajectories])
    metrics["truncated"] = metrics.pop("truncated_response")
    for name in sorted({name for t in trajectories for name in t.grade.weights.keys() - set(COMPONENTS)}):
        values = [t.grade.components[name] for t in trajectories if name in t.grade.components]
        metrics[f"reward_left_out/{name}"] = 1 - len(values) / len(trajectories)
        if values:
            metrics[f"reward/{name}"] = _mean(values)
        if any(t.grade.cached for t in trajectories):
            metrics[f"reward_cached/{name}"] = _mean([name in t.grade.cached for t in trajectories])
    # An answer to an open problem is neither right nor wrong, so it has no correctness.
    metrics.pop("correctness")
    closed = [t for t in trajectories if not isinstance(TASKS[t.problem.task_type], OpenTask)]
    if closed:
        metrics["correctness"] = _mean([t.grade.extras["correctness"] for t in closed])
        wrong = [t for t in closed if t.grade.extras["correctness"] == 0]
        rewarded = [t for t in wrong if t.grade.score > metrics["reward_mean"]]
        metrics["rewarded_but_wrong"] = len(rewarded) / len(closed)
        # What shapes the way to right answers, such as a tenth for the format, is no high reward.
        high = [t for t in rewarded if t.grade.score > t.grade.weights.get("correctness", 0.0) / 2]
        metrics["high_reward_but_wrong"] = len(high) / len(closed)
    metrics["response_length_mean"] = _mean([t.sampled_tokens for t in everything])
    metrics["grader_error_rate"] = failures["grader_error"] / len(everything)
    metrics["turns_mean"] = _mean([len(t.turns) for t in everything])
    if any(isinstance(TASKS[t.problem.task_type], AnsweringTask) for t in everything):
        metrics["branches_mean"] = _mean([len(t.branches) for t in everything])
    metrics["tool_calls_mean"] = _mean([len(t.tool_events) for t in everything])
    for source in sorted({t.problem.source for t in closed}):
        metrics[f"correctness/{source}"] = _mean(
            [t.grade.extras["correctness"] for t in closed if t.problem.source == source]
        )
    sources = sorted({t.problem.source for t in trajectories})
    for source in sources if len(sources) > 1 else ():
        metrics[f"format_ok/{source}"] = _mean(
            [t.grade.extras["format_ok"] for t in trajectories if t.problem.source == source]
        )
    for group in sorted({group for t in closed for group in t.problem.groups}):
        metrics[f"correctness/{group}"] = _mean(
            [t.grade.extras["correctness"] for t in closed if group in t.problem.groups]
        )
    layers = Counter(t.grade.verdict.layer for t in everything if t.grade.verdict is not None)
    metrics |= {f"settled/{layer}": count / layers.total() for layer, count in sorted(layers.items())}
    calls = Counter(event.failure for t in everything for event in t.tool_events)
    metrics |= {f"failures/{name}": float(failures[name]) for name in FAILURES if failures[name]}
    return metrics | {f"tool_failures/{name}": float(calls[name]) for name in FAILURES if calls[name] and name != "ok"}


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Selects the metrics of the progress line, by their labels. Those that are missing are left out: open problems have no
    correctness, and a step without an update no mismatch."""
    shown_as = {
        "reward": "reward_mean",
        "correctness": "correctness",
        "format": "format_ok",
        "length": "response_length_mean",
        "tokens/s": "tokens_per_second",
        "mismatch": "mismatch_abs_mean",
        "age": "staleness_mean",
        "wait": "trainer_wait_s",
    }
    return {label: metrics[name] for label, name in shown_as.items() if name in metrics}


def _moments(values_B: Tensor) -> dict[str, float]:
    """Returns mean, population standard deviation, minimum and maximum."""
    return {
        "mean": float(values_B.mean()),
        "std": float(values_B.std(correction=0)),
        "min": float(values_B.min()),
        "max": float(values_B.max()),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def routing_by_source(trajectories: Sequence[Trajectory], experts: int) -> dict[str, NDArray[np.float64]]:
    """Returns for each source (dataset or task) every expert's share of the router's picks, `[Y, E]`; the shares of a layer add up
    to 1.

    Counts the positions that predict a token after the prompt, tool results included, and not those that only read the prompt.
    Samples without recorded routes are not counted, and a source that has no other samples is left out.
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
    """Returns for each layer the Jensen-Shannon divergence in nats between the sources' expert shares, `[Y]`: the entropy of their
    mean less the mean of their entropies (Lin 1991, eq. 5.1, with equal weights). 0 if all S sources route alike, `ln S` if no two
    share an expert."""
    return _entropy(shares_SYE.mean(0)) - _entropy(shares_SYE).mean(0)


def routing_metrics(shares: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Returns the metric `expert_load_divergence` of each layer from the shares of `routing_by_source`; empty for fewer than two
    sources."""
    if len(shares) < 2:
        return {}
    # Rounding may leave a little less than 0.
    found_Y = divergence(np.stack([*shares.values()])).clip(0)
    return {f"expert_load_divergence/{layer}": float(value) for layer, value in enumerate(found_Y)}


def _entropy(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    terms: NDArray[np.float64] = -shares * np.log(np.where(shares > 0, shares, 1))
    return terms.sum(-1)
