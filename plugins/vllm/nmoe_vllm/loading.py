"""Loads a model's tensors into the running model by vLLM's layerwise reload, and mends what this leaves behind on a CPU.

All that is private to vLLM is in this file; it was read and tried in 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


def stored_weights(config: Any, model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of the checkpoint that the server was started from, under its names, as the files' own pages."""
    loader = get_model_loader(config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise ValueError(f"--load-format {config.load_config.load_format} has no tensors to compare new ones with")
    return dict(loader.get_all_weights(config.model_config, model))


def tied_names(stored: Mapping[str, Tensor], model: nn.Module) -> set[str]:
    """Returns the stored names that need not come, because the model shares or derives these tensors."""
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    tied = any(head.weight is layer.weight for head in heads for layer in layers if layer is not head)
    return {name for name in stored if "rotary_emb" in name or (tied and name.endswith("lm_head.weight"))}


def load(model: nn.Module, model_config: ModelConfig, tensors: Mapping[str, Tensor], on_cpu: bool) -> None:
    """Loads a whole set of tensors. Where it raises, the model holds a mixture, until a whole set is loaded."""
    if on_cpu:
        # Experts are packed only where their kernel is made: a reload copies them over the packed ones as they came.
        for layer in model.modules():
            if isinstance(method := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
                method.moe_kernel = None
    initialize_layerwise_reload(model)
    try:
        model.load_weights(list(tensors.items()))
    finally:
        finalize_layerwise_reload(model, model_config)
    if on_cpu:
        # The head multiplies by a packed copy of its weight, which is made anew only where tensors of its own come: not if it is
        # tied to the embedding.
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)
