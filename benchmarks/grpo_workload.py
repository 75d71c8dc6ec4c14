"""The GRPO workload that both frameworks run: the model, the prompts, the completion lengths, the reward, the settings.

Everything that could favour one side lives here, once, so that neither side can differ in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Dtype = Literal["fp32", "bf16"]
DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

PAD_ID = 0
EOS_ID = 1
FIRST_PROMPT_ID = 2  # prompts hold neither padding nor the end token

N_COMPLETIONS = 8  # per prompt

LEARNING_RATE = 1e-5
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0
CLIP_EPS = 0.2
# TRL's constant in (reward - mean) / (std + eps); with rewards in [0, 1] and std near 0.1 it changes nothing that is timed.
ADVANTAGE_EPS = 1e-4

SEED = 0


@dataclass(frozen=True)
class Case:
    """Completion lengths that are timed. `min_length == max_length` gives completions of one fixed length."""

    name: str
    min_length: int
    max_length: int

    def lengths(self, step: int, rows: int = 64) -> list[int]:
        """Completion lengths in tokens of the rows at `step`; row i belongs to prompt i // 8. The same for both sides."""
        generator = np.random.default_rng((SEED, step))
        return generator.integers(self.min_length, self.max_length + 1, size=rows).tolist()


CASES = (Case("fixed_32", 32, 32), Case("uniform_2_32", 2, 32))


@dataclass(frozen=True)
class Workload:
    """A model and a batch. TRL trains `rows_at_once` rows at a time and adds up their gradients, nmoe `tokens_at_once` tokens:
    all of them where memory allows."""

    config_file: Path
    prompts: int
    prompt_length: int
    max_new_tokens: int
    rows_at_once: int
    tokens_at_once: int
    cases: tuple[Case, ...]

    @property
    def rows(self) -> int:
        return self.prompts * N_COMPLETIONS

    def for_parity(self) -> Workload:
        """The same with few prompts where the reference, which keeps all logits, would need too much memory for all."""
        few = min(self.prompts, 2**25 // AutoConfig.from_pretrained(self.config_file).vocab_size // 256)
        return replace(self, prompts=few, rows_at_once=few * N_COMPLETIONS)


WORKLOADS = {
    "qwen3_moe_tiny": Workload(Path(__file__).with_name("qwen3_moe_tiny.json"), 8, 16, 32, 64, 16384, CASES),
    "smollm2_135m": Workload(
        Path(__file__).with_name("smollm2_135m.json"), 16, 64, 64, 16, 4096, (Case("fixed_64", 64, 64),)
    ),
}
TINY = WORKLOADS["qwen3_moe_tiny"]


@dataclass(frozen=True)
class GradedBatch:
    """Completions with their advantages, as both losses see them, e.g. for the first of 64 rows:

    prompt_ids[0] = [17, 3021, ...] (16 ids), completion_ids[0] = [9, 44, 1] (2 to 32 ids), advantages[0] = -0.7.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    advantages: list[float]


def make_model(workload: Workload, dtype: Dtype = "fp32") -> PreTrainedModel:
    """The model with its random initial weights; every call gives the same weights."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(workload.config_file), dtype=torch.float32)
    return model.to(DTYPES[dtype])


def make_prompts(workload: Workload) -> list[list[int]]:
    """The prompts, of random token ids."""
    vocabulary = AutoConfig.from_pretrained(workload.config_file).vocab_size
    generator = np.random.default_rng(SEED)
    size = (workload.prompts, workload.prompt_length)
    return generator.integers(FIRST_PROMPT_ID, vocabulary, size=size).tolist()


def reward(completion_ids: Sequence[int]) -> float:
    """Share of even token ids: costs nothing, and varies within every group."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
