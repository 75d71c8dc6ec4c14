"""Pretraining: next-token cross-entropy on documents. `nmoe pretrain CONFIG`

Every document is a sequence of its own: none attends to its neighbour in the pack.
"""

# Shapes: T predicting positions.

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from nmoe.config import to_toml
from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.run import PretrainConfig
from nmoe.data.documents import Document, DocumentStream, read_documents
from nmoe.errors import UserError
from nmoe.learner.aggregation import token_weights
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.recipes.interrupt import Interruptible
from nmoe.recipes.policy_metrics import optimizer_metrics, routing_metrics
from nmoe.recipes.setup import (
    add_adapter,
    build_model,
    describe,
    load_tokenizer,
    optimizer_settings,
    run_path,
    set_threads,
)
from nmoe.runs.checkpoint import save_checkpoint
from nmoe.runs.directory import RunDirectory
from nmoe.runs.progress import Progress
from nmoe.runs.provenance import provenance
from nmoe.runs.watch import ExpertWatch


def document_batch(documents: Sequence[Document]) -> Batch:
    """Every token after a document's first is predicted; the loss is the mean over all of them."""
    lengths = tuple(len(document) - 1 for document in documents)
    scored_T = torch.ones(sum(lengths), dtype=torch.bool)
    return Batch(
        lengths=lengths,
        inputs_T=torch.from_numpy(np.concatenate([document[:-1] for document in documents])),
        targets_T=torch.from_numpy(np.concatenate([document[1:] for document in documents])),
        scored_T=scored_T,
        weights_T=token_weights("token", scored_T, lengths),
    )


def pretrain(config: PretrainConfig) -> Path:
    """Runs the configuration to its last step and returns the run directory."""
    threads = set_threads(config)
    tokenizer = load_tokenizer(config.model)
    model = build_model(config.model, tokenizer, config.run.seed)
    lora = add_adapter(config, model)
    documents = read_documents(config.data.documents, tokenizer, model.config.context_tokens)
    kept = len(documents) - config.data.held_out_documents
    if kept < 1:
        raise UserError(
            f"{config.data.documents}: data.held_out_documents = {config.data.held_out_documents} leaves none of its "
            f"{len(documents)} documents to train on"
        )
    documents, held_out = documents[:kept], documents[kept:]
    stream = DocumentStream(documents, config.run.seed)
    learner = Learner(
        model, optimizer_settings(config), config.run.steps, config.batch.tokens_per_microbatch, lora=lora
    )

    def save(directory: Path) -> None:
        learner.save(directory)
        tokenizer.save(directory)
        state = {"position": stream.position, "documents": stream.fingerprint}
        (directory / "state.json").write_text(json.dumps(state) + "\n")

    with (
        RunDirectory.create(
            run_path(config), to_toml(config), provenance(config.run.seed, threads), config.run.resume
        ) as run,
        Interruptible() as interrupt,
        Progress(config.run.steps, run.log, config.run.name, run.start_step) as progress,
    ):
        if run.resumed_from is not None:
            learner.load(run.resumed_from)
            state = json.loads((run.resumed_from / "state.json").read_text())
            if state["documents"] != stream.fingerprint:
                raise UserError(f"{config.data.documents}: not the documents that this run began with; put them back")
            stream.position = state["position"]
            progress.note(f"resumed from step {run.start_step}")
        tokens = sum(len(document) - 1 for document in documents)
        epochs = config.run.steps * config.data.tokens_per_step / tokens
        for line in [
            *batch_arithmetic(config),
            *describe(lora),
            f"{len(documents):,} documents of {tokens:,} tokens: {epochs:.2f} epochs",
        ]:
            progress.note(line)
        expert_watch = ExpertWatch(model.config.experts)
        for step in range(run.start_step + 1, config.run.steps + 1):
            began = time.perf_counter()
            batch = document_batch(stream.take(config.data.tokens_per_step))
            result = learner.forward_backward(batch, cross_entropy).result()
            update = learner.optim_step().result()
            seconds = time.perf_counter() - began
            metrics = {
                "loss": result.loss,
                "tokens_in_batch": float(batch.tokens),
                "time_learn_s": seconds,
                "time_step_s": seconds,
                "train_tokens_per_second": batch.tokens / seconds,
            }
            metrics |= optimizer_metrics(update) | routing_metrics(result)
            last = step == config.run.steps
            if config.eval.every_steps and (last or step % config.eval.every_steps == 0):
                logprobs_N = learner.logprobs(document_batch(held_out)).result()
                metrics["held_out_loss"] = float(-logprobs_N.mean())
                progress.note(f"step {step}: held-out loss {metrics['held_out_loss']:.4f}")
            run.ledger.metrics(step, metrics)
            if (message := expert_watch.observe(metrics)) is not None:
                run.ledger.alert({"step": step, "message": message})
                progress.note(f"step {step}: {message}")
            progress.step(step, {"loss": result.loss, "tokens/s": batch.tokens / seconds})
            if last or interrupt.requested or step % config.checkpoint.every_steps == 0:
                save_checkpoint(run.checkpoints, step, save, config.checkpoint.keep)
            if interrupt.requested and not last:
                progress.note(f"interrupted: saved step {step}; go on with --run.resume=true")
                raise KeyboardInterrupt
    return run.path
