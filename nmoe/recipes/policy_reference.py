"""The policy that a divergence is measured from: the one before training or, every so many steps, the one of then."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from nmoe.config.run import RLConfig
from nmoe.learner.batch import Batch
from nmoe.learner.forward import batch_logprobs
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import load_weights, save_model
from nmoe.model.transformer import Transformer

DIRECTORY = "reference"


class Reference:
    """Its log-probabilities, and its renewal. Only a reference that was renewed is part of a checkpoint: the first is the model
    that the run starts from."""

    def __init__(self, config: RLConfig, learner: Learner, model: Transformer | None) -> None:
        """`model` is frozen; None where an adapter is trained, whose base is the reference, without a second model in memory."""
        assert (model is None) == (learner.lora is not None), "the reference of an adapter is its base"
        self._config, self._learner, self._model = config, learner, model

    def logprobs(self, batch: Batch) -> Tensor:
        """Of the batch's scored tokens, `[N]`."""
        config, lora = self._config, self._learner.lora
        with lora.disabled() if lora is not None else nullcontext(self._model) as model:
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
