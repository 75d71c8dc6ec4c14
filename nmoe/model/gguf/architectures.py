"""The families that are read from GGUF: the `config.json` that a file's metadata stands for, and where each of its tensors comes
from. Names of keys and tensors are those of llama.cpp (`gguf.constants` lists them)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nmoe.errors import UserError, shown
from nmoe.gguf_file import GGUFFile, StoredTensor
from nmoe.model.config import RopeScaling
from nmoe.model.gguf.sources import Experts, PackedExperts, Source, Turned, Whole
from nmoe.model.gguf.values import check_extent, kind_of, part_of, read_rows
from nmoe.model.rope import rope_frequencies

Sources = Iterator[tuple[str, Source]]
Config = dict[str, Any]

# Of no use as a tensor: the configuration has what it says.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores one family."""

    config: Callable[[GGUFFile], Config]
    sources: Callable[[GGUFFile], Sources]


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UserError for an architecture that is not read."""
    if (name := file.architecture) not in _ARCHITECTURES:
        raise UserError(
            f"{file.path}: general.architecture = {name!r} is not read from GGUF, only {', '.join(sorted(_ARCHITECTURES))}; use "
            "the model's safetensors where nmoe knows its family"
        )
    return _ARCHITECTURES[name]


# Settings.


def _shared(file: GGUFFile, model_type: str, name: str) -> Config:
    """The keys of `config.json` that all families have."""
    heads, width = _key(file, "attention.head_count", int), _key(file, "embedding_length", int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path}: token_embd.weight is missing; it is not a whole language model")
    turned = _key(file, "rope.dimension_count", int, width // max(heads, 1))
    head_dim = _key(file, "attention.key_length", int, turned)
    for key, value in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if (found := _key(file, key, int, value)) != value:
            raise UserError(
                f"{file.path}: {file.architecture}.{key} = {found} is not read, only {value}, the width of a head"
            )
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": _key(file, "feed_forward_length", int, None),
        "num_hidden_layers": _key(file, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _key(file, "attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": _key(file, "context_length", int),
        "rms_norm_eps": _real(file, "attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": _real(file, "rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file),
    }


_NEEDED: Any = object()


def _key(file: GGUFFile, key: str, kind: type, default: Any = _NEEDED) -> Any:
    """A value of the model's own keys, such as `llama.block_count`."""
    name = f"{file.architecture}.{key}"
    return file.need(name, kind) if default is _NEEDED else file.get(name, kind, default)


def _real(file: GGUFFile, key: str, default: Any = _NEEDED) -> Any:
    """A number in fp32, as it was written before it was rounded: 1e-05 and not 9.999999747378752e-06."""
    value = _key(file, key, float, default)
    return value if value is None else float(f"{value:.7g}")


def _rope_scaling(file: GGUFFile) -> Config | None:
    kind = _key(file, "rope.scaling.type", str, None)
    # As llama.cpp has it: older files have a factor of their own, and one without a type is linear.
    factor = _real(file, "rope.scaling.factor", None) or _real(file, "rope.scale_linear", None)
    if kind is None and factor not in (None, 1.0):
        kind = "linear"
    if (factors := file.tensors.get(ROPE_FACTORS)) is not None and kind in (None, "none"):
        return _by_factors(file, factors)
    if kind in (None, "none"):
        return None
    scaling: Config = {"rope_type": kind, "factor": factor or _real(file, "rope.scaling.factor")}
    if (sharpened := _real(file, "rope.scaling.attn_factor", 1.0)) != 1:
        raise UserError(
            f"{file.path}: {file.architecture}.rope.scaling.attn_factor = {sharpened:g} is not read, only 1"
        )
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _key(file, "rope.scaling.original_context_length", int)
        for theirs, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (value := _real(file, f"rope.scaling.{key}", None)) is not None:
                scaling[theirs] = value
    elif kind != "linear":
        raise UserError(
            f"{file.path}: {file.architecture}.rope.scaling.type = {kind!r} is not read, only linear and yarn"
        )
    return scaling


# Of Llama 3.1, 3.2 and 3.3; the release's `rope_scaling` is not in the file, only the factors that follow from it.
_LOW, _HIGH = 1.0, 4.0
_CONTEXTS = tuple(2**power for power in range(4, 20))


