"""Plays environments of verifiers 0.4.0 (v1). Imported by host.py, and by verifiers itself as the harness `verifiers_v1`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import verifiers.v1 as vf
from host import is_lost, says_ended, text_of
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]

_ATTEMPTS = 4
# Failures of the infrastructure around an episode; TaskError and EnvError are the environment's own code.
_INFRASTRUCTURE = {"HarnessError", "InterceptionError", "SandboxError", "ToolsetError", "TunnelError"}


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for one turn, in this process. The harness `null` does the same in a process for each turn, which takes a second."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    _client: httpx.AsyncClient | None = None

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        )
        if ChatHarness._client is None:
            # No idle connections: the servers at the other end come and go.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            ChatHarness._client = httpx.AsyncClient(timeout=None, verify=False, trust_env=False, limits=limits)
        reply = await _posted(
            ChatHarness._client, f"{endpoint}/chat/completions", secret, {"model": ctx.model, "messages": messages}
        )
        # The episode may have no further turn: it is over, and scored as it is. Another server's 403 is a failure.
        ended = reply.status_code == 403 and says_ended(reply.text, trace.id)
        if ended or (reply.is_error and trace.stop_condition is not None):
            return ProgramResult(0, "", "")
        return ProgramResult(1, "", reply.text) if reply.is_error else ProgramResult(0, "", "")


async def _posted(client: httpx.AsyncClient, url: str, secret: str, body: dict[str, Any]) -> httpx.Response:
    """Asks again where a connection was lost. By the header verifiers knows the request, and answers it from the first attempt."""
    for attempt in itertools.count():
        headers = {"Authorization": f"Bearer {secret}"} | ({"x-stainless-retry-count": str(attempt)} if attempt else {})
        try:
            return await client.post(url, json=body, headers=headers)
        except httpx.TransportError:
            if attempt == _ATTEMPTS:
                raise
            await asyncio.sleep(0.1 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


class Adapter:
    """The environment that the settings describe: {"environment": the table [env] of vf-eval}."""

    LOST = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if settings.get("split"):
            raise ValueError(
                "`split` is for environments of v0; here it is a key of environment.taskset, if the taskset has splits"
            )
        given = dict(settings["environment"])
        taskset = dict(given.get("taskset") or {})
        if not taskset.get("id"):
            raise ValueError('name the taskset: environment = { taskset = { id = "..." } }')
        kind = vf.env_config_type(taskset["id"], given.get("id") or "")
        own = vf.default_harness_id(taskset["id"])
        for name, field in kind.model_fields.items():
            if not isinstance(field.default, vf.AgentConfig):
                continue
            agent = dict(given.get(name) or {})
            agent.setdefault("runtime", {"type": "subprocess"})
            if field.default.harness is None and own == "bash":
                agent.setdefault("harness", {"id": __name__})
            given[name] = agent
        config = vf.resolve_env_config(given)
        agents = {name: one for name, one in config if isinstance(one, vf.AgentConfig)}
        policy = [name for name, one in agents.items() if one.client is None]
        if len(policy) != 1:
            raise ValueError(
                f"the policy would play {' and '.join(policy) or 'none of its agents'}; name another `client` and `model` for "
                "all agents but one"
            )
        (self._policy,) = policy
        if (
            config.retries.max_retries
            or config.retries.rules
            or agents[self._policy].retries.max_retries
            or agents[self._policy].retries.rules
        ):
            raise ValueError("`retries` would begin an episode again whose turns are recorded; leave them out")
        self._env = vf.load_environment(config)
        self._coming = iter(self._env.taskset)
        self._tasks: list[Any] = []

    def _task(self, index: int) -> Any:
        self._tasks.extend(itertools.islice(self._coming, max(0, index + 1 - len(self._tasks))))
        return self._tasks[index]

    def tasks(self, most: int) -> tuple[list[dict[str, Any]], bool]:
        """Returns the first tasks, and whether there are more."""
        self._tasks.extend(itertools.islice(self._coming, max(0, most + 1 - len(self._tasks))))
        return [self._shown(one) for one in self._tasks[:most]], len(self._tasks) > most

    def _shown(self, task: Any) -> dict[str, Any]:
        data = task.data
        asked = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        if isinstance(data.prompt, str):
            asked.append({"role": "user", "content": data.prompt})
        else:
            asked += [{"role": one.role, "content": text_of(one.content)} for one in data.prompt or ()]
        return {"key": task.key, "prompt": asked}

    def key(self, index: int) -> str:
        key: str = self._task(index).key
        return key

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self._env.serving():
            yield

    async def play(self, index: int, url: str, session: str) -> dict[str, Any]:
        client = vf.EvalClientConfig(base_url=url, api_key_var="NMOE_NO_KEY")
        traces: list[Any] = []

        def begun(trace: Any) -> None:
            if trace.agent.name == self._policy or trace.agent.config.client.base_url == url:
                trace.id = session  # which verifiers sends as X-Session-ID
                traces.append(trace)

        episode = await self._env.run_episode(self._task(index), ModelContext("policy", client), on_trace=begun)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            return _failed(errors, session)
        if len(traces) != 1:
            return {"broken": f"the policy played {len(traces)} times in one episode, and a sample has one reward"}
        (trace,) = traces
        if late := [one.stop_condition for one in episode.traces if one.is_timeout]:
            # They score it as it is, without the rewards that were not there in time.
            return {"lost": f"{late[0]} of verifiers, which counts the time of the engine, too"}
        if trace.calls and (error := trace.calls[-1].error) is not None and _kind(error, session) != "ended":
            return _failed([error], session)  # which a program of the harness took for the end
        said = [one.content or "" for one in trace.assistant_messages]
        rewards = {name: one.value for name, one in trace.rewards.items() if one is not None}
        return {"reward": trace.reward, "rewards": rewards, "metrics": dict(trace.metrics), "said": said}


def _failed(errors: Sequence[Any], session: str) -> dict[str, str]:
    """Returns the answer of an episode with errors: `ended` only if nothing else failed, or it was all of one cause."""
    kinds = [_kind(error, session) for error in errors]
    kind, error = next((one for one in zip(kinds, errors, strict=True) if one[0] != "ended"), (kinds[0], errors[0]))
    status = "" if error.status_code is None else f" {error.status_code}"
    return {kind: f"{error.type}{status}: {error.message}"}


def _kind(error: Any, session: str) -> str:
    if says_ended(error.message, session):
        return "ended"
    # Of a model's provider: 5xx and 499 are its failures, others a request that it refuses.
    if error.type == "ProviderError":
        return "lost" if error.status_code in (None, 408, 429) or error.status_code >= 499 else "broken"
    if error.type in _INFRASTRUCTURE:
        return "lost"
    # A traceback names each exception of the chain at the beginning of a line, the last one at its end.
    for line in reversed((error.traceback or "").splitlines()):
        if line[:1].isalpha():
            if says_ended(line, session):
                return "ended"
            if is_lost(line.partition(":")[0]):
                return "lost"
    return "broken"
