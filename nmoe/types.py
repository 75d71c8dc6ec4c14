"""Records that pass between packages: samples, messages, problems, turns, tool events, verdicts and grades."""

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
    "environment_error",
    "internal_error",
]

FAILURES: tuple[Failure, ...] = get_args(Failure)

# The policy did not cause these failures, so the collector masks such samples and they are not trained on. Every other failure
# results from the policy's own output and is graded. `timeout` and `disk_full` are among those: the program that loops or
# fills its disk is the policy's.
INFRASTRUCTURE: frozenset[Failure] = frozenset(
    {
        "sandbox_setup_failed",
        "workspace_failed",
        "grader_error",
        "engine_error",
        "environment_error",
        "internal_error",
    }
)


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `temperature = 0` is greedy; `top_k = 0`, `top_p = 1` and `min_p = 0` disable truncation. `min_p` is the
    share of the largest probability, at this temperature, that a token must have beside what top-k and top-p ask of it.

    The logits are adjusted before temperature: `presence_penalty` is taken from each token that the sample has already, and
    `frequency_penalty` for each time that it has it (OpenAI's definition; the prompt does not count); `logit_bias` is added, pairs
    of a token id and a number from -100 to 100. `Sample.logprobs` are then of the adjusted distribution, which a learner cannot
    compute again: no run's configuration sets these three.

    Each draw is keyed by (seed, sample index, position) and does not depend on what else is in the batch.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether a penalty or a bias changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def record(self) -> dict[str, Any]:
        """Returns the parameters that a run can set, as JSON values."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "stop_ids", "seed")
        return {name: getattr(self, name) for name in names}


@dataclass
class Sample:
    """One completion as sampled by an engine. A sampled stop token is included.

    `logprobs` are each token's log-probability under the distribution that it was drawn from, after temperature, top-k, top-p
    and the like (so 0.0 under greedy). `versions` holds the weight version of each token. `kept_ids` holds, for each token, the
    ids that top-k, top-p or min_p left to draw from; None if none of them cut any. `routes` holds the experts that the router
    picked, int16 `[prompt + completion - 1, layers, experts per token]`; None if the engine records none. `engine` is the number
    of the server that sampled it, of several.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    kept_ids: list[list[int]] | None = None
    routes: Any | None = None
    engine: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    A tool call:   Message("assistant", '{"x": 2}', channel="commentary", recipient="functions.square",
                           content_type="json")
    Its answer:    Message("tool", "4", channel="commentary", recipient="assistant", name="functions.square")
    """

    role: str
    content: str
    channel: str | None = None
    recipient: str | None = None
    name: str | None = None
    content_type: str | None = None

    @property
    def is_call(self) -> bool:
        """Whether the message is a tool call by the assistant, which ends in <|call|>."""
        return self.role == "assistant" and self.recipient is not None


Metadata = Mapping[str, str | int | float]

# Metadata keys that classify a problem; rates are reported for each of their values.
GROUPS = ("level", "subject")


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer, as a pool hands it out.

    `id` is unique within a pool and stable between runs. `source` names the pool, or the source within a mixture. `columns`
    are the fields of the record; they are kept only if the environment has `[[rewards]]`, which may read them. `history` holds
    the messages before the question if the record's prompt is a conversation. Example, the eighteenth record of the source
    "gsm8k" of a mixture:

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
        """The problem's groups for reporting rates, such as ["level=Level 5", "subject=Algebra"]."""
        return [f"{key}={self.metadata[key]}" for key in GROUPS if key in self.metadata]


# The few bits in which frozen experts may be held: as a released gpt-oss stores them, or quantised while they are loaded.
PackedForm = Literal["mxfp4", "fp8", "nvfp4"]
# How experts are held in memory: in the model's dtype, or packed.
ExpertWeightsForm = Literal["dequantized", "mxfp4", "fp8", "nvfp4"]

# Of weights, activations and key-value cache.
Precision = Literal["float32", "bfloat16", "float16"]

Given = Literal["tool", "user", "prompt", "form"]


@dataclass(frozen=True)
class Turn:
    """One turn of the policy: tokens given to it, and the sample that it then drew. `given` says where `given_ids` come from.

    "tool" or "user": the answer of a tool or of the user, which follows the previous sample, and the tokens that open the next
    turn. "prompt": a new branch, whose `given_ids` are the whole conversation and replace everything before. The first turn's
    prompt is the trajectory's. It has `given_ids` only if a stage of the curriculum gives the start of the answer: "form".
    """

    given_ids: tuple[int, ...]
    sample: Sample
    given: Given = "tool"

    @property
    def said_ids(self) -> list[int]:
        """The tokens that are parsed as the policy's output: the sampled ones, after the beginning of the answer if that was
        given.
        """
        return [*(self.given_ids if self.given == "form" else ()), *self.sample.token_ids]


def single_turn(token_ids: Sequence[int], finish_reason: FinishReason = "stop") -> tuple[Turn, ...]:
    """Returns a completion that no engine sampled, such as a worked example, as a single turn without log-probabilities."""
    return (Turn((), Sample(list(token_ids), [], [], finish_reason)),)


@dataclass(frozen=True)
class ToolCall:
    """A tool call as the policy wrote it: `ToolCall("python", '{"code": "print(6 * 7)"}', "0/0")`.

    `arguments` is the text of the arguments, which may be invalid JSON. `call_id` is turn/index and unique in a trajectory. `fault`
    is the reason why the call cannot be parsed, empty if it can; in Harmony it is always empty, because the message's header
    already identifies a call.
    """

    name: str
    arguments: str
    call_id: str
    fault: str = ""


@dataclass(frozen=True)
class ToolEvent:
    r"""A tool call and its result: `ToolEvent(call, "ok", "42\n", "", started_s=0.12, wall_s=0.004)`.

    `failure` belongs to this call and ends the trajectory only if it is an infrastructure failure. `output` is what the
    policy was shown, including the `reason` of a failure. Times are in seconds; `started_s` counts from the start of the
    trajectory.
    """

    call: ToolCall
    failure: Failure
    output: str
    reason: str
    started_s: float
    wall_s: float

    def record(self) -> dict[str, Any]:
        """Returns all fields of the event and its call as one flat dict of JSON values."""
        return {**vars(self.call), **{name: value for name, value in vars(self).items() if name != "call"}}


@dataclass(frozen=True)
class Exchange:
    """The simulated user's response to one turn, by a conversation task: `Exchange(turn=0, state={"left": 2}, user="higher",
    reward=0.0)`.

    `turn` is the index of the policy's turn, `state` the task's state after it, as JSON, and `user` the user's next message,
    None if the conversation is over.
    """

    turn: int
    state: Mapping[str, Any]
    user: str | None
    reward: float


Outcome = Literal["correct", "incorrect", "error"]


@dataclass(frozen=True)
class Verdict:
    """The result of verifying an answer. Example, a right answer written in another form than the gold answer:
    `Verdict("correct", 1.0, "numeric", "0.5 = 1/2")`.

    `error` means that the verifier failed for a reason other than the answer, such as a worker that the system killed. The
    sample is then masked and counted as `grader_error`, and its score of 0 is not a reward. A failure that the answer itself
    causes, such as exceeding a deadline, is `incorrect`. A bug in the verifier raises an exception, which stops the run.
    """

    outcome: Outcome
    score: float  # 1 correct, 0 incorrect, between the two for graded scores, 0 for an error
    layer: str  # which comparison decided: "exact", "numeric", "symbolic", "choice", "tests", ...
    reason: str  # for people, short

    @classmethod
    def of(cls, correct: bool, layer: str, reason: str) -> Verdict:
        """Returns a correct verdict with score 1, or an incorrect one with score 0."""
        return cls("correct" if correct else "incorrect", float(correct), layer, reason)


@dataclass(frozen=True)
class Grade:
    """The grade of one completion. A right answer of 32 tokens out of 256, in Harmony, under weights 0.1, 0, 1, 0:

        Grade(score=1.1,
              components={"format": 1.0, "structure": 1.0, "reasoning": 1.0, "tool_use": 0.0, "correctness": 1.0,
                          "efficiency": 0.875},
              failure="ok",
              extras={"correctness": 1.0, "has_answer": 1.0, "has_boxed": 0.0, "parse_method": 0.0,
                      "boxed_in_final": 0.0, "truncated_response": 0.0, "format_ok": 1.0, "structure_ok": 1.0,
                      "reasoning_ok": 1.0, "tool_use_ok": 0.0},
              answer="18",
              verdict=Verdict("correct", 1.0, "exact", "equal after normalisation"))

    `extras` are numbers for averaging. `parse_method` is 2 for a box, 1 for the last number, and 0 if nothing was extracted;
    then the whole message is the answer, or there is none (`has_answer`). `verdict` is None if the completion did not end in
    an answer. `[[rewards]]` add their values to `components` and `weights` under their names. `reason` says, for people, why a
    reward was not available; `cached` names the rewards that were answered from the cache. `step_rewards` are a step
    verifier's: for each step the index of its last token, counted after the prompt, and its score.
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
    """The part of TRL's `TrainerState` that a reward may depend on: `TrainerState(global_step=7, max_steps=100)`."""

    global_step: int = 0  # optimizer steps taken
    max_steps: int = 0  # optimizer steps of the whole run, 0 if nothing is trained
