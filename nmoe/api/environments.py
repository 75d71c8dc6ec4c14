"""Converts Python arguments (a file, a task, an episode, records, reward functions) to the settings of an environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.api.given import rows_of, settings
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_environment, parse
from nmoe.config.locate import Locator, Place
from nmoe.config.registry import hand_over, load_object
from nmoe.config.tables.pools import DatasetKeys
from nmoe.data.rows import read_rows
from nmoe.envs.decorators import SETTINGS
from nmoe.envs.environment import Environment
from nmoe.envs.pools.records import has_gold
from nmoe.envs.rewards.function import check_signature
from nmoe.envs.tasks.live import LiveEpisode
from nmoe.envs.tasks.own import MultiTurnEnv, Task
from nmoe.errors import UserError

Reward = Callable[..., Any] | Mapping[str, Any]
Data = Iterable[Mapping[str, Any]] | str | Path
Env = str | Path | Environment | Task | MultiTurnEnv | type | Mapping[str, Any] | Iterable[Mapping[str, Any]]


def environment_table(
    env: Env | None,
    rewards: Sequence[Reward] = (),
    tools: Sequence[Callable[..., Any] | str] = (),
    data: Data | None = None,
) -> dict[str, Any]:
    """Converts arguments of `nmoe.train_rl` to an `[environment]` table.

    Raises UserError for a value of the wrong kind, and if `env` and `data` name different problems.
    """
    table = _table(env)
    for key in ("task_pool", "tools"):
        if not isinstance(table.get(key, {}), Mapping):
            raise UserError(f"env: {key} = {table[key]!r} is not a table; write a dict")
    if data is not None:
        table.setdefault("env_id", "records")
        pool = table.get("task_pool", {})
        if isinstance(env, Mapping) and (other := [key for key in _SOURCES if key in pool and "path" not in env]):
            raise UserError(
                f"env: task_pool.{other[0]} = {pool[other[0]]!r} names problems, and data names others: drop either"
            )
        # Other problems, read and graded by the settings of `env`.
        kept = {key: value for key, value in pool.items() if key in DatasetKeys.model_fields}
        if isinstance(data, str | Path):
            table["task_pool"] = {**_pool(Path(data)), **kept}
        else:
            table["task_pool"] = {"type": "python", "call": hand_over(_records(data, "data"))[0], **kept}
    if rewards:
        table["rewards"] = [*table.get("rewards", ()), *_rewards(rewards, _names(table))]
    if tools:
        if callable(tools) or isinstance(tools, str):
            raise UserError(f"tools = {tools!r} is not a list; write tools=[...]")
        used = table.get("tools", {}).get("use", ())
        table["tools"] = {**table.get("tools", {}), "use": [*used, *_tools(tools, _names(table))]}
    pool = table.get("task_pool", {})
    if (data is not None or pool.get("type") == "python") and "task" not in table and "task_type" not in pool:
        # Rewards are added to the grade where there is a right answer, as [[rewards]] are.
        table["task"] = "open" if rewards and not _has_gold(pool) else "math"
    return table


def environment_settings(env: Env, named: str, data: Data | None = None) -> EnvironmentSettings:
    """Returns the checked settings of an environment. `named` begins the messages. Raises UserError as `environment_table`, and
    ConfigError with every mistake."""
    return parse(environment_table(env, data=data), EnvironmentSettings, Locator(Place(named)))


# The keys of a task pool that say which problems there are.
_SOURCES = ("path", "dataset", "call", "source", "sources")


def _has_gold(pool: Mapping[str, Any]) -> bool:
    """Returns whether the pool's records have right answers: whether it names their field, or its first record has a known one.

    Returns False if the record cannot be read.
    """
    if "answer_field" in pool:
        return True
    try:
        if pool["type"] == "python":
            records = load_object("pool", pool["call"])
            first = next(iter(records() if callable(records) else records))
        else:
            subset, split = pool.get("subset"), pool.get("split", "train")
            _, first = next(read_rows(pool.get("path") or pool["dataset"], subset=subset, split=split))
    except (UserError, StopIteration):  # reading all of it names the mistake
        return False
    return has_gold(first)


def _names(table: Mapping[str, Any]) -> set[str]:
    """Returns the names of the task, the rewards and the tools that an environment's settings contain. A function that is added to
    the environment must have another name."""
    rewards = {reward.get("call") for reward in table.get("rewards", ()) if isinstance(reward, Mapping)}
    return {str(name) for name in {table.get("task"), *rewards, *table.get("tools", {}).get("use", ())}}


def _table(env: Env | None) -> dict[str, Any]:
    if env is None:
        return {}
    if isinstance(env, Environment):
        env = env.settings.model_dump(exclude_unset=True)
    if isinstance(env, str | Path):
        return load_environment(Path(env)).model_dump(exclude_unset=True)
    if isinstance(env, Mapping) and not (env and all(hasattr(split, "column_names") for split in env.values())):
        if isinstance(named := env.get("path"), str | Path):
            beside = {key: value for key, value in env.items() if key != "path"}
            return joined(_table(named), _table(beside))
        task = env.get("task")
        return {**_table(task), **env, "task": hand_over(task)[0]} if _is_task(task) else dict(env)
    if _is_task(env):
        name = (env if isinstance(env, type) else type(env)).__name__
        return {"env_id": name, "task": hand_over(env)[0]}
    if (isinstance(env, Iterable) or hasattr(env, "to_pylist")) and not isinstance(env, bytes | type):
        return {"env_id": "records", "task_pool": {"type": "python", "call": hand_over(_records(env, "env"))[0]}}
    raise UserError(
        f"env = {env!r} is not an environment: pass a TOML file or packaged name, a Task, MultiTurnEnv or LiveEpisode, an "
        "Environment, the table of one as a dict, or records; what answers the policy turn by turn is a MultiTurnEnv, and what "
        "samples for it is generate_fn"
    )


def joined(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two tables, including nested tables; values of `over` replace values of `table`."""
    both = {
        key: joined(table[key], value) if isinstance(value, Mapping) and isinstance(table.get(key), Mapping) else value
        for key, value in over.items()
    }
    return {**table, **both}


