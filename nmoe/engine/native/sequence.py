"""Sequences, the requests they belong to, and the batch of running sequences.

The running batch keeps its sequences' state in columns, so that a step touches no sequence one by one. Columns that scheduling
reads are on the host, columns that sampling reads on the device.
"""

# Shapes: L positions, Y layers, K chosen experts, V vocabulary, S slots, B slots of a slice of them, P tokens a sequence can
# sample, Z stop ids, M blocks a sequence can hold.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from nmoe.engine.api import Delta, RawLogprob, Request
from nmoe.engine.native.cache import BLOCK_TOKENS, PagedCache
from nmoe.engine.native.sampler import uniforms
from nmoe.model.device import fetch, put
from nmoe.types import FinishReason, Sample


class Status(Enum):
    """The state of a sequence in the engine.

    WAITING     not started: it waits for its prompt to be computed, or for a slot
    PREFILLING  holds blocks whose keys are being computed, for a prompt that its request's sequences share, or for itself
    RUNNING     has a slot in the running batch and decodes one token per step
    PREEMPTED   gave its blocks to an older sequence; keeps its tokens and will be prefilled again
    HELD        as PREEMPTED, but waits for new weights before that (`nmoe.engine.native.held`)
    FINISHED    its sample is delivered
    """

    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    HELD = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request: its sampled tokens, and the blocks and the state slot of the cache that it holds.

    Example: the second of n samples after three tokens is `Sequence(group, index=1, status=Status.PREEMPTED, token_ids=[5, 9, 2],
    logprobs=[-0.1, -2.3, -0.7], versions=[4, 4, 4])`. While a sequence runs, these three columns lie in the running batch, and
    the lists are filled when it leaves. A sequence that is only scored collects its scores in `logprobs` or `raw`.

    Sequences of a request share its prompt: the first one that has not started is prefilled for all of them.
    """

    group: SequenceGroup
    index: int
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_ids: list[list[int]] | None = None
    raw: list[RawLogprob] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    state_slot: int = -1  # of the cache; while it is prefilled or runs
    slot: int = -1  # in the running batch
    # Set while it is prefilled: the tokens whose keys are wanted, and how many of them are in the cache.
    prefill_ids: list[int] = field(default_factory=list)
    computed: int = 0
    # The router picks `[L, Y, K]` of a preempted sequence. Its prefill replays them, so that its keys stay those that its
    # tokens were sampled with.
    routes_LYK: Tensor | None = None

    @property
    def order(self) -> tuple[int, int]:
        """The sequence's age, to sort by: the smaller, the older. If the cache is full, the youngest loses its blocks."""
        return self.group.order, self.index

    @property
    def started(self) -> bool:
        """Whether the sequence has sampled a token, and so has to keep its tokens when its keys are computed again."""
        return bool(self.token_ids)

    @property
    def prefilled(self) -> bool:
        return self.computed == len(self.prefill_ids)

    def keys_are_of(self, version: int) -> bool:
        """Returns whether weights of this version computed all keys of the sequence, so that other sequences can share them."""
        return not self.group.scoring and (not self.started or self.versions[0] == version)

    def tokens_to_prefill(self) -> tuple[list[int], int]:
        """Returns the tokens whose keys the sequence needs, and how many of them, from the first on, may come from the cache.
        Before its start, it needs the logits of the prompt's last token, which therefore has to be computed; and scoring needs the
        logits of all."""
        token_ids = [*self.group.request.prompt_ids, *self.token_ids[:-1]]
        if self.group.scoring:
            return token_ids, 0
        return token_ids, len(token_ids) if self.started else len(token_ids) - 1

    def start_prefill(self, token_ids: list[int], block_table: list[int], state_slot: int, cached: int) -> None:
        """Begins a prefill: the sequence gets a state slot, and the blocks for these tokens, of which the first `cached` are
        computed already."""
        self.status, self.state_slot = Status.PREFILLING, state_slot
        self.prefill_ids, self.block_table, self.computed = token_ids, block_table, cached

    def end_prefill(self, status: Status) -> list[int]:
        """Ends the prefill, finished or not, and returns the sequence's blocks."""
        blocks, self.status = self.block_table, status
        self.prefill_ids, self.block_table, self.computed = [], [], 0
        return blocks

    def sample(self, reason: FinishReason) -> Sample:
        """Returns the completion, made of the sequence's lists."""
        routes = None if self.routes_LYK is None else self.routes_LYK.numpy()
        return Sample(self.token_ids, self.logprobs, self.versions, reason, self.kept_ids, routes)


@dataclass(slots=True)
class Prompt:
    """A prompt that is in the cache, kept until all sequences of its group have started. `logits_1V` predict the first token."""

    block_table: list[int]
    state_slot: int
    logits_1V: Tensor


