"""Starts engine servers as processes that end with the run."""

from __future__ import annotations

import http.client
import json
import os
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
from nmoe.engine.remote.launcher import Command, Launcher, Process
from nmoe.errors import InfrastructureError, UserError, cut
from nmoe.model.policy import config_of
from nmoe.types import ExpertWeightsForm

KEY = "NMOE_ENGINE_KEY"
"""The environment variable with the key that a server asks for."""
# Seconds that a server has until it answers: vLLM's start takes 90 CPU seconds, on a busy machine for a long time.
START_S = 1800.0


# SGLang takes its key from the command line alone, which every user of the machine can read.
_SGLANG = f"""import os, runpy, sys
sys.argv += ["--api-key", os.environ["{KEY}"]]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)"""


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
    """A server that this run starts. Its output goes to a log file."""

    restarts = True

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], launcher: Launcher, gpus: float = 0.0
    ) -> None:
        """`command` has `{port}` and `{host}` where these belong."""
        self.name, self._command, self._launcher, self._gpus = name, Command(command, environment), launcher, gpus
        self.process: Process | None = None
        self._address = ""  # where it has answered, and is started again
        self._closed, self._lock = False, threading.Lock()  # a heal starts it on another thread

    @property
    def url(self) -> str:
        assert self.process is not None, "it has been started"
        return f"http://{self.process.address}"

    def start(self) -> str:
        """Starts the server, after ending an earlier one, and returns its URL once it answers. Raises InfrastructureError with the
        end of its log if it does not."""
        with self._lock:
            self._refuse_after_the_end()
            self.begin()
            until = time.monotonic() + START_S
            while not self.answers(5.0):
                if (failed := self.failed()) is not None:
                    raise failed
                if time.monotonic() > until:
                    self.end()
                    raise self.because(f"did not answer within {START_S:.0f} s")
                if self._closed:
                    self.end()
                self._refuse_after_the_end()
                time.sleep(0.1)
            return self.url

    def begin(self) -> None:
        """Starts the server, after ending an earlier one, and does not wait for it."""
        self.end()
        self.process = self._launcher.start(self.name, self._command, self._gpus, self._address)

    def answers(self, seconds: float) -> bool:
        """Whether the server says within so many seconds that it is well."""
        if self.process is None or not _answers(self.url, self._command.env.get(KEY, ""), seconds):
            return False
        self._address = self.process.address
        return True

    def failed(self) -> InfrastructureError | None:
        """Returns why a server that has been started does not run any more; None while it does."""
        if self.process is None or (code := self.process.code()) is None:
            return None
        return self.because(f"ended with exit code {code}{'' if self._address else ' before it answered'}")

    def _refuse_after_the_end(self) -> None:
        if self._closed:
            raise InfrastructureError(f"engine {self.name} is not started: the run has ended")

    def stop(self) -> None:
        """Ends the server and all processes that it started, for good."""
        self._closed = True
        with self._lock:
            self.end()

    def end(self) -> None:
        if self.process is not None:
            self.process.end()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def because(self, how: str) -> InfrastructureError:
        """Returns the error that the server did something, with the end of its log."""
        assert self.process is not None, "it has been started"
        log = self.process.log
        with log.open("rb") as file:
            file.seek(self.process.began)
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        # vLLM's own processes report the cause, and its last lines that one of them failed.
        shown = [line for line in lines if "Error: " in line][:2] or lines[-3:]
        return InfrastructureError(f"engine {self.name} {how}; {log} says: {cut(' / '.join(shown), 400)}")


def addresses(
    section: RolloutEngineSection,
    checkpoint: Path,
    numerics: str,
    dtype: str,
    on_cpu: bool,
    key: str,
    launcher: Launcher,
    first_gpu: int | None = 0,
    expert_weights: ExpertWeightsForm = "dequantized",
) -> list[ServerProcess]:
    """Returns as many servers as [engine] names, which load the checkpoint; nmoe's hold its experts as `expert_weights` says. They
    get the GPUs of this machine from `first_gpu` on; None leaves the choice to the launcher."""
    environment = {
        KEY: key,
        "VLLM_API_KEY": key,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    } | ({"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")} if on_cpu else {})
    if section.kind == "server":
        command = [
            *(sys.executable, "-m", "nmoe.engine.server", str(checkpoint), "--host", "{host}", "--port", "{port}"),
            *("--numerics", numerics, "--expert-weights", expert_weights),
            *("--max-sequences", str(section.max_sequences), "--cache-mb", str(section.cache_mb)),
            *("--precision", dtype, "--device", "cpu" if on_cpu else "cuda"),
        ]
    elif section.kind == "sglang":
        command = [
            *(
                _with_engine(section.python, ("sglang",), "pip install sglang"),
                "-c",
                _SGLANG,
                "--model-path",
                str(checkpoint),
            ),
            *("--host", "{host}", "--port", "{port}", "--dtype", dtype, "--skip-tokenizer-init"),
            *("--max-running-requests", str(section.max_sequences), "--tp-size", str(section.tensor_parallel)),
            *("--mem-fraction-static", str(section.memory_share)),
            *(["--enable-return-routed-experts"] if config_of(checkpoint).moe_layers else []),
        ]
    else:
        command = [
            *(
                _with_engine(section.python, ("vllm", "nmoe_vllm"), "pip install vllm and plugins/vllm"),
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(checkpoint),
            ),
            *("--host", "{host}", "--port", "{port}", "--dtype", dtype, "--skip-tokenizer-init"),
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
            environment | ({} if on_cpu or first_gpu is None else _gpus(number, section.tensor_parallel, first_gpu)),
            launcher,
            0.0 if on_cpu else float(section.tensor_parallel),
        )
        for number in range(section.servers)
    ]


def _gpus(number: int, each: int, first: int) -> dict[str, str]:
    """Returns the environment by which a server sees its GPUs: the next ones of this machine after the `first` and the servers
    before it. Raises UserError if there are too few."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else list(map(str, range(torch.cuda.device_count())))
    first += number * each
    if first + each > len(visible):
        raise UserError(
            f"engine.servers: server {number} needs {each} of this machine's GPUs after the first {first}, and there are "
            f"{len(visible)}; name fewer servers, or running ones in engine.urls"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + each])}


def _with_engine(python: str | None, modules: Sequence[str], remedy: str) -> str:
    """Returns the interpreter that has an engine's modules."""
    python = python or sys.executable
    finds = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules!r})))"
    if subprocess.run([python, "-c", finds], capture_output=True, check=False).returncode:
        raise UserError(
            f"{python} has no {' and '.join(modules)}: {remedy} there, or name another interpreter in engine.python"
        )
    return python


def _answers(url: str, key: str, seconds: float) -> bool:
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=seconds) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
