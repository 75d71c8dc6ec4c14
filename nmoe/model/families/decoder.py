"""Entries and settings that many families share, under Llama's names: embeddings, norms, grouped-query attention, SwiGLU blocks,
and experts saved one by one."""

# Shapes: V vocabulary, D width, H query heads, J key-value heads, C head width, F intermediate width, E experts.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nmoe.model.config import ModelConfig
from nmoe.model.families.base import TIED_HEAD, Entry, identity, transpose
from nmoe.model.families.settings import Settings, rope_to_hf

Conversion = Callable[[Tensor], Tensor]

SHAPE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


# For families without `attention_bias`: readers ignore the key there.
NO_BIASES = {"qkv_bias": False, "output_bias": False}


def decoder_settings(settings: Settings, theta: float = 10_000.0, rotary_share: float | None = None) -> dict[str, Any]:
    """Returns the settings that every family's ModelConfig takes from the same keys. Query, key, value and output projections have
    biases either all or none, as transformers' `attention_bias` means it. `theta` is the default of the rotary base;
    `rotary_share`, in families with partial rotary embedding, is the default of the share of a head that is turned (None: always
    the whole head)."""
    settings.only("hidden_act", "silu")
    settings.only("is_causal", True)
    settings.refuse_null("is_causal")
    settings.only("per_layer_config", {})
    heads, width = settings.whole("num_attention_heads"), settings.whole("hidden_size")
    rope_theta, rope_scaling = settings.rope(theta, rotary_share is not None)
    head_dim = settings.whole("head_dim", width // max(heads, 1))
    biases = settings.flag("attention_bias")
    return {
        "vocab_size": settings.whole("vocab_size"),
        "hidden_size": width,
        "layers": settings.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": settings.whole("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rotary_dim": 0 if rotary_share is None else settings.rotary_dim(head_dim, rotary_share),
        "context_tokens": settings.whole("max_position_embeddings"),
        "tie_embeddings": settings.flag("tie_word_embeddings"),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "norm_eps": settings.real("rms_norm_eps"),
        "qkv_bias": biases,
        "output_bias": biases,
    }


def decoder_to_hf(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Converts a configuration to the `config.json` keys that `decoder_settings` reads."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_tokens,
        "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.qkv_bias,
        "hidden_act": "silu",
        **rope_to_hf(config),
    }


def ends(config: ModelConfig) -> Iterator[Entry]:
    """Yields the entries of embedding, last norm and, unless it is tied, the output head."""
    table = (config.vocab_size, config.hidden_size)
    yield Entry("model.embed_tokens.weight", "embedding.weight", table)
    yield Entry("model.norm.weight", "norm.weight", (config.hidden_size,))
    if not config.tie_embeddings:
        yield Entry(TIED_HEAD, "head.weight", table)


def norms(config: ModelConfig, layer: int) -> Iterator[Entry]:
    """Yields the entries of a layer's two norms."""
    for theirs, ours in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm")):
        yield Entry(f"model.layers.{layer}.{theirs}.weight", f"blocks.{layer}.{ours}.weight", (config.hidden_size,))


def attention(config: ModelConfig, layer: int) -> Iterator[Entry]:
    """Yields the entries of a layer's grouped-query attention, with biases, QK-norm and gates if the configuration has them."""
    theirs, ours = f"model.layers.{layer}.self_attn.", f"blocks.{layer}.attention."
    width, head_dim = config.hidden_size, config.head_dim
    turned: tuple[Conversion, Conversion] = (identity, identity)
    if config.rotary_dim:
        turned = reordered(_partial_rotary_order(head_dim, config.rotary_dim))
    orders = {"q": reordered(_gates_first(config)) if config.attention_gate else turned, "k": turned}
    queries = config.heads * (1 + config.attention_gate)
    first = 0
    for name, heads in (("q", queries), ("k", config.kv_heads), ("v", config.kv_heads)):
        rows = slice(first, first + heads * head_dim)
        first = rows.stop
        order = orders.get(name, (identity, identity))
        yield Entry(f"{theirs}{name}_proj.weight", f"{ours}qkv_proj.weight", (heads * head_dim, width), (rows,), *order)
        if config.qkv_bias:
            yield Entry(f"{theirs}{name}_proj.bias", f"{ours}qkv_proj.bias", (heads * head_dim,), (rows,), *order)
    yield Entry(f"{theirs}o_proj.weight", f"{ours}o_proj.weight", (width, config.heads * head_dim))
    if config.output_bias:
        yield Entry(f"{theirs}o_proj.bias", f"{ours}o_proj.bias", (width,))
    if config.qk_norm:
        for name in ("q_norm.weight", "k_norm.weight"):
            yield Entry(theirs + name, ours + name, (head_dim,), (), *turned)


def _gates_first(config: ModelConfig) -> Tensor:
    """Returns the order that puts the rows of all output gates before the rows of the queries. Releases save a head's queries and
    then its gates."""
    rows = torch.arange(2 * config.heads * config.head_dim).view(config.heads, 2, -1)
    queries = rows[:, 0]
    if config.rotary_dim:
        queries = queries[:, _partial_rotary_order(config.head_dim, config.rotary_dim)]
    return torch.cat([rows[:, 1].flatten(), queries.flatten()])


def _partial_rotary_order(head_dim: int, rotary_dim: int) -> Tensor:
    """Returns the order of a head's rows for the layout of `nmoe.model.rope`, where the two halves of a head are turned against
    each other, and the pairs that are not turned come last. Releases turn the halves of the first `rotary_dim` rows and leave the
    rest. The products are the same if queries and keys are reordered alike."""
    turned_c, rest_c = torch.arange(rotary_dim).chunk(2), torch.arange(rotary_dim, head_dim).chunk(2)
    return torch.cat([turned_c[0], rest_c[0], turned_c[1], rest_c[1]])


def reordered(order_C: Tensor) -> tuple[Conversion, Conversion]:
    """Returns the functions for `Entry.read`, which puts the rows of every head into this order, and `Entry.write`, which puts them
    back."""
    back_C = order_C.argsort()

    def in_order(order_C: Tensor, weight: Tensor) -> Tensor:
        heads = weight.unflatten(0, (-1, len(order_C)))
        return heads.index_select(1, order_C.to(weight.device)).flatten(0, 1)

    return partial(in_order, order_C), partial(in_order, back_C)


def swiglu(theirs: str, ours: str, width: int, intermediate: int) -> Iterator[Entry]:
    """Yields the entries of a dense SwiGLU block; `theirs` and `ours` are prefixes such as `model.layers.0.mlp.` and
    `blocks.0.ffn.`."""
    for name, first in (("gate", 0), ("up", intermediate)):
        rows = slice(first, first + intermediate)
        yield Entry(f"{theirs}{name}_proj.weight", f"{ours}gate_up_proj.weight", (intermediate, width), (rows,))
    yield Entry(f"{theirs}down_proj.weight", f"{ours}down_proj.weight", (width, intermediate))


def dense(config: ModelConfig) -> Iterator[Entry]:
    """Yields all entries of a dense decoder."""
    yield from ends(config)
    for layer in range(config.layers):
        yield from norms(config, layer)
        yield from attention(config, layer)
        mlp, ffn = f"model.layers.{layer}.mlp.", f"blocks.{layer}.ffn."
        yield from swiglu(mlp, ffn, config.hidden_size, config.intermediate_size)


def experts_one_by_one(
    theirs: str, ours: str, config: ModelConfig, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[Entry]:
    """Yields the entries of experts that are each saved as a SwiGLU block, `{theirs}{e}.gate_proj.weight` and so on; `names` are
    the names of gate, up and down."""
    width, intermediate = config.hidden_size, config.expert_width
    gate, up, down = names
    for e in range(config.experts):
        for name, first in ((gate, 0), (up, intermediate)):
            columns = slice(first, first + intermediate)
            yield Entry(
                f"{theirs}{e}.{name}.weight",
                f"{ours}gate_up",
                (intermediate, width),
                (e, slice(None), columns),
                transpose,
                transpose,
            )
        yield Entry(f"{theirs}{e}.{down}.weight", f"{ours}down", (width, intermediate), (e,), transpose, transpose)


# Tables of old versions, and the factors by which quantised releases scale a layer's inputs, which are not quantised so here.
_UNREAD = ("rotary_emb.inv_freq", ".input_scale", ".input_global_scale")


def ignored_always(name: str, config: ModelConfig) -> bool:
    """Returns whether a stored tensor is one that any checkpoint may have and that is ignored: a tied head, which `fill`
    compares with the embedding, tables of old versions, or the factor by which releases in FP8 quantise a layer's inputs, which
    are not quantised here."""
    return (config.tie_embeddings and name == TIED_HEAD) or name.endswith(_UNREAD)
