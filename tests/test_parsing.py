"""Files of any content are read or refused by name: no nesting and no key ends in a traceback, or takes the memory of a machine."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load
from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.records import read_records
from nmoe.errors import UserError
from nmoe.generation import read_generation
from nmoe.model.checkpoint import read_config
from nmoe.model.peft_format import read_settings
from nmoe.parsing import json_object, json_of, toml_of
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
