"""Nothing is timed before every side is shown to run the same model: transformers in fp32, whole sequences, is the reference."""

from __future__ import annotations

import statistics

import numpy as np
from decode_workload import DTYPES_OF, Dtype, Logits, Run, Score
from side import Side

_SEQUENCES = 16

# Largest difference of any logit, and of any sampled token's logprob, in fp32. At 30 layers of
# width 576 logits of a spread of 3.5 differ by 1.3e-4.
_TOLERANCE = 3e-4
# Median difference of logprobs in bf16, whose rounding these weights amplify, and which sends some tokens to other experts (so that
# a mean would say less). Measured with the bare loop, dense / MoE: as it should be 0.05 / 0.04; attention's output scaled by 0.9
# 0.21 / 0.26, experts' by 0.9 0.19, positions off by one 0.73 / 0.32, one expert too few 0.60. At SmolLM2-135M's shape
# transformers' own bf16 differs by 0.12, nmoe's by 0.11.
_TOLERANCE_BF16 = 0.15


def check_logits(nmoe: Side, reference: Side) -> None:
    """nmoe's logits at every position of the prompts, in fp32. Raises AssertionError where they are not transformers'."""
    ours, theirs = (side.ask(Logits(_SEQUENCES)) for side in (nmoe, reference))
    difference = float(np.abs(ours - theirs).max())
    print(f"  nmoe: fp32 logits differ by at most {difference:.1e} (they spread by {theirs.std():.1f})", flush=True)
    assert difference <= _TOLERANCE, f"nmoe's logits differ from transformers' by {difference:.1e}"


def check_logprobs(name: str, side: Side, dtype: Dtype, reference: Side) -> None:
    """The logprobs a side gives to what it sampled. Raises AssertionError where the reference gives others."""
    run = Run(dtype, _SEQUENCES, seed=0, logprobs=True)
    generated = side.ask(run)
    expected = reference.ask(Score(run.seed, generated.token_ids))
    differences = [
        abs(a - b)
        for ours, theirs in zip(generated.logprobs, expected, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    median, largest = statistics.median(differences), max(differences)
    print(
        f"  {name}: {dtype} logprobs differ from fp32's by {median:.1e} in the median, {largest:.1e} at most",
        flush=True,
    )
    fits = largest <= _TOLERANCE if dtype == "fp32" else median <= _TOLERANCE_BF16
    assert fits, f"{name} gives other logprobs than transformers: it does not run the same model"


def check(sides: dict[str, Side], dtypes: list[Dtype], reference: Side) -> None:
    """All sides, in every dtype that is going to be timed."""
    if "nmoe" in sides:
        check_logits(sides["nmoe"], reference)
    for name, side in sides.items():
        for dtype in dtypes:
            if dtype in DTYPES_OF[name]:
                check_logprobs(name, side, dtype, reference)
