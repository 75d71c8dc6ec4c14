"""Sequences and the requests they belong to."""

# Shapes: L positions, Y layers, K chosen experts, V vocabulary.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from nmoe.engine.api import Delta, Request
from nmoe.types import FinishReason, Sample


class Status(Enum):
    """Where a sequence is on its way.

    WAITING     not started: it waits for its prompt to be computed, or for a slot
    PREFILLING  holds blocks whose keys are being computed, for a prompt that its siblings will share or for itself
    RUNNING     has a slot in the running batch and decodes one token per step
    PREEMPTED   gave its blocks to an older sequence; keeps its tokens and will be prefilled again
    FINISHED    its sample is delivered
    """

    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request: what it has sampled, and which blocks and which seat of the cache it holds.

    Example: the second of n samples after three tokens is `Sequence(group, index=1, status=Status.PREEMPTED, token_ids=[5, 9, 2],
    logprobs=[-0.1, -2.3, -0.7], versions=[4, 4, 4])`. While a sequence runs, these three columns lie in the running batch, and
    the lists are filled when it leaves. A sequence that is only scored collects its scores in `logprobs`.

    Sequences of a request share its prompt: the first one that has not started is prefilled for all of them.
    """

    group: SequenceGroup
    index: int
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_ids: list[list[int]] | None = None
    block_table: list[int] = field(default_factory=list)
    seat: int = -1  # of the cache; while it is prefilled or runs
    slot: int = -1  # in the running batch
    # Set while it is prefilled: the tokens whose keys are wanted, and how many of them are in the cache.
    prefill_ids: list[int] = field(default_factory=list)
    computed: int = 0
    # The router picks `[L, Y, K]` of a preempted sequence. Its prefill replays them, so that its keys stay those that its
    # tokens were sampled with.
    routes_LYK: Tensor | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Age: the smaller, the older. Where memory runs out, the youngest gives way."""
        return self.group.order, self.index

    @property
    def started(self) -> bool:
        """Whether it has sampled a token, and so has to keep what it has when its keys are computed again."""
        return bool(self.token_ids)

    @property
    def prefilled(self) -> bool:
        return self.computed == len(self.prefill_ids)

    def start_prefill(self, token_ids: list[int], block_table: list[int], seat: int, cached: int) -> None:
        """Takes the blocks for these tokens, of which the first `cached` are computed already, and a seat."""
        self.status, self.seat = Status.PREFILLING, seat
        self.prefill_ids, self.block_table, self.computed = token_ids, block_table, cached

    def end_prefill(self, status: Status) -> list[int]:
        """Leaves the prefill, finished or not, and returns the blocks that it held."""
        blocks, self.status = self.block_table, status
        self.prefill_ids, self.block_table, self.computed = [], [], 0
        return blocks

    def sample(self, reason: FinishReason) -> Sample:
        """The completion, from the sequence's own lists."""
        routes = None if self.routes_LYK is None else self.routes_LYK.numpy()
        return Sample(self.token_ids, self.logprobs, self.versions, reason, self.kept_ids, routes)


@dataclass(slots=True)
class Prompt:
    """A prompt that is in the cache, kept until all sequences of its group have started. `logits_1V` predict the first token."""

    block_table: list[int]
    seat: int
    logits_1V: Tensor


@dataclass(eq=False)
class SequenceGroup:
    """One request in the engine: its sequences and their samples. A request to score tokens has `samples = 0`, one
    sequence that is only prefilled, and ends with `scores`.

    `order` is the request's place in order of arrival. The first `started` sequences have started. `on_token` and `on_sample` are
    called with the sequence's index for every token and for every finished sample.
    """

    request: Request
    order: int
    on_token: Callable[[int, Delta], None] | None = None
    on_sample: Callable[[int, Sample], None] | None = None
    started: int = 0
    prompt: Prompt | None = None
    scores: list[float] | None = None
    aborted: bool = False
    sequences: list[Sequence] = field(init=False)
    samples: list[Sample | None] = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, index) for index in range(max(1, self.request.samples))]
        self.samples = [None] * self.request.samples

    @property
    def scoring(self) -> bool:
        return self.request.samples == 0

    @property
    def unstarted(self) -> int:
        return self.request.samples - self.started

    @property
    def next_sequence(self) -> Sequence:
        """The first sequence that has not started."""
        return self.sequences[self.started]

    @property
    def finished(self) -> bool:
        if self.scoring:
            return self.scores is not None or self.aborted
        return all(sample is not None for sample in self.samples)

    def deliver(self, sequence: Sequence, reason: FinishReason) -> None:
        """Records the sample of a sequence that has ended, and passes it on."""
        sequence.status = Status.FINISHED
        sample = self.samples[sequence.index] = sequence.sample(reason)
        if self.on_sample is not None:
            self.on_sample(sequence.index, sample)
