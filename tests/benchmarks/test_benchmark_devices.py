"""`--device` of the benchmarks: what runs on a CPU runs on an accelerator (a test's), and a device that is not there is refused."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import DEVICE, fake_device

from nmoe.model.config import ModelConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import head
import prefill
import rollouts
import saving
import scaling
from on_device import random_model, work_clock

TINY = ModelConfig(
    vocab_size=710,
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate_size=16,
    context_tokens=512,
)


def main(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, "--device", "cuda", *arguments])
    module.main()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"COUNTS": (1, 2), "LENGTHS": (8, 12, 16), "DECODED": (1, 2), "TRAINED_LENGTH": 8, "PROMPT": 4, "NEW": 4}
    for name, value in {"model_config": lambda: TINY, **sizes}.items():
        monkeypatch.setattr(scaling, name, value)
    for name, value in {
        "PROBLEMS": 2,
        "GROUP": 2,
        "TRAJECTORIES": 2,
        "SHORTEST": 2,
        "LONGEST": 3,
        "SLEEP_S": 0,
    }.items():
        monkeypatch.setattr(rollouts, name, value)
    monkeypatch.setattr(saving, "shape", lambda name: TINY)
    monkeypatch.setattr(prefill, "random_model", lambda config, device, dtype: random_model(TINY, device, dtype))


def test_the_head_is_timed_on_the_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--vocabulary", "64", "--width", "8", "--rows", "4", "--rounds", "1", "--threads", "1")
    with fake_device() as kind:
        main(head, monkeypatch, *sizes)
        assert kind.calls["synchronize"] >= 2 * 3 * 4
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["way"] for line in lines] == list(head.WAYS)
    assert all(line["nmoe, s"] > 0 for line in lines)


def test_a_prompt_is_timed_on_the_device(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_device():
        main(prefill, monkeypatch, *("--tokens", "32", "--piece", "16", "--dtypes", "bf16", "--rounds", "1"))
    case = json.loads(capsys.readouterr().out)
    for side in ("at once", "in pieces"):
        parts = case[side]
        assert parts["attention"] > 0
        assert parts["all"] == pytest.approx(parts["attention"] + parts["head"] + parts["rest"], abs=1e-5)
    assert case["plain"]["all"] > 0


def test_training_and_decoding_scale_on_the_device(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_device():
        main(scaling, monkeypatch, "--repeats", "1")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["device"] == str(DEVICE)
    assert min(result["train_count"]["seconds"] + result["decode"]["seconds"]) > 0
    # In bf16, and still the engine's own numbers.
    assert 0 < max(result["mismatch"]["largest"]) < 0.1


def test_rollouts_sample_on_the_device(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollouts, "random_model", lambda config, device: random_model(TINY, device))
    with fake_device() as kind:
        main(rollouts, monkeypatch, "--repeats", "1")
        assert kind.calls["cache_bytes"] == 3
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["concurrent"]["none"]["tokens"] in range(2 * 3 * 2, 2 * 3 * 3 + 1)


def test_a_model_on_the_device_is_saved(small: None) -> None:
    with fake_device():
        found = saving.side("speedrun", False, 1, DEVICE)
    assert 0 < found["stands_s"] < found["step_and_save_s"]
    assert found["bytes"] > 0


@pytest.mark.parametrize("name", ["cuda:9", "gpu"])
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for module in (head, prefill, rollouts, saving, scaling):
        monkeypatch.setattr(sys, "argv", [module.__name__, "--device", name])
        with fake_device(), pytest.raises(SystemExit) as caught:
            module.main()
        assert caught.value.code == 2
        said = {"cuda:9": "there is no such device here, only cuda:0", "gpu": "auto, cpu, cuda or, of several, cuda:1"}
        assert said[name] in capsys.readouterr().err.splitlines()[-1]


def test_on_a_cpu_work_is_counted_in_cpu_seconds() -> None:
    # Between two readings of the process's clock: how much it runs on meanwhile is a matter of its other threads.
    before = time.process_time()
    assert before <= work_clock(torch.device("cpu")) <= time.process_time()
