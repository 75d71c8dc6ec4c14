"""Blocks: who holds them, which prefix is found, and what goes first when they run out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.engine.native.block_manager import BlockManager


def test_taken_released_and_taken_again() -> None:
    pool = BlockManager(3, 4, 1)
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    first = pool.take(2)
    assert (first, pool.available) == ([0, 1], 1)
    pool.hold([0])
    pool.release([0, 1])
    assert pool.available == 2
    pool.release([0])
    assert pool.available == 3
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_the_longest_prefix_in_whole_blocks_is_found_and_held() -> None:
    pool = BlockManager(6, 2, 1)
    blocks = pool.take(3)
    pool.remember([1, 2, 3, 4, 5], blocks)  # the third is not full
    assert pool.find([1, 2, 3, 4, 5], 5) == blocks[:2]
    assert pool.find([1, 2, 3, 4], 3) == blocks[:1]  # no more than asked for
    assert pool.find([1, 2, 4, 4], 4) == blocks[:1]
    assert pool.find([2, 2, 3, 4], 4) == []
    assert pool.find([3, 4], 2) == []  # those tokens, but after others
    pool.release(blocks)
    assert pool.available == 3 + 1  # two of them are still held by those that found them


def test_what_nobody_holds_stays_findable_until_its_place_is_needed() -> None:
    pool = BlockManager(3, 2, 1)
    blocks = pool.take(2)
    pool.remember([1, 2, 3, 4], blocks)
    pool.release(blocks)
    assert pool.available == 3
    assert pool.take(1) == [2]  # the empty one first
    assert pool.take(1) == [blocks[1]]  # then the end of the prefix, before its beginning
    assert pool.find([1, 2, 3, 4], 4) == [blocks[0]]


def test_a_prefix_known_already_keeps_its_first_blocks() -> None:
    pool = BlockManager(4, 2, 1)
    first, second = pool.take(2), pool.take(2)
    pool.remember([1, 2, 3, 4], first)
    pool.remember([1, 2, 5, 6], second)
    assert pool.find([1, 2, 5, 6], 4) == [first[0], second[1]]


def test_nothing_is_found_after_forgetting_and_nothing_is_lost() -> None:
    pool = BlockManager(4, 2, 1)
    held, idle = pool.take(2), pool.take(2)
    pool.remember([1, 2, 3, 4], held)
    pool.remember([5, 6, 7, 8], idle)
    pool.release(idle)
    pool.forget()
    assert pool.find([1, 2], 2) == pool.find([5, 6], 2) == []
    assert pool.available == 2
    pool.release(held)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=40))
def test_a_found_block_holds_the_tokens_asked_for(actions: list[tuple[int, list[int]]]) -> None:
    pool = BlockManager(8, 2, 1)
    contents: dict[int, tuple[int, ...]] = {}  # what each block's keys were computed from: its tokens and all before
    held: list[list[int]] = []
    for kind, tokens in actions:
        if kind == 0 and held:
            pool.release(held.pop(len(tokens) % len(held)))
        elif kind == 1 and len(tokens) == 9:
            pool.forget()
        else:
            found = pool.find(tokens, len(tokens))
            for i, block in enumerate(found):
                assert contents[block] == tuple(tokens[: 2 * i + 2])
            missing = pool.blocks_for(len(tokens)) - len(found)
            if missing > pool.available:
                pool.release(found)
                continue
            blocks = found + pool.take(missing)
            assert len(set(blocks)) == len(blocks)
            for other in held:
                assert not set(other) & set(blocks[len(found) :])
            for i in range(len(found), len(blocks)):
                contents[blocks[i]] = tuple(tokens[: 2 * i + 2])
            pool.remember(tokens, blocks)
            held.append(blocks)
    for blocks in held:
        pool.release(blocks)
    assert pool.available == 8


def test_state_slots_are_of_one_holder_each() -> None:
    pool = BlockManager(1, 4, 3)
    taken = [pool.take_state_slot() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert pool.available_state_slots == 0
    pool.release([], taken[1])
    assert pool.available_state_slots == 1
    assert pool.take_state_slot() == taken[1]


def test_where_blocks_are_not_all_that_a_prefix_needs_none_is_found() -> None:
    for shares, found in ((True, [0]), (False, [])):
        pool = BlockManager(2, 2, 1, shares)
        blocks = pool.take(1)
        pool.remember([5, 6], blocks)
        pool.release(blocks)
        assert pool.find([5, 6, 7], 3) == found
