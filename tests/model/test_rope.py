"""Rotary embedding: the table by hand, the turn as a complex product, and frequencies of a longer context against transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import qwen2 as cases
from family_cases.case import Case
from tiny_models import tiny_family
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nmoe.config.tables.model import ModelSection
from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.config import ModelConfig, RopeScaling
from nmoe.model.families import FAMILIES, qwen2
from nmoe.model.moe import RouterTrace
from nmoe.model.ops.torch import TorchOps
from nmoe.model.packed import PackedAttention
from nmoe.model.rope import extended, rope_frequencies, rope_table
from nmoe.recipes.setup import build_model
from nmoe.text.tokenizer import Tokenizer


def test_table_by_hand() -> None:
    cos, sin = rope_table(3, 4, 100.0)  # frequencies 1 and 100 ** (-2 / 4) = 0.1
    assert cos.tolist() == [pytest.approx([math.cos(p), math.cos(0.1 * p)], abs=1e-7) for p in range(3)]
    assert sin.tolist() == [pytest.approx([math.sin(p), math.sin(0.1 * p)], abs=1e-7) for p in range(3)]


def test_table_is_exact_far_out() -> None:
    cos, sin = rope_table(100_001, 6, 10_000.0)
    # An angle of 4641.6 in fp32 would be off by 2e-4.
    angle = 100_000 * 10_000.0 ** (-2 / 6)
    assert cos[100_000, 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert sin[100_000, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_turns_pairs_half_a_head_apart_as_complex_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator, dtype=torch.float64)
    cos, sin = (t.double().unsqueeze(1) for t in rope_table(5, 8, 50.0))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)
    torch.testing.assert_close(
        TorchOps().rotate(x, cos, sin), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-12
    )


def test_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)
    cos, sin = (t.double().unsqueeze(1) for t in rope_table(30, 8, 50.0))

    def score(query_at: int, key_at: int) -> float:
        turned = [TorchOps().rotate(x, cos[at : at + 1], sin[at : at + 1]) for x, at in ((q, query_at), (k, key_at))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(27, 23), abs=1e-6)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_gradient_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 2, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.unsqueeze(1) for t in rope_table(4, 6, 10.0))
    assert torch.autograd.gradcheck(lambda x: TorchOps().rotate(x, cos, sin), (x,))


ORIGINAL = {"original_max_position_embeddings": 32}
SHORT, LONG = [1.0, 1.1, 1.3, 2.0], [1.0, 2.5, 4.0, 9.0]
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": ORIGINAL | {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": ORIGINAL | {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "longrope": ORIGINAL | {"short_factor": SHORT, "long_factor": LONG},
}


@pytest.mark.parametrize("context", [32, 128])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scaling_has_transformers_frequencies(kind: str, share: float, context: int) -> None:
    shape = {"vocab_size": 8, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"head_dim": int(8 / share), "max_position_embeddings": context}
    settings = KINDS[kind] | {"rope_type": kind, "rope_theta": 500.0}
    theirs: PreTrainedConfig = Qwen3Config(**shape, rope_parameters=settings)
    if share < 1:
        theirs = Glm4MoeConfig(**shape, rope_parameters=settings | {"partial_rotary_factor": share})
    config = FAMILIES.get(theirs.model_type).config_from_hf(theirs.to_dict())
    ours = rope_frequencies(context, config.rope_dim, config.rope_theta, config.rope_scaling)
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](theirs, seq_len=context)
    torch.testing.assert_close(ours.float(), inverse, rtol=1e-6, atol=0)
    cos, sin = rope_table(context, config.rope_dim, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, factor**2))
    plain = rope_frequencies(context, config.rope_dim, config.rope_theta)
    assert torch.equal(ours, plain) == (kind == "dynamic")


def test_unturned_dimensions_keep_every_bit() -> None:
    cos, sin = (t.unsqueeze(1) for t in rope_table(5, 4, 50.0, None, 12))
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(3))
    turned = TorchOps().rotate(x, cos, sin)
    assert torch.equal(turned[..., 2:8], x[..., 2:8])
    assert torch.equal(turned[..., 10:], x[..., 10:])
    assert not torch.isclose(turned[1:, :, :2], x[1:, :, :2]).any(-1).all()


def checkpoint(directory: Path, rope: dict[str, Any]) -> Path:
    """A model of 64 tokens of context, with enough ids for a tokenizer of bytes."""
    case = cases.CASES[0]
    settings = case.config.to_dict() | {"vocab_size": 300, "rope_parameters": {"rope_theta": 500.0} | rope}
    settings["tie_word_embeddings"] = False
    Case("context", type(case.config)(**settings), case.model).make().save_pretrained(directory)
    return directory


def section(directory: Path, context_tokens: int) -> ModelSection:
    return ModelSection(path=str(directory), tokenizer="bytes", device="cpu", context_tokens=context_tokens)


@torch.no_grad()
@pytest.mark.parametrize(
    ("stored", "theirs"),
    [
        ({"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 4.0},
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0},
        ),
        # A sequence of 256 tokens is what its frequencies are for, so that one is compared.
        ({"rope_type": "dynamic", "factor": 4.0}, None),
    ],
    ids=["yarn", "more yarn", "dynamic"],
)
def test_a_run_has_transformers_logits_beyond_the_checkpoint_s_context(
    tmp_path: Path, stored: dict[str, Any], theirs: dict[str, Any] | None
) -> None:
    directory = checkpoint(tmp_path / "base", stored)
    model = build_model(section(directory, 256), Tokenizer.train((), 264), 0)
    assert model.config.context_tokens == 256
    if theirs is not None:
        config = directory / "config.json"
        raw = json.loads(config.read_text())
        raw["rope_parameters"] = raw["rope_parameters"] | theirs
        config.write_text(json.dumps(raw | {"max_position_embeddings": 256}))
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    ids = torch.randint(300, (256,), generator=torch.Generator().manual_seed(0))
    wanted = reference(ids.unsqueeze(0), use_cache=False).logits[0]
    ours = model.logits(model(ids, torch.arange(256), PackedAttention([256], ids.device), RouterTrace()))
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-4)
    plain = load_model(checkpoint(tmp_path / "again", stored)).config
    assert plain.context_tokens == 64

    # What is exported computes the same, for servers that know nothing of the extension.
    export_model(model, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    torch.testing.assert_close(exported(ids.unsqueeze(0), use_cache=False).logits[0], wanted, rtol=0, atol=1e-4)
    assert load_model(tmp_path / "out").config == model.config


BASE = qwen2.config_from_hf(cases.CASES[0].config.to_dict())


# YaRN's own for a factor of 4 (eq. 22).
MSCALE = 0.1 * math.log(4.0) + 1.0


def scaled(scaling: RopeScaling) -> ModelConfig:
    return BASE.model_copy(update={"rope_scaling": scaling})


SHARPENED = tiny_family(
    "deepseek_v3", attention_scale=0.3, rope_scaling=RopeScaling("yarn", 4.0, 16, attention_factor=MSCALE)
).config


def test_the_same_context_changes_nothing() -> None:
    assert extended(BASE, 64) is BASE


@pytest.mark.parametrize(
    ("config", "tokens", "message"),
    [
        (BASE, 63, "context_tokens = 63 is less than the 64 that the checkpoint has"),
        (
            scaled(RopeScaling("llama3", 4.0, 16)),
            65,
            "context_tokens = 65: the checkpoint's 64 are stretched by llama3",
        ),
        (scaled(RopeScaling("linear", 4.0)), 65, "stretched by linear"),
        (SHARPENED, 65, "stretched by yarn with factors of their own"),
        (scaled(RopeScaling("yarn", 4.0, 16, attention_factor=1.3)), 65, "stretched by yarn with factors of their own"),
    ],
    ids=["fewer", "llama3", "linear", "yarn that scales all logits", "yarn of its own"],
)
def test_what_says_nothing_of_more_is_refused(config: ModelConfig, tokens: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        extended(config, tokens)


def test_a_run_names_the_key_and_the_checkpoint(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "base", {"rope_type": "default"})
    with pytest.raises(UserError, match=r"base: model\.context_tokens = 32 is less than the 64"):
        build_model(section(directory, 32), Tokenizer.train((), 264), 0)
