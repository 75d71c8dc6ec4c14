"""A learner with a head: outputs and gradients by definition, however the batch is split; pairs are never cut; saving."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nmoe.config.tables.model import OptimizerSection
from nmoe.learner.batch import Batch, micro_batches
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Outputs, Scored
from nmoe.model.head import Head
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer

MakeModel = Callable[..., Transformer]
MakeBatch = Callable[..., Batch]
LENGTHS = [5, 12, 3, 20, 9, 7]


def head_for(model: Transformer) -> Head:
    head = Head(model.config.hidden_size, 2, "value").double()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
    return head


def learner_of(
    model: Transformer, head: Head, tokens_per_microbatch: int = 10_000, *, head_only: bool = False
) -> Learner:
    return Learner(
        model, OptimizerSection(learning_rate=1e-2), 10, tokens_per_microbatch, head=head, head_only=head_only
    )


def squares(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.head_NK is not None
    assert scored.returns_N is not None
    off_N = outputs.head_NK[:, 0] - 2 * outputs.head_NK[:, 1] - scored.returns_N
    return (scored.weights_N * off_N.square()).sum(), {"off": off_N.detach()}


def by_definition(model: Transformer, head: Head, batch: Batch) -> Tensor:
    """Head outputs at the scored tokens, one sequence at a time."""
    parts, start = [], 0
    for length in batch.lengths:
        rows = slice(start, start + length)
        attend = PackedAttention([length], batch.inputs_T.device)
        parts.append(
            head(model(batch.inputs_T[rows], torch.arange(length), attend, RouterTrace()))[batch.scored_T[rows]]
        )
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize("head_only", [False, True])
def test_outputs_and_gradients_do_not_depend_on_the_split(
    tiny_model: MakeModel, random_batch: MakeBatch, head_only: bool
) -> None:
    model = tiny_model().double().set_numerics("exact")
    head = head_for(model)
    batch = random_batch(LENGTHS)
    batch = replace(batch, returns_T=torch.arange(batch.tokens) / 7.0)
    wanted_NK = by_definition(model, head, batch)
    assert torch.allclose(learner_of(model, head, 21).head_outputs(batch).result(), wanted_NK, atol=1e-9)
    off_N = wanted_NK[:, 0] - 2 * wanted_NK[:, 1] - (torch.arange(batch.tokens) / 7.0)[batch.scored_T]
    loss = (batch.weights_T[batch.scored_T] * off_N.square()).sum()
    loss.backward()
    trained = [*model.blocks.parameters(), *head.parameters()]
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]
    for tokens in (10_000, 21):
        model.zero_grad()
        head.zero_grad()
        result = learner_of(model, head, tokens, head_only=head_only).forward_backward(batch, squares).result()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-9)
        assert torch.allclose(result.tokens["off"], off_N.detach(), atol=1e-9)
        assert ("logprobs" in result.tokens) is not head_only
        for parameter, gradient in zip(trained, wanted, strict=True):
            ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.allclose(ours, gradient, rtol=1e-5, atol=1e-6)  # routers compute in fp32


def test_alone_a_head_leaves_the_vocabulary_out(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    model = tiny_model()
    head = Head(model.config.hidden_size, 1, "reward")

    def reads_logprobs(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.head_NK is not None
        assert bool(outputs.logprobs_N.isnan().all())
        assert bool(outputs.entropy_N.isnan().all())
        return outputs.head_NK.sum(), {}

    learner_of(model, head, head_only=True).forward_backward(random_batch([4, 6]), reads_logprobs).result()


def test_a_step_moves_head_and_model_and_both_resume(
    tiny_model: MakeModel, random_batch: MakeBatch, tmp_path: Path
) -> None:
    def fresh() -> Learner:
        model = tiny_model()
        return Learner(
            model,
            OptimizerSection(learning_rate=1e-2),
            10,
            10_000,
            head=Head(model.config.hidden_size, 2, "value"),
            head_only=True,
        )

    batch = random_batch(LENGTHS)
    batch = replace(batch, returns_T=torch.ones(batch.tokens))

    def step(learner: Learner) -> float:
        loss = learner.forward_backward(batch, squares).result().loss
        learner.optim_step()
        return loss

    straight = fresh()
    losses = [step(straight) for _ in range(4)]
    assert losses[3] < losses[0]
    assert straight.head is not None
    assert bool(straight.head.weight.any())
    broken = fresh()
    assert [step(broken) for _ in range(2)] == losses[:2]
    broken.save(tmp_path)
    resumed = fresh()
    resumed.load(tmp_path)
    assert [step(resumed) for _ in range(2)] == losses[2:]


def test_pairs_stay_together_and_sequences_are_numbered(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    batch = replace(random_batch(LENGTHS), pairs=((7, True), (7, False), (1, False), (1, True), (4, True), (4, False)))
    seen = []

    def look(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        assert scored.sequence_N is not None
        assert scored.pairs is not None
        seen.append((scored.sequence_N.bincount().tolist(), scored.pairs))
        return outputs.logprobs_N.sum(), {}

    model = tiny_model()
    for tokens in (1, 24, 40, 1000):
        parts = micro_batches(batch, tokens)
        assert sorted(i for part in parts for i in part) == list(range(6))
        for first in (0, 2, 4):
            assert any({first, first + 1} <= set(part) for part in parts)
    Learner(model, OptimizerSection(learning_rate=1e-2), 10, 24).forward_backward(batch, look).result()
    # The first third of every sequence is not scored.
    scored = [4, 8, 2, 14, 6, 5]
    assert [len(counts) for counts, _ in seen] == [2, 2, 2]
    for counts, pairs in seen:
        places = [batch.pairs.index(pair) for pair in pairs] if batch.pairs is not None else []
        assert counts == [scored[place] for place in places]
