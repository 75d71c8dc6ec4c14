"""`nmoe chat --url`: the conversation reaches a real server, and each fault is a clear message, after which one can go on."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from forked import Forked, Result

from nmoe.errors import UserError
from nmoe.serve.chat import chat_with_server

Reply = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """A server whose replies to chats are written by a test, one after the other."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.replies: list[Reply] = []
        self.models: Reply = sends(b'{"data": [{"id": "tiny"}]}', "application/json")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.models(self)

            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                outer.keys.append(self.headers["Authorization"])
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.replies.pop(0)(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


def sends(content: bytes, kind: str = "text/event-stream", status: int = 200, cut: int = 0) -> Reply:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(content) + cut))
        handler.end_headers()
        handler.wfile.write(content)

    return send


def stream(*deltas: dict[str, Any], reason: str = "stop", done: bool = True) -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": {}}]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return (": hello\n\n" + text + "data: [DONE]\n\n" * done).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = Thread(target=made.http.serve_forever)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def told(
    server: Server | str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *lines: str,
    **options: Any,
) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    url = server if isinstance(server, str) else server.url
    chat_with_server(url, options.get("model"), 0.5, 20, 3, options.get("system"))
    return capsys.readouterr().out.splitlines()


def test_a_conversation_is_sent_and_its_stream_is_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    calls = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "add", "arguments": ""}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": 1}'}}]}
    server.replies = [
        sends(
            stream(
                {"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "4"}, {"content": "2"}
            )
        ),
        sends(stream({"content": "84"}, reason="length")),
        sends(stream(calls, more, reason="tool_calls")),
        sends(stream({"content": "new"})),
    ]
    out = told(server, monkeypatch, capsys, "6 * 7?", "Doubled?", "1 + 2?", "/new", "Hi", system="Be brief.")
    assert out == [
        *("[reasoning] hm", "42", "84", "(cut off: the answer is incomplete)"),
        *('[add] {"x": 1}', "(the model calls tools, which nothing here runs)", "new"),
    ]
    assert server.keys == ["Bearer secret"] * 4
    assert server.bodies[0] == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}],
        "stream": True,
        "temperature": 0.5,
        "max_tokens": 20,
        "seed": 3,
    }
    assert [one["content"] for one in server.bodies[2]["messages"]] == [
        *("Be brief.", "6 * 7?", "42", "Doubled?", "84", "1 + 2?"),
    ]
    assert [one["content"] for one in server.bodies[3]["messages"]] == ["Be brief.", "Hi"]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            sends(b'{"error": {"message": "no such key"}}', "application/json", 401),
            r"http://\S+/v1 wants a key; put it into OPENAI_API_KEY \(401: no such key\)",
        ),
        (
            sends(b"<html>Hello</html>", "text/html"),
            r"http://\S+/v1 answers with a page of HTML \(200\), not in OpenAI's protocol; check the address",
        ),
        (sends(b'{"error": {"message": "full"}}', "application/json", 429), r"http://\S+/v1 answers 429: full"),
        (sends(b"data: {broken\n\n"), r"http://\S+ sends a broken event: .*"),
        (sends(b"Hello\n"), r"http://\S+ sends no stream of events: Hello"),
        (sends(b"data: [1]\n\n"), r"http://\S+ sends an event that is no object: \[1\]"),
        (sends(b'data: {"error": {"message": "lost"}}\n\n'), r"http://\S+ breaks off: lost"),
        (sends(b""), r"http://\S+ broke off before the end of the answer"),
        (sends(b"", cut=9), r"the connection to http://\S+ broke off: .*"),
    ],
)
def test_a_fault_is_one_message_and_its_question_is_forgotten(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reply: Reply,
    said: str,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.replies = [reply, sends(stream({"content": "ok"}))]
    first, *rest = told(server, monkeypatch, capsys, "one", "two", model="big")
    assert re.fullmatch(said, first)
    assert rest == ["ok"]
    assert server.keys == [None, None]
    assert [one["content"] for one in server.bodies[1]["messages"]] == ["two"]
    assert server.bodies[1]["model"] == "big"


def test_a_stream_that_breaks_off_keeps_the_part_that_came(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [sends(stream({"content": "half"}, done=False)), sends(stream({"content": "ok"}))]
    first, second, third = told(server, monkeypatch, capsys, "one", "two")
    assert (first, third) == ("half", "ok")
    assert second.endswith("broke off before the end of the answer")
    assert [one["content"] for one in server.bodies[1]["messages"]] == ["one", "half", "two"]


def test_fields_of_other_types_are_skipped(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: list[dict[str, Any]] = [
        {"content": 3},
        {"tool_calls": 1},
        {"tool_calls": [2, {"function": None}]},
        {"content": "ok"},
    ]
    server.replies = [
        sends(stream(*odd) + b"\n"),
        sends(b'data: {"choices": 1}\n\ndata: {"choices": [null]}\n\ndata: [DONE]\n'),
    ]
    assert told(server, monkeypatch, capsys, "one", "two") == ["ok", ""]


def test_a_server_that_is_none_is_refused_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"no server answers at http://127\.0\.0\.1:9/v1"):
        told("http://127.0.0.1:9", monkeypatch, capsys)
    with pytest.raises(UserError, match="--url ftp://x: not an address of a server"):
        told("ftp://x", monkeypatch, capsys)
    for content, said in ((b"{}", "names no model; name one by --model"), (b"{", "not JSON")):
        server.models = sends(content, "application/json")
        with pytest.raises(UserError, match=said):
            told(server, monkeypatch, capsys)
    server.models = sends(b"<html>", "text/html", 404)
    with pytest.raises(UserError, match=r"a page of HTML \(404\)"):
        told(server.url.removeprefix("http://"), monkeypatch, capsys)


# documented: nmoe chat --url http://127.0.0.1:8000
def test_the_command_talks_to_a_server(server: Server) -> None:
    server.replies = [sends(stream({"content": "4"}, {"content": "2"}))]
    done = Forked(Path.cwd(), "chat", "--url", server.url, stdin="6 * 7?\n").ended()
    assert done == Result(0, "42\n", "")
    gone = Forked(Path.cwd(), "chat", "--url=http://127.0.0.1:9").ended()
    assert gone.code == 2
    assert len(gone.err.strip().splitlines()) == 1
    assert "no server answers at http://127.0.0.1:9/v1" in gone.err
