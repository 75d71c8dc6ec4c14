"""Trajectories: all turns of one sample, seen as branches, spans and per-token columns; and groups of them."""

# Shapes: Y layers, K chosen experts.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from nmoe.types import INFRASTRUCTURE, Exchange, Grade, Problem, Sampling, ToolEvent, TrainerState, Turn

# In the place of a log-probability and a version where the policy sampled nothing.
NOT_SAMPLED_LOGPROB, NOT_SAMPLED_VERSION = 0.0, -1


class Span(NamedTuple):
    """Tokens [start, end) after the prompt, and how they came there: `Span("tool", turn=1, start=12, end=20)`. One of kind
    "prompt" begins a new branch: the policy sees it, and nothing before it."""

    kind: Literal["sampled", "tool", "user", "prompt"]
    turn: int
    start: int
    end: int


class Columns:
    """The tokens of some turns, and what stands beside each of them."""

    turns: tuple[Turn, ...]

    @cached_property
    def token_ids(self) -> list[int]:
        """Everything after the prompt: what was sampled, the stop tokens included, and what was given between."""
        return [token_id for turn in self.turns for token_id in (*turn.given_ids, *turn.sample.token_ids)]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled, over all turns."""
        return sum(len(turn.sample.token_ids) for turn in self.turns)

    @property
    def mask(self) -> list[int]:
        """1 for each of `token_ids` that the policy sampled, and 0 for the others, which are not trained on."""
        return self._per_token(lambda turn: [1] * len(turn.sample.token_ids), 0)

    @property
    def logprobs(self) -> list[float]:
        """Of each of `token_ids`, under the distribution it was sampled from; 0 where nothing was sampled."""
        return self._per_token(lambda turn: turn.sample.logprobs, NOT_SAMPLED_LOGPROB)

    @property
    def versions(self) -> list[int]:
        """The weights that each of `token_ids` was sampled with; -1 where nothing was sampled."""
        return self._per_token(lambda turn: turn.sample.versions, NOT_SAMPLED_VERSION)

    @property
    def kept_ids(self) -> list[list[int]] | None:
        """The support that each of `token_ids` was sampled from, where it was cut; empty where nothing was sampled."""
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
    """Part of a trajectory whose tokens follow one another verbatim: `prompt_ids + token_ids` is what the engine saw last and then
    sampled. The first turn has nothing given."""

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def routes(self) -> Any | None:
        """Every router pick, int16 `[prompt + tokens - 1, Y, K]`, each position as the turn computed it that first saw it; None
        where the engine records none."""
        parts, seen = [], 0
        for turn in self.turns:
            if turn.sample.routes is None:
                return None
            parts.append(turn.sample.routes[seen:])
            seen = len(turn.sample.routes)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class Trajectory(Columns):
    """One sample of one prompt, with all its turns. Tokens are the record; text is only ever decoded from them.

    It is a sequence of branches, most often one. Within a branch a turn's tokens follow those of the turn before it verbatim. Where
    the history is written anew, as after an answer in Harmony, whose reasoning is dropped, another branch begins, and its prompt
    stands among `token_ids` as the given tokens of its first turn, so that these are everything in the order in which it came
    about. What a tool answered to the last call that no turn followed is in `tool_events` alone.

    `sampling` is that of the first turn. `environment` and `model` say what was rolled out, by name and content; `workspace` where
    the files came from and were kept, or under "failed" why there were none; `trainer_state` what `[[rewards]]` were told of
    the run, None where they were not asked. `exchanges` are what a task that converses made of each answer.
    """

    problem: Problem
    index: int
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    grade: Grade
    sampling: Sampling
    tool_events: tuple[ToolEvent, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=dict)
    workspace: Mapping[str, Any] | None = None
    trainer_state: TrainerState | None = None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def trainable(self) -> bool:
        """Whether what the policy wrote was judged at all: a failure of the infrastructure is no verdict on it."""
        return self.grade.failure not in INFRASTRUCTURE

    @property
    def seed(self) -> int:
        return self.sampling.seed

    @property
    def truncated(self) -> bool:
        """Whether tokens ran out before it was done: in a turn, or when the answers to its calls had left none for another."""
        return self.finish_reasons[-1] == "length" or self.grade.failure == "truncated"

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """What is scored and trained on as one sequence each, in order."""
        starts = [0, *(place for place, turn in enumerate(self.turns) if turn.given == "prompt"), len(self.turns)]
        branches = []
        for start, end in pairwise(starts):
            first, *rest = self.turns[start:end]
            prompt_ids = first.given_ids if start else self.prompt_ids
            branches.append(Branch(prompt_ids, (Turn((), first.sample), *rest)))
        return tuple(branches)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Who wrote which tokens; together they cover all of them, in order."""
        spans: list[Span] = []
        end = 0
        for place, turn in enumerate(self.turns):
            if turn.given_ids:
                spans.append(Span(turn.given, place, end, end := end + len(turn.given_ids)))
            spans.append(Span("sampled", place, end, end := end + len(turn.sample.token_ids)))
        return tuple(spans)

    @property
    def routes(self) -> Any | None:
        """Every router pick of all branches, int16 `[sum of prompt + tokens - 1, Y, K]`; None where the engine records none."""
        parts = [routes for branch in self.branches if (routes := branch.routes) is not None]
        if len(parts) < len(self.branches):
            return None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def finish_reasons(self) -> list[str]:
        """Why each turn ended."""
        return [turn.sample.finish_reason for turn in self.turns]

    def record(self, step: int, text: str) -> dict[str, Any]:
        """A JSON-able line for samples/ and failures.jsonl, with everything needed to replay it. `text` is decoded from
        `token_ids`, for people."""
        verdict = self.grade.verdict
        return {
            "step": step,
            "environment": dict(self.environment),
            "model": dict(self.model),
            "workspace": None if self.workspace is None else dict(self.workspace),
            "trainer_state": None if self.trainer_state is None else asdict(self.trainer_state),
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
            "sampling": asdict(self.sampling),
            "prompt_ids": list(self.prompt_ids),
            "token_ids": self.token_ids,
            "mask": self.mask,
            "logprobs": self.logprobs,
            "versions": self.versions,
            "kept_ids": self.kept_ids,
            "spans": [span._asdict() for span in self.spans],
            "finish_reasons": self.finish_reasons,
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
            "verdict": None if verdict is None else asdict(verdict),
        }


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, compared with one another."""

    problem: Problem
    trajectories: Sequence[Trajectory]

    @property
    def trainable(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.trainable]