@dataclass(eq=False)
class SequenceGroup:
    """One request in the engine: its sequences and their samples. A request to score tokens is `scoring`: it has `samples = 0`
    and one sequence that is only prefilled, and ends with `scores`; raw ones, if it asks for `top_logprobs`, of the tokens from
    position `scored_from` on.

    Requests are numbered by `order` as they arrive. `to_start` are the sequences that have not started. `on_deltas` is called once
    in a step with the new tokens of all sequences, and `on_sample` with the index of every sample as it ends.
    """

    request: Request
    order: int
    on_deltas: Callable[[list[Delta]], None] | None = None
    on_sample: Callable[[int, Sample], None] | None = None
    scored_from: int = 1
    prompt: Prompt | None = None
    scores: list[float] | list[RawLogprob] | None = None
    aborted: bool = False
    to_start: list[Sequence] = field(init=False)
    sequences: list[Sequence] = field(init=False)
    samples: list[Sample | None] = field(init=False)
    scoring: bool = field(init=False)

    def __post_init__(self) -> None:
        self.scoring = self.request.samples == 0
        self.sequences = [Sequence(self, index) for index in range(max(1, self.request.samples))]
        self.to_start = list(self.sequences)
        self.samples = [None] * self.request.samples

    @property
    def limit(self) -> int:
        """The number of tokens at which a sequence ends."""
        return self.request.sampling.max_new_tokens

    @property
    def unstarted(self) -> int:
        """The number of sequences that will need a slot to start."""
        return 0 if self.scoring else len(self.to_start)

    @property
    def next_sequence(self) -> Sequence:
        """The first sequence that has not started."""
        return self.to_start[0]

    @property
    def finished(self) -> bool:
        if self.scoring:
            return self.scores is not None or self.aborted
        return all(sample is not None for sample in self.samples)

    def deliver(self, sequence: Sequence, reason: FinishReason) -> None:
        """Records the sample of a sequence that has ended, and calls `on_sample` with it."""
        sequence.status = Status.FINISHED
        sample = self.samples[sequence.index] = sequence.sample(reason)
        if self.on_sample is not None:
            self.on_sample(sequence.index, sample)


_NO_STOP = -1


