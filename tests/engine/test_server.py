"""The engine server, a process of its own, held against an engine in this process: samples, weights, and what it refuses."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_models import tiny_family
from torch import Tensor

from nmoe.engine.api import Delta, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.weights import digest_of
from nmoe.engine.remote.wire import (
    GENERATE,
    WEIGHTS_ID,
    WireError,
    decode_deltas,
    decode_samples,
    encode_request,
    error_of,
)
from nmoe.engine.server.__main__ import main
from nmoe.model.checkpoint import export_model, fingerprint, load_model, save_model
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.peft_format import WEIGHTS, adapter_tensors, save_adapter
from nmoe.model.transformer import Transformer
from nmoe.types import Sample, Sampling

MakeRequest = Callable[..., Request]
KEY = "a-key-for-tests"
COMMAND = (sys.executable, "-m", "nmoe.engine.server")
CONTEXT = 4096
# Tokens of requests that are aborted: more than are sampled while this process waits for a busy core.
LONG = 4000


@dataclass
class Server:
    """A server that runs, and what a client does with it."""

    http: httpx2.Client
    pid: int

    def post(self, path: str, body: Any = None, **query: str) -> httpx2.Response:
        return self.http.post(path, json={} if body is None else body, params=query)

    def ask(self, path: str, body: Any = None, **query: str) -> dict[str, Any]:
        reply = self.post(path, body, **query)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {error_of(reply.content)}"
        return reply.json()

    def refusal(self, path: str, body: Any = None, status: int = 400) -> str:
        reply = self.post(path, body)
        assert reply.status_code == status, reply.text
        return error_of(reply.content)

    def generate(self, request: Request) -> list[Sample]:
        reply = self.post(GENERATE, encode_request(request))
        return decode_samples(reply.status_code, reply.content, request)

    def info(self) -> dict[str, Any]:
        return self.http.get("/nmoe/info").json()

    def wait_for(self, generated: int) -> None:
        """Waits until so many more tokens are sampled."""
        goal = self.info()["stats"]["generated_tokens"] + generated
        while self.info()["stats"]["generated_tokens"] < goal:
            time.sleep(0.002)

    def publish(self, directory: Path, version: int, tensors: dict[str, Tensor] | None = None) -> None:
        self.ask("/start_weight_update")
        self.ask("/update_weights", {"update_info": from_disk(directory, tensors)})
        self.ask("/finish_weight_update", {"weight_version": str(version)})


def from_disk(directory: Path, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
    tensors = load_file(directory / "model.safetensors") if tensors is None else tensors
    digests = list(map(digest_of, tensors.values()))
    return {"transport": "disk", "path": str(directory), "names": list(tensors), "digests": digests}


@contextmanager
def served(checkpoint: Path, *arguments: str) -> Iterator[Server]:
    command = [*COMMAND, str(checkpoint), "--numerics", "exact", "--with-parent", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"NMOE_ENGINE_KEY": KEY}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = json.loads(process.stdout.readline())
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{line['port']}"
        with httpx2.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            yield Server(http, line["pid"])
        process.stdin.close()
        assert process.wait(30) == 0, "it ends with its parent's pipe"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape, a mixture of experts."""
    directories = [tmp_path_factory.mktemp("models") / name for name in ("first", "second")]
    for seed, directory in enumerate(directories):
        export_model(tiny_family("qwen3_moe", seed, context_tokens=CONTEXT), directory)
    return directories


@pytest.fixture(scope="module")
def models(checkpoints: list[Path]) -> list[Transformer]:
    loaded = [load_model(directory).requires_grad_(False) for directory in checkpoints]
    for model in loaded:
        model.set_numerics("exact")
    return loaded


@pytest.fixture(scope="module")
def running(checkpoints: list[Path]) -> Iterator[Server]:
    with served(checkpoints[0], "--max-sequences", "8") as server:
        yield server


@pytest.fixture
def server(running: Server, checkpoints: list[Path]) -> Iterator[Server]:
    """The server, which has its first weights as version 0 again after the test."""
    yield running
    if running.info()["weight_version"] != "0" or running.info()["unusable"]:
        running.publish(checkpoints[0], 0)
    running.ask("/abort_requests")
    running.ask("/resume")


def bits(sample: Sample) -> tuple[Any, ...]:
    routes = None if sample.routes is None else (sample.routes.dtype, sample.routes.tolist())
    return sample.token_ids, sample.logprobs, sample.versions, sample.finish_reason, sample.kept_ids, routes


