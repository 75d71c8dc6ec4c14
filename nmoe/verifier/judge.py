"""Judges solutions with a verifier (the probability of each label, for each step or solution) and measures how good its judgements
are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
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
from nmoe.statistics import Interval, binomial_interval, outcomes_interval
from nmoe.text.harmony import HarmonyTokenizer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier.form import Form, Group, HeadForm, Mode, Reads, form_batch, make_form

DESCRIPTION = "verifier.json"


@dataclass(frozen=True)
class Description:
    """The content of a checkpoint's verifier.json, which says how to ask this verifier: `Description("step",
    "discriminative", neutral=False)`."""

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
            described = cls(raw["mode"], raw["head"], raw["neutral"], raw["reads"])
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
        """Returns the renderer of the prompts by which this verifier is asked to judge a solution. Raises UserError for a tokenizer
        that cannot write them."""
        return make_form(tokenizer, self.head, self.mode, self.neutral, self.reads)


TOKENS_PER_MICROBATCH = 16384


@dataclass
class Judge:
    """A verifier that judges solutions: the model, its classification head if it has one, the form of its questions, and during
    training the learner.
    """

    model: Transformer
    head: Head | None
    form: Form
    learner: Learner | None = None

    @classmethod
    def load(cls, path: Path, device: str = "auto") -> tuple[Judge, Description]:
        """Loads the verifier of a run or a checkpoint. Raises UserError if it is not a verifier or is incomplete, or if the device
        does not exist.
        """
        directory = resolve_checkpoint(path)
        described = Description.load(directory)
        form = described.form(Tokenizer.load(directory))
        model = load_policy(directory, device=choose_device(device))[0]
        head = None
        if described.head == "discriminative":
            head = load_head(directory, model.config.hidden_size, described.mode).to(model.device)
        return cls(model, head, form), described

    def probabilities(self, solutions: Sequence[tuple[Sequence[Message], Sequence[str]]]) -> list[Tensor]:
        """Returns for each solution the probabilities of the form's classes, worst first: `[steps, classes]`, or one row for a
        whole solution.

        A solution is its problem as messages and its steps. Steps beyond the model's context are not read; they get the worst class
        with probability 1, as does a whole solution that does not fit.
        """
        context, classes = self.model.config.context_tokens, len(self.form.classes)
        groups = [self.form.question(messages, steps, context) for messages, steps in solutions]
        logits = self._logits([group for group in groups if group])
        found, position = [], 0
        for (_, steps), group in zip(solutions, groups, strict=True):
            judged = sum(len(shown.counts or shown.scored) for shown in group) if self.head else len(group) // classes
            said_MK = torch.zeros(len(steps) if self.form.mode == "step" else 1, classes)
            said_MK[:, 0] = 1.0
            said_MK[:judged] = logits[position : position + judged].softmax(-1)
            position += judged
            found.append(said_MK)
        return found

    def _logits(self, groups: Sequence[Group]) -> Tensor:
        """Returns unnormalised log-probabilities of the classes for all groups' judgements, concatenated: `[judgements,
        classes]`.
        """
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


# A step is judged wrong if the probability that it is right is below this.
THRESHOLD = 0.5
BINS = 10
_DRAWS = 20_000


@dataclass(frozen=True)
class ProcessBench:
    """The metrics that `processbench` computes: the two accuracies, their F1 with its interval, and the numbers of solutions with
    and without a wrong step.

    Example: `ProcessBench(located=0.93, all_correct=0.97, f1=0.95, interval=Interval(0.93, 0.96), wrong=150, right=150)`.
    """

    located: float
    all_correct: float
    f1: float
    interval: Interval
    wrong: int
    right: int

    @property
    def rate_of_located(self) -> tuple[float, Interval]:
        return self.located, binomial_interval(round(self.located * self.wrong), self.wrong)

    @property
    def rate_of_all_correct(self) -> tuple[float, Interval]:
        return self.all_correct, binomial_interval(round(self.all_correct * self.right), self.right)


def processbench(step_probabilities: Sequence[Sequence[float]], first_wrong: Sequence[int | None]) -> ProcessBench:
    """Computes F1 as in ProcessBench (Zheng et al. 2024, arXiv:2412.06559, section 3).

    F1 is the harmonic mean of two accuracies: finding the first wrong step of solutions that have one, and finding none in the
    others. `step_probabilities` are the probabilities that each step is right. The 95% interval melds the exact ones of both rates:
    its lower end is a quantile of F1 under their lower confidence distributions, its upper end one under the upper ones (Fay,
    Proschan and Brittain 2015, "Combining one-sample confidence procedures"). Raises ValueError if one of the two kinds of solution
    is missing.
    """
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for probabilities, wrong in zip(step_probabilities, first_wrong, strict=True):
        called = next((index for index, p in enumerate(probabilities) if p < THRESHOLD), None)
        hits[wrong is None].append(called == wrong)
    if not hits[True] or not hits[False]:
        missing = "without" if hits[False] else "with"
        raise ValueError(f"no solution {missing} a wrong step: F1 needs both kinds")
    located, clean = hits[False], hits[True]
    rates = sum(located) / len(located), sum(clean) / len(clean)
    counts = [(sum(one), len(one)) for one in (located, clean)]
    return ProcessBench(*rates, _harmonic(*rates), f1_interval(*counts), len(located), len(clean))


def f1_interval(located: tuple[int, int], clean: tuple[int, int]) -> Interval:
    """Returns the 95% interval of the harmonic mean of two shares, each given as (right, total), by the method of
    `processbench`.
    """
    rng = np.random.default_rng(0)

    def drawn(right: int, total: int, more: int) -> np.ndarray:
        # A Beta distribution with a parameter of 0 is all at one end.
        a, b = right + more, total - right + 1 - more
        return np.full(_DRAWS, float(b == 0)) if 0 in (a, b) else rng.beta(a, b, _DRAWS)

    low, high = (
        float(np.quantile(_harmonic(drawn(*located, more), drawn(*clean, more)), level))
        for more, level in ((0, 0.025), (1, 0.975))
    )
    return Interval(low, high)


def _harmonic(a: Any, b: Any) -> Any:
    """Returns the harmonic mean; 0 for 0 and 0."""
    return 2 * a * b / (a + b + np.finfo(float).tiny)


@dataclass(frozen=True)
class Calibration:
    """How well probabilities match outcomes: calibrated if events predicted with probability p occur in a share p of cases.

    ece: expected calibration error, the mean distance between a bin's rate and its mean probability, weighted by the bins'
    counts (Guo et al. 2017, arXiv:1706.04599, eq. 3).

    brier: mean squared distance between probability and outcome (Brier 1950).

    curve: for each non-empty bin its count, mean probability and rate.
    """

    ece: float
    brier: float
    curve: tuple[tuple[int, float, float], ...]


def calibration(probabilities: Sequence[float], outcomes: Sequence[bool], bins: int = BINS) -> Calibration:
    """Computes the calibration of probabilities against outcomes, over bins of equal width. Raises ValueError if the lists are
    empty or differ in length.
    """
    if len(probabilities) != len(outcomes) or not probabilities:
        raise ValueError(f"{len(probabilities)} probabilities and {len(outcomes)} outcomes")
    p_N, y_N = np.asarray(probabilities, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    bin_N = np.minimum((p_N * bins).astype(int), bins - 1)
    curve = []
    for position in range(bins):
        chosen_N = bin_N == position
        if chosen_N.any():
            curve.append((int(chosen_N.sum()), float(p_N[chosen_N].mean()), float(y_N[chosen_N].mean())))
    ece = sum(count * abs(mean - rate) for count, mean, rate in curve) / len(p_N)
    return Calibration(ece, float(np.square(p_N - y_N).mean()), tuple(curve))


def rate(hits: Sequence[bool], clusters: Sequence[int]) -> tuple[float, Interval]:
    """Returns the share of hits with its 95% interval, computed over clusters such as the solutions that the judged steps belong
    to.
    """
    return sum(hits) / len(hits), outcomes_interval(hits, clusters)
