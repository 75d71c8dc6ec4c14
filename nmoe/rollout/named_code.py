"""Finds the code that replaying a bundle would run outside any sandbox, with the user's rights.

A bundle is data that may come from anyone, and its digests are not a signature. Code that a bundle names is not run
until the user allows it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from nmoe.config.commands import RLConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_run
from nmoe.config.registry import ADVANTAGES, LOSSES, TASKS, TOOLS
from nmoe.config.tables.pools import task_types
from nmoe.config.tables.rewards import FunctionRewardConfig
from nmoe.envs.user_code import find_definition
from nmoe.errors import UserError
from nmoe.parsing import toml_of
from nmoe.rollout.bundle import Bundle


def named_code(bundle: Bundle) -> list[str]:
    """Returns one line for each function or program that a replay would import or start, without doing so.

    ["tool words:lookup from /home/me/words.py", "pip, for [workspace] bootstrap of files"]
    """
    # The record names its problem's task beside the pool's.
    tasks = {str(bundle.record["task_type"])}
    python = ((bundle.sandbox or {}).get("settings") or {}).get("python")
    return code_of(bundle.settings, python, tasks, all_rewards=False)


def code_of(
    settings: EnvironmentSettings, python: str | None, tasks: Collection[str] = (), *, all_rewards: bool = True
) -> list[str]:
    """Returns the lines of `named_code` for an environment, and more `tasks`; `python` is the one of [sandbox]. Without
    `all_rewards`, rewards are left out that a bundle's replay takes as recorded."""
    tools = () if settings.tools is None else settings.tools.use
    named = {*task_types(settings.task_pool), *tasks}
    # What no table has is refused where it is looked up; there is nothing to run.
    found = [_function("task", name) for name in sorted(named - TASKS.builtin.keys()) if name in TASKS]
    found += [_function("tool", name) for name in tools if name not in TOOLS.builtin and name in TOOLS]
    found += [
        _function("reward function", one.call)
        for one in settings.rewards
        if isinstance(one, FunctionRewardConfig) and (all_rewards or one.replay)
    ]
    found += [
        f"the program {one.command[0]}, as [[tools.servers]] says" if one.command else f"the server {one.url}"
        for one in (() if settings.tools is None else settings.tools.servers)
        if one.offers is None  # else it is not asked
    ]
    found += _of_the_workspace(settings)
    return found if python is None else [*found, f"the program {python}, as [sandbox] python"]


def refuse_named_code(bundle: Bundle) -> None:
    """Raises UserError, which lists the code, if replaying the bundle would run code outside a sandbox."""
    found = named_code(bundle)
    if found:
        raise UserError(
            f"{bundle.path}: replaying it would run, outside any sandbox and with your rights: {'; '.join(found)}. The bundle "
            "names these, and whoever can write a bundle can write names; if you trust it, repeat the command with "
            "--allow-user-code"
        )


def recorded_config(run: Path, *, allow_user_code: bool) -> RLConfig:
    """Reads the configuration of a run that is to be repeated. To read it imports the engine that it names: raises UserError
    before that for an engine of a user's, unless `allow_user_code`, and for a file that is no configuration."""
    file = run / "config.toml"
    try:
        kind = dict(toml_of(file.read_text()).get("engine") or {}).get("kind", "native")
    except (OSError, ValueError, TypeError):
        kind = "native"  # the loader names the fault
    if not allow_user_code and isinstance(kind, str) and kind not in ("native", "server", "vllm", "sglang"):
        raise _refused(file, [_function("engine", kind)])
    return load_run(file, RLConfig)


def code_of_training(config: RLConfig) -> list[str]:
    """Returns the lines of `named_code` for the advantages and the loss of a run."""
    named = (("advantage", ADVANTAGES, config.algorithm.advantage), ("loss", LOSSES, config.algorithm.loss))
    return [_function(kind, name) for kind, registry, name in named if name not in registry.builtin]


def refuse_code_of_training(run: Path, config: RLConfig) -> None:
    """Raises UserError, which lists the code, if the numbers of a run are computed by code that is not nmoe's."""
    if found := code_of_training(config):
        raise _refused(run, found)


def _refused(path: Path, found: Collection[str]) -> UserError:
    return UserError(
        f"{path}: this would run, outside any sandbox and with your rights: {'; '.join(found)}. The run names these, and whoever "
        "can write its files can write names; if you trust it, repeat the command in a terminal with --allow-user-code"
    )


def _function(kind: str, name: str) -> str:
    if ":" not in name:
        return f"{kind} {name}, which an installed package offers"
    try:
        return f"{kind} {name} from {find_definition(kind, name)[0]}"
    except UserError as error:
        return f"{kind} {name} ({str(error).removeprefix(f'{kind} {name}: ')})"


def _of_the_workspace(settings: EnvironmentSettings) -> list[str]:
    files = settings.workspace
    if files is None:
        return []
    found = []
    if files.repository is not None:
        # A clone's own configuration can name programs: filters, hooks, monitors.
        found.append(f"git in {files.repository}, as [workspace] repository")
    if files.bootstrap != "none":
        found.append(f"the bootstrap {files.bootstrap!r} of {files.repository or files.directory}, as [workspace] says")
    return found
