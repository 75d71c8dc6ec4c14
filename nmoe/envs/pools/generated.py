"""Generated problems: the i-th is a pure function of (seed, i), and a hash of the question decides its split.

Because the split depends on the question alone, no seed, difficulty or position can bring a question of the eval split into
training, or the other way round. About one question in eight is an eval question, and one in eight is for validation. Problems
are drawn with replacement: in a small space, such as sort problems of two digits, questions repeat.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import MappingProxyType

from nmoe.config.tables.pools import GeneratedPool
from nmoe.envs.pools.pool import Order, Shuffled, fingerprint_of, split_by, stable_hash
from nmoe.envs.tasks import TASKS, GeneratedTask, OwnTask, generated_task
from nmoe.errors import UserError
from nmoe.types import Message, Metadata, Problem

# If one question in a hundred is in the split, all attempts miss it less than once in 10,000 positions.
_MAX_ATTEMPTS = 2000
# Far beyond practical use, and short enough for the comparison of answers.
_MAX_DIFFICULTY = 200


def split_of(task_type: str, question: str, metadata: Metadata = MappingProxyType({})) -> str:
    """Returns the split of a question: "train", "validation" or "eval"."""
    return _split(generated_task(task_type), task_type, question, metadata)


def _split(task: GeneratedTask, task_type: str, question: str, metadata: Metadata) -> str:
    # Beside the question, the parts of a user's task that it does not show: messages before it, and the state of an episode.
    hidden = [str(metadata[key]) for key in ("messages", "state") if key in metadata]
    return split_by(task_type, "\n".join([question, *hidden]) if hidden else task.split_key(question))


class Generated:
    """An endless sequence of generated problems of one split, each determined by the seed and its position."""

    size = None
    read_as = ""

    def __init__(self, name: str, settings: GeneratedPool) -> None:
        """Draws the first problem as a check. Raises UserError if the split holds no question of the difficulty, or if the
        difficulty is too high.
        """
        if settings.difficulty[1] > _MAX_DIFFICULTY:
            raise UserError(
                f"task pool {name!r}: difficulty {settings.difficulty[1]} is too much; {_MAX_DIFFICULTY} is the most"
            )
        self.name = name
        self.fingerprint = fingerprint_of(
            "generated",
            settings.task_type,
            *settings.difficulty,
            settings.split,
            settings.seed,
            *([settings.examples] if settings.examples else []),
            *(["hints", *settings.hints] if settings.hints else []),
        )
        self._settings, self._task = settings, generated_task(settings.task_type)
        first = self.at(0)
        # A user's task may be another one under the same name: an instance with other attributes, or newer code.
        if isinstance(self._task, OwnTask):
            self.fingerprint = fingerprint_of(self.fingerprint, first.question, *sorted(first.metadata.items()))

    def at(self, position: int) -> Problem:
        settings = self._settings
        rng = random.Random(stable_hash("generated", settings.seed, settings.task_type, position))
        problem = self._drawn(rng, settings.split, position)
        return replace(
            problem, question=problem.question + self._hint(position), history=self._history(position, problem)
        )

    def _hint(self, position: int) -> str:
        """Returns the hint that follows the question at this position, drawn from the settings; empty without hints. Hints do not
        affect the split.
        """
        settings = self._settings
        rng = random.Random(stable_hash("generated hints", settings.seed, settings.task_type, position))
        return rng.choice(settings.hints) if settings.hints else ""

    def _history(self, position: int, problem: Problem) -> tuple[Message, ...]:
        """Returns the few-shot examples before the question: solved problems of the train split, as messages."""
        settings = self._settings
        # Solved training problems in every split: an evaluation shows none of the problems that it asks.
        rng = random.Random(stable_hash("generated examples", settings.seed, settings.task_type, position))
        history: list[Message] = []
        for _ in range(settings.examples):
            example = next(
                (
                    one
                    for _ in range(_MAX_ATTEMPTS)
                    if (one := self._drawn(rng, "train", position)).question != problem.question
                ),
                None,
            )
            if example is None:
                raise UserError(
                    f"task pool {self.name!r}: no other question is there to show as an example; drop `examples`"
                )
            asked = TASKS[settings.task_type].messages(example)
            history += [*asked, Message("assistant", example.gold, channel="final")]
        return tuple(history)

    def _drawn(self, rng: random.Random, split: str, position: int) -> Problem:
        settings = self._settings
        easiest, hardest = settings.difficulty
        asked = set()
        for _ in range(_MAX_ATTEMPTS):
            difficulty = rng.randint(easiest, hardest)
            question, gold, metadata = self._task.pose_new(rng, difficulty)
            if split in ("all", _split(self._task, settings.task_type, question, metadata)):
                return Problem(
                    id=f"{self.name}/{position}",
                    task_type=settings.task_type,
                    question=question,
                    gold=gold,
                    source=self.name,
                    metadata={"difficulty": difficulty, **metadata},
                )
            asked.add(question)
        remedy = "raise the difficulty"
        if len(asked) == 1:
            remedy = f'all of them ask {asked.pop()!r}: draw them by their rng, or write [task_pool] split = "all"'
        raise UserError(
            f"task pool {self.name!r}: no {settings.task_type} problem of difficulty {easiest} to {hardest} is in the "
            f"split {split!r}; {remedy}"
        )


def generated_order(name: str, settings: GeneratedPool) -> Order:
    """Builds an endless order of generated problems, or one that cycles through the first `max_examples` if that is set."""
    endless = Generated(name, settings)
    if settings.max_examples is None:
        return endless
    return Shuffled(name, settings.max_examples, endless.at, settings.seed, endless.fingerprint)
