"""Publishes weights to a running vLLM server by each transport of plugins/vllm, and holds its log-probabilities against the
learner's:

    python .ci/check_publishing.py VLLM_PYTHON
    python .ci/check_publishing.py VLLM_PYTHON record    # also writes tests/engine/vllm_wire/exchanges.json

Small models with drawn weights are served, dense and with experts, with a tied and with an own output head. Their weights are
changed and published three times by each transport; what the server then samples is scored by the changed model. Sets of weights
that are torn or not whole have to be refused, and a whole one has to heal the server. Another key has to be refused on every route.
Requests and replies have to look as those on record.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from check import hold
from safetensors.torch import load_file
from torch import Tensor
from vllm_server import Server, own_logprobs, serving

from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.model.lora import Lora, LoraSettings, choose, sites
from nmoe.model.peft_format import save_adapter
from nmoe.model.transformer import Transformer

sys.path.append(str(Path(__file__).parents[1] / "plugins/vllm"))

from nmoe_vllm.checks import digest

RECORD = Path(__file__).parents[1] / "tests/engine/vllm_wire/exchanges.json"
OPTIONS = [
    "--skip-tokenizer-init",
    "--no-enable-chunked-prefill",
    "--enable-scale-out",
    "--weight-transfer-config",
    '{"backend": "nmoe"}',
    "--middleware",
    "nmoe_vllm.guard.Guard",
]
# Routes that sample, change weights, execute code and say what there is.
GUARDED = ("/inference/v1/generate", "/pause", "/update_weights", "/collective_rpc", "/server_info", "/v1/models")
# Neither the vocabulary nor the experts' width fills the blocks that vLLM pads them to.
SHAPE = {
    "vocab_size": 500,
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "context_tokens": 256,
}
DENSE, MOE = {"intermediate_size": 128}, {"experts": 4, "experts_per_token": 2, "expert_width": 40}
# Name, blocks, whether the output head is tied to the embedding, and workers, each of which holds a part of every tensor.
MODELS = [
    ("dense, tied", DENSE, True, 1),
    ("dense, untied", DENSE, False, 1),
    ("experts, tied", MOE, True, 1),
    ("experts, untied, two workers", MOE, False, 2),
]
PROMPTS = [[5, 17, 33, 91, 200, 7, 44, 301], [9, 9, 1, 400], [77] * 20]
SAMPLES, NEW_TOKENS, PUBLISHES = 4, 24, 3
# Small enough that a model's tensors lie in several files.
SHARD_BYTES = 100_000
TIMEOUT = timedelta(seconds=60)
# Largest mean and largest difference of a log-probability in fp32, and the mean change that a publish has to make at least.
MEAN, LARGEST, CHANGE = 1e-5, 1e-4, 1e-2


def change(parameters: list[Tensor], seed: int) -> None:
    """Moves every weight by a fifth of its tensor's root mean square."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in parameters:
            scale = max(float(tensor.square().mean().sqrt()), 0.1)
            tensor.add_(0.2 * scale * torch.randn(tensor.shape, generator=generator))


def drawn(config: ModelConfig) -> Transformer:
    model = Transformer(config).initialize(0).requires_grad_(False)
    change(list(model.parameters()), 0)
    return model


def request(prompt: list[int], seed: int, **sampling: Any) -> dict[str, Any]:
    params = {
        "n": SAMPLES,
        "max_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "logprobs": 0,
        "ignore_eos": True,
    }
    return {
        "request_id": f"check-{time.time_ns()}",
        "token_ids": prompt,
        "sampling_params": params | {"detokenize": False} | sampling,
    }


def sample(server: Server) -> list[tuple[list[int], list[int], Tensor]]:
    """Returns prompt, sampled tokens and the server's log-probabilities."""
    found = []
    for seed, prompt in enumerate(PROMPTS):
        for choice in server.ask("/inference/v1/generate", request(prompt, 100 * seed))["choices"]:
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            found.append((prompt, choice["token_ids"], torch.tensor(logprobs)))
    return found


