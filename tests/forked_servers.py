"""Engine servers that a run starts, forked from a process that has imported torch. tests/engine/remote/test_fleet.py starts them as
users do, each with its keeper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked

from nmoe.engine.remote.launcher import Command, LocalLauncher, Process, free_port

SERVER = ["-m", "nmoe.engine.server"]


class ForkedServer:
    """A server as the launcher's protocol has it."""

    def __init__(self, command: Command, address: str, log: Path) -> None:
        self.address, self.log = address, log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        self.began = log.stat().st_size
        main = "nmoe.engine.server.__main__:main"
        self._forked = Forked(Path.cwd(), *command.argv[3:], main=main, environment=command.env, log=log)

    def code(self) -> int | None:
        code = self._forked.poll()
        return code if code is None or code >= 0 else 128 - code

    def ask(self) -> None:
        self._forked.send_signal(15)

    def end(self) -> None:
        self.ask()
        self._forked.wait(15)
        self._forked.kill()

    kill = end


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """Has the launcher fork engine servers."""
    started = LocalLauncher.start

    def start(self: LocalLauncher, role: str, command: Command, gpus: float, at: str = "") -> Process:
        if list(command.argv[1:3]) != SERVER:
            return started(self, role, command, gpus, at)
        host, _, port = (at or f"127.0.0.1:{free_port()}").rpartition(":")
        return ForkedServer(command.at(host, port), f"{host}:{port}", self._logs / f"{role}.log")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalLauncher, "start", start)
        yield
