"""All tasks by name: built-in, from installed packages, and users' own (`nmoe.config.registry.TASKS` lists the names)."""

from __future__ import annotations

from nmoe.config import registry
from nmoe.envs.tasks.adapted import adapted
from nmoe.envs.tasks.live import LiveEpisode
from nmoe.envs.tasks.own import MultiTurnEnv, OwnTask, Task
from nmoe.envs.tasks.task import Attempt, GeneratedTask, QuestionTask
from nmoe.errors import UserError

__all__ = [
    "TASKS",
    "Attempt",
    "GeneratedTask",
    "LiveEpisode",
    "MultiTurnEnv",
    "OwnTask",
    "QuestionTask",
    "Task",
    "generated_task",
]


class _Tasks(dict[str, QuestionTask]):
    """Tasks by name, each created at first use. Raises UserError for a name without a task."""

    def __init__(self) -> None:
        # A program's parts, by name and identity: a notebook may define a class again, and two threads may each have one
        # of that name. The part is kept, so that its identity is not given to another.
        self._parts: dict[tuple[str, int], tuple[object, QuestionTask]] = {}

    def __missing__(self, name: str) -> QuestionTask:
        part = registry.TASKS.get(name)
        if name in registry.TASKS.builtin:
            return self.setdefault(name, adapted(part, name))
        key = (name, id(part))
        if key not in self._parts:
            self._parts.setdefault(key, (part, adapted(part, name)))
        return self._parts[key][1]


TASKS = _Tasks()


def generated_task(name: str) -> GeneratedTask:
    """Returns the task of this name, which generates its own problems. Raises UserError for a task that needs a dataset."""
    task = TASKS[name]
    if not isinstance(task, GeneratedTask):
        raise UserError(
            f"task {name}: generates no problems; name a dataset in [task_pool], or define `generate(self, rng, difficulty)`"
        )
    return task
