"""Live episodes: what is sampled and trained on, replays from the record, and what becomes of an environment that fails."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError, URLError

import httpx2
import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_environment, load_run
from nmoe.config.registry import hand_over
from nmoe.engine.api import Request
from nmoe.envs.check import check_environment
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.conversation import AssistantTurn
from nmoe.envs.tasks.live import LiveEpisode
from nmoe.errors import InfrastructureError, UserError
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import Collector, UserCodeFailedError
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import Check, replay
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Exchange, Sample, Sampling
from nmoe.work import WORK

Make = Callable[..., Environment]
KEY = (7, "train")


class Counting(LiveEpisode):
    """Asks to count down. Instances are listed as they are made."""

    made: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.calls: list[str] = []
        type(self).made.append(self)

    async def open(self, record: Any, seed: int) -> Any:
        self.calls.append(f"open {seed & 0xFF}")
        self.left = record["from"]
        return [{"role": "system", "content": "Count."}, {"role": "user", "content": f"down from {self.left}"}]

    async def step(self, turn: AssistantTurn) -> Any:
        self.calls.append(f"step {turn.text.strip()}")
        self.left -= 1
        self.info = {"left": self.left}
        if turn.text.strip() != str(self.left):
            return None, -0.5, True
        return [{"role": "user", "content": "on"}], 0.5, self.left == 0

    async def close(self) -> None:
        self.calls.append("close")


def of(
    environment: Make, episode: type[Counting], records: Sequence[Any] = ({"from": 2},), more: str = ""
) -> Environment:
    episode.made = []
    (task,), (pool,) = hand_over(episode), hand_over(list(records))
    return environment(f'format = "boxed"\ntask = "{task}"\n{more}[task_pool]\ntype = "python"\ncall = "{pool}"\n')


def play(
    environment: Environment, tokenizer: Tokenizer, said: Callable[[int, int], str], samples: int = 1
) -> tuple[list[Trajectory], ScriptedEngine]:
    """Samples of the pool's first problem; `said` has the text of a sample's turn."""

    def script(request: Request, index: int) -> list[int]:
        *_, sample, turn = request.request_id.split("/") if request.request_id.startswith("7/train/") else (index, 0)
        return [*tokenizer.encode(said(int(sample), int(turn))), *environment.renderer.stop_ids]

    engine = ScriptedEngine(script)
    collector = Collector(engine, environment, 2000)  # type: ignore[arg-type]
    (group,) = collector.collect(environment.pool.take(1), samples, Sampling(200), KEY).groups
    return list(group.trajectories), engine


def differences(path: Path, environment: Environment, tokenizer: Tokenizer, trajectory: Trajectory) -> dict[str, str]:
    """What a replay of the trajectory finds to differ."""
    path.mkdir(parents=True)
    recorder = ReplayRecorder(path, environment, tokenizer, seed=0, sample_rate=1.0, per_failure=1)
    (kept,) = recorder.write(1, [trajectory])

    async def checks() -> list[Check]:
        return [one async for one in replay(read_bundle(kept), tokenizer, allow_user_code=True)]

    return {one.name: one.difference for one in asyncio.run(checks()) if one.difference is not None}


def test_each_call_of_an_environment_is_a_piece_of_work(environment: Make, tokenizer: Tokenizer) -> None:
    demo, before = of(environment, Counting), WORK.pieces
    play(demo, tokenizer, lambda _, turn: str(1 - turn))
    assert WORK.pieces - before == 2 + 4 + 1  # samples; open, two steps and close; a grade


def test_trained_ids_are_those_that_the_engine_saw(environment: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    demo = of(environment, Counting, [{"from": 3}])
    trajectories, engine = play(demo, tokenizer, lambda sample, turn: str((2, 1, 0)[turn] + (sample == 1) * turn), 2)
    right, wrong = trajectories
    assert right.problem.question == "down from 3"
    assert tokenizer.decode(right.prompt_ids) == "Count.\n\ndown from 3\n"
    assert right.exchanges == (
        Exchange(0, {"left": 2}, "on", 0.5),
        Exchange(1, {"left": 1}, "on", 0.5),
        Exchange(2, {"left": 0}, None, 0.5),
    )
    assert wrong.exchanges[-1] == Exchange(1, {"left": 1}, None, -0.5)
    assert [one.grade.components["correctness"] for one in trajectories] == [1.5, 0.0]
    assert [one.grade.verdict and one.grade.verdict.outcome for one in trajectories] == ["correct", "incorrect"]
    seen = {request.request_id: request for request in engine.requests}
    for trajectory in trajectories:
        (branch,) = trajectory.branches
        for number, turn in enumerate(trajectory.turns):
            before = [*branch.prompt_ids, *branch.token_ids]
            end = len(branch.prompt_ids) + sum(
                len(one.given_ids) + len(one.sample.token_ids) for one in trajectory.turns[: number + 1]
            )
            request = seen[f"{KEY}/0" if number == 0 else f"7/train/0/{trajectory.index}/{number}"]
            assert [*request.prompt_ids, *turn.sample.token_ids] == before[:end]
        assert differences(tmp_path / str(trajectory.index), demo, tokenizer, trajectory) == {}
    first, second = (one.calls for one in Counting.made)
    assert first[0] == second[0], "one seed for a group"
    assert [one[:5] for one in first] == ["open ", "step ", "step ", "step ", "close"]
    assert second[1:] == ["step 2", "step 2", "close"]
    assert len(Counting.made) == 2, "a replay asks no environment"


def on_second(does: Callable[[], Any]) -> type[Counting]:
    """An environment of which the second sample's first step does this."""

    class Failing(Counting):
        async def step(self, turn: AssistantTurn) -> Any:
            if self is not self.made[1]:
                return await super().step(turn)
            self.calls.append("step")
            answer = does()
            return await answer if asyncio.iscoroutine(answer) else answer

    return Failing


