"""Measures `nmoe tokenizer train` at a vocabulary of 65,536:

    python benchmarks/tokenizer_training.py --megabytes 100 --out benchmarks/results/tokenizer_training.json

The corpus is generated: 400,000 words of one to five syllables whose frequencies follow Zipf's law, in a JSONL file. Seconds, CPU
seconds and the peak of resident memory are those of the whole command, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

from machine import machine, versions
from result_files import write_results

_ONSETS, _VOWELS, _CODAS = (
    ["b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "st", "tr", "ch"],
    "aeiouy",
    ["", "n", "r", "s", "l", "t"],
)
_WORDS = 400_000


def write_corpus(path: Path, megabytes: int, seed: int = 0) -> None:
    """Writes a text of about so many megabytes, a pure function of the seed."""
    draw = random.Random(seed)

    def syllable() -> str:
        return draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS)

    words = ["".join(syllable() for _ in range(draw.randint(1, 5))) for _ in range(_WORDS)]
    weights = list(accumulate(1 / rank for rank in range(1, _WORDS + 1)))
    written = 0
    with path.open("w") as file:
        while written < megabytes * 1_000_000:
            text = " ".join(draw.choices(words, cum_weights=weights, k=1000))
            written += file.write(json.dumps({"text": f"{text.capitalize()}. In {draw.randrange(3000)}: {{x = 1}}\n"}))
            written += file.write("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--vocab-size", type=int, default=65_536)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        corpus = Path(temporary, "corpus.jsonl")
        write_corpus(corpus, options.megabytes)
        command = [sys.executable, "-m", "nmoe", "tokenizer", "train", str(corpus)]
        command += ["--out", str(Path(temporary, "tokenizer")), "--vocab-size", str(options.vocab_size)]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = process.stdout.read().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit("the training failed")
        result = {
            "machine": machine(),
            "versions": versions("tokenizers"),
            "corpus_mb": options.megabytes,
            "said": said[:3],
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
            "peak_mb": round(usage.ru_maxrss * 1024 / 1e6),
        }
    print(json.dumps(result, indent=1))
    if options.out:
        write_results(options.out, result)


if __name__ == "__main__":
    main()
