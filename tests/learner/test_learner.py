"""The learner: gradients that do not depend on how a batch is split, columns in the batch's order, routes, saving."""

import os
import shlex
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny_family
from torch import Tensor

from nmoe.config.tables.model import OptimizerSection
from nmoe.errors import UserError
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Objective, Outputs, Scored, clip, cross_entropy, reference_divergence, total
from nmoe.learner.passes import score
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.precision import cast
from nmoe.model.transformer import Transformer
from nmoe.types import Precision

MakeModel = Callable[..., Transformer]
MakeBatch = Callable[..., Batch]

OBJECTIVE = total(clip(0.2, 0.28, dual_clip=3.0), reference_divergence(0.05))
LENGTHS = [5, 12, 3, 20, 9, 1, 12]


def learner_of(model: Transformer, tokens_per_microbatch: int = 10_000, temperature: float = 1.0) -> Learner:
    return Learner(model, OptimizerSection(learning_rate=1e-2), 10, tokens_per_microbatch, temperature)


def quiet(model: Transformer) -> Transformer:
    """In fp64, and in fp32 (router and logits) with numerics that do not depend on the batch: rounding alone would move an unlucky
    gradient by more than the 1e-6 asked for here."""
    return model.double().set_numerics("exact")


def near_policy(model: Transformer, batch: Batch) -> Batch:
    """The batch as if sampled by a policy near the model's, of which a reference is near too: ratios on both sides of the clip."""
    logprobs_N, generator = learner_of(model).logprobs(batch).result().float(), torch.Generator().manual_seed(1)
    behaviour_N, reference_N = logprobs_N + 0.3 * torch.randn(2, len(logprobs_N), generator=generator)
    behaviour_T = torch.zeros_like(batch.weights_T).masked_scatter(batch.scored_T, behaviour_N)
    return replace(batch, behaviour_logprobs_T=behaviour_T).with_reference(reference_N)


def gradients(model: Transformer) -> dict[str, Tensor]:
    # A shared head that no token reached, say, has no gradient at all.
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def gradient_of(model: Transformer, batch: Batch, objective: Objective, tokens_per_microbatch: int):
    model.zero_grad()
    result = learner_of(model, tokens_per_microbatch).forward_backward(batch, objective).result()
    return gradients(model), result


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal up to the rounding of sums taken in another order: 1e-6 of the whole gradient, 1e-5 of any part's largest."""
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    difference, whole = (
        torch.cat([g.flatten() for g in gs]) for gs in ([ours[n] - g for n, g in theirs.items()], theirs.values())
    )
    assert difference.norm() <= 1e-6 * whole.norm()


