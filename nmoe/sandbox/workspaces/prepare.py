"""Prepares workspaces, the files that a trajectory starts with, once from a git commit or a directory; each trajectory gets a copy.

A prepared workspace is a directory below `workspaces_root()` with two entries. The sandbox copies `tree/` to a trajectory's own
tmpfs. `nmoe-workspace.json` records the origin and marks the directory as made here. It is keyed by its inputs, so many runs and
trajectories share one. A tree holds no `.git`, because that contains the commit to be found.

The bootstrap (`pip install` and the like, into `tree/.packages`) is part of preparing. It runs outside the sandbox, because it
needs a package index; it runs code of a repository that the user chose, before any policy has written a token. A policy only ever
changes a copy.

One policy decides which files stay: `[workspace] keep` says which files of a finished trajectory are saved, `max_age_days` and
`max_disk_mb` for how long (`nmoe env gc`).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.config.tables.rollout import WorkspaceSettings
from nmoe.errors import StorageError, UserError
from nmoe.runs.storage import storage_errors, write_atomically
from nmoe.sandbox.api import WORKSPACE, Limits, Sandbox
from nmoe.sandbox.workspaces.sources import Source, WorkspaceError, extract, fill, identity_of, last_line, source_of
from nmoe.sandbox.workspaces.store import MAKING, MARKER, lock, now_utc, workspaces_root
from nmoe.types import Problem

# Leaves room for the rest of a file name, which may have 255 bytes.
_KEPT_NAME_CHARS = 200


@dataclass(frozen=True)
class Prepared:
    """A prepared workspace: the directory of files to copy, and a record of their origin.

    {"nmoe_workspace": 1, "kind": "prepared", "env_id": "fix", "source": "repository", "repository": "repos/parser",
     "base_commit": "9f2c...", "target_commit": "b81e...", "content": "4c1d...", "sandbox": "bubblewrap, seccomp, ...",
     "bootstrap": {"mode": "pip", "command": ["python", "-m", "pip", ...], "exit_code": 0, "wall_s": 8.1, "output": "..."},
     "made_utc": "2026-01-02T03:04:05Z", "policy": {"keep": "failed", "max_age_days": 7.0, "max_disk_mb": 10240}}
    """

    tree: Path
    provenance: dict[str, Any]


class Workspaces:
    """Prepares and saves the workspaces of one environment. `sandbox` is the text of `Sandboxes.describe()`, for the record.

    Every workspace handed out stays locked until `close`, so that `nmoe env gc` does not remove it.
    """

    def __init__(self, env_id: str, settings: WorkspaceSettings, sandbox: str) -> None:
        self._env_id = env_id
        self._settings = settings
        self._sandbox = sandbox
        self._root = workspaces_root()
        self._makers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="workspace")
        self._ready: dict[Source, Future[Prepared]] = {}
        self._locks: list[int] = []
        self._saving: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def prepare(self, problem: Problem) -> Prepared:
        """Returns the workspace for a problem, which is made on first use. Raises WorkspaceError, the same one for every caller."""
        try:
            source = source_of(self._settings, problem)
        except UserError as error:
            raise WorkspaceError(str(error)) from error
        if source not in self._ready:
            self._ready[source] = self._makers.submit(self._prepare, source)
        # Shielded: cancelling one trajectory must not cancel the workspace that others wait for.
        return await asyncio.shield(asyncio.wrap_future(self._ready[source]))

    async def save(
        self, sandbox: Sandbox, prepared: Prepared, name: str, *, failed: bool, limits: Limits
    ) -> Path | None:
        """Saves the files of a finished trajectory, if `[workspace] keep` says so, and returns their directory, else None.

        `name` identifies the trajectory: "run-step-problem-index". One is saved at a time, in a thread, so that a slow copy delays
        no other rollout and only one archive is in memory. Raises WorkspaceError if the files cannot be read or written for any
        reason: a policy chose their names, numbers and sizes.
        """
        keep = self._settings.keep
        if keep == "never" or (keep == "failed" and not failed):
            return None
        roomy = Limits(
            limits.wall_s, limits.cpu_s, limits.memory_mb, limits.processes, output_kb=2 * 1024 * limits.disk_mb
        )
        async with self._one_at_a_time():
            result = await sandbox.run(["tar", "-cf", "-", "-C", WORKSPACE, "."], limits=roomy)
            if result.failure != "ok":
                raise WorkspaceError(
                    f"the workspace of {name} cannot be kept: {result.failure} "
                    f"{last_line(result.stderr.decode(errors='replace'))}"
                )
            record = {**prepared.provenance, "kind": "kept", "name": name, "failed": failed, "made_utc": now_utc()}
            return await asyncio.to_thread(self._write_kept, result.stdout, record)

    def _one_at_a_time(self) -> asyncio.Lock:
        """Returns the lock of the running event loop under which workspaces are saved; each batch of rollouts has its own loop."""
        loop = asyncio.get_running_loop()
        if self._saving is None or self._saving[0] is not loop:
            self._saving = loop, asyncio.Lock()
        return self._saving[1]

    def _write_kept(self, archive: bytes, record: Mapping[str, Any]) -> Path:
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in record["name"])
        final = self._root / f"kept-{safe[:_KEPT_NAME_CHARS]}-{os.urandom(4).hex()}"
        try:
            with self._making(record) as making:
                extract(archive, making / "tree")
                os.rename(making, final)
        except (OSError, StorageError) as error:
            raise WorkspaceError(f"the workspace of {record['name']} cannot be kept: {error}") from error
        return final

    def close(self) -> None:
        """Unlocks the workspaces, so that `nmoe env gc` may remove those past the age or quota."""
        self._makers.shutdown(cancel_futures=True)
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    def _prepare(self, source: Source) -> Prepared:
        """Finds or makes the prepared workspace of a source, and locks it. Runs in a thread."""
        identity = identity_of(source)
        what = json.dumps([identity["content"], self._settings.bootstrap])
        final = self._root / f"prepared-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
        while True:
            if not (final / MARKER).exists():
                self._make(source, identity, final)
            self._locks.append(lock(final, fcntl.LOCK_SH))
            if (final / MARKER).exists():  # else it was removed before this lock was taken
                break
        os.utime(final / MARKER)  # its age counts from its last use
        record = json.loads((final / MARKER).read_text())
        # The same files may have been prepared from another source, for another environment.
        return Prepared(final / "tree", {**record, "target_commit": None, **identity, **self._about()})

    def _make(self, source: Source, identity: Mapping[str, Any], final: Path) -> None:
        record = {"kind": "prepared", **identity}
        with self._making(record) as making:
            tree = making / "tree"
            fill(source, identity, tree)
            outcome = bootstrap(self._settings, tree)
            self._write_marker(making, {**record, "bootstrap": outcome})
            if outcome["exit_code"] != 0:
                failed = final.with_name(final.name.replace("prepared-", "failed-"))
                shutil.rmtree(failed, ignore_errors=True)
                os.rename(making, failed)
                raise WorkspaceError(
                    f"the bootstrap {' '.join(outcome['command'])} ended with {outcome['exit_code']}: "
                    f"{last_line(outcome['output'])} (all of it in {failed / MARKER})"
                )
            try:
                os.rename(making, final)
            except OSError:
                if not (final / MARKER).exists():  # else another process was first, with the same files
                    raise

    @contextmanager
    def _making(self, record: Mapping[str, Any]) -> Iterator[Path]:
        """Yields a new directory to fill and rename, locked and marked from the start; removes it at the end of the block unless it
        was renamed."""
        with storage_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            making = Path(tempfile.mkdtemp(prefix=MAKING, dir=self._root))
            held = lock(making, fcntl.LOCK_SH)
            try:
                self._write_marker(making, record)
                yield making
            finally:
                os.close(held)
                shutil.rmtree(making, ignore_errors=True)

    def _write_marker(self, directory: Path, record: Mapping[str, Any]) -> None:
        whole = {"nmoe_workspace": 1, **record, **self._about(), "made_utc": now_utc()}
        write_atomically(directory / MARKER, (json.dumps(whole, indent=1) + "\n").encode())

    def _about(self) -> dict[str, Any]:
        policy = {name: getattr(self._settings, name) for name in ("keep", "max_age_days", "max_disk_mb")}
        return {"env_id": self._env_id, "sandbox": self._sandbox, "policy": policy}


PACKAGES = ".packages"
_OUTPUT_KEPT = 4000  # characters from the end of the output, where errors are


def bootstrap(settings: WorkspaceSettings, tree: Path) -> dict[str, Any]:
    """Installs the requirements of the files into `tree/.packages` and returns a record of the installation. A failure only shows
    in its `exit_code`."""
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