def raises(error: Exception) -> Callable[[], Any]:
    def does() -> Any:
        raise error

    return does


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (lambda: asyncio.sleep(60), "step: took longer than 0.2 s (budget.wall_s)"),
        (raises(ConnectionResetError("peer gone")), "step: ConnectionResetError: peer gone"),
        (raises(TimeoutError("no reply")), "step: TimeoutError: no reply"),
        (raises(httpx2.ReadTimeout("no byte")), "step: ReadTimeout: no byte"),
        (raises(URLError(socket.gaierror(-3, "no name"))), "step: URLError: <urlopen error [Errno -3] no name>"),
        (raises(OSError(errno.EHOSTUNREACH, "no route")), f"step: OSError: [Errno {errno.EHOSTUNREACH}] no route"),
        (raises(InfrastructureError("worker 3 was killed")), "step: InfrastructureError: worker 3 was killed"),
    ],
)
def test_a_lost_environment_masks_its_sample(
    does: Callable[[], Any], reason: str, environment: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    demo = of(environment, on_second(does), more="[budget]\nwall_s = 0.2\n")
    (played, lost), _ = play(demo, tokenizer, lambda sample, turn: str(1 - turn), 2)
    assert (played.grade.failure, played.grade.score, played.trainable) == ("ok", 1.0, True)
    assert (lost.grade.failure, lost.trainable, lost.grade.verdict) == ("environment_error", False, None)
    assert lost.grade.reason.endswith(reason)
    assert lost.exchanges == ()
    assert all(one.calls[-1] == "close" for one in demo_made(demo))
    assert differences(tmp_path / "bundles", demo, tokenizer, lost) == {}


def test_a_loss_reported_by_requests_masks_and_its_other_errors_do_not(environment: Make, tokenizer: Tokenizer) -> None:
    exceptions = pytest.importorskip("requests.exceptions")
    demo = of(environment, on_second(raises(exceptions.ConnectionError("refused"))))
    (_, lost), _ = play(demo, tokenizer, lambda sample, turn: str(1 - turn), 2)
    assert lost.grade.failure == "environment_error"
    assert lost.grade.reason.endswith("step: ConnectionError: refused")
    demo = of(environment, on_second(raises(exceptions.JSONDecodeError("no JSON", "", 0))))
    with pytest.raises(UserCodeFailedError, match="step raised JSONDecodeError: no JSON"):
        play(demo, tokenizer, lambda sample, turn: str(1 - turn), 2)


def demo_made(environment: Environment) -> list[Any]:
    return TASKS[environment.pool.order.at(0).task_type]._episode.made  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (raises(ZeroDivisionError("of the environment")), "step raised ZeroDivisionError: of the environment, at "),
        (raises(FileNotFoundError(2, "no file", "board.json")), "step raised FileNotFoundError: "),
        (raises(HTTPError("http://a", 500, "of the server", {}, None)), "HTTPError: HTTP Error 500: of the server"),  # type: ignore[arg-type]
        (
            lambda: ([{"role": "user", "content": "on"}], float("nan"), False),
            "returned the reward nan, not a finite number",
        ),
        (lambda: ([{"role": "wizard", "content": "on"}], 0.0, False), "'wizard'"),
        (lambda: (None, 0.0, False), "needs the user's next message"),
        (lambda: (None, 0.0, "yes"), "returned done = 'yes', not True or False"),
        (lambda: "on", "returned 'on', not (messages, reward, done)"),
    ],
)
def test_a_mistake_of_the_environment_stops_the_run(
    does: Callable[[], Any], said: str, environment: Make, tokenizer: Tokenizer
) -> None:
    demo = of(environment, on_second(does))
    with pytest.raises(UserCodeFailedError) as stopped:
        play(demo, tokenizer, lambda sample, turn: str(1 - turn), 2)
    assert said in str(stopped.value)
    assert stopped.value.trajectory.grade.failure == "grader_error"
    assert all(one.calls[-1] == "close" for one in demo_made(demo))