def differences(model: Transformer, found: list[tuple[list[int], list[int], Tensor]]) -> Tensor:
    return torch.cat([(own_logprobs(model, prompt, ids) - theirs).abs() for prompt, ids, theirs in found])


class Publisher:
    """Publishes to one server, as a learner does."""

    def __init__(self, server: Server, place: Path, workers: int) -> None:
        self.server, self.place, self.version = server, place, 0
        world = 1 + workers
        self.store = dist.TCPStore("127.0.0.1", 0, world, True, TIMEOUT, wait_for_workers=False)
        where = {"host": "127.0.0.1", "port": self.store.port, "rank": 1, "world_size": world}
        asked = threading.Thread(target=server.ask, args=("/init_weight_transfer_engine", {"init_info": where}))
        asked.start()
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("nmoe", self.store), 0, world, TIMEOUT)
        self.group.broadcast(torch.zeros(1), 0).wait()  # as the learner does
        asked.join()

    def publish(self, transport: str, tensors: dict[str, Tensor], **changed: Any) -> list[tuple[int, Any]]:
        """Publishes the next version. `changed` replaces entries of the message. Returns status and reply of each request after
        the pause."""
        names = changed.get("names", list(tensors))
        info = {"transport": transport, "names": names, "digests": [digest(tensors[name]) for name in names]}
        if transport == "group":
            info["dtypes"] = [str(tensors[name].dtype).removeprefix("torch.") for name in names]
            info["shapes"] = [list(tensors[name].shape) for name in names]
        else:
            info["path"] = str(self.place)
        self.server.ask("/pause?mode=keep&clear_cache=true")
        replies = [self.server.answered("/start_weight_update")]
        update = {"update_info": info | changed}
        asked = threading.Thread(target=lambda: replies.append(self.server.answered("/update_weights", update)))
        asked.start()
        if transport == "group":
            for name in names:
                self.group.broadcast(tensors[name], 0).wait()
        asked.join()
        replies.append(self.server.answered("/finish_weight_update", {"weight_version": str(self.version + 1)}))
        self.server.ask("/resume")
        self.version += replies[-1][0] == 200
        return replies


def whole(publisher: Publisher, model: Transformer) -> dict[str, Tensor]:
    shutil.rmtree(publisher.place, ignore_errors=True)
    export_model(model, publisher.place, SHARD_BYTES)
    files = sorted(publisher.place.glob("*.safetensors"))
    assert len(files) > 1
    return dict(sorted((name, tensor) for file in files for name, tensor in load_file(file).items()))


def adapter(publisher: Publisher, lora: Lora) -> dict[str, Tensor]:
    shutil.rmtree(publisher.place, ignore_errors=True)
    publisher.place.mkdir()
    save_adapter(lora, publisher.place)
    return load_file(publisher.place / "adapter_model.safetensors")


def publishes(
    name: str, publisher: Publisher, transport: str, model: Transformer, moved: list[Tensor], tensors: Callable[[], Any]
) -> dict[str, tuple[float, float, float]]:
    """Publishes changed weights three times; returns the worst figures."""
    before = differences(model, sample(publisher.server))
    means, largest, changes = [float(before.mean())], [float(before.max())], []
    for _ in range(PUBLISHES):
        change(moved, publisher.version + 1)
        changes.append(float(differences(model, sample(publisher.server)).mean()))
        for status, reply in publisher.publish(transport, tensors()):
            assert status == 200, reply
        found = differences(model, sample(publisher.server))
        means.append(float(found.mean()))
        largest.append(float(found.max()))
        assert publisher.server.ask("/weight_info", method="GET") == {"weight_version": str(publisher.version)}
    return {
        f"{name}, {transport}: mean difference after each publish": (max(means), 0.0, MEAN),
        f"{name}, {transport}: largest": (max(largest), 0.0, LARGEST),
        f"{name}, {transport}: least change by a publish": (min(changes), CHANGE, inf),
    }


