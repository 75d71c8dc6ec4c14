"""The order of a model's requests, and the failures of requests that do not come."""

from __future__ import annotations

import asyncio

import pytest

from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.order import Order


async def take(order: Order, seq_id: int, done: list[int], seconds: float = 0.0) -> None:
    try:
        await order.turn(seq_id)
        await asyncio.sleep(seconds)
        done.append(seq_id)
    finally:
        await order.done(seq_id)


def test_requests_follow_one_another_in_any_order() -> None:
    async def run() -> list[int]:
        order, done = Order(patience_s=5), list[int]()
        await asyncio.gather(*(take(order, seq_id, done) for seq_id in (3, 2, 4, 1)))
        return done

    assert asyncio.run(run()) == [1, 2, 3, 4]


def test_one_that_runs_may_take_longer_than_one_that_is_missing() -> None:
    async def run() -> list[int]:
        order, done = Order(patience_s=0.05), list[int]()
        await asyncio.gather(take(order, 1, done, 0.3), take(order, 2, done), take(order, 3, done))
        return done

    assert asyncio.run(run()) == [1, 2, 3]


def test_after_a_missing_request_the_model_goes_on() -> None:
    async def run() -> list[int]:
        order, done = Order(patience_s=0.05), list[int]()
        with pytest.raises(TinkerError, match="seq_id = 2: the request 1 before it never came"):
            await take(order, 2, done)
        await take(order, 3, done)
        with pytest.raises(TinkerError, match="seq_id = 1: was there already; the next is 4"):
            order.check(1)
        with pytest.raises(TinkerError, match="counts from 1"):
            order.check(0)
        return done

    assert asyncio.run(run()) == [3]


def test_requests_that_come_meanwhile_do_not_prolong_the_wait() -> None:
    async def run() -> list[int]:
        order, done = Order(patience_s=0.2), list[int]()
        waits = asyncio.ensure_future(take(order, 2, done))
        others = []
        for seq_id in range(3, 20):
            others.append(asyncio.ensure_future(take(order, seq_id, done)))
            await asyncio.sleep(0.05)
        with pytest.raises(TinkerError, match="seq_id = 2: the request 1 before it never came"):
            await waits
        ends = await asyncio.gather(*others, return_exceptions=True)
        assert done, "those that came later went on"
        assert all(
            f"seq_id = {done[0] - 1}: the request 1 before it" in str(end) for end in ends[done[0] - 4 : done[0] - 3]
        )
        return done

    done = asyncio.run(run())
    assert done == list(range(done[0], 20))


def test_a_step_is_not_taken_on_a_part_of_its_batch() -> None:
    """Of three passes the first never comes: the others fail, and the step after them; so does one that is in no order with them.
    The next batch goes on."""

    async def run() -> list[int]:
        order, done = Order(patience_s=0.1), list[int]()
        found = await asyncio.gather(*(take(order, one, done) for one in (2, 3, 4, 6)), return_exceptions=True)
        assert [str(one) for one in found] == [
            f"seq_id = {n}: the request 1 before it never came" for n in (2, 3, 4, 6)
        ]
        for late in (1, 5, 6):
            with pytest.raises(TinkerError, match=f"seq_id = {late}: was there already; the next is 7"):
                order.check(late)
            with pytest.raises(
                TinkerError, match=f"seq_id = {late}: was there already"
            ):  # it came in time, and is late here
                await take(order, late, done)
        await asyncio.gather(*(take(order, one, done) for one in (8, 7)))
        assert not order._over
        return done

    assert asyncio.run(run()) == [7, 8]


def test_a_cancelled_request_lets_none_overtake_those_before_it() -> None:
    async def run() -> list[int]:
        order, done = Order(patience_s=5), list[int]()
        others = [asyncio.ensure_future(take(order, seq_id, done)) for seq_id in (2, 4)]
        cancelled = asyncio.ensure_future(take(order, 3, done))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.sleep(0.05)
        assert done == []
        await take(order, 1, done)
        await asyncio.gather(*others)
        return done

    assert asyncio.run(run()) == [1, 2, 4]
