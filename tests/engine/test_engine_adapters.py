"""Several adapters over one base, against engines that have one adapter alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES

from nmoe.engine.api import Delta, Request
from nmoe.engine.native.adapters import AdapterEngines
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.engine.remote.wire import encode_request
from nmoe.engine.server.requests import UnknownModelError, decode_request
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.peft_format import save_adapter
from nmoe.model.policy import load_adapters
from nmoe.model.transformer import Transformer
from nmoe.types import Sample

MakeRequest = Callable[..., Request]
BASE = ModelConfig(**FAMILIES["qwen3_moe"])
# Ranks and places differ, so that attaching one leaves nothing of another.
SETTINGS = {
    "narrow": LoraSettings(2, 8.0, targets=("q_proj",)),
    "wide": LoraSettings(5, 9.0, targets=("o_proj", "experts.gate_up_proj")),
}


@pytest.fixture
def model() -> Transformer:
    return Transformer(BASE).initialize(0).requires_grad_(False).set_numerics("exact")


def adapted(model: Transformer, name: str) -> Lora:
    """An adapter with a B that changes every token, attached."""
    settings = SETTINGS[name]
    lora = Lora(model, settings, choose(model, settings.targets), "base", "f").initialize(len(name))
    generator = torch.Generator().manual_seed(len(name))
    for site in lora.sites:
        b = lora.part(site)[1]
        b.copy_(torch.randn(b.shape, generator=generator) * 0.3)
    return lora


def both(model: Transformer) -> dict[str, Lora]:
    loras = {}
    for name in SETTINGS:
        loras[name] = adapted(model, name)
        loras[name].detach()
    return loras


def run(engine: LLMEngine | AdapterEngines) -> None:
    while not engine.idle:
        engine.step()


def columns(samples: list[Sample | None]) -> list[tuple[list[int], list[float], list[int]]]:
    assert None not in samples
    return [(one.token_ids, one.logprobs, one.routes.tolist()) for one in samples if one is not None]


def alone(name: str | None, request: Request) -> list[tuple[list[int], list[float], list[int]]]:
    """The samples of a server whose only model is the base, or this adapter on it."""
    model = Transformer(BASE).initialize(0).requires_grad_(False).set_numerics("exact")
    if name is not None:
        adapted(model, name)
    engine = LLMEngine(model, 8)
    group = engine.add(replace(request, adapter=None))
    run(engine)
    return columns(group.samples)


def test_each_adapter_samples_as_alone(model: Transformer, request_of: MakeRequest) -> None:
    """All at once, one prompt for all, and once more where each finds its own prefix again."""
    engine = AdapterEngines(model, 4, 0, both(model))
    asked = request_of("r", 40, 2, 12)
    expected = {name: alone(name, asked) for name in (None, *SETTINGS)}
    assert len({str(one) for one in expected.values()}) == 3
    for turn in range(2):
        groups = {
            name: engine.add(replace(asked, adapter=name, request_id=f"{name}/{turn}")) for name in (None, *SETTINGS)
        }
        run(engine)
        for name, group in groups.items():
            assert columns(group.samples) == expected[name]
    assert engine.stats().prefix_hit_tokens == 3 * 32  # two whole blocks of each, in the second turn


def test_the_model_is_the_base_between_steps(model: Transformer, request_of: MakeRequest) -> None:
    names = [name for name, _ in model.named_parameters()]
    engine = AdapterEngines(model, 4, 0, both(model))
    for name in (None, *SETTINGS):
        engine.add(replace(request_of(f"{name}", 5, 1, 9), adapter=name))
    while not engine.idle:
        engine.step()
        assert [name for name, _ in model.named_parameters()] == names


def test_no_adapter_starves(model: Transformer, request_of: MakeRequest) -> None:
    """Beside many sequences of one adapter, a request of another gets every second step."""
    engine = AdapterEngines(model, 8, 0, both(model))
    heard: dict[str | None, list[Delta]] = {"narrow": [], "wide": []}
    engine.add(replace(request_of("many", 5, 8, 50), adapter="narrow"), heard["narrow"].extend)
    engine.step()
    engine.add(replace(request_of("one", 5, 1, 20), adapter="wide"), heard["wide"].extend)
    before = len(heard["narrow"])
    for _ in range(20):
        engine.step()
    # The first step of a request samples two tokens.
    assert len(heard["wide"]) == 11
    assert len(heard["narrow"]) - before == 10 * 8


def test_prompts_come_in_pieces_beside_the_sequences_of_another(model: Transformer, request_of: MakeRequest) -> None:
    engine = AdapterEngines(model, 4, 0, both(model), beside_tokens=7)
    heard: dict[str | None, list[Delta]] = {"narrow": [], "wide": []}
    engine.add(replace(request_of("runs", 5, 1, 50), adapter="narrow"), heard["narrow"].extend)
    engine.step()
    engine.add(replace(request_of("comes", 40, 1, 1), adapter="wide"), heard["wide"].extend)
    for _ in range(11):
        assert not heard["wide"]
        engine.step()
    assert len(heard["wide"]) == 1  # after five pieces of 7 tokens and one of 5
    assert len(heard["narrow"]) == 2 + 5


def test_likelihoods_are_of_the_adapter_that_is_asked_for(model: Transformer) -> None:
    loras, ids = both(model), [5, 9, 2, 44, 17, 3]
    engine = NativeEngine(model, 4, adapters=loras)
    assert engine.adapters == ("narrow", "wide")

    async def scored(of: NativeEngine, adapters: tuple[str | None, ...]) -> list[object]:
        asked = [
            *(of.likelihoods(ids, top=2, adapter=adapter) for adapter in adapters),
            *(of.score(ids, adapter=adapter) for adapter in adapters),
        ]
        return list(await asyncio.gather(*asked))

    found = engine.run(scored(engine, ("wide", None)))
    expected = []
    for name in ("wide", None):
        with loras[name].attached() if name else torch.no_grad():
            own = NativeEngine(model, 4)
            expected.append(own.run(scored(own, (None,))))
    assert found == [expected[0][0], expected[1][0], expected[0][1], expected[1][1]]
    assert found[0] != found[1]


def test_a_sample_of_an_adapter_is_aborted_and_an_unknown_adapter_refused(
    model: Transformer, request_of: MakeRequest
) -> None:
    engine = AdapterEngines(model, 4, 0, both(model))
    group = engine.add(replace(request_of("a", 5, 2, 30), adapter="wide"))
    with pytest.raises(UserError, match="request a: another request of this id is running"):
        engine.add(request_of("a", 5, 2, 30))
    with pytest.raises(UserError, match="there is no adapter 'other'; the adapters are narrow, wide"):
        engine.add(replace(request_of("b", 5, 2, 30), adapter="other"))
    with pytest.raises(UserError, match="there is no adapter 'wide'; the engine samples from one model"):
        LLMEngine(model, 4).add(replace(request_of("b", 5, 2, 30), adapter="wide"))
    engine.step()
    assert engine.abort("a", 1) == []
    assert engine.abort("a") == [group]
    assert engine.idle
    assert engine.stats().cache_use == 0


def test_the_cache_is_divided(model: Transformer) -> None:
    alone_has = LLMEngine(model, 4, 3 * 2**20).scheduler.blocks.blocks
    parts = AdapterEngines(model, 4, 9 * 2**20, both(model))._engines.values()
    assert {part.scheduler.blocks.blocks for part in parts} == {alone_has}


def test_the_token_route_takes_an_adapter_by_its_name(request_of: MakeRequest) -> None:
    request = replace(request_of("a", 5, 1, 9), adapter="wide")
    body = encode_request(request)
    assert decode_request(body, ("narrow", "wide")) == (request, False)
    assert decode_request(body, names=("wide",)) == (replace(request, adapter=None), False)
    with pytest.raises(UnknownModelError, match="model = 'wide': does not exist; there is base, narrow"):
        decode_request(body, ("narrow",), ("base",))
    with pytest.raises(UnknownModelError, match="leave it out"):
        decode_request(body)


def test_adapters_are_loaded_beside_each_other(model: Transformer, tmp_path: Path, request_of: MakeRequest) -> None:
    directories: Mapping[str, Path] = {name: tmp_path / name for name in SETTINGS}
    for name, directory in directories.items():
        directory.mkdir()
        source = Transformer(BASE).initialize(0)
        save_adapter(adapted(source, name), directory)
    engine = AdapterEngines(model, 4, 0, load_adapters(model, tmp_path / "base", directories, "f"))
    for name in SETTINGS:
        group = engine.add(replace(request_of("a", 9, 1, 9), adapter=name))
        run(engine)
        assert columns(group.samples) == alone(name, request_of("a", 9, 1, 9))
    with pytest.raises(UserError, match="holds no adapter"):
        load_adapters(model, tmp_path, {"none": tmp_path}, "f")
    with pytest.raises(UserError, match=r"trained beside weights with the fingerprint f; .* has another"):
        load_adapters(model, tmp_path, directories, "another")
    adapted(model, "wide")
    with pytest.raises(UserError, match="is an adapter itself"):
        load_adapters(model, tmp_path, directories, "f")
