"""The shape of a decoder: what a checkpoint's `config.json` holds, as features that any family combines."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

from nmoe.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pretraining, `original_context_tokens`.

    `llama3`: frequencies below `low_freq_factor` turns per original context are divided by `factor`, those above
    `high_freq_factor` stay, between them the two are blended (Llama 3.1's release). `yarn`: the same idea by dimension, from
    `beta_fast` to `beta_slow` turns, with cosines and sines times `attention_factor` (Peng et al. 2023, arXiv:2309.00071).
    `truncate` rounds the two bounds to whole dimensions. `linear` divides all by `factor`.
    """

    kind: Literal["llama3", "yarn", "linear"]
    factor: float
    original_context_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


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
class ModelConfig:
    """One decoder, dense or mixture-of-experts by its numbers.

    Example, the small MoE of the speedrun: `ModelConfig(vocab_size=512, hidden_size=128, layers=3, heads=4, kv_heads=2,
    head_dim=32, experts=8, experts_per_token=2, expert_width=128, context_tokens=160)`.

    `experts = 0` is a dense model with SwiGLU blocks of `intermediate_size`; with experts, `dense_layers` names the layers that
    have such a block in place of theirs. `swiglu_limit > 0` is gpt-oss's clamped SwiGLU in the experts.

    Attention: `windows` gives each layer's sliding window in tokens, itself included (0: everything before; empty: 0 in all
    layers). `sinks` adds to each head's softmax one learned logit that takes part in the sum alone. `attention_scale = 0` stands
    for `head_dim ** -0.5`. `latent` replaces grouped-query attention; `head_dim` is then `nope_dim + rope_dim`.

    Routing: K of E by score plus a balancing bias that moves the choice alone. `router_bias_rate > 0` moves that bias by this
    rate after each optimizer step (Wang et al. 2024, arXiv:2408.15664). With `router_groups > 1` the choice is limited to the
    `router_groups_kept` groups whose two best scores sum highest (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    `router_aux_loss_coef` scales the auxiliary loss (Fedus et al. 2021, arXiv:2101.03961, eq. 4).
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    intermediate_size: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_experts: int = 0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    router_bias_rate: float = 0.0
    router_aux_loss_coef: float = 0.0
    qk_norm: bool = True
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    rope_scaling: RopeScaling | None = None
    latent: LatentAttention | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    windows: tuple[int, ...] = ()
    attention_scale: float = 0.0
    dense_layers: tuple[int, ...] = ()
    expert_bias: bool = False
    swiglu_limit: float = 0.0
    router_linear_bias: bool = False
    router_groups: int = 1
    router_groups_kept: int = 1
    router_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.router_scores not in ("softmax", "sigmoid"):
            raise UserError(f"router_scores = {self.router_scores!r} is neither softmax nor sigmoid")
        if self.heads % self.kv_heads:
            raise UserError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.rope_dim % 2:
            raise UserError(f"rotary embedding turns pairs, and {self.rope_dim} dimensions are odd")
        if self.windows and len(self.windows) != self.layers:
            raise UserError(f"windows has {len(self.windows)} entries for {self.layers} layers")
        if self.experts:
            self._check_experts()
        elif self.dense_layers:
            raise UserError("dense_layers means something only beside experts")
        if (not self.experts or self.dense_layers) and self.intermediate_size <= 0:
            raise UserError("intermediate_size must be positive where there are dense layers")
        if self.latent is not None:
            _check_numbers(self.latent)
            if self.head_dim != self.latent.nope_dim + self.latent.rope_dim or self.kv_heads != self.heads:
                raise UserError("with latent attention head_dim is nope_dim + rope_dim, and kv_heads equals heads")
            if self.qk_norm or self.qkv_bias:
                raise UserError("latent attention has neither qk_norm nor qkv_bias")
        if self.rope_scaling is not None:
            _check_numbers(self.rope_scaling)

    def _check_experts(self) -> None:
        if not 0 < self.experts_per_token <= self.experts:
            raise UserError(f"experts_per_token = {self.experts_per_token} must lie in 1..experts = {self.experts}")
        if self.expert_width <= 0:
            raise UserError("expert_width must be positive where there are experts")
        if not 1 <= self.router_groups_kept <= self.router_groups or self.experts % self.router_groups:
            raise UserError(
                f"router_groups = {self.router_groups} must divide experts = {self.experts}, and router_groups_kept = "
                f"{self.router_groups_kept} lie in 1..router_groups"
            )
        eligible = self.experts // self.router_groups * self.router_groups_kept
        if eligible < self.experts_per_token or (self.router_groups > 1 and self.experts // self.router_groups < 2):
            raise UserError(
                f"{self.router_groups_kept} of {self.router_groups} groups hold too few experts to choose from"
            )
        if any(not 0 <= layer < self.layers for layer in self.dense_layers):
            raise UserError(f"dense_layers = {self.dense_layers} names layers outside 0..{self.layers - 1}")

    @property
    def rope_dim(self) -> int:
        """How many dimensions of a head the rotary embedding turns."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """The width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def scale(self) -> float:
        """What attention logits are multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.layers) if self.experts and layer not in self.dense_layers)

    @property
    def routed_experts(self) -> int:
        """The experts of a layer that has some; 0 where all layers are dense, whatever `experts` says."""
        return self.experts if self.moe_layers else 0

    def window(self, layer: int) -> int:
        """The layer's sliding window; 0: none."""
        return self.windows[layer] if self.windows else 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it, defaults included: another version's may differ."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """What `to_dict` wrote. Raises UserError for unknown and missing keys."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(raw) - known):
            raise UserError(f"unknown keys {', '.join(unknown)}: written by another version?")
        if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in raw]:
            raise UserError(f"missing keys {', '.join(missing)}")
        values = dict(raw)
        for name, nested in (("rope_scaling", RopeScaling), ("latent", LatentAttention)):
            if values.get(name) is not None:
                try:
                    values[name] = nested(**values[name])
                except TypeError as error:
                    raise UserError(f"{name} = {values[name]!r}: {error}") from None
        for name in ("windows", "dense_layers"):
            if name in values:
                values[name] = tuple(values[name])
        return cls(**values)


def _check_numbers(section: ModelConfig | LatentAttention | RopeScaling) -> None:
    for f in fields(section):
        value = getattr(section, f.name)
        # What has a default of 0 is something that the decoder may lack.
        least = 0 if f.default == 0 or f.name == "q_rank" else 1
        if f.type == "int" and (type(value) is not int or value < least):
            raise UserError(f"{f.name} = {value!r} is not a whole number from {least} up")
        if f.type == "float" and (type(value) not in (int, float) or value < 0):
            raise UserError(f"{f.name} = {value!r} is not a number from 0 up")
        if f.type == "bool" and type(value) is not bool:
            raise UserError(f"{f.name} = {value!r} is neither true nor false")
        if f.type == "tuple[int, ...]" and not all(type(item) is int and item >= 0 for item in value):
            raise UserError(f"{f.name} = {value!r} does not hold whole numbers from 0 up")
