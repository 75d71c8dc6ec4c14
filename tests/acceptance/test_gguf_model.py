"""A GGUF file in the place of a checkpoint: sampled, trained with an adapter on it, exported, and sized, as the directory with the
same weights is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES
from gguf_files import write_gguf
from safetensors.torch import load_file

import nmoe
from nmoe.errors import UserError
from nmoe.model.checkpoint import fingerprint
from nmoe.plan.estimate import parameters_of
from nmoe.runs.conversions import export_checkpoint
from nmoe.runs.resolve import resolve_checkpoint, resolve_tokenizer
from nmoe.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def both(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file, and the directory that it was made from."""
    here = tmp_path_factory.mktemp("both")
    case = next(case for case in CASES if case.name == "llama-tied")
    config = type(case.config)(**case.config.to_dict() | {"vocab_size": tokenizer.vocab_size, "eos_token_id": None})
    tokenizer.save(here / "hf")
    model = case.model(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(40)  # so that one token is likelier than the others
    return write_gguf(model, here / "hf", here / "model.gguf", rule="qwen2"), here / "hf"


def test_it_samples_as_the_directory_does(both: tuple[Path, Path]) -> None:
    file, directory = both
    by_file, by_directory = (
        nmoe.generate(one, ["Sort: 53914"], max_new_tokens=8, temperature=0.7, seed=1) for one in both
    )
    assert [one.token_ids for one in by_file[0]] == [one.token_ids for one in by_directory[0]]
    assert len(by_file[0][0].token_ids) == 8
    assert resolve_checkpoint(file) == resolve_tokenizer(file) == file
    assert parameters_of(str(file)) == parameters_of(str(directory))


def test_an_adapter_is_trained_on_it_and_finds_it_again(both: tuple[Path, Path], tmp_path: Path) -> None:
    file, _ = both
    config = {"run.steps": 1, "run.directory": str(tmp_path), "sampling.max_new_tokens": 4, "batch.group_size": 4}
    config |= {"batch.prompts_per_step": 1, "lora.rank": 2, "run.threads": 1}

    def alternating(completions: list[Any], **_: Any) -> list[float]:
        return [float(place % 2) for place, _ in enumerate(completions)]

    run = nmoe.train_rl(str(file), env=[{"prompt": "Sort: 1"}], rewards=[alternating], config=config)
    (checkpoint,) = (run.path / "checkpoints").glob("step_*")
    base = json.loads((checkpoint / "base.json").read_text())
    assert Path(base["path"]) == file.resolve()
    assert base["fingerprint"] == fingerprint(file)
    nmoe.generate(run.path, ["Sort: 1"], max_new_tokens=2)
    export_checkpoint(run.path, tmp_path / "merged")
    assert (tmp_path / "merged/tokenizer.json").exists()


def test_its_export_is_the_directory(both: tuple[Path, Path], tmp_path: Path) -> None:
    file, directory = both
    export_checkpoint(file, tmp_path / "exported")
    ours, wanted = (load_file(one / "model.safetensors") for one in (tmp_path / "exported", directory))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], values) for name, values in wanted.items())
    assert Tokenizer.load(tmp_path / "exported").same_ids(Tokenizer.load(directory))


def test_a_directory_with_one_file_stands_for_it(tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"holds several GGUF files; name one of one.gguf, two.gguf"):
        resolve_checkpoint(tmp_path)
    (tmp_path / "two.gguf").unlink()
    assert resolve_checkpoint(tmp_path) == resolve_tokenizer(tmp_path) == tmp_path / "one.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert resolve_checkpoint(tmp_path) == tmp_path


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing.gguf"):
        resolve_checkpoint(tmp_path / "missing.gguf")
