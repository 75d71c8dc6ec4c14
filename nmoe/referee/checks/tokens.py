"""Tokens and counts: whether a reply has the form and the tokens that were asked for."""

from __future__ import annotations

import math
from dataclasses import replace

from nmoe.referee.client import shown_bytes
from nmoe.referee.court import Court, Family
from nmoe.referee.target import Completions

CHECKS = Family()


@CHECKS.add("tokens.reply", "a request is answered in the route's form, under its own id and for its own prompt")
async def reply(court: Court) -> None:
    await court.sample(court.asked())


@CHECKS.add("tokens.count", "without a stop token a sample has exactly max_tokens tokens, and ends by length")
async def count(court: Court) -> None:
    for got in await court.samples([court.asked(max_tokens=tokens) for tokens in (1, 2, 7, 33)]):
        for choice in got.choices:
            if len(choice.tokens) != got.asked.max_tokens or choice.finish != "length":
                court.note(
                    "counts",
                    f"{len(choice.tokens)} tokens and the finish reason {choice.finish!r}",
                    f"{got.asked.max_tokens} tokens and 'length'",
                    got,
                )


@CHECKS.add("tokens.finite", "each token has a log-probability, a finite number of at most 0")
async def finite(court: Court) -> None:
    got = await court.sample(court.asked(n=2, max_tokens=24))
    for choice in got.choices:
        bad = [one for one in choice.logprobs if not math.isfinite(one) or one > 1e-6]
        if bad or len(choice.logprobs) != len(choice.tokens):
            court.note(
                "counts",
                f"{len(choice.tokens)} tokens have {len(choice.logprobs)} log-probabilities, among them {bad[:3]}",
                "one finite number of at most 0 for each token",
                got,
            )


@CHECKS.add("tokens.vocabulary", "every sampled token is below the vocabulary's size")
async def vocabulary(court: Court) -> None:
    got = await court.sample(court.asked(n=4, max_tokens=32, temperature=2.0))
    for choice in got.choices:
        if bad := [one for one in choice.tokens if not 0 <= one < court.vocabulary]:
            court.note("counts", f"the tokens {bad[:4]}", f"tokens from 0 to {court.vocabulary - 1}", got)


@CHECKS.add("tokens.refuses", "an empty prompt and max_tokens = 0 are refused, and the server goes on")
async def refuses(court: Court) -> None:
    asked, route = court.asked(), court.served.route
    wrongs = [replace(asked, prompt=()), replace(asked, max_tokens=0)]
    # Of OpenAI's route, some servers take 0 for a limit that is not set.
    for wrong in wrongs[:1] if isinstance(route, Completions) else wrongs:
        got = await court.client.call("POST", route.path, route.body(wrong))
        if not 400 <= got.status < 500:
            court.note("accepted", f"status {got.status}: {shown_bytes(got.reply)}", "a status from 400 to 499", got)
    await court.sample(court.asked())


@CHECKS.add("tokens.beyond", "a prompt with a token beyond the vocabulary is refused, and the server goes on")
async def beyond(court: Court) -> None:
    court.needs_token_route()
    court.need(court.served.engine == "nmoe", "is asked of nmoe's server alone: such a token ends a whole vLLM")
    got = await court.ask(court.asked([1, court.vocabulary]))
    if not 400 <= got.status < 500:
        court.note("accepted", f"status {got.status}", "a status from 400 to 499", got)
    await court.sample(court.asked())
