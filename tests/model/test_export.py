"""Export: the family that has the features of a model, refusals that name what none has, and experts in a profile."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from family_cases import CASES
from safetensors.torch import load_file
from tiny_models import tiny_family
from torch import Tensor
from transformers import AutoModelForCausalLM

from nmoe.config.tables.model import OptimizerSection
from nmoe.errors import UserError
from nmoe.learner.learner import Learner
from nmoe.model.checkpoint import export_model, load_model, save_model, stored_dtype
from nmoe.model.expert_profile import dequantised
from nmoe.model.families import FAMILIES, family_of
from nmoe.model.families.compressed import from_packed
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.runs.conversions import export_checkpoint

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
    with pytest.raises(UserError, match=r"^blocks\.0\.ffn\.router\.bias is not zero, and qwen3_moe cannot store it"):
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


EXPERTS = ("gate_up", "down")


def exported(profile: str, directory: Path, family: str = "qwen3_moe") -> Transformer:
    model = set_expert_profile(tiny_family(family), profile)
    export_model(model, directory)
    return model


def trained(model: Transformer, layer: int, expert: int) -> dict[str, Tensor]:
    """The projections of an expert as they were multiplied, `[outputs, inputs]`."""
    moe = model.moe_layers()[layer]
    with torch.no_grad():
        gate_up, down = moe._projections(torch.float32)
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
