"""Ranks as torchrun would start them, at less cost: one process imports torch and forks, so that each rank but the first starts
without the 1.5 CPU seconds of an import. torchrun itself starts the ranks of tests/acceptance."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent


def forked(script: str, *cases: Sequence[str], missing: int = 0, port: int = 0) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank of a script beside this file. Every rank has a case, its arguments; so many more
    ranks, the last ones, are `missing`."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(len(cases) + missing),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with tempfile.TemporaryDirectory() as said:
        command = [sys.executable, __file__, str(HERE / script), said, json.dumps(cases)]
        subprocess.run(command, env=environment, check=True, timeout=900)
        return [
            (int(Path(said, f"{rank}.code").read_text()), *(Path(said, f"{rank}.{part}").read_text() for part in "oe"))
            for rank in range(len(cases))
        ]


def on_ranks(ranks: int, script: str, *arguments: str) -> str:
    """What a script prints on so many ranks with the same arguments, rank by rank. All have to end with 0."""
    said = forked(script, *[arguments] * ranks)
    assert [code for code, _, _ in said] == [0] * ranks, "\n".join(err[-3000:] for _, _, err in said)
    return "".join(out for _, out, _ in said)


def main(script: str, said: str, cases: list[list[str]]) -> None:
    """Forks a process for each rank, which runs the script and ends as any other; and waits for all."""
    import nmoe.learner.learner
    import nmoe.parallel.join  # noqa: F401

    ranks = {}
    for rank, case in enumerate(cases):
        process = os.fork()
        if not process:
            for stream, part in ((1, "o"), (2, "e")):
                os.dup2(os.open(f"{said}/{rank}.{part}", os.O_WRONLY | os.O_CREAT), stream)
            os.environ["RANK"] = str(rank)
            sys.argv = [script, *case]
            sys.path[0] = str(HERE)
            runpy.run_path(script, run_name="__main__")
            return
        ranks[process] = rank
    with suppress(ChildProcessError):
        while True:
            process, status = os.wait()
            Path(said, f"{ranks[process]}.code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
