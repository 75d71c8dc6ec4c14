"""What a run needs around it: each check on a case without fault and on one that really has it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from test_preflight import SHAPE, TABLES, pretraining, rl

from nmoe.config.commands import COMMANDS, RLConfig
from nmoe.config.loader import load_run_with
from nmoe.data import hub as hub_module
from nmoe.data.hub import download
from nmoe.data.rows import read_rows
from nmoe.errors import UserError
from nmoe.grading import gym
from nmoe.preflight import needs
from nmoe.preflight.needs import hub, packages, services
from nmoe.preflight.preflight import preflight
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.sandbox import sandboxes

POOL = {"type": "reasoning_gym", "dataset": "chain_sum"}


def with_environment(tmp_path: Path, **keys: Any) -> RLConfig:
    return rl(tmp_path, environment=keys)


def test_packages_of_task_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_environment(tmp_path, task_pool=POOL)
    monkeypatch.setattr(gym, "version", lambda name: gym.VERSION)
    assert packages(config).text == "reasoning-gym"

    def absent(name: str) -> str:
        raise gym.PackageNotFoundError(name)

    monkeypatch.setattr(gym, "version", absent)
    assert packages(rl(tmp_path)).text == "none beyond what nmoe always has"
    source = {"name": "gym", "weight": 1.0, **POOL}
    mixture = with_environment(tmp_path, task_pool={"type": "mixture", "sources": [source]})
    evaluated = rl(tmp_path, eval=[{"environment": TABLES["environment"] | {"task_pool": POOL}}])
    for lacking in (config, mixture, evaluated):
        with pytest.raises(UserError, match=r"pip install reasoning-gym==0\.1\.25"):
            packages(lacking)
    (failed,) = [check for check in preflight(config) if check.name == "packages"]
    assert failed.status == "fail"


@pytest.fixture
def port() -> Iterator[int]:
    """A port that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def rated_by(tmp_path: Path, port: int, **keys: Any) -> RLConfig:
    url = f"http://127.0.0.1:{port}/rate"
    return with_environment(tmp_path, rewards=[{"name": "style", "type": "http", "url": url, **keys}])


