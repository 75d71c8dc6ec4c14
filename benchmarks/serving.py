"""Measures `nmoe serve` under 64 concurrent streams of the 14M mixture of experts, beside the engine alone:

    python benchmarks/serving.py --out benchmarks/results/serving.json
    python benchmarks/serving.py --minutes 10       # steady load; what memory and errors do

The server runs in a process of its own, on one thread, and so does the engine, which computes the same requests without HTTP. They
take turns. A round has other prompts than every other one: 64 requests of 32 token ids each, of which 128 tokens are sampled with a
seed each. The client is a plain socket for each stream. Figures are ratios of two that were measured side by side:

- the tokens of 64 concurrent streams, which have to be those of the same requests one after another (once more, and shorter, in
  exact numerics), and how much faster they come;
- gaps between a stream's reads, in steps of decoding: a step is the engine's own time for one of its 64 sequences, alone, in the
  same round;
- tokens per CPU second of the server's process, over those of the engine's.

`--minutes` keeps 64 streams running, each followed by another, and fits a line to the memory of the server's process after two
minutes and a thousand requests: pages of its cache count once they are written, and on a busy machine that takes longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import reference_decode
from decode_workload import MODELS, NEW_TOKENS, make_prompts
from machine import machine, versions
from result_files import write_results
from serving_side import STREAMS, serve_alone
from side import Side

from nmoe.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from served_client import serving

ROUNDS, VOCABULARY = 5, 4096
# What has to hold.
LEAST_SPEED, MOST_GAP_P99, MOST_GAP, LEAST_SHARE, MOST_MB_A_MINUTE = 10.0, 3.0, 10.0, 0.8, 1.0
WARM_S, WARM_REQUESTS, SAMPLED_EVERY_S = 120.0, 1000, 5.0
EXACT_TOKENS = 32


@dataclass
class Read:
    """What a stream said: its events, and when bytes of them came."""

    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [one for event in self.events for choice in event["choices"] for one in choice.get("token_ids", [])]


def body_of(prompt: list[int], seed: int, tokens: int = NEW_TOKENS) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "seed": seed, "temperature": 1.0, "stream": True}
    return body | {"ignore_eos": True, "return_token_ids": True}


async def stream(port: int, body: dict[str, Any]) -> Read:
    """Sends a request and reads its stream to the end. Raises RuntimeError for a reply that is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
    found, parts = Read(), list[bytes]()
    try:
        while part := await reader.read(65536):
            if b"data: {" in part:
                found.times.append(time.perf_counter())
            parts.append(part)
    finally:
        writer.close()
    head_of_reply, _, rest = b"".join(parts).partition(b"\r\n\r\n")
    if not head_of_reply.startswith(b"HTTP/1.1 200"):
        raise RuntimeError((head_of_reply + rest).decode(errors="replace")[:500])
    data = b"".join(_chunks(rest)).decode()
    lines = [line.removeprefix("data: ") for line in data.split("\n\n") if line]
    if not lines or lines.pop() != "[DONE]":
        raise RuntimeError(f"a stream was cut: {data[-300:]}")
    found.events = [json.loads(line) for line in lines]
    return found


def _chunks(body: bytes) -> Iterable[bytes]:
    """Yields what the chunks of a body hold."""
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


async def together(port: int, bodies: list[dict[str, Any]]) -> list[Read]:
    return list(await asyncio.gather(*(stream(port, body) for body in bodies)))


async def one_by_one(port: int, bodies: list[dict[str, Any]]) -> list[Read]:
    return [await stream(port, body) for body in bodies]


