"""Renders solutions for a verifier and locates the tokens whose output is the judgement, equally in training and in use.

Discriminative: the solution is rendered as an answer to its problem, one step per line. A head reads the last token of every
step, or of the whole solution: one forward pass for all steps (Lightman et al. 2023, arXiv:2305.20050, section 2.6). Or the head
reads every token of a step; the step is right if all its tokens are.

Generative: the tasks `prm_step` and `prm_solution` ask for the label of the last step shown, or for the score of the solution.
The model's probability of a label as its final message is compared with the other labels'. There is one sequence for
every step and label; the sequences of one solution share their common prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import torch

from nmoe.envs.tasks.proofs import PrmSolutionTask, PrmStepTask
from nmoe.errors import UserError
from nmoe.learner.batch import Batch, alike, token_weights
from nmoe.text.harmony import CHANNEL, MESSAGE, RETURN, Harmony, HarmonyTokenizer
from nmoe.types import Message

Mode = Literal["step", "score"]
HeadForm = Literal["generative", "discriminative"]
# The tokens of a step that a head reads.
Reads = Literal["last", "every"]

# From worst to best: the order of a head's classes and of a prompt's labels.
STEP_CLASSES = ("-", "+")
STEP_CLASSES_WITH_NEUTRAL = ("-", "0", "+")
SCORE_CLASSES = ("0", "0.5", "1")


@dataclass(frozen=True)
class Shown:
    """One rendered sequence for a verifier: input tokens, their targets, and the positions (`scored`) whose output is the
    judgement. For a verifier with a head, `labels` are the true classes at these positions.

    `language` are positions that predict the tokens of right steps, for an auxiliary language-modelling loss. `counts` are the
    numbers of positions that make up each judgement, for a head that reads every token of a step; otherwise empty.

    Example, three tokens of a prompt, a label and <|return|>: `Shown((5, 6, 7, 18), (6, 7, 18, 2), scored=(2, 3))`.
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    scored: tuple[int, ...]
    labels: tuple[int, ...] = ()
    language: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


Group = Sequence[Shown]
"""The rendered sequences of one solution, which may share a prefix."""


class Form(Protocol):
    """How a verifier's questions are rendered. `classes` are its labels, worst first; `mode` says whether it judges steps or whole
    solutions.
    """

    @property
    def mode(self) -> Mode: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    def training(self, messages: Sequence[Message], steps: Sequence[str], labels: Sequence[str | None]) -> Group:
        """Renders a solution as a training example. `labels` are the steps' labels, or one label for the whole solution; None is a
        missing label.
        """

    def question(self, messages: Sequence[Message], steps: Sequence[str], context_tokens: int) -> Group:
        """Renders the solution without labels, for judging its steps or the whole solution; leaves out steps that do not fit the
        context.
        """


