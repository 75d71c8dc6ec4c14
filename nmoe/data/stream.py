"""Training examples, shuffled each epoch and taken up to a token budget."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class ExampleStream(Generic[T]):
    """Examples in an order that is a pure function of (seed, epoch). `position` counts those handed out; `fingerprint` is a
    digest of what all of them say, by their `repr`."""

    def __init__(self, examples: Sequence[T], tokens: Sequence[int], seed: int) -> None:
        """`tokens` are what each example takes of a budget."""
        self._examples, self._tokens, self._seed = examples, tokens, seed
        digest = hashlib.sha256()
        for example in examples:
            digest.update(repr(example).encode())
        self.fingerprint = digest.hexdigest()
        self._epoch, self._order = -1, list[int]()
        self.position = 0

    def take(self, tokens: int) -> list[T]:
        """The next examples: as many as fit into `tokens`, at least one."""
        taken: list[T] = []
        while True:
            epoch, place = divmod(self.position, len(self._examples))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(len(self._examples)))
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            index = self._order[place]
            if taken and self._tokens[index] > tokens:
                return taken
            taken.append(self._examples[index])
            tokens -= self._tokens[index]
            self.position += 1
