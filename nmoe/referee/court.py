"""What checks have in hand: requests to the server, and the comparison of all that they saw with the judge."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nmoe.referee.client import Client, Exchange, plain, shown_bytes
from nmoe.referee.diagnosis import Diagnosis, differences, theirs
from nmoe.referee.judge import Judge, Seen
from nmoe.referee.target import Asked, Completions, MalformedError, Reply, Served, TokenRoute

if TYPE_CHECKING:
    from nmoe.referee.publishing import Press

_HISTORY = 48


class SkippedError(Exception):
    """A check cannot be made of this server; the message says why."""


@dataclass
class Finding:
    """A fault that a check found. `exact` says that the fault explains the samples exactly. `exchanges` show it."""

    fault: str
    seen: str
    right: str
    exact: bool = False
    exchanges: Sequence[Exchange] = ()
    expected: Sequence[float] = ()

    def __post_init__(self) -> None:
        # Most of these texts quote the server.
        self.seen, self.right = plain(self.seen), plain(self.right)


class FaultError(Exception):
    """Ends a check with a finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.seen)
        self.finding = finding


class Repeats:
    """Whether samples repeat earlier ones more often than chance does, over a round: a test of odds (Ville's inequality), which a
    right server fails once in a hundred million rounds."""

    _ODDS = (20.0, 1e3, 1e6, 1e10)
    _MOST = math.log(3e8)

    def __init__(self) -> None:
        self._scores = [0.0] * len(self._ODDS)

    def add(self, repeats: bool, chance: float) -> bool:
        """Counts a sample that repeats an earlier one, which it does by this chance, or does not. Returns whether it is one too
        many."""
        for number, odds in enumerate(self._ODDS):
            self._scores[number] += repeats * math.log(odds) - math.log1p((odds - 1) * chance)
        return repeats and max(self._scores) > self._MOST


