"""The bootstrap of a workspace: installs what its files need, once, into `.packages` beside them.

It runs as the user and outside the sandbox, because it needs a package index. The code that it runs comes from a repository
that the user chose, before any policy has written a token.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmoe.config.tables.rollout import WorkspaceSettings

PACKAGES = ".packages"
_OUTPUT_KEPT = 4000  # characters from the end of the output, where errors are


def bootstrap(settings: WorkspaceSettings, tree: Path) -> dict[str, Any]:
    """Installs what the files need into `tree/.packages` and returns a record of it. The caller checks `exit_code`."""
    mode = settings.bootstrap
    if mode == "none":
        return {"mode": mode, "command": [], "exit_code": 0, "wall_s": 0.0, "output": ""}
    installer = (
        ["uv", "pip", "install", "--python", sys.executable]
        if mode == "uv"
        else [sys.executable, "-m", "pip", "install"]
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as output:
        what = ["-r", "requirements.txt"]
        directory = tree
        if mode != "requirements":
            # Built in a copy: a build writes beside its sources, and the workspace must stay as committed.
            directory = Path(scratch) / tree.name
            shutil.copytree(tree, directory, symlinks=True)
            what = ["."]
        command = [*installer, "--quiet", "--target", str((tree / PACKAGES).resolve()), *what]
        try:
            process = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                exit_code = process.wait(settings.bootstrap_wall_s)
            except subprocess.TimeoutExpired:
                exit_code = 124
                output.write(f"\nnot done after bootstrap_wall_s = {settings.bootstrap_wall_s:g}\n".encode())
            finally:
                _kill_group(process)
        except FileNotFoundError:
            exit_code = 127
            output.write(f"{command[0]}: command not found; install it\n".encode())
        output.seek(0)
        said = output.read().decode(errors="replace")
    shown = ["python" if word == sys.executable else word for word in command]
    shown[shown.index("--target") + 1] = PACKAGES
    wall_s = round(time.perf_counter() - began, 3)
    return {"mode": mode, "command": shown, "exit_code": exit_code, "wall_s": wall_s, "output": said[-_OUTPUT_KEPT:]}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
