"""A run's directory: created once, written by one process at a time, and opened again to resume."""

import json
import os
import shutil
import tomllib
from collections.abc import Collection
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from filelock import FileLock, Timeout

from nmoe.errors import StorageError, UserError
from nmoe.parsing import toml_of
from nmoe.runs.checkpoint import checkpoint_step, latest_checkpoint, remove_leftovers, verify_checkpoint
from nmoe.runs.ledger import Ledger, read_lines
from nmoe.runs.provenance import read_provenance
from nmoe.runs.record_links import LINKED, is_lost, refuse_missing, remove_links
from nmoe.runs.running import LOCK
from nmoe.runs.storage import make_directory, remove_partials, step_of, storage_errors, write_atomically

SUBDIRECTORIES = ("samples", "replay", "eval", "checkpoints")
LOGS = "engines"
"""The directory in a run's directory with the logs of the other processes of the run."""
ACTIVITY = "activity"
"""The file beside the logs by which training names its present activity to its parent."""
# These keys may change when a run is resumed: its length, its checkpoints, its monitor, and its sinks. With another number of steps
# the schedule of the learning rate stays, unless optimizer.schedule_steps sets another. The thread count is here because 0 stands
# for the cores that the process may use; `recorded_threads` gives the count to use again. A run may go on on another device, and
# says so.
_KEYS_THAT_MAY_DIFFER = (
    "run.resume",
    "run.steps",
    "run.threads",
    "run.require_clean",
    "model.device",
    "optimizer.schedule_steps",
    "engine.urls",
    "engine.wait_s",
)
_SECTIONS_THAT_MAY_DIFFER = ("checkpoint.", "monitor.", "parallel.", "placement.", "sinks.")


Resume = bool | Literal["auto"]


class RunLock:
    """An exclusive lock on a file, which holds the id of the locking process, so that only one process writes a run. The kernel
    releases it when that process ends, even by `kill -9`.

    Raises UserError, with the remedy, if the lock is held (by another process, or another RunLock of this one); StorageError if the
    file cannot be written. A forked child does not inherit the lock: a worker that outlives its killed parent leaves the run free.
    """

    def __init__(self, path: Path, remedy: str = "choose another name with --run.name=NAME") -> None:
        # Not by thread, so that any thread can release it. Without flock there is no lock that a killed holder gives back.
        self._lock = FileLock(path, mode=0o644, thread_local=False, fallback_to_soft=False)
        try:
            with storage_errors(path):
                self._lock.acquire(blocking=False)
        except Timeout as error:
            holder = path.read_text(errors="replace").strip()
            raise UserError(
                f"{path.parent}: this run is being written by process {holder or 'unknown'}; "
                f"wait for it to end, stop it, or {remedy}"
            ) from error
        with storage_errors(path):
            path.write_text(f"{os.getpid()}\n")

    def release(self) -> None:
        """Releases the lock. A second call does nothing."""
        self._lock.release()


