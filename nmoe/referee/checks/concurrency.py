"""Concurrency: each of many requests gets its own answer."""

from __future__ import annotations

import asyncio

from nmoe.referee.court import Court, Family, together

CHECKS = Family()


@CHECKS.add("concurrency.own", "each of 24 requests at once gets the answer to its own prompt")
async def own(court: Court) -> None:
    court.needs_judge()
    asked = [court.asked(court.prompt(court.random.randrange(1, 24)), max_tokens=12) for _ in range(24)]
    await court.samples(asked)


@CHECKS.add("concurrency.mixed", "requests at once keep their own temperature, truncation, seed and length")
async def mixed(court: Court) -> None:
    draw = court.random
    asked = [
        court.asked(
            court.prompt(draw.randrange(1, 24)),
            max_tokens=draw.randrange(2, 24),
            n=draw.randrange(1, 4),
            temperature=draw.choice((0.5, 0.8, 1.0, 1.5)),
            top_k=draw.choice((0, 0, 4, 9)),
            top_p=draw.choice((1.0, 1.0, 0.8)),
        )
        for _ in range(16)
    ]
    replies = await court.samples(asked)
    for one, got in zip(asked, replies, strict=True):
        for choice in got.choices:
            if len(choice.tokens) != one.max_tokens:
                court.note("counts", f"{len(choice.tokens)} tokens", f"{one.max_tokens}", got)


@CHECKS.add("concurrency.same", "requests at once for one prompt, with a seed each, are drawn apart")
async def same(court: Court) -> None:
    prompt = court.prompt(20)
    replies = await court.samples([court.asked(prompt, max_tokens=20) for _ in range(8)])
    drawn = [tuple(choice.tokens) for got in replies for choice in got.choices]
    likely = any(sum(choice.logprobs) > -12 for got in replies for choice in got.choices)
    if len(set(drawn)) < len(drawn) and not likely:
        court.note(
            "duplicated_answer",
            f"{len(drawn)} requests have {len(set(drawn))} different answers",
            f"{len(drawn)}",
            replies[-1],
        )


@CHECKS.add("concurrency.waves", "requests that come while others run get their own answers")
async def waves(court: Court) -> None:
    court.needs_judge()

    async def later(number: int) -> None:
        await asyncio.sleep(0.004 * number)
        await court.sample(court.asked(court.prompt(8 + number), max_tokens=20))

    await together(*(later(number) for number in range(12)))