def logprobs_by_definition(model: Transformer, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Of the scored tokens in order, one sequence at a time, with gradient."""
    parts, start = [], 0
    for length in batch.lengths:
        rows = slice(start, start + length)
        attend = PackedAttention([length], batch.inputs_T.device)
        logits = model.logits(model(batch.inputs_T[rows], torch.arange(length), attend, RouterTrace()))
        logprobs = (logits / temperature).log_softmax(-1).gather(-1, batch.targets_T[rows].unsqueeze(-1)).squeeze(-1)
        parts.append(logprobs[batch.scored_T[rows]])
        start += length
    return torch.cat(parts)


@pytest.fixture(scope="module")
def balanced(tiny_model: MakeModel) -> Transformer:
    """A mixture of experts whose auxiliary loss is a large part of the gradient."""
    return quiet(tiny_model(router_aux_loss_coef=0.5))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=8),
    tokens_per_microbatch=st.integers(1, 80),
    pretraining=st.booleans(),
)
def test_gradient_does_not_depend_on_the_split(
    balanced: Transformer, random_batch: MakeBatch, lengths: list[int], tokens_per_microbatch: int, pretraining: bool
) -> None:
    batch = near_policy(balanced, random_batch(lengths))
    objective = cross_entropy if pretraining else OBJECTIVE
    whole, of_whole = gradient_of(balanced, batch, objective, 10_000)
    split, of_split = gradient_of(balanced, batch, objective, tokens_per_microbatch)
    assert_same(split, whole)
    assert of_split.loss == pytest.approx(of_whole.loss, abs=1e-5, rel=1e-5)
    assert of_split.auxiliary_loss == pytest.approx(of_whole.auxiliary_loss, abs=1e-6)
    assert of_split.tokens.keys() == of_whole.tokens.keys()
    for name, values in of_whole.tokens.items():
        torch.testing.assert_close(of_split.tokens[name], values, rtol=1e-4, atol=1e-4)
    assert of_split.routing is not None
    assert of_whole.routing is not None
    assert torch.equal(of_split.routing.load_YE, of_whole.routing.load_YE)
    assert of_split.routing.tokens == of_whole.routing.tokens == sum(lengths)
    assert of_split.routing.router_entropy() == pytest.approx(of_whole.routing.router_entropy(), abs=1e-6)


@pytest.mark.parametrize("changes", [{}, {"experts": 0}], ids=["moe", "dense"])
def test_packed_gradient_is_the_sum_of_one_by_one(
    tiny_model: MakeModel, random_batch: MakeBatch, changes: dict[str, Any]
) -> None:
    model = quiet(tiny_model(**changes))
    batch = near_policy(model, random_batch(LENGTHS))
    packed, of_packed = gradient_of(model, batch, OBJECTIVE, 10_000)
    model.zero_grad()
    learner = learner_of(model)
    losses = [learner.forward_backward(batch.select([i])[0], OBJECTIVE).result().loss for i in range(len(LENGTHS))]
    assert_same(packed, gradients(model))
    assert of_packed.loss == pytest.approx(sum(losses), abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_equals_its_definition(tiny_model: MakeModel, random_batch: MakeBatch, temperature: float) -> None:
    model, batch = tiny_model(), random_batch(LENGTHS)
    result = learner_of(model, 30, temperature).forward_backward(batch, cross_entropy).result()
    ours = gradients(model)
    model.zero_grad()
    logprobs = logprobs_by_definition(model, batch, temperature)
    loss = -(batch.weights_T[batch.scored_T] * logprobs).sum()
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), abs=1e-5)
    torch.testing.assert_close(result.tokens["logprobs"], logprobs.detach(), rtol=1e-4, atol=1e-4)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)


def test_auxiliary_loss_and_its_gradient_by_definition(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    model = tiny_model(router_aux_loss_coef=0.5)
    batch, config = random_batch(LENGTHS), model.config
    with_loss, result = gradient_of(model, batch, cross_entropy, 20)
    model.zero_grad()
    trace = RouterTrace()
    attend = PackedAttention(batch.lengths, batch.inputs_T.device)
    logits = model.logits(model(batch.inputs_T, batch.positions(), attend, trace))
    per_layer = []
    for chosen, scores in zip(trace.chosen_TK, trace.scores_TE, strict=True):
        picks = torch.tensor([(chosen == e).sum() for e in range(config.experts)])
        per_layer.append(config.experts * (picks / picks.sum() * scores.mean(0)).sum())
    auxiliary = 0.5 * sum(per_layer) / len(per_layer)
    logprobs = logits.log_softmax(-1).gather(-1, batch.targets_T.unsqueeze(-1)).squeeze(-1)
    (auxiliary - (batch.weights_T * logprobs).sum()).backward()
    assert result.auxiliary_loss == pytest.approx(auxiliary.item(), abs=1e-6)
    assert result.loss == pytest.approx(
        -(batch.weights_T * logprobs).sum().item(), abs=1e-5
    )  # without the auxiliary one
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(with_loss[name], gradient, rtol=1e-4, atol=1e-5)


def test_columns_come_back_in_the_batch_order(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    batch = random_batch(LENGTHS)
    batch = replace(batch, advantages_T=torch.arange(batch.tokens, dtype=torch.float32))

    def marked(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        assert scored.advantages_N is not None
        return outputs.logprobs_N.sum() * 0, {"place": scored.advantages_N}

    for tokens_per_microbatch in (1, 15, 10_000):
        learner = learner_of(tiny_model(), tokens_per_microbatch)
        result = learner.forward_backward(batch, marked).result()
        assert result.tokens["place"].tolist() == batch.scored_T.nonzero().flatten().tolist()
        expected = logprobs_by_definition(learner.model, batch).detach()
        torch.testing.assert_close(result.tokens["logprobs"], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(learner.logprobs(batch).result(), expected, rtol=1e-4, atol=1e-4)
        assert set(result.tokens) == {"place", "logprobs", "entropy"}


def test_logprobs_leave_no_gradient(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    learner = learner_of(tiny_model())
    assert not learner.logprobs(random_batch(LENGTHS)).result().requires_grad
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_scores_only_over_the_kept_support(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    model, batch = tiny_model(), random_batch(LENGTHS)
    generator = torch.Generator().manual_seed(3)
    others_TM = torch.stack([torch.randperm(48, generator=generator)[:4] for _ in range(batch.tokens)])
    kept_TM = torch.cat([batch.targets_T.unsqueeze(-1), others_TM], 1)
    kept_TM[::3] = -1  # whole rows among them
    result = learner_of(model, 20, 0.7).forward_backward(replace(batch, kept_TM=kept_TM), cross_entropy).result()
    attend = PackedAttention(batch.lengths, batch.inputs_T.device)
    with torch.no_grad():
        logits = model.logits(model(batch.inputs_T, batch.positions(), attend, RouterTrace())) / 0.7
    expected = []
    for row in batch.scored_T.nonzero().flatten().tolist():
        support = set(kept_TM[row].tolist()) if kept_TM[row, 0] >= 0 else set(range(48))
        expected.append(logits[row, batch.targets_T[row]] - logits[row, sorted(support)].logsumexp(0))
    torch.testing.assert_close(result.tokens["logprobs"], torch.stack(expected), rtol=1e-4, atol=1e-4)


def grouped(make: MakeBatch, seed: int = 0) -> Batch:
    """Two groups of sequences that begin alike, of unlike lengths, one of them all prefix, and one sequence that stands alone."""
    batch = make([7, 12, 7, 5, 20, 9, 6], seed)
    prefixes = ((0, 5), (1, 6), (0, 5), (0, 5), (4, 3), (1, 6), (1, 6))
    inputs_T, starts = batch.inputs_T.clone(), torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
    for start, (group, shared) in zip(starts, prefixes, strict=False):
        inputs_T[start : start + shared] = inputs_T[starts[group] : starts[group] + shared]
    return replace(batch, inputs_T=inputs_T, prefixes=prefixes)


@pytest.mark.parametrize("changes", [{"router_aux_loss_coef": 0.5}, {"experts": 0}], ids=["moe", "dense"])
@pytest.mark.parametrize("tokens_per_microbatch", [15, 30, 10_000])
def test_shared_prefixes_run_once_and_change_nothing(
    tiny_model: MakeModel, random_batch: MakeBatch, tokens_per_microbatch: int, changes: dict[str, Any]
) -> None:
    model = quiet(tiny_model(**changes))
    shared = near_policy(model, grouped(random_batch))
    apart, of_apart = gradient_of(model, replace(shared, prefixes=None), OBJECTIVE, 10_000)
    rows = []
    model.norm.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    together, of_together = gradient_of(model, shared, OBJECTIVE, tokens_per_microbatch)
    assert_same(together, apart)
    assert of_together.loss == pytest.approx(of_apart.loss, abs=1e-6)
    assert of_together.auxiliary_loss == pytest.approx(of_apart.auxiliary_loss, abs=1e-6)
    for name, values in of_apart.tokens.items():
        torch.testing.assert_close(of_together.tokens[name], values, rtol=1e-5, atol=1e-5)
    assert (of_together.routing is None) == (of_apart.routing is None)
    if of_together.routing is not None and of_apart.routing is not None:
        # Every token counts, those that ran once for several sequences too.
        assert torch.equal(of_together.routing.load_YE, of_apart.routing.load_YE)
        assert of_together.routing.router_entropy() == pytest.approx(of_apart.routing.router_entropy(), abs=1e-6)
    if tokens_per_microbatch == 10_000:
        assert set(rows) == {shared.tokens - 2 * 5 - 2 * 6}


def test_of_shared_rows_the_first_sequences_routes_are_replayed(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    model, batch = tiny_model(), grouped(random_batch)
    routes_TYK, _ = own_routes(model, batch)
    apart = gradient_of(model, replace(batch, routes_TYK=routes_TYK, prefixes=None), cross_entropy, 10_000)[1]
    together = gradient_of(model, replace(batch, routes_TYK=routes_TYK), cross_entropy, 10_000)[1]
    torch.testing.assert_close(together.tokens["logprobs"], apart.tokens["logprobs"], rtol=1e-4, atol=1e-5)
    assert together.routing is not None
    assert together.routing.flips == 0
    other_TYK = routes_TYK.clone()
    place = 7 + 12 + 2  # a shared row of the third sequence, whose group the first leads
    other_TYK[place, 0, 0] = next(e for e in range(6) if e not in routes_TYK[place, 0].tolist())
    changed = gradient_of(model, replace(batch, routes_TYK=other_TYK), cross_entropy, 10_000)[1]
    assert torch.equal(changed.tokens["logprobs"], together.tokens["logprobs"])
    assert changed.routing is not None
    assert changed.routing.flips == 1  # and it is seen


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_activations_change_no_bit(family: str, random_batch: MakeBatch) -> None:
    model = tiny_family(family)
    model.config = model.config.model_copy(update={"router_aux_loss_coef": 0.5 if model.moe_layers() else 0.0})
    batch = grouped(random_batch)
    if model.moe_layers():
        batch = replace(batch, routes_TYK=own_routes(model, replace(batch, prefixes=None))[0])
    plain, of_plain = gradient_of(model, batch, cross_entropy, 40)
    model.checkpoint_activations = True
    again, of_again = gradient_of(model, batch, cross_entropy, 40)
    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient), name
    assert (of_again.loss, of_again.auxiliary_loss) == (of_plain.loss, of_plain.auxiliary_loss)
    if of_again.routing is not None and of_plain.routing is not None:
        # The second run of a block records nothing.
        assert torch.equal(of_again.routing.load_YE, of_plain.routing.load_YE)
        assert (of_again.routing.picks, of_again.routing.flips) == (of_plain.routing.picks, 0)


def test_checkpointing_keeps_less(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    model, batch = tiny_model(layers=6), random_batch([30, 30])

    def kept() -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        held = []  # what was kept must not be freed and its address taken again
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or pack(t), lambda t: t):
            score(model, batch, RouterTrace(), 1.0)
        return sum(sizes.values())

    before = kept()
    model.checkpoint_activations = True
    assert kept() < 0.25 * before


@pytest.mark.skipif(
    shutil.which(shlex.split(os.environ.get("CXX") or "g++")[0]) is None, reason="torch compiles with $CXX or g++"
)
def test_compiled_blocks_have_the_same_gradient(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    model = tiny_model(experts=0, layers=1)
    names = [name for name, _ in model.named_parameters()]
    plain, of_plain = gradient_of(model, random_batch(LENGTHS), cross_entropy, 40)
    model.compile_feed_forward()
    compiled, of_compiled = gradient_of(model, random_batch(LENGTHS), cross_entropy, 40)
    assert of_compiled.loss == pytest.approx(of_plain.loss, rel=1e-6)
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.blocks[0].ffn._compiled_call_impl is not None  # it is no plain call any more


def test_compiling_below_a_folder_with_a_space_is_refused(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__file__", "/home/me/my models/torch/__init__.py")
    with pytest.raises(UserError, match=r"model\.compile: .*'/home/me/my models/torch/lib', which has a space"):
        tiny_model(experts=0, layers=1).compile_feed_forward()


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_a_mixture_whose_layers_are_all_dense_trains_as_the_dense_model_that_it_is(
    tiny_model: MakeModel, random_batch: MakeBatch, coefficient: float
) -> None:
    model = tiny_model(dense_layers=(0, 1), router_aux_loss_coef=coefficient, router_bias_rate=coefficient)
    dense = tiny_model(experts=0)
    dense.load_state_dict(model.state_dict())
    batch = random_batch(LENGTHS)
    found, of_mixture = gradient_of(model, batch, cross_entropy, 30)
    expected, of_dense = gradient_of(dense, batch, cross_entropy, 30)
    assert found.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())
    assert (of_mixture.loss, of_mixture.routing, of_mixture.auxiliary_loss) == (of_dense.loss, None, 0.0)
    learner_of(model).optim_step()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_stays_near_fp32_and_learns(family: str, precision: Precision, random_batch: MakeBatch) -> None:
    batch = random_batch(LENGTHS)
    reference = learner_of(tiny_family(family), 30)
    learner = learner_of(cast(tiny_family(family), getattr(torch, precision)), 30)
    model = learner.model
    assert {p.dtype for n, p in model.named_parameters() if "router" not in n} == {getattr(torch, precision)}
    assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if "router" in n)
    assert model.rope_cos.dtype == torch.float32
    expected = reference.forward_backward(batch, cross_entropy).result()
    losses = []
    for _ in range(6):
        result = learner.forward_backward(batch, cross_entropy).result()
        losses.append(result.loss)
        if len(losses) == 1:
            assert result.tokens["logprobs"].dtype == result.tokens["entropy"].dtype == torch.float32
            near = (result.tokens["logprobs"] - expected.tokens["logprobs"]).abs()
            # Single tokens differ much where rounding picks another expert.
            assert near.median() < (0.3 if precision == "bfloat16" else 0.05)
            assert result.loss == pytest.approx(expected.loss, rel=0.05)
        learner.optim_step()
    assert losses[-1] < losses[0]


def own_routes(model: Transformer, batch: Batch) -> tuple[Tensor, RouterTrace]:
    trace = RouterTrace()
    with torch.no_grad():
        model(batch.inputs_T, batch.positions(), PackedAttention(batch.lengths, batch.inputs_T.device), trace)
    return trace.routes(), trace


def test_replaying_own_routes_changes_nothing(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    model, batch = tiny_model(), random_batch(LENGTHS)
    routes_TYK, _ = own_routes(model, batch)
    free, of_free = gradient_of(model, batch, cross_entropy, 20)
    replayed, of_replayed = gradient_of(model, replace(batch, routes_TYK=routes_TYK), cross_entropy, 20)
    assert torch.equal(of_free.tokens["logprobs"], of_replayed.tokens["logprobs"])
    for name, gradient in free.items():
        assert torch.equal(replayed[name], gradient), name
    assert of_replayed.routing is not None
    assert (of_replayed.routing.flips, of_replayed.routing.largest_flip_gap) == (0, 0.0)


def test_replaying_other_routes_is_seen(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    model, batch = tiny_model(), random_batch(LENGTHS)
    routes_TYK, trace = own_routes(model, batch)
    token = 12  # of the second sequence, past its prompt
    picks = routes_TYK[token, 1].tolist()
    unpicked = [e for e in range(6) if e not in picks]
    changed_TYK = routes_TYK.clone()
    changed_TYK[token, 1, 0] = unpicked[0]
    batch = replace(batch, routes_TYK=changed_TYK)
    learner = learner_of(model, 20)
    result = learner.forward_backward(batch, cross_entropy).result()
    scores_E = trace.scores_TE[1][token] + trace.biases_E[1]
    assert result.routing is not None
    assert result.routing.flips == 1
    assert result.routing.largest_flip_gap == pytest.approx(float(scores_E[picks[0]] - scores_E[unpicked[0]]), abs=1e-5)
    # What ran is what is counted, and what the log-probabilities come from. The last layer's change reaches its token alone.
    assert result.routing.load_YE[1, unpicked[0]] == (changed_TYK[:, 1] == unpicked[0]).sum()
    expected = logprobs_by_definition(model, batch).detach()
    differs = (result.tokens["logprobs"] - expected).abs() > 1e-3
    assert batch.scored_T.nonzero().flatten()[differs].tolist() == [token]
    torch.testing.assert_close(learner.logprobs(batch).result(), result.tokens["logprobs"], rtol=1e-5, atol=1e-5)


def test_a_dense_model_has_no_routing(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    learner = learner_of(tiny_model(experts=0))
    result = learner.forward_backward(random_batch(LENGTHS), cross_entropy).result()
    assert result.routing is None
    assert result.auxiliary_loss == 0.0
    assert learner.optim_step().result().grad_norm > 0


def test_a_step_moves_biases_by_all_the_load_since_the_last(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    learner = learner_of(tiny_model(router_bias_rate=0.01), 10)  # a micro-batch per sequence
    biases = [moe.router.bias for moe in learner.model.moe_layers()]
    for seeds in ((0, 1), (2,)):  # two passes before the first step, one before the second
        before = [bias.clone() for bias in biases]
        load_YE = torch.zeros(2, 6)
        for seed in seeds:
            batch = random_batch([9, 9, 4], seed)
            last = learner.forward_backward(batch.select([2])[0], cross_entropy).result().routing
            result = learner.forward_backward(batch.select([0, 1])[0], cross_entropy).result()
            assert last is not None
            assert result.routing is not None
            load_YE += last.load_YE + result.routing.load_YE
        learner.optim_step()
        for bias, was, load_E in zip(biases, before, load_YE, strict=True):
            expected = was + 0.01 * torch.sign(load_E.mean() - load_E)
            torch.testing.assert_close(bias, expected, rtol=0, atol=1e-7)


def test_a_step_reports_norm_and_rate_and_lowers_the_loss(tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    learner, batch = learner_of(tiny_model(), 20), random_batch(LENGTHS)
    losses = []
    for _ in range(5):
        losses.append(learner.forward_backward(batch, cross_entropy).result().loss)
        norm = torch.cat([g.flatten() for g in gradients(learner.model).values()]).norm().item()
        step = learner.optim_step().result()
        assert step.grad_norm == pytest.approx(norm, rel=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert step.learning_rate < 1e-2


class Receiver:
    def __init__(self) -> None:
        self.received: list[tuple[Transformer, int]] = []

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        with pytest.raises(StopIteration):
            coroutine.send(None)

    async def update_weights(self, source: Transformer, version: int) -> None:
        self.received.append((source, version))


def test_publishing_counts_versions(tiny_model: MakeModel) -> None:
    learner, receiver = learner_of(tiny_model()), Receiver()
    assert [learner.publish(receiver).result(), learner.publish(receiver).result()] == [1, 2]
    assert receiver.received == [(learner.model, 1), (learner.model, 2)]


def test_saved_and_loaded_it_goes_on_to_the_bit(tmp_path: Path, tiny_model: MakeModel, random_batch: MakeBatch) -> None:
    def step(learner: Learner, seed: int) -> float:
        loss = learner.forward_backward(random_batch(LENGTHS, seed), cross_entropy).result().loss
        learner.optim_step()
        return loss

    learner = learner_of(tiny_model(router_bias_rate=0.01))
    for seed in range(2):
        step(learner, seed)
    learner.save(tmp_path)
    resumed = learner_of(tiny_model(seed=5, router_bias_rate=0.01))
    resumed.load(tmp_path)
    for seed in range(2, 5):
        assert step(learner, seed) == step(resumed, seed)
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert resumed.optimizer.steps == 5


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path, tiny_model: MakeModel) -> None:
    learner_of(tiny_model()).save(tmp_path)
    with pytest.raises(UserError, match=r"config\.json: of another model .*: hidden_size = 32 where the model has 16$"):
        learner_of(tiny_model(hidden_size=16)).load(tmp_path)
