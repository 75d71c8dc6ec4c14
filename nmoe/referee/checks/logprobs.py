"""Log-probabilities: whether they are of the distribution that the tokens were drawn from, by the checkpoint's own forward."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from nmoe.referee.court import Court, Family
from nmoe.referee.diagnosis import ROUGH, TOLERANCE, Rounding
from nmoe.referee.judge import ROUGH_STEPS, Seen, kept_counts

# Of a normal deviate: chance exceeds it once in 500 million rounds.
_DEVIATES = 6.0

CHECKS = Family()


@CHECKS.add("logprobs.plain", "at temperature 1 a token's log-probability is the model's")
async def plain(court: Court) -> None:
    court.needs_judge()
    await court.samples([court.asked(court.prompt(tokens), n=3, max_tokens=24) for tokens in (1, 5, 30)])


@CHECKS.add("logprobs.temperature", "at another temperature it comes from the scaled logits")
async def temperature(court: Court) -> None:
    court.needs_judge()
    values = (0.6, round(court.random.uniform(0.4, 0.9), 2), round(court.random.uniform(1.2, 2.0), 2))
    await court.samples([court.asked(n=2, max_tokens=24, temperature=value) for value in values])


@CHECKS.add("logprobs.top_k", "with top_k it is of the k likeliest tokens")
async def top_k(court: Court) -> None:
    court.needs_judge()
    counts = (1, 3, court.random.randrange(4, 12))
    await court.samples([court.asked(n=2, max_tokens=20, top_k=count) for count in counts])


@CHECKS.add("logprobs.top_p", "with top_p it is of the likeliest tokens that reach this mass")
async def top_p(court: Court) -> None:
    court.needs_judge()
    masses = (0.5, round(court.random.uniform(0.6, 0.95), 2))
    await court.samples([court.asked(n=2, max_tokens=20, top_p=mass) for mass in masses])


@CHECKS.add(
    "logprobs.both",
    "with temperature, top_k and top_p it is of what top_p leaves of the k likeliest, at this temperature",
)
async def both(court: Court) -> None:
    court.needs_judge()
    k, p = court.random.randrange(4, 10), round(court.random.uniform(0.5, 0.9), 2)
    await court.sample(court.asked(n=3, max_tokens=20, top_k=k, top_p=p, temperature=0.8))


@CHECKS.add(
    "logprobs.min_p", "with min_p it is of the tokens with at least this share of the likeliest one's probability"
)
async def min_p(court: Court) -> None:
    court.needs_judge()
    await court.sample(court.asked(n=3, max_tokens=20, min_p=round(court.random.uniform(0.1, 0.5), 2)))


@CHECKS.add("logprobs.greedy", "at temperature 0 every token is the likeliest one")
async def greedy(court: Court) -> None:
    court.needs_judge()
    await court.sample(court.asked(max_tokens=24, temperature=0.0))


@CHECKS.add("logprobs.kept", "the kept ids of a token are those that top_k and top_p leave, itself among them")
async def kept(court: Court) -> None:
    judge = court.judge
    asked = court.asked(n=2, max_tokens=20, top_k=court.random.randrange(5, 12), top_p=0.9)
    got = await court.sample(asked)
    court.need(any(choice.kept is not None for choice in got.choices), "the server gives no kept ids")
    seen = [Seen(asked, choice) for choice in got.choices]
    diagnosis = court.diagnosis
    assert diagnosis is not None
    if diagnosis.wrong(seen, diagnosis.right(seen)):
        return  # the comparison at the end names it
    for choice, logits_nV in zip(got.choices, judge.logits(seen), strict=True):
        counts_n, order_nV, near_n = kept_counts(logits_nV, asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        for at, (count, order, near) in enumerate(
            zip(counts_n.tolist(), order_nV.tolist(), near_n.tolist(), strict=True)
        ):
            given = set((choice.kept or [])[at]) if at < len(choice.kept or []) else set()
            options = [set(order[: count + step]) for step in ((-1, 0, 1) if near else (0,))]
            # In half precision rounding changes the order of some.
            if given not in options and (diagnosis.exact or len(given ^ options[0]) > ROUGH_STEPS):
                court.fault(
                    "other_kept_set",
                    f"token {at} has the kept ids {sorted(given)[:12]}",
                    f"the {count} ids {sorted(order[:count])[:12]}",
                    got,
                    exact=True,
                )


@CHECKS.add("logprobs.routes", "the routes are the experts that the routers of the checkpoint choose")
async def routes(court: Court) -> None:
    judge = court.judge
    court.need(bool(judge.model.config.moe_layers), "the model has no experts")
    asked = court.asked(court.prompt(20), max_tokens=24)
    got = await court.sample(asked)
    (choice,) = got.choices
    court.need(choice.routes is not None, "the server gives no routes")
    own = judge.routes(Seen(asked, choice))
    assert own is not None, "the model has experts"
    if tuple(choice.routes.shape) != tuple(own.shape):
        court.fault(
            "counts",
            f"routes of shape {list(choice.routes.shape)}",
            f"{list(own.shape)}: positions, layers, experts",
            got,
        )
    theirs = torch.from_numpy(choice.routes).sort(-1).values
    differ = int((theirs != own.sort(-1).values).any(-1).sum())
    # A near tie can be rounded otherwise; what follows it then differs, too. In half precision many are near.
    assert court.diagnosis is not None, "there is a judge"
    if differ > (2 if court.diagnosis.exact else own[..., 0].numel() // 4):
        court.note(
            "wrong_routes", f"{differ} of {own[..., 0].numel()} choices differ", "the experts of the routers", got
        )


@CHECKS.add("logprobs.drawn", "tokens are drawn by the log-probabilities that are given, not by other ones")
async def drawn(court: Court) -> None:
    judge = court.judge
    settings: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "top_k": 8})
    for got in await court.samples([court.asked(n=16, max_tokens=24, **one) for one in settings]):
        asked = got.asked
        seen = [Seen(asked, choice) for choice in got.choices if choice.tokens]
        surprise = variance = 0.0
        for one, logits_nV in zip(seen, judge.logits(seen), strict=True):
            counts_n, order_nV, _ = kept_counts(logits_nV, asked.temperature, asked.top_k, 1.0, 0.0)
            scaled_nV = (logits_nV / asked.temperature).gather(-1, order_nV)
            scaled_nV = scaled_nV.masked_fill(torch.arange(scaled_nV.shape[-1]) >= counts_n[:, None], float("-inf"))
            log_nV = scaled_nV.log_softmax(-1)
            probs_nV, log_nV = log_nV.exp(), log_nV.masked_fill(log_nV.isinf(), 0.0)
            mean_n = (probs_nV * log_nV).sum(-1)
            of_tokens = [order.index(token) for order, token in zip(order_nV.tolist(), one.choice.tokens, strict=True)]
            surprise += float((log_nV.gather(-1, torch.tensor(of_tokens)[:, None]).squeeze(-1) - mean_n).sum())
            variance += float(((probs_nV * log_nV.square()).sum(-1) - mean_n.square()).sum())
        deviates = surprise / math.sqrt(max(variance, 1e-9))
        if abs(deviates) > _DEVIATES:
            colder = "colder" if deviates > 0 else "hotter"
            court.note(
                "sampled_otherwise",
                f"the tokens are likelier or rarer than chance allows, by {deviates:.1f} standard deviations: drawn {colder}",
                f"at most {_DEVIATES:g}",
                got,
            )


@CHECKS.add("logprobs.stream", "a stream has the tokens and log-probabilities of the whole reply")
async def stream(court: Court) -> None:
    court.needs_streams()
    asked = court.asked(n=2, max_tokens=20)
    whole = await court.sample(asked)
    other = court.asked(asked.prompt, n=2, max_tokens=20, seed=asked.seed, stream=True)
    streamed = await court.sample(other)
    order = sorted(whole.choices, key=lambda choice: choice.index)
    for one, two in zip(order, streamed.choices, strict=True):
        if len(one.tokens) != len(two.tokens):
            court.note(
                "counts", f"{len(two.tokens)} streamed tokens", f"{len(one.tokens)}, as in the whole reply", streamed
            )
        # Rounding can change a token now and then, and those after it.
        if one.tokens[:4] != two.tokens[:4]:
            court.note("seed_ignored", f"the stream begins with {two.tokens[:4]}", f"{one.tokens[:4]}", streamed)
        rounding = (
            Rounding.of(TOLERANCE if court.served.precision == "float32" else ROUGH, steady=False)
            if court.diagnosis is None
            else court.diagnosis.rounding(Seen(other, two))
        )
        same = itertools.takewhile(
            lambda pairs: pairs[0][0] == pairs[1][0],
            zip(zip(one.tokens, one.logprobs, strict=False), zip(two.tokens, two.logprobs, strict=False), strict=False),
        )
        off = [abs(first[1] - second[1]) for first, second in same]
        if not rounding.explains(torch.tensor(off, dtype=torch.float64)):
            court.note(
                "unexplained",
                f"log-probabilities of the stream differ from the whole reply's by up to {max(off):.3g}",
                str(rounding),
                streamed,
            )
        if one.finish != two.finish:
            court.note("malformed", f"the stream ends by {two.finish!r}", f"{one.finish!r}", streamed)
