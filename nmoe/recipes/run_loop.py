"""The run loop of every recipe: starts or resumes a run, takes its steps, evaluates, saves, stops on request, and reports.

A recipe defines a training step, its evaluation and the contents of a checkpoint; the loop does the rest and writes the
run's files. A run can be killed at any time: a resumed run produces the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from nmoe.config.commands import RLConfig, RunConfig
from nmoe.config.tables.placement import PLACED
from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.config.tables.run import SamplingRunSection
from nmoe.config.toml import to_toml
from nmoe.errors import RunStoppedError
from nmoe.learner.learner import Learner
from nmoe.model.device import choose_device, collecting_new_objects, kind_of, return_freed_memory
from nmoe.model.idle_threads import IDLE
from nmoe.monitor.monitor import Alert, Monitor
from nmoe.monitor.rules import monitor_of
from nmoe.recipes.setup import provenance_of, run_path
from nmoe.runs.checkpoint import Saver
from nmoe.runs.directory import ACTIVITY, LOGS, Resume, RunDirectory, flat_keys
from nmoe.runs.ledger import read_lines
from nmoe.runs.output import logged
from nmoe.runs.progress import Progress
from nmoe.runs.provenance import recorded_device, recorded_schedule_steps
from nmoe.runs.record_links import claim_exports, link_records, remove_links
from nmoe.runs.samples import CONSOLE_CHARACTERS, sample_lines
from nmoe.runs.sinks.sinks import Attempt, Sinks, refuse_unready
from nmoe.runs.state import Part, Subdirectory, load_parts
from nmoe.runs.storage import how_to_resume
from nmoe.work import WORK

# Seconds between two reports to the parent of a run.
_REPORT_S = 5.0


@dataclass(frozen=True)
class Step:
    """The result of a training step: `metrics` is its line in metrics.jsonl, and `shown` the few numbers of the progress line."""

    metrics: Mapping[str, Any]
    shown: Mapping[str, float]


@dataclass(frozen=True)
class HeldOut:
    """The result of an evaluation on held-out data.

    metrics: figures to add to the metrics of the step.
    note: the line to print.
    results: the evaluation results, for the directory eval/ (`nmoe.runs.ledger.Ledger.evaluation`); the first one
        decides which checkpoint is the best.
    record: other data to write into the same file.
    """

    metrics: Mapping[str, float]
    note: str
    results: Sequence[Mapping[str, Any]] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


class Recipe(ABC):
    """A kind of training, such as supervised fine-tuning, as the run loop uses it.

    evaluate_every: the number of steps between evaluations; the last step is evaluated, too. 0 means that there are no
        evaluations.
    evaluate_first: whether a new run is evaluated before its first step, as a baseline.
    """

    evaluate_every: int = 0
    evaluate_first: bool = False

    @abstractmethod
    def watched(self) -> Learner | None:
        """Returns the learner whose update is in the metrics without a prefix, so that the load of its experts is monitored; None
        if nothing is trained."""

    def monitored(self, config: RunConfig) -> RunConfig:
        """Returns the run's configuration with what the recipe resolved in it, by which the rules of the monitor are chosen."""
        return config

    @abstractmethod
    def notes(self) -> Sequence[str]:
        """Returns the lines to print before the first step."""

    @abstractmethod
    def step(self, step: int) -> Step:
        """Takes one training step and returns its metrics. Steps are numbered from 1."""

    @abstractmethod
    def evaluate(self) -> HeldOut | None:
        """Evaluates the current weights on held-out data; returns None if there was nothing to evaluate."""

    @abstractmethod
    def parts(self) -> Mapping[str, Part]:
        """Returns everything that a checkpoint contains, by name: an object for each part that can save and load itself."""

    def start(self) -> None:  # noqa: B027 (most recipes have nothing to do)
        """Prepares a new run, which has no checkpoint to load."""

    def resume(self) -> None:  # noqa: B027 (most recipes have nothing to do)
        """Prepares a resumed run, after its checkpoint has been loaded."""

    def may_stop(self) -> bool:
        """Returns whether a run that is interrupted after this step can go on as if it had not been; else it stops later."""
        return True

    def reason_to_end(self) -> str | None:
        """Returns the reason to end the run before its last step, as a text; None if it goes on. Called after each evaluation."""
        return None


