"""The sources of workspaces, a directory or a git commit, and how to copy their files."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.config.tables.rollout import WorkspaceSettings
from nmoe.errors import UserError
from nmoe.types import Failure, Problem

# Limits of a saved workspace: people do not read more than this.
MOST_KEPT = 4096
_UNPACK_S = 60.0


class WorkspaceError(Exception):
    """Raised if a workspace is not available. The trajectory's failure is `workspace_failed`, which masks the sample."""

    failure: Failure = "workspace_failed"


@dataclass(frozen=True)
class Source:
    """The source of a workspace: a directory, or a repository at a commit.

    `target_commit` is the commit with the requested change, kept only for the record.
    """

    directory: str | None = None
    repository: str | None = None
    base_commit: str | None = None
    target_commit: str | None = None


def source_of(settings: WorkspaceSettings, problem: Problem) -> Source:
    """Returns the source of a problem's workspace: the environment's, at the commits in the problem's metadata if it has any.

    Raises UserError if a repository has no base commit.
    """
    if settings.directory is not None:
        return Source(directory=settings.directory)
    base = problem.metadata.get("base_commit", settings.base_commit)
    target = problem.metadata.get("target_commit", settings.target_commit)
    if base is None:
        raise UserError(
            f"problem {problem.id}: no base_commit in its record, and none in [workspace]; one of them has to say where to start"
        )
    return Source(
        repository=settings.repository, base_commit=str(base), target_commit=None if target is None else str(target)
    )


def identity_of(source: Source) -> dict[str, Any]:
    """Returns a record that identifies a source, with full commit ids, and in `content` a hash of its files (of a directory's
    files, or the commit's tree). Raises WorkspaceError if the source does not exist."""
    if source.directory is not None:
        return {"source": "directory", "directory": source.directory, "content": _hash(Path(source.directory))}
    assert source.repository is not None, "a source is a directory or a repository"
    repository = Path(source.repository)
    if not repository.is_dir():
        raise WorkspaceError(f"{repository}: no such directory; [workspace] repository names a clone on this machine")
    commits = {
        name: _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
        for name, commit in (("base_commit", source.base_commit), ("target_commit", source.target_commit))
        if commit is not None
    }
    tree = _git(repository, "rev-parse", f"{commits['base_commit']}^{{tree}}")
    return {"source": "repository", "repository": source.repository, **commits, "content": tree}


def _hash(directory: Path) -> str:
    """Returns the SHA-256 over the names, kinds, executable bits and bytes of everything below a directory except its .git."""
    if not directory.is_dir():
        raise WorkspaceError(f"{directory}: no such directory; [workspace] directory names the files to start with")
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if name.parts[0] == ".git":
            continue
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            kind, content = "link", os.fsencode(os.readlink(path))
        elif stat.S_ISREG(mode):
            kind, content = f"file {bool(mode & 0o100)}", path.read_bytes()
        elif stat.S_ISDIR(mode):
            kind, content = "directory", b""
        else:
            raise WorkspaceError(f"{path}: neither file, directory nor link; a workspace cannot hold it")
        for part in (os.fsencode(name), kind.encode(), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def fill(source: Source, identity: Mapping[str, Any], tree: Path) -> None:
    if source.directory is not None:
        shutil.copytree(
            source.directory,
            tree,
            symlinks=True,
            ignore=lambda directory, names: {".git"} & set(names) if directory == source.directory else set(),
        )
        if _hash(tree) != identity["content"]:
            raise WorkspaceError(f"{source.directory}: its files changed while they were copied")
        return
    assert source.repository is not None, "a source is a directory or a repository"
    tree.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        # Not `git archive`, which leaves out the files that .gitattributes marks export-ignore, often the tests.
        index = {"GIT_INDEX_FILE": f"{scratch}/index"}
        repository = Path(source.repository)
        _git(repository, "read-tree", identity["base_commit"], **index)
        _git(repository, "checkout-index", "--all", "--force", f"--prefix={tree.resolve()}/", **index)


def _git(repository: Path, *arguments: str, **environment: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    except OSError as error:
        raise WorkspaceError(f"git cannot be run: {error}; install it") from error
    if done.returncode != 0:
        said = last_line(done.stderr) or "no such commit"
        raise WorkspaceError(f"{repository}: git {' '.join(arguments)}: {said}")
    return done.stdout.strip()


def extract(archive: bytes, directory: Path) -> None:
    """Unpacks the archive of a policy's workspace, without members that would end up or point outside of the directory.

    Raises WorkspaceError for an archive with too many members, one that takes too long, and an invalid one.
    """
    until = time.monotonic() + _UNPACK_S

    def safe(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        if time.monotonic() > until:
            raise WorkspaceError(f"the workspace took longer than {_UNPACK_S:g} s to copy")
        try:
            return tarfile.data_filter(member, path)
        except tarfile.FilterError:
            return None

    directory.mkdir()
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            if (members := len(tar.getmembers())) > MOST_KEPT:
                raise WorkspaceError(
                    f"the workspace has {members} files and directories, too many to be kept: the most are {MOST_KEPT}"
                )
            tar.extractall(directory, filter=safe)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise WorkspaceError(f"the archive of the workspace cannot be read: {error}") from error


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
