"""The GRPO workload that both frameworks run: the model, the prompts, the completion lengths, the reward, the settings.

Everything that could favour one side lives here, once, so that neither side can differ in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

CONFIG_FILE = Path(__file__).with_name("qwen3_moe_tiny.json")

PAD_ID = 0
EOS_ID = 1
FIRST_PROMPT_ID = 2  # prompts hold neither padding nor the end token

N_PROMPTS = 8
N_COMPLETIONS = 8  # per prompt
N_ROWS = N_PROMPTS * N_COMPLETIONS
PROMPT_LENGTH = 16
MAX_NEW_TOKENS = 32

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
    """One setting that is timed. `min_length == max_length` gives completions of one fixed length."""

    name: str
    min_length: int
    max_length: int

    def lengths(self, step: int) -> list[int]:
        """Completion lengths in tokens of rows 0..63 at `step`; row i belongs to prompt i // 8. The same for both sides."""
        generator = np.random.default_rng((SEED, step))
        return generator.integers(self.min_length, self.max_length + 1, size=N_ROWS).tolist()


CASES = (Case("fixed_32", 32, MAX_NEW_TOKENS), Case("uniform_2_32", 2, MAX_NEW_TOKENS))


@dataclass(frozen=True)
class GradedBatch:
    """Completions with their advantages, as both losses see them, e.g. for the first of 64 rows:

    prompt_ids[0] = [17, 3021, ...] (16 ids), completion_ids[0] = [9, 44, 1] (2 to 32 ids), advantages[0] = -0.7.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    advantages: list[float]


def make_model() -> Qwen3MoeForCausalLM:
    """The tiny Qwen3-MoE with its random initial weights, fp32; every call gives the same weights."""
    torch.manual_seed(SEED)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json_file(CONFIG_FILE)).float()


def make_prompts() -> list[list[int]]:
    """The 8 prompts, 16 random token ids each."""
    vocabulary = Qwen3MoeConfig.from_json_file(CONFIG_FILE).vocab_size
    generator = np.random.default_rng(SEED)
    return generator.integers(FIRST_PROMPT_ID, vocabulary, size=(N_PROMPTS, PROMPT_LENGTH)).tolist()


def reward(completion_ids: Sequence[int]) -> float:
    """Share of even token ids: costs nothing, and varies within every group."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
