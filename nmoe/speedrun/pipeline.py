"""What every pipeline of the demonstration has: its stages, its promises and its report in one directory. `nmoe speedrun`"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nmoe.config.commands import RLConfig, RunConfig
from nmoe.config.loader import load_run
from nmoe.errors import ShortfallError, UserError
from nmoe.extras import how_to_install
from nmoe.model.device import choose_device
from nmoe.model.ops.table import make_ready
from nmoe.rl.launch import train
from nmoe.runs.ledger import read_metrics
from nmoe.runs.storage import write_atomically
from nmoe.speedrun.promises import Promise, shortfalls
from nmoe.speedrun.stages import Stage, StageRecord, Stages

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
            raise ShortfallError("\n".join(["this speedrun fell short of what it promises:", *missed]))
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
