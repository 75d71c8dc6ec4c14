"""Estimates the memory of a run in one process.

The memory of weights and optimizer is counted from the model's dimensions; activations, other models and caches are
estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nmoe.config.commands import AdaptableConfig, ProbedConfig, RLConfig, RunConfig, SelfplayConfig, SupervisedConfig
from nmoe.config.tables.model import LoraSection
from nmoe.engine.native.cache import BLOCK_TOKENS, bytes_per_block, cache_size
from nmoe.engine.native.runner import PACKED_BYTES
from nmoe.errors import UserError
from nmoe.learner.muon import hidden_matrices
from nmoe.model.checkpoint import read_config
from nmoe.model.config import ModelConfig
from nmoe.model.device import kind_of
from nmoe.model.logprobs import is_wide, kept_logits, piece_logits
from nmoe.model.lora import Lora, LoraSettings, choose, refuse_high_rank
from nmoe.model.ops.delta import CHUNK
from nmoe.model.packed_experts import FORMS
from nmoe.model.transformer import Transformer
from nmoe.plan.work import Work, work_of
from nmoe.recipes.setup import device_and_dtype, load_tokenizer
from nmoe.runs.resolve import resolve_checkpoint, resolve_shape
from nmoe.types import PackedForm

# The moments, and where weights are in low precision the master of each: bytes in fp32.
_FLOAT = 4


@dataclass(frozen=True)
class Size:
    """The size of a model that a run trains: its dimensions (`shape`), device, dtype, and numbers of parameters.

    `trained` counts the trained parameters: the adapter's if `adapts` is true, else all; `by_muon` counts what Muon trains.
    `packed` counts the experts' parameters that are held packed, in `packed_bytes`.
    """

    shape: ModelConfig
    device: torch.device
    dtype: torch.dtype
    parameters: int
    trained: int
    adapts: bool
    by_muon: int = 0
    packed: int = 0
    packed_bytes: int = 0

    @property
    def weights(self) -> int:
        """The memory of all weights in bytes, including an adapter's."""
        return self.in_full + self.packed_bytes + (self.trained * self.dtype.itemsize if self.adapts else 0)

    @property
    def in_full(self) -> int:
        """The memory of the weights that are held in the model's dtype, in bytes, without an adapter's."""
        return (self.parameters - self.packed) * self.dtype.itemsize

    @property
    def gradients(self) -> int:
        """The memory of the gradients in bytes; they are fp32, like the weights that the optimizer updates."""
        return self.trained * _FLOAT

    @property
    def optimizer(self) -> int:
        """The memory of the optimizer's state in bytes: AdamW's two fp32 moments or Muon's one, and fp32 master weights if the
        weights have lower precision."""
        return (self.trained * (2 if self.dtype == torch.float32 else 3) - self.by_muon) * _FLOAT

    @property
    def checkpoint(self) -> int:
        """The size of a checkpoint in bytes: trained weights and optimizer state."""
        return self.trained * self.dtype.itemsize + self.optimizer


def size_of(config: RunConfig, shape: ModelConfig | None = None) -> Size:
    """Determines the size of a run's model, without loading weights; of a model that is yet to be made, from its `shape`.

    Raises UserError if the checkpoint or tokenizer is missing, or the device is.
    """
    settings = config.model
    device, dtype = device_and_dtype(settings)
    if shape is not None:
        pass
    elif settings.shape is not None:
        vocabulary = load_tokenizer(settings).vocab_size
        shape = ModelConfig(vocab_size=vocabulary, **settings.shape.model_dump())
    else:
        assert settings.path is not None, "the configuration asks for a path where there is no shape"
        shape = shape_of(settings.path)
    with torch.device("meta"):
        model = Transformer(shape)
    parameters = count(model)
    section = config.lora if isinstance(config, AdaptableConfig) else None
    trained = parameters if section is None else _adapter(model, section)
    by_muon = 0
    if config.optimizer.kind == "muon" and section is None:
        by_muon = sum(model.get_parameter(name).numel() for name in hidden_matrices(model))
    packed = {}
    if (form := settings.expert_weights) != "dequantized":
        packed = {"packed": expert_numbers(shape), "packed_bytes": packed_expert_bytes(shape, form)}
    return Size(shape, device, dtype, parameters, trained, section is not None, by_muon, **packed)


def expert_numbers(shape: ModelConfig) -> int:
    """Returns the number of the routed experts' parameters, without biases."""
    return len(shape.moe_layers) * shape.experts * 3 * shape.hidden_size * shape.expert_width