def local(model: Transformer, *requests: Request, version: int = 0) -> list[list[Sample]]:
    engine = NativeEngine(model, 8)

    async def all_of_them() -> list[list[Sample]]:
        await engine.update_weights(model, version)
        return await asyncio.gather(*map(engine.generate, requests))

    return engine.run(all_of_them())


def starts_as(sample: Sample, request: Request, model: Transformer, count: int) -> None:
    """Checks the first tokens of a sample against those of the model in this process."""
    ((whole,),) = local(model, replace(request, sampling=replace(request.sampling, max_new_tokens=count)))
    assert sample.token_ids[:count] == whole.token_ids
    assert sample.logprobs[:count] == whole.logprobs
    assert (sample.routes[: len(whole.routes)] == whole.routes).all()


@contextmanager
def background(work: Callable[[], Any]) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


def test_samples_are_to_the_bit_as_in_one_process(
    server: Server, models: list[Transformer], request_of: MakeRequest
) -> None:
    requests = [
        request_of("plain", 9, 3, 20, stop_ids=(4, 30)),
        request_of("top-p", 5, 2, 12, top_p=0.7),
        request_of("top-k", 5, 2, 12, top_k=3, temperature=0.7),
        request_of("greedy", 17, 1, 8, temperature=0.0),
        request_of("seed of 64 bits", 4, 1, 8),
    ]
    requests[4] = Request(requests[4].prompt_ids, 1, Sampling(8, seed=2**64 - 5), requests[4].request_id)
    expected = local(models[0], *requests)
    assert any(sample.kept_ids for samples in expected for sample in samples)
    with ThreadPoolExecutor(len(requests)) as pool:
        answered = list(pool.map(server.generate, requests))
    assert [[bits(one) for one in samples] for samples in answered] == [
        [bits(one) for one in samples] for samples in expected
    ]


def test_scores_are_to_the_bit_as_in_one_process(server: Server, models: list[Transformer]) -> None:
    ids = [5, 9, 2, 44, 17, 3]
    engine = NativeEngine(models[0], 1)
    assert server.ask("/score", {"token_ids": ids, "temperature": 0.7})["logprobs"] == engine.run(
        engine.score(ids, 0.7)
    )


def streamed(server: Server, request: Request) -> list[Delta]:
    with server.http.stream("POST", GENERATE, json=encode_request(request, stream=True)) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        return [delta for line in reply.iter_lines() for delta in decode_deltas(line, request)]


def test_a_stream_has_the_tokens_of_the_whole_reply(
    server: Server, models: list[Transformer], request_of: MakeRequest
) -> None:
    request = request_of("streamed", 9, 1, 20)
    ((sample,),) = local(models[0], request)
    deltas = streamed(server, request)
    assert [delta.token_id for delta in deltas] == sample.token_ids
    assert [delta.logprob for delta in deltas] == sample.logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * 19 + ["length"]


