"""The collector against an engine that answers by script: what it asks, in which order, and what it makes of answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.grade import COMPONENTS
from nmoe.envs.rewards.reward import Rating, Samples
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.errors import UserError
from nmoe.rollout.collector import Collector, GradingError
from nmoe.rollout.episode import request_seed
from nmoe.rollout.tickets import Ticket
from nmoe.text.harmony import Harmony
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Message, Problem, Sample, Sampling, TrainerState, Turn, Verdict

R = TypeVar("R")
Make = Callable[..., Environment]

POOL = '[task_pool]\ntype = "generated"\ntask_type = "sort"\n'
PROBLEMS = [Problem(f"demo/{i}", "sort", f"Sort: {i}{i}0", f"0{i}{i}", "demo") for i in range(1, 5)]
KEY = (7, "train", 3, 0)
STAGES = """
[curriculum]
window_steps = 1
[[curriculum.stages]]
name = "format"
weights = {format = 2.0}
gate = {metric = "format_ok", at_least = 0.5}
[[curriculum.stages]]
name = "correctness"
weights = {correctness = 7.0}
"""


class ScriptedEngine:
    """Answers the request at place i with `answers[i]`, the last request first."""

    def __init__(self, answers: Sequence[list[Sample]]) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self.events: list[str] = []

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return asyncio.run(coroutine)

    async def samples(self, request: Request) -> AsyncIterator[tuple[int, Sample]]:
        place = len(self.requests)
        self.requests.append(request)
        self.events.append("asked")
        for _ in range(2 * (len(self.answers) - place)):
            await asyncio.sleep(0)
        self.events.append(f"answered {place}")
        for index, sample in enumerate(self.answers[place]):
            yield index, sample


def answer(harmony: Harmony, text: str) -> Sample:
    thought = Message("assistant", "hm", channel="analysis")
    ids = harmony.render_completion([thought, Message("assistant", text, channel="final")])
    return Sample(ids, [-0.5] * len(ids), [0] * len(ids), "stop")


@pytest.fixture
def engine(harmony: Harmony) -> ScriptedEngine:
    """Two samples of each problem: a right one and "9"."""
    return ScriptedEngine([[answer(harmony, problem.gold), answer(harmony, "9")] for problem in PROBLEMS])


def collect(
    engine: ScriptedEngine, environment: Environment, samples: int, sampling: Sampling, context_tokens: int = 200
) -> list[Group]:
    return Collector(engine, environment, context_tokens).collect(PROBLEMS, samples, sampling, KEY).groups  # type: ignore[arg-type]


def test_prompts_go_out_as_token_ids_with_the_settings(environment: Make, engine: ScriptedEngine) -> None:
    demo = environment(POOL)
    collect(engine, demo, 2, Sampling(30, temperature=0.5, top_p=0.9, top_k=4))
    assert [request.prompt_ids for request in engine.requests] == [tuple(demo.prompts.ids(p)) for p in PROBLEMS]
    for place, request in enumerate(engine.requests):
        sampling = request.sampling
        assert (request.samples, sampling.max_new_tokens, sampling.temperature) == (2, 30, 0.5)
        assert (sampling.top_p, sampling.top_k, sampling.stop_ids) == (0.9, 4, demo.renderer.stop_ids)
        assert sampling.seed == request_seed(*KEY, place)
    assert len({request.request_id for request in engine.requests}) == 4


def test_all_requests_are_out_before_the_first_answer_and_groups_keep_the_order_of_problems(
    environment: Make, engine: ScriptedEngine
) -> None:
    groups = collect(engine, environment(POOL), 2, Sampling(30))
    assert engine.events == ["asked"] * 4 + [f"answered {place}" for place in (3, 2, 1, 0)]
    assert [group.problem for group in groups] == PROBLEMS
    for place, group in enumerate(groups):
        first, second = group.trajectories
        assert (first.index, second.index) == (0, 1)
        assert (first.problem, first.seed) == (PROBLEMS[place], request_seed(*KEY, place))
        assert first.prompt_ids == engine.requests[place].prompt_ids
        assert [turn.sample for turn in first.turns] == [engine.answers[place][0]]
        assert (first.grade.score, second.grade.score) == (1.0, 0.0)
        assert (first.grade.answer, second.grade.answer) == (PROBLEMS[place].gold, "9")


def test_positions_name_problems_where_they_are_given(environment: Make, engine: ScriptedEngine) -> None:
    collector = Collector(engine, environment(POOL), 200)  # type: ignore[arg-type]
    groups = collector.collect(PROBLEMS, 2, Sampling(30), (7, "train"), [40, 41, 7, 9]).groups
    assert [group.trajectories[0].seed for group in groups] == [
        request_seed(7, "train", position) for position in (40, 41, 7, 9)
    ]


def test_a_seed_is_a_function_of_its_key_alone() -> None:
    # int.from_bytes(hashlib.sha256(b"(7, 'train', 3, 0, 1)").digest()[:8], "little"): a run resumed by a later version
    # has to draw the same numbers.
    assert request_seed(*KEY, 1) == 3854241859073623038
    keys = [
        (7, "train", 3, 0, 1),
        (7, "train", 3, 1, 0),
        (7, "train", 30, 1),
        (8, "train", 3, 0, 1),
        (7, "eval", 3, 0, 1),
    ]
    seeds = {request_seed(*key) for key in keys}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_environment_s_budget_bounds_a_completion(environment: Make, engine: ScriptedEngine) -> None:
    groups = collect(engine, environment(POOL + "[budget]\ncompletion_tokens = 5\n"), 2, Sampling(30))
    assert {request.sampling.max_new_tokens for request in engine.requests} == {5}
    assert {t.grade.failure for group in groups for t in group.trajectories} == {"budget_exceeded"}


def test_a_group_is_graded_by_the_stage_that_it_was_issued_in(environment: Make, harmony: Harmony) -> None:
    """Samples of one group that two stages of the curriculum grade would have advantages of no single reward."""
    demo = environment(POOL + STAGES)
    assert demo.curriculum is not None

    class Advancing(ScriptedEngine):
        async def samples(self, request: Request) -> AsyncIterator[tuple[int, Sample]]:
            yield 0, answer(harmony, "011")
            for _ in range(20):
                await asyncio.sleep(0)
            demo.curriculum.observe({"format_ok": 1.0})  # type: ignore[union-attr]
            yield 1, answer(harmony, "011")

    collector = Collector(Advancing([]), demo, 200)  # type: ignore[arg-type]
    (group,) = collector.collect(PROBLEMS[:1], 2, Sampling(30), KEY).groups
    assert demo.curriculum.stage == "correctness"
    assert [t.grade.weights["format"] for t in group.trajectories] == [2.0, 2.0]
    assert [t.grade.score for t in group.trajectories] == [2.0, 2.0]


def test_a_prompt_that_does_not_fit_is_named(environment: Make, engine: ScriptedEngine) -> None:
    demo = environment(POOL)
    longest = max(len(demo.prompts.ids(problem)) for problem in PROBLEMS)
    collect(engine, demo, 2, Sampling(30), context_tokens=longest + 30)
    message = rf"problem demo/1: its prompt of {longest} tokens and completions of up to 30 do not fit .* context of"
    with pytest.raises(UserError, match=message):
        collect(engine, demo, 2, Sampling(30), context_tokens=longest + 29)


def test_a_grader_that_raises_stops_the_collection_with_its_sample(
    environment: Make, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def verify(problem: Problem, attempt: Attempt) -> Verdict:
        if problem is PROBLEMS[2] and attempt.answer == "9":
            raise ZeroDivisionError("a defect")
        return Verdict("incorrect", 0.0, "exact", "")

    monkeypatch.setattr(TASKS["sort"], "verify", verify)
    with pytest.raises(GradingError, match="problem demo/3") as caught:
        collect(engine, environment(POOL), 2, Sampling(30))
    trajectory = caught.value.trajectory
    assert trajectory.problem is PROBLEMS[2]
    assert [turn.sample for turn in trajectory.turns] == [engine.answers[2][1]]
    assert (trajectory.grade.failure, trajectory.grade.verdict, trajectory.trainable) == ("grader_error", None, False)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class LastingEngine(ScriptedEngine):
    """Runs every coroutine on one event loop, as engine servers do."""

    def __init__(self, answers: Sequence[list[Sample]]) -> None:
        super().__init__(answers)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def close(self) -> set[asyncio.Task[Any]]:
        """Returns the tasks that are left."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        left = asyncio.all_tasks(self.loop)
        self.loop.close()
        return left


