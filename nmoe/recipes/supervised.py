"""The loop of every recipe that learns from given examples: one optimizer step a batch, evaluation, checkpoints, exact resume.

A recipe reads its data, says what a step's batch is, and hands both over; the loop owns the run's directory and its files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nmoe.config import to_toml
from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands.base import SupervisedConfig
from nmoe.config.tables.records import RecordsSection
from nmoe.errors import UserError
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner, PassResult
from nmoe.learner.metrics import optimizer_metrics, routing_metrics
from nmoe.learner.objectives import Objective
from nmoe.recipes.interrupt import Interruptible
from nmoe.recipes.setup import describe, provenance_of, run_path
from nmoe.runs.checkpoint import mark_best, save_checkpoint
from nmoe.runs.directory import RunDirectory
from nmoe.runs.progress import Progress
from nmoe.runs.watch import ExpertWatch
from nmoe.text.tokenizer import Tokenizer


class Examples(Protocol):
    """Where training stands in its data: `position` counts what was handed out, of each source where there are several;
    `fingerprint` is a digest of all of it."""

    @property
    def position(self) -> Any: ...

    @position.setter
    def position(self, position: Any) -> None: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class Held:
    """What an evaluation found: its figures among the step's metrics, a line to show, and results for eval/
    (`nmoe.runs.ledger.Ledger.evaluation`), the first of which decides which checkpoint is the best, with what else stands there."""

    metrics: Mapping[str, float]
    note: str
    results: Sequence[Mapping[str, Any]] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


def _no_metrics(batch: Batch, result: PassResult) -> dict[str, float]:
    return {}


def _save_nothing(directory: Path) -> None:
    pass


@dataclass(frozen=True)
class Supervised:
    """What a recipe gives the loop.

    source: names the data in errors.
    next_batch: the batch of the next step; it moves `examples`.
    notes: lines about the data, shown and logged before the first step.
    evaluate: called every `eval.every_steps` steps and at the end; None where there is nothing to evaluate on.
    metrics: figures of a step beside loss, speed, optimizer and routing.
    save_more: writes into a checkpoint's directory what belongs there beside weights, optimizer and tokenizer.
    """

    learner: Learner
    tokenizer: Tokenizer
    objective: Objective
    examples: Examples
    source: str
    next_batch: Callable[[], Batch]
    notes: Sequence[str]
    evaluate: Callable[[], Held] | None = None
    metrics: Callable[[Batch, PassResult], Mapping[str, float]] = field(default=_no_metrics)
    save_more: Callable[[Path], None] = field(default=_save_nothing)

    def save(self, directory: Path) -> None:
        self.learner.save(directory)
        self.tokenizer.save(directory)
        self.save_more(directory)
        state = {"position": self.examples.position, "documents": self.examples.fingerprint}
        (directory / "state.json").write_text(json.dumps(state) + "\n")

    def load(self, directory: Path) -> None:
        """Raises UserError where the data is not what `save` was at."""
        self.learner.load(directory)
        state = json.loads((directory / "state.json").read_text())
        if state["documents"] != self.examples.fingerprint:
            raise UserError(f"{self.source}: not the documents that this run began with; put them back")
        self.examples.position = state["position"]


def supervise(config: SupervisedConfig, threads: int, recipe: Supervised) -> Path:
    """Runs the configuration to its last step and returns the run directory. Raises KeyboardInterrupt, with a checkpoint saved,
    where a signal asked it to stop."""
    learner = recipe.learner
    with (
        RunDirectory.create(
            run_path(config), to_toml(config), provenance_of(config, threads), config.run.resume
        ) as run,
        Interruptible() as interrupt,
        Progress(config.run.steps, run.log, config.run.name, run.start_step) as progress,
    ):
        if run.resumed_from is not None:
            recipe.load(run.resumed_from)
            progress.note(f"resumed from step {run.start_step}")
            # The kill may have come between the checkpoint and its mark.
            if run.ledger.is_best(run.start_step):
                mark_best(run.resumed_from)
        for line in [*batch_arithmetic(config), *describe(config, learner.lora), *recipe.notes]:
            progress.note(line)
        expert_watch = ExpertWatch(learner.model.config.routed_experts)
        for step in range(run.start_step + 1, config.run.steps + 1):
            began = time.perf_counter()
            batch = recipe.next_batch()
            result = learner.forward_backward(batch, recipe.objective).result()
            update = learner.optim_step().result()
            seconds = time.perf_counter() - began
            metrics: dict[str, Any] = {
                "loss": result.loss,
                "tokens_in_batch": float(batch.tokens),
                "time_learn_s": seconds,
                "time_step_s": seconds,
                "train_tokens_per_second": batch.tokens / seconds,
            }
            metrics |= {**recipe.metrics(batch, result), **optimizer_metrics(update), **routing_metrics(result)}
            last = step == config.run.steps
            every = config.eval.every_steps
            evaluated = recipe.evaluate is not None and every > 0 and (last or step % every == 0)
            if recipe.evaluate is not None and evaluated:
                held = recipe.evaluate()
                metrics |= held.metrics
                if held.results:
                    run.ledger.evaluation(step, {"results": list(held.results), **held.record})
                progress.note(f"step {step}: {held.note}")
            run.ledger.metrics(step, metrics)
            if (message := expert_watch.observe(metrics)) is not None:
                run.ledger.alert({"step": step, "message": message})
                progress.note(f"step {step}: {message}")
            progress.step(step, {"loss": result.loss, "tokens/s": batch.tokens / seconds})
            best = evaluated and run.ledger.is_best(step)
            stopping = interrupt.requested  # asked once: a signal that comes during the save is met after the next step
            if last or best or stopping or step % config.checkpoint.every_steps == 0:
                saved = save_checkpoint(run.checkpoints, step, recipe.save, config.checkpoint.keep)
                if best:
                    mark_best(saved)
            if stopping and not last:
                progress.note(f"interrupted: saved step {step}; go on with --run.resume=true")
                raise KeyboardInterrupt
    return run.path


def held_out_source(records: RecordsSection) -> str:
    """What the held-out records are called in results."""
    if (other := records.held_out_dataset) is None:
        return f"{records.path}, {records.held_out:g} of it"
    return other.path if records.held_out_split is None else f"{other.path}, {other.split}"
