"""Environments by name: what `environments/` holds, and what installed packages offer under the entry point group
`nmoe.environments`.

A package offers the environment NAME by a line of its metadata whose value says where in the package it lies:

    [project.entry-points."nmoe.environments"]
    countdown = "my_environments.countdown"            # my_environments/countdown/environment.toml
    digits = "my_environments:digits.toml"             # my_environments/digits.toml

No code of the package is imported to find it: of the value only the first name is looked up, as a module to import would
be, and the rest is a path below it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from nmoe.errors import UserError

GROUP = "nmoe.environments"
FILE = "environment.toml"
SHIPPED = Path(__file__).parents[2] / "environments"

_BARE_NAME = re.compile(r"[A-Za-z0-9_-]+")
_VALUE = re.compile(r"(?P<module>\w+(?:\.\w+)*)\s*(?::\s*(?P<resource>\w+(?:\.\w+)*))?")


@dataclass(frozen=True)
class Packaged:
    """One environment that has a name: `Packaged("skills", "nmoe", Path(".../environments/skills.toml"), None)`.

    `package` is the distribution it came with. `problem` says why an entry point leads nowhere; then there is no `path`.
    """

    name: str
    package: str
    path: Path | None
    problem: str | None = None


def packaged_environments() -> list[Packaged]:
    """All of them, those of nmoe first, each kind in the order of its names."""
    shipped = [(path.stem, path) for path in SHIPPED.glob("*.toml")]
    shipped += [(path.parent.name, path) for path in SHIPPED.glob(f"*/{FILE}")]
    offered = [_offered(entry) for entry in entry_points(group=GROUP)]
    return [
        *(Packaged(name, "nmoe", path) for name, path in sorted(shipped)),
        *sorted(offered, key=lambda one: (one.name, one.package)),
    ]


def find_environment(named: str, directory: Path = Path()) -> Path:
    """The TOML file that `named` means: a file, a directory that holds environment.toml, or else a packaged environment's name.

    Relative paths start from `directory`. A path that does not exist is returned as it is, for its reader to refuse; a
    bare name that nothing has is refused here, by UserError, as is one that two packages offer.
    """
    path = directory / named
    if path.is_dir():
        return path / FILE
    if path.exists() or not _BARE_NAME.fullmatch(named):
        return path
    known = packaged_environments()
    found = [one for one in known if one.name == named]
    if not found:
        alike = difflib.get_close_matches(named, [one.name for one in known], n=1)
        hint = f"; did you mean {alike[0]!r}?" if alike else ""
        raise UserError(
            f"{path}: no such file or directory, nor is there a packaged environment of that name{hint} "
            "(`nmoe env list` shows them)"
        )
    if len(found) > 1:
        raise UserError(
            f"several packages offer an environment {named!r}: {', '.join(one.package for one in found)}; give the path of one"
        )
    if found[0].path is None:
        raise UserError(f"environment {named!r} of the package {found[0].package}: {found[0].problem}")
    return found[0].path


def _offered(entry: EntryPoint) -> Packaged:
    package = "an unnamed package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    try:
        return Packaged(entry.name, package, _resource(entry.value))
    except UserError as error:
        return Packaged(entry.name, package, None, str(error))


def _resource(value: str) -> Path:
    match = _VALUE.fullmatch(value)
    if match is None:
        raise UserError(
            f"the entry point {value!r} is no place in a package; write package.directory or package:file.toml"
        )
    top, *below = match["module"].split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a ValueError where a module without a spec lies in sys.modules
        spec = None
    if spec is None or spec.submodule_search_locations is None:
        raise UserError(f"the entry point {value!r} names the package {top!r}, which is not there")
    looked_at = []
    for location in spec.submodule_search_locations:
        directory = Path(location, *below)
        resource = match["resource"]
        if resource is not None and (directory / resource).is_file():
            return directory / resource
        file = (directory if resource is None else directory.joinpath(*resource.split("."))) / FILE
        if file.is_file():
            return file
        looked_at.append(str(file if resource is None or "." not in resource else directory / resource))
    raise UserError(f"the entry point {value!r} leads to no environment: there is no {' or '.join(looked_at)}")
