"""What others wrote is shown on a terminal without being obeyed: prompts of `nmoe data show` and `nmoe env check`."""

from __future__ import annotations

import json
from pathlib import Path

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.show import show_data
from nmoe.envs.check import check_environment

ATTACK = "a\x1b[2J\x07b"


def test_records_and_problems_are_shown_with_escapes(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": ATTACK, "completion": ATTACK}) + "\n")
    shown = "\n".join(show_data(DatasetSettings(path=str(data)), None, "auto", True, 1))
    assert shown.count(r"a\x1b[2J\x07b") == 2
    assert "\x07" not in shown
    data.write_text(json.dumps({"problem": ATTACK, "answer": "4"}) + "\n")
    (tmp_path / "environment.toml").write_text(
        'env_id = "x"\n[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "math"\n'
    )
    checked = "\n".join(check_environment(tmp_path, None))
    assert r"a\x1b[2J\x07b" in checked
    assert not {"\x07", "\x1b"} & set(checked)
