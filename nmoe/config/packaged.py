"""Finds environments, configurations and data preparations by name: in `nmoe/packaged`, and in installed packages, which offer them
under the entry point groups `nmoe.environments`, `nmoe.configs` and `nmoe.preparations`.

A package offers the environment NAME by a line of its metadata whose value says where in the package it lies:

    [project.entry-points."nmoe.environments"]
    countdown = "my_environments.countdown"            # my_environments/countdown/environment.toml
    digits = "my_environments:digits.toml"             # my_environments/digits.toml

    [project.entry-points."nmoe.configs"]
    countdown_grpo = "my_environments:countdown_grpo.toml"

No code of the package is imported to find it: of the value only the first name is looked up, as a module to import would
be, and the rest is a path below it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path, PurePath

from nmoe.errors import UserError

PACKAGED = Path(__file__).parents[1] / "packaged"
ENVIRONMENTS = PACKAGED / "environments"
CONFIGS = PACKAGED / "configs"
PREPARATIONS = PACKAGED / "preparations"
PIPELINES = PACKAGED / "pipelines"
MODELS = PACKAGED / "models"

_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.\d[A-Za-z0-9_-]*)*")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)")
_VALUE = re.compile(r"(?P<module>\w+(?:\.\w+)*)\s*(?::\s*(?P<resource>\w+(?:\.\w+)*))?")


@dataclass(frozen=True)
class Packaged:
    """A named environment, configuration or preparation: `Packaged("skills", "nmoe", Path(".../environments/skills.toml"), None)`.

    `package` is the distribution that contains it. `problem` is the reason why an entry point cannot be resolved; `path` is then
    None.
    """

    name: str
    package: str
    path: Path | None
    problem: str | None = None


@dataclass(frozen=True)
class _Kind:
    """Where packaged files of one sort lie (environments, configurations or preparations): the directory in nmoe, and the name of
    the file that stands for a whole directory."""

    noun: str
    directory: Path
    file: str
    listed_by: str

    def all(self) -> list[Packaged]:
        shipped = [(path.stem, path) for path in self.directory.glob("*.toml")]
        shipped += [(path.parent.name, path) for path in self.directory.glob(f"*/{self.file}")]
        offered = [self._offered(entry) for entry in entry_points(group=f"nmoe.{self.directory.name}")]
        return [
            *(Packaged(name, "nmoe", path) for name, path in sorted(shipped)),
            *sorted(offered, key=lambda one: (one.name, one.package)),
        ]

    def find(self, named: str, path: Path) -> Path:
        """Returns the file that `named` means: the packaged file of this name, else the file at `path`. Raises UserError for a URL,
        an unknown name, a name that two packages offer, and a missing file that has the name of a packaged one.

        A name that ends in .toml or has a separator always means the file at `path`, even if it does not exist: with a packaged
        file instead, a command in the wrong directory would train another configuration.
        """
        if match := _URL.match(named):
            url = match[0] + "//" + named[match.end() :].lstrip("/")
            raise UserError(f"{url}: a URL, not a file; fetch the {self.noun} and name the file")
        known = self.all()
        if _is_file_name(named):
            name = PurePath(named.removesuffix(f"/{self.file}")).name.removesuffix(".toml")
            if path.exists():
                return path
            if any(one.name == name for one in known):
                raise UserError(f"{path}: no such file; the packaged {self.noun} of that name is written {name!r}")
            if named == f"{name}.toml" and (hint := self._hint(name, known)):
                raise UserError(f"{path}: no such file{hint}")
            return path
        found = [one for one in known if one.name == named]
        if found:
            return self._only(found)
        if path.exists() or not _NAME.fullmatch(named):
            return path
        raise UserError(
            f"{path}: no such file or directory, nor is there a packaged {self.noun} of that name "
            f"(`{self.listed_by}` shows them){self._hint(named, known)}"
        )

    def packaged(self, named: str) -> Path:
        """Returns the packaged file with this name; the current directory is not searched. Raises UserError unless there is
        exactly one."""
        known, name = self.all(), named.removesuffix(".toml")
        found = [one for one in known if one.name == name]
        if not found:
            hint = self._hint(name, known)
            raise UserError(f"there is no packaged {self.noun} {named!r} (`{self.listed_by}` shows them){hint}")
        return self._only(found)

    def _hint(self, name: str, known: list[Packaged]) -> str:
        for other in (_ENVIRONMENT, _CONFIGURATION, _PREPARATION, _PIPELINE):
            if other is not self and any(one.name == name for one in other.all()):
                return f"; there is a packaged {other.noun} of that name"
        alike = difflib.get_close_matches(name, [one.name for one in known], n=1)
        return f"; did you mean {alike[0]!r}?" if alike else ""

    def _only(self, found: list[Packaged]) -> Path:
        one, *others = found
        if others:
            packages = ", ".join(one.package for one in found)
            raise UserError(f"several packages offer the {self.noun} {one.name!r}: {packages}; give the path of one")
        if one.path is None:
            raise UserError(f"{self.noun} {one.name!r} of the package {one.package}: {one.problem}")
        return one.path

    def _offered(self, entry: EntryPoint) -> Packaged:
        package = "an unnamed package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        try:
            return Packaged(entry.name, package, self._resource(entry.value))
        except UserError as error:
            return Packaged(entry.name, package, None, str(error))

    def _resource(self, value: str) -> Path:
        match = _VALUE.fullmatch(value)
        if match is None:
            raise UserError(
                f"the entry point {value!r} names nothing in a package; write package.directory or package:file.toml"
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
            file = (directory if resource is None else directory.joinpath(*resource.split("."))) / self.file
            if file.is_file():
                return file
            looked_at.append(str(file if resource is None or "." not in resource else directory / resource))
        raise UserError(f"the entry point {value!r} leads to no {self.noun}: there is no {' or '.join(looked_at)}")


def _is_file_name(named: str) -> bool:
    return named.endswith(".toml") or PurePath(named).name != named


_ENVIRONMENT = _Kind("environment", ENVIRONMENTS, "environment.toml", "nmoe env list")
_CONFIGURATION = _Kind("configuration", CONFIGS, "config.toml", "nmoe config list")
_PREPARATION = _Kind("preparation", PREPARATIONS, "preparation.toml", "nmoe config list")
_PIPELINE = _Kind("pipeline", PIPELINES, "pipeline.toml", "nmoe config list")


def packaged_environments() -> list[Packaged]:
    """Returns all packaged environments, sorted by name: first nmoe's, then other packages'."""
    return _ENVIRONMENT.all()


def packaged_configurations() -> list[Packaged]:
    """Returns all packaged configurations, sorted by name: first nmoe's, then other packages'."""
    return _CONFIGURATION.all()


def packaged_preparations() -> list[Packaged]:
    """Returns the files of all packaged data preparations (recipes that make a data set): nmoe's own by name, then the files that
    other packages offer."""
    return _PREPARATION.all()


def packaged_pipelines() -> list[Packaged]:
    """Returns the files of all packaged pipelines: nmoe's own by name, then the files that other packages offer."""
    return _PIPELINE.all()