class Run:
    """A run in progress: takes its steps, and writes to its directory and to the console."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, progress: Progress, steps: int, moved: str | None
    ) -> None:
        """Makes a run in an open directory. `steps` is the number of the last step.

        `moved` is a line to print if a resumed run used another device before; else None.
        """
        self.directory, self.ledger, self._moved = directory, directory.ledger, moved
        self._config, self._progress, self._steps = config, progress, steps
        self._last_step = directory.start_step
        self._slept: int | None = IDLE.slept  # before the run; None once it was said
        placed = isinstance(config, RLConfig) and config.placement is not None
        self._activity_file = directory.path / LOGS / ACTIVITY if placed else None
        self._activity, self._writing = "", threading.Lock()
        self._sinks: Sinks | None = None  # until the run has begun: a refused resumption is no attempt to show

    def note(self, text: str) -> None:
        """Prints a line, and appends it to the run's log."""
        self._progress.note(text)

    def samples(self, step: int, records: Iterable[Mapping[str, Any]], columns: bytes | None = None) -> int:
        """Writes the samples of a step to the run directory, and shows the first of them every `run.show_sample_every` steps.
        `columns` is a safetensors file with values of their tokens. Returns the bytes written."""
        section, written = self._config.run, list(records)
        size = self.ledger.samples(step, written, columns)
        assert isinstance(section, SamplingRunSection), "only a policy that samples has samples"
        every = section.show_sample_every
        if written and every and (step == 1 or step % every == 0):
            for line in sample_lines(written[0], CONSOLE_CHARACTERS):
                self.note(line)
        return size

    def does(self, activity: str, step: int) -> None:
        """Names the present activity to the parent of a run with [placement], which ends a run that hangs."""
        with self._writing:
            self._activity = f"{activity} {step}"
        self._write_activity()

    def _write_activity(self) -> None:
        if self._activity_file is not None:
            with self._writing, suppress(OSError):  # a full disk is noticed where it matters
                self._activity_file.write_text(f"{self._activity}\n{WORK.done()}")

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Writes again and again how much was done."""
        over = threading.Event()

        def report() -> None:
            while not over.wait(_REPORT_S):
                self._write_activity()

        if self._activity_file is not None:
            threading.Thread(target=report, name="nmoe-work", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def alert(self, step: int, message: str) -> None:
        """Prints a warning, appends it to alerts.jsonl, and sends it to the experiment trackers."""
        self.ledger.alert({"step": step, "message": message})
        if self._sinks is not None:
            self._sinks.alert(step, message)
        self.note(f"step {step}: {message}")

    def follow(self, recipe: Recipe) -> None:
        """Takes the remaining steps of the run.

        Raises KeyboardInterrupt if a signal stops the run, and RunStoppedError if a monitor's rule does; both after a
        checkpoint is saved.
        """
        for line in recipe.notes():
            self.note(line)
        device, threads = choose_device(self._config.model.device), torch.get_num_threads()
        if kind_of(device).on_host and threads > 1:
            self.note(f"{threads} threads; idle ones {IDLE.describe()}")
        checkpoint = self._config.checkpoint
        with (
            collecting_new_objects(),
            Interruptible() as interrupt,
            self._reporting(),
            Saver(
                self.directory.checkpoints, checkpoint.keep, checkpoint.asynchronous, exports_of(self._config)
            ) as saver,
        ):
            first = self._begin(recipe, saver)
            sinks = self._sinks = _sinks_of(self._config, self.directory)
            monitor = self._monitor(recipe, first)
            saving: dict[str, float] = {}
            stop: str | None = None
            self._progress.begin(first)
            for step in range(first + 1, self._steps + 1):
                saver.check()
                self.does("step", step)
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
                alerts = monitor.observe(metrics, probe)  # refuses metrics that are not finite
                self.ledger.metrics(step, metrics)
                sinks.write(step, metrics)
                self._last_step = step
                if (alert := self._raise(step, alerts, sinks)) is not None and stop is None:
                    stop = f"step {step}: {alert}"
                self._progress.step(step, done.shown)
                self._note_contention(step)
                best = self.ledger.best_step(step) == step
                # Read once: a signal that arrives during the save is handled after the next step.
                may_stop, saving = recipe.may_stop(), {}
                stopping, stopped = interrupt.requested and may_stop, stop is not None and may_stop
                if last or best or stopping or stopped or step % checkpoint.every_steps == 0:
                    self.does("checkpoint", step)
                    began = time.perf_counter()
                    saver.save(step, recipe.parts(), best)
                    saving = {"time_save_s": time.perf_counter() - began}
                    # Buffers of a save and of an evaluation leave gaps that a step's do not fill: a run at 135M grew from 4.8 to
                    # 6.6 GB in 80 steps, and stays at 4.6 GB so.
                    return_freed_memory()
                if last or stopping or stopped:
                    self.does("end", step)
                    saver.wait()
                if stopped:
                    raise RunStoppedError(f"{stop}; the run is saved and ends here, as [monitor] asks")
                if last:
                    return
                if stopping:
                    self.note(said := f"interrupted: saved step {step}; go on with {how_to_resume()}")
                    raise KeyboardInterrupt(said)

    def close_sinks(self) -> None:
        """Waits, for a limited time, until the experiment trackers have received everything; records an alert for each
        that lost data."""
        for trouble in () if self._sinks is None else self._sinks.close():
            self.alert(self._last_step, trouble)

    def _begin(self, recipe: Recipe, saver: Saver) -> int:
        """Starts a new run, or loads the checkpoint of a resumed one.

        Returns the number of steps that are already done; the run's last step if the run ended early before.
        """
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
        saver.resume(checkpoint, self.ledger.best_step(first))
        # Only where the step was evaluated: the run went on after any other step, despite its last evaluation and the baseline.
        if self.ledger.has_evaluation(first) and (reason := recipe.reason_to_end()) is not None:
            self.note(f"step {first}: ended here, since {reason}")
            return self._steps
        return first

    def _monitor(self, recipe: Recipe, first: int) -> Monitor:
        """Makes the monitor of the run, and replays the metrics of a resumed run's earlier steps to it."""
        learner = recipe.watched()
        experts = 0 if learner is None else learner.model.config.routed_experts
        monitor = monitor_of(recipe.monitored(self._config), experts, self.directory.path)
        probes = self.ledger.probed()
        for row in read_lines(self.directory.path / "metrics.jsonl") if first else ():
            monitor.recall(row, probes.get(row["step"]))
        return monitor

    def _raise(self, step: int, alerts: Sequence[Alert], sinks: Sinks) -> Alert | None:
        """Prints and records the alerts of a step; returns the alert that ends the run, or None."""
        for alert in alerts:
            self.ledger.alert(record := alert.record(step))
            sinks.alert(step, record["message"])
            self.note(f"step {step}: {alert}")
        return next((alert for alert in alerts if alert.level == "stop"), None)

    def _note_contention(self, step: int) -> None:
        """Prints a line, once per run, when other processes slow it down."""
        if self._slept is not None and IDLE.slept > self._slept:
            self._slept = None
            self.note(f"step {step}: {IDLE.why}, so idle threads sleep until more are free")

    def _evaluate(self, recipe: Recipe, step: int) -> tuple[Mapping[str, float], Mapping[str, float] | None]:
        """Evaluates the recipe, and records and prints the results.

        Returns the figures to add to the step's metrics, and the figures for the monitor (None if there are none).
        """
        self.does("evaluation", step)
        held_out = recipe.evaluate()
        if held_out is None:
            return {}, None
        if held_out.results:
            self.ledger.evaluation(step, {"results": list(held_out.results), **held_out.record})
        self.note(f"step {step}: {held_out.note}")
        return held_out.metrics, self.ledger.probed().get(step)


