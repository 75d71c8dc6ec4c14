"""The account of a run's groups under any order of events: no position ends twice, none is lost, and no token."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nmoe.errors import UserError
from nmoe.rollout.tickets import Tickets


class Schedules(RuleBasedStateMachine):
    """Draws schedules of a run: groups issued, answered, answered late, twice or never, trained on, dropped, and the run killed.

    The model beside the account keeps what became of every position; `ends` holds each end that was accepted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tickets = Tickets()
        self.open: dict[int, int | None] = {}
        self.ends: list[tuple[int, str]] = []
        self.issued: list[int] = []
        self.tokens = {"trained": 0, "void": 0}
        self.next = 0
        self.saved: Any = None
        self.save()

    def some(self, data: st.DataObject, positions: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(positions)))

    @rule(skipped=st.integers(0, 2))
    def issue(self, skipped: int) -> None:
        """The pool may pass problems over."""
        position = self.next + skipped
        self.tickets.issue(position)
        self.issued.append(position)
        self.open[position], self.next = None, position + 1

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def issue_again(self, data: st.DataObject) -> None:
        with pytest.raises(RuntimeError, match="issued before"):
            self.tickets.issue(self.some(data, self.issued))

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), tokens=st.integers(0, 50))
    def answer(self, data: st.DataObject, tokens: int) -> None:
        """To any position that was ever issued: for the first time, twice, or after its end."""
        position = self.some(data, self.issued)
        first = position in self.open and self.open[position] is None
        self.tickets.sampled(tokens)
        assert self.tickets.answer(position, tokens) == first
        if first:
            self.open[position] = tokens
        else:
            self.tokens["void"] += tokens

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), share=st.floats(0, 1))
    def train(self, data: st.DataObject, share: float) -> None:
        position = self.some(data, self.issued)
        tokens = self.open.get(position)
        if tokens is None:
            with pytest.raises(RuntimeError, match=f"position {position}: "):
                self.tickets.train(position, 0, 0)
            return
        masked = int(tokens * share)
        with pytest.raises(RuntimeError, match=f"of {tokens} that were sampled"):
            self.tickets.train(position, tokens - masked, masked + 1)
        self.tickets.train(position, tokens - masked, masked)
        del self.open[position]
        self.ends.append((position, "trained"))
        self.tokens["trained"] += tokens - masked
        self.tokens["void"] += masked

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), reason=st.sampled_from(["zero_variance", "surplus", "masked"]))
    def end(self, data: st.DataObject, reason: Any) -> None:
        """Also of a group whose answer has not come, and never will or comes late."""
        position = self.some(data, self.issued)
        if position not in self.open:
            with pytest.raises(RuntimeError, match=f"position {position} of the pool ends twice, now as {reason}"):
                self.tickets.end(position, reason)
            return
        self.tickets.end(position, reason)
        self.tokens["void"] += self.open.pop(position) or 0
        self.ends.append((position, reason))

    @rule()
    def save(self) -> None:
        """Takes a checkpoint: as JSON, as it is written."""
        model = self.open, self.ends, self.issued, self.tokens, self.next
        self.saved = json.dumps(self.tickets.state()), copy.deepcopy(model)

    @rule()
    def killed(self) -> None:
        """A new process begins with the checkpoint. Answers of outstanding groups died with the old one."""
        state, model = self.saved
        self.tickets = Tickets()
        self.tickets.load_state(json.loads(state))
        self.open, self.ends, self.issued, self.tokens, self.next = copy.deepcopy(model)
        self.open = dict.fromkeys(self.open)

    @invariant()
    def each_position_is_in_one_place(self) -> None:
        ended = [position for position, _ in self.ends]
        assert len(set(ended)) == len(ended)
        assert sorted([*ended, *self.open]) == sorted(self.issued)
        assert self.tickets.unanswered == [position for position, tokens in self.open.items() if tokens is None]
        assert self.tickets.trained == sum(reason == "trained" for _, reason in self.ends)
        assert self.tickets.void.total() + self.tickets.trained == len(ended)
        assert self.tickets.state()["outstanding"] == list(self.open)
        assert self.tickets.next == self.next

    @invariant()
    def every_token_is_accounted_for(self) -> None:
        self.tickets.check()
        found, in_flight = self.tickets.metrics(), sum(tokens or 0 for tokens in self.open.values())
        assert self.tickets.in_flight == in_flight
        assert found["tokens_sampled"] == self.tokens["trained"] + self.tokens["void"] + in_flight
        assert (found["tokens_trained"], found["tokens_void"]) == (self.tokens["trained"], self.tokens["void"])


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_token_that_nobody_answers_for_is_found() -> None:
    tickets = Tickets()
    tickets.issue(3)
    tickets.sampled(8)
    tickets.answer(3, 7)
    message = "8 tokens were sampled since the run began, but 0 trained on, 0 void and 7 in flight"
    with pytest.raises(RuntimeError, match=message):
        tickets.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"next": -1},
        {"next": True},
        {"outstanding": [4]},
        {"outstanding": None},
        {"outstanding": ["1"]},
        {"void": {"boredom": 1}},
        {"void": {"surplus": -1}},
        {"trained_tokens": 1.5},
    ],
)
def test_a_saved_account_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    tickets = Tickets()
    for position in range(4):
        tickets.issue(position)
    tickets.end(0, "surplus")
    state = tickets.state()
    other = Tickets()
    with pytest.raises(UserError, match=r"the saved account of groups is not one: .* resume from"):
        other.load_state(state | wrong)
    assert other.state() == Tickets().state()
    other.load_state(state)
    assert (other.unanswered, other.state()) == ([1, 2, 3], state)