def find_environment(named: str, directory: Path = Path()) -> Path:
    """Returns the TOML file that `named` means: a file, a directory with environment.toml, or a packaged environment's name, such
    as `skills`.

    Relative paths start from `directory`. A name that ends in .toml or has a separator is always a file path, returned unchanged if
    no such file exists, so that reading it fails. Raises UserError if that missing file has a packaged environment's name, and for
    a URL, an unknown name, or a name that two packages offer.
    """
    path = directory / named
    if path.is_dir():
        return path / _ENVIRONMENT.file
    return path if path.exists() else _ENVIRONMENT.find(named, path)


def find_configuration(named: str) -> Path:
    """Returns the TOML file that `named` means: a file, or a packaged configuration's name, such as `sft`; otherwise as
    `find_environment`.

    A directory called `sft` is ignored: `sft` still means the packaged configuration.
    """
    path = Path(named)
    return path if path.is_file() else _CONFIGURATION.find(named, path)


def find_preparation(named: str) -> Path:
    """Returns the TOML file that `named` means: a file, or a packaged data preparation's name, such as `numina`, as
    `find_configuration`."""
    path = Path(named)
    return path if path.is_file() else _PREPARATION.find(named, path)


def find_pipeline(named: str) -> Path:
    """Returns the TOML file that `named` means: a file, or a packaged pipeline's name, such as `nanochat_d20`, as
    `find_configuration`."""
    path = Path(named)
    return path if path.is_file() else _PIPELINE.find(named, path)


def packaged_environment(named: str) -> Path:
    """Returns the TOML file of the packaged environment with this name; the current directory is not searched. Raises UserError
    unless there is exactly one."""
    return _ENVIRONMENT.packaged(named)


def packaged_configuration(named: str) -> Path:
    """Returns the TOML file of the packaged configuration with this name; errors as in `packaged_environment`."""
    return _CONFIGURATION.packaged(named)


def packaged_preparation(named: str) -> Path:
    """Returns the TOML file of the packaged data preparation with this name; errors as in `packaged_environment`."""
    return _PREPARATION.packaged(named)


def packaged_pipeline(named: str) -> Path:
    """Returns the TOML file of the packaged pipeline with this name; errors as in `packaged_environment`."""
    return _PIPELINE.packaged(named)
