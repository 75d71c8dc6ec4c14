"""The parent of a run: engines and training are stand-ins, which are killed, hang, and end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe.cluster.parent import Parent, Training
from nmoe.config.tables.placement import PlacementSection
from nmoe.engine.remote.launcher import LocalLauncher, LocalProcess
from nmoe.engine.remote.process import ServerProcess
from nmoe.errors import InfrastructureError

# Answers /health, or ends at its first start where it `fails`.
ENGINE = """
import http.server, sys
if sys.argv[2] == "fails":
    sys.exit("Error: the checkpoint is torn")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Notes its arguments and rank; ends with the code of its turn, or waits until it is asked to end, and saves. A list with a
# code writes a checkpoint of the turn first. With "hangs", it ends one step and no second one; with another activity, it does
# something of it for two seconds and then nothing.
TRAINING = """
import json, os, pathlib, signal, sys, time
run, codes, *rest = sys.argv[1:]
run, rank = pathlib.Path(run), os.environ.get("RANK", "0")
(run / "config.toml").touch()
starts = run / f"starts_{rank}.jsonl"
turn = len(starts.read_text().splitlines()) if starts.exists() else 0
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with starts.open("a") as file:
    file.write(json.dumps({"pid": os.getpid(), "given": rest, "world": os.environ.get("WORLD_SIZE"),
        "port": os.environ.get("MASTER_PORT")}) + chr(10))
print("training", turn, flush=True)
code = json.loads(codes)[turn]
if code == "hangs":
    for step in (1, 2):
        (run / "engines/activity").write_text(f"step {step}")
        time.sleep(0.3)
    code = None
if isinstance(code, dict):
    for done in range(20):
        (run / "engines/activity").write_text(f"{code['does']}{chr(10)}{done}")
        time.sleep(0.1)
    code = None
if isinstance(code, list):
    (run / f"checkpoints/step_{turn:06}").mkdir(parents=True)
    code = code[0]
while code is None and not asked:
    time.sleep(0.02)
if asked:
    (run / "saved").touch()
    sys.exit(130)
if isinstance(code, str):
    time.sleep(float(code))
    code = 0
sys.exit(code)
"""
Place = Callable[..., "Placed"]


class Placed:
    """A parent over stand-ins; `codes` are the exit codes of training's starts: None waits to be asked, and a text is the seconds
    that it takes."""

    def __init__(
        self,
        run: Path,
        codes: list[Any],
        engines: int = 2,
        how: str = "serves",
        ranks: int = 1,
        piece_s: float = 60.0,
        **keys: Any,
    ) -> None:
        (run / "engines").mkdir(parents=True)
        self.run, launcher = run, LocalLauncher(run / "engines")
        self.servers = [
            ServerProcess(f"server_{one}", [sys.executable, "-c", ENGINE, "{port}", how], {}, launcher)
            for one in range(engines)
        ]
        command = [sys.executable, "-c", TRAINING, str(run), json.dumps(codes)]
        placed = PlacementSection(engines=engines, **keys)
        self.parent = Parent(placed, run, self.servers, Training(command, {}, launcher, ranks), piece_s=piece_s)

    def starts(self, rank: int = 0) -> list[dict[str, Any]]:
        file = self.run / f"starts_{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def pid(self, engine: int) -> int:
        """The engine itself, below its keeper."""
        process = self.servers[engine].process
        assert isinstance(process, LocalProcess)
        return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])

    def log(self) -> str:
        return (self.run / "engines/parent.log").read_text()

    def nothing_runs(self) -> bool:
        return all(one.process is None or one.process.code() is not None for one in self.servers)

    def meanwhile(self, act: Callable[[], None]) -> None:
        """Runs the parent, and `act` once training has begun, in a thread beside."""
        failed: list[BaseException] = []

        def acting() -> None:
            try:
                until(lambda: self.starts())
                act()
            except BaseException as error:
                failed.append(error)
                os.kill(os.getpid(), signal.SIGTERM)

        beside = threading.Thread(target=acting)
        beside.start()
        try:
            self.parent.run()
        finally:
            beside.join(30)
            assert self.nothing_runs()
            if failed:
                raise failed[0]


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return lambda *given, **keys: Placed(tmp_path / "run", *given, **keys)


