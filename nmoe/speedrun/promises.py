"""The results that a speedrun promises, and a check of them. Figures over many seeds come from benchmarks/speedrun_seeds.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """The bounds of one figure of summary.json, and advice for a figure outside them: `Promise("format_ok", 0.98, 1.0, "...")`.

    `where_measured`: the figure needs data that is not on every machine, and nothing is promised where it is missing."""

    figure: str
    low: float
    high: float
    remedy: str
    where_measured: bool = False


_UNLUCKY = "try another seed with --seed; if that falls short too, {out}/report.md and {out}/rl/metrics.jsonl show where it stopped"
_BASE = "pretraining came out differently here: see {out}/base/metrics.jsonl, and try another seed with --seed"
_NUMERICS = "engine and learner disagree, which no seed excuses: please report it with {out}/rl/provenance.json and metrics.jsonl"

SCRATCH_PROMISES = (
    Promise("base_correctness", 0.05, 0.35, _BASE),
    Promise("trained_correctness", 0.90, 1.0, _UNLUCKY),
    Promise("correctness_trained_add", 0.75, 1.0, _UNLUCKY),
    Promise("correctness_trained_reverse", 0.75, 1.0, _UNLUCKY),
    Promise("correctness_trained_sort", 0.75, 1.0, _UNLUCKY),
    Promise("format_ok", 0.98, 1.0, _UNLUCKY),
    Promise("mismatch_abs_mean", 0.0, 1e-6, _NUMERICS),
    Promise("mismatch_abs_max", 0.0, 1e-4, _NUMERICS),
    Promise("first_step_ppo_kl", -1e-6, 1e-6, _NUMERICS),
)

_OTHER = "RL cost more than it gave; {out}/report.md shows where, and a lower optimizer.learning_rate keeps more of the model"

REAL_PROMISES = (
    Promise("trained_compare", 0.80, 1.0, _UNLUCKY),
    Promise("worst_gain_upper_bound", 0.0, 1.0, _OTHER),
    Promise("perplexity_ratio", 0.0, 1.05, _OTHER, where_measured=True),
    Promise("mismatch_of_bound", 0.0, 1.0, _NUMERICS),
)


def shortfalls(promises: Sequence[Promise], summary: Mapping[str, float | int], out: str) -> list[str]:
    """One line, with advice, for each promise that the figures break. A figure that is missing or not a number breaks its
    promise, unless it is one of those that are not measured everywhere."""
    lines = []
    for promise in promises:
        if promise.where_measured and promise.figure not in summary:
            continue
        value = summary.get(promise.figure, float("nan"))
        if not promise.low <= value <= promise.high:
            remedy = promise.remedy.format(out=out)
            lines.append(f"{promise.figure} = {value:.4g}, promised {promise.low:g} to {promise.high:g}: {remedy}")
    return lines
