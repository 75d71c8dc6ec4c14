"""Pretraining: next-token cross-entropy on documents. `nmoe pretrain CONFIG`

Every document is a sequence of its own: none attends to its neighbour in the pack.
"""

# Shapes: T predicting positions.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from nmoe.config.run import PretrainConfig
from nmoe.data.documents import Document, DocumentStream, read_documents
from nmoe.errors import UserError
from nmoe.learner.aggregation import token_weights
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.recipes.setup import add_adapter, build_model, load_tokenizer, optimizer_settings, set_threads
from nmoe.recipes.supervised import Held, Supervised, supervise


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
    tokens = sum(len(document) - 1 for document in documents)
    epochs = config.run.steps * config.data.tokens_per_step / tokens

    def evaluate() -> Held:
        logprobs_N = learner.logprobs(document_batch(held_out)).result()
        loss = float(-logprobs_N.mean())
        return Held({"held_out_loss": loss}, f"held-out loss {loss:.4f}")

    recipe = Supervised(
        learner,
        tokenizer,
        cross_entropy,
        stream,
        config.data.documents,
        next_batch=lambda: document_batch(stream.take(config.data.tokens_per_step)),
        notes=[f"{len(documents):,} documents of {tokens:,} tokens: {epochs:.2f} epochs"],
        evaluate=evaluate,
    )
    return supervise(config, threads, recipe)
