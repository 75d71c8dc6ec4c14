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

from nmoe.config.commands.rl import RLConfig
from nmoe.errors import UserError
from nmoe.grading import gym
from nmoe.preflight.needs import hub, packages, services
from nmoe.preflight.preflight import preflight
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
        with pytest.raises(UserError, match=r'pip install "nmoe\[environments\]"'):
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
    assert hub(config).text == "someone/model, someone/sums@[:100], from the cache alone"
    own = config.model_copy(update={"model": config.model.model_copy(update={"tokenizer": None})})
    with pytest.raises(UserError, match=r"^someone/model \(without tokenizer.json; "):
        hub(own)
    (snapshot / "tokenizer.json").touch()
    assert hub(own).status == "ok"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert hub(config).text.endswith("without a token, which private and gated ones need")
    (tmp_path / "someone").mkdir()
    assert hub(config).text == "nothing is read from it", "what begins with a directory here is a path"


def test_a_sandbox_that_cannot_be_had_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    model = {"shape": {**SHAPE, "context_tokens": 512}}
    config = rl(tmp_path, environment={"format": "auto", "tools": {"use": ["python"]}}, model=model)
    (failed,) = [check for check in preflight(config) if check.status == "fail"]
    assert failed.name == "sandbox"
    assert "bwrap" in failed.text
