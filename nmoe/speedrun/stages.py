"""Stages of a pipeline in one directory. Each is announced, timed and recorded when it is done, so that none runs twice."""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nmoe.errors import UserError
from nmoe.runs.storage import make_directory, storage_errors, write_atomically

# Marks the directory of a speedrun, which the next one may replace.
_MARKER = ".speedrun"
_RECORD = "stages.json"


class StageRecord(BaseModel):
    """Example: `StageRecord(name="reinforcement learning", seconds=212.4, cpu_s=398.0, peak_memory_mb=2508.0, attempts=1,
    figures={"correctness of the last step": 0.97})`. Times are those of the attempt that ended it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    seconds: float
    cpu_s: float
    peak_memory_mb: float
    attempts: int
    figures: dict[str, int | float]


class _Record(BaseModel):
    """`stages.json`: the settings of the pipeline, the stages that are done, in order, and the number of attempts at the
    next one."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    done: list[StageRecord] = []
    attempts: int = 0


class Stages:
    """The stages of `out`; those that are done are skipped.

    settings: everything that decides the results, such as the seed; a resumed pipeline needs the same.

    Without `resume`, an earlier pipeline there is replaced. Raises UserError where `out` holds anything else, and where there is
    no pipeline with these settings to resume; StorageError when the disk is full.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], resume: bool) -> None:
        if out.exists() and not out.is_dir():
            raise UserError(f"{out}: is a file; name a directory with --out")
        if out.exists() and any(out.iterdir()) and not (out / _MARKER).exists():
            raise UserError(f"{out}: is not empty and no speedrun made it; name another directory with --out")
        self._file = out / _RECORD
        self._record = self._read(dict(settings)) if resume else _Record(settings=dict(settings))
        if not resume:
            _clear(out)
            self._write()

    @property
    def done(self) -> tuple[StageRecord, ...]:
        """The stages that are done, in the order of their runs."""
        return tuple(self._record.done)

    def run(self, name: str, work: Callable[[], Mapping[str, int | float]]) -> None:
        """Does the work, unless it is done already, and records the figures that it returns, as JSON has them.

        An earlier attempt may have interrupted `work` at any point.
        """
        if any(record.name == name for record in self._record.done):
            print(f"\n== {name}: done before", flush=True)
            return
        print(f"\n== {name}", flush=True)
        self._record.attempts += 1
        self._write()
        began, cpu = time.perf_counter(), time.process_time()
        figures = work()
        seconds = time.perf_counter() - began
        self._record.done.append(
            StageRecord(
                name=name,
                seconds=seconds,
                cpu_s=time.process_time() - cpu,
                peak_memory_mb=_peak_memory_mb(),
                attempts=self._record.attempts,
                figures=dict(figures),
            )
        )
        self._record.attempts = 0
        self._write()
        print(f"== {name}: {seconds:.0f} s", flush=True)

    def _read(self, settings: dict[str, Any]) -> _Record:
        try:
            record = _Record.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{self._file}: not there, so there is nothing to resume; run without --resume") from None
        except (ValidationError, OSError) as error:
            raise UserError(
                f"{self._file}: cannot be read: {' '.join(str(error).split())}; run without --resume to begin again"
            ) from None
        if record.settings != settings:
            raise UserError(
                f"{self._file}: began with {json.dumps(record.settings)}, which {json.dumps(settings)} does not go on; give the "
                "same options, or run without --resume to begin again"
            )
        return record

    def _write(self) -> None:
        write_atomically(self._file, (self._record.model_dump_json(indent=1) + "\n").encode())


def _clear(out: Path) -> None:
    with storage_errors(out):
        make_directory(out, "choose another --out")
        (out / _MARKER).touch()
        for path in out.iterdir():
            if path.name == _MARKER:
                continue
            print(f"replacing {path}")
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _peak_memory_mb() -> float:
    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
