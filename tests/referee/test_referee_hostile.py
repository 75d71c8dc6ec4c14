"""Servers that hang, break off or answer with numbers that no model has, in the middle of a round: the other checks go on."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from referee_servers import drawn_checkpoint
from test_referee_input import Fake, answered, fake, round_of, said

from nmoe.referee import rounds
from nmoe.referee.client import Client, UnansweredError
from nmoe.referee.command import judge_of
from nmoe.referee.court import Check, Court
from nmoe.referee.diagnosis import Diagnosis
from nmoe.referee.judge import Judge, Seen
from nmoe.referee.rounds import Round, hold
from nmoe.referee.target import Asked, Choice


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return judge_of(drawn_checkpoint(tmp_path_factory.mktemp("hostile") / "moe", "moe_tied"), "float32")[0]


def is_generate(one: Fake, of: str) -> bool:
    return one.path.endswith("/generate") and of in one.body["request_id"]


def undescribed(one: Fake) -> None:
    """Answers as a server that does not describe itself, whose vocabulary is the checkpoint's then."""
    if one.path == "/nmoe/info":
        one.say(404, b"{}")
    else:
        answered(one)


def own_checks(monkeypatch: pytest.MonkeyPatch, *checks: Callable[[Court], Awaitable[None]]) -> None:
    made = [Check(f"own.{number}", "", check) for number, check in enumerate(checks)]
    monkeypatch.setattr(rounds, "CATALOGUE", made)


def held(url: str, judge: Judge, deadline_s: float = 20, publish: bool = False, only: tuple[str, ...] = ()) -> Round:
    return asyncio.run(hold(url, judge, seed=1, deadline_s=deadline_s, publish=publish, only=only))


def test_a_server_that_hangs_or_refuses_after_the_first_look_is_late_or_unanswering() -> None:
    def refuses(one: Fake) -> None:
        one.say(401, b"{}") if is_generate(one, "-pace-") else answered(one)

    def hangs(one: Fake) -> None:
        time.sleep(3) if is_generate(one, "-pace-") else answered(one)

    with fake(refuses) as url:
        round_ = round_of(url)
    assert [fault for fault, _ in said(round_)] == ["no_answer", "no_answer"]
    with fake(hangs) as url:
        assert [outcome.state for outcome in round_of(url).outcomes] == ["late", "late"]