class Unsure(Counting):
    async def open(self, record: Any, seed: int) -> Any:
        return f"down from {len(self.made)}?"


def test_a_group_answers_one_question(environment: Make, tokenizer: Tokenizer) -> None:
    with pytest.raises(
        UserError,
        match=r"opened with the same record and the seed \d+, ask differently: 'down from 1\?' and 'down from 2\?'",
    ):
        play(of(environment, Unsure), tokenizer, lambda sample, turn: "1", 2)


class Shy(Counting):
    """The second instance, or with `all` every one, does not open."""

    async def open(self, record: Any, seed: int) -> Any:
        if record["all"] or len(self.made) == 2:
            self.calls.append("open")
            await asyncio.sleep(60)
        return await super().open(record, seed)


@pytest.mark.parametrize("everyone", [False, True])
def test_an_episode_that_does_not_open_is_lost(everyone: bool, environment: Make, tokenizer: Tokenizer) -> None:
    demo = of(environment, Shy, [{"from": 2, "all": everyone}], "[budget]\nwall_s = 0.2\n")
    played, lost = play(demo, tokenizer, lambda sample, turn: str(1 - turn), 2)[0]
    assert (played.grade.failure, lost.grade.failure) == (
        "environment_error" if everyone else "ok",
        "environment_error",
    )
    assert lost.grade.reason.endswith("open: took longer than 0.2 s (budget.wall_s)")
    assert all(one.calls[-1] == "close" for one in demo_made(demo))


def test_a_group_that_is_ended_closes_its_episodes(environment: Make, tokenizer: Tokenizer) -> None:
    def stopped(request: Request, index: int) -> Sample:
        raise RuntimeError("the engine is gone")

    demo = of(environment, Counting)
    collector = Collector(ScriptedEngine(stopped), demo, 2000)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the engine is gone"):
        collector.collect(demo.pool.take(1), 3, Sampling(200), KEY)
    assert [one.calls[-1] for one in Counting.made] == ["close"] * 3


class Sticky(Counting):
    """Does not close. With `stuck` it does not step either."""

    async def open(self, record: Any, seed: int) -> Any:
        self.stuck = record["stuck"]
        return await super().open(record, seed)

    async def step(self, turn: AssistantTurn) -> Any:
        if self.stuck:
            await asyncio.sleep(60)
        return await super().step(turn)

    async def close(self) -> None:
        await super().close()
        if self.stuck != "connection":
            await asyncio.sleep(60)
        raise ConnectionResetError("peer gone")


