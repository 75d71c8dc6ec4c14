"""The example for users of SkyRL: its settings against the schema of SkyRL's wheel, and its script up to SkyRL itself."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from chat_templates import qwen
from tiny_models import tiny_family

from nmoe.model.checkpoint import export_model

ROOT = Path(__file__).parents[2]
SKYRL = ROOT / "examples" / "skyrl"
# Of its wheel, with their defaults: scripts/trainer_keys.py.
KEYS = json.loads((ROOT / "tests" / "config" / "trainer_keys.json").read_text())["skyrl of skyrl 0.4.0"]


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SKYRL))
    return importlib.import_module("main_nmoe")


def test_every_setting_is_one_of_skyrl(entry: ModuleType) -> None:
    settings = dict(one.split("=", 1) for one in entry.overrides(yaml.safe_load((SKYRL / "config.yaml").read_text())))
    assert len(settings) > 40
    assert set(settings) - set(KEYS) == set()
    for key, value in settings.items():
        # What the wheel computes is text, and what it leaves open has no type.
        if isinstance(KEYS[key], bool | int | float):
            assert type(json.loads(value)) is type(KEYS[key]), f"{key}={value}, and the default is {KEYS[key]}"


def test_the_keys_that_the_page_names_exist() -> None:
    page = (SKYRL / "README.md").read_text()
    named = set(re.findall(r"`((?:trainer|generator|data)\.[\w.]+)`", page.partition("in SkyRL 0.4.0")[2]))
    older = {row.split("|")[1] for row in page.splitlines() if row.startswith("| `")}
    there = {one for one in named if not any(one in text for text in older)}
    assert len(there) >= 5
    # A table, such as a section, counts with what is in it.
    assert {one for one in there if not any(f"{key}.".startswith(f"{one}.") for key in KEYS)} == set()


# documented: examples/skyrl/run.sh runs/speedrun word_problems
def test_the_script_prepares_checkpoint_and_records(tmp_path: Path) -> None:
    checkpoint = tmp_path / "tiny"
    tokenizer = qwen(checkpoint)
    export_model(tiny_family("qwen3_moe", vocab_size=tokenizer.vocab_size), checkpoint)
    tokenizer.save(checkpoint)
    command = [SKYRL / "run.sh", checkpoint, "word_problems", "trainer.epochs=2"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "SKYRL": "echo", "RECORDS": "5", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{SKYRL}/main_nmoe.py trainer.epochs=2"
    settings: dict[str, Any] = yaml.safe_load((SKYRL / "config.yaml").read_text())
    (train,), (validation,) = settings["data"]["train_data"], settings["data"]["val_data"]
    for file, count, split in ((train, 5, "train/"), (validation, 256, "eval/")):
        rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        assert len(rows) == count
        assert all(row["label"].startswith(split) and row["env_class"] == "nmoe" for row in rows)
    model = tmp_path / settings["trainer"]["policy"]["model"]["path"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(model).chat_template
    wrong = subprocess.run([SKYRL / "run.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "RUN_OR_CHECKPOINT ENVIRONMENT" in wrong.stderr
