"""A pool's walk: shards that make up the whole, and a position from which it goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.envs.pools import Pool, Shard
from nmoe.errors import UserError
from nmoe.types import Problem

MakePool = Callable[..., Pool]


def jsonl_pool(directory: Path, answers: Sequence[int]) -> dict[str, Any]:
    path = directory / "records.jsonl"
    path.write_text("".join(json.dumps({"problem": f"Is it {n}?", "answer": str(n)}) + "\n" for n in answers))
    return {"type": "jsonl", "path": str(path), "task_type": "add"}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("pools")
    generated = {"type": "generated", "task_type": "sort", "difficulty": [2, 5]}
    jsonl = jsonl_pool(directory, range(5))
    return {
        "endless": generated,
        "finite": {**generated, "max_examples": 6},
        "records": jsonl,
        "mixture": {
            "type": "mixture",
            "sources": [
                {**generated, "name": "generated", "weight": 1.0},
                {**jsonl, "name": "records", "weight": 2.5},
                {**generated, "max_examples": 3, "name": "few", "weight": 0.5},
            ],
        },
    }


KINDS = st.sampled_from(["endless", "finite", "records", "mixture"])


@settings(max_examples=40, deadline=None)
@given(KINDS, st.integers(1, 5), st.integers(0, 20))
def test_shards_together_are_the_whole(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], kind: str, world_size: int, each: int
) -> None:
    whole = make_pool(pools[kind]).take(each * world_size)
    for rank in range(world_size):
        assert make_pool(pools[kind], rank, world_size).take(each) == whole[rank::world_size]


@settings(max_examples=40, deadline=None)
@given(KINDS, st.integers(1, 3), st.lists(st.integers(0, 9), max_size=5), st.integers(0, 12))
def test_a_resumed_pool_goes_on_exactly(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], kind: str, world_size: int, takes: list[int], after: int
) -> None:
    pool = make_pool(pools[kind], world_size - 1, world_size)
    before = [problem for n in takes for problem in pool.take(n)]
    state = json.loads(json.dumps(pool.state()))
    resumed = make_pool(pools[kind], world_size - 1, world_size)
    resumed.load_state(state)
    continuation = resumed.take(after)
    assert continuation == pool.take(after)
    assert before + continuation == make_pool(pools[kind], world_size - 1, world_size).take(sum(takes) + after)
    assert resumed.state() == pool.state()


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"difficulty": [2, 6]}, {"task_type": "add"}, {"split": "all"}, {"max_examples": 9}],
    ids=lambda change: next(iter(change)),
)
def test_a_state_of_another_pool_is_refused(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], change: dict[str, Any]
) -> None:
    pool = make_pool(pools["endless"])
    state = make_pool({**pools["endless"], **change}).state()
    with pytest.raises(UserError, match="saved position belongs to another pool than 'demo'"):
        pool.load_state(state)
    assert pool.take(3) == make_pool(pools["endless"]).take(3)


def test_changed_data_is_another_pool(make_pool: MakePool, tmp_path: Path) -> None:
    state = make_pool(jsonl_pool(tmp_path, [1, 2, 3])).state()
    with pytest.raises(UserError, match="its settings or its data have changed"):
        make_pool(jsonl_pool(tmp_path, [1, 2, 4])).load_state(state)


@pytest.mark.parametrize("taken", [-1, True, 1.5, "3", None])
def test_a_position_that_is_none_is_refused(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], taken: object
) -> None:
    pool = make_pool(pools["endless"])
    with pytest.raises(UserError, match="is not a number of problems"):
        pool.load_state({**pool.state(), "taken": taken})


def test_a_drawn_problem_knows_its_position_in_the_order_of_all_shards(
    make_pool: MakePool, pools: dict[str, dict[str, Any]]
) -> None:
    whole = make_pool(pools["endless"]).take(6)
    for rank in (0, 1):
        shard = make_pool(pools["endless"], rank, 2)
        assert shard.draw(1) + shard.draw(2) == [(place, whole[place]) for place in (rank, rank + 2, rank + 4)]


def test_the_state_of_another_shard_is_refused(make_pool: MakePool, pools: dict[str, dict[str, Any]]) -> None:
    state = make_pool(pools["endless"], 0, 2).state()
    with pytest.raises(UserError, match="that of rank 0 of 2, and this is rank 0 of 4"):
        make_pool(pools["endless"], 0, 4).load_state(state)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_shard_has_a_rank_below_its_world_size(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="rank must lie in"):
        Shard(rank, world_size)


def test_taking_nothing_and_less(make_pool: MakePool, pools: dict[str, dict[str, Any]]) -> None:
    pool = make_pool(pools["endless"])
    assert pool.take(0) == []
    with pytest.raises(ValueError, match="cannot take -1 problems"):
        pool.take(-1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(0, 12), st.integers(0, 12))
def test_problems_that_do_not_fit_are_passed_over(
    make_pool: MakePool, pools: dict[str, dict[str, Any]], world_size: int, each: int, cut: int
) -> None:
    """Each rank's walk without them, wherever it was resumed, and a count of them."""

    def fits(problem: Problem) -> bool:
        return problem.gold not in ("1", "4")

    for rank in range(world_size):
        whole = [problem for problem in make_pool(pools["records"], rank, world_size).take(60) if fits(problem)]
        pool, resumed = (make_pool(pools["records"], rank, world_size) for _ in range(2))
        for one in (pool, resumed):
            one.keep(fits)
        assert pool.take(each) == whole[:each]
        resumed.load_state(json.loads(json.dumps(pool.state())))
        assert resumed.take(cut) == whole[each : each + cut] == pool.take(cut)
        assert pool.passed_over == pool.state()["taken"] - each - cut


def test_a_pool_of_which_nothing_fits_says_so(make_pool: MakePool, pools: dict[str, dict[str, Any]]) -> None:
    for kind in ("records", "endless"):
        pool = make_pool(pools[kind])
        pool.keep(lambda problem: False)
        with pytest.raises(UserError, match=r"none of \d+ problems in a row fits the model's context"):
            pool.take(1)