def cpu_s(process: int) -> float:
    """CPU seconds of a process, the system's for it included."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def resident_mb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def make(directory: Path) -> None:
    """Writes the model, and a tokenizer whose tokens are as many as its own."""
    reference_decode.make_model(MODELS["qwen3_moe_14m"]).save_pretrained(directory)
    texts = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("docs/**/*.md"))]
    Tokenizer.train(texts, VOCABULARY).save(directory)


def measured(port: int, process: int, alone: Side, round_: int) -> dict[str, float]:
    """Measures one round."""
    bodies = [body_of(prompt, number) for number, prompt in enumerate(make_prompts(STREAMS, round_))]
    before = cpu_s(process)
    began = time.perf_counter()
    reads = asyncio.run(together(port, bodies))
    seconds, spent = time.perf_counter() - began, cpu_s(process) - before
    alone_s, alone_spent = alone.ask((round_, NEW_TOKENS))
    prefill_s, _ = alone.ask((1000 + round_, 1))
    step_s = (alone_s - prefill_s) / (NEW_TOKENS - 1)
    gaps = [(later - earlier) / step_s for read in reads for earlier, later in pairwise(read.times)]
    tokens = sum(len(read.token_ids) for read in reads)
    assert tokens == STREAMS * NEW_TOKENS, f"{tokens} tokens came"
    return {
        "tokens_per_second": tokens / seconds,
        "alone_tokens_per_second": tokens / alone_s,
        "step_ms": 1000 * step_s,
        "gap_p99_steps": quantile(gaps, 0.99),
        "gap_largest_steps": max(gaps),
        "share_of_cpu": alone_spent / spent,
        "tokens_per_cpu_s": tokens / spent,
    }


def compared(port: int, seed: int, tokens: int) -> tuple[float, int]:
    """Runs the same requests one after another and at once; returns how many times as fast the second is, and how many differ. The
    prompts are in the prefix cache both times."""
    bodies = [body_of(prompt, number, tokens) for number, prompt in enumerate(make_prompts(STREAMS, seed))]
    asyncio.run(together(port, bodies))
    took, found = [], []
    for run in (one_by_one, together):
        began = time.perf_counter()
        found.append([read.token_ids for read in asyncio.run(run(port, bodies))])
        took.append(time.perf_counter() - began)
    differ = sum(one != other for one, other in zip(*found, strict=True))
    return took[0] / took[1], differ


async def load(port: int, process: int, minutes: float) -> tuple[list[tuple[float, float, int]], int]:
    """Keeps the streams running; returns (seconds, megabytes, requests so far) of the server's memory, and how many requests
    ended."""
    began, done, memory = time.perf_counter(), 0, list[tuple[float, float, int]]()

    async def one_after_another(number: int) -> None:
        nonlocal done
        while time.perf_counter() - began < 60 * minutes:
            done += 1
            (prompt,) = make_prompts(1, 1_000_000 + done)
            read = await stream(port, body_of(prompt, done, 16 + 16 * (done % 8)))
            assert len(read.token_ids) == read.events[-1].get("usage", {}).get("completion_tokens", len(read.token_ids))

    async def watch() -> None:
        while (at := time.perf_counter() - began) < 60 * minutes:
            memory.append((at, resident_mb(process), done))
            await asyncio.sleep(SAMPLED_EVERY_S)

    await asyncio.gather(watch(), *map(one_after_another, range(STREAMS)))
    return memory, done


def soak(port: int, process: int, minutes: float) -> bool:
    """Runs the load; returns whether memory stays."""
    memory, done = asyncio.run(load(port, process, minutes))
    late = [(at, held) for at, held, requests in memory if at >= WARM_S and requests >= WARM_REQUESTS]
    if len(late) < 2:
        sys.exit(f"{done} requests in {minutes:g} minutes are too few; give it more of the machine, or more minutes")
    slope = 60 * statistics.linear_regression(*zip(*late, strict=True)).slope
    print(
        f"{done} requests, none failed; {late[0][1]:.1f} MB after {late[0][0]:.0f} s, {late[-1][1]:.1f} MB at the end, "
        f"{max(held for _, held, _ in memory):.1f} MB at most, "
        f"{slope:+.3f} MB a minute (at most {MOST_MB_A_MINUTE:g})"
    )
    return slope <= MOST_MB_A_MINUTE


@contextmanager
def served_model(directory: Path, numerics: str) -> Iterator[tuple[int, int]]:
    """Serves the model on one thread inside the context; yields the server's port and process."""
    with serving(directory, "--numerics", numerics, "--max-sequences", str(STREAMS), "--threads", "1") as client:
        assert client.http.base_url.port is not None
        yield client.http.base_url.port, client.process.pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    threads = {"OMP_NUM_THREADS": "1"}
    os.environ |= threads
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        make(directory)
        with served_model(directory, "fast") as (port, process):
            if arguments.minutes:
                sys.exit(not soak(port, process, arguments.minutes))
            with Side(serve_alone, directory, environment=threads) as alone:
                measured(port, process, alone, 0)  # warms up both
                rounds = [measured(port, process, alone, 1 + number) for number in range(arguments.rounds)]
            found |= {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            found["times_one_by_one"], found["streams_that_differ"] = compared(port, 500, NEW_TOKENS)
        with served_model(directory, "exact") as (port, _):
            _, found["streams_that_differ_exact"] = compared(port, 500, EXACT_TOKENS)
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))
    holds = {
        "outputs of 64 streams are those one by one": not found["streams_that_differ"],
        "and in exact numerics": not found["streams_that_differ_exact"],
        f"at least {LEAST_SPEED:g} times as fast": found["times_one_by_one"] >= LEAST_SPEED,
        f"99 of 100 gaps at most {MOST_GAP_P99:g} steps": found["gap_p99_steps"] <= MOST_GAP_P99,
        f"largest gap at most {MOST_GAP:g} steps": found["gap_largest_steps"] <= MOST_GAP,
        f"at least {LEAST_SHARE:g} of the engine's tokens per CPU second": found["share_of_cpu"] >= LEAST_SHARE,
    }
    for name, good in holds.items():
        print("ok  " if good else "FAIL", name)
    if arguments.out:
        about = {"machine": machine(), "versions": versions("torch", "starlette", "uvicorn", "httptools")}
        write_results(arguments.out, {**about, "streams": STREAMS, "rounds": arguments.rounds, **found})
    sys.exit(not all(holds.values()))


if __name__ == "__main__":
    main()
