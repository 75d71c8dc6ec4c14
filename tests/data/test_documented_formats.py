"""The table of formats in docs/guides/data.md: every example is what the table calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

from nmoe.config.tables.recipes import DatasetSettings, Kind
from nmoe.data.records import read_records

PAGE = Path(__file__).parents[2] / "docs/guides/data.md"


def test_every_example_is_of_its_kind(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\{.*\})` \|$", PAGE.read_text(), re.MULTILINE)
    assert {kind for kind, _ in rows} == set(get_args(Kind))
    for kind, example in rows:
        path = tmp_path / "x.jsonl"
        path.write_text(json.dumps(json.loads(example)) + "\n")
        records = read_records(DatasetSettings(path=str(path)))
        assert records.kind == kind
        assert len(list(records)) == 1
