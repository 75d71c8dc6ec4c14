"""The architecture of a decoder: what a checkpoint's `config.json` holds, as features that any family of models combines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import Field, ValidationError

from nmoe.config.base import Array, Conflict
from nmoe.config.locate import Locator, Place
from nmoe.config.problems import explain
from nmoe.config.tables.model import LARGEST, ExpertProfile, ModelShape
from nmoe.errors import UserError

Numerics = Literal["fast", "exact"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pretraining, `original_context_tokens`.

    `llama3`: frequencies below `low_freq_factor` turns per original context are divided by `factor`, those above `high_freq_factor`
    stay, between them the two are blended (Llama 3.1's release). `yarn`: the same idea by dimension, from `beta_fast` to
    `beta_slow` turns, with cosines and sines times `attention_factor` (Peng et al. 2023, arXiv:2309.00071). `truncate` rounds the
    two bounds to whole dimensions. `linear` divides all by `factor`. `longrope` divides each pair by a factor from `short_factors`
    if the model's context is no longer than the original, else of `long_factors`, with cosines and sines times `attention_factor`
    (Ding et al. 2024, arXiv:2402.13753). `dynamic` changes nothing within the original context; how it goes beyond,
    `nmoe.model.rope.extended` says.
    """

    kind: Literal["llama3", "yarn", "linear", "dynamic", "longrope"]
    factor: float
    original_context_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values are read from one latent vector
    of `kv_rank` per token, queries from one of `q_rank` (0: from the hidden state). Each head's query and key is `nope_dim`
    numbers without position and `rope_dim` rotated ones, which for the key all heads share."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): `key_heads` query and key heads of width `key_dim`, each shared by
    `value_heads / key_heads` heads of values of width `value_dim`, after a causal convolution over `conv_tokens` tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int

    @property
    def values(self) -> int:
        """The width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values of all heads together."""
        return 2 * self.key_heads * self.key_dim + self.values


