"""Checks the values that a reward returned: one per sample, each finite or None."""

from __future__ import annotations

import math
import numbers
from contextlib import suppress
from functools import partial
from typing import Any

from nmoe.envs.rewards.reward import RewardError
from nmoe.errors import shown

_shown = partial(shown, characters=200)
# Advantages are computed in single precision, which can represent the square of this.
LARGEST = 1e18


def checked_values(who: str, returned: Any, count: int) -> list[float | None]:
    """Converts what `who` returned for `count` completions to floats.

    It may be a list or another iterable of numbers, tensors of one number and None. Raises RewardError, which says who
    returned what.
    """
    try:
        values = None if isinstance(returned, str | bytes | dict) else list(returned)
    except TypeError:
        values = None
    if values is None:
        raise RewardError(
            f"{who} returned {_shown(returned)}, a {type(returned).__name__}, for {count} completions; it has to return a list "
            "with a number or None for each"
        )
    if len(values) != count:
        raise RewardError(
            f"{who} returned {len(values)} values for {count} completions, {_shown(values)}; it has to return one for each"
        )
    return [_checked(who, value, place, count) for place, value in enumerate(values)]


def _checked(who: str, value: Any, place: int, count: int) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        with suppress(ValueError, RuntimeError, TypeError):
            value = value.item()  # a tensor or an array of one number
    where = f"as value {place + 1} of {count}"
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"{who} returned {_shown(value)}, a {type(value).__name__}, {where}; a reward is a number, or None to leave it out",
            place,
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise RewardError(
            f"{who} returned {_shown(value)} {where}; a reward is finite and at most {LARGEST:g}, or None to leave it out of this "
            "sample's score",
            place,
        )
    return number
