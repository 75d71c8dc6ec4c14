"""The gap that a publication of weights leaves in a stream, and that of an empty pause:

    python benchmarks/publish_gap.py CHECKPOINT
    python benchmarks/publish_gap.py CHECKPOINT --vllm PYTHON    # of vLLM, in fp32, in the environment of this interpreter

A client streams the tokens of one request from an engine server, while another has it pause and resume, or publishes weights to it:
transfer by files, commit, and a canary of 8 requests of 32 tokens; vLLM is paused meanwhile. The gap is the largest time between
two tokens of the stream less the median one. The two take turns, nine times after one that warms up. Prints medians and their
ratio; the last line is one JSON object. At most three times the empty pause is wanted, and on a quiet machine at most 0.5 s, of
vLLM 1.0 s.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
from machine import machine, versions

from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.engine.api import Request
from nmoe.engine.remote.launcher import LocalLauncher
from nmoe.engine.remote.process import addresses
from nmoe.engine.remote.weights import digest_of
from nmoe.engine.remote.wire import GENERATE, decode_deltas, encode_request
from nmoe.model.checkpoint import export_model
from nmoe.model.policy import load_policy
from nmoe.model.shards import open_tensors
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.types import Sampling

ACCESS = "of this measurement"
ROUNDS, TOKENS, BEFORE = 9, 400, 60
CANARIES, CANARY_TOKENS = 8, 32


class Client:
    def __init__(self, url: str, vocabulary: int, pauses: bool) -> None:
        headers = {"Authorization": f"Bearer {ACCESS}"}
        limits = httpx2.Limits(max_connections=None)
        self.http = httpx2.Client(base_url=url, headers=headers, timeout=120, trust_env=False, limits=limits)
        self.vocabulary, self.pauses, self.version, self.number = vocabulary, pauses, 0, 0

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
        if self.pauses:
            self.post("/pause", mode="keep", clear_cache="true")
        self.post("/start_weight_update")
        self.post("/update_weights", {"update_info": info})
        self.post("/finish_weight_update", {"weight_version": str(self.version)})
        if self.pauses:
            self.post("/resume")
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
    parser.add_argument("--vllm", metavar="PYTHON", help="measure vLLM, installed with the plugin for this interpreter")
    options = parser.parse_args()
    model, _ = load_policy(resolve_checkpoint(options.checkpoint))
    config = model.config
    kind = "server" if options.vllm is None else "vllm"
    section = RolloutEngineSection(kind=kind, python=options.vllm, max_sequences=2 * CANARIES)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        served, sent = Path(directory) / "served", Path(directory) / "sent"
        for place in (served, sent):
            export_model(model, place, own_format=options.vllm is None)
        stored = open_tensors(sent)
        digests = [digest_of(stored.read(name)) for name in stored.files]
        info = {"transport": "disk", "path": str(sent), "names": list(stored.files), "digests": digests}
        (server,) = addresses(section, served, "fast", "float32", True, ACCESS, LocalLauncher(Path(directory) / "logs"))
        client = Client(server.start(), config.vocab_size, kind == "vllm")
        client.post("/init_weight_transfer_engine", {"init_info": {}})
        gaps: dict[str, list[float]] = {"pause": [], "publish": []}
        for round_ in range(ROUNDS + 1):
            for name, act in (("pause", client.pause), ("publish", lambda: client.publish(info))):
                gap = client.gap(act, round_, config.context_tokens)
                if round_:
                    gaps[name].append(gap)
        server.stop()
    medians = {name: statistics.median(values) for name, values in gaps.items()}
    for name, values in gaps.items():
        print(f"{name:8} median {medians[name]:.3f} s, largest {max(values):.3f} s")
    ratio = medians["publish"] / medians["pause"]
    print(f"ratio {ratio:.1f}")
    print(json.dumps({"gaps_s": gaps, "ratio": ratio, "engine": kind, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
