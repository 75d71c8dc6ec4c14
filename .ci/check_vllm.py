"""Serves a run's model with vLLM, from what `nmoe export` writes, and holds its log-probabilities against the learner's own:

    python .ci/check_vllm.py RUN VLLM_PYTHON

vLLM samples completions to token ids and says their log-probabilities; the same tokens are scored by the checkpoint that RUN holds.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from check import hold

from nmoe.learner.batch import Batch
from nmoe.learner.passes import batch_logprobs
from nmoe.model.policy import load_policy
from nmoe.runs.conversions import export_checkpoint
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

QUESTIONS = ["Reverse: 4153", "Sort: 90817", "Add: 47 + 85", "Reverse: 771209", "Add: 90 + 19", "Sort: 5210"]
SAMPLES, NEW_TOKENS = 4, 40
START_S, REQUEST_S = 300.0, 120.0

run, python = Path(sys.argv[1]), sys.argv[2]
directory = resolve_checkpoint(run)
tokenizer, (model, _) = Tokenizer.load(directory), load_policy(directory)
prompts = [Harmony(tokenizer).render_prompt([Message("user", question)]) for question in QUESTIONS]


def ask(port: int, path: str, body: dict[str, object] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        return bytes(answer.read())


def serve(exported: Path, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(exported),
        "--served-model-name",
        "nmoe",
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        "--enforce-eager",
    ]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(exported),
    }
    process = subprocess.Popen(
        command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env={"PATH": "/usr/bin:/bin", **environment}
    )
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            ask(port, "/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
        else:
            return process, port
    process.kill()
    sys.exit(f"vLLM did not start within {START_S:.0f} s:\n{log.read_text()[-4000:]}")


def own_logprobs(prompt: list[int], sampled: list[int]) -> torch.Tensor:
    ids_T = torch.tensor([*prompt, *sampled])
    scored_T = torch.arange(1, len(ids_T)) >= len(prompt)
    batch = Batch((len(ids_T) - 1,), ids_T[:-1], ids_T[1:], scored_T, scored_T.float())
    return batch_logprobs(model, batch, 4096, 1.0)


with tempfile.TemporaryDirectory() as scratch:
    exported = Path(scratch) / "exported"
    export_checkpoint(run, exported)
    log = Path(scratch) / "vllm.log"
    process, port = serve(exported, log)
    try:
        differences: list[float] = []
        for prompt in prompts:
            body = {
                "model": "nmoe",
                "prompt": prompt,
                "n": SAMPLES,
                "max_tokens": NEW_TOKENS,
                "temperature": 1.0,
                "seed": 0,
            }
            body |= {"logprobs": 0, "return_token_ids": True, "add_special_tokens": False}
            for choice in json.loads(ask(port, "/v1/completions", body))["choices"]:
                theirs = torch.tensor(choice["logprobs"]["token_logprobs"])
                differences += (own_logprobs(prompt, choice["token_ids"]) - theirs).abs().tolist()
    except urllib.error.HTTPError as error:
        sys.exit(f"vLLM answered {error.code}: {error.read().decode()[:2000]}\n{log.read_text()[-4000:]}")
    finally:
        process.terminate()
        process.wait(30)
hold(
    {
        "tokens compared": (len(differences), 100, float("inf")),
        "mean difference of a log-probability": (sum(differences) / len(differences), 0.0, 1e-5),
        "largest": (max(differences), 0.0, 1e-4),
    },
    [],
)
