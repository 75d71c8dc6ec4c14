"""The decoder: token ids in, hidden states out, with attention and routing traces supplied by the caller.

Deliberately absent: padding, masks, caches, losses. Tokens come packed as `[T]`; the `Attend` that is passed in decides which
tokens see each other; the head is a separate call, so that only the rows that need logits pay for the vocabulary.
"""

# Shapes: T tokens, N rows asked for, D width, V vocabulary.

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmoe.errors import UserError
from nmoe.model.config import ModelConfig, Numerics, RopeScaling
from nmoe.model.device import kind_of
from nmoe.model.layers import Attend, Attention, GeGLU, LatentAttentionBlock, Linear, RMSNorm, SwiGLU, head_logits
from nmoe.model.moe import MoE, Router, RouterTrace
from nmoe.model.recurrence import GatedDeltaNet
from nmoe.model.rope import extended, rope_table
from nmoe.parallel.ranks import keep_part


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        self.attention = _attention(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        dense = GeGLU if config.gelu else SwiGLU
        self.ffn = MoE(config) if layer in config.moe_layers else dense(config.hidden_size, config.intermediate_size)

    def forward(self, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend, trace: RouterTrace) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), cos_T1c, sin_T1c, attend)
        y_TD = self.ffn_norm(x_TD)
        return x_TD + (self.ffn(y_TD, trace) if isinstance(self.ffn, MoE) else self.ffn(y_TD))


def _attention(config: ModelConfig, layer: int) -> Attention | LatentAttentionBlock | GatedDeltaNet:
    """Builds the layer that mixes tokens: attention, latent attention or Gated DeltaNet."""
    if layer in config.recurrent_layers:
        return GatedDeltaNet(config, layer)
    return Attention(config, layer) if config.latent is None else LatentAttentionBlock(config, layer)


