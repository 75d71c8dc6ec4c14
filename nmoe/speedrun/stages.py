"""Pipelines of the demonstration: stages, promises and a report in one directory. `nmoe speedrun`

Each stage is announced, timed and recorded when it is done, so that none runs twice. The record, `stages.json`, also says which
files and runs of the directory each stage made. A later pipeline replaces these and no others: a run that the user made beside them
stays, and so does one of theirs that the user has continued.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from nmoe.config.commands import RLConfig, RunConfig
from nmoe.config.loader import load_run
from nmoe.errors import ShortfallError, UserError
from nmoe.extras import how_to_install
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
    """One stage: `Stage("reinforcement learning", work, makes=("rl",), start="base")`.

    work: does it, and returns its figures. An earlier attempt may have interrupted it at any point.
    makes: the names of the files and runs that it makes in the directory.
    start: its inputs. A finished stage is done again if its inputs change.
    """

    name: str
    work: Callable[[], Mapping[str, int | float]]
    makes: tuple[str, ...]
    start: str = ""


class StageRecord(BaseModel):
    """Example: `StageRecord(name="reinforcement learning", start="base", seconds=212.4, cpu_s=398.0, peak_memory_mb=2508.0,
    attempts=1, figures={"correctness of the last step": 0.97}, made={"rl": "0f3a..."})`. Times are of the attempt that ended
    it; `made` has the fingerprint of each file and run at the end of the stage."""

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
    """`stages.json`: the settings of the pipeline, the stages that are done, in order, the names that the next one makes,
    from what, with the number of attempts at it, and the fingerprints of the reports."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    done: list[StageRecord] = []
    making: list[str] = []
    making_from: str = ""
    attempts: int = 0
    reports: dict[str, str] = {}

    @property
    def made(self) -> dict[str, str | None]:
        """The fingerprint of everything that this pipeline made, by name; None if a stage may have been interrupted."""
        found: dict[str, str | None] = {name: mark for stage in self.done for name, mark in stage.made.items()}
        return found | self.reports | dict.fromkeys(self.making)


class Stages:
    """The stages of the directory `out`; those that are done are skipped. `out` is locked for the `with` block.

    settings: everything that decides the results, such as the seed; a resumed pipeline needs the same, but for a `full` that was
    false, which extends it.

    reports: the names of the files that `report` writes.

    Without `resume`, an earlier pipeline there is replaced; one that `full` would extend is replaced only with `replace`, or with
    the user's consent in a terminal. Files that it did not make, or the user has changed since, are deleted only where a stage is
    to make a file of its name, and only with the same consent. A stage whose files are gone or changed is done again.

    Raises UserError, with nothing deleted, where `out` is no directory of a pipeline, where another process writes it or a run that
    is to be replaced, where the consent is missing, and where there is no pipeline with these settings to resume; StorageError when
    the disk is full.
    """

    def __init__(
        self,
        out: Path,
        plan: Sequence[Stage],
        settings: Mapping[str, Any],
        resume: bool,
        replace: bool = False,
        reports: Sequence[str] = (),
    ) -> None:
        if out.exists() and not out.is_dir():
            raise UserError(f"{out}: is a file; name a directory with --out")
        if out.exists() and any(out.iterdir()) and not (out / _MARKER).exists():
            raise UserError(f"{out}: is not empty and no speedrun made it; name another directory with --out")
        self._out, self._plan, self._reports, self._file = out, plan, reports, out / _RECORD
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
        """The stages that are done, in the order of their runs."""
        return tuple(self._record.done)

    def run(self) -> None:
        """Does the work of each stage that is not done, and records the figures that it returns, as JSON has them."""
        for stage in self._plan:
            if self._is_done(stage):
                print(f"\n== {stage.name}: done before", flush=True)
            else:
                self._run(stage)

    def report(self, write: Callable[[], T]) -> T:
        """Calls the writer of the reports about the stages, and records them."""
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
        """Reads the record or begins one, and clears the way for the stages that are to run."""
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
        # In an extended pipeline a stage keeps its files until the stage that replaces it begins.
        delete([*others, *now], _ELSEWHERE)
        self._record.settings = settings
        self._write()

    def _is_done(self, stage: Stage) -> bool:
        key = stage.name, stage.start
        return stage.name in self._whole and any((one.name, one.start) == key for one in self._record.done)

    def _is_own(self, name: str, mark: str | None) -> bool:
        """Whether a file or run is there as this pipeline left it."""
        path = self._out / name
        if not _is_there(path):
            return False
        return not continued_by_hand(path) if mark is None else fingerprint(path) == mark

    def _stale(self, stage: Stage) -> list[Path]:
        """The old output of a stage that has to be done again, because its inputs changed or part of the output is gone."""
        earlier = [one for one in self._record.done if one.name == stage.name]
        return [path for one in earlier for name in one.made if _is_there(path := self._out / name)]

    def _marks(self, names: Sequence[str]) -> dict[str, str]:
        return {name: fingerprint(self._out / name) for name in names if _is_there(self._out / name)}

    def _read(self) -> _Record | str:
        """The record of an earlier pipeline, or why it cannot be read."""
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

    def _write(self) -> None:
        write_atomically(self._file, (self._record.model_dump_json(indent=1) + "\n").encode())


