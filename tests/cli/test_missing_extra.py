"""Commands whose extra is not installed: one message with the command that installs it, as in an environment without it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from forked import Forked


def block(package: str) -> None:
    assert package not in sys.modules, "what was imported cannot be missing"
    sys.modules[package] = None  # type: ignore[assignment]


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
@pytest.mark.parametrize(
    ("main", "arguments", "what"),
    [
        ("nmoe.cli:main", ("serve", "nowhere"), "nmoe serve"),
        ("nmoe.cli:main", ("dashboard", "."), "nmoe dashboard"),
        ("nmoe.engine.server.__main__:main", ("nowhere",), "the engine server"),
    ],
)
def test_a_server_without_its_packages_says_how_to_install_them(
    main: str, arguments: tuple[str, ...], what: str, package: str, tmp_path: Path
) -> None:
    ended = Forked(tmp_path, *arguments, before=partial(block, package), main=main).ended()
    assert ended.code == 2, ended.err
    assert f"{what} needs {package}" in ended.err
    assert "pip install 'starlette" in ended.err
    assert "Traceback" not in ended.err