class ModelConfig(ModelShape):
    """The architecture of a decoder: the settings of `[model.shape]`, and what the tokenizer and the families of checkpoints add.
    Raises UserError.

    Example, the small MoE of the speedrun: `ModelConfig(vocab_size=512, hidden_size=128, layers=3, heads=4, kv_heads=2,
    head_dim=32, experts=8, experts_per_token=2, expert_width=128, context_tokens=160)`.

    `experts = 0` is a dense model with SwiGLU blocks of `intermediate_size`; with experts, `dense_layers` names the layers that
    have such a dense block instead of experts. `swiglu_limit > 0` is gpt-oss's clamped SwiGLU in the experts. `gelu` replaces SiLU
    by GELU.

    `output_norms` also norms the outputs of attention and feed-forward before they are added to the residual stream; with
    `norm_offset` norms scale by one plus their weight. `scale_embedding` multiplies embeddings by the root of their width (Gemma,
    arXiv:2403.08295).

    Attention: `windows` gives each layer's sliding window in tokens, the current token included (0: no window; empty: no layer has
    one); `window_rope_theta` is the base of the rotary frequencies of layers with a window (0: the same base and scaling as in the
    other layers). `sinks` adds one learned logit per head to the denominator of the softmax. `attention_scale = 0` stands for
    `head_dim ** -0.5`. `rotary_dim` is the number of a head's dimensions that the rotary embedding turns (0: all). `latent`
    replaces grouped-query attention; `head_dim` is then `nope_dim + rope_dim`. `attention_gate` multiplies each head's output by a
    sigmoid of a linear map of the hidden state. `recurrent_layers` names the layers that have `delta` instead of attention.

    Routing: each token takes the `experts_per_token` experts with the highest sum of score and balancing bias; the bias does not
    enter their weights. `router_bias_rate > 0` moves that bias by this rate after each optimizer step (Wang et al. 2024,
    arXiv:2408.15664). With `router_groups > 1` the choice is limited to the `router_groups_kept` groups whose two best scores sum
    highest (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). `shared_gate` weighs the shared experts by a sigmoid of a linear map of
    the hidden state. `router_aux_loss_coef` scales the auxiliary loss (Fedus et al. 2021, arXiv:2101.03961, eq. 4).
    `expert_profile` is the number format that routed experts are computed in (`nmoe.model.expert_profile`); None: the model's
    dtype.
    """

    vocab_size: int = Field(gt=0, le=LARGEST)
    expert_profile: ExpertProfile | None = None
    router_bias_rate: float = Field(default=0.0, ge=0)
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    rope_scaling: RopeScaling | None = None
    latent: LatentAttention | None = None
    delta: DeltaNet | None = None
    recurrent_layers: Array[int] = ()
    rotary_dim: int = Field(default=0, ge=0)
    attention_gate: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    windows: Array[int] = ()
    window_rope_theta: float = Field(default=0.0, ge=0)
    attention_scale: float = Field(default=0.0, ge=0)
    dense_layers: Array[int] = ()
    expert_bias: bool = False
    swiglu_limit: float = Field(default=0.0, ge=0)
    gelu: bool = False
    output_norms: bool = False
    norm_offset: bool = False
    scale_embedding: bool = False
    router_linear_bias: bool = False
    shared_gate: bool = False
    router_groups: int = Field(default=1, gt=0)
    router_groups_kept: int = Field(default=1, gt=0)
    router_scale: float = Field(default=1.0, ge=0)

    def __init__(self, **values: Any) -> None:
        for nested in (values.get("rope_scaling"), values.get("latent"), values.get("delta")):
            if nested is not None:
                _check_numbers(nested)
        try:
            super().__init__(**values)
        except ValidationError as errors:
            where = Locator(Place("the shape of a model"))
            mistakes = [
                mistake.message
                for error in errors.errors(include_url=False)
                for mistake in explain(error, type(self), where, {})
            ]
            raise UserError("; ".join(mistakes)) from None

    def conflicts(self) -> Iterator[Conflict]:
        if self.windows and len(self.windows) != self.layers:
            yield Conflict("windows", f"has {len(self.windows)} entries for {self.layers} layers")
        if any(window < 0 for window in self.windows):
            yield Conflict("windows", "holds a negative number of tokens")
        if self.latent is not None:
            if self.head_dim != self.latent.nope_dim + self.latent.rope_dim or self.kv_heads != self.heads:
                yield Conflict(
                    "head_dim", "with latent attention head_dim is nope_dim + rope_dim, and kv_heads equals heads"
                )
            if self.qk_norm or self.qkv_bias or self.attention_gate:
                yield Conflict("qk_norm", "latent attention has neither qk_norm nor qkv_bias nor attention_gate")
        if (self.delta is None) != (not self.recurrent_layers):
            yield Conflict("recurrent_layers", "go with delta, what they compute: give both or neither")
        if any(not 0 <= layer < self.layers for layer in self.recurrent_layers):
            yield Conflict("recurrent_layers", f"names layers outside 0..{self.layers - 1}")
        if self.delta is not None and self.delta.value_heads % self.delta.key_heads:
            yield Conflict("delta.value_heads", f"must be a multiple of key_heads = {self.delta.key_heads}")
        if self.shared_gate and not self.shared_experts:
            yield Conflict("shared_gate", "means something only beside shared_experts")
        if self.rotary_dim and (self.latent is not None or self.rotary_dim >= self.head_dim or self.head_dim % 2):
            yield Conflict("rotary_dim", f"is a part of a head of even width, not of head_dim = {self.head_dim}")
        if (scaling := self.rope_scaling) is not None and scaling.kind == "longrope":
            pairs = self.rope_dim // 2
            if {len(scaling.short_factors), len(scaling.long_factors)} != {pairs}:
                yield Conflict(
                    "rope_scaling.kind", f"longrope needs {pairs} short and {pairs} long factors, one for each pair"
                )
        if self.window_rope_theta and not any(self.windows):
            yield Conflict("window_rope_theta", "means something only beside windows")
        if self.experts and self.gelu:
            yield Conflict("gelu", "experts have SiLU")
        if self.experts:
            yield from self._expert_conflicts()
        elif self.dense_layers:
            yield Conflict("dense_layers", "means something only beside experts")
        if self.expert_profile is not None:
            yield from self._profile_conflicts(self.expert_profile)

    def _expert_conflicts(self) -> Iterator[Conflict]:
        if any(not 0 <= layer < self.layers for layer in self.dense_layers):
            yield Conflict("dense_layers", f"names layers outside 0..{self.layers - 1}")
        if self.dense_layers and self.intermediate_size == 0:
            yield Conflict("intermediate_size", "dense_layers need the width of their FFN")
        if not self.router_groups_kept <= self.router_groups or self.experts % self.router_groups:
            yield Conflict(
                "router_groups",
                f"must divide experts = {self.experts}, and router_groups_kept = {self.router_groups_kept} lie in "
                "1..router_groups",
            )
            return
        eligible = self.experts // self.router_groups * self.router_groups_kept
        if eligible < self.experts_per_token or (self.router_groups > 1 and self.experts // self.router_groups < 2):
            yield Conflict(
                "router_groups_kept",
                f"{self.router_groups_kept} of {self.router_groups} groups hold too few experts to choose from",
            )

    def _profile_conflicts(self, profile: ExpertProfile) -> Iterator[Conflict]:
        if not self.moe_layers:
            yield Conflict(
                "expert_profile", f"{profile} is for routed experts, of which this model has none: leave it out"
            )
        elif profile == "nvfp4" and (self.hidden_size % 16 or self.expert_width % 16):
            yield Conflict(
                "expert_profile",
                f"nvfp4 has blocks of 16 inputs: hidden_size = {self.hidden_size} and expert_width = {self.expert_width} have to "
                "be multiples of 16; fp8 takes any width",
            )

    @property
    def rope_dim(self) -> int:
        """The number of dimensions of a head that the rotary embedding turns."""
        return self.rotary_dim or self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """The width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def scale(self) -> float:
        """The factor by which attention logits `q @ k` are multiplied before the softmax."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers that attend to keys and values, which are all but the recurrent layers."""
        return tuple(layer for layer in range(self.layers) if layer not in self.recurrent_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The indices of the layers that have experts."""
        return tuple(layer for layer in range(self.layers) if self.experts and layer not in self.dense_layers)

    @property
    def routed_experts(self) -> int:
        """The number of experts in each MoE layer; 0 if all layers are dense, even with `experts` set."""
        return self.experts if self.moe_layers else 0

    def window(self, layer: int) -> int:
        """Returns the sliding window of a layer in tokens; 0 if it has none."""
        return self.windows[layer] if self.windows else 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as a JSON object that includes defaults, because another version's defaults may differ."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Reads what `to_dict` wrote. Raises UserError for unknown and missing keys."""
        if unknown := sorted(raw.keys() - cls.model_fields.keys()):
            raise UserError(f"unknown keys {', '.join(unknown)}: written by another version?")
        if missing := [name for name, field in cls.model_fields.items() if field.is_required() and name not in raw]:
            raise UserError(f"missing keys {', '.join(missing)}")
        values = dict(raw)
        for name, nested in (("rope_scaling", RopeScaling), ("latent", LatentAttention), ("delta", DeltaNet)):
            if values.get(name) is not None:
                try:
                    stored: dict[str, Any] = {
                        key: tuple(value) if isinstance(value, list) else value for key, value in values[name].items()
                    }
                    values[name] = nested(**stored)
                except (AttributeError, TypeError) as error:
                    raise UserError(f"{name} = {values[name]!r}: {error}") from None
        return cls(**values)


def _check_numbers(section: LatentAttention | DeltaNet | RopeScaling) -> None:
    for f in fields(section):
        value = getattr(section, f.name)
        # A default of 0 means that the decoder may lack the feature.
        least = 0 if f.default == 0 or f.name == "q_rank" else 1
        if f.type == "int" and (type(value) is not int or value < least):
            raise UserError(f"{f.name} = {value!r} is not a whole number from {least} up")
        if f.type == "float" and (type(value) not in (int, float) or value < 0):
            raise UserError(f"{f.name} = {value!r} is not a number from 0 up")
        if f.type == "tuple[float, ...]" and not (
            isinstance(value, tuple) and all(type(item) in (int, float) and item > 0 for item in value)
        ):
            raise UserError(f"{f.name} = {value!r} is not a list of numbers above 0")
        if f.type == "bool" and type(value) is not bool:
            raise UserError(f"{f.name} = {value!r} is neither true nor false")
