"""Runs a pipeline in one directory: a sequence of stages, then a report and a check of its promises.

Each finished stage is recorded with its time, so that it is not repeated. The record, `stages.json`, also lists the
files and runs that each stage made. A later pipeline replaces only these. It keeps other runs that the user made in the
directory, and runs of the pipeline that the user continued.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from nmoe.config.commands import RLConfig, RunConfig
from nmoe.config.loader import load_run
from nmoe.errors import ShortfallError, UserError
from nmoe.model.device import choose_device
from nmoe.model.ops.table import make_ready
from nmoe.rl.launch import train
from nmoe.runs.directory import RunLock
from nmoe.runs.ledger import read_metrics
from nmoe.runs.replace import agree_to_delete, continued_by_hand, delete, fingerprint, refuse_held
from nmoe.runs.storage import make_directory, resumed_by, storage_errors, write_atomically
from nmoe.speedrun.promises import Promise, shortfalls

# Marks the directory of a pipeline, which the one that writes it has locked.
_MARKER = ".speedrun"
_RECORD = "stages.json"
_ELSEWHERE = "choose another directory with --out"
_RESUME = "the same options and --resume"

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline: `Stage("reinforcement learning", work, makes=("rl",), start="base")`.

    work: does the work, and returns figures to record; an earlier attempt may have been interrupted at any point.
    makes: the names of the files and runs that the stage makes in the directory.
    start: identifies the stage's inputs; a finished stage is repeated if they change.
    """

    name: str
    work: Callable[[], Mapping[str, int | float]]
    makes: tuple[str, ...]
    start: str = ""


