"""Trajectories, which are all turns of one sample, with views of their tokens; and groups of trajectories of the same problem."""

# Shapes: Y layers, K chosen experts.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from nmoe.types import INFRASTRUCTURE, Exchange, Grade, Problem, Sampling, ToolEvent, TrainerState, Turn

# The log-probability and version of tokens that the policy did not sample.
NOT_SAMPLED_LOGPROB, NOT_SAMPLED_VERSION = 0.0, -1


class Span(NamedTuple):
    """Consecutive tokens of a trajectory that have the same origin: `Span("tool", turn=1, start=12, end=20)`.

    Positions [start, end) are counted after the prompt. A span of kind "prompt" begins a new branch, in which the
    policy sees nothing before it. A span of kind "form" is the beginning of an answer, which the curriculum's stage
    provides.
    """

    kind: Literal["sampled", "tool", "user", "prompt", "form"]
    turn: int
    start: int
    end: int


class Columns:
    """The tokens of one or more turns, and lists with a value per token, such as masks and log-probabilities."""

    turns: tuple[Turn, ...]

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens after the prompt: the sampled ones, including stop tokens, and the given ones between them."""
        return [token_id for turn in self.turns for token_id in (*turn.given_ids, *turn.sample.token_ids)]

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled, over all turns."""
        return sum(len(turn.sample.token_ids) for turn in self.turns)

    @property
    def mask(self) -> list[int]:
        """1 for each of `token_ids` that the policy sampled; 0 for given tokens, which are not trained on."""
        return self._per_token(lambda turn: [1] * len(turn.sample.token_ids), 0)

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each of `token_ids` under the distribution that it was drawn from; 0 for given tokens."""
        return self._per_token(lambda turn: turn.sample.logprobs, NOT_SAMPLED_LOGPROB)

    @property
    def versions(self) -> list[int]:
        """The version of the weights that sampled each of `token_ids`; -1 for given tokens."""
        return self._per_token(lambda turn: turn.sample.versions, NOT_SAMPLED_VERSION)

    @property
    def engines(self) -> list[int] | None:
        """The number of the engine server that sampled each of `token_ids`; -1 for given tokens, None without several servers."""
        if any(turn.sample.engine is None for turn in self.turns):
            return None
        return self._per_token(lambda turn: [turn.sample.engine] * len(turn.sample.token_ids), -1)

    @property
    def kept_ids(self) -> list[list[int]] | None:
        """For each of `token_ids`, the ids from which top-k or top-p drew it; empty for given tokens, None if sampling
        was never truncated."""
        if all(turn.sample.kept_ids is None for turn in self.turns):
            return None
        return self._per_token(lambda turn: turn.sample.kept_ids or [[]] * len(turn.sample.token_ids), [])

    def _per_token(self, sampled: Any, given: Any) -> list[Any]:
        values: list[Any] = []
        for turn in self.turns:
            values += [given] * len(turn.given_ids)
            values += sampled(turn)
        return values


@dataclass(frozen=True)
class Branch(Columns):
    """A part of a trajectory that the model reads as one sequence: its prompt and the turns that continue it verbatim.

    `prompt_ids + token_ids` is the engine's last prompt followed by its sample. The first turn has no given tokens, unless they
    are the start of its answer.
    """

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def routes(self) -> Any | None:
        """The experts that the router picked, int16 `[prompt + tokens - 1, Y, K]`; None if the engine records none.

        Each position has the picks of the turn that processed it first.
        """
        parts, seen = [], 0
        for turn in self.turns:
            if turn.sample.routes is None:
                return None
            parts.append(turn.sample.routes[seen:])
            seen = len(turn.sample.routes)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class Trajectory(Columns):
    """One sample for one problem, with all its turns. The recorded data are token ids; text is only decoded from them.

    A trajectory is a sequence of branches, usually one. Within a branch, the tokens of a turn follow the tokens of the turn before
    it verbatim. If the history is rendered anew, a new branch begins; Harmony does so after an answer, because it drops the
    reasoning. The prompt of the new branch is the `given_ids` of its first turn, so that `token_ids` holds everything in the
    order in which it occurred. If no turn follows the last call, the tool's answer is in `tool_events` alone.

    `sampling` belongs to the first turn. `environment` and `model` identify environment and model by name and content.
    `workspace` says where the files came from and where they were kept, or under "failed" why there were none. `trainer_state`
    is the position in the run that `[[rewards]]` received, None if they were not asked. `exchanges` are a conversation task's
    responses.
    """

    problem: Problem
    index: int
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    grade: Grade
    sampling: Sampling
    tool_events: tuple[ToolEvent, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str | int] = field(default_factory=dict)
    workspace: Mapping[str, Any] | None = None
    trainer_state: TrainerState | None = None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def trainable(self) -> bool:
        """Whether the policy's output was judged; after an infrastructure failure it was not, and the sample is masked."""
        return self.grade.failure not in INFRASTRUCTURE

    @property
    def seed(self) -> int:
        return self.sampling.seed

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut the trajectory: within a turn, or because tool results left no tokens for another turn."""
        return self.finish_reasons[-1] == "length" or self.grade.failure == "truncated"

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The trajectory's branches in order; each is scored and trained on as one sequence."""
        starts = [0, *(index for index, turn in enumerate(self.turns) if turn.given == "prompt"), len(self.turns)]
        branches = []
        for start, end in pairwise(starts):
            first, *rest = self.turns[start:end]
            if start:
                branches.append(Branch(first.given_ids, (Turn((), first.sample), *rest)))
            else:
                branches.append(Branch(self.prompt_ids, self.turns[:end]))
        return tuple(branches)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The origin of every token (the policy, a tool, a user, a new prompt or a given form), as consecutive spans that together
        cover `token_ids`."""
        spans: list[Span] = []
        end = 0
        for index, turn in enumerate(self.turns):
            if turn.given_ids:
                spans.append(Span(turn.given, index, end, end := end + len(turn.given_ids)))
            spans.append(Span("sampled", index, end, end := end + len(turn.sample.token_ids)))
        return tuple(spans)

    @property
    def routes(self) -> Any | None:
        """The experts that the router picked in all branches, int16 `[sum of prompt + tokens - 1, Y, K]`; None if the engine
        records none.
        """
        parts = [routes for branch in self.branches if (routes := branch.routes) is not None]
        if len(parts) < len(self.branches):
            return None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each turn."""
        return [turn.sample.finish_reason for turn in self.turns]

    def record(self, step: int, text: str) -> dict[str, Any]:
        """Returns a dict of JSON values, a line of samples/ or failures.jsonl, with everything that a replay needs.

        `text` is the decoded `token_ids`, for people.
        """
        verdict = self.grade.verdict
        return {
            "step": step,
            "environment": dict(self.environment),
            "model": dict(self.model),
            "workspace": None if self.workspace is None else dict(self.workspace),
            "trainer_state": None if self.trainer_state is None else dict(vars(self.trainer_state)),
            "problem": self.problem.id,
            "task_type": self.problem.task_type,
            "source": self.problem.source,
            "history": [asdict(message) for message in self.problem.history],
            "question": self.problem.question,
            "gold": self.problem.gold,
            "metadata": dict(self.problem.metadata),
            "columns": dict(self.problem.columns),
            "index": self.index,
            "seed": self.seed,
            "sampling": self.sampling.record(),
            "prompt_ids": list(self.prompt_ids),
            "token_ids": self.token_ids,
            "mask": self.mask,
            "logprobs": self.logprobs,
            "versions": self.versions,
            "kept_ids": self.kept_ids,
            "spans": [span._asdict() for span in self.spans],
            "finish_reasons": self.finish_reasons,
            "engines": [turn.sample.engine for turn in self.turns],
            "tool_events": [event.record() for event in self.tool_events],
            "exchanges": [asdict(exchange) for exchange in self.exchanges],
            "text": text,
            "failure": self.grade.failure,
            "reason": self.grade.reason,
            "cached": list(self.grade.cached),
            "reward": self.grade.score,
            "components": self.grade.components,
            "weights": self.grade.weights,
            "extras": self.grade.extras,
            "answer": self.grade.answer,
            "verdict": None if verdict is None else dict(vars(verdict)),
        }


@dataclass(frozen=True)
class Group:
    """The samples of one problem, whose rewards are compared with one another."""

    problem: Problem
    trajectories: Sequence[Trajectory]

    @property
    def trainable(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.trainable]