class RunningBatch:
    """Up to S running sequences; `sequences[slot]` is the one in that slot, and the first `len(batch)` slots are in use.

    On the host: the `position` that the last token will take, the number of tokens `generated` and their `limit`, the `table` of
    cache blocks, of which a sequence holds `held`, its `state_slot` there, and whether it is `plain` (temperature 1), `cuts` its
    support (top-k, top-p, min_p), `adjusts` its logits (penalties, bias), `streams` its tokens or wants them with `raw`
    log-probabilities; and settings that few requests have: `min_p`, `presence`, `frequency`. On the device: `last_token`, the
    sampling settings, the `uniforms` drawn for every token to come, and the samples: `tokens`, `logprobs`, `versions`.
    """

    def __init__(self, slots: int, blocks: int, cache: PagedCache) -> None:
        self.slots, self.cache, self.device = slots, cache, cache.device
        self.sequences: list[Sequence] = []
        self.position, self.generated, self.limit, self.held, self.state_slot = np.zeros((5, slots), dtype=np.int64)
        self.plain, self.cuts, self.adjusts, self.streams, self.raw = np.zeros((5, slots), dtype=np.bool_)
        self.min_p, self.presence, self.frequency = np.zeros((3, slots), dtype=np.float32)
        self.table = np.zeros((slots, blocks), dtype=np.int64)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=self.device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float32, device=self.device)

        self.columns: dict[str, Tensor] = {
            "last_token": integers(slots),
            "temperature": floats(slots),
            "top_p": floats(slots),
            "top_k": integers(slots),
            "stop_ids": torch.full((slots, 1), _NO_STOP, dtype=torch.int64, device=self.device),
            "uniforms": floats(slots, 0),
            "tokens": integers(slots, 0),
            "logprobs": floats(slots, 0),
            "versions": integers(slots, 0),
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def free(self) -> int:
        """The number of slots that are not in use."""
        return self.slots - len(self.sequences)

    def add(self, sequences: list[Sequence]) -> None:
        """Gives sequences of one group, in order of their index, the next slots. They start or, if they have tokens already,
        continue."""
        group, indices = sequences[0].group, [sequence.index for sequence in sequences]
        settings = group.request.sampling
        slots = slice(len(self), len(self) + len(sequences))
        self._make_room(settings.max_new_tokens)
        self.limit[slots] = group.limit
        self.plain[slots] = settings.temperature == 1
        self.cuts[slots] = settings.top_p < 1 or settings.top_k > 0 or settings.min_p > 0
        self.adjusts[slots] = settings.adjusts
        self.streams[slots] = group.on_deltas is not None
        self.raw[slots] = group.on_deltas is not None and group.request.top_logprobs is not None
        self.min_p[slots] = settings.min_p
        self.presence[slots], self.frequency[slots] = settings.presence_penalty, settings.frequency_penalty
        self["temperature"][slots] = settings.temperature
        self["top_p"][slots] = settings.top_p
        self["top_k"][slots] = settings.top_k
        self._set_stop_ids(slots, settings.stop_ids)
        draws = uniforms(settings.seed, indices[-1] + 1, settings.max_new_tokens)[indices]
        self["uniforms"][slots, : settings.max_new_tokens] = put(draws, self.device)
        for slot, sequence in enumerate(sequences, slots.start):
            self._put(slot, sequence)
        self.sequences += sequences

    def _put(self, slot: int, sequence: Sequence) -> None:
        count, blocks = len(sequence.token_ids), sequence.block_table
        sequence.status, sequence.slot = Status.RUNNING, slot
        self.table[slot, : len(blocks)] = blocks
        self.held[slot], self.state_slot[slot] = len(blocks), sequence.state_slot
        self.generated[slot] = count
        # The last token is sampled and not yet fed.
        self.position[slot] = len(sequence.group.request.prompt_ids) + max(0, count - 1)
        if count:
            self["last_token"][slot] = sequence.token_ids[-1]
            for name, values in (
                ("tokens", sequence.token_ids),
                ("logprobs", sequence.logprobs),
                ("versions", sequence.versions),
            ):
                column = self[name]
                column[slot, :count] = put(torch.tensor(values, dtype=column.dtype), self.device)

    def add_block(self, sequence: Sequence, block: int) -> None:
        """Gives one more block to a sequence that has filled its blocks."""
        sequence.block_table.append(block)
        self.table[sequence.slot, self.held[sequence.slot]] = block
        self.held[sequence.slot] += 1

    def save(self, sequence: Sequence) -> None:
        """Copies a sequence's tokens, log-probabilities and versions from the columns, and its router picks from the cache, to the
        sequence."""
        slot = sequence.slot
        count, position = int(self.generated[slot]), int(self.position[slot])
        picks = self.cache.routes
        routes_LYK = None if picks is None else picks.read(sequence.block_table, position)
        columns = [self[name][slot, :count] for name in ("tokens", "logprobs", "versions")]
        tokens, logprobs, versions, *routes = fetch(*columns, *([] if routes_LYK is None else [routes_LYK]))
        sequence.token_ids, sequence.logprobs, sequence.versions = tokens.tolist(), logprobs.tolist(), versions.tolist()
        sequence.routes_LYK = routes[0] if routes else None

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Frees the sequences' slots. The last running sequences move into the gaps."""
        removed = {sequence.slot for sequence in sequences}
        left = len(self) - len(removed)
        gaps = sorted(slot for slot in removed if slot < left)
        movers = [slot for slot in range(left, len(self)) if slot not in removed]
        if movers:
            self._move(gaps, movers)
            for target, source in zip(gaps, movers, strict=True):
                self.sequences[target] = self.sequences[source]
                self.sequences[target].slot = target
        del self.sequences[left:]

    def clear(self) -> None:
        """Frees every slot."""
        self.sequences.clear()

    def full(self) -> list[Sequence]:
        """Returns the sequences that need one more block for their next position."""
        used = len(self)

        slots = (self.position[:used] >= self.held[:used] * BLOCK_TOKENS).nonzero()[0]
        return [self.sequences[slot] for slot in slots.tolist()]

    def record(self, slots: slice, tokens_B: Tensor, logprobs_B: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Records one more token per slot; returns which slots got a stop token and which are finished, `[B]` each."""
        rows = torch.arange(slots.start, slots.stop, device=self.device)
        at_B = put(self.generated[slots], self.device)
        self["tokens"][rows, at_B] = tokens_B
        self["logprobs"][rows, at_B] = logprobs_B
        self["versions"][rows, at_B] = version
        self["last_token"][slots] = tokens_B
        self.generated[slots] += 1
        stopped_B = (tokens_B.unsqueeze(-1) == self["stop_ids"][slots]).any(-1)
        full_B = put(self.generated[slots] >= self.limit[slots], self.device)
        return stopped_B, stopped_B | full_B

    def _make_room(self, tokens: int) -> None:
        """Widens the columns, so that every sequence can sample this many tokens."""
        old = self["tokens"].shape[1]
        if tokens > old:
            wider = max(tokens, 2 * old)
            for name in ("uniforms", "tokens", "logprobs", "versions"):
                column = self[name]
                self.columns[name] = torch.cat([column, column.new_zeros(column.shape[0], wider - old)], 1)

    def _set_stop_ids(self, slots: slice, stop_ids: tuple[int, ...]) -> None:
        column = self["stop_ids"]
        missing = len(stop_ids) - column.shape[1]
        if missing > 0:
            filler = torch.full((column.shape[0], missing), _NO_STOP, device=self.device)
            column = self.columns["stop_ids"] = torch.cat([column, filler], 1)
        column[slots] = _NO_STOP
        column[slots, : len(stop_ids)] = put(stop_ids, self.device)

    def _move(self, targets: Collection[int], sources: Collection[int]) -> None:
        counts = (self.position, self.generated, self.limit, self.held, self.state_slot)
        flags = (self.plain, self.cuts, self.adjusts, self.streams, self.raw)
        hosts = (*counts, *flags, self.min_p, self.presence, self.frequency, self.table)
        for host in hosts:
            host[list(targets)] = host[list(sources)]
        to, of = (put(list(slots), self.device) for slots in (targets, sources))
        for column in self.columns.values():
            column[to] = column[of]