def packed_expert_bytes(shape: ModelConfig, form: PackedForm) -> int:
    """Returns the bytes of all routed experts, held in this form."""
    width, inner = shape.hidden_size, shape.expert_width
    with torch.device("meta"):
        layer = [FORMS[form](shape.experts, *sizes) for sizes in ((width, 2 * inner), (inner, width))]
    return len(shape.moe_layers) * sum(buffer.nbytes for one in layer for buffer in one.buffers())


def shape_of(checkpoint: str) -> ModelConfig:
    """Reads the dimensions of a checkpoint's model, without downloading weights. Raises UserError if it cannot be read."""
    return read_config(resolve_shape(Path(checkpoint)))[1]


def parameters_of(checkpoint: str) -> int:
    """Returns the number of parameters of a checkpoint's model. Raises UserError if it cannot be read."""
    with torch.device("meta"):
        return count(Transformer(shape_of(checkpoint)))


def count(model: Transformer) -> int:
    """Returns the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def _adapter(model: Transformer, section: LoraSection) -> int:
    if section.path is not None:
        path = resolve_checkpoint(Path(section.path)) / "adapter_model.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                return sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: torn or not a safetensors file: {error}") from error
    chosen = choose(model, section.targets)
    refuse_high_rank(model, chosen, section.rank)
    with torch.device("meta"):
        lora = Lora(model, LoraSettings(section.rank, 1.0, section.rslora), chosen, "", "")
    return sum(parameter.numel() for parameter in lora.parameters())


# A sampled token on the host: its id and its log-probability, each an object and its slot in a list.
_SAMPLED_TOKEN = 72

# The interpreter, torch and the libraries of a process that trains, on a host (`benchmarks/memory_estimate.py`).
_PROGRAM = 300 * 2**20


def estimate(config: RunConfig, size: Size, work: Work | None = None) -> dict[str, int]:
    """Estimates the memory of a single training process; returns the bytes of each component, such as "weights" or
    "activations".

    `work` says how many tokens a step processes, by default an upper bound. Frozen models of rewards and judges are not
    counted.
    """
    shape, width, on_host = size.shape, size.dtype.itemsize, kind_of(size.device).on_host
    work = work or work_of(config, shape.context_tokens)
    parts = {
        "weights": size.weights,
        "gradients": size.gradients,
        "optimizer": size.optimizer,
        "activations": activation_bytes(shape, work, width, config.model.checkpoint_activations, on_host),
    }
    if on_host:
        parts["program"] = _PROGRAM
    parts["experts in their profile"] = profiled_numbers(config, shape) * width
    samples = isinstance(config, RLConfig | SelfplayConfig)
    if config.checkpoint.asynchronous and on_host:
        # After the last step, and while a run samples, it takes the memory that gradients and activations had.
        last_alone = 0 < config.run.steps <= config.checkpoint.every_steps and not _evaluates(config)
        free = parts["gradients"] + parts["activations"] if samples or last_alone else 0
        parts["copy for a checkpoint"] = max(0, size.checkpoint - free)
    if isinstance(config, RLConfig):
        parts["reference"] = size.trained * width if config.algorithm.kl_coef > 0 else 0
        parts["other models"] = _other_models(config, size)
    if isinstance(config, RLConfig) and on_host:
        parts["weights published last"] = last_published(config, size, parts["gradients"] + parts["activations"])
    if isinstance(config, RLConfig | SelfplayConfig) and on_host:
        drawn = config.batch.prompts_per_step * config.batch.group_size
        parts["sampled tokens"] = drawn * config.sampling.max_new_tokens * _SAMPLED_TOKEN
    if samples_here(config) or (isinstance(config, ProbedConfig) and config.probes):
        assert isinstance(config, RLConfig | SelfplayConfig | ProbedConfig), "these have an engine"
        most = kind_of(size.device).cache_bytes(size.device, sum(parts.values()), trains=True)
        engine = config.engine
        cache = cache_size(shape, size.dtype, engine.max_sequences, engine.cache_mb * 2**20, most).bytes
        # On a host the system hands out pages as sequences write them.
        parts["key-value cache"] = min(cache, _written(shape, size, work)) if on_host else cache
        if on_host and size.weights <= PACKED_BYTES:
            parts["weights packed to sample"] = size.weights - size.packed_bytes
    return {name: part for name, part in parts.items() if part}


def last_published(config: RLConfig, size: Size, free: int) -> int:
    """Returns the bytes of weights that the first rank keeps in the machine's memory to publish differences from them. While the
    next difference is made it has both; of these the second may take the bytes that are `free` between two steps."""
    if not config.engine.on_servers or config.placed_engine.transport(size.adapts) != "delta":
        return 0
    copy = size.parameters * size.dtype.itemsize
    return copy + max(0, copy - free)


def samples_here(config: RunConfig) -> bool:
    """Returns whether the run's own processes sample in its steps, and not engine servers."""
    return isinstance(config, SelfplayConfig) or (isinstance(config, RLConfig) and not config.engine.on_servers)


