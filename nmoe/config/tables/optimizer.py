"""[optimizer]: AdamW and its schedule."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from nmoe.config.base import Conflict, Section

# Adapters learn at about ten times the rate of all weights (Thinking Machines, "LoRA Without Regret", 2025).
LORA_LEARNING_RATE_FACTOR = 10


def _learning_rate(default: float) -> Any:
    return Field(default=default, gt=0, description="peak learning rate; with a [lora] the default is ten times this")


class OptimizerSection(Section):
    """[optimizer]: AdamW with linear warm-up and cosine decay."""

    learning_rate: float = _learning_rate(1e-6)
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="steps of linear warm-up; a run that is not longer warms up until its last step",
    )
    warmup_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="the warm-up as a share of the run's steps, in place of warmup_steps"
    )
    allow_slow_warmup: bool = Field(
        default=False,
        description="start although the learning rate stays under 30% of its peak for the first 20 steps (pretraining, "
        "fine-tuning: or 5% of the run, if that is longer)",
    )
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="final learning rate as a share of the peak")
    schedule_steps: int = Field(
        default=0,
        ge=0,
        description="steps after which the learning rate stays at its lowest; 0: run.steps, and of a resumed run those that it "
        "began with",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(default=1e-8, gt=0, description="epsilon, added to the root of the second moment")
    max_grad_norm: float = Field(default=1.0, gt=0, description="the gradient norm is clipped to this")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.warmup_steps and self.warmup_ratio:
            yield Conflict("warmup_ratio", f"excludes warmup_steps = {self.warmup_steps}; give one of the two")


class FineTuningOptimizerSection(OptimizerSection):
    """[optimizer] of fine-tuning on given examples."""

    learning_rate: float = _learning_rate(1e-5)


class PretrainingOptimizerSection(OptimizerSection):
    """[optimizer] of pretraining."""

    learning_rate: float = _learning_rate(3e-4)
