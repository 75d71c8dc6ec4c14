"""`nmoe data prepare` and `nmoe data download` as a user meets them, with good input and with bad."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from nmoe import cli
from nmoe.data import hub
from nmoe.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from numina_like import write

Nmoe = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def nmoe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Nmoe:
    """Runs `nmoe` in an empty directory and returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "kept"))

    def nmoe(*arguments: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["nmoe", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return nmoe


# documented: nmoe data prepare numina
# documented: nmoe config show numina
# documented: nmoe data prepare mine.toml --source.path=numina/*.parquet --splits.rl_pool=10000 --directory=data/mine
def test_prepare(nmoe: Nmoe, tmp_path: Path) -> None:
    write(tmp_path / "kept/AI-MO/NuminaMath-1.5/data", 600, 2, seed=0)
    sizes = [f"--splits.{name}={size}" for name, size in (("sft", 9), ("dev", 3), ("small_pool", 2), ("id_probe", 0))]
    sizes.append("--probes=[]")
    code, out, _ = nmoe("data", "prepare", "numina", "--splits.rl_pool=20", *sizes)
    assert code == 0
    assert "      600  all" in out
    assert sorted(path.name for path in (tmp_path / "data/numina").iterdir()) == [
        "dev.jsonl", "manifest.json", "rl_pool.jsonl", "sft.jsonl", "small_pool.jsonl",
    ]  # fmt: skip

    _, shown, _ = nmoe("config", "show", "numina")
    (tmp_path / "mine.toml").write_text(shown)
    source = "--source.path=kept/AI-MO/NuminaMath-1.5/data/*.parquet"
    code, *_ = nmoe("data", "prepare", "mine.toml", source, "--splits.rl_pool", "20", "--directory=data/mine", *sizes)
    assert code == 0
    assert (tmp_path / "data/mine/sft.jsonl").read_bytes() == (tmp_path / "data/numina/sft.jsonl").read_bytes()


def test_prepare_without_its_data(nmoe: Nmoe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "why_not_asked", lambda: None)

    def snapshot_download(*_: object, **__: object) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    code, _, err = nmoe("data", "prepare", "numina")
    assert code == 2
    assert "`nmoe data download AI-MO/NuminaMath-1.5`" in err
    assert err.count("\n") == 1
    code, _, err = nmoe("data", "prepare", "numina", "--splits.rl_pol=3")
    assert code == 2
    assert "rl_pool" in err


def test_help_of_prepare_lists_its_keys(nmoe: Nmoe) -> None:
    code, out, _ = nmoe("data", "prepare", "--help")
    assert code == 0
    assert "--splits.rl_pool=50000" in out
    assert "nmoe data prepare numina" in out


# documented: nmoe data download openai/gsm8k
def test_download(nmoe: Nmoe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, *, local_dir: Path, **options: object) -> str:
        local_dir.mkdir(parents=True)
        (local_dir / "train.jsonl").write_text(json.dumps({"text": f"{name} {options['revision']}"}) + "\n")
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "why_not_asked", lambda: None)
    code, out, _ = nmoe("data", "download", "openai/gsm8k", "--revision", "main")
    assert (code, out.strip()) == (0, str(tmp_path / "kept/openai/gsm8k"))
    assert "openai/gsm8k main" in (tmp_path / "kept/openai/gsm8k/train.jsonl").read_text()
    code, _, err = nmoe("data", "download", "no name")
    assert code == 2
    assert err == "error: no name: not the name of a dataset on the hub, such as openai/gsm8k\n"


# documented: nmoe tokenizer train corpus.jsonl --out tokenizer --vocab-size 4096
def test_tokenizer_train(nmoe: Nmoe, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "the cat sat on the mat, the cat sat"}\n')
    code, out, _ = nmoe("tokenizer", "train", "corpus.jsonl", "--out", "tokenizer", "--vocab-size", "270")
    assert code == 0
    assert "270 tokens" in out
    assert (tmp_path / "tokenizer/tokenizer.json").is_file()
    code, _, err = nmoe("tokenizer", "train", "corpus.jsonl", "--out", "other", "--vocab-size", "100")
    assert code == 2
    assert "a vocabulary of 100 tokens is too small" in err


# documented: nmoe data export train.jsonl masked.jsonl --tokenizer runs/speedrun/base
def test_export(nmoe: Nmoe, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    tokenizer = Tokenizer.train(["6 * 7? 42"], 270)
    tokenizer.save(tmp_path / "tokenizer")
    columns = ("--column", "prompt=question", "--column", "completion=answer")
    code, out, _ = nmoe("data", "export", "train.jsonl", "masked.jsonl", "--tokenizer", "tokenizer", *columns)
    assert code == 0
    assert "masked.jsonl: 1 sequences" in out
    line = json.loads((tmp_path / "masked.jsonl").read_text())
    learned = [label for label in line["labels"] if label != -100]
    assert tokenizer.decode(learned).endswith("42<|return|>")
    code, _, err = nmoe("data", "export", "train.jsonl", "masked.jsonl", *columns[:2])
    assert code == 2
    assert "train.jsonl:1: " in err
