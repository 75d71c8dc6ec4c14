"""Problems of an environment that plays itself in another interpreter: each names a task, which the environment has."""

from __future__ import annotations

from typing import Any

from nmoe.config.tables.pools import VerifiersPool
from nmoe.envs.outside.process import Host
from nmoe.envs.pools.pool import Shuffled, fingerprint_of
from nmoe.errors import UserError
from nmoe.types import Message, Problem

TASK = "verifiers"


class OutsideOrder(Shuffled):
    """Cycles through the tasks of an environment, which `host` plays."""

    def __init__(self, name: str, settings: VerifiersPool) -> None:
        """Starts the process of the environment. Raises UserError if it cannot be played."""
        given = {"environment": settings.environment, "split": settings.split}
        self.host = Host(settings.venv, given, f"environment {name!r}")
        tasks, more = self.host.tasks(settings.max_examples or _MOST)
        if not tasks:
            raise UserError(f"environment {name!r}: it has no tasks")
        if more and settings.max_examples is None:
            raise UserError(f"environment {name!r}: it has more than {_MOST} tasks; set max_examples")
        problems = [_problem(name, index, task) for index, task in enumerate(tasks)]
        content = fingerprint_of(*(str(problem.metadata["key"]) for problem in problems))
        super().__init__(name, len(problems), problems.__getitem__, settings.seed, content)


# A taskset may be endless.
_MOST = 100_000


def _problem(name: str, index: int, task: dict[str, Any]) -> Problem:
    *before, last = task["prompt"] or [{"role": "user", "content": ""}]
    history = tuple(
        Message(one["role"], one["content"], channel="final" if one["role"] == "assistant" else None) for one in before
    )
    question = last["content"] or "(The environment asks when it is opened.)"
    return Problem(f"{name}/{index}", TASK, question, "", name, {"record": index, "key": task["key"]}, {}, history)
