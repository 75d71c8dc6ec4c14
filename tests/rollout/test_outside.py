"""Environments that play themselves in another interpreter: the trajectory is the record of the session, the reward is the
environment's, and a process that fails is no answer.

The interpreter is this one, where a version of verifiers and its adapter are made up; `.ci/verifiers_played.py` plays the package.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from subprocess import PIPE
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from outside_venv import venv
from scripted_engine import ScriptedEngine

from nmoe.engine.api import Request
from nmoe.envs.check import check_environment
from nmoe.envs.environment import Environment
from nmoe.envs.outside.host import failed
from nmoe.envs.outside.process import HOST
from nmoe.errors import InfrastructureError, UserError
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import Collector, UserCodeFailedError
from nmoe.rollout.programs import ended_in_time
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import Check, replay
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Sample, Sampling

pytest.importorskip("uvicorn")


def pool(place: Path, more: str = "") -> str:
    return f'[task_pool]\ntype = "verifiers"\nvenv = "{place}"\nenvironment = {{ id = "sums" {more} }}\n'


class Played:
    """An environment of this play, and the engine that answers its turns in order, or by the number of the sample."""

    def __init__(
        self, environment: Any, tokenizer: Tokenizer, text: str, turns: Sequence[str | Sample | Exception]
    ) -> None:
        self.environment: Environment = environment(f'format = "boxed"\n{text}')

        def script(request: Request, index: int) -> list[int] | Sample:
            turn = turns[int(request.request_id.rpartition("/")[2])]
            if isinstance(turn, Exception):
                raise turn
            stop = self.environment.renderer.stop_ids
            return turn if isinstance(turn, Sample) else [*tokenizer.encode(turn), *stop]

        self.engine = ScriptedEngine(script)
        self.collector = Collector(self.engine, self.environment, 2000)  # type: ignore[arg-type]

    def samples(self, count: int = 1) -> list[Trajectory]:
        problems = self.environment.pool.take(1)
        (group,) = self.collector.collect(problems, count, Sampling(400), (7, "train")).groups
        return list(group.trajectories)


TWICE = """
first = ask("What is it?")
return 0.5 if ask("What is it?", first, "Sure?") == "43" else 2.0
"""


def test_the_trajectory_is_what_the_engine_sampled(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    played = Played(environment, tokenizer, pool(venv(tmp_path, TWICE)), ["41?", "43"])
    pair = played.samples(2)
    for one in pair:
        asked = [two for two in played.engine.requests if two.request_id.startswith(f"7/train/0/{one.index}/")]
        assert len(asked) == len(one.turns) == 2
        assert tokenizer.decode(list(asked[0].prompt_ids)) == "What is it?\n"
        seen = [[*request.prompt_ids, *turn.sample.token_ids] for request, turn in zip(asked, one.turns, strict=True)]
        ends = []
        for branch in one.branches:
            ids = list(branch.prompt_ids)
            for turn in branch.turns:
                ids += [*turn.given_ids, *turn.sample.token_ids]
                ends.append(list(ids))
        assert ends == seen
        assert one.turns[1].sample.logprobs == [
            -0.25 - 0.5 * place for place in range(len(one.turns[1].sample.token_ids))
        ]
        assert (one.grade.failure, one.grade.components["correctness"]) == ("ok", 0.5)
        (exchange,) = one.exchanges
        assert exchange.state == {"rewards": {"sum": 0.5}, "metrics": {"turns": 2}}
        assert (exchange.turn, exchange.user, exchange.reward) == (1, None, 0.5)
    assert pair[0].problem.question in ("0 + 1?", "1 + 1?")
    assert pair[0].problem.history[0].content == "Add."


@pytest.mark.parametrize(("given", "reward"), [("-1.5", -1.5), ("__import__('fractions').Fraction(3, 4)", 0.75)])
def test_a_reward_may_be_any_finite_number(
    given: str, reward: float, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Of any type, such as numpy's, that JSON has no number for."""
    played = Played(environment, tokenizer, pool(venv(tmp_path, f'ask("a")\nreturn {given}')), ["4"])
    (one,) = played.samples()
    assert (one.grade.failure, one.grade.components["correctness"]) == ("ok", reward)


