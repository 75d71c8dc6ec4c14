"""Publishes: after each of them the server samples by exactly the weights that were sent, and says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch

from nmoe.engine.remote.weights import Update
from nmoe.referee.client import Exchange, shown_bytes
from nmoe.referee.court import Court, Family, together
from nmoe.referee.diagnosis import differences
from nmoe.referee.judge import Seen, Stale, Weights, right_logprobs
from nmoe.referee.publishing import Press
from nmoe.referee.target import Reply

# Prompts that are in the server's cache when weights are published: two blocks of 16 and a half.
_CACHED = 40
# Samples and tokens of requests that a publication meets: longer ones where the shorter have ended before.
_IN_FLIGHT = ((3, 80), (3, 400), (12, 600), (48, 600))

CHECKS = Family()


def _press(court: Court) -> Press:
    court.needs_judge()
    court.needs_token_route()
    if court.press is None:
        court.need(False, "needs --publish, which changes the server's weights for a while")
    assert court.press is not None
    return court.press


def _taken(court: Court, done: list[Exchange]) -> None:
    last = done[-1]
    court.need(last.status not in (404, 405), f"the server takes no weights: {last.path} has status {last.status}")
    if last.status != 200:
        court.fault(
            "unpublished", f"{last.path} has status {last.status}: {shown_bytes(last.reply)}", "status 200", last
        )


async def _publish(court: Court, weights: Weights) -> None:
    """Publishes weights, which are the right ones from then on."""
    press, judge = _press(court), court.judge
    update = press.ready(weights)
    try:
        _taken(court, await press.send(update))
    finally:
        update.discard()
    judge.before, judge.present = judge.present, weights


async def _cached(court: Court, prompts: int = 4) -> list[tuple[int, ...]]:
    """Has the server compute prompts, and returns them."""
    if _press(court).refused:
        await _publish(court, court.judge.present)
    found, salt = [court.prompt(_CACHED) for _ in range(prompts)], f"{court.round}-{_press(court).version}"
    await court.samples([court.asked(prompt, max_tokens=2, salt=salt) for prompt in found], compare=False)
    return found


async def _agrees(court: Court, cached: list[tuple[int, ...]]) -> None:
    """Samples by the present weights: prompts from before the publication, then new ones that reach all experts."""
    press = _press(court)
    salt = f"{court.round}-{press.version}"
    asked = [court.asked(one, n=2, max_tokens=10, salt=salt) for one in cached]
    asked += [court.asked(court.prompt(6), n=6, max_tokens=16, salt=salt) for _ in range(4)]
    old = [len(one) - 1 for one in cached] + [0] * 4
    for got in await together(*(court.sample(one, old=first) for one, first in zip(asked, old, strict=True))):
        _says_version(court, got, str(press.version))


def _says_version(court: Court, got: Reply, version: str) -> None:
    for choice in got.choices:
        if choice.spans is not None and set(choice.versions()) - {version}:
            court.note(
                "wrong_version_span",
                f"tokens that the weights of version {version} sampled have the versions {sorted(set(choice.versions()))}",
                f"{version} for every token",
                got,
                exact=True,
            )
            return


@CHECKS.add(
    "publishes.full",
    "after a publication tokens are sampled by the new weights, and by nothing of the old ones",
    factor=3,
)
async def full(court: Court) -> None:
    press = _press(court)
    for _ in range(2):
        cached = await _cached(court)
        await _publish(court, press.drawn(court.random.randrange(2**31)))
        await _agrees(court, cached)
        court.compare(court.history)
        court.seen.clear()
        if any(finding.exact for finding in court.findings):
            return


@CHECKS.add("publishes.prefix", "prompts from before a publication are read again by the new weights", factor=3)
async def prefix(court: Court) -> None:
    press = _press(court)
    await _cached(court, 1)
    turn = await court.sample(court.asked(court.prompt(24), max_tokens=20), compare=False)
    await _publish(court, press.drawn(court.random.randrange(2**31)))
    tokens = turn.choices[0].tokens if turn.choices else []
    prompt = [*turn.asked.prompt, *tokens, *court.prompt(3)]
    salt = f"{court.round}-{press.version}"
    await court.sample(court.asked(prompt, n=2, max_tokens=12, salt=salt), old=len(turn.asked.prompt) + len(tokens) - 1)


@CHECKS.add("publishes.said", "the server says the version that was published")
async def said(court: Court) -> None:
    press = _press(court)
    await _publish(court, press.drawn(court.random.randrange(2**31)))
    path = "/model_info" if press.sglang else "/weight_info"
    got = await court.client.call("GET", path)
    court.need(got.status == 200, f"the server has no {path}")
    if str(got.value("weight_version")) != str(press.version):
        court.note("wrong_version_span", shown_bytes(got.reply), f"version {press.version}", got, exact=True)


async def _refused(court: Court, update: Update, fault: str, what: str) -> None:
    """Sends an update that has to be refused; then the server samples by the weights that it had, or not at all until it has whole
    ones."""
    press = _press(court)
    try:
        done = await press.send(update)
    finally:
        update.discard()
    court.need(done[-1].status not in (404, 405), "the server takes no weights")
    if done[-1].status == 200:
        court.note(fault, f"{what} was accepted as version {update.version}", "a refusal", done[-2], exact=True)
        await _publish(court, court.judge.present)
        return
    got = await court.ask(court.asked(n=4, max_tokens=16, salt=f"{court.round}-{what}"))
    if got.status == 200:
        _needs_right_weights(court)
        court.watch(got)
    elif not 400 <= got.status < 600:
        court.note("malformed", f"status {got.status}", "an answer or a refusal", got)


def _digesting(court: Court) -> Press:
    press = _press(court)
    court.need(not press.sglang, "SGLang takes files without digests or names, and cannot know that they are whole")
    return press


@CHECKS.add("publishes.torn", "a tensor that arrives torn is refused", factor=3)
async def torn(court: Court) -> None:
    press, judge = _digesting(court), court.judge
    new = press.drawn(court.random.randrange(2**31))
    whole = press.ready(new)
    whole.discard()
    moved = [name for name in new if new[name] is not judge.present[name]]
    name = court.random.choice(moved)
    flat = new[name].flatten().clone()
    half = max(1, flat.numel() // 2)
    flat[half:] = judge.present[name].flatten()[half:]
    update = press.ready(dict(new) | {name: flat.view_as(new[name])})
    update.info["digests"] = whole.info["digests"]
    await _refused(court, update, "torn_update", f"an update whose {name} is torn")


@CHECKS.add("publishes.partial", "an update that lacks a tensor is refused", factor=3)
async def partial(court: Court) -> None:
    press = _digesting(court)
    court.need(press.transport == "disk", "an adapter's tensors come in one file")
    new = press.drawn(court.random.randrange(2**31))
    number = court.random.randrange(2, 8)
    await _refused(court, press.ready(new, {number}), "partial_update", f"an update without tensor {number}")


@CHECKS.add("publishes.empty", "an update without any tensor is refused", factor=3)
async def empty(court: Court) -> None:
    press = _digesting(court)
    update = press.ready(court.judge.present)
    update.info["names"], update.info["digests"] = [], []
    await _refused(court, update, "partial_update", "an update without any name")


@CHECKS.add("publishes.healed", "a whole update after refused ones makes the server right again", factor=3)
async def healed(court: Court) -> None:
    press = _digesting(court)
    if not press.refused:
        update = press.ready(court.judge.present)
        update.info["names"], update.info["digests"] = [], []
        update.discard()
        await press.send(update)
    await _publish(court, press.drawn(court.random.randrange(2**31)))
    await _agrees(court, [])


@CHECKS.add(
    "publishes.flight",
    "tokens of a request that runs across a publication have the version of the weights that sampled them",
    factor=3,
)
async def flight(court: Court) -> None:
    for n, tokens in _IN_FLIGHT:
        if await _across(court, n, tokens, paused=False):
            return
    court.need(False, "every request ended before the publication, however long")


@CHECKS.add(
    "publishes.paused",
    "a publication to a paused server holds for the requests that go on after it",
    factor=3,
)
async def paused(court: Court) -> None:
    for n, tokens in _IN_FLIGHT:
        if await _across(court, n, tokens, paused=True):
            return
    court.need(False, "every request ended before the pause, however long")


def _needs_right_weights(court: Court) -> None:
    """Raises SkippedError where an earlier publication did not arrive whole: a later one cannot be judged then."""
    assert court.diagnosis is not None, "there is a judge"
    court.need(not court.diagnosis.misled, "an earlier check found that publications do not arrive whole")


async def _across(court: Court, n: int, tokens: int, paused: bool) -> bool:
    """Publishes while a request runs; returns whether it ran across the publication."""
    press, judge = _press(court), court.judge
    _needs_right_weights(court)
    weights = press.drawn(court.random.randrange(2**31))
    if press.refused:
        await _publish(court, judge.present)
    update = press.ready(weights)
    asked = court.asked(court.prompt(10), n=n, max_tokens=tokens)
    task = asyncio.create_task(court.sample(asked, compare=False))
    old = str(press.version)
    try:
        await asyncio.sleep(0.03)
        if paused:
            got = await press.pause()
            court.need(got.status == 200, f"the server cannot be paused: status {got.status}")
        _taken(court, await press.send(update))
        judge.before, judge.present = judge.present, weights
        if paused:
            await press.resume()
        got_reply = await task
    finally:
        update.discard()
        task.cancel()
    crossed = False
    for choice in got_reply.choices[:3]:
        if len(choice.logprobs) != len(choice.tokens) or not choice.tokens:
            court.note(
                "counts", f"{len(choice.tokens)} tokens, {len(choice.logprobs)} log-probabilities", "as many", got_reply
            )
            continue
        crossed |= _judge_span(court, got_reply, Seen(asked, choice), old, str(press.version))
    return crossed


def _judge_span(court: Court, got: Reply, one: Seen, old: str, new: str) -> bool:
    """Compares a sample that may run across a publication; returns whether it does."""
    judge, diagnosis = court.judge, court.diagnosis
    assert diagnosis is not None, "there is a judge"
    assert judge.before is not None, "weights were published"
    versions = one.choice.versions()
    said = next((at for at, version in enumerate(versions) if version != old), len(versions))
    before_n = right_logprobs(one, judge.logits([one], judge.before)[0])
    again_n = right_logprobs(one, judge.logits([one])[0])
    rounding, layers = diagnosis.rounding(one), range(judge.attention_layers)
    old_n = differences([one], [before_n])

    def best(after_n: torch.Tensor) -> int:
        """Returns the number of old tokens by which all differ least."""
        old_1n, new_1n = (
            torch.cat([off_n.new_zeros(1), off_n.clamp_max(5.0).cumsum(0)])
            for off_n in (old_n, differences([one], [after_n]))
        )
        return int((old_1n - new_1n).argmin())

    def apart(at: int, after_n: torch.Tensor) -> bool:
        """Returns whether the first `at` tokens are of the old weights, and no others."""
        off_n, other = torch.cat([old_n[:at], differences([one], [after_n])[at:]]), best(after_n)
        # The mean of a whole part hides that a few of its tokens belong to the other one.
        parts = (off_n[:at], off_n[at:], off_n[min(at, other) : max(at, other)])
        return all(rounding.explains(part) for part in parts)

    def kept(at: int, keys: bool = True, values: bool = True) -> torch.Tensor:
        """Returns the log-probabilities of a server whose running requests keep their keys."""
        stale = Stale(judge.before or {}, layers if keys else (), layers if values else ())
        held = replace(one, old=len(one.asked.prompt) + at - 1)
        return right_logprobs(held, judge.logits([held], stale=stale)[0])

    def fits(at: int) -> bool:
        return apart(at, again_n) or (judge.takes_stale and 0 < at < len(versions) and apart(at, kept(at)))

    has_spans = one.choice.spans is not None
    if has_spans and fits(said):
        if set(versions) - {old, new} or versions != sorted(versions, key=lambda version: version != old):
            court.note(
                "wrong_version_span", f"the versions {sorted(set(versions))}", f"{old}, then {new}", got, exact=True
            )
        return 0 < said < len(versions)
    # Where rounding is large, more than one number fits.
    first = said if diagnosis.exact else best(again_n)
    nearest = sorted(range(len(versions) + 1), key=lambda at: abs(at - first))
    true = next((at for at in nearest if apart(at, again_n)), None)
    if true is None and judge.takes_stale:
        true = next((at for at in nearest[:17] if fits(at)), None)
    if true is not None:
        if has_spans:
            court.note(
                "wrong_version_span",
                f"the first {said} of {len(versions)} tokens are said to be of version {old}, then {sorted(set(versions[said:]))}",
                f"{'' if diagnosis.exact else 'about '}the first {true}: they are of the old weights, and no others",
                got,
                exact=True,
            )
        return True
    for keys, values, fault in ((True, False, "stale_keys"), (False, True, "stale_values")):
        if judge.takes_stale and 0 < said < len(versions) and apart(said, kept(said, keys, values)):
            court.note(
                fault, "the tokens after the publication fit it", "keys and values of one version", got, exact=True
            )
            return True
    if any(finding.fault == "unexplained" for finding in court.findings):
        return True
    worst = float(differences([one], [torch.cat([before_n[:said], again_n[said:]])]).max())
    court.note(
        "unexplained",
        f"log-probabilities differ by up to {worst:.3g} from the old weights' and then the new ones', at any token",
        str(rounding),
        got,
    )
    return True


@CHECKS.add(
    "publishes.asleep",
    "weights that come while the server sleeps are refused, or are there when it wakes",
    factor=3,
)
async def asleep(court: Court) -> None:
    press = _press(court)
    got = await court.client.call("POST", "/sleep?level=1", {})
    court.need(got.status == 200, "the server has no sleep")
    try:
        state = await court.client.call("GET", "/is_sleeping")
        court.need(b"true" in state.reply, "the server does not sleep, though it says so")
        weights = press.drawn(court.random.randrange(2**31))
        update = press.ready(weights)
        done = await press.send(update)
        update.discard()
    finally:
        await court.client.call("POST", "/wake_up", {})
    if done[-1].status == 200:
        court.judge.before, court.judge.present = court.judge.present, weights
        await _agrees(court, [])


@CHECKS.add("publishes.back", "the first weights, published again, sample what they sampled at first", factor=3)
async def back(court: Court) -> None:
    _press(court)
    cached = await _cached(court, 2)
    await _publish(court, court.judge.first)
    await _agrees(court, cached)
