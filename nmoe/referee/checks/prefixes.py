"""Prefix hits: a prompt that is in the server's cache, whole or in part, is answered as one that is not."""

from __future__ import annotations

from nmoe.referee.court import Court, Family

CHECKS = Family()


@CHECKS.add("prefixes.again", "a prompt that was asked before is answered rightly, from the first token on")
async def again(court: Court) -> None:
    court.needs_judge()
    prompt = court.prompt(40)
    for _ in range(3):
        await court.sample(court.asked(prompt, max_tokens=12))


@CHECKS.add("prefixes.shared", "prompts that begin alike are answered rightly")
async def shared(court: Court) -> None:
    court.needs_judge()
    prompt = court.prompt(32)
    for tail in (1, 5, 16):
        await court.sample(court.asked([*prompt, *court.prompt(tail)], max_tokens=12))


@CHECKS.add("prefixes.turns", "a later turn, whose prompt is an earlier prompt and its answer, is answered rightly")
async def turns(court: Court) -> None:
    court.needs_judge()
    prompt = list(court.prompt(14))
    for _ in range(3):
        got = await court.sample(court.asked(prompt, max_tokens=18))
        if got.choices:
            prompt += [*got.choices[0].tokens, *court.prompt(3)]


@CHECKS.add("prefixes.blocks", "prompts that just fill a block of the cache, or just do not, are answered rightly")
async def blocks(court: Court) -> None:
    court.needs_judge()
    prompt = court.prompt(34)
    for tokens in (15, 16, 17, 31, 32, 33):
        await court.sample(court.asked(prompt[:tokens], max_tokens=4))


@CHECKS.add("prefixes.salt", "a prompt is answered rightly under any salt")
async def salt(court: Court) -> None:
    court.needs_judge()
    court.needs_token_route()
    prompt = court.prompt(40)
    for one in ("a", "b", "a"):
        await court.sample(court.asked(prompt, max_tokens=8, salt=f"{court.round}{one}"))
