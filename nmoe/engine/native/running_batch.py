"""The running sequences and their state as columns, so that a step touches no sequence one by one. What scheduling decides on lies
on the host, what sampling needs on the device."""

# Shapes: S slots, B slots of a slice of them, P tokens a sequence can sample, Z stop ids, M blocks a sequence can hold.

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import Tensor

from nmoe.engine.native.cache import PagedCache
from nmoe.engine.native.layer_cache import BLOCK_TOKENS
from nmoe.engine.native.sampler import uniforms
from nmoe.engine.native.sequence import Sequence, Status
from nmoe.model.device import fetch, put

_NO_STOP = -1


class RunningBatch:
    """Up to S running sequences; `sequences[slot]` is the one in that slot, and the first `len(batch)` slots are in use.

    On the host: the `position` that the last token will take, the number of tokens `generated` and their `limit`, the `table` of
    cache blocks, of which a sequence holds `held`, its `seat` there, and whether it is `plain` (temperature 1), `cuts` its support
    (top-k, top-p) or `streams` its tokens. On the device: `last_token`, the sampling settings, the `uniforms` drawn for every token
    to come, and what was sampled: `tokens`, `logprobs`, `versions`.
    """

    def __init__(self, slots: int, blocks: int, cache: PagedCache) -> None:
        self.slots, self.cache, self.device = slots, cache, cache.device
        self.sequences: list[Sequence] = []
        self.position, self.generated, self.limit, self.held, self.seat = np.zeros((5, slots), dtype=np.int64)
        self.plain, self.cuts, self.streams = np.zeros((3, slots), dtype=np.bool_)
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
        """Slots that are not in use."""
        return self.slots - len(self.sequences)

    def add(self, sequences: list[Sequence]) -> None:
        """Gives sequences of one group, with indices that follow each other, the next slots. They start or, where they have tokens
        already, go on."""
        settings, first = sequences[0].group.request.sampling, sequences[0].index
        slots = slice(len(self), len(self) + len(sequences))
        self._make_room(settings.max_new_tokens)
        self.limit[slots] = settings.max_new_tokens
        self.plain[slots] = settings.temperature == 1
        self.cuts[slots] = settings.top_p < 1 or settings.top_k > 0
        self.streams[slots] = sequences[0].group.on_token is not None
        self["temperature"][slots] = settings.temperature
        self["top_p"][slots] = settings.top_p
        self["top_k"][slots] = settings.top_k
        self._set_stop_ids(slots, settings.stop_ids)
        draws = uniforms(settings.seed, first + len(sequences), settings.max_new_tokens)[first:]
        self["uniforms"][slots, : settings.max_new_tokens] = put(draws, self.device)
        for slot, sequence in enumerate(sequences, slots.start):
            self._put(slot, sequence)
        self.sequences += sequences

    def _put(self, slot: int, sequence: Sequence) -> None:
        count, blocks = len(sequence.token_ids), sequence.block_table
        sequence.status, sequence.slot = Status.RUNNING, slot
        self.table[slot, : len(blocks)] = blocks
        self.held[slot], self.seat[slot] = len(blocks), sequence.seat
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
        """Gives a sequence that has filled its blocks one more."""
        sequence.block_table.append(block)
        self.table[sequence.slot, self.held[sequence.slot]] = block
        self.held[sequence.slot] += 1

    def save(self, sequence: Sequence) -> None:
        """Copies what a sequence has sampled, and the routes of its positions, from columns and cache to the sequence."""
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
        """The sequences that need one more block for their next position."""
        used = len(self)

        slots = (self.position[:used] >= self.held[:used] * BLOCK_TOKENS).nonzero()[0]
        return [self.sequences[slot] for slot in slots.tolist()]

    def record(self, slots: slice, tokens_B: Tensor, logprobs_B: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Records one more token per slot; returns which slots met a stop id and which are finished, `[B]` each."""
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
        """Lets every sequence sample this many tokens."""
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
        counts = (self.position, self.generated, self.limit, self.held, self.seat)
        hosts = (*counts, self.plain, self.cuts, self.streams, self.table)
        for host in hosts:
            host[list(targets)] = host[list(sources)]
        to, of = (put(list(slots), self.device) for slots in (targets, sources))
        for column in self.columns.values():
            column[to] = column[of]
