"""The scheduler: it decides which prompts are computed in a step, which sequences start, which decode, and which are preempted.

Sequences run in order of arrival. Prompts are prefilled in chunks, so that a long one does not hold up decoding. When the cache
runs out of blocks, the youngest sequence is preempted: it loses its blocks, keeps its tokens, and is prefilled again later. The
oldest sequence therefore always finishes, and so does every one after it."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

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
    """The part of a sequence's prefill that one step computes: positions `start` to `stop` (exclusive). The `last` one ends the
    prefill."""

    sequence: Sequence
    start: int
    stop: int
    last: bool


@dataclass
class Start:
    """The sequences that start in this step: their slots in the running batch, how many of them come from each prompt, and which
    blocks and states of the cache to copy first (source, target), since each sequence continues in a copy of its prompt's last
    block and state."""

    slots: slice
    prompts: list[tuple[Prompt, int]] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    states: list[tuple[int, int]] = field(default_factory=list)


class Gathering:
    """Decides when new requests are admitted. Beside many running sequences, a prompt that comes alone costs a separate forward
    pass, so requests are gathered for a few steps: answers of tools come one by one."""

    def __init__(self) -> None:
        self._until = 0  # the step at which new requests are admitted; 0 if none is held back

    def admits(self, step: int, arrivals: int, running: int) -> bool:
        """Returns whether to admit this many waiting requests in this step, while this many sequences are running."""
        if arrivals * GATHER_SHARE < running:
            if self._until == 0:
                self._until = step + GATHER_STEPS if arrivals else 0
            if arrivals == 0 or step < self._until:
                return False
        self._until = 0
        return True


class Scheduler:
    """Holds every unfinished request, and decides in each step which prompts are prefilled and which sequences start and decode.

    `running` is the batch of sequences that decode; the scheduler fills and empties its slots.
    """

    def __init__(
        self,
        blocks: BlockManager,
        running: RunningBatch,
        prefill_tokens: int = PREFILL_TOKENS,
        beside_tokens: int | None = None,
    ) -> None:
        self.running, self.prefill_tokens, self._beside_tokens = running, prefill_tokens, beside_tokens
        self.groups: dict[str, SequenceGroup] = {}  # unfinished requests by id
        self.waiting: deque[SequenceGroup] = deque()  # with sequences to start, or tokens to score
        self.preempted: list[Sequence] = []  # oldest first
        self.held: list[Sequence] = []
        self.prefilling: list[Sequence] = []  # oldest first
        self.arrived = self.steps = self.preemptions = self.prefix_hit_tokens = 0
        self.clear(blocks)

    def add(self, group: SequenceGroup) -> None:
        self.groups[group.request.request_id] = group
        self.waiting.append(group)
        self.arrived += 1

    def clear(self, blocks: BlockManager) -> None:
        """Drops every request without giving its blocks back, and takes `blocks` as the block manager from now on."""
        self.blocks, self._gathering = blocks, Gathering()
        for requests in (self.running, self.groups, self.waiting, self.preempted, self.held, self.prefilling):
            requests.clear()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.preempted or self.prefilling or len(self.running))

    # Prefill

    def schedule_prefill(self) -> list[Chunk]:
        """Admits waiting sequences, and returns the chunks to compute in this step, as many tokens as it may have: first chunks
        that start at position 0, then chunks that continue, then chunks that replay routes, each oldest first. The runner's
        attention expects this order."""
        # A prefill that runs anyway takes newcomers along.
        beside = 0 if self.prefilling else len(self.running)
        if self._gathering.admits(self.steps, len(self.waiting) + len(self.preempted), beside):
            self._admit()
        budget, chunks = self._budget, []
        for sequence in self.prefilling:
            left = len(sequence.prefill_ids) - sequence.computed
            if count := min(budget, left):
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + count, last=count == left))
                budget -= count
        return sorted(chunks, key=lambda chunk: (chunk.sequence.routes_LYK is not None, chunk.start > 0))

    @property
    def _budget(self) -> int:
        """The tokens of prompts that the next step may compute."""
        if self._beside_tokens is None or not len(self.running):
            return self.prefill_tokens
        return min(self._beside_tokens, self.prefill_tokens)

    def finish_prefill(self, chunks: list[Chunk], logits: dict[Sequence, Tensor], version: int) -> list[SequenceGroup]:
        """Records that the chunks are computed by weights of this version. Where a prefill is complete, a preempted sequence runs
        again, and a prompt with `logits` is ready for its group; a group without sequences to start has finished, and is
        returned."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.stop
            if chunk.last and sequence.keys_are_of(version):
                self.blocks.remember(sequence.prefill_ids, sequence.block_table)
        finished = []
        for sequence in [sequence for sequence in self.prefilling if sequence.prefilled]:
            self.prefilling.remove(sequence)
            group, blocks = sequence.group, sequence.end_prefill(Status.WAITING)
            if sequence.started:
                sequence.block_table, sequence.routes_LYK = blocks, None
                self.running.add([sequence])
            elif sequence in logits:
                group.prompt = Prompt(blocks, sequence.state_slot, logits[sequence])
            else:
                group.scores = sequence.logprobs if group.request.top_logprobs is None else sequence.raw
                self.blocks.release(blocks, sequence.state_slot)
                self.waiting.remove(group)
                finished.append(group)
        return finished

    def _admit(self) -> None:
        """Starts the prefill of waiting sequences, preempted ones before new ones and oldest first, as slots and blocks allow."""
        free = self.running.free - sum(group.unstarted for group in self.waiting if group.prompt)
        free -= sum(1 if sequence.started else sequence.group.unstarted for sequence in self.prefilling)
        tokens = sum(len(sequence.prefill_ids) - sequence.computed for sequence in self.prefilling)
        new = [group.next_sequence for group in self.waiting if group.prompt is None]
        for sequence in [*self.preempted, *(s for s in new if s.status is Status.WAITING)]:
            if free <= 0 or tokens >= self._budget or not self._start_prefill(sequence):
                return
            tokens += len(self.prefilling[-1].prefill_ids) - self.prefilling[-1].computed
            free -= 1 if sequence.started else max(1, sequence.group.unstarted)

    def _start_prefill(self, sequence: Sequence) -> bool:
        """Gives a sequence blocks for its prompt and sampled tokens, cached prefixes among them; returns False if there are too
        few."""
        token_ids, reusable = sequence.tokens_to_prefill()
        cached = self.blocks.find(token_ids, reusable)
        missing = self.blocks.blocks_for(len(token_ids)) - len(cached)
        # One block in reserve for every running sequence, or they would soon take these back.
        busy = bool(len(self.running) or self.prefilling)
        fits = missing + len(self.running) <= self.blocks.available or not busy
        if not (fits and self._make_room(missing, 1, sequence.order)):
            self.blocks.release(cached)
            return False
        computed = len(cached) * BLOCK_TOKENS
        self.prefix_hit_tokens += computed
        if sequence.started:
            self.preempted.remove(sequence)
        block_table = cached + self.blocks.take(missing)
        sequence.start_prefill(token_ids, block_table, self.blocks.take_state_slot(), computed)
        insort(self.prefilling, sequence, key=lambda other: other.order)
        return True

    def stop_prefill(self, sequence: Sequence) -> None:
        """Ends an unfinished prefill and gives back its blocks; the sequence is queued to be prefilled again."""
        self.prefilling.remove(sequence)
        self.blocks.release(sequence.end_prefill(Status.WAITING), sequence.state_slot)
        if sequence.started:
            self._queue_preempted(sequence)
        else:
            sequence.logprobs.clear()  # the scores of the computed part
            sequence.raw.clear()

    def drop_prompt(self, group: SequenceGroup) -> None:
        """Gives back the blocks of a computed prompt; it is prefilled again if the group has sequences to start."""
        if group.prompt is not None:
            self.blocks.release(group.prompt.block_table, group.prompt.state_slot)
            group.prompt = None

    def drop(self, sequence: Sequence) -> None:
        """Removes a sequence that is not running, and gives back its blocks."""
        group = sequence.group
        if sequence.status is Status.PREFILLING:
            self.stop_prefill(sequence)
        if sequence.status in (Status.PREEMPTED, Status.HELD):
            (self.preempted if sequence.status is Status.PREEMPTED else self.held).remove(sequence)
            return
        group.to_start.remove(sequence)
        if not group.to_start:
            self.waiting.remove(group)
            self.drop_prompt(group)

    def drop_prefixes(self) -> None:
        """Forgets computed prompts whose sequences have not started, and every cached prefix."""
        for sequence in list(self.prefilling):
            self.stop_prefill(sequence)
        for group in self.waiting:
            self.drop_prompt(group)
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Forgets every cached prefix; blocks in use stay in use."""
        self.blocks.forget()

    # Start

    def schedule_start(self) -> Start | None:
        """Gives sequences whose prompt is ready a slot each, in order of arrival, and returns them; None if there are none."""
        first, start = len(self.running), Start(slice(0))
        while self.waiting and self.waiting[0].prompt is not None and self.running.free:
            group, prompt = self.waiting[0], self.waiting[0].prompt
            if count := self._start(group, prompt, start):
                start.prompts.append((prompt, count))
            if group.unstarted:
                break
            group.prompt = None
            self.waiting.popleft()
        start.slots = slice(first, len(self.running))
        return start if start.prompts else None

    def _start(self, group: SequenceGroup, prompt: Prompt, start: Start) -> int:
        """Starts as many of the group's sequences as slots, blocks and state slots allow; returns their number."""
        tokens, count = len(group.request.prompt_ids), min(self.running.free, group.unstarted)
        # The last sequence takes the prompt's blocks and state slot; the others get copies.
        copies = count - (count == group.unstarted)
        if not len(self.running):
            self._make_room(copies if tokens % BLOCK_TOKENS else 0, copies, group.next_sequence.order)
        if copies > (most := self.blocks.most_copies(tokens)):
            count = most
        if count == 0:
            return 0
        sequences, last = group.to_start[:count], group.to_start[-1]
        for sequence in sequences:
            if sequence is last:
                sequence.block_table, sequence.state_slot = prompt.block_table, prompt.state_slot
                continue
            sequence.block_table, sequence.state_slot = self.blocks.copy(prompt.block_table, tokens)
            if tokens % BLOCK_TOKENS:
                start.blocks.append((prompt.block_table[-1], sequence.block_table[-1]))
            start.states.append((prompt.state_slot, sequence.state_slot))
        self.running.add(sequences)
        del group.to_start[:count]
        return count

    # Decode

    def schedule_decode(self) -> slice | None:
        """Gives each running sequence a block for its next token, and returns the slots of all of them, which decode. If no block
        is left, the youngest are preempted. None if no sequence is running."""
        for sequence in sorted(self.running.full(), key=lambda sequence: sequence.order):
            if sequence.status is not Status.RUNNING:
                continue  # gave way to an older one
            if self._make_room(1, 0, sequence.order):
                self.running.add_block(sequence, self.blocks.take(1)[0])
            else:
                self._preempt(sequence)
        return slice(0, len(self.running)) if len(self.running) else None

    def _make_room(self, blocks: int, state_slots: int, order: tuple[int, int]) -> bool:
        """Takes blocks and state slots from sequences younger than `order`, youngest first, until so many are available; returns
        False if these sequences hold too few."""
        while self.blocks.available < blocks or self.blocks.available_state_slots < state_slots:
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

    def preempt_all(self) -> None:
        """Preempts every running sequence: all of their keys will be computed again."""
        for sequence in list(self.running.sequences):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes from a running sequence its slot and its part of the cache. It keeps its sampled tokens, and is queued to be
        prefilled again."""
        self.running.save(sequence)
        self.running.remove([sequence])
        self.blocks.release(sequence.block_table, sequence.state_slot)
        sequence.block_table = []
        self._queue_preempted(sequence)
        self.preemptions += 1

    def hold(self, sequence: Sequence) -> None:
        """Preempts a running sequence until `release`."""
        self._preempt(sequence)
        self.preempted.remove(sequence)
        sequence.status = Status.HELD
        self.held.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Queues a held sequence to be prefilled again."""
        self.held.remove(sequence)
        self._queue_preempted(sequence)

    def _queue_preempted(self, sequence: Sequence) -> None:
        sequence.status = Status.PREEMPTED
        insort(self.preempted, sequence, key=lambda other: other.order)

    def retire(self, sequences: list[Sequence], version: int) -> None:
        """Frees the slots and blocks of running sequences that have ended. Their blocks stay findable: a next turn may begin with
        this one. Keys from before a weight update are not, since the present weights would compute others."""
        for sequence in sequences:
            self.running.save(sequence)
            if sequence.keys_are_of(version):
                self.blocks.remember(
                    [*sequence.group.request.prompt_ids, *sequence.token_ids[:-1]], sequence.block_table
                )
            self.blocks.release(sequence.block_table, sequence.state_slot)
        self.running.remove(sequences)
