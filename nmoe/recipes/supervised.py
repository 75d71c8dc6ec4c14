"""Supervised training: one optimizer step per batch of given examples, on the run loop that all recipes share.

A supervised recipe, such as SFT, reads its data, defines the batch of a step, and passes both to `supervise`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands import ProbedConfig, SupervisedConfig
from nmoe.config.tables.recipes import RecordsSection
from nmoe.engine.api import Engine
from nmoe.engine.rank_sampling import sampling_engine
from nmoe.errors import UserError
from nmoe.eval.early_stopping import since_baseline, since_start
from nmoe.eval.probes import Probes, probes_of
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Objective
from nmoe.learner.passes import PassResult
from nmoe.recipes.run_loop import HeldOut, Recipe, Run, Step, open_run
from nmoe.recipes.setup import describe
from nmoe.runs.state import Files, JsonPart, Part
from nmoe.text.tokenizer import Tokenizer


class Examples(Protocol):
    """The training data of a run, as checkpoints record it.

    `position` says which examples were used. `fingerprint`, which JSON can express, differs if the examples do.
    """

    @property
    def position(self) -> Any: ...

    @position.setter
    def position(self, position: Any) -> None: ...

    @property
    def fingerprint(self) -> Any: ...


def _no_changes(recorded: Any) -> list[str]:
    return []


def _no_metrics(batch: Batch, result: PassResult) -> dict[str, float]:
    return {}


def _save_nothing(directory: Path) -> None:
    pass


@dataclass
class Supervised(Recipe):
    """A supervised training recipe, with the components in which SFT, pretraining, DPO and reward models differ.

    source: the name of the data, for error messages.
    next_batch: returns the batch of the next step, and advances the position of `examples`.
    data_notes: lines about the data, to print before the first step.
    held_out: evaluates on held-out data before the first step, every `config.evaluate_every` steps and at the end; None
        without such data.
    metrics: returns additional metrics of a step, beside loss, speed, optimizer and routing.
    changes: compares a checkpoint's fingerprint of the examples with theirs, and returns what changed, as texts.
    save_more: writes additional files of the recipe into a checkpoint, beside weights, optimizer state and tokenizer.
    run: the run, once it is open.
    probing: samples the environments of the [[eval]] tables; None without them.
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
    changes: Callable[[Any], list[str]] = field(default=_no_changes)
    save_more: Callable[[Path], None] = field(default=_save_nothing)
    run: Run | None = None
    probing: Probing | None = None

    def __post_init__(self) -> None:
        periods = [one.every_steps for one in self.config.probes.values()]
        self._held_out_every = 0 if self.held_out is None else self.config.evaluate_every
        self.evaluate_every = math.gcd(self._held_out_every, *periods)
        self.evaluate_first = bool(self.evaluate_every)
        self._at = 0  # the step that was taken last

    def watched(self) -> Learner:
        return self.learner

    def notes(self) -> list[str]:
        return [
            *batch_arithmetic(self.config),
            *describe(self.config, self.learner.lora, self.learner.ranks),
            *self.data_notes,
        ]

    def step(self, step: int) -> Step:
        began, self._at = time.perf_counter(), step
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
        assert self.run is not None, "set as the run is opened"
        found, at, every = HeldOut({}, ""), self._at, self._held_out_every
        if self.held_out is not None and every and (at % every == 0 or at == self.config.run.steps):
            found = self.held_out()
        allowed = {"allow_trained_on": True} if self.config.allows_trained_on else {}
        results = since_baseline([{**one, **allowed} for one in found.results], self.run.directory.path / "eval")
        notes = [found.note + since_start(results[0])] if results else []
        if self.probing is not None:
            records = self.probing.sample(at, self.learner, self.run)
            results, notes = [*results, *records], [*notes, *self.probing.probes.notes(records)]
        return HeldOut(found.metrics, "; ".join(notes), results, found.record) if results else None

    def reason_to_end(self) -> str | None:
        if self.probing is None or self.run is None:
            return None
        return self.probing.probes.reason_to_end([record["results"] for record in self.run.ledger.evaluations()])

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
        """Restores the position in the data from a checkpoint. Raises UserError if the data changed since the run began."""
        if state["documents"] != self.examples.fingerprint:
            found = f" ({', '.join(changes)})" if (changes := self.changes(state["documents"])) else ""
            raise UserError(
                f"{self.source}: not the documents that this run began with{found}; put them back, or start a new run"
            )
        self.examples.position = state["position"]


@dataclass(frozen=True)
class Probing:
    """Evaluates a supervised run on environments: the problems to sample, and the inference engine that samples them."""

    probes: Probes
    engine: Engine

    @classmethod
    def of(cls, config: ProbedConfig, learner: Learner, tokenizer: Tokenizer, stack: ExitStack) -> Probing:
        """Loads the environments of the run's [[eval]] tables, and makes the engine. Tool processes and sandboxes end
        when `stack` closes.

        Raises UserError if an environment cannot be loaded.
        """
        probes = Probes(
            probes_of(list(config.probes.values()), tokenizer),
            tokenizer,
            learner.model.config.context_tokens,
            config.sandbox,
            stack,
            steps=config.run.steps,
            seed=config.run.seed,
        )
        engine = config.engine
        sizes = engine.max_sequences, engine.cache_mb, engine.expert_parallel
        return cls(probes, sampling_engine(learner, *sizes))

    def sample(self, step: int, learner: Learner, run: Run) -> list[dict[str, Any]]:
        """Samples the environments that are due at this step with the learner's current weights; returns results for
        the directory eval/.

        The learner's weight version does not change, because the samples are not trained on: a checkpoint equals one of
        a run without these evaluations.
        """
        learner.hand_over(self.engine)
        return self.probes.evaluate(step, self.engine, run.directory)


def supervise(recipe: Supervised, threads: int) -> Path:
    """Trains a recipe until its last step, and returns the run directory.

    Raises KeyboardInterrupt, with a checkpoint saved, if a signal stops the run.
    """
    config, around = recipe.config, dict[str, str]()
    with ExitStack() as stack:
        if isinstance(config, ProbedConfig) and config.probes:
            recipe.probing = Probing.of(config, recipe.learner, recipe.tokenizer, stack)
            around = recipe.probing.probes.provenance
        run = recipe.run = stack.enter_context(open_run(config, threads, around=around))
        run.follow(recipe)
    return run.directory.path


def records_source(records: RecordsSection) -> str:
    """Returns the name of the training records, for results and messages: their paths."""
    return " and ".join(dataset.path for dataset in records.datasets)


def held_out_source(records: RecordsSection) -> str:
    """Returns the name of the held-out records, for results: the path of their dataset, or their share of the training records."""
    if (other := records.held_out_dataset) is None:
        of_it = f"{records.held_out:g} of it" if records.held_out < 1 else f"{records.held_out:g} records of it"
        return f"{records_source(records)}, {of_it}"
    return other.path if records.held_out_split is None else f"{other.path}, {other.split}"
