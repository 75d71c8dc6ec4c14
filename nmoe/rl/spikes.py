"""Records spikes (steps whose update went far off) in spikes.jsonl, with the prompts and samples of the update.

Samples are ranked by the effect of the update: the distance of the learner's log-probabilities after it from the sampler's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nmoe.learner.learner import Learner
from nmoe.learner.objectives.base import LOG_RATIO_CLAMP
from nmoe.rl.experience import policy_batch
from nmoe.trajectory import Trajectory

_TAILS = (
    "grad_norm",
    "ppo_kl",
    "ppo_clip_ratio",
    "log_ratio_raw_max",
    "log_ratio_max",
    "log_ratio_min",
    "log_ratio_abs_p99",
    "ratio_max",
    "update_kl",
    "update_clip_ratio",
    "update_log_ratio_max",
    "update_log_ratio_min",
    "update_log_ratio_abs_p99",
    "update_ratio_max",
)
_WORST = 4


def spike_record(
    step: int,
    spikes: Sequence[str],
    metrics: Mapping[str, float],
    samples: Sequence[Trajectory],
    learner: Learner,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """Returns the line of spikes.jsonl for a step, after its update. `samples` are the samples that were trained on:

        {"step": 10, "spikes": ["grad_norm"], "grad_norm": 73.0, ..., "ratio_max": 1.4,
         "prompts": {"sort/7": "9f86d081884c7d65", ...},
         "worst": [{"problem": "sort/7", "prompt": "9f86d081884c7d65", "index": 3, "reward": 1.0, "tokens": 20,
                    "log_ratio_max": 6.1, "log_ratio_min": -2.0, "log_ratio_abs_mean": 0.7, "text": "..."}, ...]}

    A prompt is named by its problem and by `prompt_hash` of its question. The worst samples are those with the largest log ratio,
    of the learner after the update to the sampler, in either direction; at most four are kept. Log ratios are clamped to +-20, and
    NaN counts as 20. Metrics that are no finite numbers are named in "spikes" alone.
    """
    batch = policy_batch(samples, None, "token", 0)
    assert batch.behaviour_logprobs_T is not None, "a policy's batch has behaviour logprobs"
    after_N = learner.logprobs(batch).result().double().cpu()
    ratios_N = after_N - batch.behaviour_logprobs_T[batch.scored_T].double()
    # Weights that are no numbers any more are as far as can be.
    ratios_N = ratios_N.nan_to_num(nan=LOG_RATIO_CLAMP).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    of_sample_N = batch.sample_ids()[batch.sequence_ids()[batch.scored_T]]
    worst: list[dict[str, Any]] = []
    for index, sample in enumerate(samples):
        ratios = ratios_N[of_sample_N == index]
        if not len(ratios):
            continue
        worst.append(
            {
                "problem": sample.problem.id,
                "prompt": prompt_hash(sample.problem.question),
                "index": sample.index,
                "reward": sample.grade.score,
                "tokens": len(ratios),
                "log_ratio_max": float(ratios.max()),
                "log_ratio_min": float(ratios.min()),
                "log_ratio_abs_mean": float(ratios.abs().mean()),
                "text": decode(sample.token_ids),
            }
        )
    worst.sort(key=lambda one: -max(one["log_ratio_max"], -one["log_ratio_min"]))
    prompts = {sample.problem.id: prompt_hash(sample.problem.question) for sample in samples}
    tails = {name: metrics[name] for name in _TAILS if name in metrics and math.isfinite(metrics[name])}
    return {"step": step, "spikes": list(spikes), **tails, "prompts": prompts, "worst": worst[:_WORST]}


def prompt_hash(question: str) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of a question's UTF-8."""
    return hashlib.sha256(question.encode(errors="replace")).hexdigest()[:16]
