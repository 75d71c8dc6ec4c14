"""A longer context than a checkpoint's: the frequencies are transformers', and a run asks for it by `model.context_tokens`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import qwen2 as cases
from family_cases.case import Case
from tiny_models import tiny_family
from transformers import AutoModelForCausalLM

from nmoe.config.tables.model import ModelSection
from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.config import ModelConfig, RopeScaling
from nmoe.model.context import extended
from nmoe.model.families import qwen2
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.recipes.setup import build_model
from nmoe.text.tokenizer import Tokenizer


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
