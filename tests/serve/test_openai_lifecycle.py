"""The life of a server: clients that leave or do not read, deadlines, the end by a signal, addresses that cannot be had."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from forked import Forked
from served_client import CONTEXT, Client, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# More tokens than are sampled in the seconds of a test.
LONG = {"max_tokens": 4000, "ignore_eos": True}
BRIEF = {"prompt": "a", "stream": True, "max_tokens": 1500, "ignore_eos": True}
TOKENS = "/inference/v1/generate"
TOKEN_BODY = {"request_id": "r", "token_ids": [70] * 5, "sampling_params": {"max_tokens": 4000, "seed": 1}}
STREAMED = {"prompt": "a", "stream": True, **LONG}


def until(holds: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_client_that_leaves_ends_its_work(client: Client, path: str, stream: bool) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": ["a", "b"]}
    body = prompt | LONG | {"stream": stream}
    if stream:
        with client.http.stream("POST", path, json=body) as reply:
            # Held, as httpx closes the connection with the iterator.
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            until(lambda: client.metric("nmoe_running") > 0, 5, "it does not run")
    else:
        with pytest.raises(httpx2.ReadTimeout):
            client.http.post(path, json=body, timeout=0.3)
    until(lambda: client.metric("nmoe_running") == 0, 0.5, "it runs on for more than half a second")
    assert client.metric("nmoe_requests_open") == 0


def test_a_client_that_leaves_ends_the_scoring_of_its_prompts(client: Client) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        client.http.post(
            TEXT, json={"prompt": [[70] * 4000] * 40, "echo": True, "logprobs": 1, "max_tokens": 0}, timeout=0.2
        )
    until(lambda: client.metric("nmoe_requests_open") == 0, 0.5, "it runs on for more than half a second")


def test_others_are_answered_while_a_long_prompt_is_read(client: Client) -> None:
    replies: list[int] = []
    body = {"prompt": "many words of a prompt " * 120_000}

    def ask() -> None:
        replies.append(httpx2.post(client.http.base_url.join(TEXT), json=body, timeout=120).status_code)

    for _ in range(5):  # a busy machine may not ask about it before it was read
        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: replies or client.metric("nmoe_requests_open") == 1, 60, "it is not read")
        assert client.http.get("/health").status_code == 200
        answered = not replies
        asking.join()
        assert set(replies) == {400}, "it is longer than the context"
        if answered:
            return
        replies.clear()
    pytest.fail("it was read before others were answered, five times")


@pytest.fixture(scope="module")
def hasty(checkpoint: Path) -> Iterator[Client]:
    with serving(checkpoint, "--deadline", "0.4", "--drain", "1", "--stalled", "1") as running:
        yield running


def test_a_request_ends_at_its_deadline_with_the_tokens_that_it_has(hasty: Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, **LONG}
    (one, _) = hasty.ask(CHAT, **body)["choices"]
    assert (one["finish_reason"], one["stop_reason"]) == ("length", "deadline")
    assert one["message"]["content"]
    last = hasty.stream(TEXT, prompt="a", **LONG)[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "deadline")


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_of_tokens_ends_at_its_deadline(hasty: Client, stream: bool) -> None:
    began = time.monotonic()
    reply = hasty.http.post(TOKENS, json=TOKEN_BODY | {"stream": stream})
    assert reply.status_code == 200
    assert time.monotonic() - began < 5
    assert '"abort"' in reply.text
    assert hasty.metric(f'nmoe_requests_total{{route="{TOKENS}",status="200"}}') >= 1


@pytest.mark.parametrize("path", [TEXT, TOKENS])
def test_a_client_that_does_not_read_is_left(checkpoint: Path, path: str) -> None:
    with serving(checkpoint, "--stalled", "1") as server:
        body = {"prompt": "a", "stream": True, "logprobs": 20, **LONG}
        if path == TOKENS:
            settings = {"max_tokens": 4000, "seed": 1, "n": 32}
            body = {"request_id": "r", "token_ids": [70], "stream": True, "sampling_params": settings}
        content = json.dumps(body).encode()
        url = server.http.base_url
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((url.host, url.port))
            raw.sendall(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                % (path.encode(), len(content), content)
            )
            assert raw.recv(15) == b"HTTP/1.1 200 OK"
            until(lambda: server.metric("nmoe_requests_open") == 1, 2, "it runs")
            until(lambda: server.metric("nmoe_requests_open") == 0, 10, "it is kept for a client that does not read")
            assert server.metric("nmoe_generated_tokens_total") < (4000 if path == TEXT else 32 * 4000)


def test_a_signal_lets_requests_finish_and_takes_no_more(checkpoint: Path) -> None:
    with serving(checkpoint, "--drain", "20") as server:
        with server.http.stream(
            "POST", TEXT, json={"prompt": "a", "stream": True, "max_tokens": 1500, "ignore_eos": True}
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            url = server.http.base_url

            def refused() -> bool:
                try:
                    socket.create_connection((url.host, url.port), timeout=1).close()
                except ConnectionRefusedError:
                    return True
                return False

            until(refused, 2, "new connections are accepted")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0


def test_requests_end_with_the_tokens_so_far_where_the_drain_ends(checkpoint: Path) -> None:
    with serving(checkpoint, "--drain", "0.5") as server:
        answers: list[dict[str, Any]] = []
        ask = threading.Thread(target=lambda: answers.append(server.ask(TEXT, prompt="a", **LONG)))
        ask.start()
        until(lambda: server.metric("nmoe_running") == 1, 5, "it runs")
        server.process.send_signal(signal.SIGTERM)
        ask.join(10)
        (choice,) = answers[0]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "shutdown")
        assert server.process.wait(10) == 0


def test_requests_of_tokens_end_where_the_drain_ends(checkpoint: Path) -> None:
    with serving(checkpoint, "--drain", "0.5") as server:
        answers: list[dict[str, Any]] = []
        ask = threading.Thread(target=lambda: answers.append(server.ask(TOKENS, **TOKEN_BODY)))
        ask.start()
        until(lambda: server.metric("nmoe_requests_open") == 1, 5, "it runs")
        server.process.send_signal(signal.SIGTERM)
        ask.join(10)
        assert answers[0]["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(10) == 0


def test_a_second_signal_interrupts(checkpoint: Path) -> None:
    with (
        serving(checkpoint, "--drain", "600", ends=False) as server,
        server.http.stream("POST", TEXT, json=STREAMED) as reply,
    ):
        lines = reply.iter_lines()  # held, as httpx closes the connection with the iterator
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) in (130, -signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "set NMOE_SERVE_KEY to a secret key"),
        (["--port", "TAKEN"], "cannot listen there"),
        (["--max-n", "0"], "Invalid value for '--max-n'"),
        (["--deadline", "nan"], "Invalid value for '--deadline'"),
        (["--format", "harmony"], "no control token"),
        (["--adapter", "x"], "must be NAME=DIRECTORY"),
    ],
)
def test_a_server_that_cannot_start_says_why(checkpoint: Path, arguments: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["serve", checkpoint, "--port", "0", *(port if one == "TAKEN" else one for one in arguments)]
        ended = Forked(Path.cwd(), *command, environment={"NMOE_SERVE_KEY": "", "COLUMNS": "200"}).ended()
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_the_context_is_filled_to_its_last_token(client: Client) -> None:
    reply = client.ask(TEXT, prompt=[70] * (CONTEXT - 3), max_tokens=3, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == CONTEXT
    assert client.ask(TEXT, prompt=[70] * CONTEXT, max_tokens=0, echo=True)["usage"]["total_tokens"] == CONTEXT
