"""The results that a speedrun promises, and a check of them. Figures over many seeds come from benchmarks/speedrun_seeds.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """The bounds of one figure of summary.json, and advice for a figure outside them: `Promise("format_ok", 0.98, 1.0, "...")`."""

    figure: str
    low: float
    high: float
    remedy: str


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


def shortfalls(promises: Sequence[Promise], summary: Mapping[str, float | int], out: str) -> list[str]:
    """One line, with advice, for each promise that the figures break. A figure that is missing or not a number breaks its
    promise."""
    lines = []
    for promise in promises:
        value = summary.get(promise.figure, float("nan"))
        if not promise.low <= value <= promise.high:
            remedy = promise.remedy.format(out=out)
            lines.append(f"{promise.figure} = {value:.4g}, promised {promise.low:g} to {promise.high:g}: {remedy}")
    return lines
