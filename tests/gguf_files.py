"""Small GGUF files for tests, written by the `gguf` library under the rules of llama.cpp's convert_hf_to_gguf.py: a model that
transformers made, and a byte-level tokenizer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}


def write_gguf(
    model: PreTrainedModel,
    directory: Path,
    path: Path,
    kind: Kind = Kind.F32,
    factors: np.ndarray | None = None,
    rule: str | None = None,
) -> Path:
    """Saves a model as safetensors in `directory`, and writes the same weights to a GGUF file: matrices in `kind` where their rows
    are whole blocks of it, the rest in F32; with `factors` of its frequencies and, where its `rule` is named, the tokenizer that
    lies in `directory`."""
    model.save_pretrained(directory)
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_settings(writer, config)
    if rule is not None:
        add_tokenizer(writer, directory, rule)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, values in _renamed(load_file(directory / "model.safetensors"), config).items():
        add_tensor(writer, name, values, kind if values.dim() > 1 and name.endswith("weight") else Kind.F32)
    return finish(writer)


def add_keys(writer: gguf.GGUFWriter, keys: dict[str, Any]) -> None:
    for key, value in keys.items():
        name = key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](name, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: Tensor, kind: Kind) -> None:
    array = np.ascontiguousarray(values.float().numpy())
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if kind == Kind.F32 or array.shape[-1] % block:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


def _write_settings(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = dict(config.rope_parameters)
    windowed = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if windowed is not None:
        writer.add_float32("gemma3.rope.freq_base_swa", windowed["rope_theta"])
    if getattr(config, "sliding_window", None) and config.model_type in ("gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    match rope.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "beta_fast" in rope:
                writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What each pair's frequency is divided by, wavelength by wavelength as Llama 3.1's release says it."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > rope["high_freq_factor"]:
            factors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _renamed(state: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    converted: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, values in state.items():
        module, _, part = name.rpartition(".")
        parts = module.split(".")
        if "experts" in parts and parts[-2].isdigit():
            experts.setdefault(".".join([*parts[:-2], parts[-1]]), {})[int(parts[-2])] = values
            continue
        if config.model_type == "gpt_oss" and (".experts." in name or part == "sinks"):
            converted |= _gpt_oss(name, values, names)
            continue
        if config.model_type in ("llama", "mixtral") and parts[-1] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if parts[-1] == "q_proj" else config.num_key_value_heads
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            values = values + 1
        converted[f"{names.get_name(module)}.{part}"] = values
    for module, one_by_one in experts.items():
        converted[f"{names.get_name(module)}.weight"] = torch.stack([one_by_one[e] for e in range(len(one_by_one))])
    return converted


def _gpt_oss(name: str, values: Tensor, names: gguf.TensorNameMap) -> dict[str, Tensor]:
    module, _, part = name.rpartition(".")
    if part == "sinks":
        return {f"{names.get_name(name)}.weight": values}
    projection, bias = part.removesuffix("_bias"), part.endswith("_bias")
    suffix = "bias" if bias else "weight"
    if projection == "down_proj":
        return {f"{names.get_name(f'{module}.{projection}')}.{suffix}": values if bias else values.transpose(1, 2)}
    both = {"gate_proj": values[..., 0::2], "up_proj": values[..., 1::2]}
    return {
        f"{names.get_name(f'{module}.{one}')}.{suffix}": half if bias else half.transpose(1, 2)
        for one, half in both.items()
    }


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, rule: str | None) -> None:
    """Adds a Hugging Face tokenizer as llama.cpp converts it: a byte-level one under the name of its rule, else SentencePiece's."""
    definition = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    words = {id_: word for word, id_ in definition["model"]["vocab"].items()}
    added = {one["id"]: one for one in definition["added_tokens"]}
    tokens, kinds, scores = list[str](), list[gguf.TokenType](), list[float]()
    for id_ in range(max([*words, *added]) + 1):
        if id_ in added:
            token = added[id_]["content"]
            control = added[id_]["special"] or _looks_special(token)
            kind = gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED
        elif id_ in words:
            token = words[id_]
            byte = rule is None and len(token) == 6 and token.startswith("<0x")
            kind = gguf.TokenType.BYTE if byte else gguf.TokenType.NORMAL
        else:
            token, kind = f"[PAD{id_}]", gguf.TokenType.UNUSED
        tokens.append(token)
        kinds.append(kind)
        # Runs of one character are user-defined in Gemma's model, where all of these have one score.
        scores.append(0.0 if len(token) > 1 and set(token) <= {token[0]} and token[0] in "\n\t\u2581" else -float(id_))
    writer.add_tokenizer_model("llama" if rule is None else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if rule is None:
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_pre(rule)
        merges = definition["model"]["merges"]
        writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
        ("unk_token", writer.add_unk_token_id),
    ):
        if (found := config.get(name)) is not None:
            add(tokens.index(found if isinstance(found, str) else found["content"]))


def _looks_special(token: str) -> bool:
    """Whether llama.cpp takes an added token for a control token though its file does not call it special."""
    pairs = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return token in ("<pad>", "<mask>") or any(
        token.startswith(first) and token.endswith(last) for first, last in pairs
    )
