"""Models of Tinker's clients in this process: what loading and failures leave, with weights in fp32 and in bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nmoe.errors import UserError
from nmoe.learner.objectives import Outputs, Scored, cross_entropy
from nmoe.model.checkpoint import fingerprint, load_model
from nmoe.model.lora import Lora
from nmoe.serve.tinker import models
from nmoe.serve.tinker.data import Datum, PassRequest
from nmoe.serve.tinker.messages import message
from nmoe.serve.tinker.models import TrainedModel
from nmoe.serve.tinker.weights import Base, Shape, new_weights, read_values, shape_of

SHAPE, WHOLE = Shape(4, seed=1), Shape(0)
PARAMS = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


def base_in(checkpoint: Path, dtype: torch.dtype) -> Base:
    return Base(load_model(checkpoint, dtype).requires_grad_(False), "tiny", checkpoint, fingerprint(checkpoint))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def base(request: pytest.FixtureRequest, checkpoint: Path) -> Base:
    return base_in(checkpoint, request.param)


@pytest.fixture(params=[SHAPE, WHOLE], ids=["adapter", "whole"])
def shape(request: pytest.FixtureRequest) -> Shape:
    shape: Shape = request.param
    return shape


def request(*starts: int, tokens: int = 6) -> PassRequest:
    """Returns a pass over sequences of tokens that count up from each start."""
    data = []
    for start in starts:
        ids = np.arange(start, start + tokens, dtype=np.int32) % 200
        data.append(Datum(ids, {"target_tokens": (ids + 1).astype(np.int64), "weights": np.ones(tokens, np.float32)}))
    return PassRequest("model", 1, tuple(data), "cross_entropy", {}, forward_only=False)


def loss_of(model: TrainedModel, asked: PassRequest) -> float:
    reply = message("ForwardBackwardOutput").FromString(model.run(asked, cross_entropy))
    return float(reply.metrics["loss:sum"])


def step(model: TrainedModel, **changed: float) -> float:
    return float(model.step({**PARAMS, **changed})["metrics"]["grad_norm"])


def trained(model: TrainedModel, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(loss_of(model, request(40)))
        step(model)
    return losses


def values(model: TrainedModel) -> list[Tensor]:
    return [value.float().clone() for value in model.values()]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_loaded_state_goes_on_where_it_was(base: Base, shape: Shape, tmp_path: Path) -> None:
    """The masters of bf16 weights are those loaded, too: a step with rate 0 changes nothing."""
    model = TrainedModel(base, shape)
    trained(model, 2)
    model.save(tmp_path)
    saved = values(model)
    ahead = trained(model, 3)
    again = TrainedModel(base, shape, tmp_path, optimizer=True)
    assert equal(values(again), saved)
    assert trained(again, 3) == ahead
    alone = TrainedModel(base, shape, tmp_path)
    assert loss_of(alone, request(40)) == ahead[0]
    step(alone, learning_rate=0.0)
    assert equal(values(alone), saved)
    assert trained(alone, 2)[1] != ahead[1], "its moments are new"


def test_a_model_that_is_loaded_has_no_gradient_of_the_one_before(base: Base, shape: Shape, tmp_path: Path) -> None:
    model = TrainedModel(base, shape)
    trained(model, 1)
    model.save(tmp_path)
    loss_of(model, request(40))
    once = step(model)
    model = TrainedModel(base, shape, tmp_path)
    loss_of(model, request(40))
    model = TrainedModel(base, shape, tmp_path)
    loss_of(model, request(40))
    assert step(model) == once


def test_long_passes_are_the_sums_of_their_sequences(checkpoint: Path) -> None:
    """Three sequences of 3,000 tokens are more than a micro-batch."""
    base = base_in(checkpoint, torch.float32)
    whole, parts = TrainedModel(base, SHAPE), TrainedModel(base, SHAPE)
    trained(whole, 1), trained(parts, 1)
    found = loss_of(whole, request(40, 60, 80, tokens=3000))
    assert found == pytest.approx(sum(loss_of(parts, request(start, tokens=3000)) for start in (40, 60, 80)), rel=1e-5)
    assert step(whole) == pytest.approx(step(parts), rel=1e-3)


def test_a_pass_that_breaks_off_adds_nothing(base: Base, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_TOKENS_PER_MICROBATCH", 8)
    plain, model = TrainedModel(base, shape), TrainedModel(base, shape)
    asked = request(40, 60, 80)
    calls = 0

    def breaks(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise MemoryError
        return cross_entropy(outputs, scored)

    with pytest.raises(MemoryError):
        model.run(asked, breaks)
    assert calls == 3, "two micro-batches went well"
    loss_of(model, request(7)), loss_of(plain, request(7))
    with pytest.raises(MemoryError):
        model.run(asked, breaks)
    loss_of(model, asked), loss_of(plain, asked)
    assert step(model) == step(plain)


def test_a_load_that_fails_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    base = base_in(checkpoint, torch.float32)
    other = tmp_path / "other"
    other.mkdir()
    TrainedModel(base, replace(SHAPE, rank=2)).save(other)
    with pytest.raises(UserError, match="another rank"):
        TrainedModel(base, SHAPE, other)
    (other / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="missing or torn"):
        TrainedModel(base, replace(SHAPE, rank=2), other, optimizer=True)
    assert not any("adapter" in name for name, _ in base.model.named_parameters()), "nothing stays attached"
    moved = replace(base, fingerprint="of other weights")
    with pytest.raises(UserError, match="trained beside the base"):
        read_values(moved, other)
    with pytest.raises(UserError, match="need one rank"):
        uneven(base)
    assert not any("adapter" in name for name, _ in base.model.named_parameters())


def test_all_weights_are_trained_as_transformers_has_them(checkpoint: Path, tmp_path: Path) -> None:
    """Loss and gradient are those of transformers' model, which also reads what is saved to sample from; the base stays."""
    base = base_in(checkpoint, torch.float32)
    before = [one.clone() for one in base.model.parameters()]
    model, asked = TrainedModel(base, WHOLE), request(40, 60)

    def theirs(directory: Path) -> tuple[float, Any]:
        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = torch.tensor([[*one.token_ids, one.token_ids[-1] + 1] for one in asked.data])
        lp = loaded(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
        (-lp.sum()).backward()
        return -float(lp.sum().detach()), torch.nn.utils.get_total_norm(
            [one.grad for one in loaded.parameters() if one.grad is not None]
        )

    loss, norm = theirs(checkpoint)
    assert loss_of(model, asked) == pytest.approx(loss, rel=1e-5)
    assert step(model) == pytest.approx(float(norm), rel=1e-4), "nothing but the client's loss is trained on"
    model.save_for_sampling(tmp_path)
    after, _ = theirs(tmp_path)
    assert loss_of(model, asked) == pytest.approx(after, rel=1e-5)
    assert after < loss - 0.1
    assert model.learner.model.config == base.model.config, "what is saved has the base's settings"
    assert all(torch.equal(one, other) for one, other in zip(base.model.parameters(), before, strict=True))
    shape, saved = read_values(base, tmp_path)
    assert shape == shape_of(tmp_path) == WHOLE
    assert equal(saved, model.values())
    with pytest.raises(UserError, match="of another shape"):
        TrainedModel(base, SHAPE, tmp_path)


def uneven(base: Base) -> None:
    """Makes an adapter whose projections of one matrix have two ranks."""
    lora = new_weights(base, SHAPE)
    assert isinstance(lora, Lora)
    settings = replace(lora.settings, rank_pattern={"layers.1.self_attn.k_proj": 2})
    type(lora)(base.model, settings, lora.sites, "base", "fingerprint")
