"""The policy that a divergence is measured from: the one that the run starts from or, every so many steps, the one at that step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from nmoe.config.commands.rl import RLConfig
from nmoe.learner.batch import Batch
from nmoe.learner.forward import batch_logprobs
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import load_weights, save_model
from nmoe.model.transformer import Transformer

DIRECTORY = "reference"


class Reference:
    """Its log-probabilities, and its renewal. Only a reference that was renewed is part of a checkpoint: the first is what the run
    starts from, the adapter that it goes on with included."""

    def __init__(self, config: RLConfig, learner: Learner, model: Transformer | None) -> None:
        """`model` is frozen; None where an adapter is trained: then the reference is the same base beside a copy of the adapter,
        and there is no second model in memory. To be made before a resumption loads what was trained."""
        assert (model is None) == (learner.lora is not None), "the reference of an adapter shares its base"
        self._config, self._learner, self._model = config, learner, model
        self._start = [] if learner.lora is None else [p.detach().clone() for p in learner.lora.parameters()]

    def logprobs(self, batch: Batch) -> Tensor:
        """Of the batch's scored tokens, `[N]`."""
        config, lora = self._config, self._learner.lora
        with nullcontext(self._model) if lora is None else lora.holding(self._start) as model:
            assert model is not None, "without an adapter there is a model"
            return batch_logprobs(
                model, batch.without_routes(), config.batch.tokens_per_microbatch, config.sampling.temperature
            )

    @torch.no_grad()
    def renew(self, step: int) -> None:
        """Makes the policy of now the reference, where its time has come."""
        every = self._config.algorithm.reference_every_steps
        if every and step % every == 0:
            assert self._model is not None, "a reference that is renewed was refused beside an adapter"
            self._model.load_state_dict(self._learner.model.state_dict())

    def save(self, directory: Path) -> None:
        if self._config.algorithm.reference_every_steps:
            assert self._model is not None
            (directory / DIRECTORY).mkdir()
            save_model(self._model, directory / DIRECTORY)

    def load(self, directory: Path) -> None:
        if self._config.algorithm.reference_every_steps:
            assert self._model is not None
            load_weights(self._model, directory / DIRECTORY)
