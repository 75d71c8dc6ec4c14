"""Starts engine servers as processes of this machine, which end with the run."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.errors import InfrastructureError, UserError, cut
from nmoe.parallel.gang import gang

KEY = "NMOE_ENGINE_KEY"
"""The environment variable with the key that a server asks for."""
_KEEPER = Path(__file__).with_name("keeper.py")
# Seconds that a server has until it answers: vLLM's start takes 90 CPU seconds, on a busy machine for a long time.
_START_S = 1800.0
_END_S = 15.0


class RunningServer:
    """A server that somebody else has started."""

    restarts = False

    def __init__(self, url: str) -> None:
        self.name, self._url = url, url

    def start(self) -> str:
        return self._url

    def stop(self) -> None:
        pass


class ServerProcess:
    """A server that this run starts on this machine. Its output goes to a log file."""

    restarts = True

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`command` has `{port}` where the port belongs."""
        self.name, self._command, self._environment, self._log = name, command, environment, log
        self._process: subprocess.Popen[bytes] | None = None
        self._began, self._closed, self._lock = 0, False, threading.Lock()  # a heal starts it on another thread

    def start(self) -> str:
        """Starts the server, after ending an earlier one, and returns its URL once it answers. Raises InfrastructureError with the
        end of its log if it does not."""
        with self._lock:
            return self._start()

    def _start(self) -> str:
        self._refuse_after_the_end()
        self._end()
        port = _free_port()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._began = os.fstat(log.fileno()).st_size
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    "-E",
                    str(_KEEPER),
                    *(part.replace("{port}", str(port)) for part in self._command),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environment,
            )
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + _START_S
        while not _answers(url, self._environment.get(KEY, "")):
            if self._process.poll() is not None:
                raise self._failed(f"ended with exit code {self._process.returncode} before it answered")
            if time.monotonic() > until:
                self._end()
                raise self._failed(f"did not answer within {_START_S:.0f} s")
            if self._closed:
                self._end()
            self._refuse_after_the_end()
            time.sleep(0.1)
        return url

    def _refuse_after_the_end(self) -> None:
        if self._closed:
            raise InfrastructureError(f"engine {self.name} is not started: the run has ended")

    def stop(self) -> None:
        """Ends the server and all processes that it started, for good."""
        self._closed = True
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _failed(self, how: str) -> InfrastructureError:
        lines = self._log.read_bytes()[self._began :].decode("utf-8", "replace").strip().splitlines()
        # vLLM's own processes report the cause, and its last lines that one of them failed.
        shown = [line for line in lines if "Error: " in line][:2] or lines[-3:]
        return InfrastructureError(f"engine {self.name} {how}; {self._log} says: {cut(' / '.join(shown), 400)}")


def addresses(
    section: RolloutEngineSection, checkpoint: Path, numerics: str, dtype: str, on_cpu: bool, key: str, logs: Path
) -> list[RunningServer | ServerProcess]:
    """Returns the servers that [engine] asks for: the running ones at its `urls`, or as many as `servers` that this run starts and
    that load the checkpoint."""
    if section.urls:
        return [RunningServer(url) for url in section.urls]
    environment = {
        KEY: key,
        "VLLM_API_KEY": key,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    } | ({"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")} if on_cpu else {})
    if section.kind == "server":
        command = [
            *(sys.executable, "-m", "nmoe.engine.server", str(checkpoint), "--port", "{port}", "--numerics", numerics),
            *("--max-sequences", str(section.max_sequences), "--cache-mb", str(section.cache_mb)),
            *("--precision", dtype, "--device", "cpu" if on_cpu else "cuda"),
        ]
    else:
        command = [
            *(_vllm(section.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
            *("--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype, "--skip-tokenizer-init"),
            *(
                "--enable-scale-out",
                "--weight-transfer-config",
                json.dumps({"backend": "nmoe"}),
            ),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            # vLLM's own check of the key leaves out the routes that take weights.
            *("--middleware", "nmoe_vllm.guard.Guard"),
            *("--max-num-seqs", str(section.max_sequences), "--tensor-parallel-size", str(section.tensor_parallel)),
            *("--gpu-memory-utilization", str(section.memory_share)),
            # On a CPU a request with a seed ends the server if its prefill is split.
            *(["--no-enable-chunked-prefill"] if on_cpu else []),
        ]
    command += section.args
    return [
        ServerProcess(
            f"{section.kind}_{number}",
            command,
            environment | ({} if on_cpu else _gpus(number, section.tensor_parallel)),
            logs / f"{section.kind}_{number}.log",
        )
        for number in range(section.servers)
    ]


def _gpus(number: int, each: int) -> dict[str, str]:
    """Returns the environment by which a server sees its GPUs: the next ones after the learner's ranks and the servers before it.
    Raises UserError if there are too few."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else list(map(str, range(torch.cuda.device_count())))
    first = gang().local_size + number * each
    if first + each > len(visible):
        raise UserError(
            f"engine.servers: server {number} needs {each} of this machine's GPUs after the first {first}, and there are "
            f"{len(visible)}; name fewer servers, or running ones in engine.urls"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + each])}


def _vllm(python: str | None) -> str:
    """Returns the interpreter that has vLLM and the plugin."""
    python = python or sys.executable
    found = subprocess.run(
        [
            python,
            "-c",
            "import importlib.util as u, sys; sys.exit(not (u.find_spec('vllm') and u.find_spec('nmoe_vllm')))",
        ],
        capture_output=True,
        check=False,
    )
    if found.returncode:
        raise UserError(
            f"{python} has no vllm with nmoe's plugin: pip install vllm and plugins/vllm there, or name another interpreter in "
            "engine.python"
        )
    return python


def _answers(url: str, key: str) -> bool:
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False


def _free_port() -> int:
    """Returns a port that the kernel chose. Another program can take it before the server does; the server then ends with an error
    and is started again by whoever asked for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
