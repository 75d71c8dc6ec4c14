"""Optional dependencies of nmoe (extras), and the command that installs them."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement

from nmoe.errors import UserError

_ROOT = Path(__file__).resolve().parents[1]


def how_to_install(*extras: str) -> str:
    """Returns the command that installs extras for this nmoe: `pip install 'matplotlib>=3.9'` for `report`.

    The command names the packages of the extras, because nmoe is not on PyPI. If nmoe runs from sources that were never
    installed, the command installs these with the extras: `pip install -e '/home/me/nmoe[report]'`.
    """
    packages = {f"{one.name}{one.specifier}": None for extra in extras for one in requirements(extra)}
    wanted = list(packages) or ["-e", f"{_ROOT}[{','.join(extras)}]"]
    return shlex.join(["pip", "install", *wanted])


@contextmanager
def needed_by(what: str, extra: str) -> Iterator[None]:
    """Raises UserError, with the command that installs the extra, for a module that an import in the `with` block does not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{what} needs {error.name}: {how_to_install(extra)}") from None


def requirements(extra: str = "") -> Iterator[Requirement]:
    """Yields the requirements of the installed nmoe that apply to this machine, or of one of its extras; nothing if it
    is not installed."""
    try:
        lines = importlib.metadata.requires("nmoe") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        one = Requirement(line)
        applies = one.marker is None or one.marker.evaluate({"extra": extra})
        if applies and not (extra and (one.marker is None or one.marker.evaluate({"extra": ""}))):
            yield one
