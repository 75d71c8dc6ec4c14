"""CPU seconds that the engine takes for one long prompt, by part, against torch's products and attention alone; on a GPU seconds
of the clock.

    python benchmarks/prefill.py                     # 8192 tokens, 0.1B Qwen3 with 151,936 tokens, bf16 and fp32
    python benchmarks/prefill.py --device cuda --dtypes bf16

Sides take turns: the prompt at once, the prompt in pieces (what a prompt longer than a step's budget gets), and `plain`: for
every layer F.linear and scaled_dot_product_attention of the same shapes, nothing between them and no head. Figures are medians of
CPU seconds, which other work on the machine disturbs less than the clock's. Every round has another prompt, so that no prefix is
found in the cache; one round before them warms up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from decode_workload import MODELS
from machine import machine, versions
from on_device import add_device, random_model, work_clock
from result_files import write_results

from nmoe.engine.api import Request
from nmoe.engine.native.attend import PrefillAttention
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.model.checkpoint import read_config
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import keep_freed_memory
from nmoe.types import Sampling

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PARTS = {"attention": (PrefillAttention, "__call__"), "head": (Transformer, "logits")}


def make_model(name: str, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Random weights."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODELS[name]))
        config = read_config(Path(directory))[1]
    return random_model(config, device, dtype)


@contextmanager
def timed_parts(taken: dict[str, float], device: torch.device) -> Iterator[None]:
    """Adds the seconds of every part to `taken`."""
    originals = {part: getattr(owner, name) for part, (owner, name) in PARTS.items()}

    def timed(part: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = work_clock(device)
            out = originals[part](*arguments)
            taken[part] = taken.get(part, 0.0) + work_clock(device) - began
            return out

        return call

    for part, (owner, name) in PARTS.items():
        setattr(owner, name, timed(part))
    try:
        yield
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, originals[part])


def prefill(engine: LLMEngine, tokens: int, seed: int) -> dict[str, float]:
    """Seconds of a prompt and its first sampled token: in all and by part."""
    vocabulary, device = engine.model.config.vocab_size, engine.model.head_weight.device
    prompt = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    taken: dict[str, float] = {}
    with timed_parts(taken, device):
        engine.add(Request(tuple(prompt), 1, Sampling(1, seed=seed), str(seed)))
        began = work_clock(device)
        while not engine.idle:
            engine.step()
        taken["all"] = work_clock(device) - began
    taken["rest"] = taken["all"] - taken["attention"] - taken["head"]
    return taken


@torch.no_grad()
def plain(model: Transformer, tokens: int) -> dict[str, float]:
    """The same of torch's products and attention alone."""
    config, device = model.config, model.head_weight.device
    x_TD = torch.randn(tokens, config.hidden_size).to(model.head_weight)
    q_1HTC, k_1JTC = (
        torch.randn(1, heads, tokens, config.head_dim).to(model.head_weight)
        for heads in (config.heads, config.kv_heads)
    )
    taken = {"attention": 0.0, "rest": 0.0}
    for block in model.blocks:
        began = work_clock(device)
        F.scaled_dot_product_attention(q_1HTC, k_1JTC, k_1JTC, is_causal=True, enable_gqa=True)
        attended = work_clock(device)
        for weight in block.parameters():
            if weight.dim() == 2:
                F.linear(x_TD if weight.shape[1] == x_TD.shape[1] else x_TD.new_ones(tokens, weight.shape[1]), weight)
        taken["attention"] += attended - began
        taken["rest"] += work_clock(device) - attended
    return {**taken, "all": sum(taken.values())}


def time_dtype(dtype: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Medians of every side."""
    model, tokens = make_model(arguments.model, DTYPES[dtype], arguments.device), arguments.tokens
    engines = {"at once": LLMEngine(model, 1, prefill_tokens=tokens)}
    engines["in pieces"] = LLMEngine(model, 1, prefill_tokens=arguments.piece)
    sides: dict[str, Callable[[int], dict[str, float]]] = {
        name: lambda seed, engine=engine: prefill(engine, tokens, seed) for name, engine in engines.items()
    }
    sides["plain"] = lambda seed: plain(model, tokens)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(arguments.rounds + 1):
        for name, side in sides.items():
            taken = side(number)
            if number > 0:
                found[name].append(taken)
    case: dict[str, object] = {"dtype": dtype}
    for name, rounds in found.items():
        case[name] = {part: round(statistics.median(each[part] for each in rounds), 6) for part in rounds[0]}
    print(json.dumps(case), flush=True)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds of a long prompt by part")
    parser.add_argument("--model", default="qwen3_0p1b", choices=list(MODELS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--piece", type=int, default=1024, help="tokens of a piece")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    add_device(parser)
    parser.add_argument("--out", type=Path, help="where to write the results, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as every recipe does
    load = os.getloadavg()
    cases = [time_dtype(dtype, arguments) for dtype in arguments.dtypes]
    if arguments.out is not None:
        settings = {name: getattr(arguments, name) for name in ("model", "tokens", "piece", "rounds")}
        settings["device"] = str(arguments.device)
        report = {**settings, "load": load, "machine": machine(), "versions": versions("torch"), "cases": cases}
        write_results(arguments.out, report)


if __name__ == "__main__":
    main()
