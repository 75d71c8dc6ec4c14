"""Kills `nmoe serve --tinker` at random moments while the unmodified SDK trains: python .ci/tinker_kills.py CLIENT_PYTHON

The server starts again with the same directory, and every number that the client gets has to be that of a run without a kill, to
the bit. Exit code 1 where one differs, or the client fails.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from served import ROOT, draw, serving

KEY = "tml-check"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def client(interpreter: str, port: int, steps: int) -> subprocess.Popen[str]:
    environment = os.environ | {
        "TINKER_BASE_URL": f"http://127.0.0.1:{port}", "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [interpreter, "-W", "ignore", str(ROOT / ".ci/tinker_steps.py"), str(steps)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def lines(running: subprocess.Popen[str]) -> list[str]:
    """Returns what a client that has ended printed."""
    assert running.stdout is not None
    return running.stdout.read().splitlines()


def killed(
    interpreter: str, checkpoint: Path, saved: Path, steps: int, lives_s: list[float]
) -> tuple[list[str], int, int, float]:
    """Runs a client before a server that lives so many seconds at a time; returns what it printed, its exit code, the number of
    kills, and the seconds that it took."""
    port, kills, running, began = free_port(), 0, None, 0.0
    for life_s in [*lives_s, float("inf")]:
        arguments = ("--tinker", "--numerics", "exact", "--saved", str(saved), "--port", str(port))
        with serving(checkpoint, *arguments, key=KEY, ends=False) as server:
            if running is None:
                running, began = client(interpreter, port, steps), time.monotonic()
            until = time.monotonic() + life_s
            while running.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            if running.poll() is not None:
                break
            server.process.send_signal(signal.SIGKILL)
            kills += 1
    assert running is not None
    return lines(running), running.wait(), kills, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", help="an interpreter with tinker")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = draw(Path(scratch) / "drawn")
        expected, code, _, whole_s = killed(asked.client, checkpoint, Path(scratch) / "plain", asked.steps, [])
        if code or not expected:
            print(f"without a kill the client ends with {code}")
            return 1
        # A quarter of the time in all, since a busy machine may be idle the next time.
        lives_s = [rng.uniform(0.0, 0.5 * whole_s / asked.kills) for _ in range(asked.kills)]
        found, code, kills, _ = killed(asked.client, checkpoint, Path(scratch) / "killed", asked.steps, lives_s)
    differing = [one for one, other in zip(expected, found, strict=False) if one != other]
    print(
        f"{kills} kills, after {', '.join(f'{one:.2f}' for one in lives_s)} s of serving: the client ends with {code}; "
        f"{len(found)} of {len(expected)} lines, {len(differing)} of them differ"
    )
    print(*differing[:5], sep="\n")
    return int(found != expected or code != 0 or kills < asked.kills)


if __name__ == "__main__":
    sys.exit(main())
