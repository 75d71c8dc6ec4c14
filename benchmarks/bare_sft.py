"""The floor: the loop that a competent user writes around transformers' model with plain PyTorch."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from sft_workload import ADAM_BETAS, ADAM_EPS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, Case, Step
from side import answer


class BareSft:
    """Model, AdamW and nothing else. transformers picks its own attention (SDPA) and experts (grouped_mm); torch's fused
    AdamW is the fastest of its three."""

    def __init__(self, case: Case) -> None:
        self.model = case.make_model().train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=LEARNING_RATE,
            betas=ADAM_BETAS,
            eps=ADAM_EPS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def step(self, rows: list[list[int]]) -> Step:
        """One step of training on these sequences."""
        began = time.perf_counter()
        ids = torch.tensor(rows)
        logits = self.model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss_value, norm_value = loss.item(), norm.item()
        return Step(time.perf_counter() - began, loss_value, norm_value)


def serve(connection: Connection, case: Case) -> None:
    """Takes the step whose number is asked for, and answers with what it took and gave."""
    side = BareSft(case)
    answer(connection, lambda step: side.step(case.rows(step)))
