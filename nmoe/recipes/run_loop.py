"""The run loop of every recipe: start or resume, take the steps, evaluate, save, stop on request, and report.

A recipe says what one step does, how it is evaluated and what belongs in its checkpoint; the loop does the rest and owns the run's
files. Any run can be killed at any time: after resuming it produces the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from nmoe.config.commands import RunConfig
from nmoe.config.tables.run import SamplingRunSection
from nmoe.config.toml import to_toml
from nmoe.errors import RunStoppedError
from nmoe.learner.learner import Learner
from nmoe.model.device import choose_device, kind_of
from nmoe.model.idle_threads import IDLE
from nmoe.monitor.monitor import Alert, Monitor
from nmoe.monitor.rules import monitor_of
from nmoe.recipes.setup import provenance_of, return_freed_memory, run_path
from nmoe.runs.checkpoint import Saver
from nmoe.runs.directory import Resume, RunDirectory, flat_keys
from nmoe.runs.ledger import read_lines
from nmoe.runs.output import logged
from nmoe.runs.progress import Progress
from nmoe.runs.provenance import recorded_device, recorded_schedule_steps
from nmoe.runs.record_links import claim_exports, link_records
from nmoe.runs.samples import CONSOLE_CHARACTERS, sample_lines
from nmoe.runs.sinks.sinks import Attempt, Sinks, refuse_unready
from nmoe.runs.state import Part, Subdirectory, load_parts
from nmoe.runs.storage import how_to_resume


@dataclass(frozen=True)
class Step:
    """The result of one step: its line of metrics.jsonl, and the few numbers of the progress line."""

    metrics: Mapping[str, Any]
    shown: Mapping[str, float]


@dataclass(frozen=True)
class HeldOut:
    """The result of one evaluation on held-out data.

    metrics: joined to the step's.
    note: the line to print.
    results: for eval/ (`nmoe.runs.ledger.Ledger.evaluation`); the first decides which checkpoint is the best.
    record: anything else to keep in the same file.
    """

    metrics: Mapping[str, float]
    note: str
    results: Sequence[Mapping[str, Any]] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


class Recipe(ABC):
    """One kind of training, as the run loop sees it.

    evaluate_every: steps between evaluations; the last step is evaluated too. 0: none.
    evaluate_first: whether a new run is evaluated before its first step, as the baseline.
    experts: routed experts of a layer, whose load is watched; 0: not watched.
    """

    evaluate_every: int = 0
    evaluate_first: bool = False
    experts: int = 0

    @abstractmethod
    def notes(self) -> Sequence[str]:
        """Lines to print before the first step."""

    @abstractmethod
    def step(self, step: int) -> Step:
        """Takes the step of this number; the first is 1."""

    @abstractmethod
    def evaluate(self) -> HeldOut | None:
        """Evaluates the present weights on held-out data."""

    @abstractmethod
    def parts(self) -> Mapping[str, Part]:
        """The parts of a checkpoint, by name."""

    def start(self) -> None:  # noqa: B027 (most recipes have nothing to do)
        """Prepares a run that starts at step 0, with nothing to load."""

    def resume(self) -> None:  # noqa: B027 (most recipes have nothing to do)
        """Prepares a run that goes on from a checkpoint, whose parts are loaded."""

    def reason_to_end(self) -> str | None:
        """Why the run ends before its last step, asked after each evaluation; None if it goes on."""
        return None


class Run:
    """A run in progress: its directory, and the lines on its console."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, progress: Progress, steps: int, moved: str | None
    ) -> None:
        """`moved` is the line to print where a resumed run was on another device before."""
        self.directory, self.ledger, self._moved = directory, directory.ledger, moved
        self._config, self._progress, self._steps = config, progress, steps
        self._last_step = directory.start_step
        self._slept: int | None = IDLE.slept  # before the run; None once it was said
        self._sinks: Sinks | None = None  # until the run has begun: a refused resumption is no attempt to show

    def note(self, text: str) -> None:
        """Prints and logs a line."""
        self._progress.note(text)

    def samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes the samples of a step, and shows the first of them every `run.show_sample_every` steps."""
        section, written = self._config.run, list(records)
        self.ledger.samples(step, written)
        assert isinstance(section, SamplingRunSection), "only a policy that samples has samples"
        every = section.show_sample_every
        if written and every and (step == 1 or step % every == 0):
            for line in sample_lines(written[0], CONSOLE_CHARACTERS):
                self.note(line)

    def alert(self, step: int, message: str) -> None:
        """Prints a line, and records it in alerts.jsonl."""
        self.ledger.alert({"step": step, "message": message})
        if self._sinks is not None:
            self._sinks.alert(step, message)
        self.note(f"step {step}: {message}")

    def follow(self, recipe: Recipe) -> None:
        """Takes the steps that are left. Raises KeyboardInterrupt, with a checkpoint saved, where a signal asked it to stop."""
        for line in recipe.notes():
            self.note(line)
        device, threads = choose_device(self._config.model.device), torch.get_num_threads()
        if kind_of(device).on_host and threads > 1:
            self.note(f"{threads} threads; idle ones {IDLE.describe()}")
        checkpoint = self._config.checkpoint
        with (
            Interruptible() as interrupt,
            Saver(
                self.directory.checkpoints, checkpoint.keep, checkpoint.asynchronous, exports_of(self._config)
            ) as saver,
        ):
            first = self._begin(recipe, saver)
            sinks = self._sinks = _sinks_of(self._config, self.directory)
            monitor = self._monitor(recipe, first)
            saving: dict[str, float] = {}
            self._progress.begin(first)
            for step in range(first + 1, self._steps + 1):
                saver.check()
                done = recipe.step(step)
                last = step == self._steps
                metrics, probe = {**done.metrics, **saving}, None
                if recipe.evaluate_every and (last or step % recipe.evaluate_every == 0):
                    figures, probe = self._evaluate(recipe, step)
                    metrics |= figures
                    evaluated = self.ledger.has_evaluation(step)
                    if not last and evaluated and (reason := recipe.reason_to_end()) is not None:
                        self.note(f"step {step}: ends here, since {reason}")
                        last = True
                self.ledger.metrics(step, metrics)
                sinks.write(step, metrics)
                self._last_step = step
                stopped = self._raise(step, monitor.observe(metrics, probe), sinks)
                self._progress.step(step, done.shown)
                self._note_contention(step)
                best = self.ledger.is_best(step)
                # Read once: a signal that arrives during the save is handled after the next step.
                stopping, saving = interrupt.requested, {}
                if last or best or stopping or stopped or step % checkpoint.every_steps == 0:
                    began = time.perf_counter()
                    saver.save(step, recipe.parts(), best)
                    saving = {"time_save_s": time.perf_counter() - began}
                    # Buffers of a save and of an evaluation leave gaps that a step's do not fill: a run at 135M grew from 4.8 to
                    # 6.6 GB in 80 steps, and stays at 4.6 GB so.
                    return_freed_memory()
                if last or stopping or stopped:
                    saver.wait()
                if stopped:
                    raise RunStoppedError(f"step {step}: {stopped}; the run is saved and ends here, as [monitor] asks")
                if last:
                    return
                if stopping:
                    self.note(said := f"interrupted: saved step {step}; go on with {how_to_resume()}")
                    raise KeyboardInterrupt(said)

    def close_sinks(self) -> None:
        """Waits for the sinks, within limits, and records an alert for each that lost something."""
        for trouble in () if self._sinks is None else self._sinks.close():
            self.alert(self._last_step, trouble)

    def _begin(self, recipe: Recipe, saver: Saver) -> int:
        """Brings the recipe to where the run starts. Returns the last step that is done, which is the run's last where the run
        has ended already."""
        checkpoint, first = self.directory.resumed_from, self.directory.start_step
        if checkpoint is None:
            recipe.start()
            if recipe.evaluate_first:
                self._evaluate(recipe, 0)
                return_freed_memory()
            return 0
        load_parts(checkpoint, recipe.parts())
        recipe.resume()
        self.directory.record_start()
        self.note(f"resumed from step {first}")
        for line in _schedule_notes(recipe.parts()):
            self.note(line)
        if self._moved is not None:
            self.note(self._moved)
        saver.resume(checkpoint, self.ledger.is_best(first))
        # Only where the step was evaluated: the run went on after any other step, despite its last evaluation and the baseline.
        if self.ledger.has_evaluation(first) and (reason := recipe.reason_to_end()) is not None:
            self.note(f"step {first}: ended here, since {reason}")
            return self._steps
        return first

    def _monitor(self, recipe: Recipe, first: int) -> Monitor:
        """The rules that watch the run, which have seen what a resumed run did before."""
        monitor = monitor_of(self._config, recipe.experts, self.directory.path)
        probes = self.ledger.probed()
        for row in read_lines(self.directory.path / "metrics.jsonl") if first else ():
            monitor.recall(row, probes.get(row["step"]))
        return monitor

    def _raise(self, step: int, alerts: Sequence[Alert], sinks: Sinks) -> Alert | None:
        """Prints and records the alerts of a step; returns the one that ends the run, if any does."""
        for alert in alerts:
            self.ledger.alert(record := alert.record(step))
            sinks.alert(step, record["message"])
            self.note(f"step {step}: {alert}")
        return next((alert for alert in alerts if alert.level == "stop"), None)

    def _note_contention(self, step: int) -> None:
        """Says the first time in a run that other processes slow it down."""
        if self._slept is not None and IDLE.slept > self._slept:
            self._slept = None
            self.note(f"step {step}: {IDLE.why}, so idle threads sleep until more are free")

    def _evaluate(self, recipe: Recipe, step: int) -> tuple[Mapping[str, float], Mapping[str, float] | None]:
        """Evaluates and records; returns the figures that belong in the step's metrics, and those that the monitor sees."""
        held_out = recipe.evaluate()
        if held_out is None:
            return {}, None
        if held_out.results:
            self.ledger.evaluation(step, {"results": list(held_out.results), **held_out.record})
        self.note(f"step {step}: {held_out.note}")
        return held_out.metrics, self.ledger.probed().get(step)