def _by_factors(file: GGUFFile, stored: StoredTensor) -> Config:
    """The scaling in which each pair of dimensions is slowed by a factor of its own: Llama 3's where some settings of it give these
    factors, else LongRoPE's with the same ones for all lengths."""
    check_extent(stored, file)
    factors = read_rows(stored, file, 0, stored.shape[0]).double()
    context, theta = _key(file, "context_length", int), _real(file, "rope.freq_base", 10_000.0)
    factor, dimensions = float(f"{float(factors.max()):.6g}"), 2 * len(factors)
    plain = rope_frequencies(context, dimensions, theta)
    for original in _CONTEXTS:
        scaling = RopeScaling("llama3", factor, original, _LOW, _HIGH)
        if torch.allclose(plain / rope_frequencies(context, dimensions, theta, scaling), factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": original,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
            }
    both = [float(f"{one:.7g}") for one in factors.tolist()]
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "original_max_position_embeddings": context,
        "attention_factor": 1.0,
        "short_factor": both,
        "long_factor": both,
    }


def _llama(file: GGUFFile) -> Config:
    if experts := _key(file, "expert_count", int, 0):
        mixture = {"num_local_experts": experts, "num_experts_per_tok": _key(file, "expert_used_count", int)}
        return _shared(file, "mixtral", "MixtralForCausalLM") | mixture
    return _shared(file, "llama", "LlamaForCausalLM") | {"mlp_bias": False}


def _qwen(file: GGUFFile, model_type: str, name: str) -> Config:
    return _shared(file, model_type, name) | {"use_sliding_window": False}


def _qwen3_moe(file: GGUFFile) -> Config:
    dense = [layer for layer in _layers(file) if f"blk.{layer}.ffn_gate.weight" in file.tensors]
    return _qwen(file, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "num_experts": _key(file, "expert_count", int),
        "num_experts_per_tok": _key(file, "expert_used_count", int),
        "moe_intermediate_size": _key(file, "expert_feed_forward_length", int),
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        # llama.cpp does so for every file of this architecture.
        "norm_topk_prob": True,
    }


_GEMMA_PERIOD = 6
# Of 27B, which scales attention by another width than its heads'. The file does not say so; llama.cpp knows it by its layers.
_GEMMA_27B_LAYERS = 62


def _gemma3(file: GGUFFile) -> Config:
    shared = _shared(file, "gemma3_text", "Gemma3ForCausalLM")
    del shared["hidden_act"]
    layers, window = shared["num_hidden_layers"], _key(file, "attention.sliding_window", int, 0)
    pattern = file.get("gemma3.attention.sliding_window_pattern", (int, list), _GEMMA_PERIOD)
    if isinstance(pattern, int):
        pattern = [bool((layer + 1) % max(pattern, 1)) for layer in range(layers)]
    scalar = shared["head_dim"]
    if layers == _GEMMA_27B_LAYERS:
        scalar = shared["hidden_size"] // max(shared["num_attention_heads"], 1)
    return shared | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "layer_types": [_KINDS[bool(window and windowed)] for windowed in pattern],
        "sliding_window": window or None,
        "rope_theta": _real(file, "rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": _real(file, "rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": _real(file, "final_logit_softcapping", None) or None,
        "attn_logit_softcapping": _real(file, "attn_logit_softcapping", None) or None,
    }


_KINDS = ("full_attention", "sliding_attention")


def _gpt_oss(file: GGUFFile) -> Config:
    shared = _shared(file, "gpt_oss", "GptOssForCausalLM")
    if shared["rope_scaling"] is not None:
        shared["rope_scaling"]["truncate"] = False
    in_mxfp4 = any(kind_of(one, file) == "MXFP4" for name, one in file.tensors.items() if "_exps.weight" in name)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return shared | {
        "intermediate_size": _key(file, "expert_feed_forward_length", int),
        "num_local_experts": _key(file, "expert_count", int),
        "num_experts_per_tok": _key(file, "expert_used_count", int),
        "swiglu_limit": 7.0,  # of both releases; not in the file
        "sliding_window": _key(file, "attention.sliding_window", int),
        "layer_types": [_KINDS[layer % 2 == 0] for layer in _layers(file)],
        "rope_scaling": shared["rope_scaling"] or {"rope_type": "default"},
        **({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}} if in_mxfp4 else {}),
    }


# Tensors.

_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_SWIGLU = {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT_OSS_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}


def _layers(file: GGUFFile) -> range:
    layers = _key(file, "block_count", int)
    if layers > len(file.tensors):
        raise UserError(
            f"{file.path}: {file.architecture}.block_count = {shown(layers)}, and it has {len(file.tensors)} tensors"
        )
    return range(layers)


