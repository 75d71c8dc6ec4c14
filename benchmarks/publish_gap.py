"""The gap that a publication of weights leaves in a stream, and that of an empty pause: python benchmarks/publish_gap.py CHECKPOINT

A client streams the tokens of one request from an engine server, while another has it pause and resume, or publishes weights to it:
transfer by files, commit, and a canary of 8 requests of 32 tokens. The gap is the largest time between two tokens of
the stream less the median one. The two take turns, nine times after one that warms up. Prints medians and their ratio; the last
line is one JSON object. At most three times the empty pause is wanted, and at most 0.5 s on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
from machine import machine, versions

from nmoe.engine.api import Request
from nmoe.engine.remote.weights import digest_of
from nmoe.engine.remote.wire import GENERATE, decode_deltas, encode_request
from nmoe.model.checkpoint import read_config
from nmoe.model.shards import open_tensors
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.types import Sampling

ROUNDS, TOKENS, BEFORE = 9, 400, 60
CANARIES, CANARY_TOKENS = 8, 32


class Client:
    def __init__(self, url: str, vocabulary: int) -> None:
        self.http = httpx2.Client(
            base_url=url, timeout=120, trust_env=False, limits=httpx2.Limits(max_connections=None)
        )
        self.vocabulary, self.version, self.number = vocabulary, 0, 0

    def post(self, path: str, body: dict[str, Any] | None = None, **params: str) -> None:
        self.http.post(path, json=body or {}, params=params).raise_for_status()

    def request(self, tokens: int, seed: int) -> Request:
        self.number += 1
        draw = random.Random(seed)
        prompt = tuple(draw.randrange(self.vocabulary) for _ in range(4))
        return Request(prompt, 1, Sampling(tokens, seed=seed), str(self.number))

    def pause(self) -> None:
        self.post("/pause", mode="keep", clear_cache="true")
        self.post("/resume")

    def publish(self, info: dict[str, Any]) -> None:
        self.version += 1
        self.post("/start_weight_update")
        self.post("/update_weights", {"update_info": info})
        self.post("/finish_weight_update", {"weight_version": str(self.version)})
        asked = [encode_request(self.request(CANARY_TOKENS, seed)) for seed in range(CANARIES)]
        with ThreadPoolExecutor(CANARIES) as pool:
            list(pool.map(lambda body: self.post(GENERATE, body), asked))

    def gap(self, act: Any, seed: int, context_tokens: int) -> float:
        """Returns the largest time between two tokens of a stream that `act` interrupts, less the median one, in seconds."""
        times: list[float] = []
        request = self.request(min(TOKENS, context_tokens - 4), seed)

        def stream() -> None:
            with self.http.stream("POST", GENERATE, json=encode_request(request, stream=True)) as reply:
                for line in reply.iter_lines():
                    times.extend(time.perf_counter() for _ in decode_deltas(line, request))

        reader = threading.Thread(target=stream)
        reader.start()
        while len(times) < min(BEFORE, request.sampling.max_new_tokens // 4) and reader.is_alive():
            time.sleep(0.001)
        act()
        reader.join()
        between = [after - before for before, after in pairwise(times)]
        return max(between) - statistics.median(between)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    checkpoint = resolve_checkpoint(parser.parse_args().checkpoint)
    _, config = read_config(checkpoint)
    command = [sys.executable, "-m", "nmoe.engine.server", str(checkpoint), "--with-parent", "--threads", "1"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for file in checkpoint.glob("*.safetensors*"):
            shutil.copy(file, directory)
        stored = open_tensors(Path(directory))
        digests = [digest_of(stored.read(name)) for name in stored.files]
        info = {"transport": "disk", "path": directory, "names": list(stored.files), "digests": digests}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        client = Client(f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}", config.vocab_size)
        gaps: dict[str, list[float]] = {"pause": [], "publish": []}
        for round_ in range(ROUNDS + 1):
            for name, act in (("pause", client.pause), ("publish", lambda: client.publish(info))):
                gap = client.gap(act, round_, config.context_tokens)
                if round_:
                    gaps[name].append(gap)
        process.kill()
    medians = {name: statistics.median(values) for name, values in gaps.items()}
    for name, values in gaps.items():
        print(f"{name:8} median {medians[name]:.3f} s, largest {max(values):.3f} s")
    ratio = medians["publish"] / medians["pause"]
    print(f"ratio {ratio:.1f}")
    print(json.dumps({"gaps_s": gaps, "ratio": ratio, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
