"""The results that a speedrun promises, and a check of them. benchmarks/speedrun_seeds.py measures the same figures
over many seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """Bounds of a figure in summary.json, with advice if it lies outside: `Promise("format_ok", 0.98, 1.0, "...")`.

    `where_measured` marks a figure that needs data which is not on every machine; a missing figure then breaks no
    promise.
    """

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
    """Returns a line, with advice, for each promise that the figures in `summary` break.

    A figure that is missing or not a number breaks its promise, unless it is only promised `where_measured`.
    """
    lines = []
    for promise in promises:
        if promise.where_measured and promise.figure not in summary:
            continue
        value = summary.get(promise.figure, float("nan"))
        if not promise.low <= value <= promise.high:
            remedy = promise.remedy.format(out=out)
            lines.append(f"{promise.figure} = {value:.4g}, promised {promise.low:g} to {promise.high:g}: {remedy}")
    return lines
