"""Supervised recipes: one optimizer step per batch of given examples, on the shared run loop.

A recipe of this kind reads its data, says what a step's batch is, and hands both over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands.base import SupervisedConfig
from nmoe.config.tables.records import RecordsSection
from nmoe.errors import UserError
from nmoe.eval.baseline import since_baseline, since_start
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner, PassResult
from nmoe.learner.objectives import Objective
from nmoe.recipes.run_loop import HeldOut, Recipe, Step, open_run
from nmoe.recipes.setup import describe
from nmoe.runs.state import Files, JsonPart, Part
from nmoe.text.tokenizer import Tokenizer


class Examples(Protocol):
    """The position of training in its data. `position` counts the examples handed out, per source where there are several;
    `fingerprint` is a digest of all of them."""

    @property
    def position(self) -> Any: ...

    @position.setter
    def position(self, position: Any) -> None: ...

    @property
    def fingerprint(self) -> str: ...


def _no_metrics(batch: Batch, result: PassResult) -> dict[str, float]:
    return {}


def _save_nothing(directory: Path) -> None:
    pass


@dataclass
class Supervised(Recipe):
    """What is special to a recipe.

    source: the name of the data in errors.
    next_batch: returns the batch of the next step; it moves `examples`.
    data_notes: lines about the data, printed before the first step.
    held_out: evaluates, before the first step, every `config.evaluate_every` steps and at the end; None without held-out data.
    metrics: figures of a step beside loss, speed, optimizer and routing.
    save_more: writes files of the recipe's own into a checkpoint, beside weights, optimizer and tokenizer.
    evaluations: the run's directory `eval`, from the opening of the run on.
    """

    config: SupervisedConfig
    learner: Learner
    tokenizer: Tokenizer
    objective: Objective
    examples: Examples
    source: str
    next_batch: Callable[[], Batch]
    data_notes: Sequence[str]
    held_out: Callable[[], HeldOut] | None = None
    metrics: Callable[[Batch, PassResult], Mapping[str, float]] = field(default=_no_metrics)
    save_more: Callable[[Path], None] = field(default=_save_nothing)
    evaluations: Path | None = None

    def __post_init__(self) -> None:
        self.evaluate_every = 0 if self.held_out is None else self.config.evaluate_every
        self.evaluate_first = bool(self.evaluate_every)
        self.experts = self.learner.model.config.routed_experts

    def notes(self) -> list[str]:
        return [
            *batch_arithmetic(self.config),
            *describe(self.config, self.learner.lora, self.learner.ranks),
            *self.data_notes,
        ]

    def step(self, step: int) -> Step:
        began = time.perf_counter()
        batch = self.next_batch()
        result = self.learner.forward_backward(batch, self.objective).result()
        update = self.learner.optim_step().result()
        seconds = time.perf_counter() - began
        speed = batch.tokens / seconds
        metrics: dict[str, Any] = {
            "loss": result.loss,
            "tokens_in_batch": float(batch.tokens),
            "time_learn_s": seconds,
            "time_step_s": seconds,
            "train_tokens_per_second": speed,
        }
        metrics |= {**self.metrics(batch, result), **update.metrics(), **result.routing_metrics()}
        return Step(metrics, {"loss": result.loss, "tokens/s": speed})

    def evaluate(self) -> HeldOut | None:
        if self.held_out is None:
            return None
        found = self.held_out()
        assert self.evaluations is not None, "set as the run is opened"
        results = since_baseline(found.results, self.evaluations)
        return replace(found, results=results, note=found.note + since_start(results[0]))

    def parts(self) -> dict[str, Part]:
        return {
            "learner": self.learner,
            "tokenizer": Files(self.tokenizer.save),
            "recipe": Files(self.save_more),
            "examples": JsonPart(self._position, self._go_to),
        }

    def _position(self) -> dict[str, Any]:
        return {"position": self.examples.position, "documents": self.examples.fingerprint}

    def _go_to(self, state: Mapping[str, Any]) -> None:
        """Raises UserError where the data differs from what the run began with."""
        if state["documents"] != self.examples.fingerprint:
            raise UserError(f"{self.source}: not the documents that this run began with; put them back")
        self.examples.position = state["position"]


def supervise(recipe: Supervised, threads: int) -> Path:
    """Runs the recipe to its last step and returns the run directory. Raises KeyboardInterrupt, with a checkpoint saved, where a
    signal asked it to stop."""
    with open_run(recipe.config, threads) as run:
        recipe.evaluations = run.directory.path / "eval"
        run.follow(recipe)
    return run.directory.path


def records_source(records: RecordsSection) -> str:
    """What the records that are trained on are called in results and messages."""
    return " and ".join(dataset.path for dataset in records.datasets)


def held_out_source(records: RecordsSection) -> str:
    """What the held-out records are called in results."""
    if (other := records.held_out_dataset) is None:
        return f"{records_source(records)}, {records.held_out:g} of it"
    return other.path if records.held_out_split is None else f"{other.path}, {other.split}"
