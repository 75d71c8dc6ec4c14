"""[model], [lora], [parallel] and [optimizer]: the trained model or adapter, its division over ranks, and the optimizer."""

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, PositiveInt

from nmoe.config.base import Array, Conflict, Section
from nmoe.config.elsewhere import closest
from nmoe.types import ExpertWeightsForm

# What routed experts are computed in (`nmoe.model.expert_profile`).
ExpertProfile = Literal["bf16", "fp8", "nvfp4"]

# How a device is named.
DEVICE = r"auto|cpu|cuda(:\d+)?"


# Beyond every model there is. A shape of more would not end: a model has an object for each layer, and a name for each expert.
MOST_LAYERS, MOST_EXPERTS, MOST_CONTEXT, LARGEST = 4096, 2**16, 2**25, 2**31 - 1

# Of one matrix; from some 2**61 on torch cannot count its bytes.
MOST_NUMBERS = 2**50


class ModelShape(Section):
    """[model.shape]: a new model, dense or mixture-of-experts. The tokenizer gives the vocabulary's size."""

    hidden_size: int = Field(gt=0, le=LARGEST)
    """width of the residual stream"""
    layers: int = Field(gt=0, le=MOST_LAYERS)
    """transformer blocks"""
    heads: int = Field(gt=0, le=LARGEST)
    """query heads"""
    kv_heads: int = Field(gt=0, le=LARGEST)
    """key and value heads, each shared by heads / kv_heads query heads"""
    head_dim: int = Field(gt=0, le=LARGEST)
    """width of one head; even, because rotary embeddings turn pairs"""
    context_tokens: int = Field(gt=1, le=MOST_CONTEXT)
    """longest sequence, prompt and completion together"""
    intermediate_size: int = Field(default=0, ge=0, le=LARGEST)
    """width of the dense FFN; used when experts = 0"""
    experts: int = Field(default=0, ge=0, le=MOST_EXPERTS)
    """routed experts of each layer; 0: dense"""
    experts_per_token: int = Field(default=0, ge=0, le=MOST_EXPERTS)
    """experts chosen for each token"""
    expert_width: int = Field(default=0, ge=0, le=LARGEST)
    """width of one expert's FFN"""
    shared_experts: int = Field(default=0, ge=0, le=MOST_EXPERTS)
    """experts that see every token, beside the routed ones"""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """how router logits become scores"""
    renormalize: bool = True
    """scale the chosen experts' scores to sum to 1"""
    qk_norm: bool = True
    """RMS-normalise queries and keys"""
    tie_embeddings: bool = True
    """one matrix for embedding and output head"""
    rope_theta: float = Field(default=10000.0, gt=0)
    """base of the rotary frequencies"""
    norm_eps: float = Field(default=1e-6, gt=0)
    """epsilon of the RMS norms"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.heads % self.kv_heads:
            yield Conflict("kv_heads", f"must divide heads = {self.heads}")
        if self.rope_dim % 2:
            yield Conflict("head_dim", "must be even")
        if self.experts == 0 and self.intermediate_size == 0:
            yield Conflict("intermediate_size", "a dense model (experts = 0) needs the width of its FFN")
        if self.experts > 0 and not 1 <= self.experts_per_token <= self.experts:
            yield Conflict("experts_per_token", f"must be between 1 and experts = {self.experts}")
        if self.experts > 0 and self.expert_width == 0:
            yield Conflict("expert_width", "a mixture-of-experts model needs the width of an expert")
        widths = {
            "heads x head_dim": self.heads * self.head_dim,
            "intermediate_size": 2 * self.intermediate_size,
            "all experts": 2 * self.expert_width * max(self.experts, self.shared_experts),
        }
        widest = max(widths, key=lambda name: widths[name])
        if (numbers := self.hidden_size * widths[widest]) > MOST_NUMBERS:
            yield Conflict(
                "hidden_size", f"makes with {widest} a matrix of {numbers:,} numbers, which no machine holds"
            )

    @property
    def rope_dim(self) -> int:
        """The number of a head's dimensions that the rotary embedding rotates."""
        return self.head_dim


