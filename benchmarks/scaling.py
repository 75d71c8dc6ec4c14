"""Measures how a training pass and a decode step grow: linear in the number of sequences, `a + bT + cT^2` in their length.

    python benchmarks/scaling.py                 all of it, two minutes on two cores
    python benchmarks/scaling.py --repeats 9     medians of more runs
    python benchmarks/scaling.py --device cuda   on a GPU, in bf16

The model is the 5M dense Qwen3 of models.json with a longer context, random weights, fp32 on a CPU. The quadratic term of
training is compared with attention's own: the same packed attention alone, forward and backward, in as many layers. Every decode
line states the mismatch of its own run. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable

import numpy as np
import torch
from decode_workload import SHAPES
from machine import machine, versions
from on_device import add_device, random_model, wall_clock

from nmoe.config.tables.model import OptimizerSection
from nmoe.data.documents import Document
from nmoe.engine.api import Request
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.config import ModelConfig
from nmoe.model.families import qwen3
from nmoe.model.moe import RouterTrace
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.recipes.pretrain import document_batch
from nmoe.recipes.setup import keep_freed_memory
from nmoe.types import Sampling

CONFIG = SHAPES["qwen3_5m"]
COUNTS = (2, 4, 8, 16, 32)
TRAINED_LENGTH = 128
LENGTHS = (128, 256, 512, 1024, 2048)
TRAINED_COUNT = 2
DECODED = (16, 32, 64, 128, 256)
PROMPT, NEW = 32, 32


def model_config() -> ModelConfig:
    config = qwen3.config_from_hf(CONFIG)
    return config.model_copy(update={"context_tokens": max(LENGTHS)})


def median_seconds(act: Callable[[], object], repeats: int, device: torch.device) -> float:
    act()
    seconds = []
    for _ in range(repeats):
        began = wall_clock(device)
        act()
        seconds.append(wall_clock(device) - began)
    return statistics.median(seconds)


def train_seconds(model: Transformer, count: int, length: int, repeats: int) -> float:
    """Forward and backward over `count` sequences of `length` predicting positions, all at once."""
    model = copy.deepcopy(model)  # a learner in bf16 takes the gradients of its model to itself
    learner = Learner(model, OptimizerSection(learning_rate=1e-4), total_steps=10, tokens_per_microbatch=count * length)
    generator = np.random.default_rng(0)
    rows = [generator.integers(model.config.vocab_size, size=length + 1) for _ in range(count)]
    batch = document_batch([Document(row) for row in rows])

    def act() -> None:
        learner.forward_backward(batch, cross_entropy).result()
        for parameter in model.parameters():
            parameter.grad = None

    return median_seconds(act, repeats, model.head_weight.device)


def attention_seconds(model: Transformer, count: int, length: int, repeats: int) -> float:
    """The packed attention of all layers alone, forward and backward."""
    config, like = model.config, model.head_weight
    attend = PackedAttention([length] * count, like.device)
    layer = AttentionLayer(0, config.scale)
    shapes = [(count * length, heads, config.head_dim) for heads in (config.heads, config.kv_heads, config.kv_heads)]
    q, k, v = (torch.randn(shape).to(like).requires_grad_() for shape in shapes)
    upstream = torch.randn(shapes[0]).to(like)

    def act() -> None:
        for _ in range(config.layers):
            attend(layer, q, k, v).backward(upstream)

    return median_seconds(act, repeats, like.device)


def decode(model: Transformer, count: int, repeats: int) -> tuple[float, float, float]:
    """Seconds of a decode step with `count` sequences, and the mean and largest mismatch against one full forward pass."""
    generator, device = np.random.default_rng(count), model.head_weight.device
    seconds = []
    for _ in range(repeats):
        engine = LLMEngine(model, count)
        prompts = [tuple(generator.integers(model.config.vocab_size, size=PROMPT).tolist()) for _ in range(count)]
        groups = [engine.add(Request(p, 1, Sampling(NEW, seed=i), str(i))) for i, p in enumerate(prompts)]
        engine.step()
        began = wall_clock(device)
        while not engine.idle:
            engine.step()
        seconds.append((wall_clock(device) - began) / (NEW - 2))
    differences = []
    with torch.no_grad():
        for group in groups:
            (sample,) = group.samples
            assert sample is not None, "the engine is idle"
            ids = torch.tensor([*group.request.prompt_ids, *sample.token_ids]).to(device)
            positions = torch.arange(len(ids) - 1).to(device)
            attend = PackedAttention([len(ids) - 1], ids.device)
            logits = model.logits(model(ids[:-1], positions, attend, RouterTrace())[PROMPT - 1 :])
            logprobs = logits.float().log_softmax(-1).gather(1, ids[PROMPT:, None]).flatten()
            differences.append((logprobs.cpu() - torch.tensor(sample.logprobs)).abs())
    every = torch.cat(differences)
    return statistics.median(seconds), float(every.mean()), float(every.max())


def fit(x: tuple[int, ...], y: list[float], degree: int) -> tuple[list[float], float]:
    """Coefficients from the constant up by least squares of relative errors, and the largest relative error."""
    design = np.vander(np.array(x, dtype=float), degree + 1, increasing=True)
    observed = np.array(y)
    coefficients, *_ = np.linalg.lstsq(design / observed[:, None], np.ones(len(y)), rcond=None)
    return coefficients.tolist(), float(np.abs(design @ coefficients / observed - 1).max())


def main() -> None:
    """Every sweep with its fit, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each point, at least 1")
    add_device(parser)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    if repeats < 1:
        parser.error("--repeats must be at least 1")
    keep_freed_memory()
    model = random_model(model_config(), arguments.device)
    with torch.no_grad():
        model.embedding.weight.mul_(8)  # a peaked output: a nearly uniform one hides a mismatch

    by_count = [train_seconds(model, count, TRAINED_LENGTH, repeats) for count in COUNTS]
    (fixed, each), off_count = fit(COUNTS, by_count, 1)
    print(
        f"training {TRAINED_LENGTH} tokens x B sequences: {1e3 * fixed:.1f} + {1e3 * each:.2f} B ms, within {off_count:.0%}"
    )

    by_length = [train_seconds(model, TRAINED_COUNT, length, repeats) for length in LENGTHS]
    (a, b, c), off_length = fit(LENGTHS, by_length, 2)
    own = [attention_seconds(model, TRAINED_COUNT, length, repeats) for length in LENGTHS]
    (_, _, c_own), off_own = fit(LENGTHS, own, 2)
    print(
        f"training {TRAINED_COUNT} sequences of T tokens: {1e3 * a:.1f} + {1e3 * b:.4f} T + {1e9 * c:.1f}e-6 T^2 ms, within "
        f"{off_length:.0%}; attention alone has {1e9 * c_own:.1f}e-6 T^2 (within {off_own:.0%}): ratio {c / c_own:.2f}"
    )

    decoded = [decode(model, count, repeats) for count in DECODED]
    (start, row), off_decode = fit(DECODED, [seconds for seconds, _, _ in decoded], 1)
    for count, (seconds, mean, largest) in zip(DECODED, decoded, strict=True):
        print(
            f"decoding {count} sequences: {1e3 * seconds:.2f} ms a step, mismatch mean {mean:.1e}, largest {largest:.1e}"
        )
    print(f"decoding B sequences: {1e3 * start:.2f} + {1e3 * row:.4f} B ms a step, within {off_decode:.0%}")
    result = {
        "train_count": {"counts": COUNTS, "seconds": by_count, "fit": [fixed, each], "largest_error": off_count},
        "train_length": {"lengths": LENGTHS, "seconds": by_length, "fit": [a, b, c], "largest_error": off_length},
        "attention_length": {"lengths": LENGTHS, "seconds": own, "c": c_own, "ratio_c": c / c_own},
        "decode": {
            "counts": DECODED,
            "seconds": [s for s, _, _ in decoded],
            "fit": [start, row],
            "largest_error": off_decode,
        },
        "mismatch": {"mean": [m for _, m, _ in decoded], "largest": [m for _, _, m in decoded]},
        "device": str(arguments.device),
        "machine": machine(),
        "versions": versions("nmoe", "torch"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
