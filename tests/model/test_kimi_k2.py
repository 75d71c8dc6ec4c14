"""Kimi-K2's checkpoints are DeepSeek-V3's under another name, which transformers does not know: they load as the same decoder."""

import json
from pathlib import Path

import pytest
import torch
from family_cases import deepseek_v3 as cases
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, DeepseekV3ForCausalLM]:
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
    checkpoint: tuple[Path, DeepseekV3ForCausalLM], tmp_path: Path
) -> None:
    directory, reference = checkpoint
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


def test_other_storage_is_refused_under_its_own_name(checkpoint: tuple[Path, DeepseekV3ForCausalLM]) -> None:
    config = checkpoint[0] / "config.json"
    raw = json.loads(config.read_text())
    # Kimi-K2-Thinking's experts of four bits.
    config.write_text(
        json.dumps(raw | {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}})
    )
    with pytest.raises(UserError, match=r"kimi_k2, quantization_config: format = 'pack-quantized' is not supported"):
        load_model(checkpoint[0])
