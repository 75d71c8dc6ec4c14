"""gpt-oss: attention sinks, a sliding window in every other layer, biases everywhere, experts saved fused with gate and up
interleaved, in MXFP4 where OpenAI released them."""

# Shapes: E experts, D width, F expert width, N a product's outputs, G blocks of 32 numbers, W bytes of a block.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.model.families import decoder
from nmoe.model.families.base import Entry, Packing
from nmoe.model.families.settings import Settings

MODEL_TYPE = "gpt_oss"
ignores = decoder.ignored_always

# The values of the four bits of E2M1 (OCP Microscaling Formats, version 1.0, section 5.3.3).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Defaults, as in transformers, for a config.json without positions or windows.
_THETA, _WINDOW = 150_000.0, 128
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw = {**raw, "rope_scaling": _ROPE}
    settings = Settings(raw, MODEL_TYPE)
    settings.refuse_alias("num_local_experts", "num_experts")
    settings.require(
        *decoder.SHAPE_KEYS, "head_dim", "intermediate_size", "num_local_experts", "num_experts_per_tok", "swiglu_limit"
    )
    settings.only("swiglu_alpha", 1.702)
    limit, biases = settings.real("swiglu_limit"), settings.flag("attention_bias", True)
    if limit <= 0:
        raise UserError(f"swiglu_limit = {limit} is not positive")
    settings.refuse_quantised("mxfp4")
    shared = decoder.decoder_settings(settings, _THETA)
    return ModelConfig(
        **shared | {"qkv_bias": biases, "output_bias": biases},
        experts=settings.whole("num_local_experts"),
        experts_per_token=settings.whole("num_experts_per_tok"),
        expert_width=settings.whole("intermediate_size"),
        expert_bias=True,
        router_linear_bias=True,
        swiglu_limit=limit,
        sinks=True,
        windows=_windows(settings, shared["layers"]),
        qk_norm=False,
    )


def _windows(settings: Settings, layers: int) -> tuple[int, ...]:
    kinds = settings.raw.get("layer_types", [("sliding_attention", "full_attention")[i % 2] for i in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UserError(
            f"layer_types = {kinds!r} does not name one of sliding_attention and full_attention for each of {layers} layers"
        )
    if "sliding_attention" not in kinds:
        return ()
    settings.refuse_null("sliding_window")
    window = settings.whole("sliding_window", _WINDOW)
    if window == 0:
        raise UserError("sliding_window = 0 leaves nothing to attend to")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    windows = [config.window(layer) for layer in range(config.layers)]
    raw = {
        **decoder.decoder_to_hf(config, MODEL_TYPE, "GptOssForCausalLM"),
        "intermediate_size": config.expert_width,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "swiglu_limit": config.swiglu_limit,
        # transformers requires it even if no layer has a window.
        "sliding_window": max(windows) or _WINDOW,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }
    # None would mean the release's scaling.
    return raw if config.rope_scaling is not None else raw | {"rope_scaling": {"rope_type": "default"}}


def entries(config: ModelConfig) -> Iterator[Entry]:
    experts, width, intermediate = config.experts, config.hidden_size, config.expert_width
    yield from decoder.ends(config)
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.", f"blocks.{layer}."
        yield from decoder.norms(config, layer)
        yield from decoder.attention(config, layer)
        yield Entry(theirs + "self_attn.sinks", ours + "attention.sinks", (config.heads,))
        theirs, ours = theirs + "mlp.", ours + "ffn."
        yield Entry(theirs + "router.weight", ours + "router.weight", (experts, width))
        yield Entry(theirs + "router.bias", ours + "router.linear_bias", (experts,))
        theirs += "experts."
        for name, shape in (("", (experts, width, 2 * intermediate)), ("_bias", (experts, 2 * intermediate))):
            yield Entry(
                f"{theirs}gate_up_proj{name}", f"{ours}gate_up{name}", shape, (), halves, interleaved, stacked=True
            )
        yield Entry(theirs + "down_proj", ours + "down", (experts, intermediate, width), stacked=True)
        yield Entry(theirs + "down_proj_bias", ours + "down_bias", (experts, width))


def halves(gate_up: Tensor) -> Tensor:
    """Separates gate and up on the last axis: columns 0, 2, 4, ..., then 1, 3, 5, ..."""
    return gate_up.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def interleaved(gate_up: Tensor) -> Tensor:
    """The inverse of `halves`."""
    return gate_up.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def dequantised(blocks_ENGW: Tensor, scales_ENG: Tensor) -> Tensor:
    """Experts `[E, inputs, N]` in bf16, a view of `[E, N, inputs]`, from MXFP4: two numbers of four bits a byte, the lower
    bits first, and a power of two, `2 ** (scale - 127)`, for each block of 32; 255 is NaN. Exact: bf16 holds every product.

    Raises UserError if blocks and scales do not match.
    """
    found = (
        f"blocks {list(blocks_ENGW.shape)} {blocks_ENGW.dtype} and scales {list(scales_ENG.shape)} {scales_ENG.dtype}"
    )
    if blocks_ENGW.dim() != 4 or blocks_ENGW.shape[:-1] != scales_ENG.shape or blocks_ENGW.shape[-1] != 16:
        raise UserError(f"{found} are not MXFP4: [E, N, G, 16] and [E, N, G]")
    if blocks_ENGW.dtype != torch.uint8 or scales_ENG.dtype != torch.uint8:
        raise UserError(f"{found} are not MXFP4: both are bytes")
    values = torch.tensor(_FP4, dtype=torch.bfloat16)
    # All pairs of values, indexed by byte: looking up a whole byte is six times faster than looking up its halves.
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127).to(torch.bfloat16)
    powers[255] = torch.nan
    out_ENGX = torch.empty(*scales_ENG.shape, 32, dtype=torch.bfloat16)
    for out_NGX, blocks_NGW, scales_NG in zip(out_ENGX, blocks_ENGW, scales_ENG, strict=True):
        # One expert at a time, because indices take four times the memory of the bytes.
        torch.index_select(pairs, 0, blocks_NGW.flatten().int(), out=out_NGX.view(-1, 2))
        out_NGX.mul_(powers[scales_NG.int()].unsqueeze(-1))
    return out_ENGX.flatten(-2).transpose(1, 2)


PACKINGS: tuple[Packing, ...] = (Packing(("_blocks", "_scales"), dequantised),)
