"""The problems of a run: its length in episodes, the focus on unsolved sources, and expert load by task."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from rl.policy_cases import answer, settings

from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run_with
from nmoe.envs.pools.pool import Drawn
from nmoe.errors import UserError
from nmoe.preflight.learning_rate import learning_rate
from nmoe.preflight.preflight import preflight, refuse_to_start
from nmoe.rl.episodes import steps_of, with_steps_of_episodes
from nmoe.rl.launch import train
from nmoe.rl.metrics import divergence, routing_by_source, routing_metrics
from nmoe.rl.rollouts import DECAY, LEAST, Focus, learnable, solve_rate
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn

SHAPE = {"hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "intermediate_size": 16}


def config(tmp_path: Path, problems: int | None = 40, **tables: dict[str, Any]) -> RLConfig:
    pool = {"type": "generated", "task_type": "sort", "max_examples": problems}
    joined: dict[str, dict[str, Any]] = {
        "run": {"episodes": 2.0, "directory": str(tmp_path)},
        "model": {"shape": {**SHAPE, "context_tokens": 64}, "tokenizer": "bytes"},
        "environment": {"env_id": "sort", "format": "boxed", "task_pool": {k: v for k, v in pool.items() if v}},
        "sampling": {"max_new_tokens": 4},
        "batch": {"prompts_per_step": 8, "group_size": 2},
    }
    return load_run_with(None, RLConfig, {**joined, **tables}, "test", "run")


@pytest.mark.parametrize(
    ("pool", "prompts", "samples", "train_batch", "episodes"), [(400, 16, 8, 16, 1), (400, 8, 8, 8, 50)]
)
def test_optimizer_steps_are_those_of_the_guidelines(
    pool: int, prompts: int, samples: int, train_batch: int, episodes: int
) -> None:
    """Guidelines, section 7: `pool_size * n_samples_per_prompt // train_batch_size * num_episodes`, the batch in samples."""
    updates = prompts * samples // train_batch
    assert steps_of(episodes, pool, prompts) * updates == pool * samples // train_batch * episodes


def test_a_run_is_as_long_as_its_episodes_and_a_share_of_it_warms_up(tmp_path: Path) -> None:
    """40 problems, 8 a step, twice = 10 steps; a warm-up of 30% = 3 of them."""
    run = train(
        config(tmp_path, optimizer={"warmup_ratio": 0.3, "learning_rate": 1e-3}, checkpoint={"every_steps": 10})
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    recorded = tomllib.loads((run / "config.toml").read_text())
    assert recorded["run"]["steps"] == 10
    assert "episodes" not in recorded["run"]


def test_the_first_steps_of_a_share(tmp_path: Path) -> None:
    """Of 1,000 steps 5% are 50: 40% of the peak at step 20. 7% are 70: 29%, and 66 of 1,000 would do."""
    slow = {"warmup_ratio": 0.07, "learning_rate": 5e-7}
    asked = config(tmp_path, 4000, run={"episodes": 2.0}, optimizer=slow | {"warmup_ratio": 0.05})
    assert with_steps_of_episodes(asked).run.steps == 1000
    assert learning_rate(with_steps_of_episodes(asked)).text == "40% of its peak 5e-07 by step 20"
    late = config(tmp_path, 4000, run={"episodes": 2.0}, optimizer=slow)
    with pytest.raises(UserError, match=r"warmup_ratio = 0\.07, which is 70 steps, is too long; set 0\.066 or less"):
        refuse_to_start(late)


def test_what_has_no_length_is_refused(tmp_path: Path) -> None:
    endless = config(tmp_path, None)
    with pytest.raises(UserError, match=r"run\.episodes = 2: the task pool of 'sort' has no end; give run\.steps"):
        with_steps_of_episodes(endless)
    assert "episodes" in [check.name for check in preflight(endless) if check.status == "fail"]
    critic = {"critic": {"path": "c", "warmup_steps": 10}, "algorithm": {"advantage": "gae"}}
    with pytest.raises(UserError, match=r"critic\.warmup_steps = 10: leaves no step .* 2 are 10 steps"):
        with_steps_of_episodes(config(tmp_path, **critic))
    with pytest.raises(UserError, match=r"excludes run\.episodes = 2; give one of the two"):
        config(tmp_path, run={"steps": 3, "episodes": 2.0})
    with pytest.raises(UserError, match=r"must be more than 0, unless run\.episodes is given"):
        config(tmp_path, run={"name": "none"})
    with pytest.raises(UserError, match=r"excludes warmup_steps = 3; give one of the two"):
        config(tmp_path, optimizer={"warmup_steps": 3, "warmup_ratio": 0.1})


def group(source: str, *correct: float) -> Group:
    return Group(Problem("p", "sort", "q", "a", source), [answer(1.0, correct=one) for one in correct])


def test_what_is_solved_less_is_drawn_more() -> None:
    focus = Focus(0)
    assert focus.share("anything") == 1.0
    focus.observe([group("a", 1, 1, 1, 0), group("a", 1, 1, 1, 0), group("b", 0, 0), group("c", 1, 1)])
    assert focus.rates == {"a": 0.75, "b": 0.0, "c": 1.0}
    assert (focus.share("a"), focus.share("b"), focus.share("c")) == (0.25, 1.0, LEAST)
    assert focus.metrics() == {"focus/a": 0.25, "focus/b": 1.0, "focus/c": LEAST}


def test_easy_sources_come_first_where_the_learnable_are_favoured() -> None:
    """r (1 - r): 0.1875 for the source solved at 3/4, 0.09375 at 1/8 (0.109375 / 0.1875 = 7/12), nothing where all or none is."""
    focus = Focus(0, learnable)
    focus.observe(
        [group("easy", 1, 1, 1, 0), group("hard", 1, *[0] * 7), group("unsolved", 0, 0), group("solved", 1, 1)]
    )
    assert focus.metrics() == {
        "focus/easy": 1.0,
        "focus/hard": pytest.approx(7 / 12),
        "focus/solved": LEAST,
        "focus/unsolved": LEAST,
    }
    # Once the easy one is solved, the hard one leads.
    for _ in range(30):
        focus.observe([group("easy", 1, 1, 1, 1), group("hard", 1, 1, 0, 0)])
    assert (focus.share("hard"), focus.share("easy")) == (1.0, LEAST)
    nothing = Focus(0, learnable)
    nothing.observe([group("a", 0, 0), group("b", 0, 0)])
    assert (nothing.share("a"), nothing.share("b")) == (1.0, 1.0)


def test_rates_are_averages_over_steps_and_stay_where_a_source_was_not_met() -> None:
    focus = Focus(0)
    focus.observe([group("a", 1, 1), group("b", 0, 0)])
    focus.observe([group("b", 1, 1)])
    assert focus.rates == {"a": 1.0, "b": pytest.approx(1 - DECAY)}


def test_everything_solved_is_drawn_alike() -> None:
    focus = Focus(0)
    focus.observe([group("a", 1, 1), group("b", 1, 1)])
    assert (focus.share("a"), focus.share("b")) == (1.0, 1.0)


def test_the_draw_is_a_function_of_seed_and_position_at_the_share_s_rate() -> None:
    focus = Focus(3)
    focus.observe([group("a", 1, 1, 1, 0), group("b", 0, 0)])
    drawn = [Drawn(position, Problem("p", "sort", "q", "a", "a")) for position in range(4000)]
    taken = [focus.admits(one) for one in drawn]
    assert sum(taken) / len(taken) == pytest.approx(0.25, abs=0.03)
    assert [focus.admits(one) for one in reversed(drawn)] == taken[::-1]
    other = Focus(4)
    other.rates = focus.rates
    assert [other.admits(one) for one in drawn] != taken


def test_open_problems_would_be_drawn_in_place_of_all_others() -> None:
    pool = {"type": "jsonl", "path": "essays.jsonl", "task_type": "open"}
    essays = {"env_id": "essays", "task_pool": pool, "rubric": {"format": 1.0}}
    with pytest.raises(ValidationError, match="open problems are never solved"):
        settings(environment=essays, batch={"favour_unsolved": True})


def test_an_open_problem_has_no_solve_rate() -> None:
    essay = Group(Problem("p", "open", "q", "", "essays"), [answer(1.0, correct=0.0), answer(2.0, correct=0.0)])
    assert solve_rate(essay) is None, "it is not unsolved"
    focus = Focus(0, learnable)
    focus.observe([essay, group("sums", 1, 0)])
    assert focus.rates == {"sums": 0.5}
    assert focus.share("essays") == 1.0


def sample(source: str, routes: list[list[list[int]]] | None) -> Trajectory:
    """A sample of two tokens after a prompt of two: its routes are of three positions, the first of which only reads."""
    recorded = None if routes is None else np.array(routes, np.int16)
    turn = Turn((), Sample([1, 2], [-1.0, -1.0], [0, 0], "stop", routes=recorded))
    problem = Problem(f"{source}/0", "reverse", "Reverse: 12", "21", source)
    return Trajectory(problem, 0, (5, 6), (turn,), Grade(0.0, {}, "ok", {}, None), Sampling(4))


# Two layers, the first token's picks after those of a position that only reads and takes expert 3.
APART = [[[3, 0], [3, 0]], [[0, 1], [0, 1]], [[1, 0], [0, 2]]]
OTHER = [[[0, 1], [0, 1]], [[2, 3], [0, 1]], [[3, 2], [2, 0]]]


def test_the_shares_of_a_source_count_the_positions_that_predict_its_samples() -> None:
    shares = routing_by_source([sample("sums", OTHER), sample("letters", APART), sample("letters", None)], 4)
    assert [*shares] == ["letters", "sums"]
    assert shares["letters"].tolist() == [[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0]]
    assert shares["sums"].tolist() == [[0, 0, 0.5, 0.5], [0.5, 0.25, 0.25, 0]]


def test_sources_that_share_no_expert_are_apart_by_the_logarithm_of_their_number() -> None:
    metrics = routing_metrics(routing_by_source([sample("sums", OTHER), sample("letters", APART)], 4))
    assert metrics == {"expert_load_divergence/0": pytest.approx(math.log(2)), "expert_load_divergence/1": 0.0}


def test_the_divergence_of_two_sources_by_hand() -> None:
    """[3/4, 1/4] and [1/4, 3/4]: the mean has ln 2, and each ln 4 - 3/4 ln 3."""
    found = divergence(np.array([[[0.75, 0.25]], [[0.25, 0.75]]]))
    assert found.tolist() == [pytest.approx(math.log(2) - math.log(4) + 0.75 * math.log(3))]


def test_one_source_or_no_routes_have_no_divergence() -> None:
    assert routing_metrics(routing_by_source([sample("sums", OTHER), sample("sums", APART)], 4)) == {}
    assert routing_metrics(routing_by_source([sample("sums", OTHER), sample("letters", None)], 4)) == {}
