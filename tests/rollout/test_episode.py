"""The state machine of a trajectory, against an engine that answers by script: turns, budgets, ends, and what cannot be forged."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from fake_sandbox import FakeSandbox, FakeSandboxes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import Script, ScriptedEngine
from tool_cases import FORGERY

from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tools import executor
from nmoe.envs.tools.executor import CALLS_PER_CORE
from nmoe.rollout.collector import Collector, GradingError
from nmoe.rollout.episode import request_seed
from nmoe.sandbox.api import Limits, Result, SandboxSetupError
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import FAILURES, Message, Problem, Sample, Sampling, Verdict

Make = Callable[..., Environment]

POOL = '[task_pool]\ntype = "generated"\ntask_type = "sort"\n'
TOOLS = '[tools]\nuse = ["tool_cases:add", "tool_cases:echo", "tool_cases:forge", "tool_cases:sleep", "tool_cases:fail", "bash"]\n'
RUBRIC = "[rubric]\ntool_use = 0.5\ncorrectness = 1.0\nefficiency = 1.0\n"
PROBLEM = Problem("demo/0", "sort", "Sort: 312", "123", "demo")
KEY = (7, "train", 3, 0)
CONTEXT = 2000


def call(harmony: Harmony, name: str, arguments: str, thought: str = "hm") -> list[int]:
    to_tool = Message("assistant", arguments, "commentary", recipient=f"functions.{name}", content_type="json")
    return harmony.render_completion([Message("assistant", thought, channel="analysis"), to_tool])


def final(harmony: Harmony, text: str = "123") -> list[int]:
    return harmony.render_completion([Message("assistant", text, channel="final")])


def in_turn(*turns: list[int] | Sample) -> Script:
    """The same turns for every trajectory, one after the other."""

    def script(request: Request, index: int) -> list[int] | Sample:
        # A later turn is a request of its own, whose name ends in its number.
        later = request.request_id.startswith("7/train/")
        return turns[int(request.request_id.rpartition("/")[2]) if later else 0]

    return script


def play(
    environment: Environment,
    script: Script,
    *,
    samples: int = 1,
    max_new_tokens: int = 400,
    context_tokens: int = CONTEXT,
    sandbox: FakeSandbox | None = None,
    problems: Sequence[Problem] = (PROBLEM,),
) -> tuple[list[Trajectory], ScriptedEngine]:
    engine = ScriptedEngine(script)
    sandboxes = FakeSandboxes(sandbox or FakeSandbox())
    collector = Collector(engine, environment, context_tokens, sandboxes)  # type: ignore[arg-type]
    groups = collector.collect(problems, samples, Sampling(max_new_tokens), KEY).groups
    return [trajectory for group in groups for trajectory in group.trajectories], engine


def test_a_call_is_answered_and_sampled_on_in_the_same_branch(
    environment: Make, harmony: Harmony, tokenizer: Tokenizer
) -> None:
    demo = environment(POOL + TOOLS + RUBRIC)
    first, last = call(harmony, "add", '{"x": 40, "y": 2}'), final(harmony)
    (trajectory,), engine = play(demo, in_turn(first, last))
    answer = "<|start|>functions.add<|channel|>commentary to=assistant<|message|>42<|end|><|start|>assistant"
    prompt_ids = demo.prompts.ids(PROBLEM)
    assert tokenizer.decode(trajectory.turns[1].given_ids) == answer
    assert trajectory.token_ids == [*first, *trajectory.turns[1].given_ids, *last]
    assert [list(request.prompt_ids) for request in engine.requests] == [
        prompt_ids,
        [*prompt_ids, *first, *trajectory.turns[1].given_ids],
    ]
    given_count = len(trajectory.turns[1].given_ids)
    assert trajectory.mask == [1] * len(first) + [0] * given_count + [1] * len(last)
    assert [span.kind for span in trajectory.spans] == ["sampled", "tool", "sampled"]
    (event,) = trajectory.tool_events
    assert (event.call.name, event.failure, event.output) == ("add", "ok", "42")
    grade = trajectory.grade
    assert (grade.failure, grade.components["tool_use"], grade.components["correctness"]) == ("ok", 1.0, 1.0)
    assert grade.components["reasoning"] == 1.0  # the thought stands in the first turn
    tokens = 1 - (len(first) + len(last)) / 400
    assert grade.components["efficiency"] == pytest.approx(tokens * (1 - 1 / 16))
    assert trajectory.finish_reasons == ["stop", "stop"]
    record = trajectory.record(3, "")
    assert record["tool_events"][0]["arguments"] == '{"x": 40, "y": 2}'
    assert record["spans"][1] == {
        "kind": "tool",
        "turn": 1,
        "start": len(first),
        "end": len(first) + given_count,
    }


def test_seeds_are_those_of_place_index_and_turn(environment: Make, harmony: Harmony) -> None:
    problems = [PROBLEM, Problem("demo/1", "sort", "Sort: 21", "12", "demo")]
    script = in_turn(call(harmony, "add", '{"x": 1}'), final(harmony))
    by_place = [
        play(environment(POOL + TOOLS), script, samples=2, problems=problems[: count + 1]) for count in range(2)
    ]
    seeds = {request.sampling.seed for request in by_place[0][1].requests}
    assert seeds == {request_seed(*KEY, 0), request_seed(*KEY, 0, 0, 1), request_seed(*KEY, 0, 1, 1)}
    # What else is in the batch changes none of them.
    assert seeds < {request.sampling.seed for request in by_place[1][1].requests}
    first, *later = by_place[0][1].requests
    assert (first.samples, {request.samples for request in later}) == (2, {1})
    assert len({request.request_id for request in by_place[1][1].requests}) == 6


def test_without_tools_a_call_is_no_answer(environment: Make, harmony: Harmony) -> None:
    (trajectory,), engine = play(environment(POOL), in_turn(call(harmony, "add", '{"x": 1}')))
    assert (trajectory.grade.failure, len(engine.requests), trajectory.tool_events) == ("parse_error", 1, ())


@pytest.mark.parametrize(
    ("name", "arguments", "failure"),
    [
        ("add", '{"x": 1', "parse_error"),
        ("subtract", "{}", "unknown_tool"),
        ("fail", "{}", "tool_error"),
    ],
)
def test_a_failed_call_is_shown_and_the_policy_may_go_on(
    name: str, arguments: str, failure: str, environment: Make, harmony: Harmony, tokenizer: Tokenizer
) -> None:
    script = in_turn(call(harmony, name, arguments), final(harmony))
    (trajectory,), _ = play(environment(POOL + TOOLS + RUBRIC), script)
    assert [event.failure for event in trajectory.tool_events] == [failure]
    assert f"error ({failure}): " in tokenizer.decode(trajectory.turns[1].given_ids)
    assert (trajectory.grade.failure, trajectory.grade.components["correctness"]) == ("ok", 1.0)
    assert trajectory.grade.components["tool_use"] == 0.0


@pytest.mark.parametrize("recipient", ["user", "system:root", "browser.search", "functions", "functions.", "python"])
def test_an_unknown_recipient_never_becomes_a_role(
    recipient: str, environment: Make, harmony: Harmony, tokenizer: Tokenizer
) -> None:
    ids = harmony.render_completion([Message("assistant", "{}", "commentary", recipient=recipient)])
    (trajectory,), _ = play(environment(POOL + TOOLS), in_turn(ids, final(harmony)))
    assert [event.failure for event in trajectory.tool_events] == ["unknown_tool"]
    given = tokenizer.decode(trajectory.turns[1].given_ids)
    assert given.startswith(
        "<|start|>functions.unknown<|channel|>commentary to=assistant<|message|>error (unknown_tool)"
    )


# --- forging -----------------------------------------------------------------------------------------------------------

CONTROLS = [
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
]


def controls_in(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    names = {tokenizer.special_id(name): name for name in CONTROLS}
    return [names[token_id] for token_id in ids if token_id in names]


FRAME = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]


def test_a_tool_can_not_speak_for_the_policy(environment: Make, harmony: Harmony, tokenizer: Tokenizer) -> None:
    script = in_turn(call(harmony, "forge", "{}"), final(harmony, "9"))
    (trajectory,), _ = play(environment(POOL + TOOLS), script)
    given = trajectory.turns[1].given_ids
    assert FORGERY in tokenizer.decode(given)  # the words are there, as words
    assert controls_in(given, tokenizer) == FRAME
    assert (trajectory.grade.answer, trajectory.grade.score) == ("9", 0.0)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(
        st.sampled_from([*CONTROLS, "functions.add", "assistant", " to=", "\n", "é", "\0", "\ud800", "<|"]),
        max_size=20,  # call and output fit the context
    )
)
def test_no_output_becomes_a_control_token(
    words: list[str], environment: Make, harmony: Harmony, tokenizer: Tokenizer
) -> None:
    script = in_turn(call(harmony, "echo", json.dumps({"text": "".join(words)})), final(harmony))
    (trajectory,), _ = play(environment(POOL + TOOLS), script)
    assert controls_in(trajectory.turns[1].given_ids, tokenizer) == FRAME
    assert trajectory.grade.failure == "ok"


# --- budgets and ends --------------------------------------------------------------------------------------------------


def endless(harmony: Harmony, name: str = "add", arguments: str = '{"x": 1}') -> Script:
    ids = call(harmony, name, arguments)
    return lambda request, index: ids


def test_a_policy_that_only_calls_comes_to_an_end(environment: Make, harmony: Harmony) -> None:
    for budget, turns, events in (("turns = 3", 3, 2), ("tool_calls = 2", 3, 2), ("turns = 1", 1, 0)):
        demo = environment(POOL + TOOLS + f"[budget]\n{budget}\n")
        (trajectory,), engine = play(demo, endless(harmony))
        assert (trajectory.grade.failure, trajectory.grade.score) == ("budget_exceeded", 0.0)
        assert (len(trajectory.turns), len(trajectory.tool_events), len(engine.requests)) == (turns, events, turns)


def test_the_token_budget_is_that_of_all_turns(environment: Make, harmony: Harmony) -> None:
    turn = call(harmony, "add", '{"x": 1}')
    length = len(turn)
    demo = environment(POOL + TOOLS + f"[budget]\ncompletion_tokens = {3 * length - 2}\n")
    (trajectory,), engine = play(demo, endless(harmony))
    assert [request.sampling.max_new_tokens for request in engine.requests] == [
        3 * length - 2,
        2 * length - 2,
        length - 2,
    ]
    assert (trajectory.grade.failure, trajectory.finish_reasons) == ("truncated", ["stop", "stop", "length"])
    assert trajectory.sampled_tokens == 3 * length - 2
    # To the token: the call is run, and there is nothing left to read its answer with.
    exact = environment(POOL + TOOLS + f"[budget]\ncompletion_tokens = {length}\n")
    (trajectory,), _ = play(exact, endless(harmony))
    assert (trajectory.grade.failure, len(trajectory.tool_events)) == ("truncated", 1)
    assert (trajectory.finish_reasons, trajectory.truncated) == (["stop"], True)
    assert trajectory.grade.extras["truncated_response"] == 1


def test_the_context_ends_a_trajectory_that_fills_it(environment: Make, harmony: Harmony) -> None:
    demo = environment(POOL + TOOLS)
    prompt, turn = len(demo.prompts.ids(PROBLEM)), call(harmony, "add", '{"x": 1}')
    given = len(play(demo, in_turn(turn, final(harmony)))[0][0].turns[1].given_ids)
    for room, failure, turns in ((0, "truncated", 1), (3, "truncated", 2), (len(final(harmony)), "ok", 2)):
        context = prompt + len(turn) + given + room
        (trajectory,), engine = play(
            demo, in_turn(turn, final(harmony)), max_new_tokens=len(turn) + given, context_tokens=context
        )
        assert (trajectory.grade.failure, len(trajectory.turns)) == (failure, turns)
        assert all(len(r.prompt_ids) + r.sampling.max_new_tokens <= context for r in engine.requests)


def test_the_wall_clock_ends_a_slow_trajectory_and_keeps_its_turns(environment: Make, harmony: Harmony) -> None:
    demo = environment(POOL + TOOLS + "[budget]\nwall_s = 0.15\ntool_s = 9\n")
    turns = in_turn(call(harmony, "add", '{"x": 1}'), call(harmony, "sleep", '{"seconds": 5}'))
    began = time.perf_counter()
    (trajectory,), _ = play(demo, turns)
    assert time.perf_counter() - began < 2
    assert (trajectory.grade.failure, trajectory.grade.score) == ("timeout", 0.0)
    assert trajectory.trainable  # it was the policy that called
    assert (len(trajectory.turns), [event.call.name for event in trajectory.tool_events]) == (2, ["add"])


def test_the_wall_clock_stops_while_an_engine_samples(environment: Make, harmony: Harmony) -> None:
    demo = environment(POOL + TOOLS + "[budget]\nwall_s = 0.3\ntool_s = 9\n")
    slow, quick = call(harmony, "sleep", '{"seconds": 0.2}'), call(harmony, "add", '{"x": 1}')

    class BusyEngine(ScriptedEngine):
        async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
            await asyncio.sleep(0.4)  # a queue, or a publication of weights
            async for one in super().samples(request):
                yield one

    def played(*turns: list[int]) -> Trajectory:
        engine = BusyEngine(in_turn(*turns))
        collector = Collector(engine, demo, CONTEXT, FakeSandboxes(FakeSandbox()))  # type: ignore[arg-type]
        ((trajectory,),) = [g.trajectories for g in collector.collect([PROBLEM], 1, Sampling(400), KEY).groups]
        return trajectory

    assert played(quick, quick, final(harmony)).grade.failure == "ok"
    # The clock goes on from where it stopped: two calls of 0.2 s exceed 0.3 s, with an engine's turn between them.
    trajectory = played(slow, slow, final(harmony))
    assert (trajectory.grade.failure, len(trajectory.turns)) == ("timeout", 2)


def test_a_sandbox_that_a_call_was_torn_out_of_is_not_used_again(
    environment: Make, harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "GRACE_S", 0.05)
    tools = '[tools]\nuse = ["tool_cases:hang", "tool_cases:sleep"]\n[budget]\ntool_s = 0.05\n'
    sandbox = FakeSandbox()
    script = in_turn(call(harmony, "hang", "{}"), final(harmony))
    (trajectory,), engine = play(environment(POOL + tools), script, sandbox=sandbox)
    assert (trajectory.grade.failure, trajectory.trainable, len(engine.requests)) == ("timeout", True, 1)
    assert [event.failure for event in trajectory.tool_events] == ["timeout"]
    assert sandbox.closed == 1
    # One that has nothing to do with the sandbox may be late.
    script = in_turn(call(harmony, "sleep", '{"seconds": 9}'), final(harmony))
    (trajectory,), _ = play(environment(POOL + tools), script)
    assert (trajectory.grade.failure, [event.failure for event in trajectory.tool_events]) == ("ok", ["timeout"])


def test_an_engine_that_loses_a_later_turn_masks_the_trajectory(environment: Make, harmony: Harmony) -> None:
    script = in_turn(call(harmony, "add", '{"x": 1}'), Sample([], [], [], "abort"))
    (trajectory,), _ = play(environment(POOL + TOOLS), script)
    assert (trajectory.grade.failure, trajectory.trainable) == ("engine_error", False)


def test_a_sandbox_that_is_lost_or_can_not_be_had_masks_the_trajectory(environment: Make, harmony: Harmony) -> None:
    script = in_turn(call(harmony, "bash", '{"script": "ls"}'), final(harmony))
    lost = FakeSandbox(answers=[Result("internal_error", None, b"", b"", 0.1)])
    (trajectory,), _ = play(environment(POOL + TOOLS), script, sandbox=lost)
    assert (trajectory.grade.failure, trajectory.trainable, len(trajectory.turns)) == ("internal_error", False, 1)

    class CanNot(FakeSandbox):
        async def bash(self, script: str, *, limits: Limits | None = None) -> Result:
            raise SandboxSetupError("no user namespaces here")

    (trajectory,), _ = play(environment(POOL + TOOLS), script, sandbox=CanNot())
    assert (trajectory.grade.failure, trajectory.trainable) == ("sandbox_setup_failed", False)


def test_the_verifier_sees_answer_events_and_the_open_sandbox(
    environment: Make, harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[tuple[Attempt, int]] = []
    sandbox = FakeSandbox()

    async def verify(problem: Problem, attempt: Attempt) -> Verdict:
        attempts.append((attempt, sandbox.closed))
        return Verdict.of(True, "tests", "")

    monkeypatch.setattr(TASKS["sort"], "verify", verify)
    script = in_turn(call(harmony, "bash", '{"script": "ls"}'), final(harmony, "done"))
    (trajectory,), _ = play(environment(POOL + TOOLS), script, sandbox=sandbox)
    ((attempt, closed),) = attempts
    assert (attempt.answer, attempt.sandbox, closed) == ("done", sandbox, 0)
    assert attempt.tool_events == trajectory.tool_events
    assert sandbox.closed == 1


def test_a_grader_that_raises_closes_every_sandbox(
    environment: Make, harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def verify(problem: Problem, attempt: Attempt) -> Verdict:
        raise ZeroDivisionError

    monkeypatch.setattr(TASKS["sort"], "verify", verify)
    sandbox = FakeSandbox()
    script = in_turn(call(harmony, "bash", '{"script": "ls"}'), final(harmony))
    with pytest.raises(GradingError) as caught:
        play(environment(POOL + TOOLS), script, sandbox=sandbox, samples=3)
    assert len(caught.value.trajectory.turns) == 2
    assert sandbox.closed == 3


# --- concurrency -------------------------------------------------------------------------------------------------------


def test_a_slow_tool_delays_only_its_own_trajectory(environment: Make, harmony: Harmony) -> None:
    """Of 40 trajectories one sleeps for half a second; the others have long been graded by then."""
    graded: list[tuple[float, int]] = []
    demo = environment(POOL + TOOLS)
    grade = demo.grader.grade

    async def timed(*args: Any, **keys: Any) -> Any:
        graded.append((time.perf_counter() - began, len(keys["tool_events"])))
        return await grade(*args, **keys)

    demo.grader.grade = timed  # type: ignore[method-assign]

    def script(request: Request, index: int) -> list[int]:
        if request.samples == 1:
            return final(harmony)
        seconds = 0.5 if index == 13 else 0.01
        return call(harmony, "sleep", f'{{"seconds": {seconds}}}')

    began = time.perf_counter()
    trajectories, _ = play(demo, script, samples=40)
    assert time.perf_counter() - began < 2
    assert all(trajectory.grade.score == 1 for trajectory in trajectories)
    times = [seconds for seconds, _ in graded]
    assert sorted(times)[-2] < 0.4 < max(times)


def test_an_interruption_ends_every_tool(environment: Make, harmony: Harmony) -> None:
    """What cancels the collection cancels the calls; every sandbox is closed when it has."""
    ended: list[str] = []

    class Hangs(FakeSandbox):
        async def bash(self, script: str, *, limits: Limits | None = None) -> Result:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append(script)
                raise
            raise AssertionError("slept on")

    class Interrupts(ScriptedEngine):
        def run(self, coroutine: Any) -> Any:
            async def soon() -> Any:
                return await asyncio.wait_for(coroutine, 0.2)

            return asyncio.run(soon())

    sandbox = Hangs()
    engine = Interrupts(endless(harmony, "bash", '{"script": "sleep"}'))
    collector = Collector(engine, environment(POOL + TOOLS), CONTEXT, FakeSandboxes(sandbox))  # type: ignore[arg-type]
    began = time.perf_counter()
    with pytest.raises(TimeoutError):
        # As many as a single core lets call at once.
        collector.collect([PROBLEM] * 2, CALLS_PER_CORE // 2, Sampling(100), KEY)
    assert time.perf_counter() - began < 2
    assert (ended, sandbox.closed) == (["sleep"] * CALLS_PER_CORE, CALLS_PER_CORE)


# --- anything a policy can sample --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tokens_make_a_trajectory(data: st.DataObject, environment: Make, harmony: Harmony) -> None:
    """Random tokens, calls and answers in any order: one failure each, a mask that is that of the samples, and a row of tokens
    that is what the engine saw."""
    demo = environment(POOL + TOOLS + "[budget]\nturns = 4\n")
    pieces = [
        call(harmony, "add", '{"x": 1}'),
        call(harmony, "echo", '{"te'),
        call(harmony, "nope", ""),
        final(harmony),
    ]
    sampled: dict[tuple[int, ...], list[Sample]] = {}
    engine = ScriptedEngine(lambda request, index: [])

    def script(request: Request, index: int) -> list[int]:
        tokens = st.lists(st.integers(-2, 330) | st.integers(0, 7), max_size=12)
        return data.draw(st.sampled_from(pieces) | tokens.map(lambda ids: [*ids, 1]))

    def remembered(request: Request, index: int) -> Sample:
        engine.script = script
        sample = engine._sample(request, index)
        engine.script = remembered
        sampled.setdefault(request.prompt_ids, []).append(sample)
        return sample

    engine.script = remembered
    collector = Collector(engine, demo, CONTEXT, FakeSandboxes(FakeSandbox()))  # type: ignore[arg-type]
    (group,) = collector.collect([PROBLEM], 2, Sampling(150), KEY).groups
    prompt_ids = tuple(demo.prompts.ids(PROBLEM))
    for trajectory in group.trajectories:
        assert trajectory.grade.failure in FAILURES
        assert 1 <= len(trajectory.turns) <= 4
        seen = prompt_ids
        for turn in trajectory.turns:
            seen = (*seen, *turn.given_ids)
            assert any(turn.sample is sample for sample in sampled[seen])
            seen = (*seen, *turn.sample.token_ids)
        assert (*prompt_ids, *trajectory.token_ids) == seen
        expected = [(0, 0.0, -1)] * len(trajectory.token_ids)
        for span in trajectory.spans:
            sample = trajectory.turns[span.turn].sample
            if span.kind == "sampled":
                expected[span.start : span.end] = list(
                    zip([1] * len(sample.token_ids), sample.logprobs, sample.versions, strict=True)
                )
        assert list(zip(trajectory.mask, trajectory.logprobs, trajectory.versions, strict=True)) == expected
        assert sum(trajectory.mask) == trajectory.sampled_tokens <= 150
