"""Lists the files of nmoe/ that run for one prompt of one GRPO step: python scripts/trace_step.py [COMMIT]

A tiny base trains on one prompt per step. The first step that publishes weights is traced, from its beginning to the return of
`publish`: every function that is entered, in any thread of the process. Prints the files that they lie in, and the hand-overs:
which file first called which, in order. A function marked `*` was resumed by an event loop or started as a thread; its caller is
whoever runs the loop. By default the commit is HEAD; `.` is the working tree.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from commits import checked_out, environment, resolved, subject
from tiny_run import VERBS, make_workshop, write_configurations

STEPS = (("recipes/grpo.py", "_step"), ("rl/train.py", "_step"), ("rl/train.py", "step"))
"""Where a step may begin, by commit: file below nmoe/ and function."""

PUBLISH = ("learner/learner.py", "publish")


class Tracer:
    """A profile function (`sys.setprofile`) that notes the files below `root` whose functions are entered during a step."""

    def __init__(self, root: Path) -> None:
        self.root = str(root) + "/"
        self.files: dict[str, None] = {}
        self.hand_overs: dict[tuple[str, str], str] = {}
        self.step: CodeType | None = None
        self.done = False
        self._names: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.done or event not in ("call", "return") or (name := self.name(frame.f_code)) is None:
            return
        place = (name, frame.f_code.co_name)
        if event == "call":
            if place in STEPS:
                self.step = frame.f_code
                self.files, self.hand_overs = {}, {}
            if self.step is not None and frame.f_code.co_name != "<module>":
                self.enter(name, frame)
        elif place == PUBLISH and self.step is not None:
            self.done = True
        elif frame.f_code is self.step:  # a step that published nothing
            self.step = None

    def enter(self, name: str, frame: FrameType) -> None:
        self.files.setdefault(name)
        caller, through, back = None, "", frame.f_back
        while back is not None and caller is None:
            caller = self.name(back.f_code)
            if "/asyncio/" in back.f_code.co_filename or back.f_code.co_filename.endswith("/threading.py"):
                through = "*"
            back = back.f_back
        if caller is not None and caller != name:
            self.hand_overs.setdefault((caller, name), frame.f_code.co_qualname + through)

    def name(self, code: CodeType) -> str | None:
        """A function's file below `root`, None for code from elsewhere."""
        if code not in self._names:
            inside = code.co_filename.startswith(self.root)
            self._names[code] = code.co_filename.removeprefix(self.root) if inside else None
        return self._names[code]


def trace(tree: Path, arguments: list[str]) -> Tracer:
    """Runs the command `nmoe` in this process, which imports it from `tree`. Raises RuntimeError where no step was seen."""
    tracer = Tracer(tree / "nmoe")
    sys.argv = ["nmoe", *arguments]
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        from nmoe.cli import main as nmoe

        nmoe()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    if not tracer.done:
        raise RuntimeError(f"no step that published weights was seen; STEPS has {STEPS} and PUBLISH {PUBLISH}")
    return tracer


def traced(tree: Path, workshop: Path) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The files that a step enters, and its hand-overs as caller, callee and function, by the code of `tree` in another process.
    `workshop` has the directory `base`. Raises CalledProcessError where the run fails."""
    write_configurations(workshop)
    result = workshop / "trace.json"
    command = [sys.executable, __file__, "--traced", str(tree), str(result), *VERBS["one_prompt"], "one_prompt.toml"]
    subprocess.run(command, cwd=workshop, env=environment(tree), check=True, stdout=subprocess.DEVNULL)
    found = json.loads(result.read_text())
    return found["files"], [tuple(one) for one in found["hand_overs"]]


def report(files: list[str], hand_overs: list[tuple[str, str, str]]) -> Iterator[str]:
    rooms = Counter(file.split("/")[0] for file in files)
    yield f"{len(files)} files of nmoe/ run for one prompt of a GRPO step: " + ", ".join(
        f"{number} in {room}" for room, number in rooms.most_common()
    )
    yield from (f"  {file}" for file in files)
    yield f"{len(hand_overs)} hand-overs, each when it first happens:"
    yield from (f"  {caller} -> {callee}: {function}" for caller, callee, function in hand_overs)


def main() -> None:
    if sys.argv[1:2] == ["--traced"]:
        tree, result = map(Path, sys.argv[2:4])
        tracer = trace(tree, sys.argv[4:])
        hand_overs = [(*pair, function) for pair, function in tracer.hand_overs.items()]
        result.write_text(json.dumps({"files": list(tracer.files), "hand_overs": hand_overs}))
        return
    commit = resolved(sys.argv[1] if sys.argv[1:] else "HEAD")
    with checked_out(commit) as tree, tempfile.TemporaryDirectory() as directory:
        workshop = Path(directory)
        make_workshop(tree, workshop)
        print(subject(commit))
        print("\n".join(report(*traced(tree, workshop))))


if __name__ == "__main__":
    main()
