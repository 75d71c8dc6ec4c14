"""Prepares a run of any recipe: device, threads, determinism, tokenizer, model and adapter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict

from nmoe.config.commands import AdaptableConfig, RecordsConfig, RunConfig, SupervisedConfig
from nmoe.config.tables.model import ExpertProfile, ModelSection, OptimizerSection
from nmoe.cores import choose_threads
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.learner.learner import Learner, share_model
from nmoe.model.checkpoint import fingerprint, load_model, new_model
from nmoe.model.config import ModelConfig
from nmoe.model.device import choose_device, dtype_for, keep_freed_memory, kind_of, precision_for
from nmoe.model.exactness import numerics_here
from nmoe.model.head import Head
from nmoe.model.lora import EXPERTS, Lora, LoraSettings, Site, choose, refuse_high_rank
from nmoe.model.peft_format import base_notes, is_adapter, read_adapter
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.parallel.gang import everywhere, gang
from nmoe.parallel.ranks import Ranks
from nmoe.runs.provenance import provenance, recorded_precision, recorded_threads, refuse_dirty
from nmoe.runs.resolve import resolve_checkpoint, resolve_tokenizer
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from nmoe.types import Precision

C = TypeVar("C", bound=RecordsConfig)
R = TypeVar("R", bound=RunConfig)

# The `[model] tokenizer` of which each byte is a token, with the control tokens of Harmony; it has no file.
BYTES = "bytes"


def run_path(config: RunConfig) -> Path:
    return Path(config.run.directory) / config.run.name


def with_steps(config: C, steps_per_epoch: int) -> C:
    """Returns the configuration with its number of epochs converted to steps; unchanged if it does not set epochs."""
    epochs = config.records.epochs
    if epochs is None:
        return config
    steps = max(1, math.ceil(epochs * steps_per_epoch))
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": steps}),
            "records": config.records.model_copy(update={"epochs": None}),
        }
    )


def with_offers(config: R, environment: Environment) -> R:
    """Returns the configuration with the tools that the servers of its environment listed, as the run's records keep them."""
    own = getattr(config, "environment", None)
    tools = environment.settings.tools
    if own is None or own.tools is None or tools is None or not tools.servers:
        return config
    return config.model_copy(update={"environment": own.model_copy(update={"tools": tools})})


def settle(config: R) -> tuple[R, int]:
    """Prepares this process for a run: chooses the device, and sets torch's thread count.

    Returns the configuration with its precision filled in, and the thread count. A resumed run takes both from its
    records: an optimizer's state has a fixed precision, and sums depend on the number of threads, so that only the same
    count gives the same numbers. Raises UserError if the device is missing and, with run.require_clean, if the code has
    uncommitted changes.
    """
    if config.run.require_clean:
        refuse_dirty(Path(config.run.directory))
    device = choose_device(config.model.device)
    path = run_path(config)
    resumed = config.run.resume and (path / "config.toml").exists()
    threads = recorded_threads(path) if resumed else None
    if threads is None:
        threads = choose_threads(config.run.threads, gang().local_size)
    everywhere(prepare_process, threads, config.model.device)
    asked = config.model.precision or (recorded_precision(path) if resumed else None)
    precision = precision_for(device, asked, config.model.numerics == "exact")
    return config.model_copy(update={"model": config.model.model_copy(update={"precision": precision})}), threads


def prepare_process(threads: int, asked: str) -> None:
    """Sets torch's thread count, and other settings of this process that affect its numbers and speed. Each rank resolves the
    device that is `asked` for by itself, because ranks of one machine have different GPUs."""
    device = choose_device(asked)
    keep_freed_memory()
    torch.set_num_threads(threads)
    kind_of(device).prepare(device)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def device_and_dtype(settings: ModelSection) -> tuple[torch.device, torch.dtype]:
    """Returns the device and dtype of a configured model. Raises UserError if the device is missing."""
    device = choose_device(settings.device)
    return device, dtype_for(device, settings.precision, settings.numerics == "exact")


def optimizer_settings(config: RunConfig, updates_per_step: int = 1, first: int = 0) -> OptimizerSection:
    """Returns the [optimizer] settings with the schedule converted from steps of the run to optimizer steps.

    A step of the run has `updates_per_step` optimizer steps, and the schedule begins after the run's first `first`
    steps. The warm-up is shortened if necessary, so that the last step of a short schedule has the configured learning
    rate; a warm-up given as a ratio is rounded up.
    """
    settings, schedule_steps = config.optimizer, config.optimizer.schedule_steps
    steps = schedule_steps or config.run.steps
    asked = settings.warmup_steps or math.ceil(settings.warmup_ratio * steps)
    lengths = {
        "warmup_steps": max(0, min(asked, steps - 1)),
        "schedule_steps": schedule_steps and max(1, schedule_steps - first),
    }
    updates = {name: length * updates_per_step for name, length in lengths.items()}
    return settings.model_copy(update={**updates, "warmup_ratio": 0.0})


