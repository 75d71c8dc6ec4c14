"""Seeds and n: a request repeats under its seed, and its samples are drawn apart."""

from __future__ import annotations

from nmoe.referee.court import Court, Family

CHECKS = Family()


@CHECKS.add("seeds.repeat", "the same request with the same seed has the same tokens")
async def repeat(court: Court) -> None:
    first = await court.samples([court.asked(n=2, max_tokens=24) for _ in range(3)])
    asked = [one.asked for one in first]
    again = await court.samples([court.asked(one.prompt, n=2, max_tokens=24, seed=one.seed) for one in asked])
    pairs = zip(first, again, strict=True)
    differ = sum([one.tokens for one in a.choices] != [one.tokens for one in b.choices] for a, b in pairs)
    # Rounding can change a token now and then.
    if differ >= 2:
        court.note(
            "seed_ignored", f"{differ} of 3 requests had other tokens the second time", "the same tokens", again[-1]
        )


@CHECKS.add("seeds.differ", "another seed has other tokens")
async def differ(court: Court) -> None:
    prompt = court.prompt()
    replies = await court.samples([court.asked(prompt, max_tokens=24, seed=seed) for seed in (11, 12, 2**31 - 1)])
    drawn = {tuple(reply.choices[0].tokens) for reply in replies if reply.choices}
    likely = any(sum(choice.logprobs) > -12 for reply in replies for choice in reply.choices)
    if len(drawn) < len(replies) and not likely:
        court.note("seed_ignored", f"3 seeds gave {len(drawn)} different samples", "3", replies[-1])


@CHECKS.add("seeds.n", "the n samples of a request have the indices from 0 on and are drawn apart")
async def samples(court: Court) -> None:
    await court.samples([court.asked(n=n, max_tokens=16) for n in (2, 5, court.random.randrange(6, 12))])


@CHECKS.add("seeds.alone", "a request's samples do not depend on its neighbours")
async def alone(court: Court) -> None:
    wanted = court.asked(n=1, max_tokens=24)
    first = await court.sample(wanted)
    again = court.asked(wanted.prompt, max_tokens=24, seed=wanted.seed)
    got, *_ = await court.samples([again, *(court.asked(n=2, max_tokens=24) for _ in range(3))])
    if first.choices and got.choices and first.choices[0].tokens[:4] != got.choices[0].tokens[:4]:
        court.note(
            "seed_ignored", f"beside others it has {got.choices[0].tokens[:4]}", f"{first.choices[0].tokens[:4]}", got
        )
