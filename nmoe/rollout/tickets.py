"""Tickets: each group that a run samples has one, and is trained on once or not at all.

                 answer          train
    issued ------------> sampled ------------> trained
      |                     |
      +---------------------+----------------> void, with a reason

`Tickets` keeps the account. It has no clock and no event loop, so that any order of events can be tried: an answer that comes
twice, late or never, and a restart at any moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nmoe.errors import UserError
from nmoe.types import Problem, Sampling, TrainerState

Reason = Literal["zero_variance", "outside_solve_rate", "surplus", "masked", "overdue", "curriculum"]
"""Why a group is not trained on. "masked": none of its samples was left by the mask of truncated samples. "overdue": it would have
been too old when it had been sampled. "curriculum": it was issued in another stage than the one in force."""


@dataclass(frozen=True)
class Terms:
    """What a group of samples is sampled and graded under, fixed when the group is issued.

    The curriculum may reach its next stage, and the trainer its next step, while the group is sampled. Advantages compare the
    samples of a group, so that all of them are graded by the same weights. `key` begins the seeds of the group. `state` is what
    `[[rewards]]` receive; None skips these rewards. `given` are the tokens with which every answer begins. `weights` are the
    weights of a grade's components.
    """

    samples: int
    sampling: Sampling
    key: tuple[str | int, ...]
    state: TrainerState | None
    given: tuple[int, ...]
    weights: Mapping[str, float]

    def of_the_stage(self, other: Terms) -> bool:
        """Returns whether a stage of the curriculum that gives the other terms also gives these."""
        return (self.given, self.weights) == (other.given, other.weights)


@dataclass(frozen=True)
class Ticket:
    """A group to sample: its problem, the position by which its seeds are drawn, and its terms."""

    position: int
    problem: Problem
    terms: Terms


class Tickets:
    """The account of a run's tickets, by position in the pool. A position is issued once, and its ticket ends once.

    Positions only rise: below `next`, each one that is not outstanding has ended or was passed over. Tokens are counted where an
    engine hands them over, and again where they end: as many were sampled as were trained on, are void, or belong to outstanding
    tickets.
    """

    def __init__(self) -> None:
        self.next = 0  # every position below it was issued, or passed over by the pool
        self.trained = 0  # groups
        self.void: Counter[Reason] = Counter()  # groups
        self._outstanding: dict[int, int | None] = {}  # the tokens of the answer; None before it has come
        self._sampled_tokens = self._trained_tokens = self._void_tokens = 0

    @property
    def unanswered(self) -> list[int]:
        """The positions whose groups are still to be sampled."""
        return [position for position, tokens in self._outstanding.items() if tokens is None]

    @property
    def in_flight(self) -> int:
        """The tokens of the groups that were sampled and have not ended."""
        return sum(tokens or 0 for tokens in self._outstanding.values())

    def issue(self, position: int) -> None:
        """Issues a ticket. Raises RuntimeError for a position that was passed before: it would be trained on twice."""
        if position < self.next:
            raise RuntimeError(f"position {position} of the pool was issued before; the next is {self.next}")
        self.next = position + 1
        self._outstanding[position] = None

    def sampled(self, tokens: int) -> None:
        """Counts tokens that an engine handed over."""
        self._sampled_tokens += tokens

    def answer(self, position: int, tokens: int) -> bool:
        """Takes the samples of a group, of so many tokens. Returns whether the group is to be used: a second answer, or one to a
        ticket that has ended, is void."""
        if self._outstanding.get(position, 0) is not None:
            self._void_tokens += tokens
            return False
        self._outstanding[position] = tokens
        return True

    def train(self, position: int, tokens: int, masked: int) -> None:
        """Ends a ticket whose group was trained on: on so many of its tokens, while the others were masked. Raises RuntimeError if
        these are not all, and for a ticket that is not sampled or has ended."""
        answered = self._outstanding.get(position)
        if answered is None or answered != tokens + masked:
            raise RuntimeError(
                f"position {position}: {tokens} tokens trained and {masked} masked, of {answered} that were sampled"
            )
        del self._outstanding[position]
        self.trained += 1
        self._trained_tokens += tokens
        self._void_tokens += masked

    def end(self, position: int, reason: Reason) -> None:
        """Ends a ticket whose group is not trained on. Raises RuntimeError if it has ended before."""
        if position not in self._outstanding:
            raise RuntimeError(f"position {position} of the pool ends twice, now as {reason}")
        self._void_tokens += self._outstanding.pop(position) or 0
        self.void[reason] += 1

    def discard(self, tokens: int) -> None:
        """Counts tokens that an engine handed over and that belong to no answer, so that they are void."""
        self._sampled_tokens += tokens
        self._void_tokens += tokens

    def check(self) -> None:
        """Raises RuntimeError if a token that was sampled is not accounted for."""
        ended = self._trained_tokens + self._void_tokens
        if self._sampled_tokens != ended + self.in_flight:
            raise RuntimeError(
                f"{self._sampled_tokens} tokens were sampled since the run began, but {self._trained_tokens} trained on, "
                f"{self._void_tokens} void and {self.in_flight} in flight"
            )

    def metrics(self) -> dict[str, float]:
        """Returns the tokens sampled, trained on and void since the run began."""
        return {
            "tokens_sampled": self._sampled_tokens,
            "tokens_trained": self._trained_tokens,
            "tokens_void": self._void_tokens,
        }

    def state(self) -> dict[str, Any]:
        """Returns the account as JSON values for a checkpoint. The samples of outstanding tickets are not saved with it, so that
        their tokens count as never sampled."""
        return {
            "next": self.next,
            "outstanding": [*self._outstanding],
            "trained": self.trained,
            "void": dict(self.void),
            "trained_tokens": self._trained_tokens,
            "void_tokens": self._void_tokens,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved account; its outstanding groups are to be sampled anew. Raises UserError for values that no account
        has, and then changes nothing."""
        void, outstanding = state.get("void"), state.get("outstanding")
        numbers = [state.get(name) for name in ("next", "trained", "trained_tokens", "void_tokens")]
        if isinstance(void, dict) and isinstance(outstanding, list) and set(void) <= set(get_args(Reason)):
            counts = [*numbers, *outstanding, *void.values()]
            if all(type(one) is int and one >= 0 for one in counts) and max(outstanding, default=-1) < state["next"]:
                self.next, self.trained, self._trained_tokens, self._void_tokens = map(int, counts[:4])
                self.void = Counter(void)
                self._outstanding = dict.fromkeys(outstanding)
                self._sampled_tokens = self._trained_tokens + self._void_tokens
                return
        raise UserError(f"the saved account of groups is not one: {dict(state)}; resume from another checkpoint")
