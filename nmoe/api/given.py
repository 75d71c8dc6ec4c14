"""Checks the arguments of nmoe's Python functions, and converts them to the tables of a configuration."""

from __future__ import annotations

import datetime
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from nmoe.config.elsewhere import keys_meant, no_counterpart
from nmoe.errors import UserError, shown

P = ParamSpec("P")
R = TypeVar("R")

# Parameters of TRL's trainers, and ours.
_PARAMETERS = {
    **dict.fromkeys(("reward_funcs", "reward_fn", "reward_func", "reward", "reward_function"), "rewards"),
    **dict.fromkeys(("train_dataset", "dataset", "records", "prompts"), "data"),
    **dict.fromkeys(("environment", "task", "task_pool"), "env"),
    **dict.fromkeys(("args", "settings", "training_args", "cfg"), "config"),
    **dict.fromkeys(("rollout_func", "rollout_fn", "sample_fn", "agent", "generate"), "generate_fn"),
    **dict.fromkeys(("model_name", "checkpoint", "policy", "model_name_or_path"), "model"),
    **dict.fromkeys(("n", "num_return_sequences", "num_samples"), "samples"),
    **dict.fromkeys(("dtype", "torch_dtype"), "precision"),
}
_OWN_LOOP = "a run makes its own AdamW by [optimizer]; with another optimizer, write the loop: examples/rl_loop.py"


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that an unknown argument raises a UserError that suggests the right one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if unknown := [name for name in kwargs if name not in known]:
            raise UserError(f"{function.__name__}: {unknown[0]}: {_argument_meant(unknown[0], list(known))}")
        return function(*args, **kwargs)

    return call


def _argument_meant(name: str, known: list[str]) -> str:
    if name == "optimizer":
        return f"no such argument; {_OWN_LOOP}"
    if (meant := _PARAMETERS.get(name)) in known:
        return f"no such argument; did you mean {meant}?"
    keys = keys_meant((name,))
    if keys and "config" in known:
        return f"no such argument; a setting is passed as config={{{keys[0]!r}: ...}}"
    if (instead := no_counterpart((name,))) is not None:
        return f"no such argument; it has no counterpart: {instead}"
    return f"no such argument; there are {', '.join(known)}"


def model_path(model: Any, what: str = "model") -> Path:
    """Returns the path of a `model` argument: a run, a checkpoint, or a name on the Hugging Face hub.

    Raises UserError for any other argument, such as a model in memory.
    """
    if isinstance(model, str | os.PathLike):
        return Path(model)
    kind = type(model).__name__
    if isinstance(model, Mapping):
        raise UserError(
            f"{what}: a dict is the shape of a new model, which has learned nothing yet; pass a run or checkpoint"
        )
    if hasattr(model, "save_pretrained"):
        way = f'{what}.save_pretrained("start") and tokenizer.save_pretrained("start"), then pass "start"'
    elif type(model).__module__.startswith("nmoe."):
        way = (
            "pass the path that it was loaded from; a loop of your own saves by Learner.save, as in examples/rl_loop.py"
        )
    else:
        way = "pass the directory of a checkpoint, a name on the hub, or the shape of a new model as a dict"
    raise UserError(f"{what} is a {kind} in memory, and a run starts from a path: {way}")


def rows_of(data: Any, what: str) -> list[dict[str, Any]]:
    """Converts records to a list of dicts: from a list, a generator, a `datasets.Dataset`, an Arrow table or a DataFrame.

    Raises UserError, in which `what` names the argument, for any other value and for empty data.
    """
    if isinstance(data, Mapping):
        first = next(iter(data), None)
        if first is not None and not isinstance(data[first], list | tuple | str) and isinstance(data[first], Iterable):
            raise UserError(f"{what} is a {type(data).__name__} of several splits; pass one, {what}[{first!r}]")
        raise UserError(f"{what} is a dict of columns, or one record; pass a list of dicts, one for each record")
    if hasattr(data, "to_pylist"):
        data = data.to_pylist()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):
        data = data.to_dict("records")
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise UserError(f"{what} is {shown(data)}, and no records: pass a list of dicts, a datasets.Dataset or a file")
    rows = []
    for number, record in enumerate(data):
        if not isinstance(record, Mapping):
            raise UserError(f"record {number} of {what} is {shown(record)}, not a dict")
        rows.append(dict(record))
    if not rows:
        raise UserError(f"{what} has no records")
    return rows


def checked_generate_fn(function: Any) -> None:
    """Raises UserError for a `generate_fn` that cannot be called with a request and an engine."""
    way = "pass a function (request, engine) that returns a list of nmoe.Sample, sync or async (docs/guides/library.md)"
    if not callable(function):
        raise UserError(f"generate_fn is a {type(function).__name__}, which is no function; {way}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise UserError(
            f"generate_fn: {name}{inspect.signature(function)} does not take a request and an engine; {way}"
        ) from None
    except ValueError:  # a function in C has no signature
        return


def settings(path: str, value: Any) -> Any:
    """Converts a value to one that a configuration can hold: paths to strings, numbers of other libraries to Python's. Values below
    `environment` may be of any type. Raises UserError, which names `path`, for any other type elsewhere.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): settings(f"{path}.{key}", one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [settings(f"{path}[{index}]", one) for index, one in enumerate(value)]
    if isinstance(value, str | int | float | datetime.date | datetime.time) or _is_of_environment(path):
        return value
    if tuple(getattr(value, "shape", (0,))) == () and hasattr(value, "item"):
        return value.item()
    raise UserError(f"config: {path} = {shown(value)} is no setting; {_way_of(value)}")


def _is_of_environment(path: str) -> bool:
    """Returns whether a key belongs to the `environment` table, whose objects are checked elsewhere."""
    return path.partition(".")[0] == "environment"


def _way_of(value: Any) -> str:
    if value is None:
        return "leave it out for its default"
    if hasattr(value, "param_groups"):
        return _OWN_LOOP
    if callable(value):
        return "functions and objects are arguments: model, env, rewards, tools, generate_fn"
    return "settings are numbers, texts, true or false, and lists and dicts of them"


def refuse_contradiction(said: Mapping[str, Any], given: Mapping[str, Any], path: str, argument: str) -> None:
    """Raises UserError if `config` and an argument give the same key different values."""
    for key in said.keys() & given.keys():
        one, other = said[key], given[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            refuse_contradiction(one, other, f"{path}.{key}", argument)
        elif one != other:
            raise UserError(
                f"config: {path}.{key} = {shown(one)}, and {argument} says {shown(other)}: drop one of the two"
            )
