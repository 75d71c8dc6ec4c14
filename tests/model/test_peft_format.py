"""Adapters exchanged with PEFT: the same adapter gives the same logits and gradients on both sides, files pass both ways, and bad
files are told apart."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from nmoe.errors import UserError
from nmoe.model.checkpoint import load_model
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.peft_format import adapter_tensors, read_adapter, resume_adapter, save_adapter
from nmoe.model.transformer import Transformer

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2),
    # Those that keep outputs in another order than we: gate and up of the experts interleaved; the rotated dimensions in pairs,
    # or before the others.
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=6, num_experts_per_tok=2, sliding_window=8),
    "deepseek_v3": DeepseekV3Config(
        **{name: value for name, value in SHAPE.items() if name != "head_dim"} | {"num_key_value_heads": 4},
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
}
FAMILIES["glm4_moe"] = Glm4MoeConfig(
    **SHAPE,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    attention_bias=True,
    use_qk_norm=True,
)
FAMILIES["gemma3_text"] = Gemma3TextConfig(**SHAPE, sliding_window=8)
FAMILIES["qwen2"] = Qwen2Config(**SHAPE)
FAMILIES["mixtral"] = MixtralConfig(**SHAPE, num_local_experts=6, num_experts_per_tok=2)
FAMILIES["qwen3_next"] = Qwen3NextConfig(
    **SHAPE,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    num_experts=6,
    num_experts_per_tok=2,
    layer_types=["linear_attention", "full_attention"],
    partial_rotary_factor=0.5,
)
DENSE = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
EXPERTS = ATTENTION | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
LATENT = {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
RECURRENT = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]}
CASES = [
    ("llama", DENSE),
    ("llama", {"target_modules": ["v_proj", "down_proj"], "use_rslora": True}),
    ("qwen3", DENSE | {"rank_pattern": {"down_proj": 6}, "alpha_pattern": {"layers.1.self_attn.o_proj": 3}}),
    ("qwen3", {"target_modules": r".*\.1\.self_attn\.(k|o)_proj"}),
    ("qwen3_moe", ATTENTION),
    ("qwen3_moe", EXPERTS),
    ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    ("gpt_oss", EXPERTS),
    ("deepseek_v3", EXPERTS | LATENT),
    ("glm4_moe", EXPERTS),
    ("qwen2", DENSE),
    ("gemma3_text", DENSE),
    ("mixtral", EXPERTS),
    ("qwen3_next", EXPERTS | RECURRENT),
    ("qwen3_next", {"target_modules": r".*\.shared_expert(_gate|\.(gate|up|down)_proj)"}),
]
LENGTHS = [5, 1, 17, 9]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family with a peaked output."""
    here = tmp_path_factory.mktemp("bases")
    for name, config in FAMILIES.items():
        model = AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
            model.lm_head.weight.mul_(4.0)
        model.save_pretrained(here / name)
    return here