def refusals(name: str, publisher: Publisher, model: Transformer) -> dict[str, tuple[float, float, float]]:
    """Sends sets of weights that must be refused, after which the server has to go on with those that it has; then a whole set."""
    tensors = whole(publisher, model)
    names = list(tensors)
    torn = {"digests": [*[digest(tensor) for tensor in tensors.values()][:-1], "0" * 64]}
    missing = {"names": names[1:], "digests": [digest(tensors[name]) for name in names[1:]]}
    version, figures = publisher.version, {}
    for transport in ("disk", "group"):
        for changed, message in (
            (torn, f"{names[-1]} has another digest than was sent"),
            (missing, f"{names[0]} is missing"),
            ({"names": [], "digests": []}, f"0 names came: {names[0]} is missing"),
        ):
            started, update, finished = publisher.publish(transport, tensors, **changed)
            assert (started[0], update[0], finished[0]) == (200, 500, 500), (update, finished)
            assert message in update[1]["error"]["message"], update
    found = differences(model, sample(publisher.server))
    figures[f"{name}: largest after refused publishes"] = (float(found.max()), 0.0, LARGEST)
    assert publisher.version == version
    change(list(model.parameters()), 77)
    assert [status for status, _ in publisher.publish("disk", whole(publisher, model))] == [200, 200, 200]
    found = differences(model, sample(publisher.server))
    figures[f"{name}: largest after a whole set"] = (float(found.max()), 0.0, LARGEST)
    return figures


def sampled_tokens(server: Server) -> float:
    """Returns the number of tokens that a server has sampled since its start."""
    lines = server.text("/metrics", None, "GET").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def in_flight(name: str, publisher: Publisher, model: Transformer) -> dict[str, tuple[float, float, float]]:
    """Publishes while sequences are sampled; returns the difference of the tokens that the new weights sampled."""
    body, got = request(PROMPTS[0], 3, n=32, max_tokens=240), []
    change(list(model.parameters()), 78)
    tensors = whole(publisher, model)
    asked = threading.Thread(target=lambda: got.append(publisher.server.ask("/inference/v1/generate", body)))
    before = sampled_tokens(publisher.server)
    asked.start()
    while sampled_tokens(publisher.server) < before + 64:
        time.sleep(0.01)
    publisher.publish("disk", tensors)
    asked.join()
    found = []
    for choice in got[0]["choices"]:
        spans = choice["weight_versions"]
        assert [span["version"] for span in spans] == [str(publisher.version - 1), str(publisher.version)], spans
        theirs = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
        found.append((own_logprobs(model, PROMPTS[0], choice["token_ids"]) - theirs).abs()[spans[1]["start"] :])
    return {f"{name}: largest after a swap in flight": (float(torch.cat(found).max()), 0.0, LARGEST)}


