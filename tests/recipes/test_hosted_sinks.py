"""W&B and trackio themselves: what they wrote of a run that was killed and resumed is what metrics.jsonl holds, to the bit.

W&B's file, a LevelDB log of `wandb_internal_pb2.Record`, is read by W&B's own record types; trackio's database by its own storage.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_run_loop import Counting
from test_run_sinks import follow

from nmoe.runs.ledger import read_metrics
from nmoe.runs.sinks.sinks import scalars_of

pytestmark = pytest.mark.extras

_BLOCK, _FIRST_BYTES, _HEADER = 32768, 7, 7
_FULL, _LAST = 1, 4

Rows = list[dict[str, float]]


def wandb_rows(run: Path) -> dict[str, Rows]:
    """The history of each W&B run by its name, once the last one has ended: W&B's own process writes the end of a file after
    `finish` has returned."""
    deadline = time.monotonic() + 60
    while "counts-2" not in (found := wandb_runs(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def wandb_runs(run: Path) -> dict[str, Rows]:
    """What lies there now: a run that resumed counts once its file says how it ended."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: dict[str, Rows] = {}
    for file in (run / "wandb").glob("offline-run-*/run-*.wandb"):
        name, rows, ended = "", [], False
        for content in frames(file.read_bytes()):
            record = records.Record()
            record.ParseFromString(content)
            name = record.run.display_name or name
            ended = ended or record.WhichOneof("record_type") == "exit"
            if record.WhichOneof("record_type") == "history":
                items = {
                    (one.key or ".".join(one.nested_key)): json.loads(one.value_json) for one in record.history.item
                }
                row = {key: value for key, value in items.items() if not key.startswith("_")}
                rows.append({"step": record.history.step.num, **row})
        if ended or name == "counts-1":
            found[name] = rows
    return found


def frames(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after W&B's first seven bytes; one that a kill tore ends it."""
    place, whole = _FIRST_BYTES, b""
    while place + _HEADER <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        piece = content[place + _HEADER : place + _HEADER + length]
        if len(piece) < length:
            return
        whole, place = whole + piece, place + _HEADER + length
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def trackio_rows(run: Path) -> dict[str, Rows]:
    """The logs of each trackio run, by its name."""
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    found: dict[str, Rows] = {}
    for name in storage.get_runs("nmoe"):
        logs = storage.get_logs("nmoe", name)
        found[name] = [{key: value for key, value in log.items() if key != "timestamp"} for log in logs]
    return found


@pytest.mark.parametrize(("sink", "read"), [("wandb", wandb_rows), ("trackio", trackio_rows)])
def test_the_run_that_resumed_holds_every_step_and_the_one_that_was_killed_no_other(
    sink: str, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(sink)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
        monkeypatch.delenv(name, raising=False)
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "from pathlib import Path; from test_run_sinks import Killed, follow\n"
        f"follow(Path({str(tmp_path)!r}), Killed({{3: 0.5}}, every=3), [{sink!r}], wandb_mode='offline')"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = Counting({6: 0.1, 9: 0.7}, every=3)
    run = follow(tmp_path, resumed, [sink], resume=True, wandb_mode="offline")
    rows = [{"step": row["step"], **scalars_of(row)} for row in read_metrics(run)]
    assert [row["step"] for row in rows] == list(range(1, 10))
    found = read(run)
    assert sorted(found) in (["counts-1", "counts-2"], ["counts-2"]), (
        "the first may have been killed before it was opened"
    )
    assert found["counts-2"] == rows
    # A record may have been on its way when the process was killed.
    first = found.get("counts-1", [])
    assert [row["step"] for row in first] == list(range(1, len(first) + 1))
    assert len(first) <= 5
