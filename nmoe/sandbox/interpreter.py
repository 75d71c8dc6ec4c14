"""Finds the host files that must be visible in a sandbox for its Python interpreter, and no others.

An installation is `bin`, `lib`, `lib64` and `pyvenv.cfg` below a prefix with a standard library or a `pyvenv.cfg`. Other files
below the prefix are not shown, because an interpreter may live in a home directory. A link that leads to an interpreter is a link
inside too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox.api import SandboxSetupError

_TREE = ("bin", "lib", "lib64", "pyvenv.cfg")


@dataclass(frozen=True)
class Interpreter:
    """The host paths that a sandbox needs for its Python interpreter:

        Interpreter("/home/me/env/bin/python", visible=["/home/me/env/bin", "/home/me/env/lib", ...], links=[],
                    site=["/home/me/env/lib/python3.11/site-packages"], directories=["/home/me/env/bin", ...])

    `visible` includes the paths that the settings name. `links` are the (text, path) of symbolic links to create. `site` are the
    directories with packages, listed here because the module site, which finds them, adds 19 ms to a cold start. `directories` are
    for PATH.
    """

    python: str
    visible: list[str]
    links: list[tuple[str, str]]
    site: list[str]
    directories: list[str]


def interpreter_of(settings: SandboxSettings) -> Interpreter:
    """Finds the files that the interpreter of the settings needs. Raises SandboxSetupError if it or a `visible` path does not
    exist."""
    python = settings.python or os.path.realpath(sys.executable)
    if not os.access(python, os.X_OK):
        raise SandboxSetupError(f"sandbox.python: {python} is not a program; name a Python interpreter, 3.11 or newer")
    for path in settings.visible:
        if not os.path.exists(path):
            raise SandboxSetupError(f"sandbox.visible: {path} does not exist")
    hops = _hops(os.path.abspath(python))
    prefixes = dict.fromkeys(os.path.dirname(os.path.dirname(hop)) for hop in hops)
    trees = [prefix for prefix in prefixes if prefix != "/" and _is_installation(prefix)]
    found = [os.path.abspath(path) for path in settings.visible]
    found += [os.path.join(tree, name) for tree in trees for name in _TREE if os.path.exists(os.path.join(tree, name))]
    links = []
    for hop in hops:
        if not _is_below(hop, ("/usr", "/bin", "/sbin", *found)):
            if os.path.islink(hop):
                links.append((os.readlink(hop), hop))
            else:
                found.append(hop)
    return Interpreter(
        python=python,
        visible=sorted({path for path in found if path != "/" and not f"{path}/".startswith("/usr/")}),
        links=links,
        site=[str(path) for tree in sorted(trees) for path in Path(tree).glob("lib/python3*/*-packages")],
        directories=list(dict.fromkeys(os.path.dirname(hop) for hop in hops)),
    )


def beside(interpreter: Interpreter) -> dict[str, list[str]]:
    """Returns the directories around the interpreter that are not shown as a whole, each with the only entries that a sandbox may
    show."""
    shown = [*interpreter.visible, *(path for _, path in interpreter.links)]
    around = {above for one in interpreter.directories for above in (one, os.path.dirname(one))}
    return {
        directory: sorted(
            {path.removeprefix(f"{directory}/").partition("/")[0] for path in shown if path.startswith(f"{directory}/")}
        )
        for directory in sorted(around)
        if directory != "/" and not _is_below(directory, ("/usr", "/bin", "/sbin", *interpreter.visible))
    }


def _is_installation(prefix: str) -> bool:
    """Returns whether a directory is the prefix of a Python installation or of a virtual environment."""
    top = Path(prefix)
    return (top / "pyvenv.cfg").is_file() or any(top.glob("lib*/python3*/os.py"))


def _is_below(path: str, directories: Iterable[str]) -> bool:
    return any(f"{path}/".startswith(f"{directory}/") for directory in directories)


def _hops(path: str) -> list[str]:
    """Returns a program's path and the paths that its symbolic links lead through, the real one last."""
    hops = [path]
    while os.path.islink(hops[-1]) and len(hops) < 40:
        hops.append(os.path.normpath(os.path.join(os.path.dirname(hops[-1]), os.readlink(hops[-1]))))
    return list(dict.fromkeys([*hops, os.path.realpath(path)]))
