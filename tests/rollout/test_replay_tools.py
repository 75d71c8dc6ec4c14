"""Replays of trajectories with tools: calls, returns and the tokens that answered them come out the same, or where they do not."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tool_cases
from chat_templates import QWEN_TAGS, qwen
from fake_sandbox import FakeSandbox, FakeSandboxes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from wheels import write_wheel

from nmoe.config.registry import TOOLS
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tools.builtin import sandbox_limits
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.rl.replay_bundle import ReplayDifferenceError, replay_command
from nmoe.rollout.bundle import FILE, read_bundle
from nmoe.rollout.collector import Collector
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import Check, replay
from nmoe.sandbox.api import Result
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Message, Problem, Sampling

Make = Callable[..., Environment]

ENVIRONMENT = """
[task_pool]
type = "generated"
task_type = "sort"
[tools]
use = ["tool_cases:add", "tool_cases:echo", "tool_cases:forge", "tool_cases:fail", "tool_cases:flood", "bash"]
[rubric]
format = 0.1
tool_use = 0.5
correctness = 1.0
efficiency = 0.25
[budget]
turns = 4
tool_calls = 3
"""
PROBLEM = Problem("demo/0", "sort", "Sort: 312", "123", "demo")


def call(harmony: Harmony, name: str, arguments: str) -> list[int]:
    to_tool = Message("assistant", arguments, "commentary", recipient=f"functions.{name}", content_type="json")
    return harmony.render_completion([Message("assistant", "hm", channel="analysis"), to_tool])


def final(harmony: Harmony, text: str = "123") -> list[int]:
    return harmony.render_completion([Message("assistant", text, channel="final")])


def play(environment: Environment, turns: list[list[int]], answers: list[Result], context: int = 4000) -> Trajectory:
    """One trajectory whose policy samples these turns, the last one again and again."""
    taken = iter(range(1000))

    def script(request: Request, index: int) -> list[int]:
        return turns[min(next(taken), len(turns) - 1)]

    sandboxes = FakeSandboxes(FakeSandbox(answers))
    collector = Collector(ScriptedEngine(script), environment, context, sandboxes)  # type: ignore[arg-type]
    (group,) = collector.collect([PROBLEM], 1, Sampling(600), (1, "train", 1)).groups
    return group.trajectories[0]


def kept(directory: Path, environment: Environment, tokenizer: Tokenizer, trajectory: Trajectory) -> Path:
    directory.mkdir(exist_ok=True)
    recorder = ReplayRecorder(directory, environment, tokenizer, seed=0, sample_rate=1.0, per_failure=0)
    (path,) = recorder.write(1, [trajectory])
    return path


def differences(path: Path, tokenizer: Tokenizer, answers: list[Result]) -> dict[str, str]:
    async def run() -> list[Check]:
        sandboxes: Any = FakeSandboxes(FakeSandbox(answers))
        return [check async for check in replay(read_bundle(path), tokenizer, sandboxes, allow_user_code=True)]

    return {check.name: check.difference for check in asyncio.run(run()) if check.difference is not None}


OUT = Result("ok", 0, b"hello\n", b"", 0.01)
DEAD = Result("nonzero_exit", 3, b"", b"no\n", 0.01)


@pytest.fixture
def used(environment: Make, harmony: Harmony) -> tuple[Environment, Trajectory]:
    """Three calls, one of which fails, and a right answer."""
    demo = environment(ENVIRONMENT)
    turns = [
        call(harmony, "add", '{"x": 40, "y": 2}'),
        call(harmony, "bash", '{"script": "exit 3"}'),
        call(harmony, "bash", '{"script": "echo hello"}'),
        final(harmony),
    ]
    trajectory = play(demo, turns, [DEAD, OUT])
    assert [event.failure for event in trajectory.tool_events] == ["ok", "nonzero_exit", "ok"]
    assert (trajectory.grade.failure, trajectory.grade.components["correctness"]) == ("ok", 1.0)
    return demo, trajectory


def test_tools_return_the_same(used: tuple[Environment, Trajectory], tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = kept(tmp_path / "replay", *used[:1], tokenizer, used[1])
    assert differences(path, tokenizer, [DEAD, OUT]) == {}
    (again,) = [read_bundle(path).trajectory()]
    assert again.tool_events == used[1].tool_events
    assert again.turns == used[1].turns


def test_code_that_a_bundle_names_runs_only_when_it_is_allowed(
    environment: Make, harmony: Harmony, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle of an environment without any code of the user's own, after someone has written names into it."""
    demo = environment('[task_pool]\ntype = "generated"\ntask_type = "sort"\n')
    path = kept(tmp_path / "replay", demo, tokenizer, play(demo, [final(harmony)], []))
    tokenizer.save(tmp_path / "replay/tokenizer")
    assert list(replay_command(path, None, None))[-1] == "all the same"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text("open('ran', 'w')\ndef f(completions, **_):\n    return [0.0]\n")
    planted = {
        "rewards": (
            [
                {"name": "a", "type": "function", "call": "subprocess:getoutput"},
                {"name": "b", "type": "function", "call": "planted:f"},
                {"name": "c", "type": "function", "call": "nowhere:f"},
                {"name": "d", "type": "function", "call": "planted:f", "replay": False},
            ],
            r"reward function subprocess:getoutput from .*/subprocess\.py; reward function planted:f from .*/planted\.py; "
            r"reward function nowhere:f \(there is no module 'nowhere', in the working directory or installed\)\. The bundle",
        ),
        "tools": ({"use": ["bash", "planted:f"]}, r"your rights: tool planted:f from .*/planted\.py\. "),
        "workspace": (
            {"repository": "evil", "base_commit": "0", "bootstrap": "pip"},
            r"git in .*evil, as \[workspace\] repository; the bootstrap 'pip' of .*evil, as",
        ),
        "sandbox": (
            {"settings": {"python": "/tmp/evil"}, "in_force": ""},
            r"the program /tmp/evil, as \[sandbox\] python",
        ),
        "task_type": ("planted:f", r"your rights: task planted:f from .*/planted\.py\. "),
    }
    written = json.loads((path / FILE).read_text())
    for part, (value, named) in planted.items():
        inside = {"settings": {**written["settings"], part: value}} if part != "sandbox" else {"sandbox": value}
        if part == "task_type":
            inside = {"trajectory": {**written["trajectory"], part: value}}
        (path / FILE).write_text(json.dumps({**written, **inside}))
        with pytest.raises(UserError, match=f"replaying it would run.*{named}.*--allow-user-code"):
            list(replay_command(path, None, None))
        with pytest.raises(UserError, match="--allow-user-code"):
            asyncio.run(anext(replay(read_bundle(path), tokenizer)))
    with monkeypatch.context() as patch:
        patch.setitem(TOOLS._registered, "shell", print)
        named = {**written["settings"], "tools": {"use": ["bash", "shell"]}}
        (path / FILE).write_text(json.dumps({**written, "settings": named}))
        with pytest.raises(UserError, match="your rights: tool shell, which an installed package offers"):
            list(replay_command(path, None, None))
    assert not (tmp_path / "ran").exists()
    (path / FILE).write_text(json.dumps({**written, "settings": {**written["settings"], "tools": planted["tools"][0]}}))
    lines = replay_command(path, None, None, allow_user_code=True)
    assert [next(lines) for _ in range(2)][1] == f"runs         tool planted:f from {tmp_path / 'planted.py'}"
    with pytest.raises(UserError, match="planted:f: has no docstring"):
        list(lines)
    assert (tmp_path / "ran").exists()


