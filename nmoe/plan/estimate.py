"""What a run keeps in memory beside weights and their optimizer: activations, other models, the cache of the engine. Estimates."""

from __future__ import annotations

from nmoe.config.commands.base import ProbedConfig, RunConfig
from nmoe.config.commands.rl import RLConfig
from nmoe.config.commands.selfplay import SelfplayConfig
from nmoe.engine.native.cache import cache_size
from nmoe.model.config import ModelConfig
from nmoe.model.device import kind_of
from nmoe.model.ops.delta import CHUNK
from nmoe.plan.size import Size, parameters_of

# A sampled token on the host: its id and its log-probability, each an object and its place in a list.
_SAMPLED_TOKEN = 72


def estimate(config: RunConfig, size: Size) -> dict[str, int]:
    """Bytes by part. Frozen models of rewards and judges are not counted, nor torch itself."""
    shape, width = size.shape, size.dtype.itemsize
    activations = (
        config.batch.tokens_per_microbatch * activation_numbers(shape, config.model.checkpoint_activations) * width
    )
    parts = {
        "weights": size.weights,
        "gradients": size.gradients,
        "optimizer": size.optimizer,
        "activations": activations,
    }
    parts["experts in their profile"] = profiled_numbers(config, shape) * width
    if config.checkpoint.asynchronous and size.device.type == "cpu":
        parts["copy for a checkpoint"] = size.checkpoint
    if isinstance(config, RLConfig):
        parts["reference"] = size.trained * width if config.algorithm.kl_coef > 0 else 0
        parts["other models"] = _other_models(config, size)
    if isinstance(config, RLConfig | SelfplayConfig) and size.device.type == "cpu":
        samples = config.batch.prompts_per_step * config.batch.group_size
        parts["sampled tokens"] = samples * config.sampling.max_new_tokens * _SAMPLED_TOKEN
    if isinstance(config, RLConfig | SelfplayConfig) or (isinstance(config, ProbedConfig) and config.probes):
        most = kind_of(size.device).cache_bytes(size.device, sum(parts.values()), trains=True)
        engine = config.engine
        cache = cache_size(shape, size.dtype, engine.max_sequences, engine.cache_mb * 2**20, most)
        parts["key-value cache"] = cache.bytes
    return {name: part for name, part in parts.items() if part}


def profiled_numbers(config: RunConfig, shape: ModelConfig) -> int:
    """Numbers of the routed experts that a run keeps in their profile, dequantised beside their weights."""
    if config.model.expert_profile is None or (
        config.model.expert_profile == "bf16" and config.model.precision == "bfloat16"
    ):
        return 0
    return len(shape.moe_layers) * shape.experts * 3 * shape.hidden_size * shape.expert_width


def _other_models(config: RLConfig, size: Size) -> int:
    """The teacher, and a critic of its own, which is trained as the policy is."""
    width, found = size.dtype.itemsize, 0
    if config.distillation is not None:
        found += parameters_of(config.distillation.teacher) * width
    if config.critic is not None and not config.critic.shared:
        path = config.critic.path or config.model.path
        assert path is not None, "the configuration requires a critic's checkpoint"
        found += parameters_of(path) * (width + (12 if width == 4 else 16))
    return found


def activation_numbers(shape: ModelConfig, checkpointing: bool) -> int:
    """Numbers kept for the backward pass per token, roughly: what blocks read and compute, and logits. Models with
    attention sinks keep their attention weights too, which are not counted."""
    attention = shape.heads * (3 * shape.head_dim + shape.value_dim) + 2 * shape.kv_heads * (
        shape.head_dim + shape.value_dim
    )
    if shape.attention_gate:
        attention += 3 * shape.heads * shape.head_dim
    hidden = shape.hidden_size
    layers = [
        5 * hidden
        + (_recurrence(shape) if layer in shape.recurrent_layers else attention)
        + _feed_forward(shape, layer in shape.moe_layers)
        for layer in range(shape.layers)
    ]
    blocks = max(layers) + shape.layers * hidden if checkpointing else sum(layers)
    return blocks + 2 * hidden + 2 * shape.vocab_size


def _recurrence(shape: ModelConfig) -> int:
    """Numbers of a token in a recurrent layer: the taps of the convolution, what heads read and write, the products among a chunk's
    tokens, and the memory once a chunk."""
    assert shape.delta is not None, "the caller looks"
    delta, keys = shape.delta, shape.delta.value_heads * shape.delta.key_dim
    of_chunk = 5 * delta.value_heads * CHUNK + keys * delta.value_dim // CHUNK
    return (delta.conv_tokens + 1) * delta.channels + 9 * keys + 12 * delta.values + of_chunk


def _feed_forward(shape: ModelConfig, routed: bool) -> int:
    if not routed:
        return 4 * shape.intermediate_size
    picked = shape.experts_per_token
    return (
        picked * (4 * shape.expert_width + 2 * shape.hidden_size)
        + 4 * shape.shared_experts * shape.expert_width
        + shape.experts
    )
