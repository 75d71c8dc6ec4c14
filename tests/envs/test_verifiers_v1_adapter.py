"""What the adapter of verifiers 0.4.0 answers for an episode, over a package that is made up: a reward, or why there is none."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest

URL, SESSION = "http://127.0.0.1:1/v1", "KXs3-f_Q"
OURS = 'upstream 403: {"error":{"message":"the episode has had its 2 turns; session KXs3-f_Q has ended","code":"budget_exceeded"}}'
OTHERS = OURS.replace(SESSION, "another")


@pytest.fixture
def version_1(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter of 0.4.0 over a package that is made up."""
    names = ("verifiers", "verifiers.v1", "verifiers.v1.clients", "verifiers.v1.dialects", "verifiers.v1.runtimes")
    made = {name: ModuleType(name) for name in (*names, "verifiers.v1.dialects.chat")}
    made["verifiers"].__dict__.update(v1=made["verifiers.v1"])
    kept = {"Harness": list, "HarnessConfig": int, "EvalClientConfig": SimpleNamespace, "AgentConfig": int}
    made["verifiers.v1"].__dict__.update(kept)
    made["verifiers.v1.clients"].__dict__.update(ModelContext=lambda model, client: None)
    made["verifiers.v1.dialects.chat"].__dict__.update(message_to_wire=vars)
    made["verifiers.v1.runtimes"].__dict__.update(ProgramResult=lambda code, said, error: (code, error))
    made["httpx"] = httpx2  # the same API
    made["host"] = importlib.import_module("nmoe.envs.outside.host")
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "nmoe.envs.outside.verifiers_v1", raising=False)
    yield importlib.import_module("nmoe.envs.outside.verifiers_v1")
    sys.modules.pop("nmoe.envs.outside.verifiers_v1", None)


def failure(kind: str, message: str, status: int | None = None, chain: Sequence[str] = ()) -> Any:
    lines = ["Traceback (most recent call last):", '  File "judge.py", line 7, in judge', *chain, f"{kind}: {message}"]
    traceback = None if kind == "ProviderError" else "\n".join(lines)
    return SimpleNamespace(type=kind, message=message, status_code=status, traceback=traceback)


def trace(**more: Any) -> Any:
    """A trace of one turn, as an episode without a failure leaves it."""
    kept = {
        "agent": SimpleNamespace(name="player", config=SimpleNamespace(client=SimpleNamespace(base_url=URL))),
        "errors": [],
        "is_timeout": False,
        "stop_condition": None,
        "calls": [SimpleNamespace(error=None)],
        "assistant_messages": [SimpleNamespace(content="yes"), SimpleNamespace(content=None)],
        "rewards": {"judged": SimpleNamespace(value=0.25), "late": None},
        "reward": 0.25,
        "metrics": {"turns": 2.0},
    }
    return SimpleNamespace(**{**kept, **more})


def played(version_1: Any, *traces: Any, errors: Sequence[Any] = ()) -> dict[str, Any]:
    async def run_episode(task: Any, context: Any, on_trace: Any) -> Any:
        for one in traces:
            on_trace(one)
        return SimpleNamespace(errors=list(errors), traces=list(traces))

    adapter = version_1.Adapter.__new__(version_1.Adapter)
    adapter._env, adapter._policy, adapter._tasks = SimpleNamespace(run_episode=run_episode), "player", [None]
    adapter._coming = iter(())
    answer: dict[str, Any] = asyncio.run(adapter.play(0, URL, SESSION))
    assert all(one.id == SESSION for one in traces), "by which the policy's record is found"
    return answer


def test_an_episode_gives_its_reward_and_what_it_heard(version_1: Any) -> None:
    ended = SimpleNamespace(error=failure("ProviderError", OURS, 403))
    for calls in ([SimpleNamespace(error=None)], [], [SimpleNamespace(error=None), ended]):
        answer = played(version_1, trace(calls=calls))
        assert answer == {
            "reward": 0.25, "rewards": {"judged": 0.25}, "metrics": {"turns": 2.0}, "said": ["yes", ""],
        }  # fmt: skip


BUG = failure("TaskError", "scoring: KeyError: 'gold'", None, ["KeyError: 'gold'", "The above exception was the cause"])
DOWN = failure("TaskError", "scoring: ConnectError: no judge", None, ["httpx.ConnectError: no judge"])
ENDED = failure("ProviderError", OURS, 403)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([ENDED], "ended"),
        ([failure("EnvError", "run(): ProviderError", None, [f"verifiers.v1.errors.ProviderError: {OURS}"])], "ended"),
        ([failure("ProviderError", OTHERS, 403)], "broken"),
        ([failure("ProviderError", "upstream 400: no", 400)], "broken"),
        *(([failure("ProviderError", "no", status)], "lost") for status in (408, 429, 499, 500, 503, None)),
        ([failure("SandboxError", "no sandbox")], "lost"),
        ([BUG], "broken"),
        ([DOWN], "lost"),
        ([ENDED, BUG], "broken"),
        ([ENDED, DOWN], "lost"),
        (
            [
                failure(
                    "TaskError", "scoring: ConnectError: x", None, [f"ProviderError: {OURS}", "httpx.ConnectError: x"]
                )
            ],
            "lost",
        ),
    ],
)
def test_why_an_episode_has_no_reward(errors: list[Any], kind: str, version_1: Any) -> None:
    """Errors of the trace and of the episode count alike, and its rewards not at all."""
    assert list(played(version_1, trace(errors=errors))) == [kind]
    assert list(played(version_1, trace(), errors=errors)) == [kind]


@pytest.mark.parametrize(
    ("traces", "answer"),
    [
        (
            [trace(is_timeout=True, stop_condition="scoring_timeout")],
            {"lost": "scoring_timeout of verifiers, which counts the time of the engine, too"},
        ),
        (
            [trace(calls=[SimpleNamespace(error=None), SimpleNamespace(error=failure("ProviderError", "gone", 503))])],
            {"lost": "ProviderError 503: gone"},
        ),
        ([], {"broken": "the policy played 0 times in one episode, and a sample has one reward"}),
        ([trace(), trace()], {"broken": "the policy played 2 times in one episode, and a sample has one reward"}),
    ],
)
def test_what_verifiers_scores_and_is_no_reward(traces: list[Any], answer: dict[str, str], version_1: Any) -> None:
    assert played(version_1, *traces) == answer


@pytest.mark.parametrize(
    ("status", "text", "stopped", "code"),
    [
        (200, "{}", None, 0),
        (403, OURS, None, 0),
        (403, OTHERS, None, 1),
        (400, "stopped", "max_turns", 0),
        (500, "no", None, 1),
    ],
)
def test_the_harness_ends_well_by_the_refusal_of_this_session_alone(
    status: int, text: str, stopped: str | None, code: int, version_1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answered(request: httpx2.Request) -> httpx2.Response:
        asked.append((str(request.url), request.headers["authorization"], request.read()))
        return httpx2.Response(status, text=text)

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(answered))
    monkeypatch.setattr(version_1.ChatHarness, "_client", client)
    harness = version_1.ChatHarness()
    harness.resolve_prompt = lambda data: (None, data)
    of, context = SimpleNamespace(id=SESSION, stop_condition=stopped), SimpleNamespace(model="policy")
    result = asyncio.run(harness.launch(context, of, None, "http://here/v1", "secret", None, "Go on."))
    assert result == (code, text if code else "")
    body = b'{"model":"policy","messages":[{"role":"user","content":"Go on."}]}'
    assert asked == [("http://here/v1/chat/completions", "Bearer secret", body)]