def _is_task(part: Any) -> bool:
    return issubclass(part if isinstance(part, type) else type(part), Task | MultiTurnEnv | LiveEpisode)


class Records(list[dict[str, Any]]):
    """Records that a program passed in memory; a pool of type `python` refers to them as `call = "passed:Records"`."""

    __module__ = "passed"


def _records(records: Any, what: str) -> Records:
    return Records(rows_of(records, what))


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
            name = _reward_name(one, {str(table.get("name")) for table in tables})
            tables.append({"type": "function", "name": name, "call": calls[id(one)], **settings})
        else:
            raise UserError(f"rewards has {one!r}, which is neither a function nor the table of a reward as a dict")
    return tables


def _reward_name(function: Callable[..., Any], taken: set[str]) -> str:
    """Returns a function's own name or, for a lambda, "lambda", "lambda_2" and so on."""
    name = getattr(function, "__name__", type(function).__name__)
    if name.isidentifier():
        return name
    name, number = re.sub(r"\W", "", name) or "reward", 1
    while (numbered := f"{name}_{number}" if number > 1 else name) in taken:
        number += 1
    return numbered


def _tools(tools: Sequence[Callable[..., Any] | str], beside: set[str]) -> list[str]:
    names = iter(hand_over(*(one for one in tools if callable(one)), beside=beside))
    return [one if isinstance(one, str) else next(names) for one in tools]


def read_config(config: Mapping[str, Any] | str | Path | None) -> tuple[Path | None, dict[str, Any]]:
    """Converts a `config` argument to a file and tables, at least one of which is empty. A dotted key such as `{"run.steps": 9}`
    becomes a table.

    Raises UserError for any other value, and for a key that is given twice with different values.
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
        value = settings(str(key), value)
        for name in reversed(above):
            last, value = name, {last: value}
        _merge(tables, last, value, last)
    for name in ("run", "model", "records"):  # which the library itself writes into
        if not isinstance(table := tables.get(name, {}), dict):
            raise UserError(f"config: {name} = {table!r} is not a table; write a dict, or a key in it as '{name}.KEY'")
    return None, tables


def _merge(table: dict[str, Any], name: str, value: Any, path: str) -> None:
    """Sets a value in a table, or merges a table into it. Raises UserError if a key is given twice with different values."""
    if isinstance(value, Mapping):
        if name in table and not isinstance(table[name], dict):
            raise UserError(f"config: {path} = {table[name]!r}, and it is a table, too: drop one of the two")
        inside = table.setdefault(name, {})
        for key, one in value.items():
            _merge(inside, str(key), one, f"{path}.{key}")
    elif name in table and table[name] != value:
        raise UserError(f"config: {path} is given twice, as {table[name]!r} and as {value!r}: drop one of the two")
    else:
        table[name] = value