def test_training_that_dies_is_resumed_and_engines_stay(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    placed = place([None, "0.1"])
    before: list[int] = []

    def kill() -> None:
        before.extend([placed.pid(0), placed.pid(1)])
        os.kill(placed.starts()[0]["pid"], signal.SIGKILL)
        until(lambda: len(placed.starts()) == 2)
        assert [placed.pid(0), placed.pid(1)] == before

    placed.meanwhile(kill)
    urls = f"--engine.urls={json.dumps([server.url for server in placed.servers])}"
    first, second = (start["given"] for start in placed.starts())
    assert first == [urls]
    assert second == [urls, "--run.resume=true"]
    assert f"training ended with exit code {128 + signal.SIGKILL}; it is started again" in placed.log()
    assert capsys.readouterr().out.count("training 0\n") == 1


@pytest.mark.parametrize("code", [2, 130])
def test_bad_input_and_an_interrupt_are_not_repeated(place: Place, code: int) -> None:
    placed = place([code, 0], engines=1)
    with pytest.raises(SystemExit) as ended:
        placed.parent.run()
    assert (ended.value.code, len(placed.starts())) == (code, 1)
    assert placed.nothing_runs()


def test_training_is_started_again_so_often_and_not_more(place: Place) -> None:
    placed = place([1, 1, 1, 0], engines=1, restarts=2)
    with pytest.raises(SystemExit) as ended:
        placed.parent.run()
    assert (ended.value.code, len(placed.starts())) == (1, 3)
    assert "is not started again: placement.restarts = 2" in placed.log()


def test_training_that_fails_late_is_started_for_ever_only_if_it_saves_later_steps(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe.engine.remote.supervisor._STEADY_S", 0.0)  # every failure comes late
    placed = place([[1], [1], [1], 1, 0], engines=1, restarts=1)
    with pytest.raises(SystemExit) as ended:
        placed.parent.run()
    assert ended.value.code == 1
    assert len(placed.starts()) == 4, "the fourth began at the checkpoint of the third"


def test_a_rule_that_ends_the_run_is_not_overruled(place: Place) -> None:
    placed = place([1, 0], engines=1)
    (placed.run / "metrics.jsonl").write_text('{"step": 7}\n')
    (placed.run / "alerts.jsonl").write_text('{"step": 7, "rule": "truncation", "level": "stop"}\n')
    with pytest.raises(SystemExit):
        placed.parent.run()
    assert len(placed.starts()) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_is_started_again_where_it_was(place: Place, how: signal.Signals) -> None:
    placed = place([None], hung_s=0.5)

    def strike() -> None:
        url, pid, other, said = placed.servers[1].url, placed.pid(1), placed.pid(0), len(placed.log())
        os.kill(pid, how)
        until(lambda: "server_0 healthy, server_1 healthy" in placed.log()[said:])
        assert placed.servers[1].url == url
        assert placed.pid(1) != pid
        assert placed.pid(0) == other
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        placed.meanwhile(strike)
    assert len(placed.starts()) == 1
    assert (placed.run / "saved").exists(), "training was asked to end, and had the time for it"


def test_an_engine_that_cannot_start_ends_the_run_before_training(place: Place) -> None:
    placed = place([0], how="fails")
    with pytest.raises(InfrastructureError, match=r"server_\d ended with exit code 1 .* the checkpoint is torn"):
        placed.parent.run()
    assert placed.starts() == []
    assert placed.nothing_runs()


def test_with_too_few_engines_training_is_saved_and_the_run_ends(place: Place) -> None:
    placed = place([None], restarts=0, least_engines=2)
    with pytest.raises(InfrastructureError, match=r"1 of 2 engines serve, and 2 are needed: .*--run.resume=true"):
        placed.meanwhile(lambda: os.kill(placed.pid(1), signal.SIGKILL))
    assert (placed.run / "saved").exists()


def test_the_log_of_an_engine_that_is_given_up_is_read_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    placed, read = place([None], restarts=0), list[str]()
    because = ServerProcess.because

    def noted(server: ServerProcess, how: str) -> InfrastructureError:
        read.append(server.name)
        return because(server, how)

    monkeypatch.setattr(ServerProcess, "because", noted)

    def kill() -> None:
        os.kill(placed.pid(1), signal.SIGKILL)
        until(lambda: "server_1 given up" in placed.log())
        time.sleep(0.5)  # the parent looks ten times a second
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        placed.meanwhile(kill)
    assert read == ["server_1"]


@pytest.mark.parametrize("activity", ["step 1", "evaluation 4", "checkpoint 4"])
def test_training_that_does_nothing_is_killed_and_started_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, activity: str
) -> None:
    monkeypatch.setattr("nmoe.cluster.parent.SLACK_S", 0.9)
    placed = place([{"does": activity}, "0.1"], engines=1, wait_s=0.1, piece_s=0.0)
    began = time.monotonic()
    placed.parent.run()
    assert time.monotonic() - began > 20 * 0.1 + 0.9 + 0.1
    assert placed.log().count(f"training hangs: nothing of {activity} was done for") == 1
    assert f"training ended with exit code {128 + signal.SIGKILL}; it is started again" in placed.log()


def test_training_that_hangs_is_killed_and_started_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.cluster.parent.SLACK_S", 0.5)
    placed = place(["hangs", "0.1"], engines=1, wait_s=0.1)
    began = time.monotonic()
    placed.parent.run()
    assert time.monotonic() - began > 10 * 0.3 + 0.5 + 0.1
    assert placed.log().count("training hangs: step 2 has taken") == 1
    assert f"training ended with exit code {128 + signal.SIGKILL}; it is started again" in placed.log()
    assert placed.starts()[1]["given"][-1] == "--run.resume=true"


def test_all_ranks_are_started_again_when_one_dies(place: Place) -> None:
    placed = place([None, "0.1"], engines=1, ranks=2)

    def kill() -> None:
        until(lambda: placed.starts(1))
        os.kill(placed.starts(1)[0]["pid"], signal.SIGKILL)
        until(lambda: "train" in placed.log() or len(placed.starts()) == 1)
        os.kill(placed.starts(0)[0]["pid"], signal.SIGKILL)  # as a rank ends that has lost another

    placed.meanwhile(kill)
    assert [len(placed.starts(rank)) for rank in (0, 1)] == [2, 2]
    assert {start["world"] for rank in (0, 1) for start in placed.starts(rank)} == {"2"}
    assert placed.starts(1)[1]["given"][-1] == "--run.resume=true"
    ports = [[start["port"] for start in placed.starts(rank)] for rank in (0, 1)]
    assert ports[0] == ports[1] == [str(int(port)) for port in ports[0]]
