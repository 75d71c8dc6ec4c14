"""Ends: stop tokens end a sample, are part of it, and differ from a limit of its length."""

from __future__ import annotations

from nmoe.referee.court import Court, Family, together
from nmoe.referee.target import Choice, Completions, Reply

CHECKS = Family()


def _judge_end(court: Court, got: Reply, choice: Choice) -> None:
    """Notes a sample that does not end as its stop tokens and its limit say."""
    asked, tokens = got.asked, choice.tokens
    stops = [at for at, token in enumerate(tokens) if token in asked.stop]
    if stops and stops[0] < len(tokens) - 1:
        of_openai = isinstance(court.served.route, Completions)
        court.need(not of_openai, "the server does not know stop_token_ids, which are no field of OpenAI's")
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
    asked = []
    for prompt, seed, tokens in await together(*(_continued(court) for _ in range(3))):
        stop = tokens[court.random.randrange(3, 8)]
        asked.append(court.asked(prompt, max_tokens=24, seed=seed, stop=(stop,)))
    for got in await court.samples(asked):
        for choice in got.choices:
            _judge_end(court, got, choice)


@CHECKS.add("ends.several", "of several stop tokens the first that is sampled ends a sample")
async def several(court: Court) -> None:
    stops = tuple(court.random.sample(range(court.vocabulary), max(2, court.vocabulary // 8)))
    got = await court.sample(court.asked(n=12, max_tokens=24, stop=stops))
    for choice in got.choices:
        _judge_end(court, got, choice)


@CHECKS.add("ends.limit", "a stop token at the limit of a sample's length counts as a stop")
async def limit(court: Court) -> None:
    prompt, seed, tokens = await _continued(court)
    at = next((at for at in range(4, len(tokens)) if tokens[at] not in tokens[:at]), None)
    court.need(at is not None, "every token repeats an earlier one")
    assert at is not None
    got = await court.sample(court.asked(prompt, max_tokens=at + 1, seed=seed, stop=(tokens[at],)))
    for choice in got.choices:
        _judge_end(court, got, choice)


@CHECKS.add("ends.other", "stop tokens of one request do not end another's samples")
async def other(court: Court) -> None:
    prompt, seed, tokens = await _continued(court)
    await court.sample(court.asked(prompt, max_tokens=24, seed=seed, stop=(tokens[2],)))
    got = await court.sample(court.asked(prompt, max_tokens=24, seed=seed))
    for choice in got.choices:
        _judge_end(court, got, choice)


@CHECKS.add("ends.text", "a text ends by 'stop' before the first of its stop strings")
async def text(court: Court) -> None:
    court.need(isinstance(court.served.route, Completions), "needs a route of texts, which this server does not speak")
    asked = court.asked(max_tokens=48)
    got = await court.sample(asked)
    whole = (got.choices[0].text if got.choices else None) or ""
    parts = [whole[at : at + 2] for at in range(len(whole) // 4, len(whole) - 2)]
    until = next((part for part in parts if part.isascii() and part.isprintable()), None)
    court.need(until is not None, "the text has no two letters to end it with")
    assert until is not None
    right = whole[: whole.index(until)]
    got = await court.sample(court.asked(asked.prompt, max_tokens=48, seed=asked.seed, until=(until,)))
    for choice in got.choices:
        given = choice.text or ""
        # Rounding can change a token now and then, and the text after it.
        if until in given or (given != right and whole.startswith(given)):
            court.note("end_ignored", f"the text ends with {given[-12:]!r}", f"{right[-12:]!r}, before {until!r}", got)
        elif given == right and choice.finish != "stop":
            court.note("end_ignored", f"it ends before its stop string, and by {choice.finish!r}", "'stop'", got)
