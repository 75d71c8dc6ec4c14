"""Packing: which sequences make up each optimizer step, so that its token budget is used and nothing is cut."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The indices of `lengths` in packs whose lengths sum to `capacity` at most: best-fit decreasing (Johnson 1974), which needs at
    most 11/9 of the fewest packs possible, and one more. A longer sequence is a pack of its own.

    Deterministic: of equal lengths the earlier comes first, of packs with equal room the one used last.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []  # those that some pack has left, ascending
    packs_with: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, lengths[index])
        if place == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[place]
            pack = packs_with[room].pop()
            if not packs_with[room]:
                del packs_with[room], rooms[place]
        packs[pack].append(index)
        room -= lengths[index]
        if room > 0:
            if room not in packs_with:
                insort(rooms, room)
                packs_with[room] = []
            packs_with[room].append(pack)
    return packs


class PackedStream:
    """Packs without end: every epoch holds each sequence once, in packs and in an order that are pure functions of (seed, epoch).

    `position` counts the packs handed out; `packs_per_epoch` is the same for all epochs, because it depends on the lengths alone.
    """

    def __init__(self, lengths: Sequence[int], capacity: int, seed: int, fingerprint: str) -> None:
        self._lengths, self._capacity, self._seed = lengths, capacity, seed
        self.fingerprint = fingerprint
        self.position = 0
        self._epoch, self._packs = 0, self._packed(0)
        self.packs_per_epoch = len(self._packs)

    @property
    def utilisation(self) -> float:
        """The share of an epoch's budget that its tokens fill."""
        return sum(self._lengths) / (self.packs_per_epoch * self._capacity)

    def take(self) -> list[int]:
        """The indices of the next pack."""
        epoch, place = divmod(self.position, self.packs_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._packs = epoch, self._packed(epoch)
        self.position += 1
        return self._packs[place]

    def _packed(self, epoch: int) -> list[list[int]]:
        shuffle = random.Random(f"{self._seed}/{epoch}").shuffle
        order = list(range(len(self._lengths)))
        shuffle(order)  # which of the sequences of one length go together
        packs = best_fit([self._lengths[index] for index in order], self._capacity)
        shuffle(packs)
        return [[order[place] for place in pack] for pack in packs]
