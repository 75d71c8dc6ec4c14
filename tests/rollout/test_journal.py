"""The journal of a run that samples beside its training: what is written is read again, and what a later process superseded is
not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine

from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.envs.tools.executor import AsyncToolExecutor
from nmoe.errors import UserError
from nmoe.rollout.collector import Collector
from nmoe.rollout.journal import FILE, Arrival, Journal, read_journal, spans_of
from nmoe.text.harmony import Harmony
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Failure, Grade, Message, Problem, Sample, Sampling, ToolCall, ToolEvent, Turn

PROBLEM = Problem("sort/1", "sort", "2 1", "1 2", "sort")
EVENT = ToolEvent(ToolCall("python", '{"code": "1"}', "0/0"), "ok", "1\n", "", started_s=0.5, wall_s=0.25)


def trajectory(
    index: int, *turns: list[int], events: tuple[ToolEvent, ...] = (), failure: Failure = "ok"
) -> Trajectory:
    """A sample whose turns have a token for each of these versions."""
    sampled = tuple(Turn((), Sample([7] * len(of), [-1.0] * len(of), of, "stop")) for of in turns)
    grade = Grade(0.0, {}, failure, {}, None, weights={})
    return Trajectory(PROBLEM, index, (1,), sampled, grade, Sampling(30), events)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def test_tokens_of_a_version_that_follow_one_another_are_one_span() -> None:
    assert spans_of([3, 3, 4, 4, 4, 3]) == ((3, 2), (4, 3), (3, 1))
    assert spans_of([]) == ()


def test_an_arrival_has_the_spans_of_every_request_and_the_results_of_tools(tmp_path: Path, journal: Journal) -> None:
    journal.begin(0)
    samples = [
        trajectory(0, [0, 0, 1], [1], events=(EVENT,)),
        trajectory(1, []),
        trajectory(2, [2], failure="timeout"),
    ]
    journal.arrive(3, 11, Group(PROBLEM, samples))
    spans = {(0, 0): ((0, 2), (1, 1)), (0, 1): ((1, 1),), (1, 0): (), (2, 0): ((2, 1),)}
    assert read_journal(tmp_path).arrivals == {11: Arrival(spans, {0: (EVENT.record(),)}, frozenset({2}))}


def test_events_are_read_in_the_order_in_which_they_were_written(tmp_path: Path, journal: Journal) -> None:
    journal.begin(0)
    journal.issue(1, 0, [0, 1, 2])
    journal.fault(1, "killed")
    journal.end(1, 2, "zero_variance")
    journal.train(1, [1, 0])
    journal.publish(1)
    assert list(read_journal(tmp_path).events) == [
        {"event": "begin", "step": 0, "ranks": 1},
        {"event": "issue", "step": 1, "version": 0, "positions": [0, 1, 2]},
        {"event": "fault", "engine": 1, "what": "killed"},
        {"event": "end", "step": 1, "position": 2, "reason": "zero_variance"},
        {"event": "train", "step": 1, "positions": [1, 0]},
        {"event": "publish", "version": 1},
    ]


def test_a_resumed_run_supersedes_later_steps_and_what_was_outstanding(tmp_path: Path, journal: Journal) -> None:
    journal.begin(0)
    journal.issue(1, 0, [0, 1, 2, 3])
    for position, step in ((0, 1), (1, 1), (2, 2)):
        journal.arrive(step, position, Group(PROBLEM, [trajectory(0, [0])]))
    journal.train(1, [0])
    journal.issue(2, 1, [4])
    journal.end(2, 2, "zero_variance")
    journal.train(2, [1])
    # Position 3 never came, and 1 and 2 ended in a step that is taken again.
    journal.begin(1)
    journal.issue(2, 1, [1, 2, 3])
    journal.arrive(2, 2, Group(PROBLEM, [trajectory(0, [1, 1])]))
    journal.train(2, [2])
    recorded = read_journal(tmp_path)
    kept = [(one["event"], one.get("positions", one.get("position"))) for one in recorded.events]
    assert kept == [
        ("begin", None),
        ("issue", [0]),
        ("arrive", 0),
        ("train", [0]),
        ("begin", None),
        ("issue", [1, 2, 3]),
        ("arrive", 2),
        ("train", [2]),
    ]
    assert {position: arrival.spans[0, 0] for position, arrival in recorded.arrivals.items()} == {
        0: ((0, 1),),
        2: ((1, 2),),
    }
    assert (recorded.begins, recorded.ranks) == (2, 1)


def test_a_last_line_that_a_kill_cut_off_is_left_out_and_written_over(tmp_path: Path, journal: Journal) -> None:
    journal.begin(0)
    journal.issue(1, 0, [0])
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"event": "arrive", "st')
    assert len(read_journal(tmp_path).events) == 2
    journal.begin(0)
    journal.issue(1, 0, [5])
    recorded = read_journal(tmp_path)
    assert [one.get("positions") for one in recorded.events] == [None, None, [5]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ("[1]", "no such event"),
        ('{"event": "born", "step": 1}', "no such event"),
        ('{"event": "train", "step": "1", "positions": []}', "its step is '1'"),
        ('{"event": "train", "step": 1, "positions": [-1]}', "its positions is"),
        ('{"event": "end", "step": 1, "position": 1}', "its reason is None"),
        ('{"event": "arrive", "step": 1, "position": 1}', "'spans'"),
        ('{"event": "arrive", "step": 1, "position": 1, "spans": {"0/0": [[1, 0]]}}', "its spans of 0/0"),
        ('{"event": "arrive", "step": 1, "position": 1, "spans": {"0": [[1, 2]]}}', "not enough values"),
        ('{"event": "arrive", "step": 1, "position": 1, "spans": [1]}', "no attribute"),
    ],
)
def test_other_damage_is_refused_with_its_line(tmp_path: Path, journal: Journal, line: str, reason: str) -> None:
    journal.begin(0)
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n" + json.dumps({"event": "publish", "version": 1}) + "\n")
    with pytest.raises(UserError) as error:
        read_journal(tmp_path)
    assert f"{tmp_path / FILE}:2: " in str(error.value)
    assert reason in str(error.value)


def test_a_journal_that_is_missing_headless_or_empty_is_refused(tmp_path: Path, journal: Journal) -> None:
    with pytest.raises(UserError, match="only a run with async"):
        read_journal(tmp_path)
    (tmp_path / FILE).write_text("")
    with pytest.raises(UserError, match="the journal is empty"):
        read_journal(tmp_path)
    journal.publish(1)
    with pytest.raises(UserError, match="does not begin with a start"):
        read_journal(tmp_path)


TOOLS = """
[task_pool]
type = "generated"
task_type = "sort"