class RunDirectory:
    """The files of a run, locked for this process until `close`, the end of a `with` block, or the end of the process.

    `path/` holds config.toml (with all settings), provenance.json, code.diff (uncommitted changes), metrics.jsonl, alerts.jsonl,
    spikes.jsonl, routing.jsonl, failures.jsonl, log.txt, samples/, replay/, eval/ and checkpoints/.

        ledger: writes the records.
        checkpoints: the directory to save checkpoints in.
        replays: the directory to write replay bundles in.
        log: path of log.txt.
        resumed_from: the checkpoint to load; None for a run that starts at step 0.
        number: 1 for the first start, and one more for each resumption, this one included.
    """

    def __init__(
        self, path: Path, lock: RunLock, resumed_from: Path | None, config_toml: str, provenance: dict[str, Any]
    ) -> None:
        self.path = path
        self.ledger = Ledger(path)
        self.checkpoints = path / "checkpoints"
        self.replays = path / "replay"
        self.log = path / "log.txt"
        self.resumed_from = resumed_from
        self.number = 1 if resumed_from is None else 2 + len(read_provenance(path)["resumed"])
        self._lock, self._fresh = lock, False
        self._config_toml, self._provenance = config_toml, provenance

    @classmethod
    def create(
        cls, path: Path, config_toml: str, provenance: dict[str, Any], resume: Resume, defaults: Collection[str] = ()
    ) -> "RunDirectory":
        """Creates the directory of a new run or, with `resume`, opens an existing run at its last checkpoint.

        Resuming removes every record after the checkpoint's step. A run that was killed before its first checkpoint starts over and
        keeps only log.txt. A run that ended before its first step also starts over without `resume`, under any configuration. With
        "auto", a run that does not exist yet is started, so that a command with `--run.resume=auto` can be repeated until it is
        done. config.toml and provenance.json of a resumed run do not change until `record_start`, since the checkpoint may yet be
        refused.

        `defaults` names dotted keys of `config_toml` that hold their defaults. A run that was started before such a key existed
        lacks it, and can be resumed.

        Raises UserError if the run exists and `resume` is false, if there is none and it is true, if `path` holds something else,
        if another process is writing the run, if `config_toml` differs from the run's own in a key that changes the computation
        (every such key is named), if the checkpoint is not whole, or if all checkpoints were removed; StorageError if the disk is
        full. A directory that was created here is then removed again.
        """
        with storage_errors(path), ExitStack() as undo:
            refuse_unless_free(path, resume)
            make_directory(path, "choose another --run.directory=DIRECTORY")
            lock = RunLock(path / LOCK)
            undo.callback(lock.release)
            # Again: another process may have created the run before the lock was taken.
            _refuse_taken(path, resume)
            if fresh := _is_empty(path):
                undo.callback(_discard, path)
            elif not resume:
                Ledger(path).cut_back(None)
                remove_links(path)
            if resume and not fresh:
                _refuse_other_run(path, config_toml, defaults)
            run = cls(path, lock, _prepare(path), config_toml, provenance)
            run._fresh = fresh
            if run.resumed_from is None:
                run.record_start()
            undo.pop_all()
        return run

    @property
    def start_step(self) -> int:
        """The last step that is done: the step of the checkpoint that the run resumes from, or 0."""
        return checkpoint_step(self.resumed_from) if self.resumed_from else 0

    def record_start(self) -> None:
        """Writes config.toml and provenance.json. A resumption is added to the provenance of the first start, with the settings
        that it changed: `"changed": {"run.steps": [20, 60]}`. The diff of uncommitted changes gets its own file, which the
        provenance names.

        `create` calls this for a new run. A resumed run calls it when the checkpoint is loaded. Raises StorageError.
        """
        provenance, changed = self._provenance, {}
        if self.resumed_from is not None:
            changed = _changes((self.path / "config.toml").read_text(), self._config_toml)
        write_atomically(self.path / "config.toml", self._config_toml.encode())
        if diff := provenance.get("git_diff"):
            name = "code.diff" if self.resumed_from is None else f"code_{self.resumed_from.name}.diff"
            write_atomically(self.path / name, diff.encode(errors="replace"))
            provenance = provenance | {"git_diff": name}
        record: dict[str, Any] = provenance | {"resumed": []}
        if self.resumed_from is not None:
            record = read_provenance(self.path)
            keys = {"changed": changed} if changed else {}
            record["resumed"].append({"from_step": self.start_step} | keys | provenance)
        write_atomically(self.path / "provenance.json", (json.dumps(record, indent=1) + "\n").encode())

    def abandon(self) -> None:
        """Unlocks a run that has not begun and, if it was created here, removes its directory, which would block the next start."""
        if self._fresh:
            _discard(self.path)
        self._lock.release()

    def close(self) -> None:
        """Unlocks the run, so that another process can write it."""
        self._lock.release()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def refuse_unless_free(path: Path, resume: Resume) -> None:
    """Raises UserError unless a new run can be created at `path` or, with `resume`, the existing one can continue."""
    if not resume and not _is_empty(path) and (path / LOCK).exists():
        with suppress(StorageError):  # on a disk that cannot be written, the files show it
            RunLock(path / LOCK).release()
    _refuse_taken(path, resume)


def is_free(path: Path) -> bool:
    """Returns whether a new run can be created at `path`."""
    try:
        refuse_unless_free(path, False)
    except UserError:
        return False
    return True


def _refuse_taken(path: Path, resume: Resume) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file, not the directory of a run; choose another name with --run.name=NAME")
    if (file := next((above for above in path.parents if above.is_file()), None)) is not None:
        raise UserError(
            f"{path}: {file} is a file, so no run can lie below it; choose another --run.directory=DIRECTORY"
        )
    if _is_empty(path):
        if resume is True and not (path / LOCK).exists():
            raise UserError(f"{path}: there is no run to resume{_similar(path)}; leave --run.resume out to start one")
        return
    if not resume and not _ended_before_its_first_step(path):
        raise UserError(
            f"{path}: exists and is not empty; pass --run.resume=true to go on with this run, "
            "or choose another name with --run.name=NAME"
        )
    if resume and not (path / "config.toml").exists():
        raise UserError(f"{path}: not the directory of a run (no config.toml), so there is nothing to resume")


def _ended_before_its_first_step(path: Path) -> bool:
    """Returns whether `path` holds a run that trained nothing, for example because a reward function raised in its first step."""
    if not all((path / name).exists() for name in (*SUBDIRECTORIES, "config.toml")):
        return False
    saved = any((path / "checkpoints").iterdir())
    return not saved and not any(is_lost(path / name) for name in LINKED) and not _size(path / "metrics.jsonl")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _is_empty(path: Path) -> bool:
    # Hidden files do not count: a start that was killed early leaves a lock and nothing else. The parent of a run keeps logs there.
    return not path.is_dir() or all(entry.name.startswith(".") or entry.name == LOGS for entry in path.iterdir())


