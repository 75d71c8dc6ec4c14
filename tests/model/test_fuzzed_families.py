"""Random configurations of every family against transformers: a sample of `scripts/fuzz_families.py`, and the oddities that once
loaded as another model."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from fuzz_families import FEATURES, TOLERANCE, difference, make, plain, try_one

from nmoe.errors import UserError
from nmoe.model.checkpoint import load_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}


@pytest.mark.parametrize("family", FEATURES)
@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.long)])
def test_drawn_configurations_are_transformers_models_or_refused(family: str, count: int) -> None:
    drawn = [try_one(7, number, family) for number in range(count)]
    # Plain ones (even numbers) load.
    assert [shown for outcome, shown in drawn[::2] if outcome != "same"] == []
    fine = ("same", "refused by nmoe", "refused by transformers")
    assert [shown for outcome, shown in drawn[1::2] if outcome not in fine] == []


def drawn(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    raw = plain(random.Random(3), family)
    for key in ("rope_scaling", "rope_parameters", "rope_theta"):
        raw.pop(key, None)
    return raw | changes


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN, "rope_theta": 900.0}),
        ("qwen3", {"rope_scaling": {}, "rope_parameters": YARN}),
        ("gpt_oss", {"rope_scaling": {}}),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 8}),
        ("qwen3_moe", {"rope_parameters": YARN | {"beta_fast": 0.5, "beta_slow": 64}}),
        ("deepseek_v3", {"rope_parameters": YARN | {"beta_fast": 0, "beta_slow": 0}}),
        ("qwen3", {"rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}}),
        # Windows wider than the context by default, and on from layer 28 only.
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": None, "max_window_layers": 28}),
        ("deepseek_v3", {"first_k_dense_replace": 9}),
        # The share among the rotary settings counts, not the one outside.
        ("glm4_moe", {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.75}),
    ],
    ids=str,
)
def test_an_odd_setting_is_read_as_transformers_reads_it(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    make(drawn(family, changes), tmp_path, 0, False)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert difference(reference, tmp_path, 0) <= TOLERANCE
    if "rope_parameters" in changes:
        # And it matters: without the odd keys another model is loaded.
        (tmp_path / "config.json").write_text(json.dumps(drawn(family, {"rope_parameters": {"rope_type": "default"}})))
        assert difference(reference, tmp_path, 0) > 0.1


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"num_hidden_layers": 10**30},
            "num_hidden_layers = 1000000000000000000000000000000 is larger than 4096",
        ),
        ("gpt_oss", {"num_local_experts": 10**9}, "num_local_experts = 1000000000 is larger than 65536"),
        ("qwen3", {"vocab_size": 2**31}, "vocab_size = 2147483648 is larger than 2147483647"),
        ("llama", {"is_causal": False}, "llama: is_causal = False is not supported, only True"),
        ("qwen3", {"is_causal": None}, "qwen3: is_causal = null is not supported"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave = null is not supported"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False is not supported"),
        ("llama", {"rope_parameters": YARN | {"truncate": None}}, "llama: truncate = null is not supported"),
        ("glm4_moe", {"partial_rotary_factor": 1e308}, "partial_rotary_factor = 1e+308 is not a share of a head"),
        ("glm4_moe", {"partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01 turns 0 of "),
        ("glm4_moe", {"head_dim": 8, "partial_rotary_factor": 0.4}, "= 0.4 turns 3 of 8 dimensions"),
        ("llama", {"partial_rotary_factor": 0.5}, "llama: partial_rotary_factor = 0.5 is not supported"),
        ("llama", {"rope_parameters": {"full_attention": YARN}}, "separate rotary settings for 'full_attention'"),
        ("llama", {"rope_parameters": YARN | {"factor": 0.0}}, "rotary factor = 0.0 is not positive"),
        (
            "llama",
            {"rope_parameters": YARN | {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "low_freq_factor = 4.0 must lie below high_freq_factor = 1.0",
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": YARN | {"truncate": False}}}, "truncate = False is not"),
        ("gemma3_text", {"rope_parameters": YARN}, "rope_parameters has 'factor' beside full_attention"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window = null is not supported"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        ("gpt_oss", {"num_experts": 5}, "and num_experts = 5 are one setting; remove one"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = null is not supported"),
        ("llama", {"per_layer_config": {"0": {}}}, r"per_layer_config = {'0': {}} is not supported"),
    ],
    ids=str,
)
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(drawn(family, changes)))
    with pytest.raises(UserError) as raised:
        load_model(tmp_path)
    assert str(raised.value).startswith(str(tmp_path / "config.json"))
    assert message in str(raised.value)


@pytest.mark.parametrize("family", FEATURES)
def test_a_tied_head_that_is_another_tensor_is_refused(tmp_path: Path, family: str) -> None:
    raw = drawn(family, {"tie_word_embeddings": True})
    make(raw, tmp_path, 0, True)
    with pytest.raises(
        UserError, match=r"model\.safetensors: config\.json ties the head .* lm_head\.weight is another"
    ):
        load_model(tmp_path)
    # Untied it is read, as transformers reads either.
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    assert difference(reference, tmp_path, 0) <= TOLERANCE
