"""FP8 storage: by hand, against transformers' dequantisation, and in every family that is stored in it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, qwen3_moe
from family_cases.case import Case
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.families.fp8 import by_block, by_row
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FAMILIES = {case.config.model_type: case for case in reversed(CASES) if case.config.model_type != "gpt_oss"}


def compressed(strategy: str) -> dict[str, Any]:
    """As llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


def test_blocks_of_128_the_last_cut_off() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator) + 0.5
    ours = by_block(weight, scales)
    assert ours.dtype == torch.float32
    rows, columns = torch.arange(300) // 128, torch.arange(200) // 128
    assert torch.equal(ours, weight.float() * scales[rows][:, columns])
    assert torch.equal(by_row(weight, scales), ours)  # compressed-tensors' name for the same


def test_one_factor_for_a_row_and_for_the_whole() -> None:
    weight = torch.tensor([[1.0, -1.5], [448.0, 2.0**-9]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0], [0.375]], dtype=torch.bfloat16)
    assert by_row(weight, scales).tolist() == [[2.0, -3.0], [168.0, 0.375 * 2.0**-9]]
    assert by_row(weight, torch.tensor([0.5])).tolist() == [[0.5, -0.75], [224.0, 2.0**-10]]
    assert by_row(weight, torch.tensor(0.5)).tolist() == by_row(weight, torch.tensor([0.5])).tolist()
    for wrong in (torch.ones(2), torch.ones(3, 1), torch.ones(2, 2)):
        with pytest.raises(UserError, match=r"scales .* are not one for each 128 x 128 of \[2, 2\]"):
            by_row(weight, wrong)
    with pytest.raises(UserError, match=r"torch\.int8 \[2, 2\] beside scales is not a matrix in FP8"):
        by_row(weight.to(torch.int8), scales)


def quantise(directory: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Stores the matrices of attention and feed-forward in FP8; returns what all tensors then stand for."""
    tensors = load_file(directory / "model.safetensors")
    strategy = settings.get("config_groups", {}).get("group_0", {}).get("weights", {}).get("strategy", "block")
    plain = dict(tensors)
    for name, tensor in plain.items():
        # What releases keep in bf16: norms, embeddings, head and routers.
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name or ".gate." in name:
            continue
        rows, columns = tensor.shape
        spread = (128, 128) if strategy == "block" else (1, columns) if strategy == "channel" else (rows, columns)
        grid = [math.ceil(size / step) for size, step in zip(tensor.shape, spread, strict=True)]
        scales = (0.004 + 0.01 * torch.rand(grid, generator=torch.Generator().manual_seed(len(tensors)))).bfloat16()
        wide = scales.float().repeat_interleave(spread[0], 0).repeat_interleave(spread[1], 1)[:rows, :columns]
        tensors[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        plain[name] = tensors[name].float() * wide
        suffix = "_scale_inv" if settings["quant_method"] == "fp8" else "_scale"
        tensors[name + suffix] = scales.view(1) if strategy == "tensor" else scales
        if strategy == "tensor":  # releases of this kind mostly have a factor of the layer's inputs, too
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1, dtype=torch.bfloat16)
    assert len(tensors) > len(plain)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    return plain


@pytest.mark.parametrize(
    "settings",
    [BLOCKS, *map(compressed, ("channel", "tensor", "block"))],
    ids=["fp8", "by row", "by tensor", "by block"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_it_exactly(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    FAMILIES[family].make().save_pretrained(tmp_path)
    plain = quantise(tmp_path, settings)
    model = load_model(tmp_path)
    # Of the same decoder without quantisation, to the bit.
    (tmp_path / "plain").mkdir()
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(raw))
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    for name, tensor in load_model(tmp_path / "plain").state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    export_model(model, tmp_path / "export")
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    assert not any("scale" in name for name in load_file(tmp_path / "export" / "model.safetensors"))


@torch.no_grad()
def test_qwen3_moe_in_fp8_has_transformers_logits(tmp_path: Path) -> None:
    """At widths that fill blocks of 128, which transformers asks for."""
    case = qwen3_moe.CASES[0]
    widths = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 2}
    Case("wide", type(case.config)(**(case.config.to_dict() | widths)), case.model).make().save_pretrained(tmp_path)
    quantise(tmp_path, BLOCKS)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    model = load_model(tmp_path)
    ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(1))
    ours = model.logits(model(ids, torch.arange(60), PackedAttention([60], ids.device), RouterTrace()))
    torch.testing.assert_close(ours, reference(ids.unsqueeze(0)).logits[0], rtol=0, atol=1e-4)


def group(**weights: Any) -> dict[str, Any]:
    settings = compressed("channel")
    settings["config_groups"]["group_0"]["weights"] |= weights
    return settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method = 'gptq' is not supported, only 'fp8' or 'compressed-tensors'"),
        (BLOCKS | {"weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\] is not supported"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported, only 'e4m3'"),
        (compressed("channel") | {"format": "pack-quantized"}, "format = 'pack-quantized' is not supported"),
        (group(num_bits=4), "weights: num_bits = 4 is not supported, only 8"),
        (group(type="int"), "weights: type = 'int' is not supported"),
        (group(strategy="group"), "weights: strategy = 'group' is not supported"),
        (group(symmetric=False), "weights: symmetric = False is not supported"),
    ],
    ids=str,
)
def test_other_storage_is_refused_by_key_and_value(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    raw = FAMILIES["qwen3_moe"].config.to_dict() | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=rf"config\.json: qwen3_moe.*{message}"):
        load_model(tmp_path)
