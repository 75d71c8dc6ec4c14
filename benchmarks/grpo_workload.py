"""The GRPO workload that both frameworks run: the model, the prompts, the completion lengths, the reward, the settings.

Everything that could favour one side lives here, once, so that neither side can differ in it. A hand-written dapo loss on plain
tensors proves that both do the same work. Dapo (Yu et al. 2025, arXiv:2503.14476, equation 8) is the clipped policy-gradient loss
averaged over all completion tokens of the batch. The reference runs transformers' model with its loop over experts and its matmul
attention, padded, with full logits: another path through the mathematics than either contestant takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from decode_workload import SHAPES
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

    shape: Mapping[str, Any]
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
        few = min(self.prompts, 2**25 // AutoConfig.for_model(**self.shape).vocab_size // 256)
        return replace(self, prompts=few, rows_at_once=few * N_COMPLETIONS)


WORKLOADS = {
    "qwen3_moe_tiny": Workload(SHAPES["qwen3_moe_tiny"], 8, 16, 32, 64, 16384, CASES),
    "smollm2_135m": Workload(SHAPES["smollm2_135m"], 16, 64, 64, 16, 4096, (Case("fixed_64", 64, 64),)),
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
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**workload.shape), dtype=torch.float32)
    return model.to(DTYPES[dtype])


def make_prompts(workload: Workload) -> list[list[int]]:
    """The prompts, of random token ids."""
    vocabulary = AutoConfig.for_model(**workload.shape).vocab_size
    generator = np.random.default_rng(SEED)
    size = (workload.prompts, workload.prompt_length)
    return generator.integers(FIRST_PROMPT_ID, vocabulary, size=size).tolist()


def reward(completion_ids: Sequence[int]) -> float:
    """Share of even token ids: costs nothing, and varies within every group."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


# fp32, sums of thousands of terms in different orders; measured differences are near 1e-6
RELATIVE_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-6


def reference_gradients(workload: Workload, batch: GradedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient by parameter name of the dapo loss at the initial weights, before clipping."""
    model = make_model(workload)
    if getattr(model.config, "num_experts_per_tok", 0):
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    rows = [p + c for p, c in zip(batch.prompt_ids, batch.completion_ids, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
    present = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    sampled = present.clone()
    for row, prompt in enumerate(batch.prompt_ids):
        sampled[row, : len(prompt)] = 0

    logits = model(input_ids=ids, attention_mask=present).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    advantages = torch.tensor(batch.advantages)[:, None]
    ratio = (logprobs - logprobs.detach()).exp()  # 1 in value: the batch was sampled from these very weights
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantages)
    mask = sampled[:, 1:]
    loss = -(surrogate * mask).sum() / mask.sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def total_norm(gradients: dict[str, torch.Tensor]) -> float:
    """Euclidean norm over all parameters together."""
    return torch.stack([g.double().norm() for g in gradients.values()]).norm().item()


def clipped(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients scaled to a total norm of at most MAX_GRAD_NORM, as torch's clip_grad_norm_ does it."""
    scale = min(1.0, MAX_GRAD_NORM / (total_norm(gradients) + 1e-6))
    return {name: g * scale for name, g in gradients.items()}


def check_batch(side: str, batch: GradedBatch, lengths: list[int]) -> None:
    """Raise unless the batch has the forced lengths and the advantages that its own tokens earn."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, prompt in enumerate(batch.prompt_ids):
        groups[tuple(prompt)].append(row)
    if sorted(map(len, batch.completion_ids)) != sorted(lengths):
        raise RuntimeError(f"{side} trained on other completion lengths than were forced")
    for rows in groups.values():
        rewards = torch.tensor([reward(batch.completion_ids[row]) for row in rows])
        expected = (rewards - rewards.mean()) / (rewards.std() + ADVANTAGE_EPS)
        found = torch.tensor([batch.advantages[row] for row in rows])
        # nmoe's constant beside the deviation is smaller than TRL's: at a deviation near 0.1 that is one part in a thousand
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-4):
            raise RuntimeError(
                f"{side} trained on advantages that its completions did not earn: {found} for {expected}"
            )


def check_loss(side: str, found: tuple[float, float], expected: tuple[float, float]) -> None:
    """Print loss and gradient norm of one side beside the reference's; raise where they differ."""
    print(
        f"parity {side:4s}: loss {found[0]:+.8f} (reference {expected[0]:+.8f}), "
        f"gradient norm {found[1]:.7f} (reference {expected[1]:.7f})",
        flush=True,
    )
    if abs(found[0] - expected[0]) > LOSS_TOLERANCE or abs(found[1] / expected[1] - 1) > RELATIVE_TOLERANCE:
        raise RuntimeError(f"{side} does not compute the reference loss; timing it would compare different work")


def check_gradients(side: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Print the relative distance between two sets of gradients; raise where it is more than rounding."""
    difference = {name: found[name] - expected[name] for name in expected}
    distance = total_norm(difference) / total_norm(expected)
    print(f"parity {side:4s}: gradients differ by {distance:.1e} of their norm", flush=True)
    if distance > RELATIVE_TOLERANCE:
        raise RuntimeError(f"{side} does not compute the reference gradient; timing it would compare different work")
