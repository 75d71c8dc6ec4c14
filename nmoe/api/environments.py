"""The environment of a run as a program says it: a file, a task, an episode, or a list of records, with functions for
rewards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.config.environment import load_environment
from nmoe.config.registry import hand_over
from nmoe.envs.decorators import SETTINGS
from nmoe.envs.environment import Environment
from nmoe.envs.rewards.function import check_signature
from nmoe.envs.tasks.own import MultiTurnEnv, Task
from nmoe.errors import UserError

Reward = Callable[..., Any] | Mapping[str, Any]
Env = str | Path | Environment | Task | MultiTurnEnv | type | Mapping[str, Any] | Sequence[Mapping[str, Any]]


def environment_table(
    env: Env | None,
    rewards: Sequence[Reward] = (),
    tools: Sequence[Callable[..., Any] | str] = (),
    data: Sequence[Mapping[str, Any]] | str | Path | None = None,
) -> dict[str, Any]:
    """The `[environment]` table that says the same as these arguments of `nmoe.train_rl`.

    Raises UserError for anything that is not an environment, a reward or a tool.
    """
    table = _table(env)
    for key in ("task_pool", "tools"):
        if not isinstance(table.get(key, {}), Mapping):
            raise UserError(f"env: {key} = {table[key]!r} is not a table; write a dict")
    if data is not None:
        table.setdefault("env_id", "records")
        # Other problems of the same task.
        task_type = {key: value for key, value in table.get("task_pool", {}).items() if key == "task_type"}
        if isinstance(data, str | Path):
            table["task_pool"] = {**_pool(Path(data)), **task_type}
        else:
            table["task_pool"] = {"type": "python", "call": hand_over(_records(data))[0], **task_type}
    if rewards:
        table["rewards"] = [*table.get("rewards", ()), *_rewards(rewards, _names(table))]
    if tools:
        used = table.get("tools", {}).get("use", ())
        table["tools"] = {**table.get("tools", {}), "use": [*used, *_tools(tools, _names(table))]}
    pool = table.get("task_pool", {})
    if (data is not None or pool.get("type") == "python") and "task" not in table and "task_type" not in pool:
        table["task"] = "open" if rewards else "math"
    return table


def _names(table: Mapping[str, Any]) -> set[str]:
    """The names of parts in a table, which no other part may take."""
    rewards = {reward.get("call") for reward in table.get("rewards", ()) if isinstance(reward, Mapping)}
    return {str(name) for name in {table.get("task"), *rewards, *table.get("tools", {}).get("use", ())}}


def _table(env: Env | None) -> dict[str, Any]:
    if env is None:
        return {}
    if isinstance(env, Environment):
        env = env.settings.model_dump(exclude_unset=True)
    if isinstance(env, str | Path):
        return load_environment(Path(env)).model_dump(exclude_unset=True)
    if isinstance(env, Mapping):
        task = env.get("task")
        return {**_table(task), **env, "task": hand_over(task)[0]} if _is_task(task) else dict(env)
    if _is_task(env):
        name = (env if isinstance(env, type) else type(env)).__name__
        return {"env_id": name, "task": hand_over(env)[0]}
    if isinstance(env, Sequence) and not isinstance(env, str | bytes):
        return {"env_id": "records", "task_pool": {"type": "python", "call": hand_over(_records(env))[0]}}
    raise UserError(
        f"env = {env!r} is not an environment: pass a TOML file or packaged name, a Task or MultiTurnEnv, an Environment, "
        "the table of one as a dict, or a list of records"
    )


def _is_task(part: Any) -> bool:
    return issubclass(part if isinstance(part, type) else type(part), Task | MultiTurnEnv)


class Records(list[dict[str, Any]]):
    """Records that a program passed, as a pool of the type `python` reads them: `call = "passed:Records"`."""

    __module__ = "passed"


def _records(records: Sequence[Mapping[str, Any]]) -> Records:
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise UserError(f"record {number} is {record!r}, not a dict such as {{'prompt': '...', 'answer': '...'}}")
    if not records:
        raise UserError("there are no records; an environment needs at least one")
    return Records(dict(record) for record in records)


def _pool(path: Path) -> dict[str, Any]:
    kinds = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
    if path.suffix in kinds:
        return {"type": kinds[path.suffix], "path": str(path)}
    return {"type": "hf", "dataset": str(path)}


def _rewards(rewards: Sequence[Reward], beside: set[str]) -> list[dict[str, Any]]:
    if callable(rewards) or isinstance(rewards, str | Mapping):
        raise UserError(f"rewards = {rewards!r} is not a list; write rewards=[...]")
    functions = [one for one in rewards if callable(one)]
    calls = dict(zip(map(id, functions), hand_over(*functions, beside=beside), strict=True))
    tables = []
    for one in rewards:
        if isinstance(one, Mapping):
            _, table = read_config({"reward": one})
            tables.append(table["reward"])
        elif callable(one):
            check_signature(one)
            settings = getattr(one, SETTINGS, {})
            name = getattr(one, "__name__", type(one).__name__)
            tables.append({"type": "function", "name": name, "call": calls[id(one)], **settings})
        else:
            raise UserError(f"rewards has {one!r}, which is neither a function nor the table of a reward as a dict")
    return tables


def _tools(tools: Sequence[Callable[..., Any] | str], beside: set[str]) -> list[str]:
    names = iter(hand_over(*(one for one in tools if callable(one)), beside=beside))
    return [one if isinstance(one, str) else next(names) for one in tools]


def read_config(config: Mapping[str, Any] | str | Path | None) -> tuple[Path | None, dict[str, Any]]:
    """The file of a configuration and the tables that a program says instead of one; `{"run.steps": 9}` is a table as well.

    Raises UserError for what is neither.
    """
    if config is None:
        return None, {}
    if isinstance(config, str | Path):
        return Path(config), {}
    if not isinstance(config, Mapping):
        raise UserError(f"config = {config!r} is neither a file nor a dict of tables")
    tables: dict[str, Any] = {}
    for key, value in config.items():
        *above, last = str(key).split(".")
        for name in reversed(above):
            last, value = name, {last: value}
        _merge(tables, last, value)
    for name, table in tables.items():
        tables_in_array = isinstance(table, list | tuple) and all(isinstance(one, dict) for one in table)
        if not isinstance(table, dict) and not tables_in_array and name != "environment":
            raise UserError(f"config: {name} = {table!r} is not a table; write a dict, or a key in it as '{name}.KEY'")
    return None, tables


def _merge(table: dict[str, Any], name: str, value: Any) -> None:
    """Sets a value; of two tables, all values. A path may be a path object or a run."""
    if isinstance(value, Mapping):
        inside = table[name] = table[name] if isinstance(table.get(name), dict) else {}
        for key, one in value.items():
            _merge(inside, str(key), one)
    else:
        table[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
