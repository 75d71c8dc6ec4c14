"""What the engine's core works on: requests, prompts on their way into the cache, and sequences that had to give way."""

# Shapes: L positions, Y layers, K chosen experts, V vocabulary.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from nmoe.engine.api import Delta, Request
from nmoe.types import Sample


@dataclass
class Prompt:
    """A prompt whose keys are in the cache, kept until all its samples have started."""

    blocks: list[int]
    logits_1V: Tensor


@dataclass(eq=False)
class Job:
    """One request on its way: which samples have started, and those that are done. One that only scores its tokens has `n = 0`
    and ends with `scores`."""

    request: Request
    order: int
    on_token: Callable[[int, Delta], None] | None
    samples: list[Sample | None]
    started: int = 0
    prompt: Prompt | None = None
    kept: dict[int, list[list[int]]] = field(default_factory=dict)
    on_sample: Callable[[int, Sample], None] | None = None
    scores: list[float] | None = None
    aborted: bool = False

    def deliver(self, index: int, sample: Sample) -> None:
        """Notes a sample that has ended, and tells whoever waits for it."""
        self.samples[index] = sample
        if self.on_sample is not None:
            self.on_sample(index, sample)

    @property
    def scoring(self) -> bool:
        return self.request.n == 0

    @property
    def finished(self) -> bool:
        if self.scoring:
            return self.scores is not None or self.aborted
        return all(sample is not None for sample in self.samples)


@dataclass(eq=False)
class Paused:
    """A sequence that gave its blocks to an older one. Its routes are replayed when its keys are computed again, so that they
    stay those its tokens were sampled with."""

    job: Job
    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    routes_LYK: Tensor | None


@dataclass(eq=False)
class Prefill:
    """Tokens whose keys are being computed, up to `done` so far: of a new prompt, or of a paused sequence."""

    job: Job
    paused: Paused | None
    token_ids: list[int]
    blocks: list[int]
    done: int
    scores: list[float] = field(default_factory=list)

    @property
    def replay(self) -> Tensor | None:
        """The routes to take, `[L, Y, K]`; None: the model's own."""
        return self.paused.routes_LYK if self.paused else None

    @property
    def order(self) -> tuple[int, int]:
        return self.job.order, self.paused.index if self.paused else self.job.started
