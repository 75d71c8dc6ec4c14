"""Builds the prompts of problems, and limits the lengths of prompts and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.tables.rollout import BudgetSettings
from nmoe.envs.curriculum import Curriculum
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.task import WorkspaceTask
from nmoe.errors import UserError
from nmoe.text.renderers import HarmonyRenderer, Renderer, Round
from nmoe.types import Exchange, Given, Message, Problem, ToolEvent, Turn


def token_limit(budget: BudgetSettings, max_new_tokens: int) -> int:
    """Returns what `PromptBuilder.token_limit` does, without an environment."""
    most = budget.completion_tokens
    return max_new_tokens if most is None else min(max_new_tokens, most)


class PromptBuilder:
    """Builds the prompts of an environment in its format, and checks that they fit its budget and the model's context."""

    def __init__(
        self, settings: EnvironmentSettings, renderer: Renderer, curriculum: Curriculum | None, *, one_turn: bool
    ) -> None:
        """Makes the builder. With `one_turn`, trajectories have one turn, without tools or conversation.

        Raises UserError if a stage of the curriculum gives the beginning of the answer (`given`) although trajectories
        have several turns or the format is not Harmony.
        """
        self._system, self._budget = settings.system, settings.budget
        self._renderer, self._curriculum = renderer, curriculum
        self._given = self._starts_given(settings, one_turn)
        self._most_given = max(map(len, self._given), default=0)

    def _starts_given(self, settings: EnvironmentSettings, one_turn: bool) -> list[tuple[int, ...]]:
        stages = () if settings.curriculum is None else settings.curriculum.stages
        if not any(stage.given for stage in stages):
            return [()] * len(stages)
        if not one_turn or not isinstance(self._renderer, HarmonyRenderer):
            raise UserError(
                f"environment {settings.env_id!r}: a stage of [curriculum] has `given`, the start of Harmony's answer in one "
                "turn; leave it out in other formats, with [tools] and in conversations"
            )
        return [tuple(self._renderer.spelled(stage.given)) for stage in stages]

    @property
    def given_ids(self) -> tuple[int, ...]:
        """The tokens with which every answer begins in the curriculum's current stage, given to the policy in training; () if the
        stage gives none."""
        return () if self._curriculum is None else self._given[self._curriculum.index]

    def messages(self, problem: Problem) -> list[Message]:
        """Returns the conversation that the prompt shows, starting with the environment's system message.

        Raises UserError if the problem has a system message as well.
        """
        system = [Message("system", self._system)] if self._system else []
        if system and any(message.role == "system" for message in problem.history):
            raise UserError(
                f"problem {problem.id}: its prompt has a system message, and so does the environment (`system`); drop either"
            )
        return [*system, *problem.history, *TASKS[problem.task_type].messages(problem)]

    def ids(self, problem: Problem) -> list[int]:
        """Returns the token ids of the problem's prompt, which depend on the problem only."""
        return self._renderer.prompt_ids(self.messages(problem))

    def follow_up(
        self,
        problem: Problem,
        turns: Sequence[Turn],
        tool_events: Sequence[ToolEvent],
        exchanges: Sequence[Exchange],
    ) -> tuple[Given, list[int]]:
        """Returns how the conversation continues after the user's last message: its kind and the given tokens before the next turn.
        "user" tokens follow the previous turn; "prompt" tokens are the whole prompt of a new branch.
        """
        rounds, start = [], 0
        for exchange in exchanges:
            assert exchange.user is not None, "a conversation that goes on was not over before"
            indices = range(start, exchange.turn + 1)
            answers = [[one for one in tool_events if one.call.call_id.startswith(f"{index}/")] for index in indices]
            rounds.append(Round([turns[index].sample.token_ids for index in indices], answers, exchange.user))
            start = exchange.turn + 1
        return self._renderer.follow_up(self.messages(problem), rounds)

    def files(self, problem: Problem) -> Mapping[str, bytes]:
        """Returns the files that the problem adds to the workspace of a trajectory: path -> content."""
        task = TASKS[problem.task_type]
        return task.files(problem) if isinstance(task, WorkspaceTask) else {}

    def token_limit(self, max_new_tokens: int) -> int:
        """Returns the maximum number of tokens that a trajectory may sample: the run's limit, capped by the environment's
        budget."""
        return token_limit(self._budget, max_new_tokens)

    def prompt_limit(self, context_tokens: int, max_new_tokens: int) -> int:
        """Returns the maximum number of tokens of a prompt: the rest of the model's context after the longest completion and the
        longest beginning of an answer that a stage of the curriculum gives, capped by the environment's budget.
        """
        room = context_tokens - self.token_limit(max_new_tokens) - self._most_given
        budget = self._budget.prompt_tokens
        return room if budget is None else min(room, budget)

    def fits(self, problem: Problem, context_tokens: int, max_new_tokens: int) -> bool:
        """Returns whether the prompt is within the budget, and fits the model's context together with the longest completion."""
        return len(self.ids(problem)) <= self.prompt_limit(context_tokens, max_new_tokens)

    def check(self, problem: Problem, context_tokens: int, max_new_tokens: int) -> tuple[int, ...]:
        """Returns the prompt's token ids. Raises UserError if the prompt does not fit (`fits`)."""
        prompt_ids = tuple(self.ids(problem))
        if len(prompt_ids) <= self.prompt_limit(context_tokens, max_new_tokens):
            return prompt_ids
        longest = self._budget.prompt_tokens
        if longest is not None and len(prompt_ids) > longest:
            raise UserError(
                f"problem {problem.id}: its prompt has {len(prompt_ids)} tokens, more than budget.prompt_tokens = {longest}; raise "
                "it, or drop the problem"
            )
        limit = self.token_limit(max_new_tokens) + self._most_given
        raise UserError(
            f"problem {problem.id}: its prompt of {len(prompt_ids)} tokens and completions of up to {limit} do not fit the "
            f"model's context of {context_tokens}; lower sampling.max_new_tokens or drop the problem"
        )
