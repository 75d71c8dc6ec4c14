"""Built-in tasks, tasks of installed packages and of users, by name (`nmoe.config.registry.TASKS` lists the names)."""

from __future__ import annotations

import random

from nmoe.config import registry
from nmoe.envs.tasks.own import MultiTurnEnv, OwnTask, Task, adapted
from nmoe.envs.tasks.task import Attempt, GeneratedTask, TaskProtocol
from nmoe.errors import UserError
from nmoe.types import Metadata

__all__ = ["TASKS", "Attempt", "GeneratedTask", "MultiTurnEnv", "OwnTask", "Task", "TaskProtocol", "pose_new"]


class _Tasks(dict[str, TaskProtocol]):
    """Tasks by name, each made when it is first asked for. Raises UserError for a name without a task."""

    def __init__(self) -> None:
        # A program's parts, by name and identity: a notebook may define a class again, and two threads may each have one
        # of that name. The part is kept, so that its identity is not given to another.
        self._parts: dict[tuple[str, int], tuple[object, TaskProtocol]] = {}

    def __missing__(self, name: str) -> TaskProtocol:
        part = registry.TASKS.get(name)
        if name in registry.TASKS.own:
            return self.setdefault(name, adapted(part, name))
        key = (name, id(part))
        if key not in self._parts:
            self._parts.setdefault(key, (part, adapted(part, name)))
        return self._parts[key][1]


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
