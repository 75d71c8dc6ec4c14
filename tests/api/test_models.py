"""`load_model`, `generate` and `evaluate` on a model that is loaded already, and the precision of a model that is sampled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import nmoe
from nmoe.config.modes import mode_of
from nmoe.errors import UserError
from nmoe.eval.evaluate import Asked
from nmoe.eval.sweep import sweep
from nmoe.model.checkpoint import load_model, save_model
from nmoe.model.policy import sampling_precision
from nmoe.model.precision import cast

TINY = {"hidden_size": 16, "layers": 1, "heads": 2, "context_tokens": 256}
WITH, WITHOUT = {"avx2", "avx512_bf16"}, {"avx2", "avx512f"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> nmoe.TrainedRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("models"))
        run = nmoe.train_sft(TINY, [{"prompt": "a", "completion": "b"}] * 4, config={"run.threads": 1})
        return nmoe.TrainedRun(run.path.absolute())


@pytest.fixture(scope="module")
def in_bfloat16(run: nmoe.TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's checkpoint, stored in bfloat16."""
    directory = tmp_path_factory.mktemp("half") / "checkpoint"
    shutil.copytree(run.checkpoint, directory)
    save_model(cast(load_model(run.checkpoint), torch.bfloat16), directory)
    return directory


def processor(features: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.model.device.cpu_features", lambda: features)


def test_weights_are_sampled_as_they_are_stored_where_the_processor_multiplies_them(
    run: nmoe.TrainedRun, in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    for features, stored, expected in (
        (WITH, in_bfloat16, "bfloat16"),
        (WITHOUT, in_bfloat16, "float32"),
        (WITH, run.checkpoint, "float32"),
    ):
        processor(features, monkeypatch)
        assert sampling_precision(stored, cpu) == expected
        assert nmoe.load_model(stored, "cpu").embedding.weight.dtype == getattr(torch, expected)
        assert sampling_precision(stored, cpu, "float16") == "float16"
    assert nmoe.load_model(run, "cpu", precision="bfloat16").embedding.weight.dtype == torch.bfloat16
    with pytest.raises(UserError, match="precision = 'bf16' is none of 'float32', 'bfloat16', 'float16'"):
        nmoe.load_model(run, precision="bf16")  # type: ignore[arg-type]


def test_a_loaded_model_gives_what_its_path_gives_and_stays_as_it_was(run: nmoe.TrainedRun) -> None:
    settings: dict[str, Any] = {"samples": 2, "max_new_tokens": 6, "seed": 5}
    for precision in ("float32", "bfloat16"):
        model = nmoe.load_model(run, "cpu", precision=precision)  # type: ignore[arg-type]
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        by_path = nmoe.generate(run, ["a", "bb"], device="cpu", precision=precision, **settings)  # type: ignore[arg-type]
        assert nmoe.generate(model, ["a", "bb"], **settings) == by_path
        assert [len(samples) for samples in by_path] == [2, 2]
        evaluated = nmoe.evaluate(run, "sort", problems=2, max_new_tokens=4, device="cpu", precision=precision)  # type: ignore[arg-type]
        assert nmoe.evaluate(model, "sort", problems=2, max_new_tokens=4) == evaluated
        assert all(parameter.requires_grad for parameter in model.parameters()), "the caller may train it on"
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_a_loaded_model_cannot_be(run: nmoe.TrainedRun) -> None:
    with pytest.raises(UserError, match="model is loaded already: pass device, expert_weights and precision to"):
        nmoe.generate(nmoe.load_model(run), "a", precision="float32")
    with pytest.raises(UserError, match=r"does not say where its tokenizer is; pass what nmoe.load_model returned"):
        nmoe.generate(load_model(run.checkpoint), "a")
    with pytest.raises(UserError, match=r"generate: n: no such argument; did you mean samples\?"):
        nmoe.generate(run, "a", n=2)  # type: ignore[call-arg]
    with pytest.raises(UserError, match="samples = 0 is less than 1"):
        nmoe.generate(run, "a", samples=0)


def test_results_of_another_precision_are_kept_apart(
    run: nmoe.TrainedRun, in_bfloat16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(WITHOUT, monkeypatch)
    asked = Asked(mode_of(), 2, 0, max_tokens=2, device="cpu")
    sweep([in_bfloat16], [Path("sort")], asked, tmp_path)
    (first,) = tmp_path.iterdir()
    assert '"precision": "float32"' in first.read_text()
    processor(WITH, monkeypatch)
    sweep([in_bfloat16], [Path("sort")], asked, tmp_path)
    (second,) = {*tmp_path.iterdir()} - {first}
    assert '"precision": "bfloat16"' in second.read_text()
