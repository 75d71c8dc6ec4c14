"""gpt-oss's own: MXFP4 storage against transformers' dequantisation, and settings that other families lack."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import gpt_oss as cases
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.families.gpt_oss import config_from_hf, config_to_hf, halves, interleaved
from nmoe.model.moe import RouterTrace
from nmoe.model.mxfp4 import dequantised
from nmoe.model.packed import PackedAttention


def test_every_byte_under_every_scale_is_what_transformers_reads() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(256, -1, -1, -1).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(-1, 16, -1).contiguous()
    theirs = convert_moe_packed_tensors(blocks, scales)
    ours = dequantised(blocks, scales)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert ours.shape == (256, 32, 16)
    assert torch.equal(ours[:255], theirs[:255])
    assert ours[255].isnan().all()  # the format's own word for it; transformers reads 2 ** 128
    # By hand: byte 0x2b of row 2 is 1.0 above -1.5, here times 2 ** (130 - 127).
    assert ours[130, [22, 23], 2].tolist() == [-12.0, 8.0]


def test_halves_and_interleaved_by_hand() -> None:
    assert halves(torch.tensor([[1, 10, 2, 20, 3, 30]])).tolist() == [[1, 2, 3, 10, 20, 30]]
    assert interleaved(torch.tensor([[1, 2, 3, 10, 20, 30]])).tolist() == [[1, 10, 2, 20, 3, 30]]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as OpenAI released them, widths that fill blocks of 32."""
    directory = tmp_path_factory.mktemp("mxfp4")
    case = cases.CASES[0]
    config = type(case.config)(**(case.config.to_dict() | {"intermediate_size": 64}))
    type(case)("mxfp4", config, case.model).make().save_pretrained(directory)
    cases.to_mxfp4(directory)
    return directory


@pytest.mark.parametrize("piece_bytes", [1, 100_000])
def test_experts_are_the_same_read_one_by_one_or_several_at_once(
    released: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    whole = load_model(released).state_dict()
    monkeypatch.setattr("nmoe.model.families.base._PIECE_BYTES", piece_bytes)
    pieces = load_model(released).state_dict()
    assert all(torch.equal(pieces[name], tensor) for name, tensor in whole.items())


@torch.no_grad()
def test_a_quantised_checkpoint_has_transformers_logits(released: Path, tmp_path: Path) -> None:
    model = load_model(released)
    stored = load_file(released / "model.safetensors")
    for layer, moe in enumerate(model.moe_layers()):
        name = f"model.layers.{layer}.mlp.experts."
        gate_up = convert_moe_packed_tensors(stored[f"{name}gate_up_proj_blocks"], stored[f"{name}gate_up_proj_scales"])
        assert torch.equal(moe.gate_up[..., :64], gate_up[..., ::2].float())
        assert torch.equal(moe.gate_up[..., 64:], gate_up[..., 1::2].float())
        down = convert_moe_packed_tensors(stored[f"{name}down_proj_blocks"], stored[f"{name}down_proj_scales"])
        assert torch.equal(moe.down, down.float())
    reference = GptOssForCausalLM.from_pretrained(
        released, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager", dtype=torch.float32
    )
    ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(1))
    ours = model.logits(model(ids, torch.arange(60), PackedAttention([60], ids.device), RouterTrace()))
    torch.testing.assert_close(ours, reference(ids.unsqueeze(0)).logits[0], rtol=0, atol=1e-4)

    # What is written is not packed, and in bf16 loses nothing of the experts.
    half = load_model(released, torch.bfloat16)
    export_model(half, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not any(name.endswith(("_blocks", "_scales")) for name in load_file(tmp_path / "model.safetensors"))
    for ours_moe, moe in zip(load_model(tmp_path).moe_layers(), model.moe_layers(), strict=True):
        assert torch.equal(ours_moe.gate_up, moe.gate_up)
        assert torch.equal(ours_moe.down, moe.down)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"),
            r"layers\.1\.mlp\.experts\.down_proj is missing",
        ),
        (
            lambda t: t.update(
                {"model.layers.1.mlp.experts.down_proj_scales": torch.zeros(6, 32, 3, dtype=torch.uint8)}
            ),
            r"safetensors: model\.layers\.1\.mlp\.experts\.down_proj: blocks \[6, 32, 2, 16\] .* \[6, 32, 3\] .*are not MXFP4",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.down_proj_scales": torch.zeros(6, 32, 2)}),
            r"experts\.down_proj: .* torch\.float32 are not MXFP4: both are bytes",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.experts.down_proj_scales": torch.full((6, 32, 2), 255, dtype=torch.uint8)}
            ),
            r"layers\.0\.mlp\.experts\.down_proj holds NaN or infinite values",
        ),
    ],
)
def test_damaged_quantised_tensors_are_refused(released: Path, tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(released, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message) as raised:
        load_model(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(raised.value)


def raw_config(**changes: Any) -> dict[str, Any]:
    raw = cases.CASES[0].config.to_dict() | changes
    return {key: value for key, value in raw.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5 is not supported, only 1.702"),
        ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0 is not positive"),
        ({"layer_types": ["full_attention"]}, r"layer_types = \['full_attention'\] .* each of 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types = .*chunked_attention"),
        ({"sliding_window": 0}, "sliding_window = 0 leaves nothing"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq' is not supported, only 'mxfp4'"),
        ({"num_local_experts": None, "head_dim": None}, "missing keys head_dim, num_local_experts"),
    ],
    ids=str,
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_from_hf(raw_config(**changes))


def test_what_a_configuration_leaves_out_is_the_releases() -> None:
    raw = raw_config(rope_parameters=None, layer_types=None, sliding_window=None, attention_bias=None)
    config = config_from_hf(raw)
    # The first layers of gpt-oss-20b's config.json: theta 150000, yarn by 32 from 4096 tokens without rounding, window 128.
    assert config.windows == (128, 0, 128, 0)
    assert config.qkv_bias
    assert config.output_bias
    assert config.rope_theta == 150_000
    assert config.rope_scaling is not None
    assert (config.rope_scaling.factor, config.rope_scaling.original_context_tokens) == (32.0, 4096)
    assert not config.rope_scaling.truncate
    assert config_from_hf(config_to_hf(config)) == config