def test_a_service_takes_a_connection_and_has_its_token(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert services(rl(tmp_path)).text == "none are asked"
    assert services(pretraining(100, 10)).status == "ok"
    assert services(rated_by(tmp_path, port)).text == f"127.0.0.1:{port}"
    monkeypatch.delenv("STYLE_TOKEN", raising=False)
    asked = rated_by(tmp_path, port, token_env="STYLE_TOKEN")
    assert services(asked).text == "[[rewards]] style: STYLE_TOKEN is not set; put its token there"
    assert services(asked).status == "fail"
    monkeypatch.setenv("STYLE_TOKEN", "x")
    assert services(asked).status == "ok"


def test_a_service_whose_port_is_closed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    check = services(rated_by(tmp_path, free))
    assert check.status == "fail"
    assert check.text.startswith(f"[[rewards]] style: nothing answers at 127.0.0.1:{free} (")
    assert check.text.endswith("start the service, or correct url")


def test_what_the_hub_has_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub(rl(tmp_path)).text == "nothing is read from it"
    data = {"type": "hf", "task_type": "gsm8k", "dataset": "someone/sums@[:100]"}
    config = rl(tmp_path, environment={"task_pool": data}, model={"path": "someone/model", "shape": None})
    with pytest.raises(UserError, match=r"^someone/model, someone/sums: not in the cache, and HF_HUB_OFFLINE is set"):
        hub(config)
    model = tmp_path / "cache" / "models--someone--model"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    lacking = r"^someone/model \(without model.safetensors; `hf download someone/model` fetches it\), someone/sums"
    with pytest.raises(UserError, match=lacking):
        hub(config)
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (snapshot / "model-1.safetensors").touch()
    with pytest.raises(UserError, match=r"^someone/model \(without model-2.safetensors; "):
        hub(config)
    (snapshot / "model-2.safetensors").touch()
    with pytest.raises(UserError, match=r"^someone/sums: not in the cache"):
        hub(config)
    (tmp_path / "cache" / "datasets--someone--sums").mkdir()
    assert hub(config).text == "someone/model, someone/sums@[:100], from the cache alone: HF_HUB_OFFLINE is set"
    own = config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": None})})
    with pytest.raises(UserError, match=r"^someone/model \(without tokenizer.json; "):
        hub(own)
    (snapshot / "tokenizer.json").touch()
    assert hub(own).status == "ok"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(needs, "why_not_asked", lambda: None)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert hub(config).text.endswith("without a token, which private and gated ones need")
    (tmp_path / "someone").mkdir()
    assert hub(config).text == "nothing is read from it", "what begins with a directory here is a path"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A hub that no connection reaches; returns the hosts that were tried."""
    tried: list[str] = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        tried.append(address[0])
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_module, "_unreachable", {})
    monkeypatch.setattr(socket, "create_connection", refuse)
    return tried


def test_an_endpoint_of_the_hub_with_a_port_that_is_none(
    monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:99999")
    assert hub_module.unreachable() == "HF_ENDPOINT = http://localhost:99999 names no valid port; a port is 1 to 65535"
    assert no_network == []


def test_all_that_is_wrong_is_said_at_once_without_a_network(tmp_path: Path, no_network: list[str]) -> None:
    hub_data = {"type": "hf", "task_type": "gsm8k", "dataset": "someone/sums"}
    file = {"type": "jsonl", "path": "gone.jsonl", "task_type": "math"}
    config = rl(
        tmp_path,
        [{"environment": {**TABLES["environment"], "task_pool": file}}],
        run={"steps": 0, "episodes": 2.0},
        environment={"task_pool": hub_data},
        model={"path": "someone/model", "shape": None, "tokenizer": None},
    )
    checks = {(check.name, check.status): check.text for check in preflight(config)}
    assert {name for name, status in checks if status == "fail"} == {"data", "hub"}
    assert checks["data", "fail"].startswith("gone.jsonl: cannot be read: No such file")
    why = "huggingface.co cannot be reached (Name or service not known)"
    assert checks["hub", "fail"].startswith(f"someone/model, someone/sums: not in the cache, and {why}; fetch")
    assert {name for name, status in checks if status == "warn"} == {
        "learning rate",
        "model",
        "memory",
        "disk",
        "rehearsal",
    }
    assert " free of " in checks["memory", "warn"]
    assert checks["device", "ok"] == "cpu"
    assert no_network == ["huggingface.co"], "it is tried once, not at every check"


@pytest.mark.parametrize(
    ("command", "tables", "named"),
    [
        ("verifier", {"verifier": {"prm_source": "gone.jsonl"}}, ["gone.jsonl: "]),
        ("selfplay", {"selfplay": {"problem_source": "csv:gone.csv"}}, ["gone.csv"]),
        ("pretrain", {"data": {"documents": "gone.jsonl"}}, ["gone.jsonl: cannot be read"]),
        (
            "pretrain",
            {"data": {"sources": [{"path": "one.jsonl", "weight": 1.0}, {"path": "two.jsonl", "weight": 1.0}]}},
            ["one.jsonl: cannot be read", "two.jsonl: cannot be read"],
        ),
        (
            "sft",
            {"records": {"path": "gone.jsonl", "held_out_path": "too.jsonl"}, "eval": [{"every_steps": 5}]},
            ["gone.jsonl: cannot be read", "too.jsonl: cannot be read"],
        ),
    ],
)
def test_each_data_set_that_cannot_be_read_has_a_line(
    command: str, tables: dict[str, Any], named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = TABLES["model"] if command == "pretrain" else {"path": "base"}
    config = load_run_with(None, COMMANDS[command], {"run": {"steps": 9}, "model": model, **tables}, "test", "run")
    failed = [check.text for check in preflight(config) if (check.name, check.status) == ("data", "fail")]
    assert len(failed) == len(named)
    assert all(part in text for part, text in zip(named, failed, strict=True))


def test_a_missing_device_hides_no_missing_model(tmp_path: Path) -> None:
    config = rl(tmp_path, model={"path": "gone", "shape": None, "device": "cuda:7"})
    failed = {check.name: check.text for check in preflight(config) if check.status == "fail"}
    assert failed.keys() == {"device", "model"}
    assert failed["model"].startswith("gone: neither a checkpoint")


def test_without_a_network_the_cache_is_read_and_nothing_is_tried_again(
    no_network: list[str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"hub give it \(huggingface.co cannot be reached \(Name or service not known\)\)"
        ):
            resolve_checkpoint(Path("someone/model"))
        with pytest.raises(UserError, match=r"did not give it: huggingface.co cannot be reached \(Name or"):
            next(read_rows("someone/sums"))
        with pytest.raises(UserError, match=r"did not give it: huggingface.co cannot be reached \(Name or"):
            download("someone/sums")
    assert no_network == ["huggingface.co"]
    assert not constants.HF_HUB_OFFLINE
    assert "thrown while requesting" not in capfd.readouterr().err + caplog.text


def test_a_proxy_is_left_to_the_hubs_client(no_network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub_module.why_not_asked() is None
    assert no_network == []


def test_a_sandbox_that_cannot_be_had_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    model = {"shape": {**SHAPE, "context_tokens": 512}}
    config = rl(tmp_path, environment={"format": "auto", "tools": {"use": ["python"]}}, model=model)
    (failed,) = [check for check in preflight(config) if check.status == "fail"]
    assert failed.name == "sandbox"
    assert "bwrap" in failed.text
