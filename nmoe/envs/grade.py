"""The grade of a completion: components between 0 and 1, a failure name, and a score under given weights.

format        1 if the completion ended by itself and has the form that the environment asks for
structure     the share of that form that is complete; in formats other than Harmony 0 if the completion did not end by itself
reasoning     1 if the format is right and there is reasoning before the answer
tool_use      1 if the format is right and an available tool answered a call before the answer
correctness   the score of the task's verdict: 1 for the gold answer, 0 for a wrong one, between the two for graded scores
efficiency    for a correct answer, the share of tokens and calls that it left unused:
              (1 - tokens / limit) * (1 - calls / limit)

A problem without a gold answer gives neither correctness nor efficiency, because no answer to it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.tables.rewards import RUBRIC_COMPONENTS, Rubric
from nmoe.envs.curriculum import Curriculum
from nmoe.envs.tasks import TASKS, Attempt, QuestionTask
from nmoe.envs.tasks.text import OpenTask
from nmoe.grading.extraction import Extraction, from_final, from_response, last_boxed
from nmoe.grading.prose import from_prose, from_prose_final
from nmoe.text.renderers import ParsedAnswer, Renderer
from nmoe.types import INFRASTRUCTURE, Exchange, Failure, Grade, Problem, ToolEvent, Turn

if TYPE_CHECKING:
    from nmoe.envs.tools.session import ToolSession

COMPONENTS = RUBRIC_COMPONENTS
_REASONING = "The answer follows."


@dataclass(frozen=True)
class Reading:
    """The completion as the environment's format parses it, before comparison with the gold answer.

    `format_ok` says whether the form is complete. In Harmony every turn parses, the last one ends in <|return|>, and it has a final
    message that is not blank; under a chat template the same holds for its marks. `structure` is the share of the form that is
    complete; `unfinished` is the share that counts instead if the last turn was cut at the token limit. `answer_counts` says
    whether the answer may be graded: except in plain text only if the form is complete.
    """

    extraction: Extraction
    format_ok: bool
    structure: float
    unfinished: float
    reasoning_ok: bool
    answer_counts: bool
    parse_error: bool


def read_answer(parsed: ParsedAnswer, task: QuestionTask, *, prose: bool = False) -> Reading:
    """Finds the answer in a parsed completion, and says whether the required format was kept.

    A completion of a format with structure, such as Harmony, keeps it if it parses, and its answer counts only then. Any other
    completion is plain text: it keeps the format if it has a `\\boxed{}` answer, before which the reasoning stands. Without a box
    the answer is its last number, which counts all the same, or with `prose` what `nmoe.grading.prose` reads.
    """
    if parsed.well_formed is None:
        box = last_boxed(parsed.text)
        if box is None and task.answer_form == "whole":
            found = from_final(parsed.text, bare_final=True)
        else:
            found = from_prose(parsed.text) if prose else from_response(parsed.text)
        return Reading(
            found,
            format_ok=box is not None,
            structure=float(box is not None),
            unfinished=0.0,
            reasoning_ok=box is not None and bool(parsed.text[: box.start].strip()),
            answer_counts=True,
            parse_error=False,
        )
    holds = parsed.well_formed
    return Reading(
        from_prose_final(parsed.text)
        if prose and task.answer_form == "boxed"
        else from_final(parsed.text, bare_final=task.answer_form != "boxed"),
        format_ok=holds,
        structure=parsed.structure,
        unfinished=parsed.structure,
        reasoning_ok=holds and parsed.reasoned,
        answer_counts=holds,
        parse_error=not holds,
    )


def joined_readings(readings: Sequence[Reading]) -> Reading:
    """Combines the readings of a conversation's successive answers into one: every check of the form must hold for all of them, the
    shares are the smallest of any, and the extracted answer is the last one's.
    """
    if len(readings) == 1:
        return readings[0]
    return Reading(
        readings[-1].extraction,
        format_ok=all(one.format_ok for one in readings),
        structure=min(one.structure for one in readings),
        unfinished=min(one.unfinished for one in readings),
        reasoning_ok=all(one.reasoning_ok for one in readings),
        answer_counts=all(one.answer_counts for one in readings),
        parse_error=any(one.parse_error for one in readings),
    )


class Grader:
    """Grades the completions of an environment: reads the answer, has the task verify it, and weighs the components."""

    def __init__(self, settings: EnvironmentSettings, renderer: Renderer, curriculum: Curriculum | None) -> None:
        self._renderer, self._curriculum = renderer, curriculum
        self._prose, self._boxed = settings.extraction == "prose", settings.format == "boxed"
        self._most_calls = settings.budget.tool_calls
        self._rubric = (settings.rubric or Rubric()).model_dump()

    @property
    def weights(self) -> dict[str, float]:
        """The current weight of each component in the score, from the curriculum's stage or, without a curriculum, from the
        rubric."""
        return self._rubric if self._curriculum is None else self._curriculum.weights

    def read(self, problem: Problem, turns: Sequence[Turn], exchanges: Sequence[Exchange] = ()) -> Reading:
        """Parses the turns and finds the answer and the completeness of the form; each exchange with the user begins a new
        answer."""
        task, ids = TASKS[problem.task_type], [turn.said_ids for turn in turns]
        starts = [0, *(one.turn + 1 for one in exchanges if one.turn + 1 < len(ids)), len(ids)]
        return joined_readings(
            [
                read_answer(self._renderer.parse(ids[start:end]), task, prose=self._prose)
                for start, end in pairwise(starts)
            ]
        )

    def answer_text(self, token_ids: Sequence[int]) -> str | None:
        """Returns the answer in the last turn's tokens, without reasoning; None if it is blank."""
        _, text = self._renderer.said(token_ids)
        return text if text.strip() else None

    def answer_ids(self, problem: Problem, answer: str) -> list[int]:
        """Returns the token ids of a well-formed completion with this answer, including the stop token. A sentence of reasoning
        comes first if the format separates reasoning or the weights reward it.
        """
        # Only answers that the prose around them would hide need a box; otherwise the whole message is the answer.
        bare = from_final(answer, bare_final=TASKS[problem.task_type].answer_form != "boxed").answer == answer
        reasons = self._renderer.has_reasoning or self.weights["reasoning"] > 0
        return self._renderer.completion_ids(
            _REASONING if reasons else "", answer if bare and not self._boxed else rf"\boxed{{{answer}}}"
        )

    async def grade(
        self,
        problem: Problem,
        turns: Sequence[Turn],
        token_limit: int,
        *,
        weights: Mapping[str, float] | None = None,
        ended: Failure | None = None,
        tool_events: Sequence[ToolEvent] = (),
        session: ToolSession | None = None,
        exchanges: Sequence[Exchange] = (),
    ) -> Grade:
        """Grades a trajectory of one or more turns, of at most `token_limit` sampled tokens. `weights` weigh the components;
        default: the current ones.

        `ended` names a failure that ended the trajectory before the policy did. If it is None, the engine's finish reason of the
        last turn decides: "stop", "length" or "abort". `exchanges` are a conversation task's responses.

        A truncated completion gets 0 in every component, because a number that truncation left last is not an answer; only in
        Harmony, whose control tokens no text can forge, it earns `structure` for complete parts. A conversation keeps the
        correctness that its exchanges earned before it broke off, unless the infrastructure failed. "abort" becomes `engine_error`
        and a verdict of "error" becomes `grader_error`; neither judges the policy, so such a sample must be masked, not trained on
        with its score of 0. Exceptions of `task.verify` propagate: a grader with a bug must stop the run, not teach that the answer
        was wrong.
        """
        task = TASKS[problem.task_type]
        if session is not None and session.access is not None:
            await session.lift()
        reading = self.read(problem, turns, exchanges)
        tokens = sum(len(turn.sample.token_ids) for turn in turns)
        finish_reason = turns[-1].sample.finish_reason
        failure = ended or _failure(reading, finish_reason, tokens, token_limit)
        finished = failure in ("ok", "parse_error")
        answer = reading.extraction.answer
        format_ok = finished and reading.format_ok
        reasoning_ok = format_ok and reading.reasoning_ok
        structure = reading.structure if finished else 0.0
        if failure == "truncated" and finish_reason == "length":
            structure = reading.unfinished
        tool_use_ok = format_ok and any(event.failure == "ok" for event in tool_events)
        verdict = None
        answered = finished and reading.answer_counts and answer is not None
        # What a conversation earned before it was broken off is earned.
        has_gold = not isinstance(task, OpenTask)
        if has_gold and (answered or (exchanges and failure not in INFRASTRUCTURE)):
            opened, sandboxes = (None, None) if session is None else (session.opened, session.sandboxes)
            verdict = await task.verify(problem, Attempt(answer or "", opened, tool_events, sandboxes, exchanges))
            if verdict.outcome == "error":
                failure = "grader_error"
        correctness = 0.0 if verdict is None else verdict.score
        correct = verdict is not None and verdict.outcome == "correct"
        components = {
            "format": float(format_ok),
            "structure": structure,
            "reasoning": float(reasoning_ok),
            "tool_use": float(tool_use_ok),
        }
        if has_gold:
            unused = (1 - tokens / token_limit) * (1 - len(tool_events) / self._most_calls)
            components |= {"correctness": correctness, "efficiency": unused if correct else 0.0}
        extras = {
            "correctness": correctness,
            "has_answer": float(answer is not None),
            "has_boxed": float(reading.extraction.has_boxed),
            "parse_method": float(reading.extraction.method),
            "boxed_in_final": float(reading.extraction.boxed_in_final),
            "truncated_response": float(failure == "truncated"),
            "format_ok": float(format_ok),
            "structure_ok": structure,
            "reasoning_ok": float(reasoning_ok),
            "tool_use_ok": float(tool_use_ok),
        }
        weights = self.weights if weights is None else dict(weights)
        score = sum(weights[name] * value for name, value in components.items())
        return Grade(score, components, failure, extras, answer, verdict, weights)


def _failure(reading: Reading, finish_reason: str, tokens: int, token_limit: int) -> Failure:
    if finish_reason == "abort":
        return "engine_error"
    if finish_reason == "length":
        return "truncated"
    if finish_reason != "stop":
        raise ValueError(f"finish_reason is 'stop', 'length' or 'abort', not {finish_reason!r}")
    if tokens > token_limit:
        return "budget_exceeded"
    return "parse_error" if reading.parse_error else "ok"
