"""Long prompts: up to the context, and not beyond."""

from __future__ import annotations

from dataclasses import replace

from nmoe.referee.client import shown_bytes
from nmoe.referee.court import Court, Family

_MOST = 2048  # tokens of a prompt, so that the judge has them in memory

CHECKS = Family()


@CHECKS.add("lengths.long", "a long prompt is read whole")
async def long(court: Court) -> None:
    court.needs_judge()
    tokens = min(court.context - 16, _MOST)
    await court.sample(court.asked(court.prompt(tokens), n=2, max_tokens=12))


@CHECKS.add("lengths.full", "prompt and samples may fill the context to its last token")
async def full(court: Court) -> None:
    court.needs_judge()
    court.need(court.context <= _MOST, f"its context of {court.context} tokens is too long to fill")
    prompt = court.prompt(court.context - 6)
    await court.sample(court.asked(prompt, max_tokens=court.context - len(prompt)))


@CHECKS.add("lengths.beyond", "a prompt longer than the context is refused, not cut")
async def beyond(court: Court) -> None:
    court.need(court.context <= 2**17, f"its context of {court.context} tokens is too long to exceed")
    route, asked = court.served.route, court.asked()
    wrong = replace(asked, prompt=(1,) * (court.context + 5))
    got = await court.client.call("POST", route.path, route.body(wrong))
    if not 400 <= got.status < 500:
        court.note("accepted", f"status {got.status}: {shown_bytes(got.reply)}", "a status from 400 to 499", got)
    await court.sample(court.asked())
