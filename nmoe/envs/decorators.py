"""`@nmoe.reward` and `@nmoe.tool` register functions, so that an environment's file can name them without their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from nmoe.config.registry import REWARDS, TOOLS
from nmoe.envs.rewards.function import check_signature
from nmoe.envs.tools.tool import Tool
from nmoe.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])

# Where a decorated reward keeps its settings.
SETTINGS = "__nmoe_reward__"


@overload
def reward(function: F) -> F: ...
@overload
def reward(
    *, name: str | None = None, weight: float = 1.0, timeout_s: float = 60.0, replay: bool = True
) -> Callable[[F], F]: ...
def reward(function: Any = None, **settings: Any) -> Any:
    """Makes a function with TRL's signature a reward: `f(prompts, completions, **columns) -> list[float | None]`.

        >>> import nmoe
        >>> @nmoe.reward(weight=0.5)
        ... def short(completions, **columns):
        ...     return [1.0 if len(completion) < 20 else 0.0 for completion in completions]
        >>> short(["a brief answer"])
        [1.0]

    `nmoe.train_rl(..., rewards=[short])` accepts any function, decorated or not. The decorator adds settings: `name`, by
    default the function's; `weight`; `timeout_s`, the limit of one call; `replay`, False for a function that compares the
    samples of a group. An environment's file can then name the function: `[[rewards]] type = "function"`, `call = "short"`.
    Raises UserError for a function that cannot be called with arguments by name, for one that cannot hold settings, such as
    a bound method, and for a name that another reward has.
    """

    def mark(marked: F) -> F:
        check_signature(marked)
        try:
            setattr(marked, SETTINGS, settings)
        except AttributeError:
            raise UserError(f"reward {marked!r} takes no settings; decorate a function that calls it") from None
        own: str = getattr(marked, "__name__", type(marked).__name__)
        REWARDS.register(settings.get("name") or own, marked)
        return marked

    return mark if function is None else mark(function)


def tool(function: F) -> F:
    """Registers a function as a tool that a policy may call, declared by its name, type hints and docstring.

        >>> import nmoe
        >>> @nmoe.tool
        ... def double(number: int) -> int:
        ...     "Doubles a number."
        ...     return 2 * number
        >>> double(21)
        42

    `nmoe.train_rl(..., tools=[double])` accepts any such function, decorated or not. After decoration, an environment's
    file can name the tool: `[tools] use = ["double"]`. Raises UserError for a function without docstring or hints, and for
    a name that another tool has.
    """
    TOOLS.register(Tool(function).name, function)
    return function
