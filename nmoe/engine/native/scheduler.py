"""The scheduler: which prompts are computed in a step, which sequences start, which decode, and which give way.

Sequences run in order of arrival. Prompts are prefilled in chunks, so that a long one does not hold up those that decode. When the
cache runs out of blocks, the youngest sequence is preempted: it loses its blocks, keeps its tokens, and is prefilled again later.
The oldest sequence therefore always finishes, and so does every one after it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from nmoe.engine.native.block_manager import BlockManager
from nmoe.engine.native.cache import BLOCK_TOKENS
from nmoe.engine.native.sequence import Prompt, RunningBatch, Sequence, SequenceGroup, Status

# Prompt tokens computed in one step, so that a long prompt holds up those that decode for no longer than this.
PREFILL_TOKENS = 8192

# New requests wait for others while they are fewer than one per so many running sequences, for at most so many steps.
GATHER_SHARE, GATHER_STEPS = 16, 8


@dataclass(frozen=True)
class Chunk:
    """The part of a sequence's prefill that one step computes: positions `start` to `stop`."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether it ends the prefill."""
        return self.stop == len(self.sequence.prefill_ids)


@dataclass(frozen=True)
class Start:
    """Sequences that start in this step: their slots, how many of them come from each prompt, and which blocks and seats to copy
    first (source, target), since each sequence goes on in its own copy of its prompt's last block and seat."""

    slots: slice
    prompts: list[tuple[Prompt, int]]
    blocks: list[tuple[int, int]]
    seats: list[tuple[int, int]]


