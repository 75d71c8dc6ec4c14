"""The model families that nmoe reads from GGUF: makes a `config.json` from a file's metadata, and lists the GGUF tensors that each
Hugging Face tensor is made from. Names of keys and tensors are llama.cpp's (`gguf.constants` lists them)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from nmoe.errors import UserError, shown
from nmoe.gguf_file import GGUFFile, StoredTensor
from nmoe.model.gguf.rope_scaling import rope_scaling
from nmoe.model.gguf.sources import Experts, PackedExperts, Source, Turned, Whole, check_extent, kind_of, part_of

Sources = Iterator[tuple[str, Source]]
Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores one family of models: `config` makes a `config.json`, `sources` lists the Hugging Face tensors and their
    sources."""

    config: Callable[[GGUFFile], Config]
    sources: Callable[[GGUFFile], Sources]


def architecture_of(file: GGUFFile) -> Architecture:
    """Returns the reader for the file's architecture. Raises UserError for an architecture that nmoe does not read."""
    if (name := file.architecture) not in _ARCHITECTURES:
        raise UserError(
            f"{file.path}: general.architecture = {name!r} is not read from GGUF, only {', '.join(sorted(_ARCHITECTURES))}; use "
            "the model's safetensors where nmoe knows its family"
        )
    return _ARCHITECTURES[name]


# Settings.


def _shared(file: GGUFFile, model_type: str, name: str, theta: float = 10_000.0, truncate: bool = True) -> Config:
    """Returns the keys of `config.json` that all families have. `theta` is the rotary base if the file has none; `truncate` is
    whether the family rounds the bounds of YaRN's ramp. Raises UserError for a file without embedding, and if the values' width or
    the rotary embedding's differs from the width of a head."""
    theta = file.own_real("rope.freq_base", theta)
    heads, width = file.own("attention.head_count", int), file.own("embedding_length", int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path}: token_embd.weight is missing; it is not a whole language model")
    turned = file.own("rope.dimension_count", int, width // max(heads, 1))
    head_dim = file.own("attention.key_length", int, turned)
    for key, value in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if (found := file.own(key, int, value)) != value:
            raise UserError(
                f"{file.path}: {file.architecture}.{key} = {found} is not read, only {value}, the width of a head"
            )
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": file.own("feed_forward_length", int, None),
        "num_hidden_layers": file.own("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.own("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.own("context_length", int),
        "rms_norm_eps": file.own_real("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": theta,
        "rope_scaling": rope_scaling(file, head_dim, theta, truncate),
    }


def _llama(file: GGUFFile) -> Config:
    if experts := file.own("expert_count", int, 0):
        mixture = {"num_local_experts": experts, "num_experts_per_tok": file.own("expert_used_count", int)}
        return _shared(file, "mixtral", "MixtralForCausalLM") | mixture
    return _shared(file, "llama", "LlamaForCausalLM") | {"mlp_bias": False}


def _qwen(file: GGUFFile, model_type: str, name: str) -> Config:
    return _shared(file, model_type, name) | {"use_sliding_window": False}


def _qwen3_moe(file: GGUFFile) -> Config:
    dense = [layer for layer in _layers(file) if f"blk.{layer}.ffn_gate.weight" in file.tensors]
    return _qwen(file, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "num_experts": file.own("expert_count", int),
        "num_experts_per_tok": file.own("expert_used_count", int),
        "moe_intermediate_size": file.own("expert_feed_forward_length", int),
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        # llama.cpp does so for every file of this architecture.
        "norm_topk_prob": True,
    }


_GEMMA_PERIOD = 6
# Of 27B, which scales attention by another width than its heads'. The file does not say so; llama.cpp knows it by its layers.
_GEMMA_27B_LAYERS = 62


def _gemma3(file: GGUFFile) -> Config:
    shared = _shared(file, "gemma3_text", "Gemma3ForCausalLM", theta=1_000_000.0)
    del shared["hidden_act"]
    layers, window = shared["num_hidden_layers"], file.own("attention.sliding_window", int, 0)
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
        "rope_local_base_freq": file.own_real("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": file.own_real("final_logit_softcapping", None) or None,
        "attn_logit_softcapping": file.own_real("attn_logit_softcapping", None) or None,
    }


_KINDS = ("full_attention", "sliding_attention")


def _gpt_oss(file: GGUFFile) -> Config:
    shared = _shared(file, "gpt_oss", "GptOssForCausalLM", truncate=False)
    in_mxfp4 = any(kind_of(one, file) == "MXFP4" for name, one in file.tensors.items() if "_exps.weight" in name)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return shared | {
        "intermediate_size": file.own("expert_feed_forward_length", int),
        "num_local_experts": file.own("expert_count", int),
        "num_experts_per_tok": file.own("expert_used_count", int),
        "swiglu_limit": 7.0,  # of both releases; not in the file
        "sliding_window": file.own("attention.sliding_window", int),
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
    layers = file.own("block_count", int)
    if layers > len(file.tensors):
        raise UserError(
            f"{file.path}: {file.architecture}.block_count = {shown(layers)}, and it has {len(file.tensors)} tensors"
        )
    return range(layers)


def _named(file: GGUFFile, names: dict[str, str]) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the weights and biases that the file has of these modules, under Hugging Face names. `names` maps Hugging Face module
    names to llama.cpp's."""
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
    """Yields the tensors that llama.cpp stores unchanged, under Hugging Face names."""
    for theirs, stored in (*_named(file, _ENDS), *_in_layers(file, layers)):
        yield theirs, Whole(stored)


def _llama_sources(file: GGUFFile) -> Sources:
    heads = file.own("attention.head_count", int)
    turned = {"attn_q": heads, "attn_k": file.own("attention.head_count_kv", int, heads)}
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
