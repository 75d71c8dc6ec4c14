"""Starts a vLLM server for a check, asks it, and scores what it sampled with the learner's model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nmoe.learner.batch import Batch
from nmoe.learner.passes import batch_logprobs
from nmoe.model.transformer import Transformer

START_S, REQUEST_S, END_S = 900.0, 120.0, 30.0
KEY = "of this check"
# Two servers, or a server beside a learner, would both bind themselves to core 0.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_API_KEY": KEY,
}


class Server:
    """A running server. `cpu_s` is the CPU time of its processes until it answered."""

    def __init__(self, port: int, cpu_s: float) -> None:
        self.port, self.cpu_s = port, cpu_s

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST", key: str = KEY) -> Any:
        """Returns the reply's JSON (None: an empty one). Raises urllib.error.HTTPError, OSError and TimeoutError."""
        text = self.text(path, body, method, key)
        return json.loads(text) if text else None

    def text(self, path: str, body: dict[str, Any] | None, method: str, key: str = KEY) -> bytes:
        data = None if method == "GET" else json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            text: bytes = answer.read()
        return text

    def answered(
        self, path: str, body: dict[str, Any] | None = None, method: str = "POST", key: str = KEY
    ) -> tuple[int, Any]:
        """Returns the status and the reply's JSON, of an error too."""
        try:
            return 200, self.ask(path, body, method, key)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@contextmanager
def serving(python: str, model: Path, log: Path, *options: str) -> Iterator[Server]:
    """Serves a checkpoint inside the context. Ends the program, with the log's end, if the server does not start, refuses a request
    or cannot be reached."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "nmoe"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", *options]
    environment = ENVIRONMENT | {"PATH": "/usr/bin:/bin", "HOME": str(log.parent)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _wait(process, Server(port, 0.0), log)
        yield Server(port, _cpu_s(process.pid))
    except urllib.error.HTTPError as error:
        sys.exit(f"vLLM answered {error.code}: {error.read().decode()[:2000]}\n{log.read_text()[-4000:]}")
    except OSError as error:
        sys.exit(f"vLLM: {error!r}\n{log.read_text()[-4000:]}")
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], server: Server, log: Path) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            server.ask("/health", method="GET")
        except OSError:
            time.sleep(1)
        else:
            return
    sys.exit(f"vLLM did not start within {START_S:.0f} s:\n{log.read_text()[-4000:]}")


def _cpu_s(session: int) -> float:
    shown = subprocess.run(["ps", "-o", "cputimes=", "-g", str(session)], capture_output=True, text=True, check=True)
    return float(sum(map(int, shown.stdout.split())))


def own_logprobs(model: Transformer, prompt: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
    """Returns the learner's log-probability of each sampled token."""
    ids_T = torch.tensor([*prompt, *sampled])
    scored_T = torch.arange(1, len(ids_T)) >= len(prompt)
    batch = Batch((len(ids_T) - 1,), ids_T[:-1], ids_T[1:], scored_T, scored_T.float())
    return batch_logprobs(model, batch, 4096, 1.0)