def test_a_stream_has_all_samples_of_a_request(
    server: Server, models: list[Transformer], request_of: MakeRequest
) -> None:
    request = request_of("streamed", 9, 3, 20, min_p=0.2, presence_penalty=1.0, logit_bias=((7, 2.0),))
    (samples,) = local(models[0], request)
    deltas = streamed(server, request)
    for index, sample in enumerate(samples):
        mine = [delta for delta in deltas if delta.index == index]
        assert [delta.token_id for delta in mine] == sample.token_ids
        assert [delta.logprob for delta in mine] == sample.logprobs
        assert [delta.finish_reason for delta in mine] == [None] * 19 + ["length"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_ends_its_request(server: Server, request_of: MakeRequest, stream: bool) -> None:
    body = encode_request(request_of("left early", 5, 1, LONG), stream)
    before = server.info()["stats"]["generated_tokens"]
    if stream:
        with server.http.stream("POST", GENERATE, json=body) as reply:
            lines = reply.iter_lines()  # held, as httpx closes the connection with the iterator
            assert next(lines).startswith("data: ")
            assert server.info()["stats"]["running"]
    else:
        with pytest.raises(httpx2.ReadTimeout):
            server.http.post(GENERATE, json=body, timeout=0.05)
    until = time.monotonic() + 10
    while server.info()["stats"]["running"]:
        assert time.monotonic() < until, "it runs on"
        time.sleep(0.01)
    assert server.info()["stats"]["generated_tokens"] - before < LONG


def test_an_aborted_request_gives_what_there_is(
    server: Server, models: list[Transformer], request_of: MakeRequest
) -> None:
    request = request_of("aborted", 5, 1, LONG)
    with background(lambda: server.generate(request)) as answer:
        server.wait_for(20)
        assert server.ask("/abort_requests", {"request_ids": ["generate-tokens-aborted"]})["aborted"] == 1
        (sample,) = answer.result(30)
    assert sample.finish_reason == "abort"
    assert 20 <= len(sample.token_ids) < LONG
    starts_as(sample, request, models[0], len(sample.token_ids))


def test_nothing_is_sampled_under_a_pause(server: Server, models: list[Transformer], request_of: MakeRequest) -> None:
    kept, late = request_of("kept", 5, 1, LONG), request_of("late", 5, 1, 4)
    with background(lambda: server.generate(kept)) as first:
        server.wait_for(10)
        server.ask("/pause", mode="keep")
        assert server.http.get("/is_paused").json() == {"is_paused": True}
        with background(lambda: server.generate(late)) as second:
            stats = server.info()["stats"]
            time.sleep(0.05)
            assert server.info()["stats"]["decode_steps"] == stats["decode_steps"]
            assert not any(answer.done() for answer in (first, second))
            server.ask("/resume")
            (sample,) = second.result(30)
            server.wait_for(10)
        server.ask("/pause", mode="abort")
        (aborted,) = first.result(30)
        server.ask("/resume")
    assert aborted.finish_reason == "abort"
    starts_as(aborted, kept, models[0], len(aborted.token_ids))
    assert bits(sample) == bits(local(models[0], late)[0][0])
    short, before = request_of("short", 5, 1, 100), server.info()["stats"]["generated_tokens"]
    with background(lambda: server.generate(short)) as first:
        while server.info()["stats"]["generated_tokens"] == before:
            time.sleep(0.002)
        server.ask("/pause", mode="wait")
        assert len(first.result(30)[0].token_ids) == 100
    assert "must be keep, abort or wait" in error_of(server.post("/pause", mode="now").content)


def test_weights_that_come_while_a_request_runs(
    server: Server, checkpoints: list[Path], models: list[Transformer], request_of: MakeRequest
) -> None:
    """The tokens before the update are those of the old weights, the tokens after it those that the new ones predict along the
    recorded routes, and a request made later is to the bit as in one process."""
    request = request_of("runs on", 9, 1, LONG)
    first = [server.http.get(path).headers[WEIGHTS_ID] for path in ("/health", "/nmoe/info")]
    with background(lambda: server.generate(request)) as answer:
        server.wait_for(20)
        server.publish(checkpoints[1], 7)
        assert first[0] == first[1] != server.http.get("/health").headers[WEIGHTS_ID]
        server.wait_for(20)
        server.ask("/abort_requests", {"request_ids": ["runs on"]})
        (sample,) = answer.result(30)
    before, after = sample.versions.count(0), sample.versions.count(7)
    assert sample.versions == [0] * before + [7] * after
    assert min(before, after) >= 20
    starts_as(sample, request, models[0], before)
    ids = torch.tensor([*request.prompt_ids, *sample.token_ids])
    trace, attend = RouterTrace(replay=torch.from_numpy(sample.routes)), PackedAttention([len(ids) - 1], ids.device)
    with torch.no_grad():
        logits = models[1].logits(models[1](ids[:-1], torch.arange(len(ids) - 1), attend, trace))
    logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[-after:, 0]
    assert torch.tensor(sample.logprobs[before:]) == pytest.approx(logprobs, abs=1e-5)
    assert server.info()["weight_version"] == server.http.get("/weight_info").json()["weight_version"] == "7"
    later = request_of("later", 9, 2, 30)
    (expected,) = local(models[1], later, version=7)
    assert list(map(bits, server.generate(later))) == list(map(bits, expected))


def test_weights_under_nmoes_own_names(
    server: Server, models: list[Transformer], request_of: MakeRequest, tmp_path: Path
) -> None:
    """Only these have the biases that balance the router."""
    model = tiny_family("qwen3_moe", 1, context_tokens=CONTEXT)
    model.set_numerics("exact")
    for moe in model.moe_layers():
        moe.router.bias.copy_(torch.randn(moe.router.bias.shape, generator=torch.Generator().manual_seed(1)))
    save_model(model, tmp_path)
    server.publish(tmp_path, 1)
    request = request_of("own", 5, 1, 20)
    ((expected,),), ((unbalanced,),) = (local(one, request, version=1) for one in (model, models[1]))
    assert list(map(bits, server.generate(request))) == [bits(expected)] != [bits(unbalanced)]


def flipped(name: str, tensors: dict[str, Tensor]) -> None:
    tensors[name].view(-1).view(torch.uint8)[3] ^= 1


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "sent", "message"),
    [
        (lambda tensors: flipped(NORM, tensors), None, f"update refused: {NORM} has another digest than was sent"),
        (lambda tensors: tensors.pop(NORM), None, f"{NORM} is missing"),
        (lambda tensors: tensors.update(more=torch.ones(1)), None, "more is not among the names"),
        (lambda tensors: tensors.pop(NORM), "as it is", f"update: not a checkpoint .*{NORM} is missing"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "as it is", "more is not part of this architecture"),
        (lambda tensors: tensors.update({NORM: torch.ones(3)}), "as it is", rf"{NORM} has shape \[3\]"),
        (lambda tensors: tensors.clear(), "as it is", "an update is a whole set of weights"),
    ],
)
def test_a_broken_update_is_refused_until_a_whole_one_comes(
    server: Server,
    checkpoints: list[Path],
    models: list[Transformer],
    request_of: MakeRequest,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], Any],
    sent: str | None,
    message: str,
) -> None:
    tensors = load_file(checkpoints[1] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    info = from_disk(tmp_path, tensors if sent else load_file(checkpoints[1] / "model.safetensors"))
    info["path"] = str(tmp_path)
    server.ask("/start_weight_update")
    refused = server.refusal("/update_weights", {"update_info": info})
    assert re.search(message, refused), refused
    request = request_of("after", 5, 1, 4)
    for path, body in (
        ("/finish_weight_update", {"weight_version": "3"}),
        (GENERATE, encode_request(request)),
    ):
        assert "/start_weight_update, /update_weights, /finish_weight_update" in server.refusal(path, body, 409)
    server.publish(checkpoints[1], 3)
    ((expected,),) = local(models[1], request, version=3)
    assert list(map(bits, server.generate(request))) == [bits(expected)]


def test_updates_come_in_order(server: Server, checkpoints: list[Path], request_of: MakeRequest) -> None:
    info = {"update_info": from_disk(checkpoints[1])}
    assert "no update has begun" in server.refusal("/update_weights", info, 409)
    assert "no weights have arrived" in server.refusal("/finish_weight_update", {"weight_version": "1"}, 409)
    server.ask("/start_weight_update")
    assert "no weights have arrived" in server.refusal("/finish_weight_update", {"weight_version": "1"}, 409)
    server.ask("/update_weights", info)
    assert "must be a whole number as text" in server.refusal("/finish_weight_update", {"weight_version": "v1"})
    assert "must be str" in server.refusal("/finish_weight_update", {"weight_version": 1})
    assert server.generate(request_of("before", 5, 1, 2))[0].versions == [0, 0], "the old weights sample until then"
    server.ask("/pause", mode="keep")
    with background(lambda: server.generate(request_of("early", 5, 1, 2))) as answer:
        time.sleep(0.05)
        server.ask("/finish_weight_update", {"weight_version": "1"})
        server.ask("/resume")
        assert answer.result(30)[0].versions == [1, 1], "it has waited for the weights"


def test_weights_that_hold_nan_end_what_runs(
    server: Server, checkpoints: list[Path], models: list[Transformer], request_of: MakeRequest, tmp_path: Path
) -> None:
    """It is seen while they are copied, so that the model may hold a mixture, by which no token may be sampled."""
    tensors = load_file(checkpoints[1] / "model.safetensors")
    tensors[NORM].fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    request = request_of("runs", 5, 1, LONG)
    with background(lambda: server.generate(request)) as answer:
        server.wait_for(10)
        server.ask("/start_weight_update")
        server.ask("/update_weights", {"update_info": from_disk(tmp_path, tensors)})
        assert f"{NORM} holds NaN" in server.refusal("/finish_weight_update", {"weight_version": "3"})
        (sample,) = answer.result(30)
    assert sample.finish_reason == "abort"
    assert set(sample.versions) == {0}
    starts_as(sample, request, models[0], len(sample.token_ids))
    assert "holds NaN" in server.refusal(GENERATE, encode_request(request), 409)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "pigeon"}, "transport = 'pigeon': must be"),
        ({"transport": "adapter"}, "cannot be read"),
        ({"path": "/nowhere"}, "/nowhere/model.safetensors: no such file"),
        ({"digests": []}, "digests; each name has one"),
        ({"names": "all"}, "names = 'all': must be list"),
        ({"names": [NORM, NORM], "digests": ["", ""]}, f"{NORM} is named 2 times"),
        ({"compressed": True}, "update_info has compressed, which this server does not know"),
    ],
)
def test_an_update_that_is_none_is_refused(
    server: Server, checkpoints: list[Path], change: dict[str, Any], message: str
) -> None:
    server.ask("/start_weight_update")
    assert message in server.refusal("/update_weights", {"update_info": from_disk(checkpoints[0]) | change})


