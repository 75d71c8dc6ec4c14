"""Draws configurations of every family at random and compares what nmoe and transformers compute from the same checkpoint.

    python scripts/fuzz_families.py --count 100

Half of the configurations are plain: those have to load and agree. The other half have one oddity, such as a key that is null, both
forms of the rotary settings, or a tied head that is stored all the same: there nmoe agrees or refuses. Prints how many of each, and
every configuration that loads as another model; exit code 1 where there is one. The same seed draws the same configurations.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from nmoe.errors import UserError
from nmoe.model.checkpoint import load_model
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention

Raw = dict[str, Any]
Outcome = Literal["same", "refused by nmoe", "refused by transformers", "different", "refused though plain"]

VOCAB, CONTEXT, TOKENS = 40, 64, 48
# The largest difference of a logit that rounding explains, for logits of a standard deviation of some 4.
TOLERANCE = 2e-3


def plain(draw: random.Random, family: str) -> Raw:
    """A `config.json` that transformers loads, in the form that it writes or in that of the released checkpoints."""
    heads = draw.choice([2, 4])
    raw: Raw = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, 2, heads]),
        "head_dim": draw.choice([8, 16]),
        "intermediate_size": 24,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": draw.choice([1e-6, 1e-2]),
        "tie_word_embeddings": draw.random() < 0.3,
        "attention_bias": draw.random() < 0.3,
        "hidden_act": "silu",
    }
    FEATURES[family](draw, raw)
    with_rope(draw, raw, rope(draw, turned_pairs(raw)))
    return raw


def _llama(draw: random.Random, raw: Raw) -> None:
    if draw.random() < 0.3:
        del raw["head_dim"]


def _windows(draw: random.Random, raw: Raw) -> None:
    raw |= {"use_sliding_window": draw.random() < 0.5, "sliding_window": draw.choice([5, 11])}


def _qwen3(draw: random.Random, raw: Raw) -> None:
    _windows(draw, raw)
    raw["max_window_layers"] = draw.randint(0, 3)
    if raw["use_sliding_window"] and draw.random() < 0.4:
        raw["layer_types"] = draw.choices(["full_attention", "sliding_attention"], k=raw["num_hidden_layers"])


def _mistral(draw: random.Random, raw: Raw) -> None:
    _one_window(draw, raw)
    if draw.random() < 0.3:
        del raw["head_dim"]


def _one_window(draw: random.Random, raw: Raw) -> None:
    if draw.random() < 0.7:
        raw["sliding_window"] = draw.choice([None, 5, 11])


def _mixtral(draw: random.Random, raw: Raw) -> None:
    _one_window(draw, raw)
    raw |= {"num_local_experts": draw.choice([4, 6]), "num_experts_per_tok": draw.randint(1, 4)}


def _qwen3_moe(draw: random.Random, raw: Raw) -> None:
    _windows(draw, raw)
    layers = range(raw["num_hidden_layers"])
    raw |= {
        draw.choice(["num_experts", "num_local_experts"]): draw.choice([4, 6]),
        "num_experts_per_tok": draw.randint(1, 4),
        "moe_intermediate_size": 16,
        "norm_topk_prob": draw.random() < 0.7,
        "mlp_only_layers": draw.sample(layers, draw.randint(0, len(layers))),
        "decoder_sparse_step": draw.randint(1, 2),
    }


def _gpt_oss(draw: random.Random, raw: Raw) -> None:
    raw |= {
        "num_local_experts": draw.choice([4, 6]),
        "num_experts_per_tok": draw.randint(1, 4),
        "swiglu_limit": draw.choice([0.5, 7.0]),
        "sliding_window": draw.choice([5, 11]),
    }
    if draw.random() < 0.5:
        raw["layer_types"] = draw.choices(["full_attention", "sliding_attention"], k=raw["num_hidden_layers"])


def _deepseek_v3(draw: random.Random, raw: Raw) -> None:
    raw |= {
        "num_key_value_heads": raw["num_attention_heads"],
        "attention_bias": False,
        "q_lora_rank": draw.choice([None, 12]),
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": draw.choice([8, 16]),
        "v_head_dim": draw.choice([8, 12]),
    }
    _sigmoid_moe(draw, raw)
    del raw["head_dim"]


def _glm4_moe(draw: random.Random, raw: Raw) -> None:
    _sigmoid_moe(draw, raw)
    raw["use_qk_norm"] = draw.random() < 0.5
    if draw.random() < 0.7:
        raw["partial_rotary_factor"] = draw.choice([0.25, 0.5, 0.75, 1.0])


def _qwen3_next(draw: random.Random, raw: Raw) -> None:
    layers, key_heads = range(raw["num_hidden_layers"]), draw.choice([1, 2])
    raw |= {
        "num_experts": draw.choice([4, 6]),
        "num_experts_per_tok": draw.randint(1, 4),
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": draw.choice([16, 32]),
        "norm_topk_prob": draw.random() < 0.7,
        "mlp_only_layers": draw.sample(layers, draw.randint(0, len(layers))),
        "decoder_sparse_step": draw.randint(1, 2),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.randint(1, 3),
        "linear_key_head_dim": draw.choice([8, 12]),
        "linear_value_head_dim": draw.choice([8, 10]),
        "linear_conv_kernel_dim": draw.randint(1, 4),
    }
    if draw.random() < 0.7:
        raw["partial_rotary_factor"] = draw.choice([0.25, 0.5, 0.75, 1.0])
    kinds = draw.random()
    if kinds < 0.5:
        raw["layer_types"] = draw.choices(["full_attention", "linear_attention"], k=len(layers))
    elif kinds < 0.8:
        raw["full_attention_interval"] = draw.randint(1, 3)


def _gemma3_text(draw: random.Random, raw: Raw) -> None:
    raw |= {"sliding_window": draw.choice([5, 11]), "query_pre_attn_scalar": draw.choice([8, 16, 24])}
    raw["hidden_activation"] = "gelu_pytorch_tanh"
    del raw["hidden_act"]
    pattern = draw.random()
    if pattern < 0.4:
        raw["layer_types"] = draw.choices(["full_attention", "sliding_attention"], k=raw["num_hidden_layers"])
    elif pattern < 0.8:
        raw["sliding_window_pattern"] = draw.randint(1, 3)


def _sigmoid_moe(draw: random.Random, raw: Raw) -> None:
    groups = draw.choice([1, 2, 4])
    raw |= {
        "n_routed_experts": 8,
        "num_experts_per_tok": draw.randint(1, 2),
        "n_shared_experts": draw.randint(1, 2),
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "norm_topk_prob": draw.random() < 0.7,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": draw.randint(0, raw["num_hidden_layers"]),
    }


FEATURES: dict[str, Callable[[random.Random, Raw], None]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "qwen2": _qwen3,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "glm4_moe": _glm4_moe,
    "gemma3_text": _gemma3_text,
    "qwen3_next": _qwen3_next,
}


def turned_pairs(raw: Raw) -> int:
    """How many pairs of a head are turned."""
    width = raw.get("qk_rope_head_dim") or raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    default = {"glm4_moe": 0.5, "qwen3_next": 0.25}.get(raw["model_type"])
    share = 1.0 if default is None else raw.get("partial_rotary_factor", default)
    return int(width * share) // 2


def rope(draw: random.Random, pairs: int) -> Raw:
    """Rotary settings of a random kind."""
    # For a single pair transformers divides by 0.
    dynamic = ["dynamic"] if pairs > 1 else []
    kind = draw.choice(["default", "linear", "llama3", "yarn", "yarn", "longrope", *dynamic])
    settings: Raw = {"rope_type": kind, "rope_theta": draw.choice([100.0, 10_000.0])}
    if kind == "default":
        return settings
    settings["factor"] = draw.choice([2.0, 4.0])
    if kind == "longrope":
        # Sequences here have 48 tokens: longer than the original context, or the context is no longer itself.
        settings["original_max_position_embeddings"] = draw.choice([16, 32, CONTEXT])
        for name in ("short_factor", "long_factor"):
            settings[name] = [draw.choice([1.0, 1.5, 3.0]) for _ in range(pairs)]
        if draw.random() < 0.5:
            del settings["factor"]
        if draw.random() < 0.3:
            settings["attention_factor"] = 1.2
        return settings
    if kind not in ("linear", "dynamic"):
        settings["original_max_position_embeddings"] = draw.choice([16, 32])
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0])}
    if kind == "yarn":
        optional: Raw = {
            "beta_fast": draw.choice([4.0, 32.0]),
            "beta_slow": draw.choice([0.5, 1.0]),
            "truncate": draw.random() < 0.5,
            "attention_factor": 1.3,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        }
        settings |= {key: value for key, value in optional.items() if draw.random() < 0.5}
    return settings


def with_rope(draw: random.Random, raw: Raw, settings: Raw) -> None:
    """Writes rotary settings in one of the two forms."""
    by_layer = raw["model_type"] == "gemma3_text"
    if by_layer:
        settings.pop("truncate", None)  # transformers does not find it there
    if draw.random() < 0.5:
        raw["rope_parameters"] = settings
        if by_layer:
            near = {"rope_type": "default", "rope_theta": draw.choice([20.0, 100.0])}
            raw["rope_parameters"] = {"full_attention": settings, "sliding_attention": near}
        return
    if by_layer:
        raw["rope_local_base_freq"] = draw.choice([20.0, 100.0])
    raw["rope_theta"] = settings.pop("rope_theta")
    if draw.random() < 0.5:
        settings["type"] = settings.pop("rope_type")
    raw["rope_scaling"] = None if len(settings) == 1 and raw["model_type"] != "gpt_oss" else settings


# Each oddity changes a plain configuration; the head that is stored beside a tied embedding is one of the weights.
DISTINCT_HEAD = "a distinct head beside a tied embedding"


def odd(draw: random.Random, raw: Raw) -> str:
    """Puts one oddity into a configuration; returns what it is."""
    kind = draw.choice(
        [
            "null",
            "missing",
            "both",
            "original",
            "betas",
            "causal",
            "head",
            "interleave",
            "empty",
            "partial",
            "windows",
            "truncate",
        ]
    )
    if kind == "null":
        key = draw.choice([key for key in raw if key not in ("model_type", "vocab_size", "hidden_size")])
        raw[key] = None
        return f"{key} = null"
    if kind == "missing":
        key = draw.choice([key for key in raw if key not in ("model_type", "vocab_size", "hidden_size")])
        del raw[key]
        return f"no {key}"
    if kind == "both":
        raw |= {"rope_parameters": rope(draw, 4), "rope_scaling": rope(draw, 4)}
        return "rope_scaling beside rope_parameters"
    if kind == "original":
        raw["original_max_position_embeddings"] = draw.choice([8, 24])
        return "original_max_position_embeddings outside"
    if kind == "betas":
        betas = {"beta_fast": draw.choice([0, 0.5, 32]), "beta_slow": draw.choice([0, 2.0, 64])}
        raw.pop("rope_scaling", None)
        raw["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **betas}
        return f"YaRN with {betas}"
    if kind == "causal":
        raw["is_causal"] = draw.choice([False, None, True])
        return f"is_causal = {raw['is_causal']}"
    if kind == "head":
        raw["tie_word_embeddings"] = True
        return DISTINCT_HEAD
    if kind == "interleave":
        raw["rope_interleave"] = draw.choice([None, False, True])
        return f"rope_interleave = {raw['rope_interleave']}"
    if kind == "empty":
        raw["rope_scaling"] = {}
        return "rope_scaling = {}"
    if kind == "partial":
        raw["partial_rotary_factor"] = draw.choice([0.5, 1.0])
        return "partial_rotary_factor outside"
    if kind == "windows":
        raw["use_sliding_window"] = True
        raw.pop("sliding_window", None)
        return "a window of no given width"
    raw.pop("rope_scaling", None)
    raw["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "truncate": None}
    return "YaRN with truncate = null"


@torch.no_grad()
def make(raw: Raw, directory: Path, seed: int, distinct_head: bool) -> None:
    """Writes the checkpoint: random weights at which every part counts, by transformers, and the configuration as it was drawn."""
    config_file = directory / "config.json"
    config_file.write_text(json.dumps(raw))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
        parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 else noise * scale)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    if not model.config.tie_word_embeddings:
        model.get_output_embeddings().weight.mul_(4)
    model.save_pretrained(directory)
    if distinct_head:
        tensors = load_file(directory / "model.safetensors")
        head = torch.randn(VOCAB, raw["hidden_size"], generator=generator)
        save_file(tensors | {"lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
    config_file.write_text(json.dumps(raw))


@torch.no_grad()
def difference(reference: PreTrainedModel, directory: Path, seed: int) -> float:
    """The largest difference of a logit. Raises UserError where nmoe refuses the checkpoint."""
    model = load_model(directory)
    ids: Tensor = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    theirs = reference(ids.unsqueeze(0), use_cache=False).logits[0]
    states = model(ids, torch.arange(TOKENS), PackedAttention([TOKENS], ids.device), RouterTrace())
    return float((model.logits(states) - theirs).abs().max())


def try_one(seed: int, number: int, family: str) -> tuple[Outcome, str]:
    """What comes of one configuration of a family, and the configuration in words."""
    draw = random.Random(f"{seed}/{family}/{number}")
    raw = plain(draw, family)
    oddity = odd(draw, raw) if number % 2 else ""
    shown = f"{number}: {family}, {oddity or 'plain'}: {json.dumps(raw)}"
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        try:
            make(raw, directory, number, oddity == DISTINCT_HEAD)
            reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
            reference(torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        except Exception as error:  # whatever transformers makes of what it cannot load
            return "refused by transformers", f"{shown}: {error!r}"
        try:
            apart = difference(reference, directory, number)
        except UserError as error:
            return "refused by nmoe" if oddity else "refused though plain", f"{shown}: {error}"
    return "same" if apart <= TOLERANCE else "different", f"{shown}: logits apart by {apart:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description="random configurations of every family against transformers")
    parser.add_argument("--count", type=int, default=100, help="configurations of each family")
    parser.add_argument("--family", choices=FEATURES, nargs="+", default=list(FEATURES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    outcomes: Counter[str] = Counter()
    for family, number in product(arguments.family, range(arguments.count)):
        outcome, shown = try_one(arguments.seed, number, family)
        # Transformers takes every plain configuration, or the draw is at fault.
        wrong = outcome in ("different", "refused though plain") or (
            outcome == "refused by transformers" and not number % 2
        )
        outcomes[f"{'odd' if number % 2 else 'plain'}, {outcome}"] += 1
        if wrong:
            outcomes["wrong"] += 1
            print(f"{outcome}: {shown}", flush=True)
    print(
        json.dumps(
            {"count": outcomes.total() - outcomes["wrong"], "seed": arguments.seed, **dict(sorted(outcomes.items()))}
        )
    )
    return 1 if outcomes["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
