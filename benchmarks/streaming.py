"""Streams a generated corpus as `nmoe pretrain` does, and measures memory, speed and resumption.

    python benchmarks/streaming.py DIRECTORY --gigabytes 1                # writes the corpus there, in eight shards, if it is not
    python benchmarks/streaming.py DIRECTORY --gigabytes 10 --workers 2

One process opens the corpus, which checks every document, and takes `--steps` batches of `--tokens` tokens; a second one opens it
again, goes to the position after half of them, and has to get the same batches bit for bit. Memory is the largest sum of the
resident memory of the process, torch included, and of its workers, looked at ten times a second. No model is trained.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SHARDS = 8
VOCABULARY = 8192
CONTEXT = 2048
BUFFER_MB = 64


def write_corpus(directory: Path, gigabytes: float) -> None:
    """Writes documents of words with the frequencies of Zipf's law, 3 KB each in the mean; always the same."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    passages = [" ".join(rng.choices(words, weights, k=80)) for _ in range(4000)]
    each = int(gigabytes * 1e9 / SHARDS)
    for shard in range(SHARDS):
        path = directory / f"shard-{shard}.jsonl"
        if path.exists() and path.stat().st_size >= each:
            continue
        with path.open("w") as file:
            size = 0
            while size < each:
                text = f"{shard} {size}. " + "\n".join(rng.choices(passages, k=rng.randint(1, 13)))
                size += file.write(json.dumps({"text": text}) + "\n")


def resident_bytes(pids: list[int]) -> int:
    """The resident memory of some processes."""
    found = 0
    for pid in pids:
        try:
            found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return found


def stream(directory: Path, workers: int, steps: int, tokens: int, position: Any = None) -> dict[str, Any]:
    """Opens the corpus, goes to a position, and takes steps; returns digests of their batches, and what was measured."""
    from nmoe.data.documents import DocumentReader
    from nmoe.data.stream import DocumentMixture, DocumentSource
    from nmoe.data.tokenising import DocumentWorkers
    from nmoe.recipes.pretrain import document_batch  # with torch, as in a run
    from nmoe.text.tokenizer import Tokenizer

    reader = DocumentReader(Tokenizer.load(directory / "tokenizer"), CONTEXT)
    peak, over = [0], threading.Event()
    with DocumentWorkers(reader, workers) as pool:

        def watch() -> None:
            while not over.wait(0.1):
                peak[0] = max(peak[0], resident_bytes([os.getpid(), *pool.pids()]))

        threading.Thread(target=watch, daemon=True).start()
        began = time.perf_counter()
        source = DocumentSource(str(directory / "shard-*.jsonl"), pool, 0, BUFFER_MB << 20)
        mixture = DocumentMixture([source], reader)
        opened = time.perf_counter() - began
        if position is not None:
            mixture.position = position
        digests, positions, taken, began = [], [], 0, time.perf_counter()
        for _ in range(steps):
            batch = document_batch([document for _, document in mixture.take(tokens)])
            taken += batch.tokens
            digests.append(hashlib.sha256(batch.inputs_T.numpy().tobytes()).hexdigest())
            positions.append(mixture.position)
        seconds = time.perf_counter() - began
        over.set()
    return {
        "documents": source.documents,
        "bytes": source.bytes,
        "open_s": opened,
        "tokens_per_second": taken / seconds,
        "peak_mb": peak[0] / 1e6,
        "digests": digests,
        "positions": positions,
    }


def in_process(arguments: dict[str, Any]) -> dict[str, Any]:
    """Calls `stream` in a process of its own."""
    command = [sys.executable, __file__, "--side", json.dumps(arguments)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=524_288)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side = json.loads(given.side)
        print(json.dumps(stream(Path(side.pop("directory")), **side)))
        return
    if given.directory is None:
        parser.error("name a directory for the corpus")
    from nmoe.data.corpus import train_tokenizer

    write_corpus(given.directory, given.gigabytes)
    if not (given.directory / "tokenizer").exists():
        shards = [str(given.directory / "shard-0.jsonl")]
        list(train_tokenizer(shards, given.directory / "tokenizer", VOCABULARY, most_chars=3_000_000))
    asked = {"directory": str(given.directory), "workers": given.workers, "tokens": given.tokens}
    whole = in_process({**asked, "steps": given.steps})
    half = given.steps // 2
    rest = in_process({**asked, "steps": given.steps - half, "position": whole["positions"][half - 1]})
    same = rest["digests"] == whole["digests"][half:]
    print(
        f"{whole['bytes'] / 1e9:.2f} GB, {whole['documents']:,} documents, {given.workers} workers: "
        f"checked in {whole['open_s']:.0f} s, {whole['tokens_per_second']:,.0f} tokens/s, "
        f"at most {max(whole['peak_mb'], rest['peak_mb']):,.0f} MB; "
        f"buffers {whole['positions'][-1][0]['buffer']}; resumed after step {half}: {'the same' if same else 'OTHER'} batches"
    )
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
