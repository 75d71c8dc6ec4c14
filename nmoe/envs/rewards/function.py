"""A user's reward function, with the signature of TRL:

    def f(prompts, completions, completion_ids, trainer_state, **columns) -> list[float | None]

It is called once per group. Every argument except `trainer_state` is a list with one entry per completion, including the
columns of the problem's record (`answer=["18", "18", ...]`). All are copies made for this call. A function without `**` gets
only the arguments that it names. An `async def` runs concurrently with everything else; a plain function runs in a thread, one
call at a time (docs/guides/rewards.md).
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import deepcopy
from typing import Any

from nmoe.config.registry import REWARDS
from nmoe.config.tables.rewards import FunctionRewardConfig
from nmoe.envs.rewards.reward import Rating, RewardError, Samples, UnavailableError, checked_values
from nmoe.envs.user_code import in_thread, load_function
from nmoe.errors import UserError

# Standard arguments, which take precedence over columns of the same name.
_STANDARD = ("prompts", "completions", "completion_ids", "trainer_state")


class FunctionReward:
    """A reward computed by a user's function."""

    def __init__(self, settings: FunctionRewardConfig) -> None:
        """Imports the function. Raises UserError if it does not exist or its arguments cannot be given by name."""
        self.name, self.weight = settings.name, settings.weight
        self.only_if_correct = settings.only_if_correct
        self._timeout_s = settings.timeout_s
        self._function = load_function(REWARDS, settings.call)
        self._who = f"reward {settings.name!r} ({_location(self._function)}{settings.call})"
        self._names = _names(self._function, self._who)
        self._alone = asyncio.Lock()

    def opened(self) -> AbstractAsyncContextManager[Any]:
        self._alone = asyncio.Lock()  # a lock belongs to one event loop, and a batch may have its own loop
        return nullcontext()

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raises UserError if the function requires an argument that is neither standard nor a column of the record."""
        known = {*_STANDARD, *columns}
        if missing := [name for name, needed in self._names.items() if needed and name not in known]:
            raise UserError(
                f"{self._who} takes {', '.join(map(repr, missing))}, and the problem's record has no such column; there are "
                f"{', '.join([*_STANDARD, *(name for name in columns if name not in _STANDARD)])}"
            )

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        self.check_columns(samples.columns)
        count = len(samples.completions)
        arguments: dict[str, Any] = {
            name: _copies(value, count) for name, value in samples.columns.items() if name not in _STANDARD
        }
        arguments |= self.standard(samples)
        if not self._takes_any:
            arguments = {name: value for name, value in arguments.items() if name in self._names}
        try:
            # Plain functions may keep state without locking, so only one call runs at a time.
            async with nullcontext() if self._is_async else self._alone, asyncio.timeout(self._timeout_s) as clock:
                returned = await self._called(arguments)
        except UnavailableError as error:
            return [Rating(None, f"reward {self.name!r}: {error}")] * count
        except (Exception, SystemExit) as error:  # the function may raise anything
            if not (isinstance(error, TimeoutError) and clock.expired()):
                raise RewardError(f"{self._who} raised {type(error).__name__}: {error}{_raised_at(error)}") from error
            late = f"took longer than its timeout_s = {self._timeout_s:g}"
            if self._is_async:
                return [Rating(None, f"reward {self.name!r} {late}")] * count
            # The thread cannot be stopped, and a function that hangs once will hang again.
            raise RewardError(f"{self._who} {late}; raise the limit, or make it an `async def`") from error
        return [Rating(value) for value in checked_values(self._who, returned, count)]

    def standard(self, samples: Samples) -> dict[str, Any]:
        """Returns the arguments that are the same in every environment."""
        return {
            "prompts": _copies(samples.prompt, len(samples.completions)),
            "completions": deepcopy(list(samples.completions)),
            "completion_ids": [list(trajectory.token_ids) for trajectory in samples.trajectories],
            "trainer_state": samples.state,
        }

    async def _called(self, arguments: Mapping[str, Any]) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        return await in_thread(self._function, arguments)

    @property
    def _is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004  an object whose call is async
        )

    @property
    def _takes_any(self) -> bool:
        return "**" in self._names


def check_signature(function: Callable[..., Any]) -> None:
    """Raises UserError for a function whose arguments cannot be given by name."""
    _names(function, f"reward {getattr(function, '__name__', function)!r}")


def _copies(value: Any, count: int) -> list[Any]:
    """Returns `count` copies of a value, one for each completion.

    A function may modify its arguments; the other completions, later rewards and the record in a later epoch must not see
    that.
    """
    return [deepcopy(value) for _ in range(count)]


def _names(function: Callable[..., Any], who: str) -> dict[str, bool]:
    """Returns a function's argument names and whether each is required; "**" stands for any others.

    Raises UserError for a function that requires a positional-only argument, or whose signature cannot be read.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"{who}: its signature cannot be read: {error}") from error
    names: dict[str, bool] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            names["**"] = False
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UserError(f"{who}: takes {parameter.name!r} by position alone; arguments are given by name")
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            names[parameter.name] = parameter.default is parameter.empty
    return names


def _location(function: Callable[..., Any]) -> str:
    """Returns the file and line of a function, as in "rewards.py:12, "; empty if its source is unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}, "


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