def load_tokenizer(settings: ModelSection) -> Tokenizer:
    """Loads the configured tokenizer, or the one in the model's checkpoint."""
    if settings.tokenizer == BYTES and not Path(BYTES).exists():
        return Tokenizer.train((), SMALLEST_VOCABULARY)
    directory = None if settings.tokenizer is None else resolve_tokenizer(Path(settings.tokenizer))
    checkpoint = None if settings.path is None else resolve_checkpoint(Path(settings.path))
    if directory is None:
        assert checkpoint is not None, "without its own tokenizer there is a checkpoint"
        return Tokenizer.load(checkpoint)
    return Tokenizer.load(directory, checkpoint)


def add_adapter(config: AdaptableConfig, model: Transformer) -> Lora | None:
    """Adds the configured LoRA adapter to the model; returns None if all weights are trained.

    Raises UserError if a target module does not exist, if the rank exceeds a target module's input or output width
    (`refuse_high_rank`), if it adapts quantised experts, and if the adapter to start from is damaged or belongs to another base
    model.
    """
    section, path = config.lora, config.model.path
    if section is None:
        return None
    assert path is not None, "the configuration asks for model.path where there is a [lora]"
    checkpoint = resolve_checkpoint(Path(path)).resolve()
    base, own = str(checkpoint), fingerprint(checkpoint)
    if section.path is None:
        alpha = 2.0 * section.rank if section.alpha is None else section.alpha
        settings = LoraSettings(section.rank, alpha, section.rslora)
        chosen = choose(model, section.targets)
        refuse_high_rank(model, chosen, section.rank)
        _refuse_quantised(model, chosen)
        return Lora(model, settings, chosen, base, own).initialize(config.run.seed)
    directory = resolve_checkpoint(Path(section.path))
    adapter = read_adapter(model, directory)
    _refuse_quantised(model, adapter.parts)
    lora = adapter.attach(model, base, own)
    lora.notes = (*adapter.notes, *base_notes(directory, base, own))
    return lora


def _refuse_quantised(model: Transformer, chosen: Iterable[Site]) -> None:
    """Raises UserError for updates of experts in FP8 and NVFP4: merged and quantised again they would be another policy."""
    if model.config.expert_profile is not None and any(site.target in EXPERTS for site in chosen):
        raise UserError(
            f"lora.targets: the experts are held in {model.config.expert_profile}, and an adapter of theirs, merged and quantised "
            "again, would be another policy; leave experts.* out, or model.expert_weights"
        )


@dataclass(frozen=True)
class Start:
    """The initial state of a supervised run: the model, the LoRA adapter (None if all weights are trained), and the ranks."""

    model: Transformer
    lora: Lora | None
    ranks: Ranks

    @classmethod
    def of(cls, config: SupervisedConfig, tokenizer: Tokenizer) -> Start:
        """Builds the model and its adapter from the configuration. Raises UserError as `build_model` and `add_adapter` do."""
        ranks = Ranks(config.parallel)
        model = build_model(config.model, tokenizer, config.run.seed, ranks=ranks)
        return cls(model, add_adapter(config, model), ranks)

    def learner(self, config: SupervisedConfig, head: Head | None = None, head_only: bool = False) -> Learner:
        """Makes the learner that trains the model, with an optional output head (with `head_only`, no logits over the
        vocabulary are computed)."""
        return Learner(
            self.model,
            optimizer_settings(config),
            config.run.steps,
            config.batch.tokens_per_microbatch,
            lora=self.lora,
            ranks=self.ranks,
            head=head,
            head_only=head_only,
        )