[tools]
use = ["tool_cases:add", "tool_cases:fail", "tool_cases:sleep"]

[budget]
wall_s = 0.5
tool_s = 9
"""


def test_tools_are_answered_by_the_record(
    environment: Callable[[str], Environment],
    harmony: Harmony,
    tmp_path: Path,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer, a tool that fails, and time that was up while a tool ran: each is as it was, and no tool runs."""

    def call(name: str, arguments: str) -> list[int]:
        to = {"recipient": f"functions.{name}", "content_type": "json"}
        return harmony.render_completion([Message("assistant", arguments, "commentary", **to)])

    ends = harmony.render_completion([Message("assistant", "12", channel="final")])
    turns = {
        0: [call("add", '{"x": 40}'), call("add", '{"x": 1, "y": 1}'), ends],
        1: [call("fail", "{}"), ends],
        2: [call("add", '{"x": 2}'), call("sleep", '{"seconds": 60}'), ends],
    }

    def script(request: Request, index: int) -> Sample:
        *_, sample, turn = request.request_id.split("/")
        ids = turns[index][0] if request.samples > 1 else turns[int(sample)][int(turn)]
        return Sample(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    def played() -> Group:
        collector = Collector(ScriptedEngine(script), environment(TOOLS), 2000)  # type: ignore[arg-type]
        if (tmp_path / FILE).exists():
            collector.take_answers(read_journal(tmp_path).answers)
        return collector.collect([PROBLEM], 3, Sampling(400), (7, "train"), [11]).groups[0]

    before = played()
    assert [one.grade.failure for one in before.trajectories][2] == "timeout"
    assert [len(one.tool_events) for one in before.trajectories] == [2, 1, 1]
    journal.begin(0)
    journal.arrive(1, 11, before)

    async def runs(*_: object) -> None:
        raise AssertionError("a tool runs")

    monkeypatch.setattr(AsyncToolExecutor, "run", runs)
    now = played()
    assert now.trajectories == before.trajectories
