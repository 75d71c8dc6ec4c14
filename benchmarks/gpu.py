"""One CUDA GPU: decoding against its memory's bandwidth and transformers, the experts against transformers' grouped path, and the
mismatch of engine and learner in bf16.

    PYTHONPATH=. python benchmarks/gpu.py [--results benchmarks/results/gpu.json]

Weights are random in the shape of Qwen3-0.6B; prompts of 512 tokens, 128 sampled. The last line is one JSON object. A part that
fails is reported in it and leaves the others alone; the exit code is then 1. Without CUDA: exit code 2.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from machine import machine, versions
from result_files import write_results
from torch import Tensor

from nmoe.engine.api import Request
from nmoe.engine.native.llm_engine import LLMEngine
from nmoe.model.config import ModelConfig
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import MoE, RouterTrace
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.packed import PackedAttention
from nmoe.model.precision import cast
from nmoe.model.transformer import Transformer
from nmoe.types import Sample, Sampling

PROMPT, NEW = 512, 128
QWEN3 = ModelConfig(
    vocab_size=151936,
    hidden_size=1024,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    context_tokens=1024,
    intermediate_size=3072,
    rope_theta=1e6,
)
KV_BYTES = QWEN3.layers * QWEN3.kv_heads * 2 * QWEN3.head_dim * 2
EXPERTS = {"hidden_size": 2048, "experts": 128, "experts_per_token": 8, "expert_width": 768}
MOE_TOKENS = 32768


def seconds(run: Callable[[], Any], repeats: int) -> list[float]:
    """Device time of each of `repeats` calls, by events."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def largest_kernels(run: Callable[[], Any], count: int = 15) -> list[dict[str, Any]]:
    """Where the device's time goes in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    return [{"kernel": e.key[:90], "calls": e.count, "us": round(e.device_time_total)} for e in events[:count]]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / statistics.median(seconds(lambda: target.copy_(source), 10))


def qwen3() -> Transformer:
    """Random weights; the last norm's scale makes the output peaked, since near-uniform logits would hide any mismatch."""
    model = Transformer(QWEN3)
    model.initialize(0)
    with torch.no_grad():
        model.norm.weight.fill_(6.0)
    return cast(model, torch.bfloat16).to("cuda").requires_grad_(False)


def requests(count: int, seed: int) -> list[Request]:
    ids = torch.randint(QWEN3.vocab_size, (count, PROMPT), generator=torch.Generator().manual_seed(seed)).tolist()
    return [Request(tuple(row), 1, Sampling(NEW, seed=i), f"{seed}/{i}") for i, row in enumerate(ids)]


def decode_run(engine: LLMEngine, count: int, seed: int) -> dict[str, Any]:
    """All prompts in the first step, which also samples the first token; the steps after it only decode."""
    asked = requests(count, seed)
    groups = [engine.add(request) for request in asked]
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.step()
    torch.cuda.synchronize()
    prefilled = time.perf_counter()
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
    torch.cuda.synchronize()
    ended = time.perf_counter()
    samples = [sample for group in groups for sample in group.samples if sample is not None]
    assert len(samples) == count
    assert all(len(sample.token_ids) == NEW for sample in samples)
    left = sum(len(sample.token_ids) for sample in samples) - (NEW - steps) * count
    return {
        "tokens_per_s": left / (ended - prefilled),
        "whole_tokens_per_s": NEW * count / (ended - began),
        "prefill_s": prefilled - began,
        "step_ms": 1e3 * (ended - prefilled) / steps,
        "samples": samples,
        "requests": asked,
    }


def decode(model: Transformer, bandwidth: float, count: int) -> dict[str, Any]:
    cache_bytes = (count * (PROMPT + NEW + 16) + 4096) * KV_BYTES
    engine = LLMEngine(model, count, cache_bytes=cache_bytes, prefill_tokens=count * PROMPT)
    decode_run(engine, count, 0)  # compiles and records
    runs = [decode_run(engine, count, seed) for seed in (1, 2, 3)]
    rate = statistics.median(run["tokens_per_s"] for run in runs)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    context = PROMPT + NEW / 2
    bound = count * bandwidth / (weights + count * context * KV_BYTES)
    for request in requests(count, 9):
        engine.add(request)
    engine.step()
    kernels = largest_kernels(engine.step)
    engine.abort_all()
    return {
        "sequences": count,
        "tokens_per_s": round(rate),
        "hbm_bound_tokens_per_s": round(bound),
        "share_of_hbm_bound": round(rate / bound, 3),
        "step_ms": round(statistics.median(run["step_ms"] for run in runs), 3),
        "prefill_s": round(statistics.median(run["prefill_s"] for run in runs), 3),
        "whole_tokens_per_s": round(statistics.median(run["whole_tokens_per_s"] for run in runs)),
        "mismatch": mismatch(model, runs[-1]["requests"][:16], runs[-1]["samples"][:16]),
        "kernels_of_a_step": kernels,
    }


