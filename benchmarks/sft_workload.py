"""The fine-tuning workload that all sides run: the models, the tokens, the optimizer's settings.

Everything that could favour one side lives here, once, so that no side can differ in it. Loss and gradient norm of a hand-written
cross-entropy on plain tensors prove that all do the same work: transformers' model with its loop over experts and its matmul
attention, and log-softmax of the full logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from decode_workload import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PAD_ID = 0
EOS_ID = 1
FIRST_ID = 2  # sequences hold neither padding nor the end token

LEARNING_RATE = 1e-4
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0

SEED = 0


@dataclass(frozen=True)
class Case:
    """One setting that is timed: a model, and how many sequences of how many tokens make a step."""

    name: str
    shape: Mapping[str, Any]
    sequences: int
    length: int

    def make_model(self) -> PreTrainedModel:
        """The model with its random initial weights, fp32; every call gives the same weights."""
        torch.manual_seed(SEED)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.shape)).float()

    def rows(self, step: int) -> list[list[int]]:
        """Token ids of the step's sequences, all of the same length. Every token but a sequence's first is predicted."""
        vocabulary = AutoConfig.for_model(**self.shape).vocab_size
        generator = np.random.default_rng((SEED, step))
        return generator.integers(FIRST_ID, vocabulary, size=(self.sequences, self.length)).tolist()

    @property
    def predicted(self) -> int:
        return self.sequences * (self.length - 1)


@dataclass(frozen=True)
class Step:
    """What a side says of one step. Loss and gradient norm (before clipping) are those of the weights before the update."""

    seconds: float
    loss: float
    gradient_norm: float


CASES = (
    Case("moe_1.9m_32x64", SHAPES["qwen3_moe_tiny"], 32, 64),
    Case("dense_5.0m_8x512", SHAPES["qwen3_5m"], 8, 512),
)

# fp32, sums of thousands of terms in different orders; measured differences are near 1e-7 of a loss and 1e-6 of a norm
LOSS_TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-4


def reference(case: Case) -> tuple[float, float]:
    """Loss and norm of its gradient at the initial weights, over the tokens of step 0."""
    model = case.make_model()
    if "moe" in case.name:
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    ids = torch.tensor(case.rows(0))
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    loss = -logprobs.gather(-1, ids[:, 1:, None]).sum() / case.predicted
    loss.backward()
    norm = torch.stack([parameter.grad.double().norm() for parameter in model.parameters()]).norm()
    return loss.item(), norm.item()


def check(side: str, first: Step, expected: tuple[float, float]) -> None:
    """Print loss and gradient norm of one side's first step beside the reference's; raise where they differ."""
    found = first.loss, first.gradient_norm
    print(
        f"parity {side:4s}: loss {found[0]:.7f} (reference {expected[0]:.7f}), "
        f"gradient norm {found[1]:.7f} (reference {expected[1]:.7f})",
        flush=True,
    )
    if abs(found[0] / expected[0] - 1) > LOSS_TOLERANCE or abs(found[1] / expected[1] - 1) > NORM_TOLERANCE:
        raise RuntimeError(f"{side} does not compute the reference loss; timing it would compare different work")
