"""What `benchmarks/decode.sh` can be told. Run as a script it checks arguments before any environment is made, and prints the
sides that they choose. It imports nothing outside the standard library."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from decode_workload import DTYPES, DTYPES_OF, MODELS, NEW_TOKENS, SEQUENCES, SIDES, SMALL_MODELS, USUAL_SEQUENCES

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
