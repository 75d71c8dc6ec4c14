"""Plans what nanochat's reference budget costs with the presets `speedrun_gpu*`: tokens, FLOPs, hours and dollars by stage.

    python scripts/gpu_budget.py

A plan, not a measurement: shares of the peak are assumed, and printed. Trained tokens cost 6 FLOPs for each parameter but the input
table's, and 12 x layers x width x context for attention (PaLM, arXiv:2204.02311, appendix B); sampled ones a third of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nmoe.config.commands import PretrainConfig, RLConfig, SFTConfig
from nmoe.config.loader import load_run
from nmoe.config.tables.model import ModelShape
from nmoe.rl.episodes import with_steps_of_episodes

GPUS, PEAK_FLOPS, DOLLARS_AN_HOUR = 8, 989e12, 24.0  # H100 SXM in bfloat16, dense; a node of eight
VOCABULARY, GSM8K_PROBLEMS = 65_536, 7_473
# What a stage reaches of the peak. Sampling reads all weights for each token of a small batch.
TRAINING, SAMPLING = 0.45, 0.03
# Tokens of a completion, of at most 256.
COMPLETION_TOKENS = 150


@dataclass(frozen=True)
class Stage:
    """One stage: `Stage("base", 11.2e9, 4.0e19, 0.45)` takes 3.1 hours."""

    name: str
    tokens: float
    flops: float
    share: float

    @property
    def hours(self) -> float:
        return self.flops / (GPUS * PEAK_FLOPS * self.share) / 3600


def parameters(shape: ModelShape) -> int:
    """All of a dense model without biases: table, head, attention, gated FFN and norms."""
    width, dim = shape.hidden_size, shape.head_dim
    attention = width * dim * (2 * shape.heads + 2 * shape.kv_heads)
    norms = 2 * width + 2 * dim
    return shape.layers * (attention + 3 * width * shape.intermediate_size + norms) + 2 * VOCABULARY * width + width


def training_flops_per_token(shape: ModelShape) -> float:
    attention = 12 * shape.layers * shape.heads * shape.head_dim * shape.context_tokens
    return 6 * (parameters(shape) - VOCABULARY * shape.hidden_size) + attention


def stages() -> Iterator[Stage]:
    """The stages of the presets, in order."""
    base = load_run(Path("speedrun_gpu"), PretrainConfig)
    shape = base.model.shape
    assert shape is not None, "the preset makes a new model"
    per_token = training_flops_per_token(shape)
    tokens = base.run.steps * base.data.tokens_per_step
    yield Stage("base", tokens, tokens * per_token, TRAINING)
    for name in ("midtraining", "sft"):
        config = load_run(Path(f"speedrun_gpu_{name}"), SFTConfig)
        tokens = config.run.steps * config.records.tokens_per_step
        yield Stage(name, tokens, tokens * per_token, TRAINING)
    rl = with_steps_of_episodes(load_run(Path("speedrun_gpu_rl"), RLConfig), GSM8K_PROBLEMS)
    tokens = rl.run.steps * rl.batch.prompts_per_step * rl.batch.group_size * COMPLETION_TOKENS
    yield Stage("rl, sampling", tokens, tokens * per_token / 3, SAMPLING)
    yield Stage("rl, training", tokens, tokens * per_token, TRAINING)


def main() -> None:
    print(
        "| stage | tokens | FLOPs | share of the peak, assumed | hours on 8 H100 | dollars |\n|---|---|---|---|---|---|"
    )
    found = list(stages())
    for stage in found:
        print(
            f"| {stage.name} | {stage.tokens / 1e9:.3g}B | {stage.flops:.2e} | {stage.share:.0%} | {stage.hours:.2f} | "
            f"{stage.hours * DOLLARS_AN_HOUR:.0f} |"
        )
    hours = sum(stage.hours for stage in found)
    print(f"| all | | {sum(stage.flops for stage in found):.2e} | | {hours:.2f} | {hours * DOLLARS_AN_HOUR:.0f} |")


if __name__ == "__main__":
    main()