class ModelSection(Section):
    """[model]: a checkpoint to start from, or the shape of a new model."""

    path: str | None = Field(default=None, min_length=1)
    """the checkpoint to start from: a directory, a run, or a .gguf file"""
    shape: ModelShape | None = None
    """the shape of a new model"""
    context_tokens: int | None = Field(default=None, gt=1)
    """a longer context than the checkpoint's: the rotary frequencies are scaled by YaRN, or by the checkpoint's `dynamic`
    scaling"""
    numerics: Literal["fast", "exact"] = "fast"
    """exact: engine and learner compute the same bits (float32), somewhat slower"""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or, of several, cuda:1"""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of weights and activations; default: float32 on a CPU and with exact numerics, bfloat16 on a GPU; below float32 the
    optimizer keeps float32 master weights"""
    expert_profile: ExpertProfile | None = None
    """train routed experts with quantised weights, rounding in the forward pass: fp8 (weights and activations), nvfp4 (weights),
    bf16; default: the run's precision"""
    router_bias_rate: float | None = Field(default=None, ge=0)
    """step size of loss-free load balancing, 0: off; default: the value the checkpoint was trained with; off in RL and self-play"""
    router_aux_loss_coef: float | None = Field(default=None, ge=0)
    """weight of the load-balancing loss, 0: off; default: the value the checkpoint was trained with; off in RL and self-play"""
    checkpoint_activations: bool = False
    """activation checkpointing: keep only each block's input, and run the block again in the backward pass"""
    compile: bool = False
    """compile the feed-forward half of the blocks; on a CPU needs a C++ compiler"""
    expert_weights: ExpertWeightsForm = "dequantized"
    """hold frozen experts in few bits, beneath an adapter or in self-play without training: mxfp4 as a released gpt-oss stores
    them; fp8 and nvfp4 quantise any checkpoint's, to the numbers of that expert_profile"""
    tokenizer: str | None = Field(default=None, min_length=1)
    """directory, run or checkpoint of the tokenizer, or `bytes` for one token per byte; default: the tokenizer in `path`"""

    def conflicts(self) -> Iterator[Conflict]:
        if re.fullmatch(DEVICE, self.device) is None:
            meant = closest(self.device, ("auto", "cpu", "cuda"), "model.device")
            hint = f"; did you mean {meant!r}?" if meant else ""
            yield Conflict("device", f"is no device: auto, cpu, cuda or, of several, cuda:1{hint}")
        if self.path is not None and self.shape is not None:
            yield Conflict("path", "a checkpoint has its own shape; give either path or [model.shape]")
        if self.path is None and self.shape is None:
            yield Conflict("", "needs either path (a checkpoint) or [model.shape] (a new model)")
        if self.path is None and self.shape is not None and self.tokenizer is None:
            yield Conflict("tokenizer", "a new model needs the directory of a tokenizer")
        if self.path is None and self.context_tokens is not None:
            yield Conflict("context_tokens", "is for a checkpoint; a new model's context is model.shape.context_tokens")
        if self.path is None and self.expert_weights != "dequantized":
            yield Conflict(
                "expert_weights", f"{self.expert_weights} holds the experts of a checkpoint; a new model has none"
            )
        if self.numerics == "exact" and self.precision not in (None, "float32"):
            yield Conflict("numerics", f"exact is for float32, and precision is {self.precision}")
        if self.expert_profile is not None and self.shape is not None and not self.shape.experts:
            yield Conflict(
                "expert_profile", f"{self.expert_profile} is for routed experts, and shape.experts = 0: leave it out"
            )
        if self.expert_profile is not None and self.expert_weights != "dequantized":
            yield Conflict(
                "expert_profile",
                f"trains experts, and those held in {self.expert_weights} are frozen: leave one of the two out",
            )
        if self.compile:
            for name, on in (
                ("expert_profile", self.expert_profile is not None),
                ("expert_weights", self.expert_weights != "dequantized"),
            ):
                if on:
                    yield Conflict(name, f"quantised experts are not compiled: leave {name} or compile out")
        if self.numerics == "exact" and self.compile:
            yield Conflict("numerics", "exact fixes the order of sums, and compile changes it")

    @property
    def profile(self) -> ExpertProfile | None:
        """The profile that the routed experts compute in, trained or held packed; None: the run's precision."""
        return self.expert_weights if self.expert_weights in ("fp8", "nvfp4") else self.expert_profile