class StageRecord(BaseModel):
    """The record of a finished stage: `seconds`, `cpu_s` and `peak_memory_mb` of its last attempt, and its figures.

    Example: `StageRecord(name="reinforcement learning", start="base", seconds=212.4, cpu_s=398.0,
    peak_memory_mb=2508.0, attempts=1, figures={"correctness of the last step": 0.97}, made={"rl": "0f3a..."})`. `made`
    has the fingerprint of each file and run when the stage ended.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    start: str
    seconds: float
    cpu_s: float
    peak_memory_mb: float
    attempts: int
    figures: dict[str, int | float]
    made: dict[str, str]


class _Record(BaseModel):
    """The contents of `stages.json`: a pipeline's settings, its finished stages in order, and the stage in progress.

    `making` lists the outputs of the stage in progress, `making_from` identifies its inputs, and `attempts` counts its
    attempts. `reports` has the fingerprints of the reports.
    """

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    done: list[StageRecord] = []
    making: list[str] = []
    making_from: str = ""
    attempts: int = 0
    reports: dict[str, str] = {}

    @property
    def made(self) -> dict[str, str | None]:
        """The fingerprint of every output of this pipeline, by name; None for an output that may be incomplete."""
        found: dict[str, str | None] = {name: mark for stage in self.done for name, mark in stage.made.items()}
        return found | self.reports | dict.fromkeys(self.making)


class Stages:
    """Runs the stages of a pipeline in the directory `out`, except those that are done; locks the directory for the
    `with` block.

    settings: everything that determines the results, such as the seed. A resumed pipeline needs equal settings, except
        that `full` may change from false to true, which extends the pipeline.
    reports: the names of the files that `report` writes.
    asks: whether a resumed pipeline repeats stages whose inputs have changed only with `replace` or the user's consent.

    Without `resume`, an earlier pipeline in the directory is replaced; if it was broken off or `full` could extend it, this
    needs `replace` or the user's consent in a terminal. Other files, and outputs that the user changed, are deleted only if a stage
    will make a file of the same name, and only with the same consent. A stage whose outputs are missing or changed is
    repeated.

    Raises UserError, with nothing deleted, if `out` is not a pipeline's directory, if another process writes to it or
    to a run that would be replaced, if consent is missing, and if there is no pipeline with these settings to resume.
    Raises StorageError if the disk is full.
    """

    def __init__(
        self,
        out: Path,
        plan: Sequence[Stage],
        settings: Mapping[str, Any],
        resume: bool,
        replace: bool = False,
        reports: Sequence[str] = (),
        *,
        asks: bool = False,
    ) -> None:
        if out.exists() and not out.is_dir():
            raise UserError(f"{out}: is a file; name a directory with --out")
        if out.exists() and any(out.iterdir()) and not (out / _MARKER).exists():
            raise UserError(f"{out}: is not empty and no speedrun made it; name another directory with --out")
        self._out, self._plan, self._reports, self._file, self._asks = out, plan, reports, out / _RECORD, asks
        if resume and not self._file.exists():
            raise UserError(f"{self._file}: not there, so there is nothing to resume; run without --resume")
        with storage_errors(out):
            make_directory(out, "choose another --out")
            self._lock = RunLock(out / _MARKER, _ELSEWHERE)
        try:
            self._begin(dict(settings), resume, replace)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @property
    def done(self) -> tuple[StageRecord, ...]:
        """The records of the finished stages, in the order in which they ran."""
        return tuple(self._record.done)

    def run(self) -> None:
        """Runs each unfinished stage, and records the figures that it returns."""
        for stage in self._plan:
            if self._is_done(stage):
                print(f"\n== {stage.name}: done before", flush=True)
            else:
                self._run(stage)

    def report(self, write: Callable[[], T]) -> T:
        """Calls the function that writes the reports, records their fingerprints, and returns the function's result."""
        self._record.making = list(self._reports)
        self._write()
        written = write()
        self._record.reports, self._record.making = self._marks(self._reports), []
        self._write()
        return written

    def _run(self, stage: Stage) -> None:
        print(f"\n== {stage.name}", flush=True)
        record = self._record
        if stale := self._stale(stage):
            if changed := [path for path in stale if not self._is_own(path.name, record.made[path.name])]:
                raise UserError(
                    f"{changed[0]}: was changed since the speedrun made it; move it, and go on with --resume"
                )
            delete(stale, _ELSEWHERE)
        # Also where nothing of the earlier one is there: it may have been removed by hand, or before an interruption.
        record.done = [one for one in record.done if one.name != stage.name]
        again = (record.making, record.making_from) == (list(stage.makes), stage.start)
        record.attempts = record.attempts + 1 if again else 1
        record.making, record.making_from = list(stage.makes), stage.start
        self._write()
        began, cpu = time.perf_counter(), time.process_time()
        try:
            with resumed_by(_RESUME):
                figures = stage.work()
        except KeyboardInterrupt as interrupt:
            if not interrupt.args:  # else the run has named its checkpoint
                print(f"interrupted: {stage.name} is not done; go on with {_RESUME}", flush=True)
            raise
        seconds = time.perf_counter() - began
        record.done.append(
            StageRecord(
                name=stage.name,
                start=stage.start,
                seconds=seconds,
                cpu_s=time.process_time() - cpu,
                peak_memory_mb=_peak_memory_mb(),
                attempts=record.attempts,
                figures=dict(figures),
                made=self._marks(stage.makes),
            )
        )
        record.attempts, record.making = 0, []
        self._whole.add(stage.name)
        self._write()
        print(f"== {stage.name}: {seconds:.0f} s", flush=True)

    def _begin(self, settings: dict[str, Any], resume: bool, replace: bool) -> None:
        """Reads or creates the record, and deletes outputs that the coming stages will replace."""
        before = self._read() if self._file.exists() else None
        if resume:
            self._refuse_others(before, settings)
        self._record = before if isinstance(before, _Record) and resume else _Record(settings=settings)
        made = before.made if isinstance(before, _Record) else {}
        own = [name for name, mark in made.items() if self._is_own(name, mark)]
        self._whole = {stage.name for stage in self._record.done if stage.made.keys() <= set(own)}
        to_come = [stage for stage in self._plan if not self._is_done(stage)]
        # A stage that was interrupted goes on with its files, unless its inputs have changed.
        making = self._record.making if resume else []
        if making and any(set(making) == set(one.makes) and one.start != self._record.making_from for one in to_come):
            making = []
        names = [*(name for stage in to_come for name in stage.makes), *self._reports]
        in_the_way = [self._out / name for name in names if name not in making]
        others = [path for path in in_the_way if path.name not in own and _is_there(path)]
        now = [self._out / name for name in own if not resume or (made[name] is None and name not in making)]
        later = [path for stage in to_come for path in self._stale(stage) if path not in others]
        refuse_held([*others, *now, *later], _ELSEWHERE)
        agree_to_delete(
            others,
            "These paths are in the way. A speedrun did not make them, or they changed afterwards:",
            "--replace",
            replace,
        )
        if not resume and isinstance(before, _Record) and before.done and self._would_extend(before, settings):
            agree_to_delete(
                now,
                f"{self._out} holds a speedrun without the added stages, which --full --resume adds. Without --resume it begins "
                "again, and these paths are deleted:",
                "--replace",
                replace,
            )
        if not resume and isinstance(before, _Record) and self._is_broken_off(before, settings):
            agree_to_delete(
                now,
                f"{self._out} holds a speedrun that was broken off, and --resume goes on with it. Without --resume it begins "
                "again, and these paths are deleted:",
                "--replace",
                replace,
            )
        if resume and self._asks:
            changed = {name for stage in to_come if self._has_changed(stage) for name in stage.makes}
            agree_to_delete(
                [path for path in dict.fromkeys([*now, *later]) if path.name in changed],
                "The settings of these stages, or of stages that they start from, have changed, so that they are made again:",
                "--replace",
                replace,
            )
        # In an extended pipeline a stage keeps its files until the stage that replaces it begins.
        delete([*others, *now], _ELSEWHERE)
        self._record.settings = settings
        self._write()

    def _is_done(self, stage: Stage) -> bool:
        key = stage.name, stage.start
        return stage.name in self._whole and any((one.name, one.start) == key for one in self._record.done)

    def _has_changed(self, stage: Stage) -> bool:
        """Returns whether a stage was done, or begun, with other inputs."""
        record = self._record
        starts = {one.start for one in record.done if one.name == stage.name}
        if set(record.making) == set(stage.makes):
            starts.add(record.making_from)
        return bool(starts - {stage.start})

    def _is_own(self, name: str, mark: str | None) -> bool:
        """Returns whether a file or run exists and is unchanged since this pipeline made it."""
        path = self._out / name
        if not _is_there(path):
            return False
        return not continued_by_hand(path) if mark is None else fingerprint(path) == mark

    def _stale(self, stage: Stage) -> list[Path]:
        """Returns the old outputs of a stage that has to be repeated."""
        earlier = [one for one in self._record.done if one.name == stage.name]
        return [path for one in earlier for name in one.made if _is_there(path := self._out / name)]

    def _marks(self, names: Sequence[str]) -> dict[str, str]:
        return {name: fingerprint(self._out / name) for name in names if _is_there(self._out / name)}

    def _read(self) -> _Record | str:
        """Returns the record of an earlier pipeline, or the reason, as a text, why it cannot be read."""
        try:
            return _Record.model_validate_json(self._file.read_bytes())
        except (ValidationError, OSError) as error:
            return " ".join(str(error).split())

    def _refuse_others(self, before: _Record | str | None, settings: dict[str, Any]) -> None:
        if not isinstance(before, _Record):
            raise UserError(f"{self._file}: cannot be read: {before}; run without --resume to begin again")
        if settings != before.settings and not self._would_extend(before, settings):
            raise UserError(
                f"{self._file}: was started with {json.dumps(before.settings)}, not with {json.dumps(settings)}; --resume needs "
                "the same options; run without it to begin again"
            )

    def _would_extend(self, before: _Record, settings: dict[str, Any]) -> bool:
        return settings != before.settings and settings == before.settings | {"full": True}

    def _is_broken_off(self, before: _Record, settings: dict[str, Any]) -> bool:
        """Returns whether some stages of this pipeline are done, and others not."""
        done = {stage.name for stage in before.done}
        return settings == before.settings and bool(done) and any(stage.name not in done for stage in self._plan)

    def _write(self) -> None:
        write_atomically(self._file, (self._record.model_dump_json(indent=1) + "\n").encode())


