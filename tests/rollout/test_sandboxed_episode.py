"""Trajectories whose tools run in real sandboxes, over several collections: each has an event loop of its own, as each step of a
run has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.grade import Grader
from nmoe.envs.prompts import PromptBuilder
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.rollout.collector import Collector
from nmoe.sandbox.api import SandboxSetupError
from nmoe.text.harmony import Harmony
from nmoe.types import Grade, Message, Problem, Sampling

PROBLEMS = [Problem(f"demo/{place}", "sort", "Sort: 21", "12", "demo") for place in range(2)]
SETTINGS = """
[task_pool]
type = "generated"
task_type = "sort"
[tools]
use = ["python", "bash"]
[budget]
tool_s = 20.0
disk_mb = 8
"""


@pytest.fixture
def played(environment: Callable[..., Environment]) -> Iterator[tuple[Environment, ToolRuntime]]:
    demo = environment(SETTINGS)
    try:
        runtime = ToolRuntime(demo, SandboxSettings(level="landlock", warm=2))
    except SandboxSetupError as error:
        pytest.skip(f"the landlock level cannot be had here: {error}")
    with runtime:
        yield demo, runtime


def call(harmony: Harmony, name: str, **arguments: str) -> list[int]:
    return harmony.render_completion(
        [Message("assistant", json.dumps(arguments), "commentary", recipient=f"functions.{name}")]
    )


def test_files_stay_within_a_trajectory_and_sandboxes_outlive_a_step(
    played: tuple[Environment, ToolRuntime], harmony: Harmony
) -> None:
    demo, runtime = played
    write = "import os; assert not os.path.exists('mine'); open('mine', 'w').write('1')"
    turns = [
        call(harmony, "python", code=write),
        call(harmony, "bash", script="cat mine; mkdir d; cd d"),
        call(harmony, "bash", script="pwd; exit 3"),
        harmony.render_completion([Message("assistant", "12", channel="final")]),
    ]

    def script(request: Request, index: int) -> list[int]:
        later = request.request_id.startswith("7/")
        return turns[int(request.request_id.rpartition("/")[2]) if later else 0]

    collector = Collector(ScriptedEngine(script), demo, 8000, runtime.sandboxes)  # type: ignore[arg-type]
    for step in range(3):
        for group in collector.collect(PROBLEMS, 2, Sampling(1000), (7, "train", step)).groups:
            for trajectory in group.trajectories:
                assert [(event.failure, event.output) for event in trajectory.tool_events] == [
                    ("ok", ""),
                    ("ok", "1"),
                    ("nonzero_exit", "/workspace/d\nerror (nonzero_exit): exit code 3"),
                ]
                assert (trajectory.grade.failure, trajectory.grade.score) == ("ok", 1.0)


def test_calls_touch_the_allowed_parts_of_the_workspace_alone(
    environment: Callable[..., Environment], harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`[tools] read` and `write`, for every kind of call; the verifier has the whole workspace again."""
    demo = environment(
        SETTINGS.replace('"bash"]', '"bash", "write", "read"]\nread = ["data"]\nwrite = ["src", "notes.txt"]')
    )
    files = {"data/table": b"7", "src/main.py": b"print(1)", "notes.txt": b"", "secret/key": b"hidden"}
    left: dict[str, bytes] = {}
    graded = Grader.grade

    async def grade(self: Grader, *given: Any, session: Any, **named: Any) -> Grade:
        grade = await graded(self, *given, session=session, **named)
        left.update({path: await session.opened.read(path) for path in (*files, "src/new.py")})
        await session.opened.write("secret/key", b"restored")
        return grade

    monkeypatch.setattr(PromptBuilder, "files", lambda *_: files)
    monkeypatch.setattr(Grader, "grade", grade)
    turns = [
        call(harmony, "bash", script="cat data/table; echo 8 > data/table; cat secret/key; echo 9 > secret/new"),
        call(harmony, "python", code="open('src/new.py', 'w').write('2'); print(open('secret/key').read())"),
        call(harmony, "write", path="notes.txt", content="seen"),
        call(harmony, "write", path="top.txt", content="no"),
        call(harmony, "read", path="secret/key"),
        harmony.render_completion([Message("assistant", "12", channel="final")]),
    ]

    def script(request: Request, index: int) -> list[int]:
        return turns[int(request.request_id.rpartition("/")[2])]

    try:
        runtime = ToolRuntime(demo, SandboxSettings(level="landlock", warm=0))
    except SandboxSetupError as error:
        pytest.skip(f"the landlock level cannot be had here: {error}")
    with runtime:
        collector = Collector(ScriptedEngine(script), demo, 8000, runtime.sandboxes)  # type: ignore[arg-type]
        (group,) = collector.collect(PROBLEMS[:1], 1, Sampling(2000), (7, "train", 0)).groups
    (trajectory,) = group.trajectories
    said = [event.output for event in trajectory.tool_events]
    assert "7" in said[0]
    assert "hidden" not in "".join(said)
    assert trajectory.tool_events[1].failure == "sandbox_denied"
    assert [event.failure for event in trajectory.tool_events[2:]] == ["ok", "sandbox_denied", "sandbox_denied"]
    assert left == {**files, "src/new.py": b"2", "notes.txt": b"seen"}