def exchanges(publisher: Publisher) -> list[dict[str, Any]]:
    """Makes the requests that a client makes, the faulty ones too; returns them with their replies."""
    server = publisher.server
    recorded: list[dict[str, Any]] = []

    def exchange(about: str, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> None:
        entry: dict[str, Any] = {"about": about, "method": method, "path": path, "body": body}
        recorded.append(entry)  # in the order of the requests
        entry["status"], entry["reply"] = server.answered(path, body, method)

    def generate(about: str, entries: dict[str, Any] | None = None, **sampling: Any) -> None:
        params = {"n": 1, "max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 11, "logprobs": 0}
        params |= {"stop_token_ids": [], "ignore_eos": True, "detokenize": False} | sampling
        body = {"request_id": "7-3", "token_ids": PROMPTS[0], "sampling_params": params, "cache_salt": "7"}
        exchange(about, "/inference/v1/generate", body | {"return_token_ids": True} | (entries or {}))

    generate("two samples; the second is that of seed + 1", n=2)
    generate("the first seed after it", seed=12)
    first = recorded[0]["reply"]["choices"][0]["token_ids"]
    generate("a stop token, kept at the end", stop_token_ids=[first[2]])
    generate("log-probabilities are those of what is left by top_p and top_k", top_p=0.5, top_k=20)
    generate("greedy", temperature=0.0)
    generate("log-probabilities of the prompt", max_tokens=1, prompt_logprobs=0)
    generate("prompt longer than the context", {"token_ids": [5] * 300})
    generate("more samples than --max-num-seqs", n=1000)
    generate("two samples, of a seed that takes more than 63 bits", n=2, seed=2**64 - 1)
    generate("an empty salt", {"cache_salt": ""})
    generate("another model", {"model": "other"})
    exchange("pause", "/pause?mode=keep&clear_cache=true")
    exchange("is paused", "/is_paused", None, "GET")
    empty = {"transport": "disk", "names": [], "digests": [], "path": "/published"}
    exchange("finish without start", "/finish_weight_update", {"weight_version": "9"})
    exchange("update without start", "/update_weights", {"update_info": empty})
    exchange("start", "/start_weight_update")
    exchange("start again, as after a client that ended", "/start_weight_update")
    exchange("finish without update", "/finish_weight_update", {"weight_version": "9"})
    exchange("start after a refusal", "/start_weight_update")
    exchange("update without a name", "/update_weights", {"update_info": empty})
    exchange("resume", "/resume")
    server.ask("/pause?mode=keep&clear_cache=true")
    asked = threading.Thread(target=lambda: generate("aborted before its first token", {"request_id": "7-4"}))
    asked.start()
    time.sleep(1)
    exchange("abort: the id has a prefix", "/abort_requests", {"request_ids": ["generate-tokens-7-4"]})
    asked.join()
    server.ask("/resume")
    exchange("version of the weights", "/weight_info", None, "GET")
    exchange("workers", "/get_world_size", None, "GET")
    exchange("version of vLLM", "/version", None, "GET")
    return recorded


def form(value: Any) -> Any:
    """Returns what has to stay the same of a reply: names and types. A list has the form of its first entry."""
    if isinstance(value, dict):
        return {name: form(entry) for name, entry in value.items()}
    return [form(entry) for entry in value[:1]] if isinstance(value, list) else type(value).__name__


def check(
    python: str, name: str, config: ModelConfig, workers: int, scratch: Path, record: bool
) -> dict[str, tuple[float, float, float]]:
    model, adapted = drawn(config), drawn(config)
    export_model(model, scratch / name)
    targets = tuple(dict.fromkeys(site.target for site in sites(adapted)))
    lora = Lora(adapted, LoraSettings(4, 8.0, True, targets), choose(adapted, targets), name, "").initialize(0)
    figures = {}
    with serving(python, scratch / name, scratch / f"{name}.log", *OPTIONS, "-tp", str(workers)) as server:
        figures[f"{name}: CPU seconds of the start"] = (server.cpu_s, 0.0, 300.0)
        publisher = Publisher(server, scratch / "published", workers)
        figures |= publishes(name, publisher, "adapter", adapted, lora.parameters(), lambda: adapter(publisher, lora))
        publisher.publish("disk", whole(publisher, model))
        for transport in ("disk", "group"):
            parts = list(model.parameters())
            figures |= publishes(name, publisher, transport, model, parts, lambda: whole(publisher, model))
        figures |= refusals(name, publisher, model)
        figures |= in_flight(name, publisher, model)
        found = exchanges(publisher)
        refused = sum(server.answered(path, key="another")[0] == 401 for path in GUARDED)
        figures[f"{name}: routes that another key does not open"] = (refused, len(GUARDED), len(GUARDED))
    if record:
        RECORD.parent.mkdir(exist_ok=True)
        lines = ",\n".join(json.dumps(entry) for entry in found)
        RECORD.write_text(f'{{"vllm": "{found[-1]["reply"]["version"]}", "exchanges": [\n{lines}\n]}}\n')
    recorded = json.loads(RECORD.read_text())["exchanges"]
    for now, then in zip(found, recorded, strict=True):
        assert (now["status"], form(now)) == (then["status"], form(then)), (now, then)
    return figures


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        figures: dict[str, tuple[float, float, float]] = {}
        for name, blocks, tied, workers in MODELS:
            print(f"{name} ...", flush=True)
            config = ModelConfig(**SHAPE, **blocks, tie_embeddings=tied)
            figures |= check(
                sys.argv[1], name, config, workers, Path(scratch), sys.argv[2:] == ["record"] and not figures
            )
    hold(figures, [])


if __name__ == "__main__":
    main()
