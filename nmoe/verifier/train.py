"""Verifier training: a model learns to distinguish right steps, or right solutions, from wrong ones. `nmoe verifier CONFIG`

It learns from labelled steps (Lightman et al. 2023, arXiv:2305.20050; Wang et al. 2024, arXiv:2312.08935), either to answer in
Harmony or by a head that reads the end of every step. Graded scores of whole solutions follow DeepSeekMath-V2
(arXiv:2511.22570).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.config.commands import VerifierConfig
from nmoe.config.tables.recipes import VerifierSection
from nmoe.data.packing import ExampleStream
from nmoe.data.prm import LabelledSteps, StepDataset, read_source
from nmoe.data.prm.labelled import prefix_keys
from nmoe.envs.pools.pool import stable_hash
from nmoe.errors import UserError
from nmoe.eval.evaluate import Evaluation
from nmoe.learner.objectives import Objective, classification, cross_entropy, step_classification
from nmoe.model.head import DESCRIPTION as HEAD_DESCRIPTION
from nmoe.model.head import Head, load_head
from nmoe.parallel.gang import everywhere
from nmoe.recipes.run_loop import HeldOut
from nmoe.recipes.sequence_losses import content_keys
from nmoe.recipes.setup import Start, load_tokenizer, settle
from nmoe.recipes.supervised import Supervised, supervise
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.conversation import question_key
from nmoe.types import Message
from nmoe.verifier.form import Form, Group, form_batch
from nmoe.verifier.judge import Description, Judge, calibration, processbench, rate


@dataclass(frozen=True)
class LabelledSolution:
    """A solution to train or evaluate a verifier on. `labels` holds one label per step, or one score for the whole solution.

    Example: `LabelledSolution("Sum: 4+7+2", ("4+7=11", "11+3=14"), ("+", "-"), first_wrong=1)`.
    """

    problem: str
    steps: tuple[str, ...]
    labels: tuple[str | None, ...]
    first_wrong: int | None = None

    @property
    def messages(self) -> list[Message]:
        return [Message("user", self.problem)]


def verifier(config: VerifierConfig) -> Path:
    """Trains a verifier as configured, to the last step, and returns the run directory."""
    config, threads = settle(config)
    section = config.verifier
    tokenizer = load_tokenizer(config.model)
    reads = section.reads if section.mode == "step" else "last"
    described = Description(section.mode, section.head, section.neutral == "own", reads)
    form = described.form(tokenizer)
    start = everywhere(Start.of, config, tokenizer)
    head = None
    if section.head == "discriminative":
        head = _head(config, start.model.config.hidden_size, len(form.classes))
    reading, held_out = read_data(section)
    context = start.model.config.context_tokens
    train, train_long = _fitting(judged_solutions(reading.solutions, section, config.run.seed), form, context)
    probe, probe_long = _fitting(whole_solutions(held_out.solutions, section, config.run.seed), form, context)
    # The same solutions at every evaluation; shuffled, since the file may be sorted.
    random.Random(config.run.seed).shuffle(probe)
    probe = probe[: sum(one.problems for one in config.eval)]
    if not train:
        raise UserError(
            f"{section.prm_source}: no solution is left to train on; {train_long:,} do not fit the model's context"
        )
    if config.eval and not probe:
        raise UserError(
            f"{section.held_out_source or section.prm_source}: no solution is left to evaluate on; raise "
            "verifier.held_out_share, name another verifier.held_out_source, or leave out [[eval]]"
        )
    groups = [form.training(one.messages, one.steps, one.labels) for one in train]
    sizes = [sum(len(shown.inputs) for shown in group) for group in groups]
    examples = ExampleStream(groups, sizes, config.run.seed)
    learner = everywhere(start.learner, config, head, head_only=section.trains_head_alone)
    judge = Judge(start.model, head, form, learner=learner)
    epochs = config.run.steps * section.tokens_per_step / sum(sizes)
    counts = Counter(label for one in train for label in one.labels if label is not None)
    recipe = Supervised(
        config,
        learner,
        tokenizer,
        _objective(described),
        examples,
        section.prm_source,
        next_batch=lambda: form_batch(examples.take(section.tokens_per_step), section.language_weight),
        data_notes=[
            *reading.lines(),
            *(
                [f"dropped: {train_long + probe_long:,} solutions longer than the context of {context:,} tokens"]
                if train_long + probe_long
                else []
            ),
            f"training on {len(groups):,} solutions of {sum(sizes):,} tokens, {epochs:.2f} epochs: "
            + ", ".join(f"{counts[label]:,} labelled {label!r}" for label in form.classes),
            f"evaluating on {len(probe):,} solutions to other problems",
        ],
        held_out=lambda: evaluate(judge, probe, section.mode, section.held_out_source or section.prm_source),
        save_more=described.save,
    )
    return supervise(recipe, threads)


def read_data(section: VerifierSection) -> tuple[StepDataset, StepDataset]:
    """Reads training and evaluation data, which share no problem. If both come from one source, a hash of the problem decides which
    part it belongs to.
    """
    neutral_is = {"positive": "+", "negative": "-", "own": None}[section.neutral]
    paths = section.prm800k, section.math_shepherd
    reading = read_source(section.prm_source, section.prm_split, *paths, neutral_is)
    if section.held_out_source is not None:
        held_out = read_source(section.held_out_source, section.held_out_split, *paths, neutral_is)
        problems = {question_key(one.problem) for one in held_out.solutions}
        kept = [one for one in reading.solutions if question_key(one.problem) not in problems]
        dropped = reading.dropped + Counter(
            {"solutions to problems that are evaluated on": len(reading.solutions) - len(kept)}
        )
        return StepDataset(kept, reading.records, dropped), held_out
    parts: dict[bool, list[LabelledSteps]] = {True: [], False: []}
    for one in reading.solutions:
        drawn = stable_hash("held out", question_key(one.problem)) / 2**64
        parts[drawn < section.held_out_share].append(one)
    return StepDataset(parts[False], reading.records, reading.dropped), StepDataset(parts[True])


def judged_solutions(solutions: Sequence[LabelledSteps], section: VerifierSection, seed: int) -> list[LabelledSolution]:
    """Returns the training solutions. For steps, a prefix that several solutions share is labelled only in the first of them, so
    that it counts once. For scores, these are whole solutions, including steps after the first wrong one, plus a part of each right
    solution of several steps, with the score 0.5.
    """
    if section.mode == "score":
        return whole_solutions(solutions, section, seed)
    found, seen = [], set[tuple[str, ...]]()
    for one in solutions:
        keys = prefix_keys(one.problem, one.steps)
        labels = tuple(None if key in seen else label for key, label in zip(keys, one.labels, strict=True))
        seen.update(key for key, label in zip(keys, one.labels, strict=True) if label is not None)
        if any(label is not None for label in labels):
            found.append(LabelledSolution(one.problem, one.steps, labels))
    return found


def whole_solutions(solutions: Sequence[LabelledSteps], section: VerifierSection, seed: int) -> list[LabelledSolution]:
    """Returns the solutions with every step labelled, except alternatives that were not continued; for scores with the steps after
    the first wrong one, and also a part of each right solution of several steps, with the score 0.5.
    """
    found = []
    for one in solutions:
        if one.alternative or one.score is None:
            continue
        if section.mode == "step":
            found.append(LabelledSolution(one.problem, one.steps, one.labels, one.first_wrong))
            continue
        found.append(LabelledSolution(one.problem, (*one.steps, *one.rest), (f"{one.score:g}",)))
        if one.score == 1 and len(one.steps) > 1:
            shown = random.Random(f"{seed}/{one.problem}").randrange(1, len(one.steps))
            found.append(LabelledSolution(one.problem, one.steps[:shown], ("0.5",)))
    return found


def evaluate(judge: Judge, probe: Sequence[LabelledSolution], mode: str, dataset: str) -> HeldOut:
    """Evaluates a verifier on held-out solutions: accuracy, calibration and, for steps of solutions of which some have a wrong one
    and some have none, F1. The first result decides which checkpoint is the best.
    """
    said = judge.probabilities([(one.messages, one.steps) for one in probe])
    classes = judge.form.classes
    hits: list[bool] = []
    solutions: list[int] = []
    certainties: list[float] = []
    outcomes: list[bool] = []
    for number, (one, said_MK) in enumerate(zip(probe, said, strict=True)):
        for label, said_K in zip(one.labels, said_MK, strict=True):
            if label is None:
                continue
            best = int(said_K.argmax())
            hits.append(classes[best] == label)
            solutions.append(number)
            # For two classes: is the step right? For scores: is the given score right?
            certainties.append(float(1 - said_K[0]) if mode == "step" else float(said_K[best]))
            outcomes.append(label != classes[0] if mode == "step" else classes[best] == label)
    accuracy, accuracy_interval = rate(hits, solutions)
    calibrated = calibration(certainties, outcomes)
    unit = "step" if mode == "step" else "score"

    def result(name: str, value: float, low: float, high: float, count: int) -> dict[str, Any]:
        return Evaluation(name, dataset, count, value, low, high).record()

    hits_of: dict[int, list[bool]] = {}
    for number, hit in zip(solutions, hits, strict=True):
        hits_of.setdefault(number, []).append(hit)
    keys = content_keys("\x1e".join((one.problem, *one.steps)).encode(errors="replace") for one in probe)
    # Steps of one solution go together: a difference from the start is paired by solution, weighted by its steps.
    paired = {
        "outcomes": {keys[number]: sum(own) / len(own) for number, own in hits_of.items()},
        "weights": {keys[number]: len(own) / len(hits) for number, own in hits_of.items()},
    }
    low, high = accuracy_interval.low, accuracy_interval.high
    results = [result(f"{unit}_accuracy", accuracy, low, high, len(probe)) | paired]
    metrics = {
        "verifier_accuracy": accuracy,
        "verifier_ece": calibrated.ece,
        "verifier_brier": calibrated.brier,
    }
    note = f"accuracy {accuracy:.1%}, ECE {calibrated.ece:.3f}, Brier {calibrated.brier:.3f}"
    kinds = {one.first_wrong is None for one in probe}
    if mode == "step" and len(kinds) == 2:
        found = processbench([(1 - said_MK[:, 0]).tolist() for said_MK in said], [one.first_wrong for one in probe])
        located, located_interval = found.rate_of_located
        clean, clean_interval = found.rate_of_all_correct
        results = [
            result("processbench_f1", found.f1, found.interval.low, found.interval.high, found.wrong + found.right),
            result("error_located", located, located_interval.low, located_interval.high, found.wrong),
            result("all_correct", clean, clean_interval.low, clean_interval.high, found.right),
            *results,
        ]
        metrics |= {"verifier_f1": found.f1, "verifier_error_located": located, "verifier_all_correct": clean}
        note = f"F1 {found.f1:.1%} (error located {located:.1%}, all correct {clean:.1%}), {note}"
    curve = [
        {"count": count, "probability": probability, "rate": share} for count, probability, share in calibrated.curve
    ]
    return HeldOut(
        metrics, f"held-out {note}", results, {"calibration": curve, "ece": calibrated.ece, "brier": calibrated.brier}
    )


def _fitting(
    solutions: Sequence[LabelledSolution], form: Form, context_tokens: int
) -> tuple[list[LabelledSolution], int]:
    """Returns the solutions that fit the model's context, and the number of the others."""

    def fits(group: Group) -> bool:
        return all(len(shown.inputs) <= context_tokens for shown in group)

    fitting = [one for one in solutions if fits(form.training(one.messages, one.steps, one.labels))]
    return fitting, len(solutions) - len(fitting)


def _objective(described: Description) -> Objective:
    if described.head == "generative":
        return cross_entropy
    return classification if described.reads == "last" else step_classification


def _head(config: VerifierConfig, hidden_size: int, outputs: int) -> Head:
    """Returns a new head, or the head of the verifier that training continues from."""
    mode = config.verifier.mode
    if config.model.path is not None:
        directory = resolve_checkpoint(Path(config.model.path))
        if (directory / HEAD_DESCRIPTION).exists():
            return load_head(directory, hidden_size, mode)
    return Head(hidden_size, outputs, mode)