def theirs(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


def peft_adapter(directory: Path, settings: dict[str, Any]) -> PeftModel:
    """A fresh adapter of PEFT's, none of whose numbers is zero."""
    torch.manual_seed(1)
    model = get_peft_model(theirs(directory), LoraConfig(**{"r": 4, "lora_alpha": 10} | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model.eval()


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(64, (length,), generator=generator) for length in LENGTHS]


def our_logits(model: Transformer) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    attend = PackedAttention(LENGTHS, positions.device)
    return model.logits(model(torch.cat(sequences()), positions, attend, RouterTrace()))


def their_logits(model: torch.nn.Module) -> Tensor:
    return torch.cat([model(ids.unsqueeze(0), use_cache=False).logits[0] for ids in sequences()])


def near(found: Tensor, expected: Tensor) -> None:
    """Within rounding: Qwen3-Next's logits reach 45 here, and one of them differs by 3e-4."""
    tolerance = max(1e-4, 1e-5 * float(expected.detach().abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def loss(logits: Tensor) -> Tensor:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    return (logits.log_softmax(-1) * weights).mean()


def attached(directory: Path, adapter: Path) -> Lora:
    model = load_model(directory)
    return read_adapter(model, adapter).attach(model, str(directory), "fingerprint")


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_an_adapter_of_peft_computes_the_same_here(
    bases: Path, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    reference = peft_adapter(bases / family, settings)
    reference.save_pretrained(tmp_path / "theirs")
    lora = attached(bases / family, tmp_path / "theirs")

    expected, found = their_logits(reference), our_logits(lora.model)
    logprobs = expected.detach().log_softmax(-1)
    assert -(logprobs.exp() * logprobs).sum(-1).mean() <= 0.5 * math.log(64), "a flat output would hide differences"
    with lora.disabled():
        assert (our_logits(lora.model) - found).abs().mean() > 0.1, "the adapter changes what is computed"
    near(found, expected)

    loss(expected).backward()
    loss(found).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.requires_grad}
    # Our gradients by PEFT's names: what adapter_tensors would write, were they the weights.
    for parameter in lora.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    ours = adapter_tensors(attached_again(lora))
    assert {name.replace(".default", "") for name in gradients} == set(ours)
    for name, gradient in gradients.items():
        assert gradient is not None
        size = float(gradient.abs().max())
        assert size > 1e-5
        torch.testing.assert_close(ours[name.replace(".default", "")], gradient, rtol=0, atol=1e-4 * size)


def attached_again(lora: Lora) -> Lora:
    """The adapter whose views see parameters that were replaced."""
    fresh = Lora(lora.model, lora.settings, lora.sites, lora.base, lora.fingerprint)
    for new, old in zip(fresh.parameters(), lora.parameters(), strict=True):
        new.data.copy_(old.data)
    return fresh


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_an_adapter_of_ours_loads_in_peft(bases: Path, tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    peft_adapter(bases / family, settings).save_pretrained(tmp_path / "theirs")
    lora = attached(bases / family, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_adapter(lora, tmp_path / "ours")
    written, read = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert written.keys() == read.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, read[name]), name
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of adapted modules without tensors
        loaded = PeftModel.from_pretrained(theirs(bases / family), tmp_path / "ours")
    with torch.no_grad():
        near(our_logits(lora.model), their_logits(loaded))
        merged = loaded.merge_and_unload()
        with lora.merged() as ours:
            near(our_logits(ours), their_logits(merged))


def test_training_goes_on_in_peft_where_it_was_left(bases: Path, tmp_path: Path) -> None:
    model = load_model(bases / "qwen3_moe")
    lora = Lora(model, LoraSettings(4, 8.0), choose(model, ()), str(bases / "qwen3_moe"), "fingerprint").initialize(0)
    save_adapter(lora, tmp_path)
    loaded = PeftModel.from_pretrained(theirs(bases / "qwen3_moe"), tmp_path, is_trainable=True)
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 8, {"q_proj", "k_proj", "v_proj", "o_proj"})
    assert sum(p.numel() for p in loaded.parameters() if p.requires_grad) == sum(p.numel() for p in lora.parameters())


Spoil = Callable[[Path], None]


def config_with(**changes: Any) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def tensors_with(change: Callable[[dict[str, Tensor]], object]) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return spoil


def torn(name: str) -> Spoil:
    def spoil(directory: Path) -> None:
        (directory / name).write_bytes((directory / name).read_bytes()[:-20])

    return spoil


KEYS = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
BAD: dict[str, tuple[Spoil, str]] = {
    "torn weights": (torn("adapter_model.safetensors"), r"adapter_model\.safetensors: torn"),
    "torn settings": (torn("adapter_config.json"), r"adapter_config\.json: cannot be read"),
    "no weights": (lambda d: (d / "adapter_model.safetensors").unlink(), r"adapter_model\.safetensors: no such file"),
    "NaN": (tensors_with(lambda t: t[KEYS].__setitem__((3, 1), math.nan)), rf"safetensors: {KEYS} holds NaN"),
    "missing": (tensors_with(lambda t: t.pop(KEYS)), rf"another base: {KEYS} is missing"),
    "shape": (
        tensors_with(lambda t: t.update({KEYS: torch.zeros(48, 4)})),
        rf"another base: {KEYS} has shape \[48, 4\], this base and rank 4 want \[32, 4\]",
    ),
    "unknown": (
        tensors_with(lambda t: t.update({KEYS.replace("layers.1", "layers.2"): torch.zeros(32, 4)})),
        r"layers\.2\.self_attn\.k_proj\.lora_B\.weight belongs to no projection",
    ),
    "target": (config_with(target_modules=["q_proj", "c_attn"]), r"adapts 'c_attn', which this one does not have"),
    "kind": (config_with(peft_type="IA3"), r"adapter_config\.json: peft_type = 'IA3' is not supported"),
    "DoRA": (config_with(use_dora=True), r"adapter_config\.json: use_dora = True is not supported"),
    "PiSSA": (config_with(init_lora_weights="pissa"), r"init_lora_weights = 'pissa' is not supported"),
    "rank": (config_with(r=0), r"adapter_config\.json: lora rank = 0 is not a whole number from 1 up"),
    "other rank": (config_with(r=8), r"lora_A\.weight has shape \[4, 32\], this base and rank 8 want \[8, 32\]"),
    "ranks": (config_with(rank_pattern={"k_proj": 2}), r"lora_A\.weight has shape \[4, 32\], this base and rank 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_adapters_are_refused_whole(bases: Path, tmp_path: Path, case: str) -> None:
    spoil, message = BAD[case]
    model = load_model(bases / "llama")
    lora = Lora(model, LoraSettings(4, 8.0), choose(model, ()), "base", "f").initialize(0)
    save_adapter(lora, tmp_path)
    before = {name: tensor.clone() for name, tensor in adapter_tensors(lora).items()}
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter += 1
    save_adapter(lora, tmp_path)
    for name, tensor in adapter_tensors(lora).items():
        assert not torch.equal(tensor, before[name])
    lora.initialize(0)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        resume_adapter(lora, tmp_path)
    for name, tensor in adapter_tensors(lora).items():
        assert torch.equal(tensor, before[name]), "nothing is loaded by halves"


def test_the_ranks_of_one_matrix_have_to_agree(bases: Path) -> None:
    model = load_model(bases / "llama")
    settings = LoraSettings(4, 8.0, rank_pattern={"k_proj": 2})
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj, .* need one rank and one alpha"):
        Lora(model, settings, choose(model, ()), "base", "f")


def test_a_changed_base_is_refused_on_resumption(bases: Path, tmp_path: Path) -> None:
    model = load_model(bases / "llama")
    lora = Lora(model, LoraSettings(4, 8.0), choose(model, ()), "runs/base", "f00d").initialize(0)
    save_adapter(lora, tmp_path)
    resume_adapter(lora, tmp_path)
    lora.fingerprint = "beef"
    with pytest.raises(UserError, match=r"beside the base runs/base when that had the fingerprint f00d; .*\(beef\)"):
        resume_adapter(lora, tmp_path)
