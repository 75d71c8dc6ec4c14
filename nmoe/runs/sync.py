"""Copies code, runs, adapters and data to a second machine, and verifies the copy there.

Code goes as a git bundle, since a commit identifies it; everything else by rsync. At the target, files are compared with SHA-256
sums that were taken here, and the code with its commit.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nmoe.errors import InfrastructureError, UserError
from nmoe.runs.provenance import changed_files, checkout_at, git
from nmoe.runs.running import is_running
from nmoe.runs.storage import sha256_of, storage_errors

BUNDLE = "code.bundle"
# What the shells of other machines say.
_NO_RSYNC = re.compile(r"rsync: (command )?not found|command not found: rsync")


class Target:
    """The target of a copy: `HOST:DIR`, reached by ssh or the command in RSYNC_RSH, or a directory of this machine, such as a
    mounted one."""

    def __init__(self, text: str) -> None:
        host, colon, directory = text.partition(":")
        self.host, self.directory = (host, directory) if colon and "/" not in host else ("", text)
        # rsync would ask its own daemon for HOST::DIR.
        if not self.directory or text.startswith("-") or (self.host and self.directory.startswith(":")):
            raise UserError(f"{text!r}: no HOST:DIR, such as spare:work")
        if self.host and self.directory.startswith("~"):
            raise UserError(f"{text!r}: write the path without ~; one without / before it starts in the home there")
        if not self.host:
            self.directory = str(Path(self.directory).absolute())
        self.url = f"{self.host}:{self.directory}/" if self.host else f"{self.directory}/"

    def run(self, script: str, given: str = "") -> str:
        """Runs a shell script in the target directory and returns its output. Raises UserError with its message if it fails."""
        there = shlex.quote(self.directory)
        script = f"mkdir -p -- {there} && cd -- {there} && {script}"
        return _run(self._command(script), self.host or self.directory, given)

    def shell(self, script: str) -> str:
        """Returns the command that runs a shell script there, for a message."""
        return shlex.join(self._command(script))

    def fetch(self, name: str, directory: Path) -> None:
        """Copies all that the directory `name` there contains to a directory here. Raises UserError if that fails."""
        _need_rsync()
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self.rsync("--archive", "--checksum", "--protect-args", "--", f"{self.url}{name}/", f"{directory}/")

    def rsync(self, *arguments: str) -> str:
        """Runs rsync and returns its output. Raises UserError if it fails or is missing there."""
        try:
            return _run(["rsync", *arguments], "rsync")
        except UserError as error:
            if self.host and _NO_RSYNC.search(str(error)):
                install = self.shell("apt-get install rsync")
                raise UserError(f"{self.host}: rsync is not installed there; run: {install}") from error
            raise

    def _command(self, script: str) -> list[str]:
        if not self.host:
            return ["sh", "-c", script]
        return [*shlex.split(os.environ.get("RSYNC_RSH", "ssh")), self.host, script]


def sync(target: str, paths: Sequence[Path], dry_run: bool) -> Iterator[str]:
    """Copies the code of the working directory's repository, and the paths, which have to be below the working directory, to the
    target, and verifies them there. Yields lines about the code and files that were copied or, with `dry_run`, would be; then
    nothing is written.

    Raises UserError for a path that does not exist or is elsewhere, for a run that is being written, and if rsync or git is missing
    or fails; InfrastructureError if the copy differs from the original.
    """
    to = Target(target)
    _need_rsync()
    names = [_below(path) for path in paths]
    yield from _sync_code(to, dry_run)
    if dry_run:
        changes = _rsync(to, names, "--dry-run", "--mkpath").splitlines() if names else []
        yield from (f"would copy {line}" for line in changes if not line.endswith("/"))
        return
    if not names:
        return
    to.run("true")
    _rsync(to, names)
    sums = {file: sha256_of(Path(file)) for name in names for file in _files(name)}
    try:
        to.run(
            "sha256sum --check --quiet --strict -", "".join(_sum_line(file, digest) for file, digest in sums.items())
        )
    except UserError as error:
        raise InfrastructureError(f"the copy differs from the original: {error}; sync again") from error
    size = sum(os.stat(file).st_size for file in sums)
    yield f"{len(sums):,} files ({size:,} bytes) in {to.url}, their SHA-256 sums the same there"


def _need_rsync() -> None:
    if shutil.which("rsync") is None:
        raise UserError(
            "rsync is not installed, here or in the PATH; run: apt-get install rsync (the other machine needs it, too)"
        )


def _sync_code(to: Target, dry_run: bool) -> Iterator[str]:
    checkout = checkout_at(Path.cwd())
    if checkout is None or checkout.commit is None:
        yield "no code: the working directory is in no git repository with a commit"
        return
    if changed_files(checkout.top):
        yield "warning: changes that no commit holds stay here; commit them to send them"
    if dry_run:
        yield f"would send commit {checkout.commit} to {to.url}code"
        return
    to.run("true")
    with tempfile.TemporaryDirectory() as directory:
        bundle = Path(directory) / BUNDLE
        git(checkout.top, "bundle", "create", "--quiet", str(bundle), "HEAD")
        to.rsync("--checksum", "--protect-args", str(bundle), to.url)
    # A directory that is no repository lies perhaps in another one, whose files git would then change.
    there = to.run(
        "if [ -e code ] && [ ! -e code/.git ]; then echo none; exit; fi; "
        f"if [ -e code ]; then git -C code fetch --quiet ../{BUNDLE} HEAD; else git clone --quiet --no-checkout {BUNDLE} code; fi "
        f"&& git -C code checkout --quiet --detach {checkout.commit} && git -C code rev-parse HEAD "
        "&& git -C code status --porcelain --untracked-files=no"
    )
    if there.strip() == "none":
        raise UserError(
            f"{to.url}code: is no git repository, so no code can be put there; move it, or name another DIR"
        )
    arrived, *changed = there.splitlines()
    if changed:
        raise InfrastructureError(
            f"{to.url}code: has changes, which are left alone: {', '.join(changed[:5])}; commit or stash them there"
        )
    if arrived != checkout.commit:
        raise InfrastructureError(f"{to.url}code is at {arrived}, not at {checkout.commit}; sync again")
    yield f"commit {arrived} in {to.url}code"


def _below(path: Path) -> str:
    """Returns the path relative to the working directory, which is also its path at the target. Raises UserError for a path that
    does not exist or is elsewhere, and for a run that is being written."""
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    full = path.absolute()
    if not full.is_relative_to(Path.cwd()) or ".." in full.parts or full == Path.cwd():
        raise UserError(f"{path}: lies not below {Path.cwd()}, so it has no path at the target")
    for lock in (full / ".lock", *full.glob("*/.lock"), *full.glob("*/*/.lock")):
        if is_running(lock.parent):
            raise UserError(f"{lock.parent}: this run is being written; sync it when it has ended")
    return str(full.relative_to(Path.cwd()))


def _rsync(to: Target, names: Sequence[str], *options: str) -> str:
    # Links to other disks (`nmoe.runs.record_links`) are followed; those within a run, such as checkpoints/best, stay links.
    standing = ("--archive", "--checksum", "--relative", "--copy-unsafe-links", "--protect-args", "--exclude=.lock")
    return to.rsync(*standing, "--out-format=%n", *options, "--", *names, to.url)


def _files(name: str) -> Iterator[str]:
    """Yields all files below a path except locks. Links to directories below the same path are not followed, since their files are
    listed already."""
    if Path(name).is_file():
        yield name
    for directory, _, files in os.walk(name):
        yield from (os.path.join(directory, file) for file in files if file != ".lock")
        for link in (entry for entry in os.scandir(directory) if entry.is_symlink() and entry.is_dir()):
            if not Path(link.path).resolve().is_relative_to(Path(name).resolve()):
                yield from _files(link.path)


def _sum_line(file: str, digest: str) -> str:
    """Returns a checksum line in the format of sha256sum."""
    if not any(sign in file for sign in "\\\n"):
        return f"{digest}  {file}\n"
    return f"\\{digest}  " + file.replace("\\", "\\\\").replace("\n", "\\n") + "\n"


def _run(command: Sequence[str], what: str, given: str = "") -> str:
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, errors="surrogateescape", check=False
        )
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is not installed; it is needed to reach {what}") from error
    if done.returncode:
        raise UserError(f"{what}: {'; '.join(f'{done.stdout}{done.stderr}'.splitlines())}")
    return done.stdout