class ModelIdentity(BaseModel):
    """Identifies the model that a run samples from; every recorded trajectory contains it.

    `start` is the fingerprint of the `checkpoint` that the run started from, or the seed of a new model. The weight
    version of each token, recorded with it, says how far the model was trained since. `context_tokens` is the context
    if the run extended it, and `expert_profile` the number format of the routed experts, if the run sets one.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    checkpoint: str
    start: str
    numerics: Literal["fast", "exact"]
    precision: Precision
    context_tokens: int | None = None
    expert_profile: ExpertProfile | None = None


def model_identity(config: RunConfig, lora: Lora | None) -> ModelIdentity:
    """Identifies the model of a run; reads the whole checkpoint for its fingerprint, unless the adapter already has it."""
    section = config.model
    if section.path is None:
        start = f"seed {config.run.seed}"
    else:
        start = fingerprint(resolve_checkpoint(Path(section.path))) if lora is None else lora.fingerprint
    return ModelIdentity(
        checkpoint=section.path or "",
        start=start,
        numerics=section.numerics,
        precision=precision_for(choose_device(section.device), section.precision, section.numerics == "exact"),
        context_tokens=section.context_tokens,
        expert_profile=section.profile,
    )


def provenance_of(config: RunConfig, threads: int) -> dict[str, Any]:
    """Returns the provenance of a run: everything that its numbers depend on, such as versions, device, threads and seed."""
    device = choose_device(config.model.device)
    return provenance(
        config.run.seed, threads, kind_of(device).describe(device), numerics_here(config.model.numerics, device)
    )


def describe(config: RunConfig, lora: Lora | None, ranks: Ranks | None = None) -> list[str]:
    """Returns notes to print before a run starts: numerics that differ from the configured ones, the adapter, and parallelism."""
    device, lines = choose_device(config.model.device), [] if lora is None else lora.describe()
    if (form := config.model.expert_weights) != "dequantized":
        lines.append(f"experts: held in {form}, frozen, and dequantised one by one for each product")
    elif (profile := config.model.expert_profile) is not None:
        often = "once a step" if ranks is None or ranks.size == 1 else "in each pass"
        lines.append(
            f"experts: {profile} by its reference, quantised {often} and multiplied dequantised: the numbers of a kernel for "
            f"{profile}, at no gain in speed or memory"
        )
    if ranks is not None and ranks.size > 1 and ranks.axes is not None:
        lines.append(ranks.axes.said)
    if (numerics := numerics_here(config.model.numerics, device)) != config.model.numerics:
        inexact = numerics.removeprefix("exact, but for ")
        lines.insert(
            0,
            f"numerics: exact was asked for, and on this machine the bits of {inexact} depend on the batch: hold "
            "mismatch_* against the bound of fast numerics, a mean of 1e-4",
        )
    return lines


def build_model(
    settings: ModelSection, tokenizer: Tokenizer, seed: int, balance: bool = True, ranks: Ranks | None = None
) -> Transformer:
    """Makes a new model of the configured dimensions, or loads the model of the configured checkpoint.

    `ranks`, given for a model that a learner will train, divides it: each rank allocates and fills only its shard.
    `balance` decides whether experts are balanced as the checkpoint was trained if the settings leave it open;
    reinforcement learning turns it off, because a moving router bias changes the policy even where the gradient is
    zero. Raises UserError if the tokenizer has more ids than the embedding, and if the path is an adapter.
    """
    device, dtype = device_and_dtype(settings)
    share = None if ranks is None else partial(share_model, ranks=ranks, device=device)
    if settings.shape is not None:
        shape = ModelConfig(vocab_size=tokenizer.vocab_size, **settings.shape.model_dump())
        return _prepared(new_model(shape, dtype, device, share=share).initialize(seed), settings, balance)
    assert settings.path is not None, "the configuration asks for a path where there is no shape"
    directory = resolve_checkpoint(Path(settings.path))
    if is_adapter(directory):
        raise UserError(
            f"{settings.path}: an adapter; name its base in model.path and the adapter in lora.path, or merge the two with "
            f"`nmoe export {settings.path} DIRECTORY --format hf`"
        )
    if ranks is not None:
        refuse_other_weights(directory, ranks)
    model = load_model(directory, dtype, device, settings.expert_weights, share)
    if settings.context_tokens is not None:
        try:
            model.extend_context(settings.context_tokens)
        except UserError as error:
            raise UserError(f"{settings.path}: model.{error}") from None
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{settings.tokenizer or settings.path}: the tokenizer has {tokenizer.vocab_size} ids, the embedding of "
            f"{settings.path} only {model.config.vocab_size}: they do not belong together"
        )
    return _prepared(model, settings, balance)


def refuse_other_weights(directory: Path, ranks: Ranks) -> None:
    """Raises UserError, on all ranks, if a node has other weights in this directory than the first node.

    Each rank reads its part of the model from its node's disk, and a mixture of two models would not be noticed. One
    rank per node reads all weights.
    """
    if ranks.size == ranks.per_node:
        return
    found = ranks.gather("" if ranks.rank % ranks.per_node else fingerprint(directory))
    for rank, theirs in enumerate(found):
        if theirs and theirs != found[0]:
            raise UserError(
                f"{directory}: the machine of rank {rank} has another model there than rank 0 (fingerprints {theirs[:12]} "
                f"and {found[0][:12]}); give all machines the same files"
            )


def _prepared(model: Transformer, settings: ModelSection, balance: bool) -> Transformer:
    """Applies the settings for balancing, expert format, numerics, activation checkpointing and compilation; returns the model."""
    asked = {"router_bias_rate": settings.router_bias_rate, "router_aux_loss_coef": settings.router_aux_loss_coef}
    changes: dict[str, Any] = {name: value or 0.0 for name, value in asked.items() if value is not None or not balance}
    model.config = model.config.model_copy(update=changes)
    if settings.expert_weights == "dequantized":
        try:
            set_expert_profile(model, settings.expert_profile)
        except UserError as error:
            raise UserError(f"model.{error}") from None
    model.set_numerics(settings.numerics)
    model.checkpoint_activations = settings.checkpoint_activations
    return model.compile_feed_forward() if settings.compile else model
