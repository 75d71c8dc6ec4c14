"""Makes what a user registers a task as the rest of nmoe knows it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from nmoe.envs.tasks.live import LiveEpisode, LiveTask
from nmoe.envs.tasks.own import EpisodeTask, GeneratedGradedTask, GradedTask, MultiTurnEnv, of_the_user
from nmoe.envs.tasks.task import QuestionTask
from nmoe.errors import UserError


def adapted(part: Any, name: str) -> QuestionTask:
    """Converts a registered part to a task: a built-in task as it is, a user's class or instance through an adapter.

    Raises UserError for anything else, and for a method that is missing or takes other arguments.
    """
    if isinstance(part, type) and issubclass(part, LiveEpisode):
        _check_methods(part, name, {"open": 3, "step": 2, "close": 1})
        for method in (part.open, part.step, part.close):
            if not inspect.iscoroutinefunction(method):
                raise UserError(
                    f"task {name}: {method.__name__} is not `async def`, and would hold up every other episode"
                )
        return LiveTask(part, name)
    if isinstance(part, LiveEpisode):
        raise UserError(f"task {name}: each sample has another episode; pass the class {type(part).__name__}")
    if isinstance(part, type):
        with of_the_user(f"task {name}: {part.__name__}(), which is called without arguments,"):
            part = part()
    if isinstance(part, MultiTurnEnv):
        _check_methods(part, name, {"prompt": 0, "step": 1})
        return EpisodeTask(part, name)
    if isinstance(part, QuestionTask):
        return part
    if callable(getattr(part, "grade", None)):
        _check_methods(part, name, {"prompt": 1, "grade": 2})
        if hasattr(part, "generate"):
            _check_methods(part, name, {"generate": 2})
            return GeneratedGradedTask(part, name)
        return GradedTask(part, name)
    raise UserError(f"task {name}: {part!r} is not a task; a task has `prompt(record)` and `grade(record, answer)`")


def _check_methods(part: Any, name: str, methods: Mapping[str, int]) -> None:
    for method, count in methods.items():
        function = getattr(part, method, None)
        if not callable(function) or getattr(function, "__isabstractmethod__", False):
            raise UserError(f"task {name}: has no method `{method}`")
        try:
            inspect.signature(function).bind(*range(count))
        except TypeError as error:
            raise UserError(
                f"task {name}: {method}{inspect.signature(function)}: {error}; it gets {count} arguments"
            ) from None
