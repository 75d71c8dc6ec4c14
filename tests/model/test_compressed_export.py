"""Exported experts in a profile: compressed-tensors and our own reader find the numbers that were trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from tiny_models import tiny_family
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model, save_model
from nmoe.model.expert_profile import dequantised
from nmoe.model.families.compressed import from_packed
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.runs.export import export_checkpoint

EXPERTS = ("gate_up", "down")


def exported(profile: str, directory: Path, family: str = "qwen3_moe") -> Transformer:
    model = set_expert_profile(tiny_family(family), profile)
    export_model(model, directory)
    return model


def trained(model: Transformer, layer: int, expert: int) -> dict[str, Tensor]:
    """The projections of an expert as they were multiplied, `[outputs, inputs]`."""
    moe = model.moe_layers()[layer]
    with torch.no_grad():
        gate_up, down = moe._projections(torch.empty(0), torch.float32)
    gate, up = gate_up[expert].chunk(2, dim=1)
    return {"gate_proj": gate.t(), "up_proj": up.t(), "down_proj": down[expert].t()}


@pytest.mark.parametrize("profile", ["fp8", "nvfp4"])
def test_compressed_tensors_reads_the_numbers_that_were_trained(profile: str, tmp_path: Path) -> None:
    model = exported(profile, tmp_path)
    settings = QuantizationConfig.model_validate(
        json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    )
    scheme = settings.config_groups["group_0"]
    reader = BaseCompressor.get_value_from_registry(settings.format)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for expert in range(6):
            for name, weight_ND in trained(model, layer, expert).items():
                prefix = f"model.layers.{layer}.mlp.experts.{expert}.{name}."
                own = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
                assert set(own) == set(reader.compression_param_names(scheme))
                read_ND = reader.decompress(own, scheme)["weight"]
                # Its NVFP4 is read into bf16.
                assert torch.equal(read_ND, weight_ND.to(torch.bfloat16 if profile == "nvfp4" else torch.float32))


@pytest.mark.parametrize("profile", ["fp8", "nvfp4"])
def test_all_but_experts_is_ignored(profile: str, tmp_path: Path) -> None:
    exported(profile, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    matrices = {
        name.removesuffix(".weight").removesuffix(".weight_packed")
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if tensor.dim() == 2 and name.endswith((".weight", "_packed")) and "embed" not in name
    }
    experts = {name for name in matrices if ".experts." in name}
    assert len(experts) == 2 * 6 * 3
    assert set(settings["ignore"]) == matrices - experts
    assert "model.layers.0.mlp.gate" in settings["ignore"]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "qwen3_next"])
@pytest.mark.parametrize("profile", ["bf16", "fp8", "nvfp4"])
def test_our_own_reader(profile: str, family: str, tmp_path: Path) -> None:
    model = exported(profile, tmp_path, family)
    read = load_model(tmp_path)
    expected: dict[str, Any] = model.state_dict()
    for i, moe in enumerate(model.moe_layers()):
        for name in EXPERTS:
            where = next(
                key
                for key in expected
                if key.endswith(f"ffn.{name}")
                and expected[key] is not None
                and expected[key].data_ptr() == getattr(moe, name).data_ptr()
            )
            expected[where] = torch.stack([dequantised(one, profile).float() for one in getattr(moe, name).detach()])
            assert not torch.equal(expected[where], getattr(moe, name)), i
    assert read.state_dict().keys() == expected.keys()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_family_that_stacks_its_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gpt_oss stores the experts of a layer together, and experts in fp8 are"):
        exported("fp8", tmp_path, "gpt_oss")
    assert not list(tmp_path.iterdir())


def test_another_dtype_would_be_other_numbers(tmp_path: Path) -> None:
    save_model(set_expert_profile(tiny_family("qwen3_moe"), "fp8"), tmp_path)
    with pytest.raises(
        UserError, match="its experts were trained in fp8 made of float32; in bfloat16 they would be others"
    ):
        export_checkpoint(tmp_path, tmp_path / "out", "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packed, scales, factor: (packed.float(), scales, factor), "torch.float32, torch.float8_e4m3fn and"),
        (
            lambda packed, scales, factor: (packed, scales[:, :1], factor),
            r"scales \[4, 1\] are not one for each 16 of \[4, 32\]",
        ),
        (lambda packed, scales, factor: (packed, scales, factor.repeat(2)), r"\[2\] are not NVFP4"),
    ],
)
def test_nvfp4_that_does_not_match_is_refused(change: Callable[..., Any], message: str) -> None:
    packed, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2).to(torch.float8_e4m3fn)
    with pytest.raises(UserError, match=message):
        from_packed(*change(packed, scales, torch.ones(1)))
