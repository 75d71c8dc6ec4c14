"""What servers that run already sample, as `nmoe eval --engine` measures it: the same figures as in one process."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import FaultyProxy
from typer.testing import CliRunner

from nmoe.cli.command import app
from nmoe.config.tables.rollout import RolloutEngineSection
from nmoe.engine.remote.launcher import LocalLauncher
from nmoe.engine.remote.process import addresses
from nmoe.errors import InfrastructureError, UserError
from nmoe.eval import subject
from nmoe.model.transformer import Transformer
from nmoe.runs.resolve import resolve_checkpoint

KEY = "a key of this test"
TWO = ("--samples=2", "--temperature=0.9")
GENERATE = "/inference/v1/generate"
Evaluated = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def servers(forked_servers: None, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    section, logs = RolloutEngineSection(kind="server", servers=2), tmp_path_factory.mktemp("logs")
    processes = addresses(section, resolve_checkpoint(base), "exact", "float32", True, KEY, LocalLauncher(logs))
    yield [process.start() for process in processes]
    for process in processes:
        process.stop()


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs `nmoe eval` and returns why it refuses."""
    monkeypatch.setenv("NMOE_ENGINE_KEY", KEY)
    monkeypatch.chdir(tmp_path)

    def refused(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
        assert isinstance(result.exception, UserError)
        assert result.exception.exit_code == 2
        assert not list(tmp_path.rglob("*.jsonl")), "nothing is sampled"
        return str(result.exception)

    return refused


@pytest.fixture
def evaluated(base: Path, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    """Evaluates the base, as exactly as the servers compute, and returns what --out gets."""
    monkeypatch.setenv("NMOE_ENGINE_KEY", KEY)
    loaded = subject.load_policy_on

    def exact(*arguments: Any) -> Transformer:
        model = loaded(*arguments)
        model.set_numerics("exact")
        return model

    monkeypatch.setattr(subject, "load_policy_on", exact)

    def evaluated(*options: str) -> dict[str, Any]:
        out, results = tmp_path / "out.json", tmp_path / "results"
        named = ["eval", str(base), str(workshop / "reverse.toml"), "--results", str(results), "--out", str(out)]
        result = CliRunner().invoke(app, [*named, "--problems=20", "--max-tokens=20", *options])
        assert result.exit_code == 0, result.output
        return {"said": result.output, **json.loads(out.read_text())}

    return evaluated


def figures(record: dict[str, Any]) -> tuple[Any, ...]:
    assert record["evaluations"][0]["value"] >= 0.1
    return record["evaluations"], record["answers"]


def sampled(url: str) -> int:
    asked = urllib.request.Request(f"{url}/nmoe/info", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked) as reply:
        return json.load(reply)["stats"]["generated_tokens"]


@contextmanager
def vllm_before(server: str, context: int = 64, closed: bool = False) -> Iterator[str]:
    """Answers in vLLM's form, as before any publication, with the samples of nmoe's server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            card = {"id": "mine", "owned_by": "vllm", "root": "models/mine", "max_model_len": context}
            known = {"/health": {}, "/v1/models": {"data": [card]}}
            self._answer(200 if self.path in known else 404, known.get(self.path, {"detail": "Not Found"}))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if closed:
                message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
                return self._answer(403, {"error": {"message": message, "code": 403}})
            assert "cache_salt" in json.loads(body)
            known = {key: value for key, value in json.loads(body).items() if key != "cache_salt"}
            headers = {"Authorization": self.headers["Authorization"]}
            asked = urllib.request.Request(server + self.path, json.dumps(known).encode(), headers)
            with urllib.request.urlopen(asked) as answered:
                reply = json.load(answered)
            reply["request_id"] = f"generate-tokens-{reply['request_id']}"
            for choice in reply["choices"]:
                choice["weight_versions"] = [{"version": "default", "start": 0, "end": len(choice["token_ids"])}]
            self._answer(200, reply)

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    listening.server_close()


@pytest.mark.parametrize("mode", [(), TWO])
def test_servers_have_the_figures_of_one_process(servers: list[str], evaluated: Evaluated, mode: tuple[str]) -> None:
    here = evaluated(*mode)
    assert not {"served", "servers"} & set(here)
    there = evaluated(*mode, "--engine", servers[0], "--engine", servers[1])
    assert figures(there) == figures(here)
    served = there["served"]
    assert (there["servers"], served["engine"], served["version"], there["precision"]) == (servers, "nmoe", 0, None)
    assert f"{servers[1]}: nmoe, model {served['model'][:12]}, version 0, context 64" in there["said"]
    assert "other weights" not in there["said"]
    before = [sampled(url) for url in servers]
    assert evaluated(*mode, "--engine", servers[0])["answers"] == here["answers"]
    assert [sampled(url) for url in servers] == [before[0] + 8, before[1]], "only the weights are known again"


def test_a_vllm_that_nobody_publishes_to(servers: list[str], evaluated: Evaluated) -> None:
    here = evaluated(*TWO)
    with vllm_before(servers[0]) as url:
        there = evaluated(*TWO, "--engine", url)
    assert figures(there) == figures(here)
    assert (there["served"]["engine"], there["served"]["model"]) == ("vllm", "models/mine")
    assert f"{url}: vllm, model models/mine, unpublished weights, context 64" in there["said"]


def test_other_weights_are_sampled_anew_and_named(
    servers: list[str], evaluated: Evaluated, base: Path, trained: Path
) -> None:
    first = evaluated(*TWO, "--engine", servers[1])
    assert CliRunner().invoke(app, ["publish", str(trained), "--to", servers[1]]).exit_code == 0
    there = evaluated(*TWO, "--engine", servers[1])
    assert there["evaluations"][0]["value"] > first["evaluations"][0]["value"]
    assert there["served"]["weights"] != first["served"]["weights"]
    assert (there["served"]["version"], first["served"]["version"]) == (1, 0)
    # The trained run's directory with the base's server.
    other = CliRunner().invoke(app, ["eval", str(trained), "sort", "--engine", servers[0], "--engine", servers[1]])
    assert re.search("version 1, .* began with nmoe, .*version 0, .* these are not the same", str(other.exception))
    other = CliRunner().invoke(app, ["eval", str(trained), "sort", "--engine", servers[0], "--max-tokens=1"])
    assert f"{resolve_checkpoint(trained)} has other weights than they serve; only its tokenizer" in other.output


def test_servers_that_cannot_be_evaluated_are_named_before_anything_is_sampled(
    servers: list[str], base: Path, workshop: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named, url = (base, workshop / "reverse.toml", "--engine"), servers[0]
    assert "ConnectionRefusedError" in refused(*named, "http://127.0.0.1:9")
    assert "'nonsense' is no URL of a server" in refused(*named, "nonsense")
    assert "names a server twice" in refused(*named, url, "--engine", f"{url}/")
    assert "is of one checkpoint" in refused(base, *named, url)
    assert "leave out --format-check" in refused(*named, url, "--format-check")
    assert "leave out" in refused(base, "core", "--engine", url)
    assert "leave them out" in refused(*named, url, "--precision=bfloat16")
    with vllm_before(url, context=30) as short:
        assert "do not fit the servers' context of 30; set --max-tokens to " in refused(*named, short)
    with vllm_before(url, closed=True) as closed:
        assert "Restart vllm serve with --enable-scale-out" in refused(*named, closed)
    described = json.loads((resolve_checkpoint(base) / "config.json").read_text())
    Path("wider").mkdir()
    Path("wider/config.json").write_text(json.dumps(described | {"vocab_size": described["vocab_size"] + 64}))
    assert "its vocabulary has 294 tokens, and the checkpoint's 358" in refused("wider", *named[1:], url)
    monkeypatch.setenv("NMOE_ENGINE_KEY", "another")
    assert "refused the key; set NMOE_ENGINE_KEY" in refused(*named, url)


def test_a_server_that_is_lost_ends_an_evaluation_that_goes_on_later(
    servers: list[str], evaluated: Evaluated, base: Path, workshop: Path, tmp_path: Path
) -> None:
    """A lost answer is no wrong answer."""
    proxy = FaultyProxy(servers[0], lambda path, number: "drop" if path == GENERATE and number > 9 else None)
    named = [
        "eval",
        str(base),
        str(workshop / "reverse.toml"),
        "--results",
        str(tmp_path / "results"),
        "--max-tokens=20",
    ]
    url = proxy.start()
    result = CliRunner().invoke(app, [*named, "--problems=20", "--engine", url])
    assert isinstance(result.exception, InfrastructureError)
    (file,) = (tmp_path / "results").iterdir()
    kept = [json.loads(line)["failures"] for line in file.read_text().splitlines()[1:]]
    assert kept == [["ok"]] * len(kept)
    proxy.fault = lambda path, number: None
    assert figures(evaluated("--engine", url)) == figures(evaluated())
    assert len(list((tmp_path / "results").iterdir())) == 2
    proxy.stop()
