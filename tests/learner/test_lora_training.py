"""The learner with an adapter: what it trains, writes, publishes and resumes, and that the base stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import UserError
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.learner.passes import batch_logprobs
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.peft_format import adapter_tensors
from nmoe.model.precision import cast
from nmoe.model.transformer import Transformer
from nmoe.types import Sampling

Make = Callable[..., Transformer]
SETTINGS = OptimizerSection(learning_rate=1e-2)


def learner(
    model: Transformer,
    targets: tuple[str, ...] = (),
    base: str = "runs/base",
    fingerprint: str = "f00d",
    alpha: float = 8.0,
) -> Learner:
    lora = Lora(model, LoraSettings(4, alpha), choose(model, targets), base, fingerprint).initialize(0)
    return Learner(model, SETTINGS, total_steps=10, tokens_per_microbatch=64, lora=lora)


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = (20, 9, 31)
    ids = torch.randint(48, (sum(lengths) + 1,), generator=generator)
    scored = torch.ones(60, dtype=torch.bool)
    return Batch(lengths, ids[:-1], ids[1:], scored, scored / 60)


def step(learner: Learner, seed: int = 0) -> float:
    loss = learner.forward_backward(batch(seed), cross_entropy).result().loss
    learner.optim_step()
    return loss


def adapter(learner: Learner) -> dict[str, Tensor]:
    assert learner.lora is not None
    return {name: tensor.clone() for name, tensor in adapter_tensors(learner.lora).items()}


def test_the_adapter_learns_and_the_base_stays(tiny_model: Make) -> None:
    model = tiny_model(router_bias_rate=0.1, router_aux_loss_coef=0.1)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    alone = batch_logprobs(model, batch(), 64, 1.0)
    trained = learner(model, ("q_proj", "v_proj", "experts.down_proj"))
    losses = [step(trained) for _ in range(10)]
    assert losses[-1] < losses[0] - 0.5
    assert trained.lora is not None
    assert (trained.logprobs(batch()).result() - alone).abs().mean() > 0.1
    with trained.lora.disabled():
        assert all(torch.equal(t, base[name]) for name, t in model.state_dict().items()), "router biases included"
        assert torch.equal(batch_logprobs(model, batch(), 64, 1.0), alone)


def test_the_first_step_is_that_of_adamw_on_the_adapter(tiny_model: Make) -> None:
    trained = learner(tiny_model())
    names = {name for name, _ in trained.model.named_parameters() if "adapter" in name}
    assert set(trained.optimizer.names) == names
    trained.forward_backward(batch(), cross_entropy)
    before = [(p.detach().clone(), p.grad.clone()) for p in trained.optimizer.parameters if p.grad is not None]
    assert len(before) == len(names)
    # B is zero at first, so A has no gradient and does not move; B moves by the learning rate, against its gradient's sign.
    trained.optim_step()
    for (value, gradient), parameter in zip(before, trained.optimizer.parameters, strict=True):
        moved = parameter.detach() - value
        expected = torch.where(gradient.abs() > 1e-4, -1e-2 * gradient.sign(), moved)
        torch.testing.assert_close(moved, expected, rtol=1e-2, atol=0)
    assert {bool(gradient.any()) for _, gradient in before} == {True, False}


def test_a_checkpoint_holds_the_adapter_and_a_reference_to_the_base(tiny_model: Make, tmp_path: Path) -> None:
    model = tiny_model()
    trained = learner(model)
    step(trained)
    trained.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
        "optimizer.json",
        "optimizer.safetensors",
    }
    base = {"path": "runs/base", "fingerprint": "f00d", "expert_profile": "none"}
    assert json.loads((tmp_path / "base.json").read_text()) == base
    # Four projections of two layers, A and B: [4, 32] and [outputs, 4].
    numbers = 2 * 4 * (4 * 32 + 32 + 16 + 16 + 32)
    assert sum(tensor.numel() for tensor in load_file(tmp_path / "adapter_model.safetensors").values()) == numbers
    state = load_file(tmp_path / "optimizer.safetensors")
    assert sum(tensor.numel() for name, tensor in state.items() if name.endswith("/exp_avg")) == numbers


def test_training_goes_on_to_the_bit(tiny_model: Make, tmp_path: Path) -> None:
    whole = learner(tiny_model())
    for seed in range(2):
        step(whole, seed)
    whole.save(tmp_path)
    for seed in range(2, 4):
        step(whole, seed)

    resumed = learner(tiny_model())
    resumed.load(tmp_path)
    for seed in range(2, 4):
        step(resumed, seed)
    for name, tensor in adapter(whole).items():
        assert torch.equal(adapter(resumed)[name], tensor)


def test_a_changed_base_or_another_choice_is_refused(tiny_model: Make, tmp_path: Path) -> None:
    trained = learner(tiny_model())
    step(trained)
    trained.save(tmp_path)
    other = learner(tiny_model(seed=1), base="runs/other", fingerprint="beef")
    before = adapter(other)
    with pytest.raises(UserError, match=r"beside the base runs/base .*; runs/other now holds another"):
        other.load(tmp_path)
    more = learner(tiny_model(), ("q_proj",))
    with pytest.raises(UserError, match=r"adapter_config\.json: has other targets, or another rank or scale"):
        more.load(tmp_path)
    scaled = learner(tiny_model(), alpha=4.0)
    with pytest.raises(UserError, match=r"adapter_config\.json: has other targets, or another rank or scale"):
        scaled.load(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter(other).items())


class Elsewhere:
    """An engine in another process: it has the base, and takes what it is sent."""

    def __init__(self) -> None:
        self.received: list[tuple[int, dict[str, Tensor]]] = []

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        with pytest.raises(StopIteration):
            coroutine.send(None)

    async def update_weights(self, source: Transformer | Lora, version: int) -> None:
        assert isinstance(source, Lora), "only the adapter moves"
        self.received.append((version, {name: tensor.clone() for name, tensor in adapter_tensors(source).items()}))


def test_publishing_moves_the_adapter_alone(tiny_model: Make) -> None:
    trained, engine = learner(tiny_model()), Elsewhere()
    trained.publish(engine)
    step(trained)
    trained.publish(engine)
    assert [version for version, _ in engine.received] == [1, 2]
    (_, first), (_, second) = engine.received
    assert all(torch.equal(tensor, second[name]) for name, tensor in adapter(trained).items())
    assert {name for name in first if not torch.equal(first[name], second[name])} == {
        name for name in first if "lora_B" in name
    }


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_the_engine_samples_from_base_and_adapter(tiny_model: Make, numerics: Any) -> None:
    model = tiny_model().set_numerics(numerics)
    trained = learner(model, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "experts.gate_up_proj"))
    for seed in range(3):
        step(trained, seed)
    engine = NativeEngine(model, max_sequences=8)
    trained.publish(engine)
    prompt = (5, 6, 7, 8, 9)
    samples = engine.run(engine.generate(Request(prompt, 6, Sampling(20, seed=1), "r")))
    assert {version for sample in samples for version in sample.versions} == {1}
    lengths = tuple(len(prompt) + len(sample.token_ids) - 1 for sample in samples)
    ids = [torch.tensor([*prompt, *sample.token_ids]) for sample in samples]
    scored = torch.cat([torch.arange(length) >= len(prompt) - 1 for length in lengths])
    inputs, targets = torch.cat([x[:-1] for x in ids]), torch.cat([x[1:] for x in ids])
    again = trained.logprobs(Batch(lengths, inputs, targets, scored, scored / 1.0)).result()
    sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    assert float((again - sampled).abs().mean()) <= (0 if numerics == "exact" else 1e-6)
    assert float((again - sampled).abs().max()) <= (0 if numerics == "exact" else 1e-4)
    assert trained.lora is not None
    with trained.lora.disabled():
        base = trained.logprobs(Batch(lengths, inputs, targets, scored, scored / 1.0)).result()
    assert float((base - sampled).abs().mean()) > 0.01, "the adapter took part"


def losses(learner: Learner) -> list[float]:
    return [step(learner) for _ in range(4)]


def test_checkpointed_activations_change_no_bit(tiny_model: Make) -> None:
    plain, checkpointed = learner(tiny_model()), learner(tiny_model())
    checkpointed.model.checkpoint_activations = True
    assert losses(checkpointed) == losses(plain)


def test_an_adapter_in_low_precision_is_trained_by_masters_in_fp32(tiny_model: Make, tmp_path: Path) -> None:
    """Each step is that of torch's AdamW on fp32 copies, given the gradients of the bf16 weights, which are the masters rounded."""
    low = learner(cast(tiny_model(), torch.bfloat16))
    alone = batch_logprobs(cast(tiny_model(), torch.bfloat16), batch(), 64, 1.0)
    before = low.forward_backward(batch(), cross_entropy).result().loss
    assert before == pytest.approx(-float(alone.double().mean()), rel=1e-6), "B is 0: the loss is the base's"
    low.optimizer.forget_gradient()
    optimizer = low.optimizer
    copies = [master.detach().clone().requires_grad_() for master in optimizer.masters]
    # The adapter's matrices decay as all matrices do.
    twin = torch.optim.AdamW(
        copies, SETTINGS.learning_rate, (SETTINGS.beta1, SETTINGS.beta2), SETTINGS.eps, SETTINGS.weight_decay
    )
    for number in range(4):
        low.forward_backward(batch(number), cross_entropy)
        for copy, master in zip(copies, optimizer.masters, strict=True):
            assert master.grad is not None
            copy.grad = master.grad.clone()
        torch.nn.utils.clip_grad_norm_(copies, SETTINGS.max_grad_norm)
        for group in twin.param_groups:
            group["lr"] = SETTINGS.learning_rate * optimizer.schedule.factor(number)
        twin.step()
        low.optim_step()
        for copy, master, parameter in zip(copies, optimizer.masters, optimizer.parameters, strict=True):
            assert (master.dtype, parameter.dtype) == (torch.float32, torch.bfloat16)
            torch.testing.assert_close(master, copy, rtol=1e-6, atol=1e-8)
            assert torch.equal(parameter, master.bfloat16())
    assert low.forward_backward(batch(), cross_entropy).result().loss < before - 0.05
    low.optimizer.forget_gradient()
    low.save(tmp_path)
    resumed = learner(cast(tiny_model(), torch.bfloat16))
    resumed.load(tmp_path)
    assert losses(resumed) == losses(low)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_an_adapter_in_low_precision_is_that_in_fp32(tiny_model: Make, seed: int) -> None:
    """At the same weights, without routed experts, of which one token may take others in bf16. Half a spacing of bf16 is 2^-9 of a
    value, and about 50 roundings follow each other through two layers and back: errors of 2^-9 * sqrt(50) = 1.4% that are
    independent, and here up to twice as much."""
    low, full = learner(cast(tiny_model(seed, experts=0), torch.bfloat16)), learner(tiny_model(seed, experts=0))
    step(low)  # so that B is not 0
    full.model.load_state_dict({name: tensor.float() for name, tensor in low.model.state_dict().items()})
    gradients = []
    for one in (low, full):
        one.forward_backward(batch(1), cross_entropy)
        gradients.append(torch.cat([m.grad.flatten() for m in one.optimizer.masters if m.grad is not None]))
    assert float((gradients[0] - gradients[1]).norm()) <= 2 * 50**0.5 * 2**-9 * float(gradients[1].norm())
