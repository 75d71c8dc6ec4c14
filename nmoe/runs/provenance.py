"""The provenance of a run: code, packages, machine and command, without the name of a person or a host."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import nmoe
from nmoe.model.ops.cpu.processor import cpu_model


def provenance(seed: int, threads: int, device: str = "cpu", numerics: str = "fast") -> dict[str, Any]:
    """A JSON-able record, made when a run starts:

        {"started_utc": "2026-01-02T03:04:05Z", "nmoe": "0.1.0", "git_commit": "9f2c...", "git_dirty": false,
         "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "transformers": "5.14.1",
         "platform": "Linux-6.18-x86_64-with-glibc2.36", "cpu": "AMD EPYC 9B14", "cores": 2, "threads": 2,
         "device": "cpu", "numerics": "exact", "seed": 0, "argv": ["nmoe", "rl", "arithmetic.toml"]}

    The git entries are None unless the package runs from its own checkout. `device` is what `nmoe.model.device` says of it: with a
    GPU its name and the CUDA version. In `argv` the home directory is written `~`.
    """
    commit, dirty = _git()
    return {
        "started_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "nmoe": _version("nmoe"),
        "git_commit": commit,
        "git_dirty": dirty,
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


def _git() -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout that holds this package.

    The package has to be tracked there, which it is not if it is installed in an environment inside another repository.
    """
    package = Path(nmoe.__file__).parent
    if _run_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _run_git(package, "rev-parse", "HEAD")
    status = _run_git(package, "status", "--porcelain", "--untracked-files=normal")
    return commit, None if status is None else status != ""


def _run_git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _argv() -> list[str]:
    """The command line, with the command without its directory and the home directory as `~`."""
    command, *arguments = sys.argv
    home = str(Path.home())
    return [Path(command).name, *(argument.replace(f"{home}/", "~/") for argument in arguments)]
