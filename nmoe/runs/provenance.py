"""Records the provenance of a run: code, packages, machine and command of each start, without the name of a person or a host."""

import json
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from nmoe.errors import UserError
from nmoe.model.ops.cpu.library import cpu_model
from nmoe.parsing import json_of, toml_of
from nmoe.runs.checkpoint import latest_checkpoint

PACKAGE = Path(__file__).parents[1]
"""The directory of this package's code."""

# A diff that is longer, of a notebook with pictures say, is cut: a run's directory should stay small.
MAX_DIFF_BYTES = 256 * 1024
MAX_FILES = 100
_NAMED_FILES = 5


@dataclass(frozen=True)
class Checkout:
    """The present state of a git repository.

    diff: the changes of tracked files against the commit, at most `MAX_DIFF_BYTES`.
    untracked: the files that git neither tracks nor ignores, at most `MAX_FILES`.
    """

    top: Path
    commit: str | None
    diff: str
    untracked: tuple[str, ...]

    @property
    def dirty(self) -> bool:
        return bool(self.diff or self.untracked)


def run_git(directory: Path, *arguments: str) -> str | None:
    """Runs git in a directory and returns its output; None if it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "--literal-pathspecs", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def git(directory: Path, *arguments: str) -> str:
    """Runs git in a directory and returns its output. Raises UserError with git's message if it fails."""
    command = ["git", "--literal-pathspecs", "-C", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise UserError(f"git {arguments[0]}: {done.stderr.strip() or done.stdout.strip() or 'failed'}")
    return done.stdout.strip()


def package_checkout() -> Checkout | None:
    """Returns the repository that tracks this package's code; None if there is none, also for a package that is installed inside
    another repository."""
    return None if run_git(PACKAGE, "ls-files", "--error-unmatch", "__init__.py") is None else checkout_at(PACKAGE)


def checkout_at(directory: Path) -> Checkout | None:
    """Returns the state of the repository that contains a directory; None if there is none."""
    if (top := run_git(directory, "rev-parse", "--show-toplevel")) is None:
        return None
    root = Path(top)
    diff = run_git(root, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    others = (run_git(root, "ls-files", "--others", "--exclude-standard", "--directory") or "").splitlines()
    return Checkout(root, run_git(root, "rev-parse", "HEAD"), _cut(diff), tuple(others[:MAX_FILES]))


def refuse_dirty(outputs: Path) -> None:
    """Raises UserError unless commits hold all code: nmoe's own, if it runs from a checkout, and the code of the repository that
    the command runs in. It also raises if there is neither a checkout nor a repository, or one without a commit. Files below
    `outputs`, where runs are written, do not count."""
    found = {one.top: one for one in (package_checkout(), checkout_at(Path.cwd())) if one is not None}
    if not found:
        raise UserError(f"run.require_clean: no commit says what runs here: {Path.cwd()} is in no git repository")
    for top, checkout in found.items():
        if checkout.commit is None:
            raise UserError(f"run.require_clean: {top} has no commit yet; commit the code that is to run")
        if files := changed_files(top, outputs):
            named = ", ".join(files[:_NAMED_FILES]) + (
                f" and {len(files) - _NAMED_FILES} more" * (len(files) > _NAMED_FILES)
            )
            raise UserError(
                f"run.require_clean: {top} has changes that no commit holds: {named}; commit or stash them, or leave "
                "out --require-clean (run.require_clean)"
            )


def changed_files(top: Path, outputs: Path | None = None) -> list[str]:
    """Returns the changed and the untracked files of a repository, except files below `outputs`. If `outputs` is the repository or
    contains it, only files in a run's directory are left out."""
    listed = (
        run_git(top, "diff", "HEAD", "--name-only", "-z"),
        run_git(top, "ls-files", "--others", "--exclude-standard", "-z"),
    )
    files = [file for of_kind in listed for file in (of_kind or "").split("\0") if file]
    if outputs is None:
        return files
    below = outputs.resolve()
    apart = not top.resolve().is_relative_to(below)

    def is_output(file: Path) -> bool:
        return file.is_relative_to(below) and (apart or any(_is_run(parent, top) for parent in file.parents))

    return [file for file in files if not is_output((top / file).resolve())]


def _is_run(directory: Path, top: Path) -> bool:
    return directory != top.resolve() and (directory / "provenance.json").is_file()


def _cut(diff: str) -> str:
    content = diff.encode(errors="replace")
    if len(content) <= MAX_DIFF_BYTES:
        return diff
    kept = content[:MAX_DIFF_BYTES].decode(errors="ignore")
    return f"{kept}\n... cut here: the whole diff has {len(content):,} bytes\n"


def provenance(seed: int, threads: int, device: str = "cpu", numerics: str = "fast") -> dict[str, Any]:
    """Returns a record of the present process that can be written as JSON, made when a run starts:

        {"started_utc": "2026-01-02T03:04:05Z", "run_id": "5d1c3b...", "nmoe": "0.1.0", "git_commit": "9f2c...", "git_dirty": false,
         "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "transformers": "5.14.1",
         "platform": "Linux-6.18-x86_64-with-glibc2.36", "cpu": "AMD EPYC 9B14", "cores": 2, "threads": 2,
         "device": "cpu", "numerics": "exact", "seed": 0, "argv": ["nmoe", "rl", "arithmetic.toml"]}

    The git entries are None unless the package runs from its own checkout. If the command runs in another repository,
    `directory_commit` and `directory_dirty` describe it. With uncommitted changes, `git_diff` is the diff and `git_untracked` the
    files that it does not include (`RunDirectory` keeps the diff as code.diff). `device` is the description by `nmoe.model.device`:
    for a GPU its name and the CUDA version. In `argv` the home directory is written `~`. `run_id` is drawn at random, because two
    runs may start in the same second.
    """
    return {
        "started_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "run_id": secrets.token_hex(8),
        "nmoe": _version("nmoe"),
        **_git(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "numerics": numerics,
        "seed": seed,
        "argv": _argv(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Returns the git entries of a provenance record, for this package's checkout and for another repository that the command runs
    in."""
    package, around = package_checkout(), checkout_at(Path.cwd())
    entries: dict[str, Any] = {"git_commit": None, "git_dirty": None}
    diffs = []
    if package is not None:
        entries |= {"git_commit": package.commit, "git_dirty": package.dirty}
    if around is not None and (package is None or around.top != package.top):
        entries |= {"directory_commit": around.commit, "directory_dirty": around.dirty}
    else:
        around = None
    for checkout in (package, around):
        if checkout is not None and checkout.diff:
            diffs.append(checkout.diff + "\n")
        if checkout is not None and checkout.untracked:
            entries["git_untracked"] = [*entries.get("git_untracked", ()), *checkout.untracked]
    return entries | ({"git_diff": "".join(diffs)} if diffs else {})


def _argv() -> list[str]:
    """Returns the command line, with the command without its directory and the home directory as `~`."""
    command, *arguments = sys.argv
    home = str(Path.home())
    return [Path(command).name, *(argument.replace(f"{home}/", "~/") for argument in arguments)]


def recorded_threads(path: Path) -> int | None:
    """Returns the thread count that a run used last; None if there is no such run.

    Sums are split over threads, so that only the same count gives exactly the same numbers.
    """
    return _last_start(path).get("threads")


def recorded_precision(path: Path) -> Literal["float32", "bfloat16", "float16"] | None:
    """Returns the precision in a run's config.toml; None if it names none, or cannot be read (`RunDirectory.create` reports
    that)."""
    model = _configuration(path).get("model")
    return model.get("precision") if isinstance(model, dict) else None


def recorded_steps(path: Path) -> int | None:
    """Returns `run.steps` of a run that can resume from a checkpoint; None for any other."""
    found = _recorded(path)
    return None if found is None else found["run"]["steps"]


def recorded_schedule_steps(path: Path) -> int | None:
    """Returns the number of steps to the lowest learning rate of the schedule, for a run that can resume from a checkpoint; None
    for any other."""
    found = _recorded(path)
    return None if found is None else found["optimizer"].get("schedule_steps") or found["run"]["steps"]


def _recorded(path: Path) -> dict[str, Any] | None:
    """Returns the config.toml of a run that has a checkpoint; None without a checkpoint, or if it cannot be read
    (`RunDirectory.create` reports that)."""
    if latest_checkpoint(path / "checkpoints") is None:
        return None
    found = _configuration(path)
    run, optimizer = found.get("run"), found.get("optimizer")
    return found if isinstance(run, dict) and "steps" in run and isinstance(optimizer, dict) else None


def _configuration(path: Path) -> dict[str, Any]:
    """Returns the config.toml of a run; empty if it cannot be read."""
    try:
        return toml_of((path / "config.toml").read_text())
    except (OSError, ValueError):
        return {}


def recorded_device(path: Path) -> str | None:
    """Returns the device that a run used last; None if there is no such run."""
    return _last_start(path).get("device")


def _last_start(path: Path) -> dict[str, Any]:
    """Returns the provenance of a run's last start; empty if there is no such run."""
    if not (path / "provenance.json").exists():
        return {}
    provenance = read_provenance(path)
    last: dict[str, Any] = [provenance, *provenance["resumed"]][-1]
    return last


def read_provenance(path: Path) -> dict[str, Any]:
    """Reads the provenance of a run's first start, with a record of each resumption in `resumed`.

    Raises UserError if the file is missing or is not such a record.
    """
    file = path / "provenance.json"
    try:
        record = json_of(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: missing or not JSON ({error}); put back the file the run wrote") from error
    if not isinstance(record, dict) or "resumed" not in record:
        raise UserError(f"{file}: not the provenance of a run (no 'resumed'); put back the file the run wrote")
    return record


def resumptions(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each resumption of a run, with the settings that it changed: `from step 20 at 2026-01-02T03:04:05Z,
    run.steps 20 -> 60`."""
    for resumed in provenance["resumed"]:
        changed = [f", {key} {_value(old)} -> {_value(new)}" for key, (old, new) in resumed.get("changed", {}).items()]
        yield f"from step {resumed['from_step']} at {resumed['started_utc']}" + "".join(changed)


def _value(value: object) -> str:
    return "absent" if value is None else json.dumps(value)
