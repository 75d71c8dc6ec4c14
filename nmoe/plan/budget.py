"""Plans what each stage of a pipeline costs, on meta tensors: parameters, steps, tokens, FLOPs, hours, and the memory of a rank.

A plan, not a measurement: the shares of the peak are assumed. A trained token costs 6 FLOPs for each parameter that it runs
through but the input table's, and 12 x layers x width x context for attention (PaLM, arXiv:2204.02311, appendix B); a sampled token
a third of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nmoe.config.commands import RLConfig, RunConfig
from nmoe.config.listing import columns
from nmoe.config.pipeline import BudgetSection
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.plan.estimate import count
from nmoe.plan.rank_plan import advice, gib, plan, tokens_of_step
from nmoe.recipes.setup import run_path


@dataclass(frozen=True)
class Cost:
    """The cost of a stage, or of one part of it: `Cost("base", 21_400, 11.2e9, 3.94e19, 0.45)` takes 3.07 hours on 8 H100. `tokens`
    and `flops` are of all ranks; `steps` are 0 if they depend on data that is not here."""

    name: str
    steps: int
    tokens: float
    flops: float
    share: float

    def hours(self, budget: BudgetSection) -> float | None:
        if budget.peak_tflops is None:
            return None
        return self.flops / (budget.ranks * budget.peak_tflops * 1e12 * self.share) / 3600


def on_meta(shape: ModelConfig) -> Transformer:
    """Builds a model without memory for its weights."""
    with torch.device("meta"):
        return Transformer(shape)


def training_flops_per_token(model: Transformer) -> float:
    """Returns the FLOPs of a trained token, forward and backward."""
    shape = model.config
    active = count(model) - (0 if model.head is None else model.embedding.weight.numel())
    for moe in model.moe_layers():
        idle = 1 - shape.experts_per_token / shape.experts
        active -= int(
            idle * sum(one.numel() for one in moe.parameters(recurse=False) if one.shape[:1] == (shape.experts,))
        )
    return 6 * active + 12 * shape.layers * shape.heads * shape.head_dim * shape.context_tokens


def costs(name: str, config: RunConfig, shape: ModelConfig, budget: BudgetSection) -> list[Cost]:
    """Returns the cost of a training stage; in reinforcement learning the cost of sampling first, prompts left out."""
    per_token, steps = training_flops_per_token(on_meta(shape)), config.run.steps
    if not isinstance(config, RLConfig):
        tokens = steps * tokens_of_step(config)
        return [Cost(name, steps, tokens, tokens * per_token, budget.training_share)]
    each = min(budget.completion_tokens or config.sampling.max_new_tokens, config.sampling.max_new_tokens)
    tokens = steps * config.batch.prompts_per_step * config.batch.group_size * each
    return [
        Cost(f"{name}, sampling", steps, tokens, tokens * per_token / 3, budget.sampling_share),
        Cost(f"{name}, training", steps, tokens, tokens * per_token, budget.training_share),
    ]


def table(found: Sequence[Cost], budget: BudgetSection) -> Iterator[str]:
    """Yields the lines of a table of costs, and their sum. Hours and dollars need the budget's peak and price."""
    priced = [one.hours(budget) for one in found]

    def end(hours: float | None) -> list[str]:
        dollars = None if hours is None or budget.dollars_an_hour is None else hours * budget.dollars_an_hour
        return [*([] if hours is None else [f"{hours:.2f}"]), *([] if dollars is None else [f"{dollars:.0f}"])]

    heads = [
        "stage",
        "steps",
        "tokens",
        "FLOPs",
        *["hours", "dollars"][: len(end(0.0 if budget.peak_tflops else None))],
    ]
    rows = [
        [one.name, f"{one.steps:,}" if one.steps else "unknown", _short(one.tokens), f"{one.flops:.2e}", *end(hours)]
        for one, hours in zip(found, priced, strict=True)
    ]
    hours = None if None in priced else sum(one for one in priced if one is not None)
    yield from columns([heads, *rows, ["all", "", "", f"{sum(one.flops for one in found):.2e}", *end(hours)]])


def memory_line(config: RunConfig, shape: ModelConfig, budget: BudgetSection) -> str:
    """Returns a line with a stage's parameters and the memory of a rank, and with what helps if that does not fit."""
    found = plan(config, budget.ranks, budget.ranks, shape=shape)
    line = (
        f"{run_path(config).name}: {found.parameters:,} parameters, {gib(found.total)} on each of {budget.ranks} ranks"
    )
    if budget.memory_gib is None:
        return line
    fits = found.total <= budget.memory_gib * 2**30
    room = f"{budget.memory_gib:g} GiB"
    return f"{line}, which fits {room}" if fits else f"{line}, which does not fit {room}; {advice(found)}"


def _short(tokens: float) -> str:
    return f"{tokens / 1e9:.3g}B" if tokens >= 1e8 else f"{tokens / 1e6:.3g}M"