class DiscriminativeForm:
    """Renders one sequence per solution. A classification head reads the last or every token of each step, or <|return|> for the
    whole solution.
    """

    def __init__(self, tokenizer: HarmonyTokenizer, mode: Mode, reads: Reads = "last") -> None:
        self.mode: Mode = mode
        self.reads: Reads = reads
        self.classes = STEP_CLASSES if mode == "step" else SCORE_CLASSES
        self._harmony = Harmony(tokenizer)
        special = tokenizer.special_id
        self._opening = [special(CHANNEL), *tokenizer.encode("final"), special(MESSAGE)]
        self._end = special(RETURN)

    def training(self, messages: Sequence[Message], steps: Sequence[str], labels: Sequence[str | None]) -> Group:
        ids, spans = self._shown(messages, steps)
        judged = [
            (read, self.classes.index(label))
            for read, label in zip(self._read(ids, spans), labels, strict=True)
            if label is not None
        ]
        # Steps without a label are not trained on: they may follow a wrong one.
        right = [label == self.classes[-1] for label in (labels if self.mode == "step" else list(labels) * len(spans))]
        language = [
            position - 1
            for (start, end), is_right in zip(spans, right, strict=True)
            if is_right
            for position in range(start, end + 2)
        ]
        # Beside a step that is judged as a whole, its tokens are predicted, too.
        taken = {position for read, _ in judged for position in read} if self.reads == "last" else set()
        # Nothing is read or predicted behind the last of these.
        end = max((*language, *(position for read, _ in judged for position in read)), default=len(ids) - 1) + 1
        return [
            Shown(
                tuple(ids[:end]),
                (*ids[1:], 0)[:end],
                tuple(position for read, _ in judged for position in read),
                tuple(label for read, label in judged for _ in read),
                tuple(position for position in language if position not in taken),
                self._counts([read for read, _ in judged]),
            )
        ]

    def question(self, messages: Sequence[Message], steps: Sequence[str], context_tokens: int) -> Group:
        ids, spans = self._shown(messages, steps)
        reads = [read for read in self._read(ids, spans) if read[-1] < context_tokens]
        if not reads:
            return []
        ids = ids[: reads[-1][-1] + 1]
        positions = tuple(position for read in reads for position in read)
        return [Shown(tuple(ids), (*ids[1:], 0), positions, (0,) * len(positions), counts=self._counts(reads))]

    def _shown(self, messages: Sequence[Message], steps: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens, and the indices of the first and the last token of every step; a line break follows each step."""
        encode = self._harmony.tokenizer.encode
        line_break = encode("\n")
        ids = self._harmony.render_prompt(messages) + self._opening
        spans = []
        for step in steps:
            # Encode each step by itself, so that no token crosses the end of a step.
            start = len(ids)
            ids += encode(step)
            spans.append((start, len(ids) - 1))
            ids += line_break
        return [*ids, self._end], spans

    def _read(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[range]:
        """Returns the positions that the head reads for each judgement."""
        if self.mode == "score":
            return [range(len(ids) - 1, len(ids))]
        return [range(start if self.reads == "every" else end, end + 1) for start, end in spans]

    def _counts(self, reads: Sequence[range]) -> tuple[int, ...]:
        return tuple(map(len, reads)) if self.reads == "every" else ()


class GenerativeForm:
    """Renders a prompt for each step, or for the whole solution, and the answer to it: a final message that is the label."""

    def __init__(self, tokenizer: HarmonyTokenizer, mode: Mode, neutral: bool = False) -> None:
        """Checks that every label of a step is a single token of the tokenizer, and raises UserError otherwise.

        A score of 0.5 is several tokens in most tokenizers. Its probability is the product over all of them including <|return|>,
        which keeps any score from being a prefix of another.
        """
        self.mode: Mode = mode
        steps = STEP_CLASSES_WITH_NEUTRAL if neutral else STEP_CLASSES
        self.classes = steps if mode == "step" else SCORE_CLASSES
        self._harmony = Harmony(tokenizer)
        if mode == "step":
            for label in self.classes:
                if len(ids := tokenizer.encode(label)) != 1:
                    raise UserError(
                        f"the label {label!r} of a step is {len(ids)} tokens in this tokenizer, and has to be one; use another "
                        'tokenizer, or verifier.head = "discriminative"'
                    )

    def training(self, messages: Sequence[Message], steps: Sequence[str], labels: Sequence[str | None]) -> Group:
        prompts = self._prompts(messages, steps)
        group = []
        for count, prompt, label in zip(self._counts(steps), prompts, labels, strict=True):
            if label is None:
                continue
            language: range | tuple[int, ...] = ()
            if label == self.classes[-1]:
                # In a prompt, only its end and <|start|>assistant follow the steps.
                last = len(prompt) - len(self._after) - 1
                said = (
                    steps[count - 1]
                    if self.mode == "step"
                    else "\n".join(f"{n}. {step}" for n, step in enumerate(steps, 1))
                )
                first = last - len(self._harmony.tokenizer.encode(said)) + 1
                language = range(first - 1, last)
            group.append(replace(self._answered(prompt, label), language=tuple(language)))
        return group

    def question(self, messages: Sequence[Message], steps: Sequence[str], context_tokens: int) -> Group:
        """Renders every prompt once with each label as its answer; leaves out prompts that do not fit the context."""
        groups = (
            [self._answered(prompt, label) for label in self.classes] for prompt in self._prompts(messages, steps)
        )
        return [shown for group in groups if max(len(one.inputs) for one in group) <= context_tokens for shown in group]

    @cached_property
    def answers(self) -> dict[str, list[int]]:
        """The completion's token ids for each label."""
        return {
            label: self._harmony.render_completion([Message("assistant", label, "final")]) for label in self.classes
        }

    @cached_property
    def _after(self) -> list[int]:
        """The tokens after the content of a prompt's last message."""
        (end,) = self._harmony.render([Message("user", "")])[-1:]
        return [end, *self._harmony.render_prompt([])]

    def _counts(self, steps: Sequence[str]) -> Sequence[int]:
        """Returns the number of steps that each prompt shows."""
        return range(1, len(steps) + 1) if self.mode == "step" else [len(steps)]

    def _prompts(self, messages: Sequence[Message], steps: Sequence[str]) -> list[list[int]]:
        problem = "\n\n".join(message.content for message in messages if message.role != "system")
        task = PrmStepTask() if self.mode == "step" else PrmSolutionTask()
        prompts = []
        for count in self._counts(steps):
            asked, _, _ = task.pose(problem, self.classes[0], {"steps": list(steps[:count])})
            prompts.append(self._harmony.render_prompt([Message("user", asked)]))
        return prompts

    def _answered(self, prompt: list[int], label: str) -> Shown:
        ids = prompt + self.answers[label]
        return Shown(tuple(ids[:-1]), tuple(ids[1:]), tuple(range(len(prompt) - 1, len(ids) - 1)))


def make_form(tokenizer: HarmonyTokenizer, head: HeadForm, mode: Mode, neutral: bool, reads: Reads = "last") -> Form:
    """Makes the renderer of a verifier's questions, for its kind of head and its mode. Raises UserError if the
    tokenizer does not suit it."""
    if head == "discriminative":
        return DiscriminativeForm(tokenizer, mode, reads)
    return GenerativeForm(tokenizer, mode, neutral)


def form_batch(groups: Sequence[Group], language_weight: float = 0.0) -> Batch:
    """Packs the groups' sequences into one batch.

    The loss is the mean over all judged positions, plus `language_weight` times the mean over the tokens of right steps, which have
    the label -1. For a head that reads every token of a step, the mean is over judgements: `steps_T` holds a judgement's number at
    each of its positions, and `label_weights_T` their weight, 1 over the number of judgements; these positions may predict a token,
    too.
    """
    sequences = [shown for group in groups for shown in group]
    lengths = tuple(len(shown.inputs) for shown in sequences)
    labels_T = torch.full((sum(lengths),), -1)
    judged_T, language_T = torch.zeros(len(labels_T), dtype=torch.bool), torch.zeros(len(labels_T), dtype=torch.bool)
    steps_T, steps = torch.full((len(labels_T),), -1), 0
    start = 0
    for shown in sequences:
        positions_N = torch.tensor(shown.scored, dtype=torch.int64) + start
        judged_T[positions_N] = True
        if shown.labels:
            labels_T[positions_N] = torch.tensor(shown.labels)
        if shown.counts:
            steps_T[positions_N] = torch.arange(steps, steps + len(shown.counts)).repeat_interleave(
                torch.tensor(shown.counts)
            )
            steps += len(shown.counts)
        language_T[torch.tensor(shown.language, dtype=torch.int64) + start] = language_weight > 0
        start += len(shown.inputs)
    weights_T = language_weight * token_weights("token", language_T, lengths)
    if steps == 0:
        weights_T = token_weights("token", judged_T, lengths) + weights_T
    return Batch(
        lengths=lengths,
        inputs_T=torch.tensor([token for shown in sequences for token in shown.inputs]),
        targets_T=torch.tensor([token for shown in sequences for token in shown.targets]),
        scored_T=judged_T | language_T,
        weights_T=weights_T,
        labels_T=labels_T,
        label_weights_T=judged_T / steps if steps else None,
        steps_T=steps_T if steps else None,
        prefixes=tuple(shared for number, group in enumerate(groups) for shared in _prefixes(number, group)),
    )


def _prefixes(number: int, group: Group) -> list[tuple[int, int]]:
    """Returns for each sequence the group's number and the length of the prefix shared with the group's longest sequence."""
    longest = max((shown.inputs for shown in group), key=len)
    return [(number, alike(longest, shown.inputs)) for shown in group]