def _schedule_notes(parts: Mapping[str, Part]) -> Iterator[str]:
    """The notes of a resumed run's learners about their schedules."""
    for name, part in parts.items():
        if isinstance(part, Subdirectory):
            yield from (f"{name}, {note}" for note in _schedule_notes(part.parts))
        elif isinstance(part, Learner) and part.optimizer.note is not None:
            yield part.optimizer.note


@contextmanager
def open_run(
    config: RunConfig, threads: int, steps: int | None = None, around: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """Creates the run's directory, or opens it to resume, for the `with` block. `steps` is the number of the last step, by default
    run.steps, and `around` more of its provenance (`ToolRuntime.provenance`). Raises UserError (`RunDirectory.create`)."""
    refuse_unready(config.sinks)
    total = config.run.steps if steps is None else steps
    now, before = provenance_of(config, threads), recorded_device(run_path(config)) if config.run.resume else None
    start = run_path(config), to_toml(_lasting(config, threads)), now | dict(around or {}), config.run.resume
    moved = None
    if before not in (None, now["device"]):
        moved = f"on {now['device']}, and before on {before}: numbers repeat only on one device"
    with (
        _opened(start, config) as directory,
        Progress(total, directory.log, config.run.name, directory.start_step) as progress,
        logged(directory.log),
    ):
        run = Run(config, directory, progress, total, moved)
        try:
            yield run
        finally:
            run.close_sinks()


def _lasting(config: RunConfig, threads: int) -> RunConfig:
    """The configuration that a new run needs to repeat this one, its resumption included: a run that goes on from a checkpoint
    keeps its threads, and unless optimizer.schedule_steps asks for another length, the schedule that it began with."""
    run, optimizer = config.run, config.optimizer
    began = recorded_schedule_steps(run_path(config)) if run.resume else None
    if optimizer.schedule_steps == 0 and began not in (None, run.steps):
        optimizer = optimizer.model_copy(update={"schedule_steps": began})
    run = run.model_copy(update={"resume": False, "threads": threads if run.threads else 0})
    return config.model_copy(update={"run": run, "optimizer": optimizer})


def _opened(start: tuple[Path, str, dict[str, Any], Resume], config: RunConfig) -> RunDirectory:
    """The directory of the run, with the links to records that lie elsewhere."""
    directory = RunDirectory.create(*start, defaults=default_keys(config))
    try:
        if (exports := exports_of(config)) is not None:
            claim_exports(directory.path, exports)
        if directory.resumed_from is None:
            link_records(directory.path, config.run)
    except BaseException:
        directory.abandon()
        raise
    return directory


def exports_of(config: RunConfig) -> Path | None:
    """The directory to which the weights of each checkpoint are exported; None without one."""
    elsewhere = config.checkpoint.export_directory
    return None if elsewhere is None else Path(elsewhere) / config.run.name


def _sinks_of(config: RunConfig, directory: RunDirectory) -> Sinks:
    path = directory.path
    attempt = Attempt(
        directory=path,
        name=config.run.name,
        number=directory.number,
        config=config.model_dump(mode="json", exclude_none=True),
        project=config.sinks.project,
        wandb_mode=config.sinks.wandb_mode,
        rows=read_lines(path / "metrics.jsonl") if config.sinks.to else (),
        alerts=read_lines(path / "alerts.jsonl") if config.sinks.to else (),
    )
    return Sinks(config.sinks.to, attempt)


def default_keys(config: RunConfig) -> set[str]:
    """The dotted keys of a configuration that hold their defaults: `{"run.seed", "optimizer.beta1", ...}`."""
    given = flat_keys(config.model_dump(exclude_none=True, exclude_defaults=True))
    return flat_keys(config.model_dump(exclude_none=True)).keys() - given.keys()


class Interruptible:
    """Makes Ctrl-C a request: in the `with` block the first SIGINT or SIGTERM sets `requested`; a second SIGINT interrupts at
    once. Python delivers signals to its main thread alone: a run in another thread leaves them to the program."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interruptible:
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