@pytest.mark.parametrize(
    "backend", ["mpi", pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="works there"))]
)
def test_a_group_needs_a_backend_of_this_machine(server: Server, backend: str) -> None:
    place = {"host": "127.0.0.1", "port": 9, "rank": 1, "world_size": 2, "backend": backend}
    message = server.refusal("/init_weight_transfer_engine", {"init_info": place})
    assert f"backend = '{backend}': must be 'gloo', or 'nccl' on a GPU" in message


def test_weights_that_are_broadcast(
    server: Server, checkpoints: list[Path], models: list[Transformer], request_of: MakeRequest
) -> None:
    timeout = timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)
    place = {"host": "127.0.0.1", "port": store.port, "rank": 1, "world_size": 2, "timeout_s": 30}
    with background(lambda: server.ask("/init_weight_transfer_engine", {"init_info": place})) as joined:
        group = dist.ProcessGroupGloo(dist.PrefixStore("nmoe", store), 0, 2, timeout)
        time.sleep(0.05)
        assert not joined.done(), "it has joined after a first broadcast, by which NCCL makes its communicator"
        group.broadcast(torch.zeros(1), 0).wait()
        joined.result(30)
    tensors = load_file(checkpoints[1] / "model.safetensors")
    info = from_disk(checkpoints[1]) | {
        "transport": "group",
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    del info["path"]
    for broken in (True, False):
        server.ask("/start_weight_update")
        with background(lambda: server.post("/update_weights", {"update_info": info})) as answer:
            for name, tensor in tensors.items():
                group.broadcast(tensor + 1 if broken and name == NORM else tensor, 0).wait()
            reply = answer.result(30)
        assert reply.status_code == (400 if broken else 200)
        assert not broken or f"{NORM} has another digest" in error_of(reply.content)
    server.ask("/finish_weight_update", {"weight_version": "5"})
    request = request_of("after", 5, 1, 9)
    ((expected,),) = local(models[1], request, version=5)
    assert list(map(bits, server.generate(request))) == [bits(expected)]


def test_a_bad_request_is_refused_and_the_server_lives(
    server: Server, models: list[Transformer], request_of: MakeRequest
) -> None:
    request = request_of("a", 5, 1, 4)
    good = encode_request(request)
    for change, message in (
        ({"token_ids": [48]}, "prompt ids must lie in 0..47"),
        ({"token_ids": [-1]}, "prompt ids must lie in 0..47"),
        ({"token_ids": [10**40]}, "prompt ids must lie in 0..47"),
        ({"token_ids": []}, "the prompt has no tokens"),
        ({"sampling_params": good["sampling_params"] | {"max_tokens": CONTEXT}}, "exceeds the model's context"),
        ({"sampling_params": good["sampling_params"] | {"max_tokens": 0}}, "must be at least 1"),
        ({"sampling_params": good["sampling_params"] | {"n": 10**9}}, "must be at most 4096"),
        ({"sampling_params": good["sampling_params"] | {"min_p": 2.0}}, "must lie in [0, 1]"),
        ({"sampling_params": good["sampling_params"] | {"logit_bias": {"48": 1}}}, "the model's are 0..47"),
        ({"token_ids": [48], "stream": True}, "prompt ids must lie in 0..47"),
        ({"prompt": "Hello"}, "the body has prompt"),
    ):
        assert message in server.refusal(GENERATE, good | change)
    for text, message in (
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 10**5, "nested too deeply"),
        (b"[1]", "not a JSON object"),
    ):
        reply = server.http.post(GENERATE, content=text)
        assert reply.status_code == 400
        assert message in error_of(reply.content)
    assert "must be int or float" in server.refusal("/score", {"token_ids": [1, 2], "temperature": "hot"})
    assert "two tokens or more" in server.refusal("/score", {"token_ids": [1]})
    assert server.http.get("/nowhere").status_code == 404
    assert server.http.get(GENERATE).status_code == 405
    with pytest.raises(WireError, match="exceeds the model's context") as raised:
        server.generate(request_of("a", 5, 1, CONTEXT))
    assert raised.value.status == 400
    assert list(map(bits, server.generate(request))) == [bits(local(models[0], request)[0][0])]