@pytest.mark.parametrize(
    ("play", "more", "reason"),
    [
        (
            "import urllib.error\nask('a')\nraise ConnectionResetError('no database')",
            "",
            "ConnectionResetError: no database",
        ),
        ("return 1.0", "", "it ended, and never asked for a turn"),
        ("return {'lost': 'no sandbox'}", "", ": no sandbox"),
        ("ask('a')\nsaid.clear()\nreturn 1.0", "", "it did not hear the turn '4'"),
        (
            "ask('a')\nsys.stderr.write('out of memory')\nos._exit(3)",
            "",
            "its process ended with code 3: words on standard output out of memory",
        ),
        ("ask('a')\ntime.sleep(60)", "[budget]\nwall_s = 0.5\n", "took longer than 0.5 s (budget.wall_s)"),
    ],
)
def test_an_environment_that_is_lost_is_masked(
    play: str, more: str, reason: str, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (lost,) = Played(environment, tokenizer, more + pool(venv(tmp_path, play)), ["4"]).samples()
    assert (lost.grade.failure, lost.trainable, lost.grade.verdict) == ("environment_error", False, None)
    assert reason in lost.grade.reason


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        ("ask('a')\nreturn float('nan')", "it gave the reward nan, not a finite number"),
        ("ask('a')\nreturn 'much'", "it gave the reward 'much', not a finite number"),
        ("ask('a')\nreturn object()", "TypeError: float() argument must be a string or a real number, not 'object'"),
        ("ask('a')\nreturn [1, 2][int(said[0])]", "IndexError: list index out of range, at "),
        ("ask('a')\nsaid[0] = 'five'\nreturn 1.0", "it scored 'five', which the policy did not say: ['4']"),
        (
            "ask('a')\nraise ExceptionGroup('both', [ConnectionResetError('no judge'), KeyError('gold')])",
            "ExceptionGroup: both (2 sub-exceptions)",
        ),
        (
            "try:\n    ask('a', 7)\nexcept urllib.error.URLError as error:\n    raise ValueError(error.reason[:15]) from None",
            "ValueError: Error code: 400",
        ),
    ],
)
def test_an_environment_that_is_wrong_stops_the_run(
    play: str, reason: str, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(UserCodeFailedError) as stopped:
        Played(environment, tokenizer, pool(venv(tmp_path, play)), ["4"]).samples()
    assert reason in str(stopped.value)
    assert stopped.value.trajectory.grade.failure == "grader_error"


# What the host writes with, from within an environment.
ANSWERS = (
    "import gc\nhost, = [one for one in gc.get_objects() if type(one).__name__ == 'Host']\nanswers = host._answers\n"
)


@pytest.mark.parametrize(
    "crash",
    [
        f'{ANSWERS}answers.write(\'{{"id": 1, "rew\')\nanswers.flush()\nos._exit(3)',
        "child = os.fork()\nif child == 0:\n    time.sleep(60)\nopen(PID, 'w').write(str(child))\nos._exit(3)",
    ],
    ids=["in the middle of an answer", "beside a process that holds its pipes"],
)
def test_a_crash_is_noticed_at_once(crash: str, environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Else its samples would wait for budget.wall_s, and so would all others of the run."""
    pid, once = tmp_path / "pid", tmp_path / "once"
    play = f"ask('a')\nif not os.path.exists({str(once)!r}):\n    open({str(once)!r}, 'w').close()\n"
    play += "".join(f"    {line}\n" for line in crash.replace("PID", repr(str(pid))).splitlines()) + "return 1.0"
    played = Played(environment, tokenizer, pool(venv(tmp_path, play)), ["4"])
    (lost,) = played.samples()
    assert (lost.grade.failure, lost.trainable) == ("environment_error", False)
    assert "its process ended with code " in lost.grade.reason
    assert [one.grade.components["correctness"] for one in played.samples()] == [1.0]
    _wait_for_end_of(pid)


def test_a_process_that_ended_is_started_again(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the clock of the episode runs: to import verifiers may take longer than budget.wall_s."""
    once = tmp_path / "once"
    play = f"ask('a')\nif not os.path.exists({str(once)!r}):\n    open({str(once)!r}, 'w').close()\n    os._exit(3)\nreturn 1.0"
    played = Played(environment, tokenizer, pool(venv(tmp_path, play)), ["4"])
    runs = []

    async def in_time(*given: Any) -> bool:
        assert played.environment.host is not None
        (running,) = played.environment.host._runs
        assert not running.ended
        runs.append(running)
        return await ended_in_time(*given)

    monkeypatch.setattr("nmoe.rollout.outside.ended_in_time", in_time)
    assert [one.grade.failure for one in (*played.samples(), *played.samples())] == ["environment_error", "ok"]
    assert runs[0] is not runs[1]


KEPT = """
import http.client
kept = globals().setdefault("kept", http.client.HTTPConnection(url.split("/")[2], timeout=5))
body = json.dumps({"messages": [{"role": "user", "content": "a"}]})
for again in (True, False):
    try:
        kept.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json", "X-Session-ID": session})
        said.append(json.load(kept.getresponse())["choices"][0]["message"]["content"])
        break
    except ConnectionError:
        kept.close()
return 1.0 if globals().setdefault("first", url) == url else 0.5
"""


def test_a_connection_ends_with_the_loop_that_answered_it(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The process outlives a batch, and a loop that has ended answers nothing. The next one has the same address."""
    played = Played(environment, tokenizer, pool(venv(tmp_path, KEPT)), ["4"])
    with played.collector.open():
        grades = [played.samples()[0].grade for _ in range(3)]
    assert [(one.failure, one.components["correctness"]) for one in grades] == [("ok", 1.0)] * 3


def test_a_process_that_hangs_as_a_whole_is_ended(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe.envs.outside.process._GIVE_UP_S", 0.2)
    place = venv(tmp_path, "return 1.0")
    source = (place / "verifiers_v1.py").read_text()
    hang = f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n        time.sleep(60)\n        said = []\n"
    (place / "verifiers_v1.py").write_text(source.replace("        said = []\n", hang))
    played = Played(environment, tokenizer, f"[budget]\nwall_s = 1.0\n{pool(place)}", ["4"])
    (lost,) = played.samples()
    assert (lost.grade.failure, lost.trainable) == ("environment_error", False)
    _wait_for_end_of(tmp_path / "pid")


def test_what_an_environment_started_ends_with_its_process(tmp_path: Path) -> None:
    """Also after nmoe has ended, which then ends nothing more."""
    pid = tmp_path / "pid"
    play = f"if os.fork() == 0:\n    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
    play += f"while not os.path.exists({str(pid)!r}):\n    time.sleep(0.01)\nreturn 1.0"
    python = venv(tmp_path, play) / "bin" / "python"
    command = [python, "-u", HOST, json.dumps({"environment": {"id": "sums"}})]
    asked = json.dumps({"id": 1, "play": 0, "key": "0", "url": "http://127.0.0.1:1/v1", "session": "s"})
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{asked}\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"version": "0.4.0"}
        assert json.loads(process.stdout.readline())["reward"] == 1.0
        process.stdin.close()
    _wait_for_end_of(pid)


def _wait_for_end_of(pid: Path) -> None:
    until = time.monotonic() + 20
    while pid.exists() and _lives(int(pid.read_text())):
        assert time.monotonic() < until, "its process has to be ended"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


AFTER_THE_END = "ask('a')\ntry:\n    ask('b')\nexcept Exception as error:\n    refused = error\n"


@pytest.mark.parametrize(
    ("play", "correctness"),
    [
        (f"{AFTER_THE_END}return 0.5 if 'Error code: 403' in str(refused) else 2.0", 0.5),
        ("ask('a')\nask('b')", 0.0),
        (f"{AFTER_THE_END}raise ValueError('no turn') from refused", 0.0),
        ("ask('a')\ntry:\n    ask('b')\nexcept Exception:\n    raise ValueError('no turn')", 0.0),
        (f"{AFTER_THE_END}raise ExceptionGroup('turns', [refused])", 0.0),
    ],
)
def test_turns_beyond_the_budget_end_the_episode(
    play: str, correctness: float, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """What was earned until then counts; an environment that cannot go on has given nothing."""
    (spent,) = Played(environment, tokenizer, f"[budget]\nturns = 1\n{pool(venv(tmp_path, play))}", ["4"]).samples()
    assert (spent.grade.failure, spent.trainable, len(spent.turns)) == ("budget_exceeded", True, 1)
    assert spent.grade.components["correctness"] == correctness


@pytest.mark.parametrize(
    "failure",
    [
        "raise ConnectionResetError('no judge')",
        "raise type('RateLimitError', (Exception,), {})('no judge')",
        "try:\n    raise refused\nexcept Exception:\n    raise ConnectionResetError('no judge')",
        "raise ExceptionGroup('both', [refused, ConnectionResetError('no judge')])",
    ],
)
def test_what_is_lost_after_the_budget_is_no_wrong_answer(
    failure: str, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = f"[budget]\nturns = 1\n{pool(venv(tmp_path, AFTER_THE_END + failure))}"
    (lost,) = Played(environment, tokenizer, text, ["4"]).samples()
    assert (lost.grade.failure, lost.trainable, lost.grade.verdict) == ("environment_error", False, None)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("raise ZeroDivisionError('no tests')", "ZeroDivisionError: no tests"),
        ("raise ValueError('Error code: 403 - no key')", "ValueError: Error code: 403 - no key"),
        ("raise ValueError('session of ours has ended')", "ValueError: session of ours has ended"),
    ],
)
def test_what_breaks_after_the_budget_stops_the_run(
    failure: str, reason: str, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = f"[budget]\nturns = 1\n{pool(venv(tmp_path, AFTER_THE_END + failure))}"
    with pytest.raises(UserCodeFailedError) as stopped:
        Played(environment, tokenizer, text, ["4"]).samples()
    assert reason in str(stopped.value)


def test_a_bug_of_the_door_is_the_run_s(
    environment: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an environment would see a server that fails, and its sample would be lost."""

    def broken(pieces: Any) -> None:
        raise KeyError("content")

    monkeypatch.setattr("nmoe.rollout.session_routes._message", broken)
    with pytest.raises(KeyError, match="content"):
        Played(environment, tokenizer, pool(venv(tmp_path, "ask('a')\nreturn 1.0")), ["4"]).samples()


def test_a_failure_of_the_engine_is_the_run_s(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    error = InfrastructureError("no engine is left")
    with pytest.raises(InfrastructureError) as raised:
        Played(environment, tokenizer, pool(venv(tmp_path, "ask('a')\nask('b')")), ["4", error]).samples()
    assert raised.value is error


def test_other_tasks_than_at_the_start_stop_the_run(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    place = venv(tmp_path, "ask('a')\nreturn 1.0")
    source = (place / "verifiers_v1.py").read_text()
    (place / "verifiers_v1.py").write_text(
        source.replace("""f"{self.given.get('salt', '')}{index}\"""", "f'{index}/{time.time()}'")
    )
    with pytest.raises(UserCodeFailedError, match="its tasks have to be the same each time"):
        Played(environment, tokenizer, pool(place), ["4"]).samples()


@pytest.mark.parametrize(
    ("version", "text", "reason"),
    [
        ("0.5.2", "", "it has verifiers 0.5.2, and nmoe plays environments of 0.3.1 and 0.4.0"),
        (None, "", "it has no package verifiers, and nmoe plays environments of 0.3.1 and 0.4.0"),
        ("0.4.0", ', name = "x"', "KeyError: None"),
        ("0.4.0", ', id = "sums", tasks = 0', "it has no tasks"),
    ],
)
def test_what_cannot_be_played_is_refused(
    version: str | None, text: str, reason: str, environment: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    if version != "0.4.0" and version is not None:
        text = ', id = "sums"'
    place = venv(tmp_path, "return 1.0", version)
    with pytest.raises(UserError) as refused:
        environment(
            f'format = "boxed"\n[task_pool]\ntype = "verifiers"\nvenv = "{place}"\nenvironment = {{ {text.lstrip(", ")} }}\n'
        )
    assert str(refused.value).endswith(reason)
    assert str(refused.value).startswith("environment 'demo': ")


def test_a_process_that_ends_while_it_lists_its_tasks_is_refused(environment: Any, tmp_path: Path) -> None:
    place = venv(tmp_path, "return 1.0")
    source = (place / "verifiers_v1.py").read_text()
    (place / "verifiers_v1.py").write_text(source.replace("        made = [", "        os._exit(3)\n        made = ["))
    with pytest.raises(UserError, match=r"environment 'demo': its process ended with code 3: words on standard"):
        environment(f'format = "boxed"\n{pool(place)}')


def test_a_venv_that_is_not_there_is_refused(environment: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/bin/python cannot be started: No such file or directory; make a venv"):
        environment(f'format = "boxed"\n{pool(tmp_path / "none")}')


def test_an_environment_asks_with_its_own_messages(environment: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its own messages are all that the policy is asked; leave out `system`"):
        environment(f'format = "boxed"\nsystem = "Be brief."\n{pool(venv(tmp_path, "return 1.0"))}')


def test_a_replay_grades_again_and_plays_nothing(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    place = venv(tmp_path, TWICE)
    played = Played(environment, tokenizer, pool(place), ["41?", "43"])
    (one,) = played.samples()
    (place / "bin" / "python").unlink()
    recorder = ReplayRecorder(tmp_path, played.environment, tokenizer, seed=0, sample_rate=1.0, per_failure=1)
    (kept,) = recorder.write(1, [one])

    async def checks() -> list[Check]:
        return [found async for found in replay(read_bundle(kept), tokenizer)]

    found = {check.name: check.difference for check in asyncio.run(checks())}
    assert set(found.values()) == {None}
    assert {"text", "turns", "grade"} <= found.keys()


def test_an_environment_is_checked_with_its_first_task(environment: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    environment(f'format = "boxed"\n{pool(venv(tmp_path, "return 1.0"))}')
    report = "\n".join(check_environment(tmp_path / "environment.toml", None))
    assert f"pool         verifiers {{'id': 'sums'}} in {tmp_path}/fake" in report
    assert "no right answer to it is known, so that none was graded" in report
    assert report.endswith("ok")


def test_a_process_that_does_not_start_in_time_is_refused(
    environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe.envs.outside.process._START_S", 0.3)
    place = venv(tmp_path, "return 1.0")
    (place / "verifiers_v1.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(UserError, match=r"bin/python did not have verifiers imported within 0\.3 s"):
        environment(f'format = "boxed"\n{pool(place)}')


class SwallowingRubric:
    """Calls its functions as a rubric of verifiers 0.3.1 does: an exception is logged, and is the reward 0."""

    def __init__(self, funcs: Sequence[Any]) -> None:
        self.funcs, self.cleaned = list(funcs), 0

    def score_objects(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"completion": state["completion"], "answer": "42", "state": state}

    async def _call_individual_reward_func(self, func: Any, state: dict[str, Any]) -> float:
        try:
            return float(func(**self.score_objects(state)))
        except Exception:
            return 0.0

    async def score_rollout(self, state: dict[str, Any]) -> None:
        scores = [await self._call_individual_reward_func(func=one, state=state) for one in self.funcs]
        state["reward"], state["metrics"] = sum(scores), {}

    async def cleanup(self, state: dict[str, Any]) -> None:
        self.cleaned += 1


class SwallowingGroup(SwallowingRubric):
    """A rubric that scores by others, as the one of a group of environments does."""

    def __init__(self, inner: SwallowingRubric) -> None:
        super().__init__([])
        self.env_map = {"a": inner}

    async def score_rollout(self, state: dict[str, Any]) -> None:
        await self.env_map["a"].score_rollout(state)


@pytest.fixture
def version_0(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter of 0.3.1 over a package that is made up."""
    made = {name: ModuleType(name) for name in ("openai", "verifiers", "verifiers.legacy")}
    made["openai"].__dict__.update(PermissionDeniedError=PermissionError)
    made["verifiers.legacy.clients"] = ModuleType("verifiers.legacy.clients")
    made["verifiers.legacy.clients"].__dict__.update(OpenAIChatCompletionsClient=object)
    made["verifiers.legacy.errors"] = ModuleType("verifiers.legacy.errors")
    made["verifiers.legacy.errors"].__dict__.update(
        InfraError=type("InfraError", (Exception,), {}),
        OverlongPromptError=type("OverlongPromptError", (Exception,), {}),
    )
    made["host"] = importlib.import_module("nmoe.envs.outside.host")
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(SwallowingRubric, "_call_individual_reward_func", SwallowingRubric._call_individual_reward_func)
    made["verifiers"].__dict__.update(Rubric=SwallowingRubric)
    monkeypatch.delitem(sys.modules, "nmoe.envs.outside.verifiers_v0", raising=False)
    yield importlib.import_module("nmoe.envs.outside.verifiers_v0")
    sys.modules.pop("nmoe.envs.outside.verifiers_v0", None)


def play_version_0(adapter: Any, rubric: SwallowingRubric) -> dict[str, Any]:
    async def rollout(*given: Any) -> dict[str, Any]:
        return {"completion": "4", "trajectory": []}

    made = adapter.Adapter.__new__(adapter.Adapter)
    made._env, made._rows = SimpleNamespace(rollout=rollout, rubric=rubric), [{}]
    made._client = SimpleNamespace(client=SimpleNamespace(base_url="http://here/v1"))
    answer: dict[str, Any] = asyncio.run(made.play(0, "http://here/v1", "s"))
    return answer


async def two(completion: str, **more: Any) -> str:
    return "2"


def test_a_rubric_calls_its_functions_with_what_they_take(version_0: Any) -> None:
    rubric = SwallowingRubric(
        [two, lambda answer: int(answer), lambda completion, state: state["completion"] == completion]
    )
    answer = play_version_0(version_0, rubric)
    assert answer == {"reward": 45.0, "rewards": {}, "metrics": {}, "said": []}
    assert rubric.cleaned == 1


class MathRubric(SwallowingRubric):
    """Verifies in a process, as the rubric of that name does: there, whatever fails is 0."""

    max_verify_chars, timeout_seconds, HARD_TIMEOUT_SECONDS = 100, 5.0, 60.0

    def __init__(self, executor: Any) -> None:
        super().__init__([self.correct_answer])
        self.executor = executor

    def score_objects(self, state: dict[str, Any]) -> dict[str, Any]:
        parser = SimpleNamespace(parse_answer=lambda completion: completion.strip())
        return {**super().score_objects(state), "completion": " 42 ", "parser": parser}

    async def correct_answer(self, parser: Any, completion: Any, answer: str, **more: Any) -> float:
        return 0.0


class Executor:
    """Ends no call, or each with an exception."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def submit(self, *call: Any) -> Any:
        found = Future[Any]()
        if self.error is not None:
            found.set_exception(self.error)
        return found


@pytest.fixture
def math_verify(version_0: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("verifiers.legacy.rubrics.math_rubric")
    module.__dict__.update(verify_response=lambda response, answer, most, seconds: (response == answer, 0.1))
    monkeypatch.setitem(sys.modules, "verifiers.legacy.rubrics", ModuleType("verifiers.legacy.rubrics"))
    monkeypatch.setitem(sys.modules, "verifiers.legacy.rubrics.math_rubric", module)
    return module


def test_an_answer_is_verified_in_a_process(version_0: Any, math_verify: Any) -> None:
    with ThreadPoolExecutor(1) as executor:
        assert play_version_0(version_0, MathRubric(executor))["reward"] == 1.0
        math_verify.verify_response = lambda *given: (True, 5.1)
        assert play_version_0(version_0, MathRubric(executor))["reward"] == 0.0, "it took longer than its 5 s"


@pytest.mark.parametrize("error", [BrokenProcessPool("a worker was lost"), None])
def test_an_answer_that_was_not_verified_is_lost(error: Exception | None, version_0: Any, math_verify: Any) -> None:
    rubric = MathRubric(executor := Executor(error))
    rubric.HARD_TIMEOUT_SECONDS = 0.01
    with pytest.raises((BrokenProcessPool, TimeoutError)) as raised:
        play_version_0(version_0, rubric)
    assert list(failed(raised.value, "s")) == ["lost"]
    assert (rubric.executor is executor) == (error is None), "the next answer has another process"


def gives_none(**given: Any) -> None:
    return None


def raises(completion: str) -> float:
    raise ZeroDivisionError("no tests")


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        (raises, ZeroDivisionError, "no tests"),
        (gives_none, TypeError, "gives_none gave the reward None, not a number"),
        (lambda **given: "much", TypeError, "<lambda> gave the reward 'much', not a number"),
        (lambda **given: {"score": 1.0}, TypeError, "<lambda> gave the reward {'score': 1.0}, not a number"),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_reward_function_that_gives_no_number_is_no_reward_of_0(
    function: Any, error: type[Exception], reason: str, grouped: bool, version_0: Any
) -> None:
    inner = SwallowingRubric([two, function])
    rubric = SwallowingGroup(inner) if grouped else inner
    with pytest.raises(error) as raised:
        play_version_0(version_0, rubric)
    assert str(raised.value) == reason
    assert rubric.cleaned == 1, "what the episode holds is given back"
