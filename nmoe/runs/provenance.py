"""The provenance of a run: code, packages, machine and command, without the name of a person or a host."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nmoe.model.ops.cpu.processor import cpu_model
from nmoe.runs.git import checkout_at, package_checkout


def provenance(seed: int, threads: int, device: str = "cpu", numerics: str = "fast") -> dict[str, Any]:
    """A JSON-able record, made when a run starts:

        {"started_utc": "2026-01-02T03:04:05Z", "nmoe": "0.1.0", "git_commit": "9f2c...", "git_dirty": false,
         "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "transformers": "5.14.1",
         "platform": "Linux-6.18-x86_64-with-glibc2.36", "cpu": "AMD EPYC 9B14", "cores": 2, "threads": 2,
         "device": "cpu", "numerics": "exact", "seed": 0, "argv": ["nmoe", "rl", "arithmetic.toml"]}

    The git entries are None unless the package runs from its own checkout. A command that runs in another repository has
    `directory_commit` and `directory_dirty` of that, too. Of dirty ones `git_diff` is the diff and `git_untracked` the files that
    it does not hold (`RunDirectory` keeps the diff as code.diff). `device` is what `nmoe.model.device` says of it: with a
    GPU its name and the CUDA version. In `argv` the home directory is written `~`.
    """
    return {
        "started_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "nmoe": _version("nmoe"),
        **_git(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "numerics": numerics,
        "seed": seed,
        "argv": _argv(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """The git entries: of the checkout that holds this package, and of another repository that the command runs in."""
    package, around = package_checkout(), checkout_at(Path.cwd())
    entries: dict[str, Any] = {"git_commit": None, "git_dirty": None}
    diffs = []
    if package is not None:
        entries |= {"git_commit": package.commit, "git_dirty": package.dirty}
    if around is not None and (package is None or around.top != package.top):
        entries |= {"directory_commit": around.commit, "directory_dirty": around.dirty}
    else:
        around = None
    for checkout in (package, around):
        if checkout is not None and checkout.diff:
            diffs.append(checkout.diff + "\n")
        if checkout is not None and checkout.untracked:
            entries["git_untracked"] = [*entries.get("git_untracked", ()), *checkout.untracked]
    return entries | ({"git_diff": "".join(diffs)} if diffs else {})


def _argv() -> list[str]:
    """The command line, with the command without its directory and the home directory as `~`."""
    command, *arguments = sys.argv
    home = str(Path.home())
    return [Path(command).name, *(argument.replace(f"{home}/", "~/") for argument in arguments)]
