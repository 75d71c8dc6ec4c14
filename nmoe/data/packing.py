"""Packing: choose the sequences of each optimizer step, so that its token budget is filled and no sequence is cut."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

_PACKS_PER_STEP = 16


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs sequences of `lengths` into packs of at most `capacity` tokens, and returns the indices in each pack. Best-fit
    decreasing (Johnson 1974) needs at most 11/9 of the fewest packs possible, and one more. A longer sequence is its own pack.

    Deterministic: of equal lengths the earlier comes first, of packs with equal room the one used last.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []  # the free space of each pack, ascending
    packs_with: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[index])
        if at == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[at]
            pack = packs_with[room].pop()
            if not packs_with[room]:
                del packs_with[room], rooms[at]
        packs[pack].append(index)
        room -= lengths[index]
        if room > 0:
            if room not in packs_with:
                insort(rooms, room)
                packs_with[room] = []
            packs_with[room].append(pack)
    return packs


class PackedStream:
    """An endless stream of steps: every epoch holds each sequence once, in steps and in an order that are pure functions of (seed,
    epoch).

    A step is several packs, drawn at random. Best fit puts sequences of one length together, and steps that were one pack each
    learned slowly, every one pulling its own way: sums of two to six terms had a loss of 0.33 after 115 of them, and of 0.01 after
    100 steps of sequences drawn at random.

    `position` counts the steps handed out; `steps_per_epoch` is the same for all epochs, because it depends on the lengths alone.
    """

    def __init__(self, lengths: Sequence[int], capacity: int, seed: int, fingerprint: str) -> None:
        """`capacity` is the token budget of a step, which only a longer sequence exceeds."""
        self._lengths, self._seed = lengths, seed
        self.fingerprint = fingerprint
        self.position = 0
        self._capacity = capacity
        self._packs_per_step = max(1, min(_PACKS_PER_STEP, capacity // max(lengths)))
        self._epoch, self._steps = 0, self._made(0)
        self.steps_per_epoch = len(self._steps)

    @property
    def utilisation(self) -> float:
        """The share of an epoch's token budget that is filled."""
        return sum(self._lengths) / (self.steps_per_epoch * self._capacity)

    def take(self) -> list[int]:
        """The indices of the next step's sequences."""
        epoch, at = divmod(self.position, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._steps = epoch, self._made(epoch)
        self.position += 1
        return self._steps[at]

    def _made(self, epoch: int) -> list[list[int]]:
        shuffle = random.Random(f"{self._seed}/{epoch}").shuffle
        order = list(range(len(self._lengths)))
        shuffle(order)  # which sequences of equal length are packed together
        packs = best_fit([self._lengths[index] for index in order], self._capacity // self._packs_per_step)
        shuffle(packs)
        steps = -(-len(packs) // self._packs_per_step)
        return [[order[at] for pack in packs[step::steps] for at in pack] for step in range(steps)]
