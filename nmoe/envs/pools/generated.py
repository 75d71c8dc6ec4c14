"""Generated problems: the i-th is a pure function of (seed, i), and a hash of the question decides its split.

Because the split belongs to the question's content, no seed, range of difficulty or position can bring a question of
the eval split into training, nor the other way round. About one question in eight is an eval question, and one in eight is for
validation. Problems are drawn with replacement: of a small space (sort problems of two digits) the same question comes again.
"""

from __future__ import annotations

import random

from nmoe.config.tables.pools import GeneratedPool
from nmoe.envs.pools.order import Order, Shuffled, fingerprint_of, split_by, stable_hash
from nmoe.envs.tasks import GENERATED_TASKS
from nmoe.errors import UserError
from nmoe.types import Problem

# A split with one question in a hundred is missed by all attempts less than once in 10,000 positions.
_MAX_ATTEMPTS = 2000
# Far beyond use, and within the length that answers are compared up to.
_MAX_DIFFICULTY = 200


def split_of(task_type: str, question: str) -> str:
    """The split, "train", "validation" or "eval", that a question belongs to."""
    return split_by(task_type, GENERATED_TASKS[task_type].split_key(question))


class Generated:
    """An endless order of fresh problems."""

    size = None
    read_as = ""

    def __init__(self, name: str, settings: GeneratedPool) -> None:
        """Raises UserError where the split holds no question of the difficulty, or where that is beyond all use."""
        if settings.difficulty[1] > _MAX_DIFFICULTY:
            raise UserError(
                f"task pool {name!r}: difficulty {settings.difficulty[1]} is too much; {_MAX_DIFFICULTY} is the most"
            )
        self.name = name
        self.fingerprint = fingerprint_of(
            "generated", settings.task_type, *settings.difficulty, settings.split, settings.seed
        )
        self._settings = settings
        self._task = GENERATED_TASKS[settings.task_type]
        self.at(0)

    def at(self, position: int) -> Problem:
        settings = self._settings
        easiest, hardest = settings.difficulty
        rng = random.Random(stable_hash("generated", settings.seed, settings.task_type, position))
        for _ in range(_MAX_ATTEMPTS):
            difficulty = rng.randint(easiest, hardest)
            question, gold = self._task.generate(rng, difficulty)
            if settings.split in ("all", split_of(settings.task_type, question)):
                return Problem(
                    id=f"{self.name}/{position}",
                    task_type=settings.task_type,
                    question=question,
                    gold=gold,
                    source=self.name,
                    metadata={"difficulty": difficulty},
                )
        raise UserError(
            f"task pool {self.name!r}: no {settings.task_type} problem of difficulty {easiest} to {hardest} is in the "
            f"split {settings.split!r}; raise the difficulty"
        )


def generated_order(name: str, settings: GeneratedPool) -> Order:
    """Endless, or cycling through the first `max_examples` problems where that is set."""
    endless = Generated(name, settings)
    if settings.max_examples is None:
        return endless
    return Shuffled(name, settings.max_examples, endless.at, settings.seed, endless.fingerprint)
