"""The command `nmoe dashboard` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# documented: nmoe dashboard
# documented: nmoe dashboard runs/made
# documented: nmoe dashboard runs/base runs/wide --export both.html
# documented: python scripts/made_runs.py runs/made
# documented: nmoe dashboard runs/base runs/wide --port 9000


@contextmanager
def running(*arguments: str, cache: Path, key: str = "") -> Iterator[tuple[str, int]]:
    """The address and the process of a dashboard."""
    command = [sys.executable, "-m", "nmoe", "dashboard", *arguments, "--port", "0"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "NMOE_DASHBOARD_KEY": key}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().rpartition(" ")[2].strip(), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)


def test_it_shows_runs_and_writes_nothing_into_them(runs: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in runs.rglob("*")}
    with running(str(runs / "healthy"), str(runs / "troubled"), cache=tmp_path / "cache") as (url, pid):
        with urllib.request.urlopen(f"{url}data/runs") as reply:
            assert [one["name"] for one in json.load(reply)["runs"]] == ["healthy", "troubled"]
        with urllib.request.urlopen(f"{url}data/samples?run=troubled&text=42&wrong=1") as reply:
            assert json.load(reply)["rows"]
        opened = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
        assert [name for name in opened if name.startswith(str(runs))] == []
    assert {file: file.stat().st_mtime_ns for file in runs.rglob("*")} == before
    assert list((tmp_path / "cache/nmoe/dashboard").glob("*.sqlite"))


def test_a_key_is_wanted_for_runs_and_not_for_the_page(runs: Path, tmp_path: Path) -> None:
    with running(str(runs), cache=tmp_path, key="secret") as (url, _):
        assert urllib.request.urlopen(url).status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}data/runs")
        asked = urllib.request.Request(f"{url}data/runs", headers={"Authorization": "Bearer secret"})
        assert urllib.request.urlopen(asked).status == 200
        other = urllib.request.Request(
            f"{url}data/runs", headers={"Authorization": "Bearer secret", "Origin": "http://evil.example"}
        )
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(other)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: no such directory"),
        ([".", "--host", "0.0.0.0"], "set NMOE_DASHBOARD_KEY to a secret key"),
    ],
)
def test_bad_input_ends_with_a_message(tmp_path: Path, arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "nmoe", "dashboard", *arguments, "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
