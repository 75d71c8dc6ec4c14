"""Aborts: a request that is aborted ends soon, with right tokens so far, and harms no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from nmoe.referee.client import UnansweredError
from nmoe.referee.court import Court, Family, together
from nmoe.referee.target import Asked, Reply

_PREFIX = "generate-tokens-"

CHECKS = Family()


_MOST = 600  # tokens of a sample


def _long(court: Court, n: int = 8) -> Asked:
    return court.asked(court.prompt(6), n=n, max_tokens=_MOST)


async def _aborted(court: Court, asked: Asked) -> Reply:
    """Returns the reply to a request that is aborted until it ends. An abort that comes before its request does nothing."""
    task, pause_s = asyncio.create_task(court.sample(asked)), 0.02
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=pause_s)
            pause_s *= 1.5
            for name in (asked.request_id, _PREFIX + asked.request_id):
                got = await court.client.call("POST", "/abort_requests", {"request_ids": [name]})
                court.need(got.status != 404, "the server has no /abort_requests")
        return await task
    finally:
        task.cancel()


@CHECKS.add("aborts.named", "an aborted request ends with the tokens so far, by 'abort'")
async def named(court: Court) -> None:
    court.needs_token_route()
    finished = 0
    for n in (8, 24):
        asked = _long(court, n)
        got = await _aborted(court, asked)
        whole = [choice for choice in got.choices if len(choice.tokens) == asked.max_tokens]
        if len(whole) < len(got.choices):
            for choice in got.choices:
                if len(choice.tokens) < asked.max_tokens and choice.finish != "abort":
                    court.note("malformed", f"an aborted sample ends by {choice.finish!r}", "'abort'", got)
            return
        finished += 1
    court.note(
        "abort_ignored",
        f"{finished} aborted requests were sampled to their ends, {asked.max_tokens} tokens of {asked.n} samples",
        "samples that end early, by 'abort'",
        got,
        exact=True,
    )


@CHECKS.add("aborts.others", "the requests beside an aborted one are answered whole")
async def others(court: Court) -> None:
    court.needs_token_route()
    asked = [court.asked(max_tokens=24) for _ in range(3)]
    _, *replies = await together(_aborted(court, _long(court)), *(court.sample(one) for one in asked))
    for one, got in zip(asked, replies, strict=True):
        for choice in got.choices:
            if len(choice.tokens) != one.max_tokens:
                court.note(
                    "counts", f"{len(choice.tokens)} tokens, by {choice.finish!r}", f"{one.max_tokens} tokens", got
                )


@CHECKS.add("aborts.unknown", "the abort of a request that is not there does no harm")
async def unknown(court: Court) -> None:
    court.needs_token_route()
    got = await court.client.call("POST", "/abort_requests", {"request_ids": [f"{court.round}-unknown"]})
    court.need(got.status != 404, "the server has no /abort_requests")
    await court.sample(court.asked())


@CHECKS.add("aborts.again", "an id can be used again after its request was aborted")
async def again(court: Court) -> None:
    court.needs_token_route()
    asked = _long(court)
    await _aborted(court, asked)
    await court.sample(replace(asked, n=1, max_tokens=8))


@CHECKS.add("aborts.client", "a request whose client has gone is ended")
async def client(court: Court) -> None:
    court.needs_token_route()
    asked = _long(court, 64)
    try:
        await court.client.call("POST", court.served.route.path, court.served.route.body(asked), 0.05)
    except UnansweredError as error:
        if error.lost:
            raise
    await court.sample(court.asked(max_tokens=4))
    court.need(court.served.info, "the server does not say how many sequences run")
    for _ in range(40):
        stats = (await court.client.call("GET", "/nmoe/info")).value("stats")
        if not isinstance(stats, dict) or not (stats.get("running") or stats.get("waiting")):
            return
        await asyncio.sleep(0.05)
    court.note(
        "abort_ignored",
        f"{stats.get('running')} sequences run on two seconds after their client has gone",
        "none",
        exact=True,
    )
