"""The parts of the vLLM plugin that need no vLLM: what is refused, and adapters added to a base.

`.ci/check_publishing.py` holds the rest against a server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import DENSE
from torch import Tensor

from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.peft_format import save_adapter
from nmoe.model.transformer import Transformer

sys.path.append(str(Path(__file__).parents[2] / "plugins/vllm"))

from nmoe_vllm.adapters import merged
from nmoe_vllm.checks import check, digest
from nmoe_vllm.guard import Guard

MOE = DENSE | {"experts": 3, "experts_per_token": 2, "expert_width": 16}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def test_a_digest_is_that_of_the_bytes_in_order() -> None:
    assert digest(torch.tensor([1.0, -2.0])) == hashlib.sha256(struct.pack("<2f", 1.0, -2.0)).hexdigest()
    assert digest(torch.tensor([1.0], dtype=torch.bfloat16)) == hashlib.sha256(b"\x80\x3f").hexdigest()
    assert digest(torch.tensor(7)) == hashlib.sha256(struct.pack("<q", 7)).hexdigest()
    turned = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).T
    assert digest(turned) == hashlib.sha256(bytes([1, 3, 2, 4])).hexdigest()


MODEL = {"a": torch.zeros(2), "b": torch.ones(2), "head": torch.ones(3)}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a"], "1 names came: b is missing."),
        ([], "0 names came: a is missing; b is missing."),
        (["a", "b", "c"], "3 names came: c is not of this model."),
        (["a", "b", "a"], "3 names came: a came twice."),
    ],
)
def test_a_set_of_names_that_is_not_the_models_is_refused(names: list[str], problem: str) -> None:
    tensors = {name: MODEL.get(name, torch.zeros(1)) for name in names}
    with pytest.raises(ValueError, match="weights refused") as refused:
        check(tensors, names, [digest(tensors[name]) for name in names], MODEL, {"head"})
    assert problem in str(refused.value)


@pytest.mark.parametrize("names", [["a", "b"], ["head", "b", "a"]])
def test_a_tied_head_may_come_or_be_left_out(names: list[str]) -> None:
    check({name: MODEL[name] for name in names}, names, [digest(MODEL[name]) for name in names], MODEL, {"head"})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda names, sums: sums.reverse(), "a has another digest than was sent; b has another digest than was sent."),
        (lambda names, sums: sums.pop(), "b came without a digest."),
        (lambda names, sums: (names.append("head"), sums.append("")), "head is named, but did not come."),
        (lambda names, sums: (names.pop(), sums.pop()), "b is missing; b came, but is not named."),
    ],
)
def test_tensors_that_are_not_those_that_were_sent_are_refused(change: Any, problem: str) -> None:
    tensors = {"a": torch.zeros(2), "b": torch.ones(2)}
    names, sums = list(tensors), [digest(tensor) for tensor in tensors.values()]
    check(tensors, names, sums, MODEL, {"head"})
    change(names, sums)
    with pytest.raises(ValueError, match="weights refused") as refused:
        check(tensors, names, sums, MODEL, {"head"})
    assert f": {problem}" in str(refused.value)


def test_an_adapter_is_compared_with_what_was_sent_alone() -> None:
    adapter = {"a": torch.zeros(2)}
    check(adapter, ["a"], [digest(adapter["a"])], adapter)
    with pytest.raises(ValueError, match="1 names came: a is missing; b is not of this model; b is named, but did not"):
        check(adapter, ["b"], [digest(adapter["a"])], adapter)


def test_one_flipped_bit_is_refused() -> None:
    sent = torch.arange(64, dtype=torch.float32)
    came = sent.clone()
    came.view(torch.int32)[17] ^= 1
    with pytest.raises(ValueError, match=r": w has another digest than was sent\."):
        check({"w": came}, ["w"], [digest(sent)], {"w": sent})


def test_another_shape_is_refused() -> None:
    turned = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r": a has another shape: \[3, 2\], and the model \[2, 3\]\."):
        check({"a": turned}, ["a"], [digest(turned)], {"a": torch.ones(2, 3)})


def request_of(guard: Guard, path: str, headers: list[tuple[bytes, bytes]]) -> int:
    """Returns the status of the reply to a request."""
    replies: list[Any] = []

    async def send(message: Any) -> None:
        replies.append(message)

    asyncio.run(guard({"type": "http", "path": path, "headers": headers}, None, send))  # type: ignore[arg-type]
    return int(replies[0]["status"])


@pytest.mark.parametrize("path", ["/update_weights", "/collective_rpc", "/v1/completions", "/health/../pause"])
def test_every_route_but_health_asks_for_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for empty in (None, "", " "):
        if empty is not None:
            monkeypatch.setenv("VLLM_API_KEY", empty)
        with pytest.raises(ValueError, match="VLLM_API_KEY is missing or empty: set it to a secret key"):
            Guard(app)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    guard = Guard(app)
    assert request_of(guard, "/health", []) == 200
    assert request_of(guard, path, [(b"authorization", b"Bearer secret")]) == 200
    for wrong in (
        [],
        [(b"authorization", b"Bearer secre")],
        [(b"authorization", b"secret")],
        [(b"cookie", b"Bearer secret")],
    ):
        assert request_of(guard, path, wrong) == 401


def adapted(shape: dict[str, Any], settings: LoraSettings, place: Path) -> tuple[dict[str, Tensor], Lora, Path]:
    """Returns the base's exported tensors, an adapter with random values, and the directory of the adapter."""
    model = Transformer(ModelConfig(**shape)).initialize(0).requires_grad_(False)
    export_model(model, place / "base")
    lora = Lora(model, settings, choose(model, settings.targets), "base", "x").initialize(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    (place / "adapter").mkdir()
    save_adapter(lora, place / "adapter")
    return load_file(place / "base/model.safetensors"), lora, place / "adapter"


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        (DENSE, LoraSettings(2, 3.0)),
        (DENSE | {"tie_embeddings": True}, LoraSettings(3, 3.0, True, ("down_proj",))),
        (MOE, LoraSettings(2, 5.0, False, ("q_proj", "k_proj", "v_proj", "o_proj", *EXPERTS))),
        (MOE, LoraSettings(2, 5.0, False, EXPERTS[:1])),
        (MOE, LoraSettings(2, 5.0, True, EXPERTS[1:])),
        (MOE, LoraSettings(2, 5.0, True, EXPERTS, {}, {r"experts\.down_proj": 1.0, "layers.0.*gate_up_proj": 2.0})),
    ],
)
def test_an_adapter_is_added_as_an_export_adds_it(
    shape: dict[str, Any], settings: LoraSettings, tmp_path: Path
) -> None:
    base, lora, directory = adapted(shape, settings, tmp_path)
    before = {name: tensor.clone() for name, tensor in base.items()}
    config = json.loads((directory / "adapter_config.json").read_text())
    total = merged(base, load_file(directory / "adapter_model.safetensors"), config)
    with lora.merged() as model:
        export_model(model, tmp_path / "merged")
    wanted = load_file(tmp_path / "merged/model.safetensors")
    assert total.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(total[name], tensor, rtol=1e-5, atol=1e-5)
        assert torch.equal(base[name], before[name])
    assert any((tensor - base[name]).abs().max() > 0.1 for name, tensor in total.items())


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    base, _, directory = adapted(MOE, LoraSettings(2, 5.0, False, ("o_proj", *EXPERTS)), tmp_path)
    config = json.loads((directory / "adapter_config.json").read_text())
    adapter = load_file(directory / "adapter_model.safetensors")
    o_proj = "base_model.model.model.layers.0.self_attn.o_proj"
    with pytest.raises(ValueError, match=r"o_proj.lora_A.weight has no counterpart"):
        merged(base, {name: adapter[name] for name in adapter if name != f"{o_proj}.lora_B.weight"}, config)
    with pytest.raises(ValueError, match=r"an update of shape \[31, 32\] for model.layers.0.self_attn.o_proj.weight"):
        merged(base, adapter | {f"{o_proj}.lora_B.weight": adapter[f"{o_proj}.lora_B.weight"][:31]}, config)
    without = {name: tensor for name, tensor in base.items() if ".experts." not in name}
    with pytest.raises(
        ValueError, match=r"the base has no weights of the name model.layers.\d.mlp.experts.0.gate_proj"
    ):
        merged(without, adapter, config)
    with pytest.raises(ValueError, match="it has no tensors"):
        merged(base, {}, config)
    with pytest.raises(ValueError, match="not a plain LoRA"):
        merged(base, adapter, config | {"use_dora": True})
