"""The shape of a decoder: what a checkpoint's `config.json` holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from nmoe.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """One decoder, dense or mixture-of-experts by its numbers.

    Example, the small MoE of the speedrun: `ModelConfig(vocab_size=512, hidden_size=128, layers=3, heads=4, kv_heads=2,
    head_dim=32, experts=8, experts_per_token=2, expert_width=128, context_tokens=160)`.

    `experts = 0` is a dense model with SwiGLU blocks of `intermediate_size`. `router_bias_rate > 0` balances load
    without an auxiliary loss (Wang et al. 2024, arXiv:2408.15664): a bias added to the scores for the choice alone moves
    by this rate after each optimizer step. `router_aux_loss_coef` scales the auxiliary loss (Fedus et al. 2021,
    arXiv:2101.03961, eq. 4).
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

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            # What has a default of 0 is something that the decoder may lack.
            least = 0 if f.default == 0 else 1
            if f.type == "int" and (type(value) is not int or value < least):
                raise UserError(f"{f.name} = {value!r} is not a whole number from {least} up")
            if f.type == "float" and (type(value) not in (int, float) or value < 0):
                raise UserError(f"{f.name} = {value!r} is not a number from 0 up")
            if f.type == "bool" and type(value) is not bool:
                raise UserError(f"{f.name} = {value!r} is neither true nor false")
        if self.router_scores not in ("softmax", "sigmoid"):
            raise UserError(f"router_scores = {self.router_scores!r} is neither softmax nor sigmoid")
        if self.heads % self.kv_heads:
            raise UserError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim = {self.head_dim} is odd: rotary embedding turns pairs")
        if self.experts:
            if not 0 < self.experts_per_token <= self.experts:
                raise UserError(f"experts_per_token = {self.experts_per_token} must lie in 1..experts = {self.experts}")
            if self.expert_width <= 0:
                raise UserError("expert_width must be positive where there are experts")
        elif self.intermediate_size <= 0:
            raise UserError("intermediate_size must be positive in a dense model")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
