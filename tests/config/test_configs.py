"""Every configuration in nmoe/packaged/configs is one of the verb that its first lines name."""

import re
from pathlib import Path

import pytest

from nmoe.config.commands import COMMANDS, PretrainConfig, RunConfig, SFTConfig
from nmoe.config.loader import load_run
from nmoe.config.packaged import CONFIGS

# What no command of its own runs.
BY_NAME: dict[str, type[RunConfig]] = {
    "speedrun_base": PretrainConfig,
    "speedrun_midtraining": PretrainConfig,
    "speedrun_sft": SFTConfig,
    "selfplay_roles": SFTConfig,
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_it_loads_as_what_its_command_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    head = path.read_text().partition("[")[0]
    commands = re.findall(rf"(?:nmoe|nmoe\.rl) ([a-z ]+?) {path.stem}\b", head)
    schema = BY_NAME.get(path.stem) or COMMANDS[commands[-1]]
    config = load_run(path, schema)
    assert config.model.path or config.model.shape
