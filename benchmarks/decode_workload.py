"""The decode workload that all sides run: the models, the prompts, the lengths, the questions a side answers.

Everything that could favour one side lives here, once. It imports nothing outside the standard library: the sides run in
environments that share no packages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Dtype = Literal["fp32", "bf16"]

HERE = Path(__file__).parent
# Qwen3-0.6B's vocabulary with half its width and a quarter of its layers is qwen3_0p1b.
MODELS = {
    "qwen3_5m": HERE / "qwen3_dense_5m.json",
    "qwen3_moe_14m": HERE / "qwen3_moe_14m.json",
    "qwen3_0p1b": HERE / "qwen3_0p1b.json",
    "smollm2_135m": HERE / "smollm2_135m.json",
}
SMALL_MODELS = ("qwen3_5m", "qwen3_moe_14m")
SEQUENCES = (1, 16, 64, 256)
USUAL_SEQUENCES = (64, 256)
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")
SIDES = ("nmoe", "generate", "vllm", "bare")
# vLLM on a CPU is measured in the dtype its users run.
# The bare loop is Qwen3's.
QWEN3_ALONE = ("bare",)
DTYPES_OF: dict[str, tuple[Dtype, ...]] = {side: ("bf16",) if side == "vllm" else DTYPES for side in SIDES}

PROMPT_TOKENS = 32
NEW_TOKENS = 128  # by default; no side is asked for more
VOCABULARY = 4096  # prompts hold these ids; a model may have more
FIRST_ID = 2  # prompts hold neither padding nor the end token


def make_prompts(sequences: int, seed: int = 0) -> list[list[int]]:
    """As many prompts of random token ids, the same for all sides; others for every seed, so that no run finds another's
    prompts in a prefix cache."""
    generator = random.Random(seed)
    return [[generator.randrange(FIRST_ID, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(sequences)]


@dataclass(frozen=True)
class Run:
    """A question: sample `new_tokens` for each of the seed's prompts, at temperature 1 from the whole vocabulary, whatever tokens
    come. With `logprobs`, say those of the sampled tokens as well (nmoe and the bare loop always do)."""

    dtype: Dtype
    sequences: int
    seed: int
    logprobs: bool = False
    new_tokens: int = NEW_TOKENS


@dataclass(frozen=True)
class Generated:
    """The answer, e.g. for two sequences: seconds = 0.9, cpu_seconds = 1.7, others_cores = 0.01, token_ids = [[9, 44, ...], [7, 8,
    ...]] (as many as were asked for), logprobs = [[-3.1, ...], [-2.2, ...]] or [] where they were not asked for.

    `seconds` is the whole call, prompts in and token ids out; `others_cores` is what others used of the machine meanwhile.
    `mismatch` is nmoe's alone: mean and largest absolute difference of the engine's and the learner's logprobs.
    """

    seconds: float
    cpu_seconds: float
    others_cores: float
    token_ids: list[list[int]] = field(repr=False)
    logprobs: list[list[float]] = field(repr=False)
    mismatch: tuple[float, float] | None = None


@dataclass(frozen=True)
class Logits:
    """A question: the fp32 logits at every position of that many prompts of seed 0."""

    sequences: int


@dataclass(frozen=True)
class Score:
    """A question to the reference: the fp32 logprobs of these tokens after the seed's prompts."""

    seed: int
    token_ids: list[list[int]]
