"""Rewards of a service, against a server on this machine: what is sent, what is tried again, what masks and what stops a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from loopback import Answer, serving
from reward_cases import PROBLEM, SORT
from scripted_engine import ScriptedEngine

from nmoe.envs.environment import Environment
from nmoe.envs.rewards import service
from nmoe.errors import UserError
from nmoe.rollout.collector import Collector, UserCodeFailedError
from nmoe.trajectory import Group
from nmoe.types import Problem, Sampling

Make = Callable[..., Environment]
Play = Callable[..., Group]

GOOD: Answer = (200, {"rewards": [0.5, None]})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_FIRST_WAIT_S", 0.02)


def http(url: str, **keys: Any) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join([f'{SORT}[[rewards]]\nname = "style"\ntype = "http"\nurl = "{url}"', *lines, ""])


def test_a_group_is_one_request(
    environment: Make, play: Play, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STYLE_TOKEN", "s3cret")
    with serving(lambda *_: GOOD) as asked:
        demo = environment(http(asked.url, weight=2.0, token_env="STYLE_TOKEN"))
        group = play(demo, ["123", "9"])
    (content,) = asked.contents
    said = [{"role": "assistant", "content": text, "reasoning_content": "hm"} for text in ("123", "9")]
    assert content == {
        "prompts": [[{"role": "user", "content": "Sort: 312"}]] * 2,
        "completions": [[message] for message in said],
        "columns": {"answer": ["123"] * 2, "tags": [["a", "b"]] * 2, "gold": ["123"] * 2, "difficulty": [3] * 2},
    }
    assert asked.headers[0]["authorization"] == "Bearer s3cret"
    assert [t.grade.score for t in group.trajectories] == [1.0 + 2 * 0.5, 0.0]
    assert "style" not in group.trajectories[1].grade.components
    kept = json.dumps([t.record(1, "") for t in group.trajectories]) + demo.settings.model_dump_json()
    assert "s3cret" not in kept + "".join(capfd.readouterr())


def test_a_token_that_is_not_there_ends_the_load(environment: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STYLE_TOKEN", raising=False)
    with pytest.raises(UserError, match="environment variable STYLE_TOKEN that token_env names is not set"):
        environment(http("http://localhost:1/", token_env="STYLE_TOKEN"))


@pytest.mark.parametrize(
    ("url", "keys", "said"),
    [
        ("ftp://host/", {}, "begins with http"),
        ("http:///path", {}, "names a host"),
        ("http://[oops/", {}, "names a host"),
        ("http://127.0.0.1:99999/", {}, "names no valid port; a port is 1 to 65535"),
        ("http://127.0.0.1:http/", {}, "names no valid port"),
        ("http://127.0.0.1:0/", {}, "names port 0"),
        ("http://a..b/", {}, "names no valid host: each part of 'a..b'"),
        (f"http://{64 * 'a'}.org/", {}, "names no valid host"),
        ("https://me:pw@host/", {}, "contains a user or password"),
        ("https://host/", {"token_env": "sk-123"}, "must be the name of an environment variable, not the token"),
    ],
)
def test_addresses_and_tokens_are_checked(environment: Make, url: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        environment(http(url, **keys))


@pytest.mark.parametrize(
    "bad",
    [
        (500, "oops"),
        (503, ""),
        (429, "slow down", {"retry-after": "0.05"}),
        (408, ""),
        (200, "<html>"),
        (200, b"\xff{"),
    ],
)
def test_a_passing_fault_is_tried_again(environment: Make, play: Play, bad: Answer) -> None:
    with serving(lambda number, _: bad if number < 2 else GOOD) as asked:
        group = play(environment(http(asked.url)), ["123", "9"])
    assert len(asked.contents) == 3
    assert group.trajectories[0].grade.components["style"] == 0.5


@pytest.mark.parametrize(
    ("answer", "times", "said"),
    [
        ((500, "the disk is full"), 3, "asked 3 times: status 500: 'the disk is full'"),
        ((200, "{"), 3, "asked 3 times: the answer is not JSON: '{'"),
        ((413, "too long"), 1, "status 413: 'too long'"),
        ((422, "no"), 1, "status 422"),
    ],
)
def test_a_service_that_can_not_answer_masks_the_group(
    environment: Make, play: Play, answer: Answer, times: int, said: str
) -> None:
    with serving(lambda *_: answer) as asked:
        group = play(environment(http(asked.url, retries=2)), ["123", "9"])
    assert len(asked.contents) == times
    assert [t.grade.failure for t in group.trajectories] == ["grader_error"] * 2
    assert said in group.trajectories[0].grade.reason
    assert group.trainable == []


def test_nobody_there(environment: Make, play: Play) -> None:
    with serving(lambda *_: GOOD) as asked:
        pass
    group = play(environment(http(asked.url, retries=1)), ["123", "9"])
    assert "asked 2 times: connection refused" in group.trajectories[0].grade.reason


def test_a_slow_answer_is_no_answer(environment: Make, play: Play) -> None:
    began = time.perf_counter()
    with serving(lambda *_: GOOD, delay_s=8.0) as asked:
        group = play(environment(http(asked.url, timeout_s=0.2, retries=1)), ["123", "9"])
        assert time.perf_counter() - began < 8
    assert "asked 2 times: no answer within 0.2 s" in group.trajectories[0].grade.reason


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            (401, "Incorrect API key provided: s3cret"),
            "refuses the request with status 401: 'Incorrect API key provided: ***'",
        ),
        ((404, ""), "status 404"),
        ((301, "", {"location": "http://elsewhere/"}), "status 301"),
        ((200, {"rewards": [1]}), "returned 1 values for 2 completions"),
        ((200, '{"rewards": [1, NaN]}'), "returned nan as value 2 of 2"),
        ((200, {"rewards": [1, "1"]}), "returned '1', a str"),
        ((200, {"scores": [1, 1]}), 'has to answer {"rewards": [...]}'),
        ((200, []), "has to answer"),
    ],
)
def test_what_no_other_attempt_changes_stops_the_run(
    environment: Make, play: Play, monkeypatch: pytest.MonkeyPatch, answer: Answer, said: str
) -> None:
    monkeypatch.setenv("STYLE_TOKEN", "s3cret")
    with serving(lambda *_: answer) as asked, pytest.raises(UserCodeFailedError) as caught:
        play(environment(http(asked.url, token_env="STYLE_TOKEN")), ["123", "9"])
    assert len(asked.contents) == 1
    assert said in str(caught.value)
    assert f"reward 'style' ({asked.url})" in str(caught.value)


def test_groups_are_asked_side_by_side_within_the_limit(environment: Make) -> None:
    problems = [Problem(f"demo/{i}", "sort", "Sort: 312", "123", "demo") for i in range(8)]
    with serving(lambda number, _: (200, {"rewards": [number]}), delay_s=0.15) as asked:
        demo = environment(http(asked.url, concurrency=4))
        engine = ScriptedEngine(lambda *_: demo.grader.answer_ids(PROBLEM, "123"))
        collector = Collector(engine, demo, 400)  # type: ignore[arg-type]
        began = time.perf_counter()
        collected = collector.collect(problems, 1, Sampling(60), (0,))
        assert time.perf_counter() - began < 0.9, "eight in a row would take 1.2 s"
        assert asked.most_at_once == 4
        # A second batch has an event loop of its own.
        assert len(collector.collect(problems[:1], 1, Sampling(60), (1,)).groups) == 1
    assert sorted(group.trajectories[0].grade.components["style"] for group in collected.groups) == list(range(8))
