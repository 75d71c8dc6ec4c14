"""A tiny checkpoint of a family, made by transformers with random weights at which every part counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 64
# What all cases share; 64 tokens of context, far beyond the windows and original contexts that cases set.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Case:
    """`released` edits a `config.json` into the form of the family's released checkpoints, where that differs from what
    transformers now writes: keys to set, and with None to remove."""

    name: str
    config: PreTrainedConfig
    model: type[PreTrainedModel]
    released: dict[str, Any] = field(default_factory=dict)

    def make(self) -> PreTrainedModel:
        """The model, its head scaled so that the mean entropy is at most half of log V: near-uniform logits would let any
        attention and any norm pass for any other."""
        self.config._attn_implementation = "eager"
        with torch.random.fork_rng():
            torch.manual_seed(0)  # transformers draws sinks and decay rates
            model = self.model(self.config).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if name.endswith("A_log"):  # which transformers draws anew for each model
                    parameter.copy_(noise)
                elif parameter.dim() == 1:
                    # Norms around one, biases and sinks around zero: transformers' own start.
                    parameter.copy_(parameter + 0.3 * noise)
                elif "embed" in name:
                    parameter.copy_(noise)
                else:
                    parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            head = model.get_output_embeddings().weight
            ids = torch.randint(VOCAB, (1, 64), generator=generator)
            for _ in range(100):
                if mean_entropy(model(ids, use_cache=False).logits) <= 0.45 * math.log(
                    VOCAB
                ):  # with room for other tokens
                    return model
                head.mul_(1.1)
        raise AssertionError("scaling the head did not make the output peaked")


def mean_entropy(logits: Tensor) -> float:
    """Nats per token."""
    logprobs = logits.log_softmax(-1)
    return float(-(logprobs.exp() * logprobs).sum(-1).mean())
