"""DeepSeek-V3 and Kimi-K2: FP8 storage, layers for multi-token prediction, YaRN's two scales, and scores that are all 0."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import deepseek_v3 as cases
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3TopkRouter

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.families.deepseek_v3 import config_from_hf, config_to_hf
from nmoe.model.moe import Router, RouterTrace
from nmoe.model.packed import PackedAttention


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The first case; 160 wide, so that its matrices have a block that is whole and one that is cut off."""
    case = cases.CASES[0]
    config = DeepseekV3Config(**(case.config.to_dict() | {"hidden_size": 160, "num_hidden_layers": 2}))
    type(case)("wide", config, case.model).make().save_pretrained(tmp_path)
    return tmp_path


def test_an_fp8_checkpoint_is_dequantised(checkpoint: Path, tmp_path: Path) -> None:
    plain = load_model(checkpoint).state_dict()
    tensors = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in list(tensors):
        # What the release keeps in bf16: norms, embeddings, head and routers.
        if tensors[name].dim() != 2 or "embed" in name or "lm_head" in name or "mlp.gate." in name:
            continue
        rows, columns = (math.ceil(size / 128) for size in tensors[name].shape)
        scales = 0.004 + 0.01 * torch.rand(rows, columns, generator=generator)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[
            : tensors[name].shape[0], : tensors[name].shape[1]
        ]
        tensors[f"{name}_scale_inv"] = scales
        tensors[name] = (tensors[name] / spread).to(torch.float8_e4m3fn)
    assert sum(name.endswith("_scale_inv") for name in tensors) == 2 * 5 + 3 + 3 * 8 + 3
    save_file(tensors, checkpoint / "model.safetensors")
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (checkpoint / "config.json").write_text(json.dumps(raw))
    model = load_model(checkpoint)
    for name, tensor in model.state_dict().items():
        # E4M3 has three bits behind the point: a sixteenth at most; below 2 ** -6 a step of 2 ** -9, times the scale.
        torch.testing.assert_close(tensor, plain[name], rtol=1 / 16, atol=2**-10 * 0.014)
    (tmp_path / "export").mkdir()
    export_model(model, tmp_path / "export")
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    assert not any(name.endswith("_scale_inv") for name in load_file(tmp_path / "export" / "model.safetensors"))


def test_fp8_without_its_scales_or_with_others_is_refused(checkpoint: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name} is stored as F8_E4M3"):
        load_model(checkpoint)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(UserError, match=rf"model\.safetensors: {name}: scales \[1, 1\] are not .* of \[160, 40\]"):
        load_model(checkpoint)