def test_a_second_request_of_an_id_that_runs_is_refused(server: Server, request_of: MakeRequest) -> None:
    request = request_of("twice", 5, 1, LONG)
    with background(lambda: server.generate(request)) as answer:
        server.wait_for(5)
        assert "another request of this id is running" in server.refusal(GENERATE, encode_request(request))
        server.ask("/abort_requests", {"request_ids": ["twice"]})
        assert len(answer.result(30)[0].token_ids) >= 5


def test_the_key_opens_all_routes_but_health(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": KEY}):
        with httpx2.Client(base_url=server.http.base_url, headers=headers, trust_env=False) as stranger:
            assert stranger.get("/health").status_code == 200
            for reply in (stranger.get("/nmoe/info"), stranger.post("/pause"), stranger.post("/update_weights")):
                assert reply.status_code == 401
                assert "NMOE_ENGINE_KEY" in error_of(reply.content)
    assert not server.info()["paused"]


def test_info_says_which_model_this_is(server: Server, checkpoints: list[Path]) -> None:
    info = server.info()
    assert info["fingerprint"] == fingerprint(checkpoints[0])
    assert (info["vocab_size"], info["context_tokens"], info["numerics"]) == (48, CONTEXT, "exact")
    assert {"routes", "kept_ids", "score"} <= set(info["features"])
    assert "adapter" not in info["features"]
    assert info["weight_version"] == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "set NMOE_ENGINE_KEY to a secret key"),
        (["--port", "70000"], "cannot listen there"),
        (["--max-sequences", "0"], "--max-sequences counts from 1"),
        ([], "no such file"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("NMOE_ENGINE_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", ["server", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def adapted(checkpoints: list[Path], tmp_path: Path) -> tuple[Lora, Path]:
    model = load_model(checkpoints[0]).requires_grad_(False)
    model.set_numerics("exact")
    settings = LoraSettings(rank=4, alpha=8)
    lora = Lora(model, settings, choose(model, ()), str(checkpoints[0]), fingerprint(checkpoints[0])).initialize(0)
    directory = tmp_path / "adapter"
    directory.mkdir()
    save_adapter(lora, directory)
    return lora, directory


def test_an_adapter_comes_alone_and_the_server_ends_when_its_parent_is_killed(
    adapted: tuple[Lora, Path], checkpoints: list[Path], request_of: MakeRequest, tmp_path: Path
) -> None:
    lora, directory = adapted
    # A parent between this process and the server, which is killed and can pass on nothing.
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); time.sleep(600)"
    command = [sys.executable, "-S", "-c", code, *COMMAND, str(directory), "--numerics", "exact", "--with-parent"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    line = json.loads(parent.stdout.readline())
    process = os.pidfd_open(line["pid"])
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{line['port']}", timeout=60, trust_env=False) as http:
            server = Server(http, line["pid"])
            assert "adapter" in server.info()["features"]
            request = request_of("adapted", 5, 1, 20)
            assert list(map(bits, server.generate(request))) == [bits(local(lora.model, request)[0][0])]
            with torch.no_grad():
                for parameter in lora.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
            newer = tmp_path / "newer"
            newer.mkdir()
            save_adapter(lora, newer)
            tensors = adapter_tensors(lora)
            info = from_disk(newer, tensors) | {"transport": "adapter"}
            server.ask("/start_weight_update")
            assert "started on an adapter" in server.refusal(
                "/update_weights", {"update_info": from_disk(checkpoints[0])}
            )
            server.ask("/start_weight_update")
            server.ask("/update_weights", {"update_info": info})
            (newer / WEIGHTS).unlink()  # what was checked is used, and not read a second time
            server.ask("/finish_weight_update", {"weight_version": "2"})
            ((expected,),) = local(lora.model, request, version=2)
            assert list(map(bits, server.generate(request))) == [bits(expected)]
            assert expected.token_ids
        parent.kill()
        parent.wait()
        until = time.monotonic() + 30
        while _lives(line["pid"]):
            assert time.monotonic() < until, "the server outlives its parent"
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
