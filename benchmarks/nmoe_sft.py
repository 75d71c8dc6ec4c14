"""nmoe's side of the fine-tuning benchmark: the learner, as a recipe calls it."""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from sft_workload import ADAM_BETAS, ADAM_EPS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, Case, Step
from side import answer

from nmoe.config.tables.model import OptimizerSection
from nmoe.data.documents import Document
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.checkpoint import load_model
from nmoe.recipes.pretrain import document_batch
from nmoe.recipes.setup import keep_freed_memory

TOKENS_PER_MICROBATCH = 16384


class NmoeSft:
    """A learner over the case's initial weights, in a process set up as every recipe does it."""

    def __init__(self, case: Case) -> None:
        keep_freed_memory()
        with tempfile.TemporaryDirectory() as directory:
            case.make_model().save_pretrained(directory)
            model = load_model(Path(directory))
        settings = OptimizerSection(
            learning_rate=LEARNING_RATE,
            min_lr_ratio=1.0,
            weight_decay=WEIGHT_DECAY,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            eps=ADAM_EPS,
            max_grad_norm=MAX_GRAD_NORM,
        )
        self.learner = Learner(model, settings, total_steps=10**6, tokens_per_microbatch=TOKENS_PER_MICROBATCH)

    def step(self, rows: list[list[int]]) -> Step:
        """One step of training on these sequences."""
        began = time.perf_counter()
        batch = document_batch([Document(np.array(row)) for row in rows])
        result = self.learner.forward_backward(batch, cross_entropy).result()
        update = self.learner.optim_step().result()
        return Step(time.perf_counter() - began, result.loss, update.grad_norm)


def serve(connection: Connection, case: Case) -> None:
    """Takes the step whose number is asked for, and answers with what it took and gave."""
    side = NmoeSft(case)
    answer(connection, lambda step: side.step(case.rows(step)))