def _named(file: GGUFFile, names: dict[str, str]) -> Iterator[tuple[str, StoredTensor]]:
    """The weights and biases that a file has of these modules, whose names are the family's to llama.cpp's."""
    for theirs, own in names.items():
        for part in ("weight", "bias"):
            if (stored := file.tensors.get(f"{own}.{part}")) is not None:
                yield f"{theirs}.{part}", stored


def _in_layers(file: GGUFFile, names: dict[str, str]) -> Iterator[tuple[str, StoredTensor]]:
    for layer in _layers(file):
        yield from _named(
            file, {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{own}" for theirs, own in names.items()}
        )


def _plain(file: GGUFFile, layers: dict[str, str]) -> Sources:
    """The tensors that are stored as they are."""
    for theirs, stored in (*_named(file, _ENDS), *_in_layers(file, layers)):
        yield theirs, Whole(stored)


def _llama_sources(file: GGUFFile) -> Sources:
    heads = _key(file, "attention.head_count", int)
    turned = {"attn_q": heads, "attn_k": _key(file, "attention.head_count_kv", int, heads)}
    for theirs, source in _plain(file, _NORMS | _ATTENTION | _SWIGLU | {"block_sparse_moe.gate": "ffn_gate_inp"}):
        (stored,) = source.stored
        count = turned.get(stored.name.split(".")[-2], 0)
        if count and stored.shape[0] % (2 * count) == 0:
            source = Turned(stored, heads=count)
        yield theirs, source
    yield from _experts_one_by_one(file, "block_sparse_moe.experts", {"w1": "gate", "w3": "up", "w2": "down"})


def _experts_one_by_one(file: GGUFFile, theirs: str, names: dict[str, str]) -> Sources:
    for layer in _layers(file):
        for name, own in names.items():
            stored = file.tensors.get(f"blk.{layer}.ffn_{own}_exps.weight")
            if stored is None:
                continue
            check_extent(stored, file)
            for expert in range(stored.shape[0]):
                yield f"model.layers.{layer}.{theirs}.{expert}.{name}.weight", Whole(part_of(stored, expert, file))


def _qwen3_moe_sources(file: GGUFFile) -> Sources:
    yield from _plain(file, _NORMS | _ATTENTION | _SWIGLU | {"mlp.gate": "ffn_gate_inp"})
    yield from _experts_one_by_one(file, "mlp.experts", {f"{name}_proj": name for name in ("gate", "up", "down")})


def _gemma3_sources(file: GGUFFile) -> Sources:
    for theirs, source in _plain(file, _GEMMA_NORMS | _ATTENTION | _SWIGLU):
        (stored,) = source.stored
        yield theirs, Whole(stored, offset=-1.0) if theirs.endswith("norm.weight") else source


def _gpt_oss_sources(file: GGUFFile) -> Sources:
    yield from _plain(file, _GPT_OSS_NORMS | _ATTENTION | {"mlp.router": "ffn_gate_inp"})
    for layer in _layers(file):
        theirs = f"model.layers.{layer}."
        if (sinks := file.tensors.get(f"blk.{layer}.attn_sinks.weight")) is not None:
            yield f"{theirs}self_attn.sinks", Whole(sinks)
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            for suffix, part in (("", "weight"), ("_bias", "bias")):
                found = [file.tensors.get(f"blk.{layer}.ffn_{own}_exps.{part}") for own in parts]
                stored = tuple(one for one in found if one is not None)
                if len(stored) != len(parts) or any(one.shape != stored[0].shape for one in stored):
                    continue
                whole = f"{theirs}mlp.experts.{name}{suffix}"
                if part == "weight" and {kind_of(one, file) for one in stored} == {"MXFP4"}:
                    yield f"{whole}_blocks", PackedExperts(stored, scales=False)
                    yield f"{whole}_scales", PackedExperts(stored, scales=True)
                else:
                    yield whole, Experts(stored)


_ARCHITECTURES = {
    "llama": Architecture(_llama, _llama_sources),
    "qwen2": Architecture(
        partial(_qwen, model_type="qwen2", name="Qwen2ForCausalLM"),
        lambda file: _plain(file, _NORMS | _ATTENTION | _SWIGLU),
    ),
    "qwen3": Architecture(
        partial(_qwen, model_type="qwen3", name="Qwen3ForCausalLM"),
        lambda file: _plain(file, _NORMS | _ATTENTION | _SWIGLU),
    ),
    "qwen3moe": Architecture(_qwen3_moe, _qwen3_moe_sources),
    "gemma3": Architecture(_gemma3, _gemma3_sources),
    "gpt-oss": Architecture(_gpt_oss, _gpt_oss_sources),
}