class Scheduler:
    """Holds every unfinished request, and decides in each step what is prefilled, started and decoded.

    `running` is the batch of sequences that decode; the scheduler fills and empties its slots.
    """

    def __init__(self, blocks: BlockManager, running: RunningBatch, prefill_tokens: int = PREFILL_TOKENS) -> None:
        self.blocks, self.running, self.prefill_tokens = blocks, running, prefill_tokens
        self.groups: dict[str, SequenceGroup] = {}  # unfinished requests by id
        self.waiting: deque[SequenceGroup] = deque()  # with sequences to start, or tokens to score
        self.preempted: list[Sequence] = []  # oldest first
        self.prefilling: list[Sequence] = []  # oldest first
        self.arrived = self.steps = self.preemptions = self.prefix_hit_tokens = 0
        self._gather_until = 0  # the step at which new requests are admitted; 0 if none is held back

    def add(self, group: SequenceGroup) -> None:
        self.groups[group.request.request_id] = group
        self.waiting.append(group)
        self.arrived += 1

    def clear(self, blocks: BlockManager) -> None:
        """Drops every request without giving its blocks back: `blocks` is the manager from now on."""
        self.blocks = blocks
        self.running.clear()
        self.groups.clear()
        self.waiting.clear()
        self.preempted.clear()
        self.prefilling.clear()
        self._gather_until = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.preempted or self.prefilling or len(self.running))

    # Prefill

    def schedule_prefill(self) -> list[Chunk]:
        """The chunks to compute in this step, at most `prefill_tokens` tokens, oldest first within these kinds: those that start at
        position 0, those that continue, and those that replay routes. So the runner's attention wants them."""
        if self._worth_admitting():
            self._admit()
        budget, chunks = self.prefill_tokens, []
        for sequence in self.prefilling:
            count = min(budget, len(sequence.prefill_ids) - sequence.computed)
            if count:
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + count))
                budget -= count
        return sorted(chunks, key=lambda chunk: (chunk.sequence.routes_LYK is not None, chunk.start > 0))

    def finish_prefill(self, chunks: list[Chunk], logits: dict[Sequence, Tensor], version: int) -> list[SequenceGroup]:
        """Records that the chunks are computed by weights of this version. Where a prefill is complete, a preempted sequence runs
        again, a prompt is ready for its group, with its `logits`, and a scored group has finished; these groups are returned."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.stop
            new_keys = not sequence.started or sequence.versions[0] == version
            if chunk.last and new_keys and not sequence.group.scoring:
                self.blocks.remember(sequence.prefill_ids, sequence.block_table)
        scored = []
        for sequence in [sequence for sequence in self.prefilling if sequence.prefilled]:
            self.prefilling.remove(sequence)
            group, blocks, seat = sequence.group, sequence.end_prefill(Status.WAITING), sequence.seat
            if sequence.started:
                sequence.block_table, sequence.routes_LYK = blocks, None
                self.running.add([sequence])
            elif group.scoring:
                group.scores = sequence.logprobs
                self._release(blocks, seat)
                self.waiting.remove(group)
                scored.append(group)
            else:
                group.prompt = Prompt(blocks, seat, logits[sequence])
        return scored

    def _release(self, blocks: list[int], seat: int) -> None:
        """Gives back what a sequence or a prompt held."""
        self.blocks.release(blocks)
        self.blocks.release_seat(seat)

    def _worth_admitting(self) -> bool:
        """Whether to admit new requests now. Beside many running sequences, a prompt that comes alone costs a forward pass of its
        own, so that requests are gathered for a few steps: answers of tools come one by one."""
        arrivals = len(self.waiting) + len(self.preempted)
        if not self.prefilling and arrivals * GATHER_SHARE < len(self.running):
            if self._gather_until == 0:
                self._gather_until = self.steps + GATHER_STEPS if arrivals else 0
            if arrivals == 0 or self.steps < self._gather_until:
                return False
        self._gather_until = 0
        return True

    def _admit(self) -> None:
        """Starts the prefill of what waits, preempted sequences before new ones and oldest first, as slots and blocks allow."""
        free = self.running.free - sum(group.unstarted for group in self.waiting if group.prompt)
        free -= sum(1 if sequence.started else sequence.group.unstarted for sequence in self.prefilling)
        tokens = sum(len(sequence.prefill_ids) - sequence.computed for sequence in self.prefilling)
        new = [group.next_sequence for group in self.waiting if group.prompt is None]
        for sequence in [*self.preempted, *(s for s in new if s.status is Status.WAITING)]:
            if free <= 0 or tokens >= self.prefill_tokens or not self._start_prefill(sequence):
                return
            tokens += len(self.prefilling[-1].prefill_ids) - self.prefilling[-1].computed
            free -= 1 if sequence.started else max(1, sequence.group.unstarted)

    def _start_prefill(self, sequence: Sequence) -> bool:
        """Gives a sequence blocks for its prompt and sampled tokens, cached prefixes among them; False if there are too few."""
        group, resumed = sequence.group, sequence.started
        token_ids = [*group.request.prompt_ids, *sequence.token_ids[:-1]]
        # A new sequence needs the last token's logits, so that this token has to be computed; a scored one needs those of all.
        most = 0 if group.scoring else len(token_ids) if resumed else len(token_ids) - 1
        cached = self.blocks.find(token_ids, most)
        missing = self.blocks.blocks_for(len(token_ids)) - len(cached)
        # One block in reserve for every running sequence, or they would soon take these back.
        busy = bool(len(self.running) or self.prefilling)
        fits = missing + len(self.running) <= self.blocks.available or not busy
        if not (fits and self._make_room(missing, 1, sequence.order)):
            self.blocks.release(cached)
            return False
        computed = len(cached) * BLOCK_TOKENS
        self.prefix_hit_tokens += computed
        if resumed:
            self.preempted.remove(sequence)
        (seat,) = self.blocks.take_seats(1)
        sequence.start_prefill(token_ids, cached + self.blocks.take(missing), seat, computed)
        insort(self.prefilling, sequence, key=lambda other: other.order)
        return True

    def stop_prefill(self, sequence: Sequence) -> None:
        """Gives back the blocks of an unfinished prefill; it starts again from the queue."""
        self.prefilling.remove(sequence)
        resumed = sequence.started
        self._release(sequence.end_prefill(Status.WAITING), sequence.seat)
        if resumed:
            self._queue_preempted(sequence)
        else:
            sequence.logprobs.clear()  # the scores of what was computed

    def drop_prompt(self, group: SequenceGroup) -> None:
        """Gives back the blocks of a computed prompt; it is prefilled again if the group has sequences to start."""
        if group.prompt is not None:
            self._release(group.prompt.block_table, group.prompt.seat)
            group.prompt = None

    def drop(self, group: SequenceGroup) -> None:
        """Removes what of a group does not run, and gives back its blocks."""
        if group in self.waiting:
            self.waiting.remove(group)
        for sequence in group.sequences:
            if sequence.status is Status.PREFILLING:
                self.stop_prefill(sequence)
            if sequence.status is Status.PREEMPTED:
                self.preempted.remove(sequence)
        self.drop_prompt(group)

    def drop_prefixes(self) -> None:
        """Forgets what was computed of prompts whose sequences have not started, and every cached prefix."""
        for sequence in list(self.prefilling):
            self.stop_prefill(sequence)
        for group in self.waiting:
            self.drop_prompt(group)
        self.blocks.forget()

    # Start

    def schedule_start(self) -> Start | None:
        """Gives sequences whose prompt is ready a slot each, in order of arrival; None if there is none."""
        first = len(self.running)
        prompts: list[tuple[Prompt, int]] = []
        blocks: list[tuple[int, int]] = []
        seats: list[tuple[int, int]] = []
        while self.waiting and self.waiting[0].prompt is not None and self.running.free:
            group, prompt = self.waiting[0], self.waiting[0].prompt
            if count := self._start(group, prompt, blocks, seats):
                prompts.append((prompt, count))
            if group.unstarted:
                break
            group.prompt = None
            self.waiting.popleft()
        return Start(slice(first, len(self.running)), prompts, blocks, seats) if prompts else None

    def _start(
        self,
        group: SequenceGroup,
        prompt: Prompt,
        block_copies: list[tuple[int, int]],
        seat_copies: list[tuple[int, int]],
    ) -> int:
        """Starts as many of the group's sequences as there are slots, blocks and seats for; returns how many."""
        count = min(self.running.free, group.unstarted)
        whole, partial = divmod(len(group.request.prompt_ids), BLOCK_TOKENS)
        # The last sequence takes the prompt's own last block and seat; the others copy them.
        copies = count - (count == group.unstarted)
        missing = copies if partial else 0
        if not len(self.running):
            self._make_room(missing, copies, group.next_sequence.order)
        if missing > self.blocks.available or copies > self.blocks.available_seats:
            count = copies = min(self.blocks.available if partial else count, self.blocks.available_seats)
            missing = copies if partial else 0
        if count == 0:
            return 0
        shared, own, seats = prompt.block_table[:whole], self.blocks.take(missing), self.blocks.take_seats(copies)
        block_copies += [(prompt.block_table[-1], block) for block in own]
        seat_copies += [(prompt.seat, seat) for seat in seats]
        sequences = group.sequences[group.started : group.started + count]
        for place, sequence in enumerate(sequences):
            if sequence.index + 1 == group.request.samples:
                sequence.block_table, sequence.seat = prompt.block_table, prompt.seat
            else:
                self.blocks.hold(shared)
                sequence.block_table, sequence.seat = shared + own[place : place + 1], seats[place]
        self.running.add(sequences)
        group.started += count
        return count

    # Decode

    def schedule_decode(self) -> slice | None:
        """The slots that decode, which are those of all running sequences, once each has a block for its next token. If no block is
        left, the youngest are preempted. None if nothing runs."""
        for sequence in sorted(self.running.full(), key=lambda sequence: sequence.order):
            if sequence.status is not Status.RUNNING:
                continue  # gave way to an older one
            if self._make_room(1, 0, sequence.order):
                self.running.add_block(sequence, self.blocks.take(1)[0])
            else:
                self._preempt(sequence)
        return slice(0, len(self.running)) if len(self.running) else None

    def _make_room(self, blocks: int, seats: int, order: tuple[int, int]) -> bool:
        """Has sequences younger than `order` give way, youngest first, until so many blocks and seats are available; False if they
        are too few."""
        while self.blocks.available < blocks or self.blocks.available_seats < seats:
            prompts = (group.next_sequence for group in self.waiting if group.prompt is not None)
            holders = [*self.running.sequences, *self.prefilling, *prompts]
            youngest = max(holders, key=lambda sequence: sequence.order, default=None)
            if youngest is None or youngest.order <= order:
                return False
            if youngest.status is Status.RUNNING:
                self._preempt(youngest)
            elif youngest.status is Status.PREFILLING:
                self.stop_prefill(youngest)
            else:
                self.drop_prompt(youngest.group)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's slot, blocks and seat; it keeps what it has sampled."""
        self.running.save(sequence)
        self.running.remove([sequence])
        self._release(sequence.block_table, sequence.seat)
        sequence.block_table = []
        self._queue_preempted(sequence)
        self.preemptions += 1

    def _queue_preempted(self, sequence: Sequence) -> None:
        sequence.status = Status.PREEMPTED
        insort(self.preempted, sequence, key=lambda other: other.order)

    def retire(self, sequences: list[Sequence], version: int) -> None:
        """Takes the slots and blocks of running sequences that have ended. Their blocks stay findable: a next turn may begin with
        this one. Keys from before a weight update are not, since they no longer are what the prefix gives."""
        for sequence in sequences:
            self.running.save(sequence)
            if sequence.versions[0] == version:
                prompt_ids = sequence.group.request.prompt_ids
                self.blocks.remember([*prompt_ids, *sequence.token_ids[:-1]], sequence.block_table)
            self._release(sequence.block_table, sequence.seat)
        self.running.remove(sequences)
