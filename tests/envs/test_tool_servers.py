"""Tools of servers: what the policy reads of them, how calls end, and that records need no server. `Fake` stands in for a server of
the package mcp, which `.ci/mcp_servers.py` uses."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from nmoe.config.tables.rollout import BudgetSettings, OfferedTool, ToolServerSettings, ToolsSettings
from nmoe.envs.check import check_environment
from nmoe.envs.environment import Environment
from nmoe.envs.tools import servers
from nmoe.envs.tools.builtin import load_tools
from nmoe.envs.tools.executor import AsyncToolExecutor
from nmoe.envs.tools.mcp_client import Peer, PeerError, RefusedArgumentsError
from nmoe.envs.tools.servers import MOST_LOSSES, ServerTool, ToolServerError, pinned
from nmoe.envs.tools.session import ToolSession
from nmoe.envs.tools.tool import ToolOutput
from nmoe.errors import UserError
from nmoe.rollout.bundle import read_bundle
from nmoe.rollout.collector import Collector
from nmoe.rollout.named_code import code_of
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.rollout.replay import Check, replay
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Problem, Sampling, ToolCall, ToolEvent

Make = Callable[..., Environment]

ADD = {
    "type": "object",
    "properties": {"x": {"type": "integer", "title": "X"}, "y": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["x"],
}
SLEEP = {"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def offer(name: str, description: str = "Does it.", schema: Mapping[str, Any] = NOTHING) -> OfferedTool:
    return OfferedTool(name=name, description=description, parameters=json.dumps(schema, sort_keys=True))


class Fake:
    """Servers whose connections count their calls, as `connected` gives them."""

    def __init__(self) -> None:
        self.offered = [offer("add", "Adds.", ADD), offer("count"), offer("other-tool")]
        self.opened = self.open = 0
        self.refuses: Exception | None = None
        self.answers = True

    @asynccontextmanager
    async def connected(self, settings: ToolServerSettings) -> AsyncIterator[Any]:
        if self.refuses is not None:
            raise self.refuses
        self.opened, self.open = self.opened + 1, self.open + 1
        try:
            yield _Peer(self)
        finally:
            self.open -= 1


class _Peer:
    def __init__(self, fake: Fake) -> None:
        self._fake, self._calls = fake, Counter[str]()

    async def offers(self) -> tuple[OfferedTool, ...]:
        if self._calls["hang"] or not self._fake.answers:
            raise TimeoutError
        return tuple(self._fake.offered)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        self._calls[name] += 1
        if name == "add":
            return ToolOutput(str(arguments["x"] + (arguments.get("y") or 0)))
        if name == "count":
            return ToolOutput(str(self._calls[name]))
        if name in ("hang", "slow"):
            raise TimeoutError  # as its deadline does
        if name == "sleep":
            await asyncio.sleep(arguments["seconds"])
            return ToolOutput("slept")
        if name == "fail":
            return ToolOutput("no such word", "tool_error")
        if name == "refuse":
            raise RefusedArgumentsError("no such city")
        raise PeerError("MCPError: Connection closed", "; its program wrote: out of memory, key abc123")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    one = Fake()
    monkeypatch.setattr(servers, "connected", one.connected)
    monkeypatch.setattr(servers, "FIRST_WAIT_S", 0.0)
    return one


def settings(**keys: Any) -> ToolsSettings:
    return ToolsSettings(servers=[ToolServerSettings(name="notes", **({"command": ["notes"]} | keys))])


def runner(tools: ToolsSettings, budget: BudgetSettings) -> Callable[..., list[list[ToolEvent]]]:
    """Runs episodes one after the other, each with its calls."""
    executor = AsyncToolExecutor(load_tools(pinned(tools), budget), budget)

    async def played(episodes: list[list[str]]) -> list[list[ToolEvent]]:
        found = []
        for calls in episodes:
            async with ToolSession(None) as session:
                found.append(
                    [
                        (await executor.run([ToolCall(*call.partition(" ")[::2], "0/0")], session))[0]  # type: ignore[arg-type]
                        for call in calls
                    ]
                )
        return found

    return lambda *episodes: asyncio.run(played(list(episodes)))


BUDGET = BudgetSettings(tool_output_chars=256)


def test_the_settings_keep_what_the_server_listed_and_need_it_no_more(fake: Fake) -> None:
    found = pinned(settings(use=["add", "other-tool"], rename={"other-tool": "other"}))
    assert found.servers[0].offers == (fake.offered[0], fake.offered[2])
    fake.refuses = PeerError("gone")
    assert pinned(found) is found
    tools = load_tools(found, BUDGET)
    assert list(tools) == ["add", "other"]
    assert tools["add"].definition.description == "Adds."
    assert tools["add"].definition.parameters == {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "nullable": True}},
        "required": ["x"],
    }
    assert tools["other"].definition.parameters is None
    assert fake.opened == 1


@pytest.mark.parametrize(
    ("offered", "keys", "said"),
    [
        ([], {}, "'notes' has no tools"),
        ([offer("add")], {"use": ["sub"]}, "'notes' has no tool 'sub'; it has add"),
        ([offer("get-weather")], {}, "'get-weather' of the server 'notes': a tool's name is letters.*in `rename`"),
        ([offer("a", schema={"type": "array"})], {}, "no JSON schema of an object"),
        ([offer("a", schema={"type": "object", "properties": {"x": {"type": 3}}})], {}, "no JSON schema: 3 is not"),
        (
            [offer("a", schema={"type": "object", "properties": {"x": {"$ref": "http://elsewhere/x"}}})],
            {},
            "refer to 'http://elsewhere/x', which its schema does not define",
        ),
        ([offer("bash")], {}, "tool 'bash' of the server 'notes': another tool has that name"),
        ([offer("add")], {"env": ["NO_SUCH_KEY"]}, "needs the environment variable NO_SUCH_KEY, which is not set"),
    ],
)
def test_what_no_run_can_use_is_refused_before_it_begins(
    fake: Fake, offered: list[OfferedTool], keys: dict[str, Any], said: str
) -> None:
    fake.offered = offered
    with pytest.raises(UserError, match=said):
        load_tools(pinned(settings(**keys).model_copy(update={"use": ("bash",)})), BUDGET)


def test_a_server_that_does_not_start_is_named(fake: Fake) -> None:
    fake.refuses = PeerError("FileNotFoundError: notes")
    with pytest.raises(UserError, match="tool server 'notes' cannot be used: FileNotFoundError: notes"):
        pinned(settings())


def test_calls_end_as_the_server_says_and_never_in_a_made_up_reply(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.offered += [offer("fail"), offer("refuse"), offer("crash"), offer("slow"), offer("hang")]
    run = runner(settings(rename={"other-tool": "other"}), BUDGET)
    (events,) = run(
        [
            'add {"x": 40, "y": 2}',
            'add {"x": "a"}',
            "add [1]",
            "add {",
            "fail",
            "refuse",
            "crash",
            "count",
            "slow",
            "count",
            "hang",
            "count",
        ]
    )
    assert [(event.failure, event.output) for event in events] == [
        ("ok", "42"),
        ("parse_error", "error (parse_error): the arguments are not what add takes: x: 'a' is not of type 'integer'"),
        ("parse_error", "error (parse_error): the arguments are not what add takes: the arguments should be an object"),
        (
            "parse_error",
            "error (parse_error): the arguments are not what add takes: Invalid JSON: Expecting property name enclosed in double "
            "quotes: line 1 column 2 (char 1)",
        ),
        ("tool_error", "no such word\nerror (tool_error)"),
        ("parse_error", "error (parse_error): the arguments are not what refuse takes: no such city"),
        (
            "environment_error",
            "error (environment_error): tool server 'notes': MCPError: Connection closed",
        ),
        ("ok", "1"),
        ("timeout", "error (timeout): slow took longer than 10 s"),
        ("ok", "2"),
        ("environment_error", "error (environment_error): tool server 'notes': hang took longer than 10 s"),
        ("ok", "1"),
    ]
    said = "warning: tool server 'notes': MCPError: Connection closed; its program wrote: out of memory, key abc123\n"
    assert capsys.readouterr().err == said
    assert "abc123" not in str(events), "records are no place for what a program writes"


def test_arguments_that_no_message_carries_are_the_policys_mistake(fake: Fake) -> None:
    half = {"type": "number", "multipleOf": 0.5}
    tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
    properties = {"half": half, "tree": {"$ref": "#/$defs/tree"}, "any": {}}
    fake.offered = [offer("count", schema={"type": "object", "properties": properties, "$defs": {"tree": tree}})]
    deep = "[" * 900 + "]" * 900
    given = ['{"any": "\\ud800"}', '{"any": NaN}', '{"half": 1e999}', f'{{"half": {"9" * 4000}}}']
    given += [f'{{"tree": {deep}}}', f'{{"any": {deep}}}']
    (events,) = runner(settings(), BUDGET)([f"count {arguments}" for arguments in given])
    assert [event.failure for event in events] == ["parse_error"] * 6
    assert [event.reason.partition("takes: ")[2][:27] for event in events] == [
        "they cannot be sent: 'utf-8",
        "they cannot be sent: Out of",
        "they cannot be sent: Out of",
        "they cannot be sent: int to",
        *["arrays or objects nested to"] * 2,
    ]
    assert fake.opened == 1, "which listed the tools"


def test_an_episode_has_a_connection_of_its_own_unless_the_run_has_one(fake: Fake) -> None:
    keys = {"use": ["count"]}
    own = runner(settings(**keys), BUDGET)(["count", "count"], ["count"])
    assert [[event.output for event in events] for events in own] == [["1", "2"], ["1"]]
    shared = runner(settings(**keys, scope="run"), BUDGET)(["count", "count"], ["count"])
    assert [[event.output for event in events] for events in shared] == [["1", "2"], ["3"]]
    deadline = time.monotonic() + 60
    while fake.open > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.open == 1, "all are closed but the one that is shared"


def test_other_tools_than_at_the_start_stop_the_run(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_CHECK_S", 0.0)
    run = runner(settings(use=["add"]), BUDGET)
    assert run(['add {"x": 1}'])[0][0].output == "1"
    fake.offered = [offer("add", "Multiplies.", ADD), offer("new")]
    said = "'notes' has other tools than when the run began: 'add' is described as 'Multiplies.', and was as 'Adds.'"
    with pytest.raises(ToolServerError, match=said):
        run(['add {"x": 1}'])
    fake.offered = []
    with pytest.raises(ToolServerError, match="'add' is gone"):
        run(['add {"x": 1}'])


def test_tools_that_change_while_a_server_serves_the_run_stop_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.offered.append(offer("refuse"))
    run = runner(settings(use=["add", "refuse"], scope="run"), BUDGET)
    assert run(['add {"x": 1}', "refuse"])[0][1].failure == "parse_error"
    fake.offered[0] = offer("add", "Adds.", NOTHING)
    assert run(['add {"x": 1}'])[0][0].output == "1", "its list is read now and then"
    with pytest.raises(ToolServerError, match="'add' takes "):
        run(["refuse"])  # as a server refuses a tool that it has no more
    monkeypatch.setattr(servers, "_CHECK_S", 0.0)
    with pytest.raises(ToolServerError, match="'add' takes "):
        run(['add {"x": 1}'])


def test_a_server_that_is_lost_again_and_again_stops_the_run(fake: Fake) -> None:
    run = runner(settings(use=["add"]), BUDGET)
    fake.refuses = PeerError("ConnectError: refused")
    lost = [['add {"x": 1}']] * (MOST_LOSSES - 1)
    assert {events[0].failure for events in run(*lost)} == {"environment_error"}
    fake.refuses = None
    assert run(['add {"x": 1}'])[0][0].output == "1"
    fake.refuses = PeerError("ConnectError: refused")
    run(*lost)
    with pytest.raises(ToolServerError, match=f"refused; it was lost {MOST_LOSSES} times in a row"):
        run(['add {"x": 1}'])


def test_many_that_are_lost_at_once_count_once(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.offered = [offer("sleep", schema=SLEEP)]
    starts, begun = asyncio.Semaphore(2 * MOST_LOSSES), fake.connected

    @asynccontextmanager
    async def together(settings: ToolServerSettings) -> AsyncIterator[Any]:
        """All begin before the first is lost, however slow the machine is."""
        async with begun(settings) as peer:
            while 1 < fake.opened <= 2 * MOST_LOSSES:
                await asyncio.sleep(0.01)
            yield peer

    monkeypatch.setattr(servers, "connected", together)
    monkeypatch.setattr(servers, "_starts", lambda: starts)
    budget = BudgetSettings(tool_s=0.3)
    executor = AsyncToolExecutor(load_tools(pinned(settings()), budget), budget)
    fake.answers = False

    async def episode() -> ToolEvent:
        async with ToolSession(None) as session:
            return (await executor.run([ToolCall("sleep", '{"seconds": 60}', "0/0")], session))[0]

    async def all_at_once() -> list[ToolEvent]:
        return await asyncio.gather(*(episode() for _ in range(2 * MOST_LOSSES)))

    said = {(event.failure, event.reason) for event in asyncio.run(all_at_once())}
    assert said == {("environment_error", "tool server 'notes': sleep took longer than 0.3 s")}


def test_a_call_that_is_cancelled_leaves_no_connection_behind(fake: Fake) -> None:
    """Also where the episode closed its connections before the call had made one."""
    fake.offered = [offer("sleep", schema=SLEEP)]
    (tool,) = load_tools(pinned(settings()), BUDGET).values()
    assert isinstance(tool, ServerTool)
    own: dict[servers.ToolServer, servers.Connection] = {}

    async def cancelled() -> None:
        call = asyncio.create_task(tool.server.call(own, tool, {"seconds": 60}, 60))
        while fake.opened < 2:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])

    asyncio.run(cancelled())
    deadline = time.monotonic() + 60
    while fake.open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (fake.opened, fake.open, own) == (2, 0, {})


@pytest.mark.parametrize("written", ["key sk-1 refused", "no key"])
def test_a_programs_last_words_hold_no_value_that_it_was_given(written: str) -> None:
    with tempfile.TemporaryFile() as words:
        words.write(written.encode())
        words.flush()
        error = Peer(None, words, {"NOTES_KEY": "sk-1"}).error(ConnectionError("closed"))
    assert str(error) == "ConnectionError: closed"
    assert error.words == f"; its program wrote: {written.replace('sk-1', '$NOTES_KEY')}"


ENVIRONMENT = """
task = "sort"
[tools]
[[tools.servers]]
name = "notes"
command = ["notes"]
use = ["add", "hang", "sleep"]
[budget]
wall_s = 0.5
"""
PROBLEM = Problem("demo/0", "sort", "Sort: 312", "123", "demo")


def called(harmony: Harmony, name: str, arguments: str) -> list[int]:
    to_tool = Message("assistant", arguments, "commentary", recipient=f"functions.{name}", content_type="json")
    return harmony.render_completion([to_tool])


def test_a_run_records_what_a_server_said_and_replays_without_it(
    fake: Fake,
    environment: Make,
    harmony: Harmony,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.offered += [offer("hang"), offer("sleep", schema=SLEEP)]
    demo = environment(ENVIRONMENT)
    prompt = tokenizer.decode(demo.prompts.ids(PROBLEM))
    assert "// Adds.\ntype add = (_: {\nx: number,\ny?: number | null,\n}) => any;" in prompt
    answer = harmony.render_completion([Message("assistant", "123", channel="final")])
    # The wait is longer than wall_s, which is no fault of the policy's.
    calls = [called(harmony, "add", '{"x": 41, "y": 1}'), called(harmony, "sleep", '{"seconds": 0.8}')]
    scripts = [[*calls, answer], [called(harmony, "hang", "{}"), answer]]
    turns = Counter[int]()

    def script(request: Any, index: int) -> list[int]:
        index = index if request.samples > 1 else int(request.request_id.split("/")[-2])
        turns[index] += 1
        return scripts[index][turns[index] - 1]

    collector = Collector(ScriptedEngine(script), demo, 4000)  # type: ignore[arg-type]
    (group,) = collector.collect([PROBLEM], 2, Sampling(600), (1, "train", 1)).groups
    right, lost = group.trajectories
    assert [event.output for event in right.tool_events] == ["42", "slept"]
    assert (right.grade.failure, right.trainable) == ("ok", True)
    assert right.grade.components["correctness"] == 1.0
    assert (lost.grade.failure, lost.trainable, turns[1]) == ("environment_error", False, 1)
    assert lost.tool_events[0].reason == "tool server 'notes': hang took longer than 10 s"

    fake.refuses = PeerError("a replay asks no server")
    recorder = ReplayRecorder(tmp_path, demo, tokenizer, seed=0, sample_rate=1.0, per_failure=0)
    for path in recorder.write(1, [right, lost]):
        bundle = read_bundle(path)
        assert bundle.settings.tools is not None
        assert bundle.settings.tools.servers[0].offers == (fake.offered[0], *fake.offered[3:])

        async def checks(bundle: Any = bundle) -> list[Check]:
            return [check async for check in replay(bundle, tokenizer)]

        found = {check.name: check for check in asyncio.run(checks())}
        assert [check for check in found.values() if check.difference is not None] == []
        count = len(bundle.trajectory().tool_events)
        assert (
            found["tools"].compared
            == f"{count} calls and what they returned ({count} by servers, taken from the record)"
        )


def test_a_program_that_a_bundle_would_start_is_named(fake: Fake, environment: Make) -> None:
    demo = environment(ENVIRONMENT.replace(', "hang", "sleep"', ""))
    assert code_of(demo.settings, None) == []
    assert demo.settings.tools is not None
    (server,) = demo.settings.tools.servers
    unpinned = ToolsSettings(servers=[server.model_copy(update={"offers": None})])
    assert code_of(demo.settings.model_copy(update={"tools": unpinned}), None) == [
        "the program notes, as [[tools.servers]] says"
    ]


def test_harmony_shows_all_parameters_or_the_tool_is_refused(fake: Fake, environment: Make) -> None:
    either = {"type": "object", "properties": {"to": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}}
    fake.offered = [offer("add", "Adds.", ADD), offer("hang", "Waits.", either), offer("sleep")]
    with pytest.raises(UserError, match="tool 'hang' of the server 'notes': Harmony cannot show its parameter 'to'"):
        environment(ENVIRONMENT)


def test_a_check_of_the_environment_shows_the_tools_or_why_there_are_none(fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "demo.toml"
    file.write_text('env_id = "demo"\n' + ENVIRONMENT.replace(', "hang", "sleep"', ""))
    lines = list(check_environment(file, None))
    assert "tool         add, of the server notes" in lines
    assert any("type add = (_: {" in line for line in lines)
    fake.refuses = PeerError("FileNotFoundError: notes")
    with pytest.raises(UserError, match=r"demo\.toml: tool server 'notes' cannot be used: FileNotFoundError"):
        list(check_environment(file, None))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"command": []}, "give either the `command` that starts a server, or the `url` of one"),
        ({"url": "http://127.0.0.1:1/mcp"}, "give either"),
        ({"command": [], "url": "notes"}, "'notes' is no URL of a server"),
        ({"command": [], "url": "http://me:secret@host/mcp"}, "contains a user or password"),
        ({"command": [], "url": "http://host/mcp", "env": ["KEY"]}, "is for a program"),
        ({"token_env": "KEY"}, "is for a `url`"),
        ({"env": ["sk-123"]}, "must be the name of an environment variable, not its value"),
        ({"env": ["NMOE_ENGINE_KEY"]}, "is nmoe's own, and no server gets it"),
        ({"use": ["add"], "rename": {"sub": "minus"}}, "'sub' is not among the tools of `use`"),
    ],
)
def test_bad_settings_of_a_server(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(**keys)


def test_two_servers_have_two_names() -> None:
    one = ToolServerSettings(name="notes", command=["notes"])
    with pytest.raises(ValueError, match="names must be unique"):
        ToolsSettings(servers=[one, one])


def test_a_tool_is_the_servers() -> None:
    found = settings(offers=[offer("add", "Adds.", ADD)])
    tool = load_tools(found, BUDGET)["add"]
    assert isinstance(tool, ServerTool)
    assert tool.parse(' {"x": 1} ') == {"x": 1}
