"""Converts the rotary scaling of a GGUF file to the `rope_scaling` of a `config.json`.

llama.cpp computes rotary frequencies from metadata and from one tensor. A pair of dimensions that turns by `theta` per position
without scaling is turned by

    theta / rope_freqs * (mix + (1 - mix) / factor),   mix = yarn_ext_factor * (1 - YaRN's ramp),

and cosine and sine are multiplied by `attn_factor * yarn_attn_factor`, and by YaRN's own factor for attention if `yarn_ext_factor`
is not 0 (`rope_yarn` and `ggml_rope_cache_init` of ggml, `llama_context` of llama.cpp). Scaling that no usual kind describes is
written as LongRoPE's, with a factor for each pair.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.gguf_file import GGUFFile
from nmoe.model.config import RopeScaling
from nmoe.model.gguf.sources import check_extent, read_rows
from nmoe.model.rope import rope_frequencies, yarn_mscale

# Not needed as a tensor: the configuration has its values.
ROPE_FACTORS = "rope_freqs.weight"


def rope_scaling(file: GGUFFile, head_dim: int, theta: float, truncate: bool) -> dict[str, Any] | None:
    """Returns `rope_scaling` for a `config.json`, None without scaling, given the width of a head and the rotary base; `truncate`
    is whether the family rounds the bounds of YaRN's ramp. Raises UserError for a scaling that nmoe does not support."""

    def value(key: str, default: float) -> float:
        return file.own_real(f"rope.scaling.{key}", default)

    kind, factor = _kind_and_factor(file)
    context = file.own("context_length", int)
    original = file.own("rope.scaling.original_context_length", int, 0) or context
    # 0 means the default, as in `config.json`.
    fast, slow = value("yarn_beta_fast", 32.0) or 32.0, value("yarn_beta_slow", 1.0) or 1.0
    yarn = RopeScaling("yarn", factor, original, beta_fast=fast, beta_slow=slow, truncate=truncate)
    mixed = value("yarn_ext_factor", -1.0)
    if mixed < 0:  # not set
        mixed = float(kind == "yarn")
    own = yarn_mscale(factor)
    if all_dimensions := value("yarn_log_multiplier", 0.0):
        own /= yarn_mscale(factor, all_dimensions)
    attention = (own if mixed else 1.0) * value("attn_factor", 1.0) * value("yarn_attn_factor", 1.0)
    positive = {
        "freq_base": theta,
        "scaling.factor": factor,
        "scaling.original_context_length": original,
        "scaling.yarn_beta_fast": fast,
        "scaling.yarn_beta_slow": slow,
        "scaling.attn_factor": attention,
    }
    _check(file, positive, value("alpha", 0.0))

    factors = _factors(file, head_dim // 2)
    if factors is None and attention == 1 and not mixed:
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if factors is None and mixed == 1:
        return _as_yarn(yarn, attention)
    plain = rope_frequencies(context, head_dim, theta)
    if factors is not None and factor == attention == 1:
        found = _as_llama3(plain, factors, context, theta)
        if found is not None:
            return found
    scaled = (1 - mixed) * plain / factor
    if mixed:
        scaled = scaled + mixed * rope_frequencies(context, head_dim, theta, yarn)
    return _as_longrope(plain / scaled * (1.0 if factors is None else factors), context, attention)


def _kind_and_factor(file: GGUFFile) -> tuple[str, float]:
    kind = file.get(f"{file.architecture}.rope.scaling.type", str, None)
    # As in llama.cpp: older files have a separate factor, and one without a type is linear.
    factor = file.own_real("rope.scaling.factor", 0.0) or file.own_real("rope.scale_linear", 0.0)
    if kind is None:
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise UserError(
            f"{file.path}: {file.architecture}.rope.scaling.type = {kind!r} is not read, only linear and yarn"
        )
    return kind, 1.0 if kind == "none" else factor or 1.0


def _check(file: GGUFFile, positive: dict[str, float], alpha: float) -> None:
    for key, value in positive.items():
        if not 0 < value < float("inf"):
            raise UserError(f"{file.path}: {file.architecture}.rope.{key} = {value:g} is not a positive number")
    if alpha not in (0.0, 1.0):
        raise UserError(f"{file.path}: {file.architecture}.rope.scaling.alpha = {alpha:g} is not read, only 1")


def _factors(file: GGUFFile, pairs: int) -> Tensor | None:
    """Reads the divisors of the pairs' rotary frequencies, `[head_dim / 2]` in fp64, rounded to the seven digits that they had
    before fp32; None if the file has none. Raises UserError for another shape."""
    if (stored := file.tensors.get(ROPE_FACTORS)) is None:
        return None
    if stored.shape != (pairs,):
        raise UserError(f"{file.path}: {ROPE_FACTORS} has the shape {list(stored.shape)}, and a head has {pairs} pairs")
    check_extent(stored, file)
    # As they were before they were rounded to fp32.
    return torch.tensor(
        [float(f"{one:.7g}") for one in read_rows(stored, file, 0, pairs).tolist()], dtype=torch.float64
    )


def _as_yarn(scaling: RopeScaling, attention: float) -> dict[str, Any]:
    found = {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context_tokens,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    if not scaling.truncate:
        found["truncate"] = False
    return found if attention == yarn_mscale(scaling.factor) else found | {"attention_factor": attention}


# Of Llama 3.1, 3.2 and 3.3; the release's `rope_scaling` is not in the file, only the factors that follow from it.
_LOW, _HIGH = 1.0, 4.0
_CONTEXTS = tuple(2**power for power in range(4, 20))


def _as_llama3(plain: Tensor, factors: Tensor, context: int, theta: float) -> dict[str, Any] | None:
    """Returns Llama 3's scaling with the settings that give these factors; None if the usual settings do not."""
    factor = float(f"{float(factors.max()):.6g}")
    for original in _CONTEXTS:
        scaling = RopeScaling("llama3", factor, original, _LOW, _HIGH)
        ours = plain / rope_frequencies(context, 2 * len(factors), theta, scaling)
        if torch.allclose(ours, factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": original,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
            }
    return None


def _as_longrope(divisors: Tensor, context: int, attention: float) -> dict[str, Any]:
    """Writes any divisors of frequencies as LongRoPE's, the same for short and long contexts."""
    both = divisors.tolist()
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "original_max_position_embeddings": context,
        "attention_factor": attention,
        "short_factor": both,
        "long_factor": both,
    }