class LoraSection(Section):
    """[lora]: train a low-rank adapter on the frozen base that model.path names."""

    path: str | None = Field(default=None, min_length=1)
    """run or directory of the adapter to start from, which then determines rank, alpha, rslora and targets"""
    rank: int = Field(default=32, gt=0)
    """rank of each update"""
    alpha: float | None = Field(default=None, gt=0)
    """the update is scaled by alpha / rank; default: twice the rank"""
    rslora: bool = False
    """scale the update by alpha / sqrt(rank) instead (rank-stabilised LoRA)"""
    targets: Array[
        Literal[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "q_a_proj",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
            "in_proj_qkvz",
            "in_proj_ba",
            "out_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "shared_expert_gate",
            "experts.gate_up_proj",
            "experts.down_proj",
        ]
    ] = ()
    """projections to adapt; default: the projections of attention and, in a dense model, of the MLP"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.path is not None:
            for key in ("rank", "alpha", "rslora", "targets"):
                if key in self.model_fields_set:
                    yield Conflict(key, "the adapter in lora.path has its own")


Rdep = Literal["auto", "single", "ipc", "hybrid"]
Transport = Literal["auto", "collective", "symmetric", "deepep"]
Offload = Literal["auto", "none", "cpu"]


class ParallelSection(Section):
    """[parallel]: how the model is replicated and sharded over ranks. torchrun starts dp_replicate x dp_shard ranks."""

    dp_replicate: PositiveInt = 1
    """number of replicas of the sharded model (HSDP), for slow links between groups of ranks"""
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """number of ranks that share one replica's weights; auto: all ranks of a replica"""
    ep: PositiveInt | Literal["auto"] = "auto"
    """expert parallelism: number of ranks that share the experts, with tokens sent between them; divides dp_shard and the number
    of experts; auto: the largest such number in a node, at most 8"""
    rdep: Rdep = "auto"
    """location of the ranks of an expert group: single (ep = 1), ipc (in one node), hybrid (in several nodes); auto: detected"""
    transport: Transport = "auto"
    """how tokens are sent to experts: collective (torch.distributed's all-to-all); symmetric and deepep are untested and refused"""
    offload: Offload = "auto"
    """where ranks on GPUs keep their shards of weights, gradients and optimizer state: none (on the GPU), cpu (in host memory);
    auto: cpu only if they fit in no other way"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.dp_shard != "auto" and self.ep != "auto" and self.dp_shard % self.ep:
            yield Conflict("ep", f"must divide dp_shard = {self.dp_shard}")
        if self.ep != "auto" and (self.ep == 1) != (self.rdep == "single") and self.rdep != "auto":
            yield Conflict(
                "rdep", f'"{self.rdep}" does not go with ep = {self.ep}: "single" is an expert group of one rank'
            )


# Adapters learn at about ten times the rate of all weights (Thinking Machines, "LoRA Without Regret", 2025).
LORA_LEARNING_RATE_FACTOR = 10


def _learning_rate(default: float) -> Any:
    return Field(default=default, gt=0, description="peak learning rate; with a [lora] the default is ten times this")


_MUON_MOMENTUM = 0.95


class OptimizerSection(Section):
    """[optimizer]: AdamW or Muon, with linear warm-up and cosine decay."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: momentum with orthogonalised matrices for the weights within the blocks, AdamW for the other parameters"""
    learning_rate: float = _learning_rate(1e-6)
    warmup_steps: int = Field(default=0, ge=0)
    """steps of linear warm-up; if the run is no longer than this, it warms up until its last step"""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """the warm-up as a share of the run's steps, in place of warmup_steps"""
    allow_slow_warmup: bool = False
    """start even if the learning rate stays under 30% of its peak for the first 20 steps (pretraining, fine-tuning: or 5% of the
    run, if that is longer), which is refused otherwise"""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """final learning rate as a share of the peak"""
    schedule_steps: int = Field(default=0, ge=0)
    """steps until the learning rate reaches its minimum and stays there; 0: run.steps, in a resumed run the number at its start"""
    weight_decay: float = Field(default=0.0, ge=0)
    """decoupled weight decay"""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """decay of the first moment"""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """decay of the second moment"""
    eps: float = Field(default=1e-8, gt=0)
    """epsilon, added to the root of the second moment"""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """gradients with a larger norm are clipped to this norm"""
    momentum: float = Field(default=_MUON_MOMENTUM, ge=0, lt=1)
    """decay of Muon's momentum"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.kind == "adamw" and self.momentum != _MUON_MOMENTUM:
            yield Conflict("momentum", 'is Muon\'s; set kind = "muon", or leave it out')
        if self.warmup_steps and self.warmup_ratio:
            yield Conflict("warmup_ratio", f"excludes warmup_steps = {self.warmup_steps}; give one of the two")


class FineTuningOptimizerSection(OptimizerSection):
    """[optimizer] of fine-tuning on given examples."""

    learning_rate: float = _learning_rate(1e-5)


class PretrainingOptimizerSection(OptimizerSection):
    """[optimizer] of pretraining."""

    learning_rate: float = _learning_rate(3e-4)
