"""How often the host waits for an accelerator, counted on the fake device: every wait idles it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from fake_device import DEVICE, FakeKind, fake_device
from tiny_models import FAMILIES

from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Delta, Request
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.config import ModelConfig, Numerics
from nmoe.model.idle_threads import IDLE
from nmoe.model.transformer import Transformer
from nmoe.types import Sample, Sampling


def model(**changes: object) -> Transformer:
    return Transformer(ModelConfig(**FAMILIES["qwen3_moe"] | changes)).initialize(0)  # type: ignore[arg-type]


def waits(kind: FakeKind) -> int:
    return kind.waits.total() + kind.calls["synchronize"]


REQUESTS = {
    "plain": Sampling(12, seed=3),
    "with temperature": Sampling(12, temperature=0.7, seed=3),
    "nucleus": Sampling(12, top_p=0.8, top_k=9, seed=3),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_decode_step_waits_a_fixed_number_of_times(name: str) -> None:
    """Whatever the number of rows, streamed ones included: to see that logits are finite, and for what was sampled. Kept ids are
    asked for their number first, and then fetched."""

    def sampled(engine: LLMEngine, after: Callable[[], None]) -> tuple[list[Sample | None], list[Delta]]:
        deltas: list[Delta] = []
        group = engine.add(Request((5, 6, 7), 6, REQUESTS[name], "six"), deltas.extend)
        while not engine.idle:
            engine.step()
            after()
        return group.samples, deltas

    expected = sampled(LLMEngine(model(), 8), lambda: None)
    with fake_device() as kind:
        engine = LLMEngine(model().to(DEVICE), 8)
        counts: list[int] = []
        found = sampled(engine, lambda: counts.append(waits(kind)))
        per_step = {later - earlier for earlier, later in pairwise(counts[1:-1])}
        assert per_step == {4 if name == "nucleus" else 2}, kind.waits
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine is not None
        assert theirs is not None
        assert (mine.token_ids, mine.kept_ids) == (theirs.token_ids, theirs.kept_ids)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert [(d.token_id, d.finish_reason) for d in found[1]] == [(d.token_id, d.finish_reason) for d in expected[1]]


def batch(lengths: Sequence[int]) -> Batch:
    tokens = sum(lengths)
    ids = torch.randint(48, (2, tokens), generator=torch.Generator().manual_seed(0))
    scored_T = torch.arange(tokens) % 3 > 0
    return Batch(tuple(lengths), ids[0], ids[1], scored_T, scored_T / scored_T.sum())


@pytest.mark.parametrize("layers", [1, 3])
def test_a_pass_waits_once_for_its_columns_and_its_routing(layers: int) -> None:
    settings = OptimizerSection(learning_rate=1e-3)
    expected = Learner(model(layers=layers), settings, 4, 4096)
    theirs = expected.forward_backward(batch([7, 5, 7]), cross_entropy).result()
    with fake_device() as kind:
        learner = Learner(model(layers=layers).to(DEVICE), settings, 4, 4096)
        before = Counter(kind.waits), kind.calls["synchronize"]
        mine = learner.forward_backward(batch([7, 5, 7]), cross_entropy).result()
        assert kind.calls["synchronize"] - before[1] == 1
        assert kind.waits - before[0] == Counter()
        learner.optim_step().result()
        assert (kind.waits - before[0]).total() == 1, "the gradient's norm"
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    torch.testing.assert_close(mine.tokens["logprobs"], theirs.tokens["logprobs"], rtol=0, atol=1e-5)
    assert mine.routing is not None
    assert theirs.routing is not None
    assert torch.equal(mine.routing.load_YE, theirs.routing.load_YE)
    assert mine.routing.router_entropy() == pytest.approx(theirs.routing.router_entropy(), rel=1e-5)


def test_what_others_use_of_the_cores_is_looked_at_on_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(IDLE, "look", lambda: looks.append(None))

    def looked(one: Transformer) -> tuple[float, int]:
        looks.clear()
        engine = LLMEngine(one, 8)
        engine.add(Request((5, 6, 7), 2, Sampling(4, seed=3), "two"))
        while not engine.idle:
            engine.step()
        per_step = len(looks) / engine.scheduler.steps
        looks.clear()
        Learner(one, OptimizerSection(), 4, 4096).forward_backward(batch([7, 5]), cross_entropy).result()
        return per_step, len(looks)

    assert looked(model()) == (1, 1)  # once in each step of the engine, and once in a pass of one micro-batch
    with fake_device():
        assert looked(model().to(DEVICE)) == (0, 0)


@pytest.mark.parametrize(("family", "numerics"), [*((family, "fast") for family in FAMILIES), ("llama", "exact")])
def test_every_family_decodes_on_a_device_what_it_does_on_the_host(family: str, numerics: Numerics) -> None:
    """Long prompts in chunks, a prefix found again, and windows passed."""

    def sampled(engine: LLMEngine) -> list[tuple[list[int], list[float]]]:
        found = []
        for at, tokens in enumerate((30, 34)):
            group = engine.add(Request(tuple(range(3, 3 + tokens)), 2, Sampling(10, seed=at), str(at)))
            while not engine.idle:
                engine.step()
            found += [(sample.token_ids, sample.logprobs) for sample in group.samples if sample is not None]
        return found

    config = ModelConfig(**FAMILIES[family])
    own = Transformer(config).initialize(0).set_numerics(numerics)
    expected = sampled(LLMEngine(own, 4, prefill_tokens=16))
    with fake_device():
        there = Transformer(config).initialize(0).set_numerics(numerics).to(DEVICE)
        found = sampled(LLMEngine(there, 4, prefill_tokens=16))
    assert len(found) == 4
    for (ids, logprobs), (their_ids, their_logprobs) in zip(found, expected, strict=True):
        assert ids == their_ids
        assert logprobs == pytest.approx(their_logprobs, abs=1e-4)