@pytest.fixture
def lasting(harmony: Harmony) -> Iterator[LastingEngine]:
    """Two samples of each problem, four times."""
    engine = LastingEngine([[answer(harmony, problem.gold), answer(harmony, "9")] for problem in PROBLEMS] * 4)
    yield engine
    assert engine.close() == set(), "no task outlives the collector"


class LoggedReward:
    """Rates every sample 0.25; logs when it is opened, asked for how many samples, and closed."""

    name, weight, only_if_correct = "logged", 1.0, False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.fault: Exception | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        if self.fault is not None:
            raise self.fault
        self.log.append("open")
        try:
            yield
        finally:
            self.log.append("closed")

    async def rate(self, samples: Samples) -> list[Rating]:
        self.log.append(f"{len(samples.completions)} rated")
        self.loops.add(asyncio.get_running_loop())
        return [Rating(0.25)] * len(samples.completions)


def rewarded(environment: Make) -> tuple[Environment, LoggedReward]:
    demo, reward = environment(POOL), LoggedReward()
    demo.rewards = [reward]  # type: ignore[list-item]
    return demo, reward


def test_rewards_stay_open_as_long_as_the_engine_s_loop(
    environment: Make, engine: ScriptedEngine, lasting: LastingEngine
) -> None:
    demo, reward = rewarded(environment)
    collector = Collector(lasting, demo, 200)  # type: ignore[arg-type]
    with collector.open():
        assert reward.log == []
        for step in (0, 1):
            (found,) = collector.collect(PROBLEMS[step : step + 1], 2, Sampling(30), (7, step)).groups
            assert [t.grade.score for t in found.trajectories] == [1.25, 0.25]
        assert reward.log == ["open", "2 rated", "2 rated"]
    assert reward.log.pop() == "closed"
    assert reward.loops == {lasting.loop}

    reward.log.clear()
    collector.collect(PROBLEMS[:1], 2, Sampling(30), (7, 2))
    assert reward.log == ["open", "2 rated", "closed"], "by itself a batch closes what it opened"

    reward.log.clear()
    collector = Collector(engine, demo, 200)  # type: ignore[arg-type]
    with collector.open():
        for step in (0, 1):
            collector.collect(PROBLEMS[:1], 2, Sampling(30), (7, step))
        assert reward.log == ["open", "2 rated", "closed"] * 2, "the loop ends with the engine's `run`"


