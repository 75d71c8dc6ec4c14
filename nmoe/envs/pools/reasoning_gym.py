"""Problems of the package reasoning-gym: the i-th is a pure function of the settings; a hash of the question decides its split.

Positions come in blocks of 64. Each block has a dataset with its own seed and takes that dataset's entries in order, skipping
entries of other splits. As with generated problems, about one question in eight belongs to the eval split under any seed,
and questions of a small space repeat.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cache

from nmoe.config.tables.pools import ReasoningGymPool
from nmoe.envs.pools.pool import Order, Shuffled, fingerprint_of, split_by, stable_hash
from nmoe.errors import UserError
from nmoe.grading import gym
from nmoe.grading.workers.pool import WorkerPool
from nmoe.types import Problem

_BLOCK = 64
# So many entries contain 64 eval questions with probability 1 - 1e-16. Some datasets make all their entries at once.
_ENTRIES = 1536
_KEPT_BLOCKS = 4


# For making `_AT_ONCE` entries, with a wide margin.
_DEADLINE_S = 120.0
_AT_ONCE = 16


@dataclass
class _Block:
    seed: int
    looked_at: int = 0
    found: list[tuple[int, str, str]] = field(default_factory=list)  # index, question, answer of the split's entries


class ReasoningGym:
    """An endless sequence of problems from one dataset of the package reasoning-gym."""

    size = None
    read_as = ""

    def __init__(self, name: str, settings: ReasoningGymPool) -> None:
        """Generates the first problem as a check. Raises UserError if the package, the dataset or the split does not exist, or if
        the settings do not fit the dataset.
        """
        gym.check_installed()
        self.name = name
        self._settings = settings
        self._config = json.dumps(settings.config, sort_keys=True)
        parts = (settings.dataset, self._config, settings.split, settings.seed, gym.VERSION)
        self.fingerprint = fingerprint_of("reasoning_gym", *parts)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self.at(0)

    def at(self, position: int) -> Problem:
        number, offset = divmod(position, _BLOCK)
        block = self._block(number)
        while len(block.found) <= offset:
            self._look_further(block)
        index, question, answer = block.found[offset]
        return Problem(
            id=f"{self.name}/{position}",
            task_type="reasoning_gym",
            question=question,
            gold=answer,
            source=self.name,
            metadata={
                "dataset": self._settings.dataset,
                "config": self._config,
                "dataset_seed": block.seed,
                "dataset_size": _ENTRIES,
                "index": index,
                "partial": self._settings.partial,
            },
        )

    def _block(self, number: int) -> _Block:
        if number not in self._blocks:
            seed = stable_hash("reasoning_gym", self._settings.seed, self._settings.dataset, number) % 2**31
            self._blocks[number] = _Block(seed)
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[number]

    def _look_further(self, block: _Block) -> None:
        if block.looked_at == _ENTRIES:
            raise UserError(
                f"task pool {self.name!r}: fewer than {_BLOCK} of {_ENTRIES} questions of {self._settings.dataset} are in "
                f'the split {self._settings.split!r}; choose a config with more questions, or split = "all"'
            )
        dataset = self._settings.dataset
        reply = _makers().submit(dataset, self._config, block.seed, _ENTRIES, block.looked_at, _AT_ONCE).result()
        if reply.status != "value":
            raise UserError(
                f"task pool {self.name!r}: making entries of {dataset} failed: {reply.status}, {reply.value}"
            )
        if "error" in reply.value:
            raise UserError(f"task pool {self.name!r}: {reply.value['error']}")
        for index, (question, answer) in enumerate(reply.value["entries"], start=block.looked_at):
            if self._settings.split in ("all", split_by(dataset, question)):
                block.found.append((index, question, answer))
        block.looked_at += _AT_ONCE


@cache
def _makers() -> WorkerPool:
    return WorkerPool("nmoe.grading.gym:entries", 1, deadline_s=_DEADLINE_S, memory_mb=4096)


def reasoning_gym_order(name: str, settings: ReasoningGymPool) -> Order:
    """Builds an endless order of a dataset's problems, or one that cycles through the first `max_examples` if that is set."""
    endless = ReasoningGym(name, settings)
    if settings.max_examples is None:
        return endless
    return Shuffled(name, settings.max_examples, endless.at, settings.seed, endless.fingerprint)