def begun_with(out: Path) -> dict[str, Any] | None:
    """The settings of the pipeline that `out` holds; None if there is none, or its record cannot be read."""
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
    """The work of the stages, in the directory `out`; with `resume`, runs continue from their checkpoints.

    `settings` are what decides the results: a resumed pipeline needs the same (`Stages`). `promises` bound figures of its summary.
    """

    promises: ClassVar[Sequence[Promise]]
    settings: Mapping[str, Any]

    def __init__(self, out: Path, seed: int, resume: bool, device: str = "auto") -> None:
        self._out, self._seed, self._resume, self._device = out, seed, resume, device

    @abstractmethod
    def stages(self) -> list[Stage]:
        """The stages in order."""

    @abstractmethod
    def report(self, done: Sequence[StageRecord]) -> Figures:
        """Writes and prints summary and report of the stages that are done; returns the figures of the summary."""

    def run(self, replace: bool) -> None:
        """Runs every stage that is not done, and writes the report.

        Raises UserError as `Stages` does, and for a device that is not there; ShortfallError where all stages are done but a
        promise is broken.
        """
        if find_spec("matplotlib") is None:
            raise UserError(f"the report needs matplotlib, which is not installed; run: {how_to_install('report')}")
        make_ready(choose_device(self._device, "--device"))  # said before anything is made
        with Stages(self._out, self.stages(), self.settings, self._resume, replace, REPORTS) as stages:
            stages.run()
            summary = stages.report(lambda: self.report(stages.done))
        if missed := shortfalls(self.promises, summary, str(self._out)):
            raise ShortfallError("\n".join(["this speedrun fell short of its promises:", *missed]))
        print(f"all {len(self.promises)} promises are kept (nmoe/speedrun/promises.py)")

    def _learn(self, config: RLConfig) -> Figures:
        last = read_metrics(train(config))[-1]
        return {"correctness of the last step": last["correctness"]}

    def _course(self, done: Sequence[StageRecord], metrics: Sequence[Mapping[str, Any]]) -> dict[str, float | int]:
        """Figures of every summary: how well engine and learner agreed, how long RL was, and what the whole cost."""
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

    def _load(self, path: Path, schema: type[C], values: Mapping[str, str | int | float]) -> C:
        """Loads a configuration with this directory, this seed and this device."""
        own = {"run.directory": str(self._out), "run.seed": self._seed, "run.resume": "auto" if self._resume else False}
        overrides = {**own, "model.device": self._device, **values}
        arguments = [f"--{key}={json.dumps(value)}" for key, value in overrides.items()]
        return load_run(path, schema, arguments)
