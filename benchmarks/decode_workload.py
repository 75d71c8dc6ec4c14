"""The decode workload that all sides run: models, prompts, lengths, the questions a side answers, and the arguments of decode.sh.

Everything that could favour one side lives here, once. It imports nothing outside the standard library: the sides run in
environments that share no packages. Run as a script, it checks the arguments of `benchmarks/decode.sh` before any environment is
made, and prints the sides that they choose.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["fp32", "bf16"]

HERE = Path(__file__).parent
# Qwen3-0.6B's vocabulary with half its width and a quarter of its layers is qwen3_0p1b.
SHAPES: dict[str, dict[str, Any]] = json.loads((HERE / "models.json").read_text())
MODELS = {name: SHAPES[name] for name in ("qwen3_5m", "qwen3_moe_14m", "qwen3_0p1b", "smollm2_135m")}
SMALL_MODELS = ("qwen3_5m", "qwen3_moe_14m")
SEQUENCES = (1, 16, 64, 256)
USUAL_SEQUENCES = (64, 256)
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")
SIDES = ("nmoe", "generate", "vllm", "bare")
# vLLM on a CPU is measured in the dtype its users run.
# The bare loop is Qwen3's.
QWEN3_ALONE = ("bare",)
DTYPES_OF: dict[str, tuple[Dtype, ...]] = {side: ("bf16",) if side == "vllm" else DTYPES for side in SIDES}

PROMPT_TOKENS = 32
NEW_TOKENS = 128  # by default; no side is asked for more
VOCABULARY = 4096  # prompts hold these ids; a model may have more
FIRST_ID = 2  # prompts hold neither padding nor the end token


def make_prompts(sequences: int, seed: int = 0) -> list[list[int]]:
    """As many prompts of random token ids, the same for all sides; others for every seed, so that no run finds another's
    prompts in a prefix cache."""
    generator = random.Random(seed)
    return [[generator.randrange(FIRST_ID, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(sequences)]


@dataclass(frozen=True)
class Run:
    """A question: sample `new_tokens` for each of the seed's prompts, at temperature 1 from the whole vocabulary, whatever tokens
    come. With `logprobs`, say those of the sampled tokens as well (nmoe and the bare loop always do)."""

    dtype: Dtype
    sequences: int
    seed: int
    logprobs: bool = False
    new_tokens: int = NEW_TOKENS


@dataclass(frozen=True)
class Generated:
    """The answer, e.g. for two sequences: seconds = 0.9, cpu_seconds = 1.7, others_cores = 0.01, token_ids = [[9, 44, ...], [7, 8,
    ...]] (as many as were asked for), logprobs = [[-3.1, ...], [-2.2, ...]] or [] where they were not asked for.

    `seconds` is the whole call, prompts in and token ids out; `others_cores` is what others used of the machine meanwhile.
    `mismatch` is nmoe's alone: mean and largest absolute difference of the engine's and the learner's logprobs.
    """

    seconds: float
    cpu_seconds: float
    others_cores: float
    token_ids: list[list[int]] = field(repr=False)
    logprobs: list[list[float]] = field(repr=False)
    mismatch: tuple[float, float] | None = None


@dataclass(frozen=True)
class Logits:
    """A question: the fp32 logits at every position of that many prompts of seed 0."""

    sequences: int


@dataclass(frozen=True)
class Score:
    """A question to the reference: the fp32 logprobs of these tokens after the seed's prompts."""

    seed: int
    token_ids: list[list[int]]


_EXAMPLES = """examples:
  benchmarks/decode.sh                                   all but the largest model: about ten minutes on two cores
  benchmarks/decode.sh --sides nmoe,generate             without vLLM: its environment is not made
  benchmarks/decode.sh --models qwen3_5m --sequences 64 --dtypes bf16
  benchmarks/decode.sh --models qwen3_0p1b --sides nmoe,vllm --dtypes bf16    a released model's vocabulary
  benchmarks/decode.sh --models smollm2_135m --sequences 1,16,64 --new-tokens 32    a small released model's shape
  benchmarks/decode.sh --rounds 9 | tail -1 >run.json    the JSON line alone"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """`sides`, `models`, `sequences`, `dtypes` as lists in the order they are known in, and `rounds`. Ends the process with code 2
    and one message where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/decode.sh",
        description="Decode throughput of nmoe's engine against transformers' generate, vLLM on a CPU and a bare PyTorch loop:\n"
        "same weights, prompts and lengths (32 prompt tokens, 128 sampled at temperature 1). The last line is one JSON object.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sides", type=_some_of(SIDES), default=list(SIDES), metavar="A,B", help=_choices(SIDES))
    parser.add_argument(
        "--models",
        type=_some_of(MODELS),
        default=list(SMALL_MODELS),
        metavar="A,B",
        help=f"any of {','.join(MODELS)}; {','.join(SMALL_MODELS)} by default",
    )
    parser.add_argument(
        "--sequences",
        type=_some_of(SEQUENCES),
        default=list(USUAL_SEQUENCES),
        metavar="A,B",
        help=f"any of {','.join(map(str, SEQUENCES))}; {','.join(map(str, USUAL_SEQUENCES))} by default",
    )
    parser.add_argument("--dtypes", type=_some_of(DTYPES), default=list(DTYPES), metavar="A,B", help=_choices(DTYPES))
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed runs of each side per case, at least 2 (default 5)"
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=NEW_TOKENS,
        metavar="N",
        help=f"sampled by each sequence, 2 to {NEW_TOKENS} (default {NEW_TOKENS})",
    )
    chosen = parser.parse_args(arguments)
    if not 2 <= chosen.new_tokens <= NEW_TOKENS:
        parser.error(f"--new-tokens {chosen.new_tokens}: between 2 and {NEW_TOKENS}")
    if chosen.rounds < 2:
        parser.error(f"--rounds {chosen.rounds}: at least 2, quartiles need two values")
    if not any(dtype in DTYPES_OF[side] for side in chosen.sides for dtype in chosen.dtypes):
        parser.error("nothing to time: vllm is measured in bf16 alone")
    return chosen


def _choices(known: Sequence[object]) -> str:
    return f"any of {','.join(map(str, known))}; all by default"


def _some_of(known: Sequence[object]) -> Callable[[str], list[object]]:
    """Reads a comma-separated choice of `known`."""

    def read(text: str) -> list[object]:
        chosen = [name.strip() for name in text.split(",")]
        for name in chosen:
            if name not in map(str, known):
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(map(str, known))}")
        return [value for value in known if str(value) in chosen]

    return read


if __name__ == "__main__":
    print(*parse().sides)
