"""Programs that ask the policy by OpenAI's API: the trajectory is the record of the session, and a failed program is no answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.errors import DivergenceError, InfrastructureError, UserError
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import Collector
from nmoe.rollout.episode import Episode, Player
from nmoe.rollout.programs import Session, SessionEndedError
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import Check, replay
from nmoe.text.conversation import ChatMessage
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Sample, Sampling

pytest.importorskip("uvicorn")

# Asks with the standard library alone: `ask` returns the reply, `said` its text.
ASKS = """
import json, os, sys, urllib.request
problem = json.load(sys.stdin)
def ask(messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.2, **more}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    reply = urllib.request.urlopen(asked)
    assert reply.headers["x-nmoe-ignored"] == "temperature"
    return json.load(reply)
def said(messages, **more):
    return ask(messages, **more)["choices"][0]["message"]["content"]
messages = problem["messages"]
"""


made: list[Environment] = []


def play(
    environment: Any,
    tokenizer: Tokenizer,
    directory: Path,
    program: str,
    turns: Sequence[str | Sample | Exception],
    more: str = "",
    samples: int = 1,
    kind: type[ScriptedEngine] = ScriptedEngine,
) -> tuple[list[Trajectory], ScriptedEngine]:
    (directory / "agent.py").write_text(ASKS + program)
    (directory / "problems.jsonl").write_text(json.dumps({"question": "6 * 7?", "answer": "42"}) + "\n")
    command = json.dumps([sys.executable, "-I", str(directory / "agent.py")])
    demo: Environment = environment(
        f'format = "boxed"\ntask = "gsm8k"\n{more}[task_pool]\ntype = "program"\npath = "{directory}/problems.jsonl"\n'
        f"command = {command}\n"
    )
    made.append(demo)

    def script(request: Request, index: int) -> list[int] | Sample:
        turn = turns[int(request.request_id.rpartition("/")[2])]
        if isinstance(turn, Exception):
            raise turn
        return turn if isinstance(turn, Sample) else [*tokenizer.encode(turn), *demo.renderer.stop_ids]

    engine = kind(script)
    collector = Collector(engine, demo, 2000)  # type: ignore[arg-type]
    (group,) = collector.collect(demo.pool.take(1), samples, Sampling(400), (7, "train")).groups
    return list(group.trajectories), engine


def test_the_trajectory_is_what_the_engine_sampled(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    program = """
first = said(messages)
messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
second = said(messages)
said([{"role": "user", "content": "Sum up: " + second}])
"""
    (played, _), engine = play(environment, tokenizer, tmp_path, program, ["41?", "hm", r"\boxed{42}"], samples=2)
    asked = [one for one in engine.requests if one.request_id.startswith("7/train/0/0/")]
    assert len(asked) == len(played.turns) == 3
    texts = [tokenizer.decode(list(one.prompt_ids)) for one in asked]
    assert texts[0] == "6 * 7?\n"
    assert texts[2] == "Sum up: hm\n"
    seen = [[*request.prompt_ids, *turn.sample.token_ids] for request, turn in zip(asked, played.turns, strict=True)]
    ends = []
    for branch in played.branches:
        ids = list(branch.prompt_ids)
        for turn in branch.turns:
            ids += [*turn.given_ids, *turn.sample.token_ids]
            ends.append(list(ids))
    assert ends == seen
    assert sum(played.mask) == sum(len(turn.sample.token_ids) for turn in played.turns)
    assert (played.grade.failure, played.grade.answer, played.grade.components["correctness"]) == ("ok", "42", 1.0)


def test_a_program_does_not_get_the_key_of_the_engines(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMOE_ENGINE_KEY", "secret")
    monkeypatch.setenv("NMOE_KEPT", "kept")
    program = """