def _similar(path: Path) -> str:
    """Returns the end of an error message that names the neighbouring run with the most similar name; "" if none is similar."""
    runs = [file.parent.name for file in path.parent.glob("*/config.toml")]
    named = get_close_matches(path.name, runs, n=1)
    return f", but there is {path.with_name(named[0])} (--run.name={named[0]})" if named else ""


def _refuse_other_run(path: Path, config_toml: str, defaults: Collection[str]) -> None:
    """Raises UserError if the run at `path` cannot be resumed with this configuration, or has lost records or checkpoints."""
    refuse_missing(path)
    stored = path / "config.toml"
    if stored.exists():
        _refuse_other_config(stored, config_toml, defaults)
        _refuse_lost_checkpoints(path)


def _prepare(path: Path) -> Path | None:
    """Resets the directory to its last checkpoint, which is returned, or to the state of a new run (None)."""
    remove_partials(path)
    for name in SUBDIRECTORIES:
        (path / name).mkdir(exist_ok=True)
    checkpoints = path / "checkpoints"
    remove_leftovers(checkpoints)
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is not None:
        # Before anything is cut, so that the user can still remove a broken checkpoint and resume from the one before.
        verify_checkpoint(checkpoint)
        Ledger(path).cut_back(checkpoint_step(checkpoint))
        _cut_replays(path / "replay", checkpoint_step(checkpoint))
    else:
        Ledger(path).cut_back(None)
        for directory in (path / "replay", path / "plots"):
            if directory.exists():
                shutil.rmtree(directory)
        (path / "replay").mkdir()
        (path / "provenance.json").unlink(missing_ok=True)
        for name in ("report.md", "code.diff"):
            (path / name).unlink(missing_ok=True)
    return checkpoint


def _refuse_lost_checkpoints(path: Path) -> None:
    """Raises UserError if a run has saved checkpoints and all of them are gone: it would begin again, and its records would be
    deleted."""
    checkpoints, metrics = path / "checkpoints", read_lines(path / "metrics.jsonl")
    if latest_checkpoint(checkpoints) is not None or not metrics:
        return
    every = flat_keys(toml_of((path / "config.toml").read_text())).get("checkpoint.every_steps")
    # The first may not have been whole when the run was killed; before a second is begun, it is.
    saved = every is not None and metrics[-1]["step"] >= 2 * every
    if saved or (checkpoints / "latest").is_symlink() or not checkpoints.is_dir():
        raise UserError(
            f"{checkpoints}: its checkpoints are gone, so that the run would begin again and lose its {len(metrics):,} steps; put "
            "them back, or start another run with --run.name=NAME"
        )


def _discard(path: Path) -> None:
    """Removes the files that `create` made for a new run, whose lock this process holds."""
    for name in SUBDIRECTORIES:
        shutil.rmtree(path / name, ignore_errors=True)
    for file in ("config.toml", "provenance.json", "code.diff", LOCK):
        (path / file).unlink(missing_ok=True)
    with suppress(OSError):  # something else lies there
        path.rmdir()


def _cut_replays(directory: Path, step: int) -> None:
    """Removes the replay bundles of every step after `step`, and bundles that a killed process left incomplete."""
    for bundle in directory.iterdir():
        of = step_of(bundle.name.partition("-")[0])
        if bundle.name.startswith(".") or (of is not None and of > step):
            shutil.rmtree(bundle)


def _refuse_other_config(stored_path: Path, config_toml: str, defaults: Collection[str]) -> None:
    try:
        stored = flat_keys(toml_of(stored_path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{stored_path}: not readable as TOML ({error}); put back the file the run wrote") from error
    now = flat_keys(toml_of(config_toml))
    differing = [
        f"  {key}: {_shown(stored, key)} in the run, {_shown(now, key)} now"
        for key in sorted(stored.keys() | now.keys())
        if stored.get(key) != now.get(key)
        and key not in _KEYS_THAT_MAY_DIFFER
        and (key in stored or key not in defaults)
        and not key.startswith(_SECTIONS_THAT_MAY_DIFFER)
    ]
    if differing:
        raise UserError(
            f"{stored_path}: the run cannot resume with another configuration. These keys differ:\n"
            + "\n".join(differing)
            + "\nPut them back, or start another run with --run.name=NAME. A key that is absent now because the command "
            "no longer has it can be deleted from that file."
        )


def _changes(before: str, now: str) -> dict[str, list[Any]]:
    """Returns the settings (dotted keys) in which two configurations differ, with the old and the new value; None for an absent
    one."""
    old, new = flat_keys(toml_of(before)), flat_keys(toml_of(now))
    return {
        key: [old.get(key), new.get(key)] for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def _shown(flat: dict[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "absent"


def flat_keys(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested tables to dotted keys: `{"optimizer": {"beta": 0.9}}` to `{"optimizer.beta": 0.9}`, and `{"eval":
    [{"problems": 9}]}` to `{"eval.0.problems": 9}`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if value and isinstance(value, list | tuple) and all(isinstance(one, dict) for one in value):
            flat |= flat_keys({str(index): one for index, one in enumerate(value)}, f"{prefix}{key}.")
        elif isinstance(value, dict):
            flat |= flat_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
