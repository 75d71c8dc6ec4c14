"""Exporting a checkpoint directory: whole or not at all, with tokenizer, chat template and the end of a turn."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nmoe.errors import StorageError, UserError
from nmoe.model.checkpoint import load_model, save_model
from nmoe.model.transformer import Transformer
from nmoe.runs import export
from nmoe.runs.checkpoint import save_checkpoint
from nmoe.runs.export import export_checkpoint
from nmoe.text.tokenizer import Tokenizer

__all__ = ["tiny_model"]

MakeModel = Callable[..., Transformer]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture
def run(tmp_path: Path, tiny_model: MakeModel) -> Path:
    """A run with a checkpoint of a plain mixture of experts that was trained from nothing."""
    tokenizer = Tokenizer.train(["some text to learn from\n"] * 4, 280)
    model = tiny_model(vocab_size=tokenizer.vocab_size, shared_experts=0)
    for moe in model.moe_layers():
        moe.router.bias.zero_()

    def write(directory: Path) -> None:
        save_model(model, directory)
        tokenizer.save(directory)
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        (directory / "state.json").write_text("{}")

    save_checkpoint(tmp_path / "run" / "checkpoints", 10, write, keep=1)
    return tmp_path / "run"


def test_transformers_loads_model_tokenizer_template_and_end_of_turn(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    export_checkpoint(run, out)
    source = run / "checkpoints" / "step_000010"
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    ours, theirs = load_model(source), AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(theirs.model.norm.weight, ours.norm.weight)
    tokenizer, own = AutoTokenizer.from_pretrained(out), Tokenizer.load(source)
    assert tokenizer("some text").input_ids == own.encode("some text")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|start|>user<|message|>hi<|end|>"
    ends = [own.special_id("<|return|>"), own.special_id("<|call|>")]
    assert GenerationConfig.from_pretrained(out).eos_token_id == ends
    assert theirs.config.eos_token_id == ends
    # And it generates: what nmoe's tokenizer calls padding pads.
    assert theirs.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape[1] <= 7
    assert not list(out.parent.glob(".*"))


def test_the_dtype_asked_for(run: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "half", "bfloat16")
    export_checkpoint(tmp_path / "half", tmp_path / "again")  # as stored
    whole = load_model(run / "checkpoints" / "step_000010").state_dict()
    for name in ("half", "again"):
        raw = json.loads((tmp_path / name / "config.json").read_text())
        assert raw["torch_dtype"] == "bfloat16"
        loaded = load_model(tmp_path / name).state_dict()
        for key, ours in whole.items():
            # Routers stay as they are: rounded ones would choose other experts.
            assert torch.equal(loaded[key], ours if "router" in key else ours.bfloat16().float())


def test_a_directory_that_holds_something_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note.txt").write_text("mine")
    for place in (tmp_path / "out", tmp_path / "out" / "note.txt"):
        with pytest.raises(UserError, match=r"exists and is not an empty directory; name another"):
            export_checkpoint(run, place)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["note.txt"]
    (tmp_path / "empty").mkdir()
    export_checkpoint(run, tmp_path / "empty")
    load_model(tmp_path / "empty")


def test_what_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: Transformer, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "export_model", full)
    with pytest.raises(StorageError, match=r"out: cannot be written: No space left"):
        export_checkpoint(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_without_harmonys_control_tokens_the_end_is_the_tokenizers(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step_000010"
    raw = json.loads((checkpoint / "tokenizer.json").read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] != "<|call|>"]
    (checkpoint / "tokenizer.json").write_text(json.dumps(raw))
    export_checkpoint(run, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [Tokenizer.load(checkpoint).special_id("<|return|>")]}
    (checkpoint / "tokenizer.json").unlink()
    export_checkpoint(run, tmp_path / "bare")
    assert not (tmp_path / "bare" / "generation_config.json").exists()