def finished(out: Path) -> set[str]:
    """Returns the names of the stages that are done in the directory `out`; none if there is no record that can be read."""
    try:
        return {stage.name for stage in _Record.model_validate_json((out / _RECORD).read_bytes()).done}
    except (ValidationError, OSError):
        return set()


def begun_with(out: Path) -> dict[str, Any] | None:
    """Returns the settings of the pipeline in the directory `out`; None if there is none, or if its record cannot be read."""
    try:
        return _Record.model_validate_json((out / _RECORD).read_bytes()).settings
    except (ValidationError, OSError):
        return None


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _peak_memory_mb() -> float:
    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


REPORTS = ("summary.json", "report.md", "plots")

C = TypeVar("C", bound=RunConfig)
Figures = Mapping[str, float | int]


class Pipeline(ABC):
    """A speedrun's pipeline in the directory `out`; with `resume`, its runs continue from their checkpoints.

    `settings` determine the results, and a resumed pipeline needs the same ones (`Stages`). `promises` are bounds on
    figures of its summary. `asks` is whether stages whose inputs have changed are repeated with consent only.
    """

    promises: ClassVar[Sequence[Promise]]
    asks: ClassVar[bool] = False
    settings: Mapping[str, Any]

    def __init__(self, out: Path, seed: int, resume: bool, device: str = "auto") -> None:
        self._out, self._seed, self._resume, self._device = out, seed, resume, device

    @abstractmethod
    def stages(self) -> list[Stage]:
        """Returns the stages in order."""

    @abstractmethod
    def report(self, done: Sequence[StageRecord]) -> Figures:
        """Writes and prints the summary and report of the finished stages; returns the figures of the summary."""

    def run(self, replace: bool) -> None:
        """Runs every unfinished stage, writes the report, and checks the promised results.

        Raises UserError as `Stages` does, and if the device is missing; ShortfallError if a promise is broken.
        """
        make_ready(choose_device(self._device, "--device"))  # said before anything is made
        with Stages(self._out, self.stages(), self.settings, self._resume, replace, REPORTS, asks=self.asks) as stages:
            stages.run()
            summary = stages.report(lambda: self.report(stages.done))
        if missed := shortfalls(self.promises, summary, str(self._out)):
            raise ShortfallError("\n".join(["this speedrun fell short of its promises:", *missed]))
        if self.promises:
            print(f"all {len(self.promises)} promises are kept (nmoe/speedrun/promises.py)")

    def _learn(self, config: RLConfig) -> Figures:
        last = read_metrics(train(config))[-1]
        return {"correctness of the last step": last["correctness"]}

    def _course(self, done: Sequence[StageRecord], metrics: Sequence[Mapping[str, Any]]) -> dict[str, float | int]:
        """Returns figures that every summary has: the agreement of engine and learner, the number of RL steps, and the cost."""
        measured = [row for row in metrics if "mismatch_abs_mean" in row]
        compared: dict[str, float | int] = {}
        if measured:  # else every step was skipped, because all rewards of a group were alike
            compared = {
                "mismatch_abs_mean": max(row["mismatch_abs_mean"] for row in measured),
                "mismatch_abs_max": max(row["mismatch_abs_max"] for row in measured),
                "first_step_ppo_kl": measured[0]["ppo_kl"],
                "route_picks": sum(row.get("route_picks", 0.0) for row in measured),
                "route_flips": sum(row.get("route_flips", 0.0) for row in measured),
                "route_flip_gap_max": max(row.get("route_flip_gap_max", 0.0) for row in measured),
            }
        return {
            **compared,
            "rl_steps": len(metrics),
            "wall_s": sum(stage.seconds for stage in done),
            "cpu_s": sum(stage.cpu_s for stage in done),
            "peak_memory_mb": max(stage.peak_memory_mb for stage in done),
            "seed": self._seed,
        }

    def _write_summary(self, summary: Figures) -> None:
        write_atomically(self._out / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())

    def _load(
        self, path: Path, schema: type[C], values: Mapping[str, str | int | float], overrides: Sequence[str] = ()
    ) -> C:
        """Loads a configuration with `overrides`, then the directory, seed and device of this pipeline, then `values`."""
        own = {"run.directory": str(self._out), "run.seed": self._seed, "run.resume": "auto" if self._resume else False}
        given = {**own, "model.device": self._device, **values}
        return load_run(path, schema, [*overrides, *(f"--{key}={json.dumps(value)}" for key, value in given.items())])