@torch.no_grad()
def mismatch(model: Transformer, asked: list[Request], samples: list[Sample]) -> dict[str, float]:
    """The learner's log-probabilities of what the engine sampled, against the engine's."""
    device = torch.device("cuda")
    rows = [[*request.prompt_ids, *sample.token_ids] for request, sample in zip(asked, samples, strict=True)]
    lengths = [len(row) - 1 for row in rows]
    ids = torch.tensor([token for row in rows for token in row[:-1]], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    states = model(ids, positions, PackedAttention(lengths, device), RouterTrace())
    scored = torch.cat([states[i * lengths[0] + PROMPT - 1 : (i + 1) * lengths[0]] for i in range(len(rows))])
    targets = torch.tensor([token for sample in samples for token in sample.token_ids], device=device)
    logprobs, entropy = head_logprobs(scored, model.head_weight, targets)
    ours = torch.tensor([logprob for sample in samples for logprob in sample.logprobs], device=device)
    difference = (logprobs - ours).double()
    return {
        "tokens": len(targets),
        "mismatch_kl": float((difference.exp() - 1 - difference).mean()),
        "mismatch_abs_mean": float(difference.abs().mean()),
        "mismatch_abs_max": float(difference.abs().max()),
        "entropy_mean": float(entropy.mean()),
        "entropy_uniform": math.log(QWEN3.vocab_size),
    }


def generate(counts: list[int]) -> dict[str, Any]:
    """transformers' own sampling of the same shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=QWEN3.vocab_size,
        hidden_size=QWEN3.hidden_size,
        num_hidden_layers=QWEN3.layers,
        num_attention_heads=QWEN3.heads,
        num_key_value_heads=QWEN3.kv_heads,
        head_dim=QWEN3.head_dim,
        intermediate_size=QWEN3.intermediate_size,
        tie_word_embeddings=True,
        max_position_embeddings=QWEN3.context_tokens,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    result = {}
    for count in counts:
        ids = torch.randint(QWEN3.vocab_size, (count, PROMPT), device="cuda")
        settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "top_k": 0, "top_p": 1.0}
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, **(settings | {"max_new_tokens": 4, "min_new_tokens": 4}))
        rates = []
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            out = model.generate(ids, attention_mask=mask, **settings)
            torch.cuda.synchronize()
            assert out.shape == (count, PROMPT + NEW)
            rates.append(count * NEW / (time.perf_counter() - began))
        result[str(count)] = {"whole_tokens_per_s": round(max(rates))}
    return result


def attention_alone(bandwidth: float) -> list[dict[str, Any]]:
    """The paged kernel by tile, warps, stages and split, against the bandwidth: what to choose in `paged_attention_triton`."""
    from nmoe.model.ops.triton import paged_attention as kernels

    rows = []
    names = ("SPLIT_POSITIONS", "TILE_POSITIONS", "WARPS", "STAGES")
    chosen = tuple(getattr(kernels, name) for name in names)
    variants = [chosen, (512, 64, 4, 2), (512, 64, 4, 4), (512, 64, 2, 3), (512, 32, 4, 4), (512, 128, 4, 3)]
    variants += [(512, 128, 8, 3), (256, 64, 4, 3), (1024, 64, 4, 3), (1024, 128, 4, 3)]
    try:
        for count, length in ((256, 576), (64, 576), (8, 8000)):
            blocks = -(-length // 16)
            shape = (count * blocks, QWEN3.kv_heads, 16, QWEN3.head_dim)
            keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            table = torch.randperm(count * blocks, device="cuda").view(count, blocks).int()
            lengths = torch.full((count,), length, device="cuda", dtype=torch.int32)
            q = torch.randn(count, QWEN3.heads, QWEN3.head_dim, device="cuda", dtype=torch.bfloat16)
            for variant in variants:
                for name, value in zip(names, variant, strict=True):
                    setattr(kernels, name, value)

                def run(arguments: Any = (AttentionLayer(0, QWEN3.scale), q, keys, values, table, lengths)) -> None:
                    kernels.paged_attention_triton(*arguments)

                try:
                    seconds(run, 3)
                    taken = statistics.median(seconds(run, 20))
                except Exception as error:  # too much shared memory, say: the others go on
                    rows.append({"rows": count, "length": length, "variant": variant, "error": str(error)[:200]})
                    continue
                moved = 2 * count * length * QWEN3.kv_heads * QWEN3.head_dim * 2
                share = moved / taken / bandwidth
                rows.append(
                    {"rows": count, "length": length, "variant": variant, "us": 1e6 * taken, "share": round(share, 3)}
                )
    finally:
        for name, value in zip(names, chosen, strict=True):
            setattr(kernels, name, value)
    return rows


def experts() -> dict[str, Any]:
    """One layer of experts with its router, forward and backward, ours and transformers' taking turns."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    width, count, k, expert_width = EXPERTS.values()
    config = Qwen3MoeConfig(
        hidden_size=width,
        num_experts=count,
        num_experts_per_tok=k,
        moe_intermediate_size=expert_width,
        norm_topk_prob=True,
        hidden_act="silu",
    )
    config._experts_implementation = "grouped_mm"
    theirs = Qwen3MoeSparseMoeBlock(config).to("cuda", torch.bfloat16)
    shape = {"vocab_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "context_tokens": 8}
    ours = MoE(ModelConfig(**(shape | EXPERTS))).to("cuda", torch.bfloat16)
    ours.router.float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.02)
        ours.router.weight.copy_(theirs.gate.weight)
        ours.gate_up.copy_(theirs.experts.gate_up_proj.transpose(1, 2))
        ours.down.copy_(theirs.experts.down_proj.transpose(1, 2))
    x = torch.randn(1, MOE_TOKENS, width, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn_like(x)

    def step(layer: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        for module in (ours, theirs):
            module.zero_grad(set_to_none=True)
        out = layer(leaf)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(upstream)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    def run_ours() -> tuple[Tensor, Tensor]:
        return step(lambda x: ours(x[0], RouterTrace()).unsqueeze(0))

    def run_theirs() -> tuple[Tensor, Tensor]:
        return step(theirs)

    errors = [
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(run_ours(), run_theirs(), strict=True)
    ]
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(3):
        run_ours(), run_theirs()
    for _ in range(10):
        times["ours"] += seconds(run_ours, 1)
        times["theirs"] += seconds(run_theirs, 1)
    operations = 3 * MOE_TOKENS * k * (2 * width * 2 * expert_width + 2 * expert_width * width)
    ours_s, theirs_s = (statistics.median(times[name]) for name in ("ours", "theirs"))
    return {
        **EXPERTS,
        "tokens": MOE_TOKENS,
        "ours_tflops": round(operations / ours_s / 1e12, 1),
        "transformers_tflops": round(operations / theirs_s / 1e12, 1),
        "ratio": round(theirs_s / ours_s, 3),
        "ours_ms": round(1e3 * ours_s, 3),
        "transformers_ms": round(1e3 * theirs_s, 3),
        "difference_of_output_and_input_gradient": errors,
        "kernels_of_ours": largest_kernels(run_ours),
        "kernels_of_transformers": largest_kernels(run_theirs),
    }


def product_tflops() -> float:
    """A plain bf16 product, the ceiling of the experts'."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds(lambda: a @ b, 3)
    return round(2 * 8192**3 / statistics.median(seconds(lambda: a @ b, 10)) / 1e12, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "cuda": torch.version.cuda,
        "machine": machine(),
        "versions": versions("torch", "triton", "transformers"),
    }
    failed = False

    def part(name: str, compute: Callable[[], Any]) -> Any:
        nonlocal failed
        began = time.perf_counter()
        try:
            result[name] = compute()
        except Exception as error:
            traceback.print_exc()
            result[name], failed = {"error": f"{type(error).__name__}: {error}"[:500]}, True
        torch.cuda.empty_cache()
        print(f"{name} ({time.perf_counter() - began:.0f} s): {json.dumps(result[name])[:1500]}", flush=True)
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        write_results(arguments.results, result)
        return result[name]

    bandwidth = part("copy_bytes_per_s", copy_bandwidth)
    part("product_bf16_tflops", product_tflops)
    part("experts", experts)
    model = qwen3()
    for count in (64, 256):
        part(f"decode_{count}", lambda count=count: decode(model, bandwidth, count))
    peer = part("transformers_generate", lambda: generate([64, 256]))
    part("attention_alone", lambda: attention_alone(bandwidth))
    for count in (64, 256):
        ours, theirs = result[f"decode_{count}"], peer.get(str(count))
        if theirs is not None and "whole_tokens_per_s" in ours:
            ours["times_generate"] = round(ours["whole_tokens_per_s"] / theirs["whole_tokens_per_s"], 2)
    write_results(arguments.results, result)
    print(json.dumps(result))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
