"""Environments of nmoe as environments of verifiers before 0.4, with tools and turns of the user. In a module of your own:

    # my_sums.py
    from nmoe.adapters.verifiers_v0 import load_environment

and `vf.load_environment("my_sums", environment="word_problems", count=1000)`. Tested with verifiers 0.3.1.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

from nmoe.adapters.environment import SharedEnvironment, SharedEpisode, Step, shared_by_name


def load_environment(
    environment: str,
    count: int | None = None,
    eval_count: int | None = None,
    stage: str | None = None,
    opens_reasoning: bool | None = None,
    **more: Any,
) -> vf.Environment:
    """Returns the environment of a file or a packaged name, with `count` problems to train on, by default all, and `eval_count`
    held-out ones, if there is such a split. `opens_reasoning` says whether the model's chat template ends prompts in an opened
    think tag. `more` is what `vf.MultiTurnEnv` takes."""
    shared = shared_by_name(environment, stage)
    held_out = None if eval_count is None else _dataset(shared, eval_count, "eval")
    return NmoeEnv(shared, opens_reasoning, dataset=_dataset(shared, count, "train"), eval_dataset=held_out, **more)


def _dataset(shared: SharedEnvironment, count: int | None, split: Any) -> Dataset:
    rows = shared.rows(count, split=split)
    return Dataset.from_list([{"prompt": row["prompt"], "answer": "", "info": {"label": row["label"]}} for row in rows])


class NmoeEnv(vf.MultiTurnEnv):
    """Plays a shared environment. It grades with the last turn, because verifiers take an exception of a reward function as 0; one
    of a grader ends the rollout."""

    def __init__(self, shared: SharedEnvironment, opens_reasoning: bool | None, **more: Any) -> None:
        tools = [one["function"] for one in shared.tools]
        rubric = vf.Rubric(funcs=[score], weights=[1.0])
        for name in shared.components:
            rubric.add_metric(_component(name))
        super().__init__(rubric=rubric, tool_defs=tools or None, **more)
        self._shared, self._opens_reasoning = shared, opens_reasoning

    async def setup_state(self, state: Any) -> Any:
        episode = self._shared.episode(state["info"]["label"], opens_reasoning=self._opens_reasoning)
        state["nmoe"], state["nmoe_turns"] = episode, 0
        asked = await episode.abegin()
        if self._shared.asks_itself:
            state["prompt"] = asked
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        step = await self._answered(state, messages[-1])
        if step.grade is not None:
            state["final_env_response"] = []
        return step.messages

    async def _answered(self, state: Any, said: Any) -> Step:
        """Answers the last turn of the trajectory."""
        state["nmoe_turns"] = len(state["trajectory"])
        cut = state["trajectory"][-1]["is_truncated"]
        step: Step = await state["nmoe"].astep(_as_dict(said), "length" if cut else "stop")
        if step.grade is not None:
            state["nmoe_grade"] = step.grade
        return step

    @vf.cleanup(priority=200)
    async def grade_the_rest(self, state: Any) -> None:
        """Grades an episode that a limit of verifiers ended, and closes it. A limit of turns or tokens ends it before
        `env_response` gets the last turn, which may be the answer."""
        episode: SharedEpisode | None = state.get("nmoe")
        if episode is None:
            return
        try:
            turns = state["trajectory"]
            if episode.asks and state.get("error") is None and len(turns) > state["nmoe_turns"]:
                await self._answered(state, turns[-1]["completion"][-1])
            if episode.asks and state.get("error") is None:
                state["nmoe_grade"] = (await episode.astep("", "length")).grade
        finally:
            await episode.aclose()
            state["nmoe"] = None


async def score(state: Any) -> float:
    """The score of the episode; 0 where the model failed, which `state["error"]` says."""
    grade = state.get("nmoe_grade")
    return 0.0 if grade is None else float(grade.score)


def _component(name: str) -> Any:
    async def component(state: Any) -> float:
        grade = state.get("nmoe_grade")
        return 0.0 if grade is None else float(grade.components.get(name, 0.0))

    component.__name__ = name
    return component


def _as_dict(message: Any) -> dict[str, Any]:
    return dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)