def test_a_tool_that_returns_something_else_is_named(
    used: tuple[Environment, Trajectory], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(tmp_path / "replay", *used[:1], tokenizer, used[1])
    other = Result("ok", 0, b"hullo\n", b"", 0.01)
    assert differences(path, tokenizer, [DEAD, other])["tools"] == (
        "turn 2, call 2/0, bash.output: 'hello\\n' in the bundle, 'hullo\\n' now"
    )
    assert differences(path, tokenizer, [OUT, OUT])["tools"].startswith(
        "turn 1, call 1/0, bash.failure: 'nonzero_exit' in the bundle, 'ok' now"
    )

    def add(x: int, y: int = 1) -> int:
        """Adds two numbers."""
        return x + y + 1

    monkeypatch.setattr(tool_cases, "add", add)
    assert differences(path, tokenizer, [DEAD, OUT]) == {
        "tools": "turn 0, call 0/0, add.output: '42' in the bundle, '43' now"
    }


@pytest.mark.parametrize(
    ("change", "check", "difference"),
    [
        (
            lambda t: t["tool_events"][0].update(output="43"),
            "tools",
            "turn 0, call 0/0, add.output: '43' in the bundle, '42' now",
        ),
        (
            lambda t: t["tool_events"][1].update(failure="ok"),
            "tools",
            "turn 1, call 1/0, bash.failure: 'ok' in the bundle, 'nonzero_exit' now",
        ),
        (
            lambda t: t["tool_events"][0].update(arguments='{"x": 41, "y": 1}'),
            "tools",
            "turn 0, call 0: ToolCall(name='add', arguments='{\"x\": 41, \"y\": 1}'",
        ),
        (lambda t: t["tool_events"].pop(1), "tools", "turn 1, call 0: 0 in the bundle, 1 read"),
    ],
)
def test_a_tool_event_that_was_changed_is_found(
    used: tuple[Environment, Trajectory],
    tokenizer: Tokenizer,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    check: str,
    difference: str,
) -> None:
    path = kept(tmp_path / "replay", *used[:1], tokenizer, used[1])
    content = json.loads((path / FILE).read_text())
    change(content["trajectory"])
    (path / FILE).write_text(json.dumps(content))
    found = differences(path, tokenizer, [DEAD, OUT])
    assert found[check].startswith(difference), found
    assert found["digests"] == "changed since it was written: trajectory.tool_events"


def test_a_token_of_a_tools_answer_that_was_changed_is_found(
    used: tuple[Environment, Trajectory], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = kept(tmp_path / "replay", *used[:1], tokenizer, used[1])
    original = (path / FILE).read_text()
    spans = [span for span in json.loads(original)["trajectory"]["spans"] if span["kind"] == "tool"]
    assert len(spans) == 3
    for span in spans:
        for place in range(span["start"], span["end"]):
            content = json.loads(original)
            content["trajectory"]["token_ids"][place] ^= 1
            (path / FILE).write_text(json.dumps(content))
            found = differences(path, tokenizer, [DEAD, OUT])
            assert found["text"].startswith(f"token {place}: "), found
            assert found["tools"].startswith(f"turn {span['turn']}, given token {place - span['start']}: "), found


def test_a_conversation_by_a_chat_template_replays(environment: Make, tmp_path: Path) -> None:
    """Two calls in one turn, whose answers the template writes as one message."""
    (tmp_path / "qwen").mkdir()
    chat = qwen(tmp_path / "qwen")
    path = tmp_path / "chat.toml"
    path.write_text('env_id = "chat"\nformat = "chat"\n' + ENVIRONMENT)
    demo = Environment.from_toml(path, chat)

    def sampled(text: str) -> list[int]:
        pieces = re.split(f"({'|'.join(QWEN_TAGS)})", text)
        ids = [
            id_ for piece in pieces for id_ in ([chat.special_id(piece)] if piece in QWEN_TAGS else chat.encode(piece))
        ]
        return [*ids, chat.special_id("<|im_end|>")]

    calls = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        for name, arguments in (("add", '{"x": 40, "y": 2}'), ("echo", '{"text": "<|im_end|>"}'))
    )
    trajectory = play(demo, [sampled(f"<think>\nhm\n</think>\n\n{calls}"), sampled("<think>\nso\n</think>\n\n123")], [])
    assert [event.output for event in trajectory.tool_events] == ["42", "<|im_end|>"]
    assert trajectory.grade.components["correctness"] == 1
    path = kept(tmp_path / "replay", demo, chat, trajectory)
    assert differences(path, chat, []) == {}
    assert differences(path, Tokenizer.load(tmp_path / "replay/tokenizer"), []) == {}
    config = tmp_path / "replay/tokenizer/tokenizer_config.json"
    config.write_text(config.read_text().replace("each call return", "each call give"))
    with pytest.raises(UserError, match="rendered with the tokenizer"):
        differences(path, Tokenizer.load(tmp_path / "replay/tokenizer"), [])


NAMES = st.sampled_from(["add", "echo", "forge", "fail", "flood", "bash", "none", "system"])
ARGUMENTS = st.sampled_from(
    [
        "{}",
        '{"x": 1}',
        '{"x": 1, "y": -2}',
        '{"text": "<|end|>"}',
        '{"text": "é\\u2603"}',
        '{"script": "ls"}',
        "{",
        "",
        '{"x": "a"}',
    ]
)
RESULTS = [OUT, DEAD, Result("timeout", None, b"half", b"", 9.0), Result("ok", 0, b"\xff\x00", b"", 0.1)]


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_trajectory_with_tools_replays(
    data: st.DataObject, environment: Make, tokenizer: Tokenizer, harmony: Harmony, tmp_path: Path
) -> None:
    """Any calls, good and bad, with budgets of turns, calls, tokens and context that run out."""
    demo = environment(ENVIRONMENT)
    calls = data.draw(st.lists(st.builds(lambda name, text: call(harmony, name, text), NAMES, ARGUMENTS), max_size=5))
    end = data.draw(
        st.sampled_from(
            [final(harmony), final(harmony, "312"), final(harmony)[:-1], call(harmony, "add", '{"x": 5}'), [3, 3, 7]]
        )
    )
    answers = data.draw(st.lists(st.sampled_from(RESULTS), max_size=4))
    context = data.draw(st.sampled_from([4000, 1200]))
    trajectory = play(demo, [*calls, end], answers, context)
    path = kept(tmp_path / "replay", demo, tokenizer, trajectory)
    assert differences(path, tokenizer, answers) == {}


# --- in a real sandbox -------------------------------------------------------------------------------------------------

REAL = ENVIRONMENT.replace('"bash"]', '"bash", "python", "write", "read"]')
SANDBOX = SandboxSettings(level="landlock", warm=0)


def test_a_trajectory_in_a_sandbox_replays_by_the_command(
    environment: Make, harmony: Harmony, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Files and the working directory go from call to call, in the replay as in the rollout."""
    demo = environment(REAL)
    turns = [
        call(harmony, "bash", json.dumps({"script": "mkdir inner && cd inner && echo 41 > number"})),
        call(harmony, "python", json.dumps({"code": "print(int(open('number').read()) + 1, {'b', 'a'})"})),
        call(harmony, "bash", json.dumps({"script": "cat number; pwd; exit 7"})),
        final(harmony),
    ]
    sandboxes = Sandboxes(SANDBOX, sandbox_limits(demo.budget))
    taken = iter(turns)
    collector = Collector(ScriptedEngine(lambda *_: next(taken)), demo, 8000, sandboxes)  # type: ignore[arg-type]
    (group,) = collector.collect([PROBLEM], 1, Sampling(1000), (1, "train", 1)).groups
    (trajectory,) = group.trajectories
    assert [(event.failure, event.output) for event in trajectory.tool_events] == [
        ("ok", ""),
        ("ok", trajectory.tool_events[1].output),
        ("nonzero_exit", "41\n/workspace/inner\nerror (nonzero_exit): exit code 7"),
    ]
    assert trajectory.tool_events[1].output.startswith("42 {")
    (tmp_path / "replay").mkdir()
    recorder = ReplayRecorder(
        *(tmp_path / "replay", demo, tokenizer),
        seed=0,
        sample_rate=1.0,
        per_failure=0,
        sandbox={"settings": SANDBOX.model_dump(mode="json"), "in_force": sandboxes.describe()},
    )
    (path,) = recorder.write(1, [trajectory])
    lines = list(replay_command(path, None, None, allow_user_code=True))
    assert "tools        3 calls and what they returned: the same" in lines
    assert lines[-1] == "all the same"
    content = json.loads((path / FILE).read_text())
    # Cgroups are of the machine that replays: a bundle names no directory of it, and demands none.
    elsewhere = {"cgroup": "required", "cgroup_directory": str(tmp_path / "elsewhere"), "cpus": 1.5}
    content["sandbox"]["settings"] |= elsewhere
    (path / FILE).write_text(json.dumps(content))
    with pytest.raises(ReplayDifferenceError, match="first difference: digests: changed since it was written: sandbox"):
        list(replay_command(path, None, None, allow_user_code=True))
    content["trajectory"]["tool_events"][1]["output"] = "43 {'b', 'a'}\n"
    (path / FILE).write_text(json.dumps(content))
    with pytest.raises(
        ReplayDifferenceError, match=r"first difference: tools: turn 1, call 1/0, python\.output: \"43 "
    ):
        list(replay_command(path, None, None, allow_user_code=True))


FILES = REAL + '[workspace]\ndirectory = "files"\nbootstrap = "requirements"\nkeep = "always"\n'


def test_a_trajectory_on_files_replays_on_the_same_files(
    environment: Make, harmony: Harmony, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trajectory has files of its own, packages that were installed for them, and what it leaves is kept."""
    monkeypatch.setenv("NMOE_WORKSPACES", str(tmp_path / "workspaces"))
    files = tmp_path / "files"
    files.mkdir()
    (files / "number.txt").write_text("41\n")
    write_wheel(files / "tiny-1.0-py3-none-any.whl")
    (files / "requirements.txt").write_text("./tiny-1.0-py3-none-any.whl\n")
    demo = environment(FILES)
    turns = [
        call(harmony, "python", json.dumps({"code": "import tiny; print(tiny.VALUE)"})),
        call(harmony, "bash", json.dumps({"script": "python3 -c 'import tiny; print(tiny.VALUE)'; cat number.txt"})),
        call(harmony, "write", json.dumps({"path": "number.txt", "content": "0"})),
        final(harmony),
    ]
    taken = iter(range(100))
    with ToolRuntime(demo, SANDBOX) as runtime:
        assert runtime.sandboxes is not None
        collector = Collector(
            ScriptedEngine(lambda *_: turns[next(taken) % 4]),  # type: ignore[arg-type]
            *(demo, 8000, runtime.sandboxes),
            workspaces=runtime.workspaces,
        )
        trajectories = [
            collector.collect([PROBLEM], 1, Sampling(1500), (1, "train", step)).groups[0].trajectories[0]
            for step in (1, 2)
        ]
        record = runtime.record()
    for step, trajectory in enumerate(trajectories, start=1):
        assert [(event.failure, event.output) for event in trajectory.tool_events] == [
            ("ok", "42\n"),
            ("ok", "42\n41\n"),
            ("ok", "wrote 1 bytes to number.txt"),
        ]
        assert trajectory.workspace is not None
        left = Path(trajectory.workspace["kept"])
        assert left.name.startswith(f"kept-1-train-{step}-0-demo_0-0-")
        assert (left / "tree/number.txt").read_text() == "0"
    assert (files / "number.txt").read_text() == "41\n"
    (tmp_path / "replay").mkdir()
    recorder = ReplayRecorder(
        *(tmp_path / "replay", demo, tokenizer), seed=0, sample_rate=1.0, per_failure=0, sandbox=record
    )
    (path,) = recorder.write(1, trajectories[:1])
    assert list(replay_command(path, None, None, allow_user_code=True))[-1] == "all the same"
    (files / "number.txt").write_text("43\n")
    with pytest.raises(
        ReplayDifferenceError, match=r"first difference: workspace: workspace\.content: .* \(and tools\)"
    ):
        list(replay_command(path, None, None, allow_user_code=True))


def test_files_that_do_not_go_into_the_sandbox_mask_the_sample(
    environment: Make, harmony: Harmony, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMOE_WORKSPACES", str(tmp_path / "workspaces"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files/large").write_bytes(bytes(9 << 20))
    small = FILES.replace("[budget]", "[budget]\ndisk_mb = 8").replace('bootstrap = "requirements"', "")
    demo = environment(small)
    with ToolRuntime(demo, SANDBOX) as runtime:
        engine = ScriptedEngine(lambda *_: call(harmony, "bash", '{"script": "ls"}'))
        collector = Collector(engine, demo, 8000, runtime.sandboxes, workspaces=runtime.workspaces)  # type: ignore[arg-type]
        (group,) = collector.collect([PROBLEM], 2, Sampling(1500), (1, "train", 1)).groups
    for trajectory in group.trajectories:
        assert trajectory.grade.failure == "workspace_failed"
        assert not trajectory.trainable
        (event,) = trajectory.tool_events
        assert (event.failure, len(trajectory.turns)) == ("workspace_failed", 1)
        assert "the workspace does not go into the sandbox: workspace " in event.reason
        assert "more than 8 MB" in event.reason


CODE = """
[task_pool]
type = "jsonl"
path = "mbpp.jsonl"
task_type = "mbpp"
"""
MBPP = {
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3"],
}


def test_code_is_judged_again(environment: Make, harmony: Harmony, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(MBPP) + "\n")
    demo = environment(CODE)
    (problem,) = demo.pool.take(1)
    codes = [MBPP["code"], "import os\nos._exit(0)", "def add(a, b):\n    return 4"]
    with ToolRuntime(demo, SANDBOX) as runtime:
        engine = ScriptedEngine(lambda _, index: final(harmony, f"```python\n{codes[index]}\n```"))
        collector = Collector(engine, demo, 4000, runtime.sandboxes)  # type: ignore[arg-type]
        (group,) = collector.collect([problem], 3, Sampling(1500), (1, "train", 1)).groups
        record = runtime.record()
    assert [one.grade.components["correctness"] for one in group.trajectories] == [1, 0, 0]
    (tmp_path / "replay").mkdir()
    recorder = ReplayRecorder(
        *(tmp_path / "replay", demo, tokenizer), seed=0, sample_rate=1.0, per_failure=0, sandbox=record
    )
    for path in recorder.write(1, group.trajectories):
        assert list(replay_command(path, None, None, allow_user_code=True))[-1] == "all the same"
    content = json.loads((path / FILE).read_text())
    content["trajectory"]["metadata"]["tests"] = json.dumps(["assert add(1, 2) == 4"])
    (path / FILE).write_text(json.dumps(content))
    with pytest.raises(
        ReplayDifferenceError, match=r"first difference: grade: grade\.score: 0\.0 in the bundle, 1\.0 now"
    ):
        list(replay_command(path, None, None, allow_user_code=True))
