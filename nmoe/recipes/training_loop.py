"""The loop of recipes that train on a dataset: take a batch, update, evaluate, record, save, to the last step or a signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmoe.config.run import RunConfig
from nmoe.eval.evaluate import Evaluation
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner, PassResult
from nmoe.learner.objectives import Objective
from nmoe.recipes.interrupt import Interruptible
from nmoe.recipes.policy_metrics import optimizer_metrics, routing_metrics
from nmoe.runs.checkpoint import mark_best, save_checkpoint
from nmoe.runs.directory import RunDirectory
from nmoe.runs.progress import Progress
from nmoe.runs.watch import ExpertWatch


@dataclass(frozen=True)
class Training:
    """What a recipe trains on and how.

    `batch` gives the next step's batch, `measure` what is to be recorded of a step beside its loss, `evaluate` metrics of an
    evaluation and, where it names them so, results for eval/, whose first decides which checkpoint is the best; `save` fills a
    checkpoint's directory.
    """

    batch: Callable[[], Batch]
    objective: Objective
    save: Callable[[Path], None]
    evaluate: Callable[[], tuple[dict[str, float], list[Evaluation]]]
    measure: Callable[[Batch, PassResult], dict[str, float]] = lambda batch, result: {}
    shown: Sequence[str] = ("loss",)


def training_loop(
    config: RunConfig, run: RunDirectory, learner: Learner, training: Training, notes: Sequence[str]
) -> None:
    """Runs the configuration to its last step; `notes` are printed before the first. Raises KeyboardInterrupt, with a checkpoint
    saved, where a signal asked it to stop."""
    with (
        Interruptible() as interrupt,
        Progress(config.run.steps, run.log, config.run.name, run.start_step) as progress,
    ):
        for line in notes:
            progress.note(line)
        if run.resumed_from is not None:
            progress.note(f"resumed from step {run.start_step}")
            # The kill may have come between the checkpoint and its mark.
            if run.ledger.is_best(run.start_step):
                mark_best(run.resumed_from)
        expert_watch = ExpertWatch(learner.model.config.experts)
        for step in range(run.start_step + 1, config.run.steps + 1):
            began = time.perf_counter()
            batch = training.batch()
            learn_began = time.perf_counter()
            result = learner.forward_backward(batch, training.objective).result()
            update = learner.optim_step().result()
            now = time.perf_counter()
            metrics = {
                "loss": result.loss,
                "tokens_in_batch": float(batch.tokens),
                "time_learn_s": now - learn_began,
                "time_step_s": now - began,
                "train_tokens_per_second": batch.tokens / (now - learn_began),
            }
            metrics |= training.measure(batch, result) | optimizer_metrics(update) | routing_metrics(result)
            last = step == config.run.steps
            if config.eval.every_steps and (last or step % config.eval.every_steps == 0):
                measured, results = training.evaluate()
                metrics |= measured
                if results:
                    run.ledger.evaluation(step, {"results": [evaluation.record() for evaluation in results]})
                said = [*(f"{name} {value:.4f}" for name, value in measured.items()), *map(str, results)]
                progress.note(f"step {step}: {', '.join(said)}")
            run.ledger.metrics(step, metrics)
            if (message := expert_watch.observe(metrics)) is not None:
                run.ledger.alert({"step": step, "message": message})
                progress.note(f"step {step}: {message}")
            shown = {name: metrics[name] for name in training.shown}
            progress.step(step, shown | {"tokens/s": metrics["train_tokens_per_second"]})
            if last or interrupt.requested or step % config.checkpoint.every_steps == 0:
                saved = save_checkpoint(run.checkpoints, step, training.save, config.checkpoint.keep)
                if run.ledger.is_best(step):
                    mark_best(saved)
            if interrupt.requested and not last:
                progress.note(f"interrupted: saved step {step}; go on with --run.resume=true")
                raise KeyboardInterrupt
