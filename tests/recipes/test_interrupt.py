"""Signals as requests: the first is noted, a second Ctrl-C interrupts, and afterwards all is as before."""

from __future__ import annotations

import os
import signal

import pytest

from nmoe.recipes.run_loop import Interruptible


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_ctrl_c_interrupts(first: signal.Signals) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), Interruptible() as interrupt:  # noqa: PT012 (the first signal must not raise)
        assert not interrupt.requested
        os.kill(os.getpid(), first)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was swallowed")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
