"""Ends: stop tokens end a sample, are part of it, and differ from a limit of its length."""

from __future__ import annotations

from nmoe.referee.court import Court, Family, together
from nmoe.referee.target import Choice, Reply

CHECKS = Family()


def _judge_end(court: Court, got: Reply, choice: Choice) -> None:
    """Notes a sample that does not end as its stop tokens and its limit say."""
    asked, tokens = got.asked, choice.tokens
    stops = [at for at, token in enumerate(tokens) if token in asked.stop]
    if stops and stops[0] < len(tokens) - 1:
        court.note(
            "end_ignored",
            f"the stop token {tokens[stops[0]]} is token {stops[0]} of {len(tokens)}",
            "a sample that ends with the first stop token",
            got,
        )
    elif stops and choice.finish != "stop":
        court.note("end_ignored", f"it ends with a stop token, and by {choice.finish!r}", "'stop'", got)
    elif not stops and choice.finish == "stop":
        court.note(
            "missing_end",
            f"it ends by 'stop' after {tokens[-3:]}, without one of the stop tokens {list(asked.stop)}",
            "the stop token as its last token",
            got,
            exact=True,
        )
    elif not stops and len(tokens) != asked.max_tokens:
        court.note("counts", f"{len(tokens)} tokens and {choice.finish!r}", f"{asked.max_tokens} tokens", got)


async def _continued(court: Court) -> tuple[tuple[int, ...], int, list[int]]:
    """Returns a prompt, a seed, and the tokens sampled without a stop token."""
    asked = court.asked(max_tokens=24)
    got = await court.sample(asked)
    tokens = got.choices[0].tokens if got.choices else []
    court.need(len(tokens) >= 8, "too few tokens to choose a stop token from")
    return asked.prompt, asked.seed, tokens


@CHECKS.add("ends.one", "a stop token ends a sample by 'stop', and is its last token")
async def one(court: Court) -> None:
    court.needs_token_route()
    asked = []
    for prompt, seed, tokens in await together(*(_continued(court) for _ in range(3))):
        stop = tokens[court.random.randrange(3, 8)]
        asked.append(court.asked(prompt, max_tokens=24, seed=seed, stop=(stop,)))
    for got in await court.samples(asked):
        for choice in got.choices:
            _judge_end(court, got, choice)


@CHECKS.add("ends.several", "of several stop tokens the first that is sampled ends a sample")
async def several(court: Court) -> None:
    court.needs_token_route()
    stops = tuple(court.random.sample(range(court.vocabulary), max(2, court.vocabulary // 8)))
    got = await court.sample(court.asked(n=12, max_tokens=24, stop=stops))
    for choice in got.choices:
        _judge_end(court, got, choice)


@CHECKS.add("ends.limit", "a stop token at the limit of a sample's length counts as a stop")
async def limit(court: Court) -> None:
    court.needs_token_route()
    prompt, seed, tokens = await _continued(court)
    at = next((at for at in range(4, len(tokens)) if tokens[at] not in tokens[:at]), None)
    court.need(at is not None, "every token repeats an earlier one")
    assert at is not None
    got = await court.sample(court.asked(prompt, max_tokens=at + 1, seed=seed, stop=(tokens[at],)))
    for choice in got.choices:
        _judge_end(court, got, choice)


@CHECKS.add("ends.other", "stop tokens of one request do not end another's samples")
async def other(court: Court) -> None:
    court.needs_token_route()
    prompt, seed, tokens = await _continued(court)
    await court.sample(court.asked(prompt, max_tokens=24, seed=seed, stop=(tokens[2],)))
    got = await court.sample(court.asked(prompt, max_tokens=24, seed=seed))
    for choice in got.choices:
        _judge_end(court, got, choice)