def test_layers_for_multi_token_prediction_are_left_out(checkpoint: Path) -> None:
    plain = load_model(checkpoint).state_dict()
    tensors = load_file(checkpoint / "model.safetensors")
    extra = {
        f"model.layers.2.{name}.weight": torch.zeros(3) for name in ("eh_proj", "enorm", "mlp.gate", "shared_head.norm")
    }
    save_file(tensors | extra, checkpoint / "model.safetensors")
    for name, tensor in load_model(checkpoint).state_dict().items():
        assert torch.equal(tensor, plain[name]), name
    # One of a layer that there is must be known.
    save_file(tensors | {"model.layers.1.eh_proj.weight": torch.zeros(3)}, checkpoint / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.1\.eh_proj\.weight is not part of this architecture"):
        load_model(checkpoint)


@given(
    factor=st.floats(1.01, 64),
    mscale=st.sampled_from([0.0, 0.5, 0.707, 1.0, 1.37]),
    all_dim=st.sampled_from([0.0, 0.5, 0.707, 1.0, 1.37]),
)
def test_yarns_scales_are_transformers_and_survive_export(factor: float, mscale: float, all_dim: float) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": factor, "original_max_position_embeddings": 16}
    rope |= {name: value for name, value in (("mscale", mscale), ("mscale_all_dim", all_dim)) if value}
    theirs = DeepseekV3Config(**(cases.CASES[0].config.to_dict() | {"rope_parameters": rope}))
    config = config_from_hf(theirs.to_dict())
    assert config.scale == pytest.approx(DeepseekV3Attention(theirs, 0).scaling, rel=1e-12)
    written = config_to_hf(config)
    assert config_from_hf(written) == config
    if all_dim:
        # Readers that know nothing of attention_factor compute it from these two.
        del written["rope_scaling"]["attention_factor"]
        again = config_from_hf(written).rope_scaling
        assert again is not None
        assert config.rope_scaling is not None
        assert again.attention_factor == pytest.approx(config.rope_scaling.attention_factor, rel=1e-9)


def test_a_router_whose_scores_are_all_nothing_stays_finite() -> None:
    theirs_config = cases.CASES[0].config
    theirs, ours = DeepseekV3TopkRouter(theirs_config), Router(config_from_hf(theirs_config.to_dict()))
    with torch.no_grad():
        weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).abs()
        theirs.weight.copy_(weight)
        ours.weight.copy_(weight)
        # Logits of about -25, -80 and -250: sigmoids that are small, below the 1e-20 that the sum is given, and 0.
        x_TD = -torch.tensor([[1.0], [3.2], [10.0]]).expand(-1, 32)
        _, weights_TK, chosen_TK = theirs(x_TD)
        found_TK, picks_TK = ours(x_TD, RouterTrace())
    assert found_TK.isfinite().all()
    assert found_TK[0].sum() == pytest.approx(2.5, rel=1e-5)
    assert 0 < found_TK[1].sum() < 1e-2
    assert found_TK[2].sum() == 0
    torch.testing.assert_close(found_TK.sort().values, weights_TK.sort().values, rtol=1e-4, atol=0)
    assert picks_TK[:2].sort().values.tolist() == chosen_TK[:2].sort().values.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave = False is not supported, only True"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported, only 4"),
        ({"n_group": 3}, "router_groups = 3: must divide experts = 8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is not supported, only 'fp8'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size = \[64, 64\] is not supported, only \[128, 128\]",
        ),
    ],
    ids=str,
)
def test_unsupported_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_from_hf(cases.CASES[0].config.to_dict() | changes)


def test_a_rank_of_queries_that_is_not_said_is_missing() -> None:
    raw = cases.CASES[1].config.to_dict()
    assert config_from_hf(raw).latent is not None
    assert raw.pop("q_lora_rank") is None
    with pytest.raises(UserError, match="missing keys q_lora_rank"):
        config_from_hf(raw)


@pytest.fixture
def kimi(tmp_path: Path) -> tuple[Path, DeepseekV3ForCausalLM]:
    """The settings that Moonshot released: one group of experts, YaRN with both scales equal."""
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = yarn | {"beta_fast": 1.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}
    case = cases.CASES[0]
    changes = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rope_parameters": rope}
    reference = type(case)("kimi", type(case.config)(**(case.config.to_dict() | changes)), DeepseekV3ForCausalLM).make()
    reference.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k2"}))
    return tmp_path, reference


@torch.no_grad()
def test_it_has_transformers_logits_and_is_exported_as_deepseek_v3(
    kimi: tuple[Path, DeepseekV3ForCausalLM], tmp_path: Path
) -> None:
    directory, reference = kimi
    model = load_model(directory)
    ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(0))
    ours = model.logits(model(ids, torch.arange(60), PackedAttention([60], ids.device), RouterTrace()))
    theirs = reference(ids.unsqueeze(0), use_cache=False).logits
    torch.testing.assert_close(ours, theirs[0], rtol=0, atol=1e-4)

    export_model(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "deepseek_v3"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(exported(ids.unsqueeze(0), use_cache=False).logits, theirs)
    for name, tensor in load_model(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_other_storage_is_refused_under_its_own_name(kimi: tuple[Path, DeepseekV3ForCausalLM]) -> None:
    config = kimi[0] / "config.json"
    raw = json.loads(config.read_text())
    # Kimi-K2-Thinking's experts of four bits.
    config.write_text(
        json.dumps(raw | {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}})
    )
    with pytest.raises(UserError, match=r"kimi_k2, quantization_config: format = 'pack-quantized' is not supported"):
        load_model(kimi[0])