def _schedule_notes(parts: Mapping[str, Part]) -> Iterator[str]:
    """Yields the notes of a resumed run's learners about their learning-rate schedules."""
    for name, part in parts.items():
        if isinstance(part, Subdirectory):
            yield from (f"{name}, {note}" for note in _schedule_notes(part.parts))
        elif isinstance(part, Learner) and part.optimizer.note is not None:
            yield part.optimizer.note


@contextmanager
def open_run(
    config: RunConfig, threads: int, steps: int | None = None, around: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """Creates the run's directory, or opens it to resume, and yields the run for a `with` block.

    `steps` is the number of the last step, by default run.steps. `around` is added to the recorded provenance
    (`ToolRuntime.provenance`). Raises UserError as `RunDirectory.create` does.
    """
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
    """Returns the configuration to store in the run directory: a new run of it repeats this run.

    So a resumed run stores its thread count, and the length of its original learning-rate schedule unless
    optimizer.schedule_steps sets another. A run with a parent does not store the addresses of the parent's engines.
    """
    if isinstance(config, RLConfig) and config.placement is not None:
        engine = {name: value for name, value in config.engine if name in config.engine.model_fields_set - PLACED}
        config = config.model_copy(update={"engine": RolloutEngineSection(**engine)})
    run, optimizer = config.run, config.optimizer
    began = recorded_schedule_steps(run_path(config)) if run.resume else None
    if optimizer.schedule_steps == 0 and began not in (None, run.steps):
        optimizer = optimizer.model_copy(update={"schedule_steps": began})
    run = run.model_copy(update={"resume": False, "threads": threads if run.threads else 0})
    return config.model_copy(update={"run": run, "optimizer": optimizer})


def _opened(start: tuple[Path, str, dict[str, Any], Resume], config: RunConfig) -> RunDirectory:
    """Creates or opens the directory of a run, and claims the directories that the configuration puts elsewhere."""
    directory = RunDirectory.create(*start, defaults=default_keys(config))
    with ExitStack() as undo:
        undo.callback(directory.abandon)
        if directory.resumed_from is None:
            link_records(directory.path, config.run)
            undo.callback(remove_links, directory.path)
        if (exports := exports_of(config)) is not None:
            # Last: the mark of a run that is refused afterwards would keep other runs out of the exports.
            claim_exports(directory.path, exports)
        undo.pop_all()
    return directory


def exports_of(config: RunConfig) -> Path | None:
    """Returns the directory to which the weights of each checkpoint are exported; None if none is configured."""
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
    """Returns the dotted keys of a configuration that have their default values: `{"run.seed", "optimizer.beta1", ...}`."""
    given = flat_keys(config.model_dump(exclude_none=True, exclude_defaults=True))
    return flat_keys(config.model_dump(exclude_none=True)).keys() - given.keys()


class Interruptible:
    """Turns Ctrl-C into a request: within the `with` block, the first SIGINT or SIGTERM only sets `requested`.

    A second SIGINT interrupts at once. Python delivers signals only to its main thread, so a run in another thread does
    not handle them.
    """

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
