"""Repeated samples: more of them than chance allows are a fault, and no others."""

from __future__ import annotations

import random

from nmoe.referee.court import Repeats


def test_a_right_server_repeats_samples_by_chance() -> None:
    draw = random.Random(0)
    for _ in range(300):
        repeats = Repeats()
        chances = [draw.choice((1e-9, 0.01, 0.1, 0.5)) for _ in range(200)]
        assert not any(repeats.add(draw.random() < chance, chance) for chance in chances)


def test_repeats_that_chance_does_not_explain_are_found() -> None:
    assert not Repeats().add(True, 0.01)
    assert not Repeats().add(True, 1e-7)
    assert Repeats().add(True, 1e-12)
    repeats = Repeats()
    assert [repeats.add(True, 0.01) for _ in range(9)].index(True) == 4
    repeats = Repeats()
    assert [repeats.add(True, 1e-7) for _ in range(3)] == [False, True, True]
