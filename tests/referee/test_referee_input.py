"""Servers that do not answer, or not as a rollout server does: each check says so by its deadline, and the others go on."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from referee_servers import drawn_checkpoint, serving

from nmoe.errors import UserError
from nmoe.referee.command import hold_round, judge_of
from nmoe.referee.report import read_baseline
from nmoe.referee.rounds import Round, hold


class Fake(BaseHTTPRequestHandler):
    """Answers as its `does` says."""

    does: Any = None

    def log_message(self, *of: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.body: dict[str, Any] = {}
        self.answer()

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self.answer()

    def answer(self) -> None:
        type(self).does(self)

    def say(self, status: int, text: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def fake(does: Any) -> Iterator[str]:
    handler = type("Handler", (Fake,), {"does": staticmethod(does)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def answered(one: Fake) -> None:
    """Answers a request for samples rightly, with token 1 throughout, and says what it is."""
    if one.path == "/nmoe/info":
        info = {"engine": "nmoe", "vocab_size": 8, "context_tokens": 64, "precision": "float32", "features": []}
        one.say(200, json.dumps(info).encode())
        return
    if not one.path.endswith("/generate"):
        one.say(404, b"{}")
        return
    count = one.body["sampling_params"]["max_tokens"]
    logprobs = [{"token": "token_id:1", "logprob": -1.0}] * count
    choice = {"index": 0, "token_ids": [1] * count, "finish_reason": "length", "logprobs": {"content": logprobs}}
    reply = {"request_id": one.body["request_id"], "prompt_token_ids": one.body["token_ids"], "choices": [choice]}
    one.say(200, json.dumps(reply).encode())


def round_of(url: str, only: tuple[str, ...] = ("tokens.reply", "tokens.count"), deadline_s: float = 0.6) -> Round:
    return asyncio.run(hold(url, None, seed=1, only=only, deadline_s=deadline_s))


def said(round_: Round) -> list[tuple[str, str]]:
    return [(finding.fault, finding.seen) for outcome in round_.outcomes for finding in outcome.findings]


def test_a_right_server_is_right() -> None:
    with fake(answered) as url:
        assert [outcome.state for outcome in round_of(url, deadline_s=20).outcomes] == ["ok", "ok"]


def test_a_server_that_is_down_fails_every_check() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    found = said(round_of(url))
    assert [fault for fault, _ in found] == ["no_answer", "no_answer"]
    assert f"nothing answers at {url}" in found[0][1]


def test_a_slow_server_is_given_up_at_the_deadline() -> None:
    began = time.monotonic()
    with fake(lambda one: time.sleep(20)) as url:
        outcomes = round_of(url).outcomes
    assert [outcome.state for outcome in outcomes] == ["late", "late"]
    assert outcomes[0].why == "GET /nmoe/info gave no whole reply within 0.6 s"
    assert time.monotonic() - began < 10


def test_a_server_that_hangs_later_is_late_and_the_other_checks_end_soon() -> None:
    asked = list[str]()

    def hangs(one: Fake) -> None:
        asked.append(one.path)
        if len(asked) > 6:
            time.sleep(30)
        answered(one)

    began = time.monotonic()
    with fake(hangs) as url:
        outcomes = round_of(url, ("tokens",)).outcomes
    assert [outcome.state for outcome in outcomes][1:] == ["late"] * 5
    assert not [finding for outcome in outcomes for finding in outcome.findings]
    assert time.monotonic() - began < 20


def test_a_slow_server_has_longer() -> None:
    def slow(one: Fake) -> None:
        if one.path.endswith("/generate"):
            time.sleep(0.5 if one.body["sampling_params"]["max_tokens"] <= 8 else 1.6)
        answered(one)

    with fake(slow) as url:
        assert [outcome.state for outcome in round_of(url, ("tokens.count",), 1.3).outcomes] == ["ok"]


def test_a_check_is_made_again_for_a_server_that_became_slower() -> None:
    times = list[float]()

    def slower(one: Fake) -> None:
        if one.path.endswith("/generate") and "tokens.reply" in one.body["request_id"]:
            times.append(time.monotonic())
            time.sleep(1.5)
        elif one.path.endswith("/generate") and times:
            time.sleep(1.0)
        answered(one)

    with fake(slower) as url:
        (outcome,) = round_of(url, ("tokens.reply",), 1.2).outcomes
    assert outcome.state == "ok"
    assert len(times) == 2


def test_a_page_of_html_is_no_reply() -> None:
    with fake(lambda one: one.say(200, b"<html><body>hello</body></html>", "text/html")) as url:
        found = said(round_of(url))
    assert "status 200 and no JSON object: <html>" in found[0][1]


def test_a_stream_that_never_ends_is_given_up() -> None:
    def forever(one: Fake) -> None:
        if not one.path.endswith("/generate") or "tokens" not in one.body["request_id"]:
            answered(one)
            return
        one.send_response(200)
        one.end_headers()
        while True:
            one.wfile.write(b"data: {}\n\n")
            time.sleep(0.02)

    began = time.monotonic()
    with fake(forever) as url:
        outcomes = round_of(url).outcomes
    assert [outcome.state for outcome in outcomes] == ["late", "late"]
    assert "gave no whole reply within 0.6 s, after" in outcomes[0].why or "not done after 0.6 s" in outcomes[0].why
    assert time.monotonic() - began < 10


def test_a_server_that_needs_a_key_says_so() -> None:
    with fake(lambda one: one.say(401, b'{"error": "no key"}')) as url:
        found = said(round_of(url))
    assert "needs a key, or another one" in found[0][1]


def test_a_redirection_to_another_server_is_not_followed() -> None:
    calls = list[str]()

    def elsewhere(one: Fake) -> None:
        one.send_response(307)
        one.send_header("Location", f"{other}{one.path}")
        one.send_header("Content-Length", "0")
        one.end_headers()

    with fake(lambda one: calls.append(one.path)) as other, fake(elsewhere) as url:
        found = said(round_of(url))
    assert "it has neither the token route (/inference/v1/generate: status 307" in found[0][1]
    assert calls == []


def test_a_server_without_any_route_is_named() -> None:
    with fake(lambda one: one.say(404, b"{}")) as url:
        found = said(round_of(url))
    assert "it has neither the token route" in found[0][1]


def test_a_server_that_dies_under_a_check_ends_the_others_soon() -> None:
    stop: list[ThreadingHTTPServer] = []

    def dies(one: Fake) -> None:
        if one.path.endswith("/generate") and "tokens" in one.body["request_id"]:
            stop[0].server_close()
            one.connection.close()
            return
        answered(one)

    handler = type("Handler", (Fake,), {"does": staticmethod(dies)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    stop.append(server)
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    round_ = round_of(f"http://127.0.0.1:{server.server_address[1]}", ("tokens",), 2.0)
    assert [fault for fault, _ in said(round_)] == ["no_answer"] * 6
    assert sum(outcome.seconds for outcome in round_.outcomes) < 8


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"request_id": "another"}, "late_answer"),
        ({"prompt_token_ids": [7]}, "late_answer"),
        ({"choices": []}, "counts"),
        ({"choices": "none"}, "malformed"),
        ({"choices": [{"index": 0}]}, "malformed"),
    ],
)
def test_replies_that_do_not_answer_the_request_are_named(changed: dict[str, Any], fault: str) -> None:
    def other(one: Fake) -> None:
        if not one.path.endswith("/generate") or "tokens" not in one.body["request_id"]:
            answered(one)
            return
        right: list[bytes] = []
        say, one.say = one.say, lambda status, text, kind="": right.append(text)  # type: ignore[method-assign]
        answered(one)
        one.say = say  # type: ignore[method-assign]
        one.say(200, json.dumps(json.loads(right[0]) | changed).encode())

    with fake(other) as url:
        assert [found for found, _ in said(round_of(url, ("tokens.reply",), 20))] == [fault]


def changed_at_random(value: Any, draw: random.Random) -> Any:
    """Returns a JSON value with one part of it replaced or missing."""
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        copied: Any = value.copy()
        at = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        if draw.random() < 0.15:
            del copied[at]
        else:
            copied[at] = changed_at_random(value[at], draw)
        return copied
    return draw.choice((None, -1, 10**30, 1.5, "x", [], {}, [[1]], {"a": 1}, True))


def test_no_reply_breaks_the_referee() -> None:
    draw, kinds = random.Random(0), set[str]()

    def torn(one: Fake) -> None:
        right: list[bytes] = []
        say, one.say = one.say, lambda status, text, kind="": right.append(text)  # type: ignore[method-assign]
        answered(one)
        one.say = say  # type: ignore[method-assign]
        value = json.loads(right[0])
        if one.path.endswith("/generate"):
            value["choices"][0] |= {"weight_versions": [{"version": "1", "start": 0, "end": 1}], "sampling_mask": [[1]]}
        one.say(200, json.dumps(changed_at_random(value, draw)).encode())

    with fake(torn) as url:
        for _ in range(12):
            kinds |= {fault for fault, _ in said(round_of(url, ("tokens", "logprobs.stream", "seeds"), 20))}
    assert {"malformed", "counts"} <= kinds


_CODE = "open('owned', 'w')"


@pytest.mark.parametrize("place", ["refusal", "id", "version"])
@pytest.mark.parametrize("text", [f'""";{_CODE}#', f"x\n{_CODE}\r{_CODE}\x0c", "\ud800\x1b[2J\u202e\\"])
def test_no_text_of_a_server_is_code_in_a_reproduction(tmp_path: Path, text: str, place: str) -> None:
    span = {"version": text, "start": 0, "end": 99}
    sample = {"index": 0, "token_ids": [1], "finish_reason": None, "weight_versions": [span]}
    replies: dict[str, Any] = {"id": {"request_id": text, "choices": []}, "version": {"choices": [sample]}}

    def hostile(one: Fake) -> None:
        if not one.path.endswith("/generate") or "tokens" not in one.body["request_id"]:
            answered(one)
        elif place == "refusal":
            one.say(400, text.encode("utf-8", "replace"))
        else:
            one.say(200, json.dumps(replies[place]).encode())

    lines, page = list[str](), tmp_path / "page.html"
    with fake(hostile) as url:
        assert hold_round(url, None, lines.append, only=["tokens.reply"], evidence=tmp_path, html=page) == 1
        (script,) = tmp_path.glob("*.py")
        shown = subprocess.run([sys.executable, "-I", str(script), url], capture_output=True, check=True, cwd=tmp_path)
    assert not (tmp_path / "owned").exists()
    assert shown.stdout.startswith(b"POST /inference/v1/generate ")
    for written in ("".join(lines), script.read_text(), shown.stdout.decode(), page.read_text()):
        assert all(" " <= one <= "~" or one == "\n" for one in written)
    statements = {type(one).__name__ for one in ast.parse(script.read_text()).body}
    assert statements == {"Import", "ClassDef", "Assign", "For", "If"}