@pytest.mark.parametrize("stuck", ["", "connection"])
def test_a_close_that_is_lost_takes_no_grade(
    stuck: str, environment: Make, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ending(Sticky):
        async def step(self, turn: AssistantTurn) -> Any:
            return None, 1.0, True

    demo = of(environment, Ending, [{"from": 2, "stuck": stuck}], "[budget]\nwall_s = 0.2\n")
    (played,), _ = play(demo, tokenizer, lambda sample, turn: "1")
    assert (played.grade.failure, played.grade.score, played.trainable, played.grade.reason) == ("ok", 1.0, True, "")
    said = "ConnectionResetError: peer gone" if stuck else "took longer than 0.2 s (budget.wall_s)"
    assert capsys.readouterr().err.endswith(f": close: {said}\n")


def test_lost_episodes_are_closed_all_at_once_in_little_time(
    environment: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe.envs.tasks.live.CLOSE_S", 0.4)
    demo = of(environment, Sticky, [{"from": 2, "stuck": "all"}], "[budget]\nwall_s = 1.0\n")
    began = time.monotonic()
    lost, _ = play(demo, tokenizer, lambda sample, turn: "1", 8)
    assert {one.grade.failure for one in lost} == {"environment_error"}
    assert [one.calls[-1] for one in Sticky.made] == ["close"] * 8
    assert 1.4 <= time.monotonic() - began < 2.6, "a second for the steps and 0.4 for all closes; one by one, 3.2 more"


def test_the_words_of_a_replay_are_the_record_s(environment: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    demo = of(environment, Counting)
    (trajectory,), _ = play(demo, tokenizer, lambda sample, turn: str(1 - turn))
    first, second = trajectory.exchanges
    other = replace(trajectory, exchanges=(replace(first, user="off"), second))
    found = differences(tmp_path / "words", demo, tokenizer, other)
    assert set(found) == {"exchanges"}
    assert found["exchanges"].startswith("turn 1, given token 2: ")
    unpaid = replace(trajectory, exchanges=(replace(first, reward=0.0), second))
    assert set(differences(tmp_path / "reward", demo, tokenizer, unpaid)) == {"grade"}


def test_env_check_shows_how_it_opens_and_answers(environment: Make, tmp_path: Path) -> None:
    demo = of(environment, Counting)
    path = tmp_path / "demo.toml"
    pool = demo.settings.task_pool
    path.write_text(
        f'env_id = "demo"\nformat = "boxed"\ntask = "{pool.task_type}"\n[task_pool]\ntype = "python"\ncall = "{pool.call}"\n'  # type: ignore[union-attr]
    )
    report = "\n".join(check_environment(path, None))
    assert "opened with the seed 0, it asks 'down from 2'" in report
    assert "the conversation is over, in the state {'left': 1}" in report
    assert Counting.made[-1].calls[0] == "open 0"
    assert Counting.made[-1].calls[-1] == "close"


ORS = {"env": "sums", "tool": "submit", "field": "answer", "split": "train", "index": 0}


def of_servers(path: Path, task: str, record: dict[str, Any], defaults: str = "") -> Path:
    (path / "episodes.jsonl").write_text(json.dumps(record) + "\n")
    file = path / "environment.toml"
    pool = f'[task_pool]\ntype = "jsonl"\npath = "episodes.jsonl"\n{defaults}'
    file.write_text(f'env_id = "served"\nformat = "boxed"\ntask = "{task}"\n{pool}')
    return file


@pytest.mark.parametrize(
    ("record", "defaults", "overrides", "url"),
    [
        ({}, 'record_defaults = { url = "http://127.0.0.1:1" }', {}, "http://127.0.0.1:1"),
        ({"url": "http://own:2"}, 'record_defaults = { url = "http://127.0.0.1:1" }', {}, "http://own:2"),
        (
            {},
            'record_defaults = { url = "http://127.0.0.1:1" }',
            {"environment.task_pool.record_defaults.url": "http://over:3"},
            "http://over:3",
        ),
        ({}, "", {"environment.task_pool.record_defaults.url": "http://over:3"}, "http://over:3"),
    ],
)
def test_the_address_of_a_server_is_the_record_s_the_command_s_or_the_pool_s(
    record: dict[str, Any], defaults: str, overrides: dict[str, str], url: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tables = of_servers(tmp_path, "ors", ORS | record, defaults).read_text()
    run = tmp_path / "run.toml"
    model = '[run]\nsteps = 1\n[model]\npath = "m"\n[environment]\n'
    run.write_text(
        model + tables.replace("[task_pool]", "[environment.task_pool]").replace("episodes", f"{tmp_path}/episodes")
    )
    settings = load_run(run, RLConfig, [f"--{key}={value}" for key, value in overrides.items()]).environment
    (problem,) = Environment(settings, tokenizer, user_code=False).pool.take(1)
    assert json.loads(str(problem.metadata["given"])) == ORS | {"url": url}


@pytest.mark.parametrize(
    ("task", "record", "said"),
    [
        (
            "openenv",
            {"action": "message"},
            r"`url` of a record for openenv is the address .* not None; .*`record_defaults`",
        ),
        ("openenv", {"action": "message", "url": "127.0.0.1:8000"}, "not '127.0.0.1:8000'"),
        ("openenv", {"url": "ws://127.0.0.1:8000"}, "`action` of a record for openenv"),
        ("ors", ORS, r"`url` of a record for ors is the address .* not None; .*`record_defaults`"),
        ("ors", {**ORS, "url": "http://me:secret@host"}, "has a user or a password"),
        ("ors", {"url": "http://host", "env": "sums", "tool": "submit", "field": "answer"}, "`split` and `index`"),
    ],
)
def test_a_record_without_its_server_is_refused_when_it_is_read(
    task: str, record: dict[str, Any], said: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = load_environment(of_servers(tmp_path, task, record))
    with pytest.raises(UserError, match=rf"episodes\.jsonl:1: .*{said}"):
        Environment(settings, tokenizer, user_code=False)


def test_a_server_that_is_down_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    settings = load_environment(of_servers(tmp_path, "ors", ORS, f'record_defaults = {{ url = "{url}" }}'))
    lost, _ = play(Environment(settings, tokenizer, user_code=False), tokenizer, lambda sample, turn: "1", 2)
    assert [one.grade.failure for one in lost] == ["environment_error"] * 2
    assert f"task ors: open: InfrastructureError: no server at {url}: " in lost[0].grade.reason
