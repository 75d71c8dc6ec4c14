"""The optional packages of nmoe, which its extras name, and the command that installs them."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

_ROOT = Path(__file__).resolve().parents[1]


def how_to_install(*extras: str) -> str:
    """The command that adds extras to the nmoe that runs: `pip install 'matplotlib>=3.9'` for `report`.

    It names their packages, since nmoe itself is not on PyPI and its sources need not be there. Where nmoe runs from sources that
    were never installed, the command installs these: `pip install -e '/home/me/nmoe[report]'`.
    """
    packages = {f"{one.name}{one.specifier}": None for extra in extras for one in requirements(extra)}
    wanted = list(packages) or ["-e", f"{_ROOT}[{','.join(extras)}]"]
    return shlex.join(["pip", "install", *wanted])


def requirements(extra: str = "") -> Iterator[Requirement]:
    """The requirements of the installed nmoe on this machine, or of one of its extras; empty where it is not installed."""
    try:
        lines = importlib.metadata.requires("nmoe") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        one = Requirement(line)
        applies = one.marker is None or one.marker.evaluate({"extra": extra})
        if applies and not (extra and (one.marker is None or one.marker.evaluate({"extra": ""}))):
            yield one
