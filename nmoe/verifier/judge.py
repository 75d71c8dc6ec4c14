"""Judgements of a verifier: the probabilities of its labels for every step of solutions, or for solutions as a whole."""

# Shapes: M judgements of a solution (its steps, or 1), K classes.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import step_logprobs
from nmoe.learner.passes import batch_head_outputs, batch_logprobs
from nmoe.model.device import choose_device
from nmoe.model.head import Head, load_head
from nmoe.model.policy import load_policy
from nmoe.model.transformer import Transformer
from nmoe.parsing import json_of
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.harmony import HarmonyTokenizer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier.form import Form, Group, HeadForm, Mode, Reads, form_batch, make_form

DESCRIPTION = "verifier.json"


@dataclass(frozen=True)
class Description:
    """The content of verifier.json in a checkpoint: how to ask the verifier. `Description("step", "discriminative",
    neutral=False)`.
    """

    mode: Mode
    head: HeadForm
    neutral: bool
    reads: Reads = "last"

    def save(self, directory: Path) -> None:
        (directory / DESCRIPTION).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Description:
        """Reads the description from a checkpoint. Raises UserError if the checkpoint is not a verifier."""
        path = directory / DESCRIPTION
        try:
            raw = json_of(path.read_text())
            described = cls(raw["mode"], raw["head"], raw["neutral"], raw.get("reads", "last"))
        except FileNotFoundError:
            raise UserError(
                f"{path}: no such file: the checkpoint is not a verifier; `nmoe verifier` trains one"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not the description of a verifier: {error}") from None
        known = (described.mode, Mode), (described.head, HeadForm), (described.reads, Reads)
        if any(value not in get_args(values) for value, values in known):
            raise UserError(f"{path}: not the description of a verifier: {raw}")
        return described

    def form(self, tokenizer: HarmonyTokenizer) -> Form:
        """Makes the form. Raises UserError for a tokenizer that does not suit it."""
        return make_form(tokenizer, self.head, self.mode, self.neutral, self.reads)


TOKENS_PER_MICROBATCH = 16384


@dataclass
class Judge:
    """A model, with its head if it has one, and the form in which it is asked; with the learner, where it is trained meanwhile."""

    model: Transformer
    head: Head | None
    form: Form
    learner: Learner | None = None

    @classmethod
    def load(cls, path: Path, device: str = "auto") -> tuple[Judge, Description]:
        """Loads the verifier of a run or a checkpoint. Raises UserError if it is not a verifier, or incomplete, and for a device
        that is not there."""
        directory = resolve_checkpoint(path)
        described = Description.load(directory)
        form = described.form(Tokenizer.load(directory))
        model = load_policy(directory, device=choose_device(device))[0]
        head = None
        if described.head == "discriminative":
            head = load_head(directory, model.config.hidden_size, described.mode).to(model.device)
        return cls(model, head, form), described

    def probabilities(self, solutions: Sequence[tuple[Sequence[Message], Sequence[str]]]) -> list[Tensor]:
        """Returns for each solution the probabilities `[M, K]` of the form's classes, worst first.

        A solution is its problem as messages and its steps. The part that does not fit the model's context was not read and is
        given the worst class.
        """
        context, classes = self.model.config.context_tokens, len(self.form.classes)
        groups = [self.form.question(messages, steps, context) for messages, steps in solutions]
        logits = self._logits([group for group in groups if group])
        found, place = [], 0
        for (_, steps), group in zip(solutions, groups, strict=True):
            judged = sum(len(shown.counts or shown.scored) for shown in group) if self.head else len(group) // classes
            said_MK = torch.zeros(len(steps) if self.form.mode == "step" else 1, classes)
            said_MK[:, 0] = 1.0
            said_MK[:judged] = logits[place : place + judged].softmax(-1)
            place += judged
            found.append(said_MK)
        return found

    def _logits(self, groups: Sequence[Group]) -> Tensor:
        """Returns the unnormalised log-probabilities of all groups' judgements, concatenated, `[all, K]`."""
        classes = len(self.form.classes)
        if not groups:
            return torch.zeros(0, classes)
        batch = form_batch(groups)
        if self.head is not None:
            if self.learner is not None:
                logits_NK = self.learner.head_outputs(batch).result()
            else:
                logits_NK = batch_head_outputs(self.model, self.head, batch, TOKENS_PER_MICROBATCH)
            if batch.steps_T is None:
                return logits_NK
            step_N = batch.steps_T[batch.scored_T]
            return step_logprobs(logits_NK, step_N, int(step_N[-1]) + 1)
        if self.learner is not None:
            logprobs_N = self.learner.logprobs(batch).result()
        else:
            logprobs_N = batch_logprobs(self.model, batch, TOKENS_PER_MICROBATCH, 1.0)
        answers = logprobs_N.split([len(shown.scored) for group in groups for shown in group])
        return torch.stack([answer_N.sum() for answer_N in answers]).view(-1, classes)
