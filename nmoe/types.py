"""Records that pass between rooms: samples, messages, problems, turns, tool events, verdicts and grades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Failure = Literal[
    "ok",
    "parse_error",
    "truncated",
    "timeout",
    "budget_exceeded",
    "tool_error",
    "unknown_tool",
    "output_limit",
    "disk_full",
    "sandbox_denied",
    "sandbox_setup_failed",
    "workspace_failed",
    "command_not_found",
    "out_of_memory",
    "nonzero_exit",
    "grader_error",
    "engine_error",
    "internal_error",
]

FAILURES: tuple[Failure, ...] = get_args(Failure)

# The policy did not cause these, so its tokens must not be trained on them: the collector masks such samples. Every
# other name is an outcome of what the policy wrote, and is graded (`timeout` and `disk_full` included: a program that
# loops or fills its disk was the policy's own).
INFRASTRUCTURE: frozenset[Failure] = frozenset(
    {"sandbox_setup_failed", "workspace_failed", "grader_error", "engine_error", "internal_error"}
)


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature = 0` is greedy; `top_k = 0` and `top_p = 1` cut nothing off.

    Draws are keyed by (seed, sample index, position), never by what else is in the batch.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass
class Sample:
    """One completion. `logprobs` are those of the distribution actually sampled from, after temperature, top-k and top-p
    (so 0.0 under greedy); the stop token, where one was sampled, is part of it.

    `versions` is the weight version each token was sampled with. `kept_ids`, where top-k or top-p cut the support,
    holds each token's kept set. `routes` holds every router pick as int16 `[prompt + completion - 1, layers, K]`, for
    engines that record them.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    kept_ids: list[list[int]] | None = None
    routes: Any | None = None


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    A tool call:   Message("assistant", '{"x": 2}', channel="commentary", recipient="functions.square",
                           content_type="json")
    its answer:    Message("tool", "4", channel="commentary", recipient="assistant", name="functions.square")
    """

    role: str
    content: str
    channel: str | None = None
    recipient: str | None = None
    name: str | None = None
    content_type: str | None = None

    @property
    def is_call(self) -> bool:
        """Whether the assistant hands over to a tool here, so that the message ends in <|call|>."""
        return self.role == "assistant" and self.recipient is not None


Metadata = Mapping[str, str | int | float]

# What a dataset says of a problem's kind; rates are reported for each value of these.
GROUPS = ("level", "subject")


@dataclass(frozen=True)
class Problem:
    """One question, as a pool hands it out.

    `id` is unique within a pool and stable between runs; `source` is the name of the pool, or of the source within a
    mixture, that it came from. `columns` are the fields of its record, kept where an environment has `[[rewards]]` to read
    them; `history` are the messages before the question, where the record's prompt is a conversation. Worked example, the
    eighteenth record of the source "gsm8k" of a mixture:

        Problem(id="gsm8k/17", task_type="gsm8k", question="Ann has 3 boxes of 6 eggs. How many eggs?", gold="18",
                source="gsm8k", metadata={"record": 17})
    """

    id: str
    task_type: str
    question: str
    gold: str
    source: str
    metadata: Metadata = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Message, ...] = ()

    @property
    def groups(self) -> list[str]:
        """The groups it belongs to: ["level=Level 5", "subject=Algebra"]."""
        return [f"{key}={self.metadata[key]}" for key in GROUPS if key in self.metadata]


Given = Literal["tool", "user", "prompt"]


@dataclass(frozen=True)
class Turn:
    """`given_ids` lead up to this turn's sample, and `given` says what they are. Those of a tool ("tool") or of the user ("user")
    follow what was sampled before: the answer and the words that open the next turn. Those of a "prompt" begin a new branch:
    the whole conversation as it is shown from here on, in place of everything before. The first turn has none, for its prompt is
    the trajectory's."""

    given_ids: tuple[int, ...]
    sample: Sample
    given: Given = "tool"


def single_turn(token_ids: Sequence[int], finish_reason: FinishReason = "stop") -> tuple[Turn, ...]:
    """The turns of a completion that was not sampled here and therefore has no log-probabilities, such as a worked example."""
    return (Turn((), Sample(list(token_ids), [], [], finish_reason)),)


@dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it: `ToolCall("python", '{"code": "print(6 * 7)"}', "0/0")`.

    `arguments` is the text of the arguments, JSON or not; `call_id` is turn/place, unique in a trajectory. `fault` says
    why the call can not be read at all, where its form is that of the format and not of Harmony's header; it is then
    empty otherwise.
    """

    name: str
    arguments: str
    call_id: str
    fault: str = ""


@dataclass(frozen=True)
class ToolEvent:
    """A call and what came of it, as `ToolEvent(call, "ok", "42\\n", "", started_s=0.12, wall_s=0.004)`.

    `failure` is the event's own and ends the trajectory only where it is one of the infrastructure; `output` is what
    the policy was shown, the `reason` of a failure in it. Times are seconds, `started_s` from the start of the
    trajectory.
    """

    call: ToolCall
    failure: Failure
    output: str
    reason: str
    started_s: float
    wall_s: float

    def record(self) -> dict[str, Any]:
        """JSON-able, all fields flat."""
        return {**vars(self.call), **{name: value for name, value in vars(self).items() if name != "call"}}


@dataclass(frozen=True)
class Exchange:
    """What a task that converses made of an answer: `Exchange(turn=0, state={"left": 2}, user="higher", reward=0.0)`.

    `turn` is the place of the policy's turn that answered, `state` the task's after it, as JSON; `user` what the user said then,
    None where the conversation was over.
    """

    turn: int
    state: Mapping[str, Any]
    user: str | None
    reward: float


Outcome = Literal["correct", "incorrect", "error"]


@dataclass(frozen=True)
class Verdict:
    """Worked example, a right answer in another form than the gold's: `Verdict("correct", 1.0, "numeric", "0.5 = 1/2")`.

    `error` is for a verifier that could not do its work because of something else than the answer, such as a worker that the
    system killed: the sample is masked and counted as `grader_error`, and its score of 0 is no reward. What the answer
    itself brings about, a deadline included, is `incorrect`; a defect of the verifier raises, which stops the run.
    """

    outcome: Outcome
    score: float  # 1 correct, 0 incorrect, between the two for graded scores, 0 for an error
    layer: str  # what settled it: "exact", "numeric", "symbolic", "choice", "tests", ...
    reason: str  # for people, short

    @classmethod
    def of(cls, correct: bool, layer: str, reason: str) -> Verdict:
        """Right or wrong, nothing between."""
        return cls("correct" if correct else "incorrect", float(correct), layer, reason)


@dataclass(frozen=True)
class Grade:
    """The verdict on one completion. A right answer of 32 tokens out of 256, in Harmony, under weights 0.1, 0, 1, 0:

        Grade(score=1.1,
              components={"format": 1.0, "structure": 1.0, "reasoning": 1.0, "tool_use": 0.0, "correctness": 1.0,
                          "efficiency": 0.875},
              failure="ok",
              extras={"correctness": 1.0, "has_answer": 1.0, "has_boxed": 0.0, "parse_method": 0.0,
                      "boxed_in_final": 0.0, "truncated_response": 0.0, "format_ok": 1.0, "structure_ok": 1.0,
                      "reasoning_ok": 1.0, "tool_use_ok": 0.0},
              answer="18",
              verdict=Verdict("correct", 1.0, "exact", "equal after normalisation"))

    `extras` are numbers, meant for averaging; `parse_method` is 2 for a box, 1 for the last number, and 0 where nothing
    was extracted: then the message itself is the answer, or there is none (`has_answer`). `verdict` is None where nothing was
    compared, because the completion did not end in an answer. What `[[rewards]]` adds stands in `components` and `weights` under
    its name; `reason` is why a reward could not be had, for people, and `cached` names those that were answered earlier.
    `step_rewards` are those of a verifier that judges steps: of each the place of its last token among those after the prompt, and
    its score.
    """

    score: float
    components: dict[str, float]
    failure: Failure
    extras: dict[str, float]
    answer: str | None
    verdict: Verdict | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    cached: tuple[str, ...] = ()
    step_rewards: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TrainerState:
    """Of TRL's state of the same name what a reward can depend on: `TrainerState(global_step=7, max_steps=100)`."""

    global_step: int = 0  # optimizer steps taken
    max_steps: int = 0  # those of the whole run, 0 where nothing is trained
