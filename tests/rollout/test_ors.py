"""Environments of the Open Reward Standard, played over recorded replies of ors-sdk 0.1.0.

`.ci/openenv_ors.py` plays with the package itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.registry import hand_over
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import ors
from nmoe.envs.tasks.own import TaskError
from nmoe.errors import UserError
from nmoe.rollout.collector import Collector, UserCodeFailedError
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Sampling

Make = Callable[..., Environment]
RECORD = {
    "url": "http://127.0.0.1:8080",
    "env": "sums",
    "split": "train",
    "index": 3,
    "tool": "submit",
    "field": "answer",
}


def events(*pairs: tuple[str, str]) -> str:
    return "".join(f"event: {event}\r\ndata: {data}\r\n\r\n" for event, data in pairs)


def result(text: str, reward: Any, finished: bool, kind: str = "text") -> str:
    output = {
        "blocks": [{"text": text, "detail": None, "type": kind}],
        "metadata": None,
        "reward": reward,
        "finished": finished,
    }
    whole = json.dumps({"ok": True, "output": output})
    # A long result comes in pieces, and a comment every ten seconds.
    return events(("task_id", "7f")) + ": ping\r\n\r\n" + events(("chunk", whole[:20]), ("end", whole[20:]))


class Server:
    """Gives recorded replies to calls, one after the other."""

    def __init__(self, calls: list[str | int | Exception]) -> None:
        self._calls, self.asked = iter(calls), list[tuple[str, Any, str | None]]()

    def reply(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content and request.content != b"null" else None
        self.asked.append((path, body, request.headers.get("X-Session-ID")))
        if path == "/create_session":
            return httpx2.Response(200, text=events(("task_id", "s1"), ("end", "")))
        if path == "/sums/prompt":
            return httpx2.Response(200, json=[{"text": "What is 3+2?", "detail": None, "type": "text"}])
        if path == "/sums/call":
            reply = next(self._calls)
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply, int):
                return httpx2.Response(reply, text="no")
            return httpx2.Response(200, text=reply)
        return httpx2.Response(200, json={"sid": "s1"})


@pytest.fixture
def play(environment: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Plays an episode, whose turns all say `5`, against recorded replies."""

    def played(record: dict[str, Any], *calls: str | int | Exception) -> tuple[Trajectory, Server]:
        server = Server([*calls])

        def client(url: str, key: str | None) -> httpx2.AsyncClient:
            headers = {} if key is None else {"X-API-Key": key}
            return httpx2.AsyncClient(base_url=url, headers=headers, transport=httpx2.MockTransport(server.reply))

        monkeypatch.setattr(ors, "_client", client)
        (pool,) = hand_over([record])
        demo = environment(f'format = "boxed"\ntask = "ors"\n[task_pool]\ntype = "python"\ncall = "{pool}"\n')

        def script(request: Request, index: int) -> list[int]:
            return [*tokenizer.encode("5"), *demo.renderer.stop_ids]

        collector = Collector(ScriptedEngine(script), demo, 2000)  # type: ignore[arg-type]
        (group,) = collector.collect(demo.pool.take(1), 1, Sampling(400), (7, "train")).groups
        return group.trajectories[0], server

    return played


def test_an_episode(play: Callable[..., Any]) -> None:
    trajectory, server = play(RECORD | {"others": {"try": 1}}, result("again", 0.25, False), result("right", 1, True))
    call = ("/sums/call", {"name": "submit", "input": {"try": 1, "answer": "5"}}, "s1")
    assert server.asked == [
        ("/create_session", {}, None),
        ("/create", {"env_name": "sums", "split": "train", "index": 3}, "s1"),
        ("/sums/prompt", None, "s1"),
        call,
        call,
        ("/delete", None, "s1"),
    ]
    assert trajectory.problem.question == "What is 3+2?"
    assert [(one.user, one.reward) for one in trajectory.exchanges] == [("again", 0.25), (None, 1.0)]
    assert (trajectory.grade.components["correctness"], trajectory.trainable) == (1.25, True)


def test_a_task_may_be_given_whole(play: Callable[..., Any]) -> None:
    record = {name: value for name, value in RECORD.items() if name not in ("split", "index")}
    _, server = play(record | {"task_spec": {"question": "3+2"}}, result("right", 1.0, True))
    assert server.asked[1][1] == {"env_name": "sums", "task_spec": {"question": "3+2"}}
    with pytest.raises(UserError, match="names a task by `split` and `index`, or has its `task_spec`"):
        play(record)


def test_the_key_of_a_server_is_in_no_record(play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    record = RECORD | {"token_env": "SUMS_KEY"}
    with pytest.raises(
        (UserCodeFailedError, TaskError), match=r"needs the environment variable SUMS_KEY \(token_env\)"
    ):
        play(record)
    monkeypatch.setenv("SUMS_KEY", "secret")
    trajectory, _ = play(record, result("right", 1.0, True))
    assert "secret" not in repr(trajectory)


def test_calls_without_a_reward_have_the_one_that_the_record_says(play: Callable[..., Any]) -> None:
    trajectory, _ = play(RECORD | {"reward_if_none": 0.0}, result("again", None, False), result("right", 1.0, True))
    assert [one.reward for one in trajectory.exchanges] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([result("again", None, False)], "the tool submit returned no reward, or one that is not a number"),
        ([result("again", "much", False)], "the reward 'much', not a finite number"),
        ([result("", 0.0, False, "image")], "a block of the type 'image'"),
        ([events(("end", '{"ok": false, "error": "no such tool"}'))], "the tool submit failed: no such tool"),
        ([events(("error", "no such number"))], "/sums/call failed: no such number"),
        ([404], "/sums/call answered 404: 'no'"),
        ([500], "/sums/call answered 500: 'no'"),
    ],
)
def test_mistakes_of_an_environment_stop_the_run(play: Callable[..., Any], calls: list[Any], said: str) -> None:
    with pytest.raises((UserCodeFailedError, TaskError), match=said):
        play(RECORD, *calls)


@pytest.mark.parametrize("key", ["url", "env", "tool", "field"])
def test_a_record_without_a_key_is_refused(play: Callable[..., Any], key: str) -> None:
    said = (
        "`url` of a record for ors is the address of a server"
        if key == "url"
        else f"a record for ors needs `{key}`, and it is ''"
    )
    with pytest.raises(UserError, match=said):
        play(RECORD | {key: ""})


@pytest.mark.parametrize("lost", [503, 429, httpx2.ReadError("gone"), events(("task_id", "7f"))])
def test_a_lost_server_masks_the_sample(play: Callable[..., Any], lost: Any) -> None:
    trajectory, server = play(RECORD, result("again", 0.0, False), lost)
    assert (trajectory.grade.failure, trajectory.trainable) == ("environment_error", False)
    assert "task ors: step: " in trajectory.grade.reason
    assert server.asked[-1][0] == "/delete"


def test_a_password_is_kept_out_of_records(play: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="`url` of a record for ors has a user or a password"):
        play(RECORD | {"url": "http://me:secret@127.0.0.1:8000"})