def test_the_judges_own_time_makes_no_check_late(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    async def works(court: Court) -> None:
        with court.judge.working():
            time.sleep(1.3)
        await asyncio.sleep(0.1)

    async def waits(court: Court) -> None:
        await asyncio.sleep(1.3)

    own_checks(monkeypatch, works, waits)
    with fake(undescribed) as url:
        assert [outcome.state for outcome in held(url, judge, 1.0).outcomes] == ["ok", "late"]


def test_an_error_inside_a_check_is_a_finding_and_the_others_go_on(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(court: Court) -> None:
        raise IndexError("\x1b[2Jindex 7")

    async def goes_on(court: Court) -> None:
        pass

    own_checks(monkeypatch, breaks, goes_on)
    with fake(undescribed) as url:
        round_ = held(url, judge)
    assert [outcome.state for outcome in round_.outcomes] == ["fault", "ok"]
    (fault, seen) = said(round_)[0]
    assert fault == "unread"
    assert seen.startswith("IndexError: \\x1b[2Jindex 7 (test_referee_hostile.py, line ")


@pytest.mark.parametrize(
    ("experts", "fits"),
    [
        (np.full((14, 2, 2), 5), True),
        (np.full((14, 2, 2), 6), False),
        (np.zeros((14, 3, 2), np.int64), False),
        (np.zeros((14, 2, 1), np.int64), False),
        (np.zeros((), np.int64), False),
    ],
)
def test_routes_that_the_model_has_not_are_not_computed_with(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, experts: Any, fits: bool
) -> None:
    packed, read = io.BytesIO(), list[Any]()
    np.lib.format.write_array(packed, experts)

    def routed(one: Fake) -> None:
        if not is_generate(one, "own"):
            undescribed(one)
            return
        token = {"token": "token_id:1", "logprob": -1.0}
        sample = {"index": 0, "token_ids": [1] * 3, "finish_reason": "length", "logprobs": {"content": [token] * 3}}
        routes = {"routed_experts": base64.b64encode(packed.getvalue()).decode()}
        one.say(200, json.dumps({"choices": [sample | routes]}).encode())

    async def asks(court: Court) -> None:
        read.append((await court.ask(court.asked(max_tokens=3))).choices[0].routes)

    own_checks(monkeypatch, asks)
    with fake(routed) as url:
        faults = [fault for fault, _ in said(held(url, judge))]
    assert faults == ([] if fits else ["counts"])
    assert (read[0] is not None) == fits


def test_a_refused_update_leaves_no_server_paused(judge: Judge) -> None:
    calls = list[str]()

    def refuses(one: Fake) -> None:
        calls.append(one.path.partition("?")[0])
        if one.path == "/nmoe/info":
            info = {"engine": "nmoe", "vocab_size": 96, "context_tokens": 512, "precision": "float32", "features": []}
            one.say(200, json.dumps(info).encode())
        elif one.path.startswith(("/pause", "/resume")):
            # The first call to resume fails, and the end of the round asks again.
            one.say(500 if calls.count("/resume") == 1 and "resume" in one.path else 200, b"{}")
        elif one.path.endswith("/generate"):
            if one.body["sampling_params"]["n"] > 1:
                time.sleep(1)
            answered(one)
        else:
            one.say(500, b"{}")

    with fake(refuses) as url:
        round_ = held(url, judge, only=("publishes.paused",), publish=True)
    assert [fault for fault, _ in said(round_)] == ["unpublished"]
    assert [one for one in calls if one in ("/pause", "/resume")] == ["/pause", "/resume", "/resume"]
    # The first weights were refused, too.
    assert round_.left.startswith("/init_weight_transfer_engine has status 500")


async def _talk(closes: Callable[[int], bool], calls: int) -> tuple[list[int | str], int]:
    """Calls a server that closes a connection at its n-th request; returns the statuses or errors, and the connections made."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections, number = connections + 1, 0
        while await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            if closes(number):
                break
            number += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found = list[int | str]()
    async with Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "", 20) as client:
        for _ in range(calls):
            try:
                found.append((await client.call("GET", "/health")).status)
            except UnansweredError as error:
                found.append(str(error))
    server.close()
    return found, connections


def test_a_kept_connection_that_the_server_has_ended_is_made_anew() -> None:
    assert asyncio.run(_talk(lambda number: number == 1, 3)) == ([200, 200, 200], 3)


def test_a_connection_of_the_call_that_ends_without_a_reply_is_no_answer() -> None:
    found, connections = asyncio.run(_talk(lambda number: True, 1))
    assert "GET /health: " in str(found[0])
    assert connections == 1, "a server that drops calls is not asked again"


@pytest.mark.parametrize(
    ("token", "logprob", "faults"),
    [(0, 0.0, []), (1, 0.0, ["seed_ignored", "seed_ignored"]), (0, 0.1, ["unexplained", "unexplained"])],
)
def test_a_stream_is_compared_with_the_whole_reply(token: int, logprob: float, faults: list[str]) -> None:
    def streams(one: Fake) -> None:
        if one.path == "/nmoe/info":
            info = {"engine": "nmoe", "vocab_size": 8, "context_tokens": 64, "precision": "float32"}
            one.say(200, json.dumps(info | {"features": ["stream"]}).encode())
            return
        if not is_generate(one, "logprobs.stream"):
            answered(one)
            return
        streamed, count = one.body["stream"], one.body["sampling_params"]["max_tokens"]
        by, beside = (token, logprob) if streamed else (0, 0.0)
        samples = [
            {
                "index": index,
                "token_ids": [1 + index + by] * count,
                "finish_reason": "length",
                "logprobs": {"content": [{"logprob": -1.0 - beside}] * count},
            }
            for index in (0, 3)[: one.body["sampling_params"]["n"]]
        ]
        samples[1]["index"] = 1
        text = json.dumps({"request_id": one.body["request_id"], "choices": samples})
        one.say(200, (f"data: {text}\n\ndata: [DONE]\n\n" if streamed else text).encode())

    with fake(streams) as url:
        assert [fault for fault, _ in said(round_of(url, ("logprobs.stream",), 20))] == faults


def test_checks_that_compare_with_the_checkpoint_alone_are_skipped_without_it() -> None:
    names = ("prefixes", "concurrency.own", "concurrency.waves", "lengths.long", "lengths.full")
    with fake(answered) as url:
        outcomes = round_of(url, names, 20).outcomes
    assert len(outcomes) == 9
    assert {(outcome.state, outcome.why) for outcome in outcomes} == {
        ("skipped", "needs --checkpoint: nothing to compare with")
    }


def test_where_rounding_is_large_a_name_has_to_explain_most_of_the_difference(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe.referee.diagnosis._SEARCH_S", 2.0)
    generator = torch.Generator().manual_seed(0)

    def moved(by: float) -> dict[str, torch.Tensor]:
        return {name: one + by * torch.randn(one.shape, generator=generator) for name, one in judge.first.items()}

    def seen(logprobs: torch.Tensor) -> list[Seen]:
        return [Seen(Asked((3, 5, 7), max_tokens=24), Choice(0, tokens, logprobs.tolist(), "length"))]

    tokens = torch.randint(96, (24,), generator=generator).tolist()
    diagnosis = Diagnosis(judge, 1.5)
    try:
        for by, name in ((0.01, None), (0.3, "not_updated")):
            judge.before = moved(by)
            right, old = (diagnosis.right(seen(torch.zeros(24)), weights=one)[0] for one in (judge.first, judge.before))
            if name is None:
                # One token is off, by what the old weights bring within the bound.
                token = int((old - right).abs().argmax())
                given, by_old = right.clone(), old[token] - right[token]
                given[token] += by_old.sign() * 1.5 + by_old / 2
            else:
                given = old + 0.02
            samples = seen(given)
            assert diagnosis.wrong(samples, [right]) == [0]
            found = diagnosis.explain(samples, [0], [])
            assert (None if found is None else found.fault) == name
    finally:
        judge.before = None


@pytest.mark.parametrize(("url", "secured"), [("https://host", True), ("HTTPS://host", True), ("http://host", False)])
def test_certificates_are_verified_where_there_are_any(
    url: str, secured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[Any]()

    def made(**settings: Any) -> Any:
        found.append(settings["verify"])
        return client(**settings)

    async def entered() -> None:
        async with Client(url, "", 1):
            pass

    client = httpx2.AsyncClient
    monkeypatch.setattr(httpx2, "AsyncClient", made)
    asyncio.run(entered())
    assert found == [secured, secured]


@pytest.mark.parametrize(
    ("tokens", "off", "routed", "wrong"),
    [(8, 0.11, True, True), (8, 0.09, True, False), (7, 0.11, True, False), (8, 0.11, False, False)],
)
def test_where_rounding_is_large_the_mean_of_a_sample_finds_what_no_token_does(
    judge: Judge, tokens: int, off: float, routed: bool, wrong: bool
) -> None:
    routes = np.zeros((3, 2, 2), np.int16) if routed else None
    seen = [Seen(Asked((3,)), Choice(0, [1] * tokens, [-1.0 - off] * tokens, "length", routes=routes))]
    right = [torch.full((tokens,), -1.0, dtype=torch.float64)]
    assert bool(Diagnosis(judge, 1.5).wrong(seen, right)) is wrong
    assert Diagnosis(judge, 1e-4).wrong(seen, right) == [0]


def test_routes_of_a_sample_are_replayed_beside_samples_without(judge: Judge) -> None:
    routes = np.tile(np.array([4, 5], np.int16), (3, 2, 1))
    routed, free = (Seen(Asked((3, 9)), Choice(0, [1, 2], [-1.0] * 2, "length", routes=one)) for one in (routes, None))
    alone = [judge.logits([one])[0] for one in (routed, free)]
    assert float((alone[0] - alone[1]).abs().max()) > 0.01, "the routers choose other experts"
    for one, right in zip(judge.logits([free, routed]), reversed(alone), strict=True):
        torch.testing.assert_close(one, right)
