"""Measures how much memory loading a checkpoint takes beyond the model itself.

    python benchmarks/loading.py                     # six checkpoints of 2 GB, written to a temporary directory one at a time

Each is loaded in a process of its own, which has loaded a small checkpoint of the family before, so that the interpreter, torch
and what a first load makes once are there already. Resident memory is read from /proc then (VmRSS), and its peak (VmHWM) after the
large load. Mapped pages of the checkpoint count as resident. The bound is the model's own bytes and 1.2 times its largest tensor.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nmoe.model.config import ModelConfig
from nmoe.model.families import FAMILIES
from nmoe.model.shards import write_shards

# What the peak may be beyond the model, in units of its largest tensor.
BOUND = 1.2

_LOAD = """
import json, sys
from pathlib import Path
import torch
from nmoe.model.checkpoint import load_model

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[3])
load_model(Path(sys.argv[1]), dtype)
before = kilobytes("VmRSS")
state = load_model(Path(sys.argv[2]), dtype).state_dict()
sizes = [tensor.nbytes for tensor in state.values()]
print(json.dumps({"beyond": (kilobytes("VmHWM") - before) * 1024, "model": sum(sizes), "largest": max(sizes)}))
"""


@dataclass(frozen=True)
class Case:
    """A checkpoint: its family and configuration, the dtype it is stored in ("mxfp4" for experts packed as OpenAI released them,
    "fp8" for all projections as Qwen did) and the one it is loaded in."""

    family: str
    config: ModelConfig
    stored: str
    loaded: str

    @property
    def small(self) -> Case:
        return replace(self, config=self.config.model_copy(update={"layers": 1, "vocab_size": 64}))


def _decoder(**changes: object) -> ModelConfig:
    shape = {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "context_tokens": 512,
    }
    return ModelConfig.from_dict(ModelConfig(**shape, layers=1, intermediate_size=1).to_dict() | changes)


_EXPERTS = {"intermediate_size": 0, "experts": 32, "experts_per_token": 4}
_GPT_OSS = _EXPERTS | {
    "expert_bias": True,
    "router_linear_bias": True,
    "swiglu_limit": 7.0,
    "sinks": True,
    "qk_norm": False,
    "qkv_bias": True,
    "output_bias": True,
}
_GLM = {"rotary_dim": 64, "qkv_bias": True, "router_scores": "sigmoid", "shared_experts": 1}
CASES = {
    "dense, fp32 to bf16": Case(
        "qwen3", _decoder(layers=24, intermediate_size=12288), stored="float32", loaded="bfloat16"
    ),
    "experts one by one": Case(
        "qwen3_moe", _decoder(layers=14, expert_width=704, **_EXPERTS), stored="bfloat16", loaded="bfloat16"
    ),
    "experts one by one in FP8": Case(
        "qwen3_moe", _decoder(layers=14, expert_width=704, **_EXPERTS), stored="fp8", loaded="bfloat16"
    ),
    "heads turned in part": Case(
        "glm4_moe", _decoder(layers=14, expert_width=704, **_EXPERTS, **_GLM), stored="bfloat16", loaded="bfloat16"
    ),
    "stacked experts": Case(
        "gpt_oss", _decoder(layers=10, expert_width=1024, **_GPT_OSS), stored="bfloat16", loaded="bfloat16"
    ),
    "stacked experts in MXFP4": Case(
        "gpt_oss", _decoder(layers=10, expert_width=1024, **_GPT_OSS), stored="mxfp4", loaded="bfloat16"
    ),
}


def write_checkpoint(case: Case, directory: Path) -> None:
    """Writes a checkpoint of this case whose weights are all alike, in shards of 512 MB. Creates the directory."""
    directory.mkdir()
    family = FAMILIES.get(case.family)
    raw = family.config_to_hf(case.config)
    if case.stored == "mxfp4":
        raw["quantization_config"] = {"quant_method": "mxfp4"}
    elif case.stored == "fp8":
        raw["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(raw))
    write_shards(directory, _tensors(case), 512 * 10**6)


def _tensors(case: Case) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    dtype = torch.bfloat16 if case.stored in ("mxfp4", "fp8") else getattr(torch, case.stored)
    for entry in FAMILIES.get(case.family).entries(case.config):
        if case.stored == "mxfp4" and entry.theirs.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = entry.shape
            for suffix, last in (("_blocks", (16,)), ("_scales", ())):
                shape = (experts, outputs, inputs // 32, *last)
                yield (
                    entry.theirs + suffix,
                    math.prod(shape),
                    lambda shape=shape: torch.full(shape, 119, dtype=torch.uint8),
                )
        elif case.stored == "fp8" and entry.theirs.endswith("_proj.weight"):
            blocks = [math.ceil(size / 128) for size in entry.shape]
            for name, shape, stored in (("", entry.shape, torch.float8_e4m3fn), ("_scale_inv", blocks, dtype)):
                size = math.prod(shape) * stored.itemsize
                yield entry.theirs + name, size, lambda s=shape, stored=stored: torch.full(s, 0.0625).to(stored)
        else:
            size = math.prod(entry.shape) * dtype.itemsize
            yield entry.theirs, size, lambda shape=entry.shape: torch.full(shape, 0.01, dtype=dtype)


def measure(case: Case, directory: Path) -> dict[str, float]:
    """Loads a checkpoint of this case in a process of its own. Returns bytes: `model`, its `largest` tensor, the peak `beyond` what
    was resident before; and `overhead`, what the peak is beyond the model, in units of the largest tensor."""
    write_checkpoint(case.small, directory / "small")
    write_checkpoint(case, directory / "large")
    paths = [str(directory / name) for name in ("small", "large")]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *paths, case.loaded], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found | {"overhead": round((found["beyond"] - found["model"]) / found["largest"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/loading.json"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    # Beside the script, and not needed where a test measures a small checkpoint.
    from machine import machine, versions
    from result_files import write_results

    results = {}
    for name in options.cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as directory:
            results[name] = measure(case, Path(directory))
        print(f"{name}: {results[name]}", flush=True)
    record = {"bound": BOUND, "cases": results, "machine": machine(), "versions": versions()}
    write_results(options.results, record)
    sys.exit(int(any(found["overhead"] > BOUND for found in results.values())))


if __name__ == "__main__":
    main()