class SandwichBlock(Block):
    """A block that also normalises the outputs of attention and feed-forward (Gemma 2, arXiv:2408.00118, section 2)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_output_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        self.ffn_output_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)

    def forward(self, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend, trace: RouterTrace) -> Tensor:
        y_TD = self.attention(self.attention_norm(x_TD), cos_T1c, sin_T1c, attend)
        x_TD = x_TD + self.attention_output_norm(y_TD)
        y_TD = self.ffn_norm(x_TD)
        y_TD = self.ffn(y_TD, trace) if isinstance(self.ffn, MoE) else self.ffn(y_TD)
        return x_TD + self.ffn_output_norm(y_TD)


def _plain(
    block: nn.Module, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend, trace: RouterTrace
) -> Tensor:
    out_TD: Tensor = block(x_TD, cos_T1c, sin_T1c, attend, trace)
    return out_TD


def _separate_inductor_caches() -> None:
    """Gives each CPU capability a separate inductor cache, unless the user chose one by TORCHINDUCTOR_CACHE_DIR.

    Inductor does not key its cache by capability. Code cached under AVX-512 and loaded under ATEN_CPU_CAPABILITY=avx2 gives
    wrong values without an error.
    """
    # Imported here because inductor takes seconds to import. Its import may set the variable to the default.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = default_cache_dir()
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default) == default:
        capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(default) / capability)


def _checkpointed(
    block: nn.Module, x_TD: Tensor, cos_T1c: Tensor, sin_T1c: Tensor, attend: Attend, trace: RouterTrace
) -> Tensor:
    """Runs the block and stores only its input; the backward pass runs it again (Chen et al. 2016, arXiv:1604.06174). Only the
    first run records the router's choices in `trace`."""
    layer, runs = len(trace.chosen_TK), 0

    def run(x_TD: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return _plain(block, x_TD, cos_T1c, sin_T1c, attend, trace if runs == 1 else trace.repetition(layer))

    out_TD: Tensor = checkpoint(run, x_TD, use_reentrant=False)
    return out_TD


class Transformer(nn.Module):
    """A decoder-only transformer over packed tokens. `checkpoint_activations` trades time for memory in training: per block only
    the input is kept for the backward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.exact = False
        self.checkpoint_activations = False
        # generation_config.json of the checkpoint that the weights came from; not used here, written again when the model is
        # saved.
        self.generation: dict[str, Any] = {}
        # The run or checkpoint that `nmoe.load_model` was asked for; None for a model that was built in another way.
        self.origin: Path | None = None
        # Its initial values would be overwritten, and on the device meta they cost the import of torch's compiler.
        empty_VD = torch.empty(config.vocab_size, config.hidden_size)
        self.embedding = nn.Embedding.from_pretrained(empty_VD, freeze=False)
        block = SandwichBlock if config.output_norms else Block
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.reset_tables()

    def reset_tables(self) -> None:
        """Computes the rotary tables on the model's device. They are not part of a checkpoint."""
        self._set_table("rope", self.config.rope_theta, self.config.rope_scaling)
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        if self.config.window_rope_theta:
            self._set_table("window_rope", self.config.window_rope_theta, None)
            self.window_rope_cos: Tensor
            self.window_rope_sin: Tensor

    def extend_context(self, tokens: int) -> None:
        """Gives the model a longer context, and rotary tables that fit it. Raises UserError as `extended` does."""
        self.config = extended(self.config, tokens)
        self.reset_tables()

    def _set_table(self, name: str, theta: float, scaling: RopeScaling | None) -> None:
        # The first table's weights are where the model computes; later ranks may have offloaded them.
        config, device = self.config, getattr(self, "rope_cos", self.embedding.weight).device
        unturned = config.head_dim - config.rotary_dim if config.rotary_dim else 0
        if device == torch.device("meta"):
            # Shapes alone: arithmetic there costs the import of torch's compiler.
            width = config.rope_dim // 2 + unturned // 2
            cos = sin = torch.empty(config.context_tokens, width, dtype=torch.float32, device=device)
        else:
            cos, sin = rope_table(config.context_tokens, config.rope_dim, theta, scaling, unturned)
        self.register_buffer(f"{name}_cos", cos.to(device), persistent=False)
        self.register_buffer(f"{name}_sin", sin.to(device), persistent=False)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, trace: RouterTrace) -> Tensor:
        """Returns the normalised final hidden states `[T, D]`. `positions_T` counts from 0 within each sequence."""
        cos_T1c = self.rope_cos.index_select(0, positions_T).unsqueeze(1)
        sin_T1c = self.rope_sin.index_select(0, positions_T).unsqueeze(1)
        x_TD = F.embedding(token_ids_T, self.embedding.weight)
        if self.config.scale_embedding:
            # Rounded to the embedding's dtype, as in Gemma's release.
            x_TD = x_TD * torch.tensor(self.config.hidden_size**0.5, dtype=x_TD.dtype).item()
        run = _checkpointed if self.checkpoint_activations and torch.is_grad_enabled() else _plain
        if self.config.window_rope_theta:
            return self._by_two_tables(x_TD, positions_T, (cos_T1c, sin_T1c), partial(run, attend=attend, trace=trace))
        for block in self.blocks:
            x_TD = run(block, x_TD, cos_T1c, sin_T1c, attend, trace)
        out_TD: Tensor = self.norm(x_TD)
        return out_TD

    def _by_two_tables(
        self, x_TD: Tensor, positions_T: Tensor, others: tuple[Tensor, Tensor], run: Callable[..., Tensor]
    ) -> Tensor:
        """Runs the blocks and the last norm as `forward` does, where layers with a sliding window have a separate rotary table."""
        cos_T1c = self.window_rope_cos.index_select(0, positions_T).unsqueeze(1)
        sin_T1c = self.window_rope_sin.index_select(0, positions_T).unsqueeze(1)
        for layer, block in enumerate(self.blocks):
            x_TD = run(block, x_TD, *((cos_T1c, sin_T1c) if self.config.window(layer) else others))
        out_TD: Tensor = self.norm(x_TD)
        return out_TD

    def logits(self, x_ND: Tensor) -> Tensor:
        """Returns the logits `[N, V]` of these hidden states, in fp32."""
        return head_logits(x_ND, self.head_weight, self.exact).float()

    @property
    def device(self) -> torch.device:
        """The device that the model computes on. Its weights are there, too, unless ranks offload them."""
        return self.rope_cos.device

    @property
    def head_weight(self) -> Tensor:
        """The weight of the output head, `[V, D]`: the embedding's if the two are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def set_numerics(self, numerics: Numerics) -> Transformer:
        """Sets the numerics of all layers: "fast", or "exact" for results that do not depend on the batch (`nmoe.model.ops`)."""
        for module in self.modules():
            if isinstance(module, Transformer | Linear | Router | MoE | GatedDeltaNet):
                module.exact = numerics == "exact"
        return self

    def compile_feed_forward(self) -> Transformer:
        """Compiles the feed-forward halves of the blocks with torch at their first use. Parameter names do not change.

        Raises UserError where torch is installed below a folder with a space: its compiler cannot link there (seen with 2.13).
        """
        library = Path(torch.__file__).parent / "lib"
        if kind_of(self.device).on_host and " " in str(library):
            raise UserError(
                f"model.compile: torch's compiler cannot link {str(library)!r}, which has a space; leave model.compile out, or "
                "install into a folder without one"
            )
        _separate_inductor_caches()
        # Asks the compiler, too, for results that repeat, where they are asked for.
        repeats, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(repeats, warn_only=warns)
        for block in self.blocks:
            assert isinstance(block, Block), "the constructor made blocks"
            block.ffn.compile(dynamic=True)
        return self

    def moe_layers(self) -> list[MoE]:
        return [block.ffn for block in self.blocks if isinstance(block.ffn, MoE)]

    @torch.no_grad()
    def initialize(self, seed: int) -> Transformer:
        """Draws normal weights of standard deviation `fan_in ** -0.5` and embeddings of 0.02. Weights that write to the residual
        stream are scaled down by `sqrt(2 * layers)` (GPT-2). The same seed gives the same weights for any sharding: every rank
        draws all weights, one at a time, and keeps its part."""
        generator = torch.Generator().manual_seed(seed)
        residual = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.zero_()
                continue
            if parameter.dim() == 1:
                parameter.fill_(0.0 if self.config.norm_offset else 1.0)  # norms
                continue
            # Linear weights are [out, in], experts' [E, in, out].
            std = 0.02 if name == "embedding.weight" else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "ffn.down")):
                std *= residual
            keep_part(parameter, torch.randn(parameter.shape, generator=generator).mul_(std))
        for moe in self.moe_layers():
            moe.router.bias.zero_()
        for module in self.modules():
            if isinstance(module, GatedDeltaNet):
                module.initialize_decay(generator)
        return self