said([{"role": "user", "content": " ".join(os.environ.get(one, "none") for one in ("NMOE_ENGINE_KEY", "NMOE_KEPT"))}])
"""
    _, engine = play(environment, tokenizer, tmp_path, program, ["42"])
    assert [tokenizer.decode(list(one.prompt_ids)) for one in engine.requests] == ["none kept\n"]


@pytest.mark.parametrize(
    ("program", "more", "reason"),
    [
        ("said(messages)\nprint('no tool', file=sys.stderr)\nsys.exit(75)", "", "ended with code 75: no tool"),
        ("", "", "ended, and never asked for a turn"),
        ("sys.exit('no tool')", "", "ended with code 1: no tool, and never asked for a turn"),
        (
            "import time\ntime.sleep(60)",
            "[budget]\nwall_s = 1.5\n",
            "took longer than 1.5 s (budget.wall_s), and never asked for a turn",
        ),
    ],
)
def test_a_program_that_the_policy_did_not_fail_is_masked(
    program: str, more: str, reason: str, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (lost,), _ = play(environment, tokenizer, tmp_path, program, ["42"], more)
    assert (lost.grade.failure, lost.trainable, lost.grade.verdict) == ("environment_error", False, None)
    assert lost.grade.reason.endswith(reason)


@pytest.mark.parametrize(("answer", "correctness"), [(r"\boxed{42}", 1.0), (r"\boxed{41}", 0.0)])
def test_after_a_crash_the_last_answer_is_graded(
    answer: str,
    correctness: float,
    environment: Any,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else a policy could mask each answer that would earn nothing, by one that the program cannot read."""
    (played,), _ = play(environment, tokenizer, tmp_path, "sys.exit('cannot read ' + said(messages))", [answer])
    assert (played.grade.failure, played.trainable) == ("ok", True)
    assert (played.grade.components["correctness"], played.grade.reason) == (correctness, "")
    assert capsys.readouterr().err.endswith(f"ended with code 1: cannot read {answer}\n")


