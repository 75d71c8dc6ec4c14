"""Plays environments of verifiers 0.3.1 (v0: `load_environment`). Imported by host.py."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import openai
import verifiers as vf
from host import failed, text_of
from verifiers.legacy.clients import OpenAIChatCompletionsClient
from verifiers.legacy.errors import InfraError, OverlongPromptError

_session: ContextVar[str] = ContextVar("session")


class PolicyClient(OpenAIChatCompletionsClient):
    """Asks the policy for the session of the running episode."""

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        headers = {**(kwargs.pop("extra_headers", None) or {}), "X-Session-ID": _session.get()}
        try:
            return await super().get_native_response(*args, extra_headers=headers, **kwargs)
        except openai.PermissionDeniedError as error:
            # The episode may have no further turn: it is over, and scored as it is.
            raise OverlongPromptError(str(error)) from error

    async def raise_from_native_response(self, response: Any) -> None:
        """Takes a turn without words, too, which verifiers calls an error of the model: the policy has said nothing."""

    async def from_native_response(self, response: Any) -> Any:
        found = await super().from_native_response(response)
        if found.message.content is None and not found.message.tool_calls:
            found.message.content = ""
        return found


class Adapter:
    """The environment that the settings describe: {"environment": {"id": ..., "args": {...}}, "split": ...}."""

    LOST = (InfraError,)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        logging.getLogger("verifiers").setLevel(logging.WARNING)
        given = dict(settings["environment"])
        name, args = given.pop("id", None), given.pop("args", {})
        if not isinstance(name, str) or given:
            raise ValueError(
                'name the environment: environment = { id = "...", args = { ... } }'
                + (f", not {sorted(given)}" if given else "")
            )
        self._env = env = vf.load_environment(name, **args)
        if env.requires_group_rollouts:
            raise ValueError(f"{name} has rewards of a whole group, which nmoe does not ask for")
        rows = env.get_eval_dataset() if settings.get("split") == "eval" else env.get_dataset()
        self._rows: list[dict[str, Any]] = rows.to_list()
        self._client: PolicyClient | None = None

    def tasks(self, most: int) -> tuple[list[dict[str, Any]], bool]:
        """Returns the first tasks, and whether there are more."""
        shown = [{"key": self.key(index), "prompt": _messages(row)} for index, row in enumerate(self._rows[:most])]
        return shown, len(self._rows) > most

    def key(self, index: int) -> str:
        return hashlib.sha256(json.dumps(self._rows[index], sort_keys=True, default=repr).encode()).hexdigest()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def play(self, index: int, url: str, session: str) -> dict[str, Any]:
        if self._client is None or str(self._client.client.base_url).rstrip("/") != url:
            self._client = PolicyClient(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=None))
        _session.set(session)
        # None for a missing column of another row is no value.
        row = {name: value for name, value in self._rows[index].items() if value is not None}
        state = await self._env.rollout(row, self._client, "policy", {})
        if (error := state.get("error")) is not None:
            return failed(error, session, self.LOST)
        if state.get("timed_out"):
            # They score it as it is, also where the environment's own call raised the TimeoutError.
            return {"lost": "verifiers ended it by a timeout, which counts the time of the engine, too"}
        try:
            await self._env.rubric.score_rollout(state)
        finally:
            await self._env.rubric.cleanup(state)
        said = [text_of(step["response"].message.content) for step in state["trajectory"]]
        return {"reward": state["reward"], "rewards": {}, "metrics": dict(state["metrics"] or {}), "said": said}


async def _earned(rubric: vf.Rubric, func: Callable[..., Any], state: Any) -> float:
    """Returns what a reward function gives. Their own method logs an exception, or a result that is no number, and takes 0."""
    parameters = inspect.signature(func).parameters
    given = rubric.score_objects(state)
    if not any(one.kind == one.VAR_KEYWORD for one in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    if getattr(func, "__qualname__", "") == "MathRubric.correct_answer":
        func = partial(_verified, getattr(func, "__self__", rubric))
    found = func(**given)
    if inspect.isawaitable(found):
        found = await found
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{getattr(func, '__name__', func)} gave the reward {found!r}, not a number") from error


async def _verified(rubric: Any, parser: Any, completion: Any, answer: str, **_: Any) -> float:
    """Does what `MathRubric.correct_answer` does. That takes 0 also where its process was lost, or did not come to this answer."""
    from verifiers.legacy.rubrics.math_rubric import verify_response

    response = parser.parse_answer(completion) or ""
    limits = (rubric.max_verify_chars, int(rubric.timeout_seconds))
    try:
        asked = asyncio.get_running_loop().run_in_executor(rubric.executor, verify_response, response, answer, *limits)
        right, seconds = await asyncio.wait_for(asked, rubric.HARD_TIMEOUT_SECONDS)
    except BrokenProcessPool:
        rubric.executor = ProcessPoolExecutor(max_workers=1)
        raise
    return float(right) if seconds <= rubric.timeout_seconds else 0.0


# On the class, because rubrics are in groups of rubrics and of environments, and functions may be added at any time.
vf.Rubric._call_individual_reward_func = _earned


def _messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    prompt = row.get("prompt") or []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": one["role"], "content": text_of(one.get("content"))} for one in prompt]
