"""The task types; nmoe's own, those of packages, and the user's (`nmoe.config.registry.TASKS` has their names)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from nmoe.config import registry
from nmoe.envs.tasks.own import MultiTurnEnv, OwnTask, Task, adapted
from nmoe.envs.tasks.task import Attempt, GeneratedTask, TaskProtocol
from nmoe.errors import UserError
from nmoe.types import Metadata

__all__ = ["TASKS", "Attempt", "GeneratedTask", "MultiTurnEnv", "OwnTask", "Task", "TaskProtocol", "pose_new"]


class _Tasks(Mapping[str, TaskProtocol]):
    """Tasks by name, each made when it is first asked for. Raises UserError for a name without a task."""

    def __init__(self) -> None:
        # Each beside the part that it was made from. For a program's part the name alone is no key: a notebook may
        # define a class again, and two threads may each have one of that name.
        self.made: dict[object, tuple[object, TaskProtocol]] = {}

    def __getitem__(self, name: str) -> TaskProtocol:
        own = name in registry.TASKS.own
        if own and name in self.made:
            return self.made[name][1]
        part = registry.TASKS.get(name)
        key = name if own else (name, id(part))
        if key not in self.made:
            self.made.setdefault(key, (part, adapted(part, name)))
        return self.made[key][1]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in registry.TASKS

    def __iter__(self) -> Iterator[str]:
        return iter(registry.TASKS.names())

    def __len__(self) -> int:
        return len(registry.TASKS.names())


TASKS = _Tasks()


def pose_new(name: str, rng: random.Random, difficulty: int) -> tuple[str, str, Metadata]:
    """Has the task of this name make a problem: question, gold and metadata. Depends only on the arguments.

    Raises UserError for a task that needs a dataset.
    """
    task = TASKS[name]
    if isinstance(task, OwnTask) and task.generates:
        return task.pose_new(rng, difficulty)
    if not hasattr(task, "generate"):
        raise UserError(
            f"task {name}: makes no problems of its own; name a dataset in [task_pool], or define `generate(self, rng, difficulty)`"
        )
    question, gold = task.generate(rng, difficulty)
    return question, gold, {}


def split_key(name: str, question: str, metadata: Metadata) -> str:
    """The key that decides a problem's split: that of the question, and of what it does not show: the messages before it, and the
    state of an episode."""
    hidden = "\n".join(str(metadata[key]) for key in ("messages", "state") if key in metadata)
    return f"{question}\n{hidden}" if hidden else TASKS[name].split_key(question)  # type: ignore[attr-defined]
