r"""The two forms that an environment can ask of a completion: Harmony messages, or plain text with a `\boxed{}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nmoe.rl.grading.extraction import from_final, from_response, last_boxed
from nmoe.rl.grading.grade import Reading
from nmoe.rl.tasks import Task
from nmoe.text.harmony import Harmony, HarmonyTokenizer, Message
from nmoe.text.harmony_format import END_OF_TEXT

_REASONING = "The answer follows."


class Format(Protocol):
    """How messages become prompt tokens, and the tokens that were sampled, turn by turn, a reading. `read` is total: any ids are
    read."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...

    def read(self, task: Task, turns: Sequence[Sequence[int]]) -> Reading: ...

    def answer_ids(self, task: Task, answer: str) -> list[int]:
        """A completion in the best form, reasoning included, that gives this answer."""


class HarmonyFormat:
    """Harmony: every turn parses, the last ends in <|return|>, and its last final message, not blank, is the answer.

    The reasoning is an analysis message that is not blank, before that final message, in any turn. An answer counts only in this
    form: wherever else it may stand, nobody could tell it from a thought.
    """

    def __init__(self, tokenizer: HarmonyTokenizer) -> None:
        self._harmony = Harmony(tokenizer)
        self.stop_ids = self._harmony.stop_ids

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._harmony.render_prompt(messages)

    def read(self, task: Task, turns: Sequence[Sequence[int]]) -> Reading:
        *calls, completion = [self._harmony.parse_completion(token_ids) for token_ids in turns]
        extraction = from_final(completion.final or "", bare_final=task.bare_final)
        well_formed = (
            all(call.end == "call" for call in calls)
            and completion.end == "return"
            and bool((completion.final or "").strip())
        )
        finals = [index for index, message in enumerate(completion.messages) if message.channel == "final"]
        thoughts = completion.messages[: finals[-1]] if finals else ()
        thoughts = (*(message for call in calls for message in call.messages), *thoughts)
        reasons = any(message.channel == "analysis" and message.content.strip() for message in thoughts)
        return Reading(
            extraction,
            format_ok=well_formed,
            reasoning_ok=well_formed and reasons,
            answer_counts=well_formed,
            parse_error=not well_formed,
        )

    def answer_ids(self, task: Task, answer: str) -> list[int]:
        final = answer if task.bare_final else rf"\boxed{{{answer}}}"
        return self._harmony.render_completion(
            [Message("assistant", _REASONING, channel="analysis"), Message("assistant", final, channel="final")]
        )


class BoxedFormat:
    r"""Plain text, for models that do not speak Harmony: the answer stands in the last `\boxed{}` of the completion.

    The prompt is the messages' text, a blank line between them, and a line break at the end; nothing is added, so that an
    instruction to use `\boxed{}` belongs in the environment's `system`. The form is having a box, the reasoning is
    text before it, and a right last number without a box is correct all the same (it lacks the form, not the answer).
    """

    def __init__(self, tokenizer: HarmonyTokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = (tokenizer.special_id(END_OF_TEXT),)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._tokenizer.encode("\n\n".join(message.content for message in messages) + "\n")

    def read(self, task: Task, turns: Sequence[Sequence[int]]) -> Reading:
        (completion_ids,) = turns
        ended = bool(completion_ids) and completion_ids[-1] in self.stop_ids
        text = self._tokenizer.decode(completion_ids[:-1] if ended else completion_ids)
        box = last_boxed(text)
        return Reading(
            from_response(text),
            format_ok=box is not None,
            reasoning_ok=box is not None and bool(text[: box.start].strip()),
            answer_counts=True,
            parse_error=False,
        )

    def answer_ids(self, task: Task, answer: str) -> list[int]:
        return [*self._tokenizer.encode(rf"{_REASONING} \boxed{{{answer}}}"), self.stop_ids[0]]


FORMATS: dict[str, type[HarmonyFormat] | type[BoxedFormat]] = {"harmony": HarmonyFormat, "boxed": BoxedFormat}