@dataclass
class Court:
    """One check's means. `random` is its own, drawn from the round's seed."""

    client: Client
    served: Served
    diagnosis: Diagnosis | None
    press: Press | None
    random: random.Random
    round: str
    findings: list[Finding] = field(default_factory=list)
    seen: list[tuple[Seen, Reply]] = field(default_factory=list)
    history: deque[Seen] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    repeats: Repeats = field(default_factory=Repeats)
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def judge(self) -> Judge:
        """Raises SkippedError without a checkpoint."""
        if self.diagnosis is None:
            raise SkippedError("needs --checkpoint: nothing to compare with")
        return self.diagnosis.judge

    def needs_judge(self) -> None:
        """Raises SkippedError without a checkpoint."""
        _ = self.judge

    def need(self, feature: bool, why: str) -> None:
        if not feature:
            raise SkippedError(why)

    @property
    def vocabulary(self) -> int:
        if self.served.vocab_size is None:
            raise SkippedError("neither the server nor a --checkpoint says the vocabulary")
        return self.served.vocab_size

    @property
    def context(self) -> int:
        if self.served.context_tokens is None:
            raise SkippedError("neither the server nor a --checkpoint says the context")
        return self.served.context_tokens

    def needs_token_route(self) -> None:
        self.need(
            not isinstance(self.served.route, Completions), "needs the token route, which this server does not speak"
        )

    def needs_streams(self) -> None:
        known = isinstance(self.served.route, TokenRoute | Completions)
        self.need(known, "needs streams of the token route or of OpenAI's, which this server does not speak")
        self.need(self.served.engine != "nmoe" or "stream" in self.served.features, "the server has no streams")

    def prompt(self, tokens: int = 12) -> tuple[int, ...]:
        return tuple(self.random.randrange(self.vocabulary) for _ in range(min(tokens, max(1, self.context - 4))))

    def asked(self, prompt: Any = None, **settings: Any) -> Asked:
        """Returns a request with a new seed and id."""
        number = next(self._numbers)
        prompt = self.prompt() if prompt is None else tuple(prompt)
        room = self.context - len(prompt)
        tokens = max(1, min(settings.pop("max_tokens", 16), room))
        settings.setdefault("seed", self.random.randrange(2**31))
        return Asked(tuple(prompt), max_tokens=tokens, request_id=f"{self.round}-{number}", **settings)

    async def ask(self, asked: Asked, deadline_s: float | None = None) -> Reply:
        """Returns a reply of any status; one of 200 is read."""
        route = self.served.route
        exchange = await self.client.call("POST", route.path, route.body(asked), deadline_s)
        if exchange.status != 200:
            return Reply(asked, exchange)
        try:
            reply = route.read_stream(asked, exchange) if asked.stream else route.read(asked, exchange)
        except MalformedError as error:
            raise FaultError(
                Finding("malformed", str(error), f"a reply of {route.name}", exchanges=[error.exchange])
            ) from None
        self._check_numbers(reply)
        return reply

    async def sample(
        self, asked: Asked, *, old: int = 0, compare: bool = True, deadline_s: float | None = None
    ) -> Reply:
        """Returns the reply to a request that has to be answered. Its samples are compared with the judge when the check ends, if
        `compare`. `old` is how many of the prompt's tokens were in a cache before the last publication."""
        reply = await self.ask(asked, deadline_s)
        if reply.status != 200:
            self.fault("refused", f"status {reply.status}: {shown_bytes(reply.exchange.reply)}", "status 200", reply)
        self._check_own(reply)
        if compare:
            self.watch(reply, old)
        return reply

    async def samples(self, asked: Sequence[Asked], *, old: int = 0, compare: bool = True) -> list[Reply]:
        """Returns the replies to requests at once."""
        return await together(*(self.sample(one, old=old, compare=compare) for one in asked))

    def watch(self, reply: Reply, old: int = 0) -> None:
        """Has the samples of a reply compared with the judge."""
        raw = self.served.route.raw
        for choice in reply.choices:
            # Counts that do not fit would make every comparison fail: they are a separate fault.
            if len(choice.logprobs) != len(choice.tokens):
                self.note(
                    "counts",
                    f"{len(choice.tokens)} tokens ({choice.tokens[:6]}...) and {len(choice.logprobs)} log-probabilities",
                    "one log-probability for each token",
                    reply,
                )
                continue
            self.seen.append((Seen(reply.asked, choice, old, raw), reply))
        self.history.append(Seen(reply.asked, reply.choices[0] if reply.choices else None, 0, raw))  # type: ignore[arg-type]

    def _check_numbers(self, reply: Reply) -> None:
        """Notes tokens and routes that the model has not, which would end the judge's forward pass: such tokens end the check, and
        such routes are taken for none."""
        for choice in reply.choices:
            if bad := [one for one in choice.tokens if not 0 <= one < self.vocabulary]:
                self.fault("counts", f"the tokens {bad[:4]}", f"tokens from 0 to {self.vocabulary - 1}", reply)
            if choice.routes is not None and self.diagnosis is not None:
                config = self.judge.model.config
                wanted = (len(config.moe_layers), config.experts_per_token)
                shape = choice.routes.shape
                least, most = int(choice.routes.min(initial=0)), int(choice.routes.max(initial=0))
                if len(shape) != 3 or shape[1:] != wanted or least < 0 or most >= config.experts:
                    self.note(
                        "counts",
                        f"routes of shape {list(shape)}, with experts from {least} to {most}",
                        f"for each position {wanted[0]} layers of {wanted[1]} of {config.experts} experts",
                        reply,
                    )
                    choice.routes = None

    def _check_own(self, reply: Reply) -> None:
        """Notes a reply that names another request or prompt, or that has not the samples asked for."""
        asked = reply.asked
        if reply.named is not None and reply.named != asked.request_id:
            self.fault(
                "late_answer",
                f"the reply names request {reply.named!r}",
                f"request {asked.request_id!r}",
                reply,
                exact=True,
            )
        if reply.prompt is not None and reply.prompt != list(asked.prompt):
            self.fault("late_answer", "the reply names another prompt", "the prompt of the request", reply, exact=True)
        indices = [choice.index for choice in reply.choices]
        if len(indices) > asked.n or len(set(indices)) < len(indices):
            self.fault(
                "duplicated_answer", f"the samples {indices} came", f"the samples 0 to {asked.n - 1}", reply, exact=True
            )
        if sorted(indices) != list(range(asked.n)):
            self.fault("counts", f"the samples {indices} came", f"the samples 0 to {asked.n - 1}", reply)
        if asked.temperature and asked.top_k != 1 and not (self.served.route.raw and self._changes(asked)):
            self._check_repeats(reply)

    @staticmethod
    def _changes(asked: Asked) -> bool:
        return asked.temperature != 1 or bool(asked.top_k) or asked.top_p < 1 or bool(asked.min_p)

    def _check_repeats(self, reply: Reply) -> None:
        """Notes samples of a request that repeat earlier ones more often than chance does."""
        earlier: dict[tuple[int, ...], int] = {}
        chance = 0.0
        for choice in reply.choices:
            tokens = tuple(choice.tokens)
            if self.repeats.add(tokens in earlier, min(1.0, chance)):
                self.fault(
                    "duplicated_answer",
                    f"samples {earlier[tokens]} and {choice.index} are the same {len(tokens)} tokens, as others before",
                    "samples that are drawn apart",
                    reply,
                    exact=True,
                )
            if tokens not in earlier:
                earlier[tokens] = choice.index
                chance += math.exp(sum(min(0.0, one) for one in choice.logprobs if math.isfinite(one)))

    def note(
        self, fault: str, seen: str, right: str, reply: Reply | Exchange | None = None, exact: bool = False
    ) -> None:
        """Records a finding; the check goes on."""
        exchange = reply.exchange if isinstance(reply, Reply) else reply
        self.findings.append(Finding(fault, seen, right, exact, [exchange] if exchange is not None else []))

    def fault(
        self, fault: str, seen: str, right: str, reply: Reply | Exchange | None = None, exact: bool = False
    ) -> None:
        """Ends the check with a finding."""
        exchange = reply.exchange if isinstance(reply, Reply) else reply
        raise FaultError(Finding(fault, seen, right, exact, [exchange] if exchange is not None else []))

    def compare(self, past: Sequence[Seen]) -> None:
        """Compares everything that the check saw with the judge, and names the fault. `past` are requests of earlier checks."""
        if self.diagnosis is None or not self.seen:
            return
        with self.diagnosis.judge.working():
            self._compare(self.diagnosis, past)

    def _compare(self, diagnosis: Diagnosis, past: Sequence[Seen]) -> None:
        seen = [one for one, _ in self.seen]
        right = diagnosis.right(seen)
        wrong = diagnosis.wrong(seen, right)
        if not wrong:
            return
        mine = {one.asked.prompt for one in seen}
        others = [one for one in seen if one.asked.prompt != seen[wrong[0]].asked.prompt]
        others += [one for one in past if one.asked.prompt not in mine]
        explanation = diagnosis.explain(seen, wrong, others)
        worst = max(wrong, key=lambda index: float(differences([seen[index]], [right[index]]).max()))
        one, reply = self.seen[worst]
        off = differences([one], [right[worst]])
        token = int(off.argmax())
        given = theirs(one).tolist()
        at = f"{given[token]:.5f}" if token < len(given) else "nothing"
        what = f"{len(wrong)} of {len(seen)} samples differ; the log-probability of token {token} is {at}"
        fault = "unexplained" if explanation is None else explanation.fault
        if explanation is None and len(wrong) == len(seen) and float(off.median()) > 0.5:
            fault = "other_model"
        if explanation is not None:
            what += f": {explanation.detail}"
        self.findings.append(
            Finding(
                fault,
                what,
                f"{right[worst][token]:.5f}, by the checkpoint's own forward pass; differences of {diagnosis.rounding(one)}",
                explanation is not None,
                [reply.exchange],
                right[worst].tolist(),
            )
        )


async def together(*calls: Awaitable[Any]) -> list[Any]:
    """Returns the results of calls at once. One that raises ends the others."""
    tasks = [asyncio.ensure_future(one) for one in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@dataclass(frozen=True)
class Check:
    """One check: a name, an assertion, and the coroutine. `factor` multiplies the deadline of the round's checks."""

    name: str
    asserts: str
    run: Callable[[Court], Awaitable[None]]
    factor: float = 1.0


Made = Callable[[Court], Awaitable[None]]


class Family(list[Check]):
    """The checks of one file, in their order."""

    def add(self, name: str, asserts: str, *, factor: float = 1.0) -> Callable[[Made], Made]:
        """Adds a coroutine as a check."""

        def added(run: Made) -> Made:
            self.append(Check(name, asserts, run, factor))
            return run

        return added
