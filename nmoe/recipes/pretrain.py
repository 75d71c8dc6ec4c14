"""Pretraining: trains a language model on documents by next-token cross-entropy. `nmoe pretrain CONFIG`

Documents are streamed from the disk (`nmoe.data.stream`) and packed into batches, but do not attend to each other. Several sources
are mixed by weight.
"""

# Shapes: T predicting positions.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from nmoe.config.commands import PretrainConfig
from nmoe.data.documents import Document, DocumentReader
from nmoe.data.stream import DocumentMixture, DocumentSource
from nmoe.data.tokenising import DocumentWorkers
from nmoe.learner.batch import Batch, token_weights
from nmoe.learner.objectives import cross_entropy
from nmoe.parallel.gang import everywhere, gang
from nmoe.recipes.run_loop import HeldOut
from nmoe.recipes.sequence_losses import SequenceLosses, content_keys, loss_note, loss_result
from nmoe.recipes.setup import Start, load_tokenizer, settle
from nmoe.recipes.supervised import Supervised, supervise
from nmoe.text.tokenizer import Tokenizer


def document_batch(documents: Sequence[Document]) -> Batch:
    """Makes a batch of documents; its loss is the mean over all tokens but each document's first, or after its prompt."""
    lengths = tuple(document.positions for document in documents)
    scored_T = torch.from_numpy(np.concatenate([document.learned for document in documents]))
    return Batch(
        lengths=lengths,
        inputs_T=torch.from_numpy(np.concatenate([document.ids[:-1] for document in documents])),
        targets_T=torch.from_numpy(np.concatenate([document.ids[1:] for document in documents])),
        scored_T=scored_T,
        weights_T=token_weights("token", scored_T, lengths),
    )


def pretrain(config: PretrainConfig) -> Path:
    """Trains a language model until the configuration's last step, and returns the run directory."""
    config, threads = settle(config)
    tokenizer = load_tokenizer(config.model)
    start = everywhere(Start.of, config, tokenizer)
    reader = DocumentReader(tokenizer, start.model.config.context_tokens)
    asked = None if config.data.workers == "auto" else config.data.workers
    with DocumentWorkers(reader, asked, gang().local_size) as workers:
        return _train(config, threads, tokenizer, start, workers)


def _train(config: PretrainConfig, threads: int, tokenizer: Tokenizer, start: Start, workers: DocumentWorkers) -> Path:
    data = config.data
    sources = [
        DocumentSource(
            section.path,
            workers,
            config.run.seed,
            data.shuffle_mb << 20,
            data.held_out_documents,
            section.weight,
            section.label,
        )
        for section in data.mixture
    ]
    mixture = DocumentMixture(sources, workers.reader, data.held_out_documents)
    held_out = [source.held_out for source in sources]
    learner = everywhere(start.learner, config)
    shares = [source.weight / sum(source.weight for source in sources) for source in sources]
    several = len(sources) > 1
    tokens_of_step: dict[str, float] = {}
    names = " and ".join(source.path for source in config.data.mixture)
    held_out_name = f"{names}, the last {config.data.held_out_documents} documents"
    # A document may be in two sources.
    held_out_keys = [
        [f"{number}:{key}" for key in content_keys(document.ids.tobytes() for document in documents)]
        for number, documents in enumerate(held_out)
    ]

    def next_batch() -> Batch:
        taken = mixture.take(config.data.tokens_per_step)
        if several:
            for index, source in enumerate(sources):
                tokens = sum(document.positions for which, document in taken if which == index)
                tokens_of_step[f"source_tokens/{source.name}"] = float(tokens)
        return document_batch([document for _, document in taken])

    def evaluate() -> HeldOut:
        losses: list[float] = []
        parts: list[tuple[float, SequenceLosses]] = []
        for share, documents, keys in zip(shares, held_out, held_out_keys, strict=True):
            batch = document_batch(documents)
            logprobs_N = learner.logprobs(batch).result()
            losses.append(float(-logprobs_N.mean()))
            parts.append((share, SequenceLosses.of(batch, logprobs_N, keys)))
        loss = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        by_source = {f"held_out_loss/{source.name}": loss for source, loss in zip(sources, losses, strict=True)}
        note = ", ".join(f"{source.name} {loss:.4f}" for source, loss in zip(sources, losses, strict=True))
        result = loss_result(held_out_name, loss, parts)
        return HeldOut(
            {"held_out_loss": loss} | (by_source if several else {}),
            loss_note(result) + (f" ({note})" if several else ""),
            [result],
        )

    recipe = Supervised(
        config,
        learner,
        tokenizer,
        cross_entropy,
        mixture,
        names,
        next_batch=next_batch,
        data_notes=_shares_and_epochs(config, sources, shares),
        held_out=evaluate if config.data.held_out_documents else None,
        metrics=lambda batch, result: tokens_of_step,
        changes=mixture.changes,
    )
    return supervise(recipe, threads)


def _shares_and_epochs(config: PretrainConfig, sources: Sequence[DocumentSource], shares: Sequence[float]) -> list[str]:
    notes = []
    for source, share in zip(sources, shares, strict=True):
        epochs = share * config.run.steps * config.data.tokens_per_step / source.tokens
        about = "" if source.bytes <= source.buffer_bytes else f" in {source.bytes / 1e6:,.0f} MB, about"
        note = f"{source.documents:,} documents{about or ' of'} {source.tokens:,} tokens: {epochs:.2f} epochs"
        notes.append(note if len(sources) == 1 else f"{source.name}, {share:.1%} of the tokens: {note}")
    return notes
