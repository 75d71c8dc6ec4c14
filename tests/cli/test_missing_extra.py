"""Commands whose extra is not installed: one message with the command that installs it, as in an environment without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = "import runpy, sys; sys.modules['{}'] = None; sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["nmoe", "serve", "nowhere"], "nmoe serve"),
        (["nmoe", "dashboard", "."], "nmoe dashboard"),
        (["nmoe.engine.server", "nowhere"], "the engine server"),
    ],
)
def test_a_server_without_its_packages_says_how_to_install_them(command: list[str], what: str, package: str) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED.format(package), *command], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert f"{what} needs {package}" in done.stderr
    assert "pip install 'starlette" in done.stderr
    assert "Traceback" not in done.stderr
