"""What every recipe starts with: threads, determinism, tokenizer and model."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import torch

from nmoe.config.run import ModelSection, RunConfig
from nmoe.errors import UserError
from nmoe.learner.optimizer import OptimizerSettings
from nmoe.model.checkpoint import load_model
from nmoe.model.config import ModelConfig
from nmoe.model.precision import set_precision
from nmoe.model.transformer import Transformer
from nmoe.runs.directory import recorded_threads
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.threads import choose_threads
from nmoe.text.tokenizer import Tokenizer


def run_path(config: RunConfig) -> Path:
    return Path(config.run.directory) / config.run.name


def set_threads(config: RunConfig) -> int:
    """Sets torch's thread count and returns it: the recorded one where a run is resumed, since sums split by threads and only
    the same count repeats a run number for number."""
    recorded = recorded_threads(run_path(config)) if config.run.resume else None
    threads = recorded or choose_threads(config.run.threads)
    keep_freed_memory()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return threads


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory for the next allocation instead of returning it to the system.

    A training step frees and takes back buffers of many megabytes, and each time the kernel clears every page anew: without this
    half of the system time of a step (0.9 of 7 s in all) went there. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_mmap_threshold = -1, -3  # from malloc.h
    mallopt(m_mmap_threshold, 2**30)
    mallopt(m_trim_threshold, 2**31 - 1)


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    return OptimizerSettings(**config.optimizer.model_dump())


def load_tokenizer(settings: ModelSection) -> Tokenizer:
    """The tokenizer a run names, or the one beside its checkpoint."""
    directory = settings.tokenizer or settings.path
    assert directory is not None, "the configuration asks for a tokenizer where there is no checkpoint"
    return Tokenizer.load(Path(directory) if settings.tokenizer else resolve_checkpoint(Path(directory)))


def build_model(settings: ModelSection, tokenizer: Tokenizer, seed: int) -> Transformer:
    """A new model of the given shape, or the checkpoint's. Raises UserError where the tokenizer has ids beyond the embedding."""
    if settings.shape is not None:
        shape = ModelConfig(vocab_size=tokenizer.vocab_size, **settings.shape.model_dump())
        return _prepared(Transformer(shape).initialize(seed), settings)
    assert settings.path is not None, "the configuration asks for a path where there is no shape"
    model = load_model(resolve_checkpoint(Path(settings.path)))
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{settings.tokenizer or settings.path}: the tokenizer has {tokenizer.vocab_size} ids, the embedding of "
            f"{settings.path} only {model.config.vocab_size}: they do not belong together"
        )
    return _prepared(model, settings)


def _prepared(model: Transformer, settings: ModelSection) -> Transformer:
    """The model with the numerics, precision and trade-offs that the settings ask for."""
    model.set_numerics(settings.numerics)
    set_precision(model, settings.precision)
    model.checkpoint_activations = settings.checkpoint_activations
    return model.compile_feed_forward() if settings.compile else model