def test_a_loop_that_an_engine_leaves_is_not_waited_for(environment: Make, engine: ScriptedEngine) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    class Leaving(ScriptedEngine):
        """An engine of a user, with another loop each time."""

        def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
            loops.append(asyncio.new_event_loop())
            return loops[-1].run_until_complete(asyncio.wait_for(coroutine, 10))

    demo, reward = rewarded(environment)
    collector = Collector(Leaving(engine.answers), demo, 200)  # type: ignore[arg-type]
    with collector.open():
        for step in (0, 1):
            collector.collect(PROBLEMS[step : step + 1], 2, Sampling(30), (7, step))
    assert reward.log == ["open", "2 rated"] * 2
    for loop in loops:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left))
        loop.close()


def test_a_batch_that_fails_ends_its_other_groups_and_leaves_the_stream(
    environment: Make, lasting: LastingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo, reward = rewarded(environment)
    answers = lasting.answers
    lasting.answers = [answers[0], [], *answers[2:]]  # the second group has no sample, and waits
    verify, broken = TASKS["sort"].verify, True

    async def fails(problem: Problem, attempt: Attempt) -> Verdict:
        if broken:
            raise ZeroDivisionError("a defect")
        return await verify(problem, attempt)

    monkeypatch.setattr(TASKS["sort"], "verify", fails)
    collector = Collector(lasting, demo, 200)  # type: ignore[arg-type]
    with collector.open():
        with pytest.raises(GradingError, match="problem demo/1"):
            collector.collect(PROBLEMS[:2], 2, Sampling(30), KEY)

        async def left() -> int:
            return len(asyncio.all_tasks()) - 1  # this one

        assert lasting.run(left()) == 1, "the task that keeps the rewards open"
        broken = False
        (found,) = collector.collect(PROBLEMS[2:3], 2, Sampling(30), KEY).groups
        assert found.problem is PROBLEMS[2]
    assert reward.log == ["open", "2 rated", "closed"]


def test_a_reward_that_cannot_be_opened_stops_the_batch_before_it_samples(
    environment: Make, engine: ScriptedEngine
) -> None:
    demo, reward = rewarded(environment)
    reward.fault = UserError("no such certificate")
    with pytest.raises(UserError, match="no such certificate"):
        collect(engine, demo, 2, Sampling(30))
    assert engine.requests == []


def test_rewards_are_left_closed_where_they_are_skipped(environment: Make, engine: ScriptedEngine) -> None:
    demo, reward = rewarded(environment)
    collector = Collector(engine, demo, 200)  # type: ignore[arg-type]
    collector.collect(PROBLEMS, 2, Sampling(30), KEY, state=None)
    assert reward.log == []


def test_tickets_are_played_in_any_order_and_their_tokens_counted(environment: Make, engine: ScriptedEngine) -> None:
    demo = environment(POOL)
    collector = Collector(engine, demo, 200)  # type: ignore[arg-type]
    terms = collector.terms(2, Sampling(30), (7, "train"), TrainerState(4, 9), give_start=True)
    tickets = [Ticket(position, problem, terms) for position, problem in zip((5, 3, 9, 8), PROBLEMS, strict=True)]
    seen: list[Group] = []
    collected = collector.sample(tickets, seen.append)
    assert [group.problem for group in seen] == PROBLEMS[::-1], "the engine answers the last request first"
    assert [group.problem for group in collected.groups] == PROBLEMS
    assert [group.trajectories[0].seed for group in collected.groups] == [
        request_seed(7, "train", position) for position in (5, 3, 9, 8)
    ]
    sampled = sum(len(sample.token_ids) for samples in engine.answers for sample in samples)
    assert collected.sampled_tokens == sampled > 0
    again = collector.sample(tickets[:0])
    assert (again.groups, again.sampled_tokens) == ([], 0)


def group(environment: Environment, harmony: Harmony, *texts: str | None) -> Group:
    """The graded answers to the first problem; None is a sample that the engine aborted."""
    trajectories = []
    for index, text in enumerate(texts):
        sample = answer(harmony, text or "")
        if text is None:
            sample.finish_reason = "abort"
        turns = (Turn((), sample),)
        grade = asyncio.run(environment.grader.grade(PROBLEMS[0], turns, 100))
        trajectories.append(Trajectory(PROBLEMS[0], index, (1,), turns, grade, Sampling(30, seed=4)))
    return Group(PROBLEMS[0], trajectories)


def test_what_a_group_trains_on_was_judged(environment: Make, harmony: Harmony) -> None:
    demo, right = environment(POOL), PROBLEMS[0].gold
    # An aborted sample has a score of 0 that is no verdict.
    with_abort = group(demo, harmony, right, None, right)
    assert with_abort.trajectories[1].grade.failure == "engine_error"
    assert with_abort.trainable == [with_abort.trajectories[0], with_abort.trajectories[2]]


def test_a_record_holds_what_is_needed_to_sample_again(environment: Make, harmony: Harmony) -> None:
    trajectory = group(environment(POOL), harmony, "9").trajectories[0]
    record = trajectory.record(12, "hm 9")
    length = len(trajectory.token_ids)
    assert record == {
        "step": 12,
        "environment": {},
        "model": {},
        "problem": "demo/1",
        "task_type": "sort",
        "source": "demo",
        "question": "Sort: 110",
        "gold": "011",
        "metadata": {},
        "columns": {},
        "history": [],
        "trainer_state": None,
        "reason": "",
        "cached": [],
        "index": 0,
        "seed": 4,
        "sampling": {"max_new_tokens": 30, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_ids": (), "seed": 4},
        "workspace": None,
        "prompt_ids": [1],
        "token_ids": trajectory.turns[0].sample.token_ids,
        "mask": [1] * length,
        "logprobs": [-0.5] * length,
        "versions": [0] * length,
        "kept_ids": None,
        "spans": [{"kind": "sampled", "turn": 0, "start": 0, "end": length}],
        "finish_reasons": ["stop"],
        "engines": [None],
        "tool_events": [],
        "exchanges": [],
        "text": "hm 9",
        "failure": "ok",
        "reward": 0.0,
        "components": dict.fromkeys(COMPONENTS, 0.0) | {"format": 1.0, "structure": 1.0, "reasoning": 1.0},
        "weights": dict.fromkeys(COMPONENTS, 0.0) | {"correctness": 1.0},
        "extras": trajectory.grade.extras,
        "answer": "9",
        "verdict": {"outcome": "incorrect", "score": 0.0, "layer": "exact", "reason": "other digits"},
    }
    assert json.loads(json.dumps(record))["prompt_ids"] == [1]


def test_an_environment_s_identity_changes_with_its_settings(environment: Make) -> None:
    first, same, other = environment(POOL), environment(POOL), environment(POOL + "[budget]\ncompletion_tokens = 5\n")
    assert first.identity == same.identity
    assert (first.identity["env_id"], first.identity["version"]) == ("demo", "1")
    assert other.identity["fingerprint"] != first.identity["fingerprint"]
