"""What a model of nmoe's own making is exported as: the family that has its features, or a refusal that names what none has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES
from transformers import AutoModelForCausalLM

from nmoe.config.tables.model import OptimizerSection
from nmoe.errors import UserError
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import export_model, load_model, save_model, stored_dtype
from nmoe.model.families import FAMILIES, family_of
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer

MakeModel = Callable[..., Transformer]

PLAIN_MOE = {"shared_experts": 0}
DENSE = PLAIN_MOE | {"experts": 0}


def unbiased(model: Transformer) -> Transformer:
    for moe in model.moe_layers():
        moe.router.bias.zero_()
    return model


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        (PLAIN_MOE, "qwen3_moe"),
        (PLAIN_MOE | {"renormalize": False, "tie_embeddings": True, "dense_layers": (1,)}, "qwen3_moe"),
        (PLAIN_MOE | {"router_bias_rate": 0.01, "router_aux_loss_coef": 0.1}, "qwen3_moe"),  # of training alone
        (DENSE, "qwen3"),
        (DENSE | {"windows": (0, 5)}, "qwen3"),
        (DENSE | {"qk_norm": False}, "llama"),
        (DENSE | {"qk_norm": False, "qkv_bias": True, "windows": (0, 5)}, "qwen2"),
        (DENSE | {"qk_norm": False, "windows": (5, 5)}, "mistral"),
        (PLAIN_MOE | {"qk_norm": False}, "mixtral"),
        ({"router_scores": "sigmoid"}, "glm4_moe"),
        ({"router_scores": "sigmoid", "rotary_dim": 4, "dense_layers": (0,), "router_bias_rate": 0.01}, "glm4_moe"),
    ],
    ids=str,
)
def test_a_model_of_our_own_becomes_the_family_it_fits(
    tmp_path: Path, tiny_model: MakeModel, changes: dict[str, Any], family: str
) -> None:
    model = unbiased(tiny_model(**changes))
    export_model(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = torch.randint(48, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.logits(model(ids, torch.arange(40), PackedAttention([40], ids.device), RouterTrace()))
        torch.testing.assert_close(reloaded(ids.unsqueeze(0)).logits[0], ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shared_experts": 2},
            "no Hugging Face family that nmoe knows has this model's features; qwen3_moe, the nearest, lacks shared_experts = 2",
        ),
        (PLAIN_MOE | {"output_bias": True}, "qwen3_moe, the nearest, lacks output_bias = True"),
        (
            PLAIN_MOE | {"qk_norm": False, "renormalize": False},
            "qwen3_moe, the nearest, lacks qk_norm = False",
        ),
        (DENSE | {"qk_norm": False, "windows": (0, 5)}, "llama, the nearest, lacks windows = [0, 5]"),
        (DENSE | {"qkv_bias": True}, "qwen3, the nearest, lacks output_bias = False"),
    ],
    ids=str,
)
def test_what_no_family_has_is_refused(
    tmp_path: Path, tiny_model: MakeModel, changes: dict[str, Any], message: str
) -> None:
    model = unbiased(tiny_model(**changes))
    with pytest.raises(UserError) as raised:
        export_model(model, tmp_path / "out")
    assert str(raised.value).endswith(message)
    assert not (tmp_path / "out").exists()


def test_balancing_biases_are_not_lost_silently(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = tiny_model(**PLAIN_MOE)
    with pytest.raises(
        UserError, match=r"^blocks\.0\.ffn\.router\.bias is not zero, and qwen3_moe has no place for it"
    ):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_models_never_lie_in_one_directory(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = unbiased(tiny_model(**PLAIN_MOE))
    (tmp_path / "note.txt").write_text("stays")
    export_model(model, tmp_path, shard_bytes=10_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) > 5
    with pytest.raises(UserError, match=r"model-00001-of-\d+\.safetensors: .* already holds a model"):
        export_model(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_learner_exports_what_it_has_learned(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = unbiased(tiny_model(**PLAIN_MOE))
    Learner(model, OptimizerSection(learning_rate=1e-3), 10, 100).export(tmp_path / "out", format="hf")
    loaded = load_model(tmp_path / "out")
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_parameters_is_the_one_written(
    tmp_path: Path, tiny_model: MakeModel, dtype: torch.dtype
) -> None:
    save_model(unbiased(tiny_model(**PLAIN_MOE)), tmp_path)
    export_model(load_model(tmp_path, dtype), tmp_path / "out")
    assert stored_dtype(tmp_path) == torch.float32
    assert stored_dtype(tmp_path / "out") == dtype
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


def test_a_run_hands_generation_settings_on(tmp_path: Path, tiny_model: MakeModel) -> None:
    """From a Hugging Face checkpoint through one of nmoe's own and back: what it says of generation stays."""
    generation = {"eos_token_id": [3, 4], "temperature": 0.6, "transformers_version": "4.51.0"}
    export_model(unbiased(tiny_model(**PLAIN_MOE)), tmp_path / "base")
    assert not (tmp_path / "base" / "generation_config.json").exists()
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "run").mkdir()
    save_model(load_model(tmp_path / "base"), tmp_path / "run")
    export_model(load_model(tmp_path / "run"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == generation
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [3, 4]
    (tmp_path / "base" / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"base/generation_config\.json: cannot be read"):
        load_model(tmp_path / "base")


def test_every_family_recognises_its_own_decoders_and_no_other() -> None:
    for case in CASES:
        raw = case.config.to_dict()
        family = FAMILIES.get(raw["model_type"])
        assert family_of(family.config_from_hf(raw)) is family
