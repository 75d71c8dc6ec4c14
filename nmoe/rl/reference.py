"""The frozen reference policy of the KL penalty: the policy at the start of the run or, with `algorithm.reference_every_steps`, at
the last multiple of that many steps."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from nmoe.config.commands import RLConfig
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner, share_model
from nmoe.learner.passes import MicroBatches, Scores, forward_logprobs, in_order
from nmoe.model.checkpoint import load_weights, sharded_model, snapshot_model
from nmoe.model.snapshot import Snapshot
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import command
from nmoe.parallel.ranks import local, release
from nmoe.recipes.setup import build_model
from nmoe.text.tokenizer import Tokenizer


class Reference:
    """Computes log-probabilities under the reference policy, and replaces it by the present policy from time to time. A checkpoint
    holds a reference only if it is ever replaced: otherwise it is the model that the run starts from."""

    def __init__(self, learner: Learner, model: Transformer | None, every_steps: int = 0) -> None:
        """Keeps the first reference policy. `model` is frozen; the constructor shards it as the learner's is. It is None if an
        adapter is trained: the reference is then the base with a copy of the adapter, and memory holds no second model. A reference
        has to be created before a resumed run loads its checkpoint."""
        assert (model is None) == (learner.lora is not None), "the reference of an adapter shares its base"
        if model is not None:
            share_model(model, learner.ranks)
        self._learner, self._model, self._every_steps = learner, model, every_steps
        self._files = None
        if every_steps and learner.ranks.size > 1:
            from nmoe.parallel.sharded_files import ShardedFiles

            self._files = ShardedFiles()
        self._start = [] if learner.lora is None else [p.detach().clone() for p in learner.lora.parameters()]

    @classmethod
    def build(cls, config: RLConfig, learner: Learner, tokenizer: Tokenizer) -> Reference | None:
        """Builds the reference of a run; None if there is no KL penalty."""
        if config.algorithm.kl_coef == 0:
            return None
        model = None
        if learner.lora is None:
            seed, ranks = config.run.seed, learner.ranks
            model = build_model(config.model, tokenizer, seed, balance=False, ranks=ranks).requires_grad_(False)
        return cls(learner, model, config.algorithm.reference_every_steps)

    def logprobs(self, batch: Batch) -> Tensor:
        """Computes the reference's log-probabilities of the batch's scored tokens, `[scored tokens]`."""
        return in_order(self._learner.on_each_rank(self._rank_logprobs, batch.without_routes()))

    def _rank_logprobs(self, micros: MicroBatches) -> Scores:
        learner = self._learner
        with nullcontext(self._model) if learner.lora is None else learner.lora.holding(self._start) as model:
            assert model is not None, "without an adapter there is a model"
            found = forward_logprobs(model, micros, learner.temperature)
            release(model)
            return found

    @command
    @torch.no_grad()
    def renew(self, step: int) -> None:
        """Copies the present policy's weights into the reference, if `step` is a multiple of `every_steps`; otherwise, and if
        `every_steps` is 0, does nothing."""
        if self._every_steps and step % self._every_steps == 0:
            assert self._model is not None, "a renewed reference is refused with an adapter"
            release(self._learner.model)
            own = self._model.state_dict()
            for name, tensor in self._learner.model.state_dict().items():
                local(own[name]).copy_(local(tensor))

    @property
    def renewed(self) -> bool:
        """Whether the reference is ever replaced, and so belongs in a checkpoint."""
        return self._every_steps > 0

    @command
    def snapshot(self, copied: bool) -> Snapshot:
        assert self._model is not None, "a renewed reference is a model"
        if self._files is None:
            return snapshot_model(self._model, copied)
        files, settings = sharded_model(self._model)
        # Twice, since the parts lie on the disk until they are joined.
        size = 2 * self._files.hold(files, copied)
        finish = self._files.finish

        def write(directory: Path) -> None:
            finish(directory)
            settings.write(directory)

        return Snapshot(write, size, start=self._begin)

    @command
    def _begin(self, directory: Path) -> None:
        assert self._files is not None, "ranks hold parts of it"
        self._files.start(directory)

    @command
    def load(self, directory: Path, state: None) -> None:
        assert self._model is not None, "a renewed reference is a model"
        load_weights(self._model, directory)
