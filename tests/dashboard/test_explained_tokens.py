"""`POST /data/explain`: tokens of a run with exact numerics, a process that hangs, and a client that goes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from untrained_run import untrained_run

from nmoe.dashboard import server
from nmoe.dashboard.server import application
from nmoe.dashboard.state import State
from nmoe.runs.ledger import read_lines


def test_a_token_is_derived_again_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = untrained_run(tmp_path)
    records = read_lines(run / "samples/step_000002.jsonl")
    line, token = next((line, one["mask"].index(1)) for line, one in enumerate(records))
    # A module in the server's directory is not imported.
    (tmp_path / "typer.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    client = TestClient(application(State([run], None)))
    asked: dict[str, str | int] = {"run": "run", "step": 2, "line": line, "token": token}
    reply = client.post("/data/explain", params=asked)
    assert reply.status_code == 200, reply.text
    said = {text[:20].strip(): text[20:].split() for text in reply.json()["lines"]}
    sampled = records[line]["logprobs"][token]
    assert said["log-probability"] == [f"{sampled:.9g}", "as", "recorded"]
    assert said["reward"][-2:] == ["as", "recorded"]
    assert client.get("/data/explain", params=asked).status_code == 404
    for key, value, status in (("token", 9999, 404), ("token", "x", 400), ("run", "none", 404), ("line", -1, 404)):
        assert client.post("/data/explain", params={**asked, key: value}).status_code == status


@pytest.fixture
def hanging(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which a process writes its number that is started instead of nmoe and does not end."""
    python, file = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ > {file}.new; mv {file}.new {file}; exec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return file


def has_ended(file: Path) -> bool:
    number = int(file.read_text())
    for _ in range(100):
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_hangs_is_ended_and_blocks_nobody(
    made: Path, hanging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "EXPLAIN_S", 0.5)
    client = TestClient(application(State([made], None)))
    asked: dict[str, str | int] = {"run": "healthy", "step": 2, "line": 0, "token": 0}
    for _ in range(2):
        reply = client.post("/data/explain", params=asked)
        assert "it took more than 0.5 s, and was ended" in reply.json()["error"]
        assert has_ended(hanging)


def test_a_process_ends_with_the_client_that_asked(made: Path, hanging: Path) -> None:
    asyncio.run(leaving(application(State([made], None)), hanging))
    assert has_ended(hanging)


async def leaving(app: Starlette, file: Path) -> None:
    """Asks as a client that goes once the process runs."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while not file.exists():
            await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    scope = {
        "type": "http", "method": "POST", "path": "/data/explain", "headers": [],
        "query_string": b"run=healthy&step=2&line=0&token=0",
    }  # fmt: skip
    async with asyncio.timeout(30):
        await app(scope, receive, send)