def test_another_model_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    judge, _ = judge_of(drawn_checkpoint(tmp_path / "dense", "dense_tied"), "float32")
    with (
        fake(answered) as url,
        pytest.raises(UserError, match="another model than --checkpoint: its vocab_size is 8, the checkpoint's 96"),
    ):
        asyncio.run(hold(url, judge, seed=1, only=["tokens.reply"], deadline_s=20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"only": ["nonsense"]}, "--only nonsense: no check has this name"),
        ({"publish": True}, "--publish without --checkpoint"),
        ({"html": Path("/nowhere/page.html")}, "--html names a file to write"),
    ],
)
def test_bad_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hold_round("http://127.0.0.1:1", None, print, **settings)


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="localhost:8000"):
        hold_round("localhost:8000", None, print)


def test_a_baseline_hides_known_faults_and_no_new_ones(tmp_path: Path) -> None:
    file, lines = tmp_path / "known.json", list[str]()

    def wrong(one: Fake, fault: str) -> None:
        if one.path.endswith("/generate") and "tokens" in one.body["request_id"]:
            one.say(200, b'{"choices": 0}' if fault == "malformed" else b'{"choices": []}')
        else:
            answered(one)

    only = ["tokens.reply"]
    with fake(lambda one: wrong(one, "counts")) as url:
        assert hold_round(url, None, lines.append, only=only) == 1
        assert hold_round(url, None, lines.append, only=only, baseline=file) == 0
        assert hold_round(url, None, lines.append, only=only, baseline=file) == 0
    assert read_baseline(file) == {("tokens.reply", "counts")}
    with fake(lambda one: wrong(one, "malformed")) as url:
        assert hold_round(url, None, lines.append, only=only, baseline=file) == 1
    file.write_text("[1]")
    with pytest.raises(UserError, match="not a baseline of the referee"):
        hold_round(url, None, lines.append, only=only, baseline=file)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    checkpoint = drawn_checkpoint(tmp_path_factory.mktemp("referee") / "moe", "moe_tied")
    with serving(checkpoint, key="secret") as url:
        yield url, checkpoint


def test_a_key_in_the_environment_opens_a_server(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setenv("NMOE_ENGINE_KEY", "secret")
    assert hold_round(server[0], server[1], lines.append, only=["logprobs.plain"]) == 0, lines
    monkeypatch.setenv("NMOE_ENGINE_KEY", "other")
    assert hold_round(server[0], server[1], lines.append, only=["logprobs.plain"]) == 1
    assert "needs a key, or another one" in "\n".join(lines)