def test_a_program_that_an_answer_keeps_busy_is_a_timeout(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    program = "said(messages)\nimport time\ntime.sleep(60)"
    (late,), _ = play(environment, tokenizer, tmp_path, program, [r"\boxed{42}"], "[budget]\nwall_s = 4.0\n")
    assert (late.grade.failure, late.trainable, late.grade.components["correctness"]) == ("timeout", True, 0.0)


def test_a_process_that_outlives_the_program_is_not_waited_for(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    program = f"""
import subprocess
said(messages)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
"""
    began = time.monotonic()
    try:
        (played,), _ = play(environment, tokenizer, tmp_path, program, [r"\boxed{42}"])
        assert time.monotonic() - began < 30
        assert (played.grade.failure, played.grade.components["correctness"]) == ("ok", 1.0)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_a_turn_that_the_engine_gave_up_ends_the_session(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "refusals.json"
    program = f"""
import urllib.error
found = []
for _ in range(2):
    try:
        said(messages)
    except urllib.error.HTTPError as error:
        found.append([error.code, json.load(error)["error"]["code"]])
open({str(out)!r}, "w").write(json.dumps(found))
"""
    turns: list[str | Sample] = [Sample([5], [-1.0], [1], "abort"), r"\boxed{42}"]
    (lost,), engine = play(environment, tokenizer, tmp_path, program, turns)
    assert (lost.grade.failure, lost.trainable, len(lost.turns), len(engine.requests)) == ("engine_error", False, 1, 1)
    assert json.loads(out.read_text()) == [[403, "engine_error"]] * 2


@pytest.mark.parametrize("error", [InfrastructureError("no engine is left"), DivergenceError("a logit is nan")])
def test_a_failure_of_the_engine_is_the_run_s(
    error: UserError, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(type(error)) as raised:
        play(environment, tokenizer, tmp_path, "said(messages)\nsaid(messages)", ["hm", error])
    assert raised.value is error


def test_a_failure_of_the_renderer_is_the_run_s(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat_ids(*_: Any) -> list[int]:
        raise KeyError("role")

    monkeypatch.setattr("nmoe.text.renderers.plain.PlainRenderer.chat_ids", chat_ids)
    with pytest.raises(KeyError, match="role"):
        play(environment, tokenizer, tmp_path, "said(messages)", ["hm"])


class Slow(ScriptedEngine):
    """Never ends its first request."""

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        if not self.requests:
            self.requests.append(request)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.aborted.append(request.request_id)
                raise
        async for one in super().samples(request):
            yield one


def test_a_request_that_its_client_gave_up_leaves_no_turn(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    program = """
import socket
socket.setdefaulttimeout(1)
try:
    said(messages)
except TimeoutError:
    socket.setdefaulttimeout(20)
    said(messages)
"""
    (played,), engine = play(environment, tokenizer, tmp_path, program, [r"\boxed{42}"], kind=Slow)
    assert engine.aborted == ["7/train/0/0/0"]
    first, second = engine.requests
    assert first == second, "the turn is the first one still"
    assert (len(played.turns), played.grade.failure, played.grade.components["correctness"]) == (1, "ok", 1.0)


def test_a_turn_that_would_come_after_the_end_is_given_up(environment: Any, tokenizer: Tokenizer) -> None:
    """Its tokens would be handed over and belong to no sample, at which a run ends."""
    demo = environment('format = "boxed"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\n')
    engine = Slow(lambda request, index: [])
    player = Player(engine, demo, 2000)  # type: ignore[arg-type]
    (problem,) = demo.pool.take(1)

    async def ended() -> Episode:
        episode = Episode(problem, 0, (7,), (), Sampling(400, seed=0), [])
        session = Session(episode, player, demo.renderer, 8)
        asked = [asyncio.ensure_future(session.turn([ChatMessage("user", "?")], [], None)) for _ in range(2)]
        while not engine.requests:
            await asyncio.sleep(0)
        session.close()
        for one in (*asked, asyncio.ensure_future(session.turn([ChatMessage("user", "?")], [], None))):
            with pytest.raises(SessionEndedError, match="ended"):
                await one
        assert not session.waits
        return episode

    assert asyncio.run(ended()).turns == []
    assert (engine.aborted, player.sampled_tokens.total()) == (["7/0/0"], 0)


def test_turns_beyond_the_budget_are_refused(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    program = "while True: said(messages)"
    (spent,), engine = play(environment, tokenizer, tmp_path, program, ["1", "2", "3"], "[budget]\nturns = 2\n")
    assert (spent.grade.failure, len(spent.turns), len(engine.requests)) == ("budget_exceeded", 2, 2)
    assert spent.trainable, "the policy used them up"


def test_bad_requests_are_refused_in_openai_s_form(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "refusals.json"
    program = f"""
import urllib.error
TOOL = {{"type": "function", "function": {{"name": "add", "parameters": {{"type": "object", "properties": {{}}}}}}}}
found = []
for more in ({{"n": 2}}, {{"stop": ["x"]}}, {{"messages": [{{"role": "wizard", "content": "?"}}]}}, {{"tools": [TOOL]}}):
    try:
        ask(more.pop("messages", messages), **more)
    except urllib.error.HTTPError as error:
        found.append([error.code, json.load(error)["error"]["param"]])
open({str(out)!r}, "w").write(json.dumps(found))
said(messages)
"""
    (played,), _ = play(environment, tokenizer, tmp_path, program, ["42"])
    assert json.loads(out.read_text()) == [[400, "n"], [400, "stop"], [400, "messages[0].role"], [400, None]]
    assert (played.grade.failure, len(played.turns)) == ("ok", 1)


def test_a_stream_has_the_whole_turn(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    program = """
body = json.dumps({"messages": messages, "stream": True, "stream_options": {"include_usage": True}}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
lines = urllib.request.urlopen(urllib.request.Request(url, body)).read().decode().split("\\n\\n")
chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
assert lines[-2] == "data: [DONE]"
assert chunks[0]["choices"][0]["delta"]["content"] == "it is 42"
assert [one["finish_reason"] for chunk in chunks for one in chunk["choices"]] == [None, "stop"]
assert chunks[-1]["usage"]["completion_tokens"] > 0
"""
    (played,), _ = play(environment, tokenizer, tmp_path, program, ["it is 42"])
    assert (played.grade.failure, played.grade.reason, played.grade.components["correctness"]) == ("ok", "", 1.0)


def test_a_replay_grades_the_last_turn_and_runs_no_program(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    program = """
messages += [{"role": "assistant", "content": said(messages)}, {"role": "user", "content": "Sure?"}]
said(messages)
"""
    (tmp_path / "demo").mkdir()
    (played,), _ = play(environment, tokenizer, tmp_path / "demo", program, ["hm", r"\boxed{42}"])
    (tmp_path / "demo" / "agent.py").unlink()
    recorder = ReplayRecorder(tmp_path, made[-1], tokenizer, seed=0, sample_rate=1.0, per_failure=1)
    (kept,) = recorder.write(1, [played])

    async def checks() -> list[Check]:
        return [one async for one in replay(read_bundle(kept), tokenizer)]

    found = {one.name: one.difference for one in asyncio.run(checks())}
    assert set(found.values()) == {None}
    assert {"text", "turns", "grade"} <= found.keys()
    assert not {"prompt", "tools"} & found.keys(), "they are the program's"
