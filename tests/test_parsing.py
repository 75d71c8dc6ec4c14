"""Files of any content are read or refused by name, and messages show values in one line."""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.records import read_records
from nmoe.errors import UserError, cut, shown
from nmoe.extras import how_to_install
from nmoe.generation import read_generation
from nmoe.model.checkpoint import read_config
from nmoe.model.peft_format import read_settings
from nmoe.parsing import is_deep, json_object, json_of, toml_of
from nmoe.rollout.bundle import FILE, read_bundle
from nmoe.runs.ledger import read_metrics
from nmoe.runs.provenance import read_provenance, recorded_precision, recorded_steps
from nmoe.runs.record import read_run
from nmoe.runs.replace import continued_by_hand
from nmoe.text import tiktoken_model
from nmoe.text.renderers import ChatRenderer
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from nmoe.types import Message

DEEP = "[" * 200_000


def test_texts_are_read_as_by_the_standard_library() -> None:
    for text in ('{"a": [1, {"b": null}]}', b'[1.5, "\\u00e9"]', "[" * 200 + "]" * 200):
        assert json_of(text) == json.loads(text)
    for text in ('a.b."c.d" = 1\n[x.y]\nz = "1.2.3.4"', f"a = '{'1.' * 50}'", f"a = '{'x' * 10**5}'"):
        assert toml_of(text) == tomllib.loads(text)


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000])
def test_deep_json_is_a_fault_of_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        json_of(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"a = {DEEP}", "nested too deeply"),
        ("a = " + "{a = " * 100_000, "nested too deeply"),
        ("x = 1\na" + ".a" * 100_000 + " = 1", r"more than 100 parts \(at line 2, column 1\)"),
        ("[a" + " . 'a'" * 100_000 + "]", "more than 100 parts"),
    ],
    ids=["array", "table", "key", "header"],
)
def test_deep_toml_is_a_fault_of_the_text(text: str, reason: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError, match=reason):
        toml_of(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file; put it back"),
        (b"[1]", "not a JSON object"),
        (b"{", "cannot be read: Expecting property name"),
        (b"\xff", "cannot be read: 'utf-8' codec"),
        (DEEP.encode(), "cannot be read: arrays or objects nested too deeply"),
    ],
)
def test_an_object_is_read_or_refused_by_name(text: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes('{"a": ["\u00e9"]}'.encode())
    assert json_object(file) == {"a": ["\u00e9"]}
    file.unlink() if text is None else file.write_bytes(text)
    with pytest.raises(UserError, match=f"^{file}: {said}"):
        json_object(file, "put it back")


@pytest.mark.parametrize("text", [f"a = {DEEP}", "model = 1\nrun = 1", "[run]\nsteps = 2\n", "\0"])
def test_a_run_whose_configuration_cannot_be_read_has_recorded_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_000001").mkdir(parents=True)
    (tmp_path / "config.toml").write_text(text)
    (tmp_path / "provenance.json").write_text(DEEP)
    assert (recorded_precision(tmp_path), recorded_steps(tmp_path), continued_by_hand(tmp_path)) == (None, None, False)


def _tokenizer(path: Path, name: str, text: str) -> list[int]:
    Tokenizer.train((), SMALLEST_VOCABULARY).save(path)
    (path / name).write_text(text)
    return ChatRenderer(Tokenizer.load(path)).prompt_ids([Message("user", "?")])


READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "bundle": (FILE, DEEP, read_bundle),
    "configuration": ("x.toml", f"a = {DEEP}", lambda path: load(path / "x.toml", RLConfig, [])),
    "lines": ("x.jsonl", DEEP, lambda path: list(read_records(DatasetSettings(path=str(path / "x.jsonl"))))),
    "array": ("x.json", f"[{DEEP}", lambda path: list(read_records(DatasetSettings(path=str(path / "x.json"))))),
    "metrics": ("metrics.jsonl", f'{{"step": 1}}\n{DEEP}\n', read_metrics),
    "adapter": ("adapter_config.json", DEEP, read_settings),
    "tiktoken": ("tokenizer_config.json", DEEP, tiktoken_model.read),
    "provenance": ("provenance.json", DEEP, read_provenance),
    "run": ("config.toml", f"a = {DEEP}", read_run),
    "model": ("config.json", DEEP, read_config),
    "generation": ("generation_config.json", DEEP, read_generation),
    "tokenizer": ("tokenizer_config.json", DEEP, lambda path: _tokenizer(path, "tokenizer_config.json", DEEP)),
    "template": (
        "",
        "the chat template refuses",
        lambda path: _tokenizer(path, "chat_template.jinja", "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}"),
    ),
}


@pytest.mark.parametrize("what", READERS)
def test_a_file_of_deep_brackets_is_refused_by_name(what: str, tmp_path: Path) -> None:
    name, text, read = READERS[what]
    if name:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name.replace(".", r"\.") or text) as refusal:
        read(tmp_path)
    assert len(str(refusal.value)) < 400


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError


def test_a_value_is_one_line_of_limited_length() -> None:
    assert shown("a  b\nc") == "'a  b\\nc'"
    assert shown(np.array([[1, 2], [3, 4]])) == "array([[1, 2], [3, 4]])"
    assert shown("x" * 78) == f"'{'x' * 78}'"
    assert shown("x" * 79) == f"'{'x' * 76}..."
    assert shown("x" * 9, characters=10) == "'xxxxxx..."
    assert shown(Unshown()) == "what cannot be shown (RuntimeError)"


def test_a_long_text_ends_in_dots() -> None:
    assert (cut("abcdef", 6), cut("abcdefg", 6)) == ("abcdef", "abc...")


ROOT = Path(__file__).parents[1]


def test_the_packages_of_an_extra_are_installed() -> None:
    assert how_to_install("report") == "pip install 'matplotlib>=3.9'"
    assert how_to_install("wandb", "trackio", "wandb") == "pip install 'wandb>=0.31' 'trackio>=0.43'"
    assert how_to_install("lm-eval") == "pip install lm-eval==0.4.13"


def test_sources_that_were_never_installed_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", nothing)
    assert how_to_install("wandb", "trackio") == f"pip install -e '{ROOT}[wandb,trackio]'"


def test_no_advice_asks_pypi_for_nmoe() -> None:
    """A path stands before the name, as in docs/guides/operations.md: `pip install "./nmoe[report]"`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    advised = 0
    for file in (*pages, *(ROOT / "nmoe").rglob("*.py")):
        if file.suffix in (".md", ".py", ".toml", ".ipynb"):
            for before, names in re.findall(r"install [^\n]*?(.)nmoe\[([\w,-]+)\]", file.read_text()):
                assert before == "/", file
                assert set(names.split(",")) <= set(extras), file
                advised += 1
    assert advised >= 7


@pytest.mark.parametrize(("levels", "deep"), [(0, False), (100, False), (101, True), (100_000, True)])
def test_depth_is_measured_without_recursion(levels: int, deep: bool) -> None:
    value: Any = "text"
    for level in range(levels):
        value = [1, value] if level % 2 else {"a": value, "b": 1}
    assert is_deep(value) is deep