def _evaluates(config: RunConfig) -> bool:
    """Returns whether the run may save a checkpoint after an evaluation because it is the best so far."""
    return isinstance(config, SupervisedConfig) and bool(config.eval)


def _written(shape: ModelConfig, size: Size, work: Work) -> int:
    """Returns the bytes of key-value cache that sequences write between two weight updates.

    Each sequence writes blocks for its tokens, a last block that is not full, and a copy of a block that it shared with
    its group.
    """
    return (work.sampled_tokens // BLOCK_TOKENS + 2 * work.sampled) * bytes_per_block(shape, size.dtype)


def profiled_numbers(config: RunConfig, shape: ModelConfig) -> int:
    """Returns how many numbers a run stores for dequantised copies of routed experts, if these have a quantised format; else 0."""
    if config.model.expert_profile is None or (
        config.model.expert_profile == "bf16" and config.model.precision == "bfloat16"
    ):
        return 0
    return expert_numbers(shape)


def _other_models(config: RLConfig, size: Size) -> int:
    """Returns the memory in bytes of a distillation teacher, and of a separate critic with its optimizer state."""
    width, found = size.dtype.itemsize, 0
    if config.distillation is not None and not config.distillation.urls:
        found += parameters_of(config.distillation.teacher) * width
    if config.critic is not None and not config.critic.shared:
        path = config.critic.path or config.model.path
        assert path is not None, "the configuration requires a critic's checkpoint"
        found += parameters_of(path) * (width + (12 if width == 4 else 16))
    return found


def activation_bytes(shape: ModelConfig, work: Work, width: int, checkpointing: bool, on_host: bool) -> int:
    """Returns the memory in bytes that a forward and backward pass over `work` needs, beside weights and their gradients.

    It consists of the activations kept for the backward pass, the temporary values of one layer, and blocks of logits.
    """
    layer = max(_layers(shape, work)) * width
    if on_host and is_wide(shape.vocab_size):  # whose kernel keeps no logits
        return layer + kept_bytes(shape, replace(work, scored=0), width, checkpointing)
    return (
        layer + kept_bytes(shape, work, width, checkpointing) + 3 * piece_logits(work.scored, shape.vocab_size) * _FLOAT
    )


def kept_bytes(shape: ModelConfig, work: Work, width: int, checkpointing: bool) -> int:
    """Returns the bytes of activations that a forward pass over `work` keeps for the backward pass.

    Models with attention sinks also keep their attention weights, which are not counted.
    """
    between = work.rows * shape.hidden_size
    layers = _layers(shape, work)
    blocks = max(layers) + shape.layers * between if checkpointing else sum(layers)
    logits = kept_logits(work.scored, shape.vocab_size, shape.hidden_size)
    return (blocks + 2 * between) * width + logits * _FLOAT


def _layers(shape: ModelConfig, work: Work) -> list[int]:
    return [work.rows * a + work.tokens * b for a, b in zip(*layer_numbers(shape), strict=True)]


def layer_numbers(shape: ModelConfig) -> tuple[list[int], list[int]]:
    """Returns roughly how many numbers each layer keeps for the backward pass: per row, and per token.

    Samples of one prompt share the prompt's rows, in which most of a layer is computed once; queries, keys, values and
    the output of attention are counted per token of each sequence.
    """
    heads, hidden = shape.heads, shape.hidden_size
    attention = heads * (shape.head_dim + shape.value_dim) + shape.kv_heads * (shape.head_dim + shape.value_dim)
    before = (heads + shape.kv_heads) * shape.head_dim * (1 if shape.qk_norm else 0)
    if shape.latent is not None:
        before = heads * (2 * shape.head_dim + shape.value_dim)
    if shape.attention_gate:
        before += 3 * heads * shape.head_dim
    rows, tokens = [], []
    for layer in range(shape.layers):
        recurs = layer in shape.recurrent_layers
        mixing = _recurrence(shape) if recurs else before
        rows.append(5 * hidden + mixing + _feed_forward(shape, layer in shape.moe_layers))
        tokens.append(0 if recurs else attention)
    return rows, tokens


def _recurrence(shape: ModelConfig) -> int:
    """Returns how many numbers a recurrent layer keeps per token.

    They are the inputs of the convolution, the heads' inputs and outputs, the products among a chunk's tokens, and the
    state once per chunk.
    """
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
