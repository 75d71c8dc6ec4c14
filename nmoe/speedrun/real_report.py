"""The report on a released model's training: each gain split into format and correctness, and compared with guessing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.eval.lenient import Gain, part_gain
from nmoe.parsing import json_object
from nmoe.runs.conversions import RECORD
from nmoe.runs.report import fenced, markdown_table, markdown_text
from nmoe.speedrun.real_examination import ROOM, Answer, RealExamination
from nmoe.speedrun.report import Transcript, agreement, before_and_after, cost, curves, which_checkpoint, write_report
from nmoe.speedrun.stages import StageRecord
from nmoe.statistics import FEWEST, PairedDifference, paired_difference, paired_mean_difference

_PARTS = ("form", "correctness given form", "correctness without form")
"""The names of the fields of `Gain`, in order."""
SHOWN = 2
"""The number of problems per task whose answers are printed before and after training."""


@dataclass(frozen=True)
class Result:
    """The results of one task: answers to the same problems before and after training; `chance` is the accuracy of guessing."""

    task: str
    chance: float
    before: Sequence[Answer]
    after: Sequence[Answer]

    @property
    def gain(self) -> PairedDifference:
        """The gain in accuracy, paired by problem."""
        return paired_difference(*([float(one.right) for one in answers] for answers in (self.before, self.after)))

    @property
    def gain_in_form(self) -> PairedDifference | None:
        """The gain in accuracy on problems that both models answered in the required format; None if these are too few."""
        both = [(a.right, b.right) for a, b in zip(self.before, self.after, strict=True) if a.in_form and b.in_form]
        return paired_difference(*zip(*both, strict=True)) if len(both) >= FEWEST else None

    @property
    def parts(self) -> Gain | None:
        """The gain split into more well-formed answers and more right answers among them; None if it cannot be split."""
        return part_gain(*([(one.in_form, one.right) for one in answers] for answers in (self.before, self.after)))

    def figures(self) -> dict[str, float | int]:
        """Returns the figures of this task for summary.json, such as `trained_compare` and `gain_low_compare`."""
        out: dict[str, float | int] = {f"problems_{self.task}": len(self.before), f"chance_{self.task}": self.chance}
        for who, answers in (("base", self.before), ("trained", self.after)):
            out[f"{who}_{self.task}"] = _share(answers, "right")
            out[f"{who}_in_form_{self.task}"] = _share(answers, "in_form")
            out[f"{who}_tokens_{self.task}"] = sum(one.tokens for one in answers) / len(answers)
            in_form = [one for one in answers if one.in_form]
            if in_form:
                out[f"{who}_given_form_{self.task}"] = _share(in_form, "right")
        out |= _with_interval(f"gain_{self.task}", self.gain)
        if self.gain_in_form is not None:
            out |= _with_interval(f"gain_given_form_{self.task}", self.gain_in_form)
        if self.parts is not None:
            out |= {f"gain_by_{name}_{self.task}": value for name, value in vars(self.parts).items()}
        return out

    def line(self) -> str:
        """Formats the result for a terminal: `compare: 18.0% -> 95.5% right (chance 50.0%), +77.5 points [...], form
        +31.0, ...`."""
        figures = self.figures()
        before, after = figures[f"base_{self.task}"], figures[f"trained_{self.task}"]
        parts = {} if self.parts is None else dict(zip(_PARTS, vars(self.parts).values(), strict=True))
        shown = "".join(f", {name} {_points(value)}" for name, value in parts.items())
        return (
            f"{self.task}: {before:.1%} -> {after:.1%} right (chance {self.chance:.1%}), "
            f"{_points(self.gain.value)} points {_between(self.gain)}{shown}"
        )


@dataclass(frozen=True)
class Ratio:
    """The trained model's perplexity divided by the base model's on the same texts, with its 95% interval; and both
    perplexities."""

    value: float
    low: float
    high: float
    base: float
    trained: float

    def figures(self) -> dict[str, float]:
        names = (
            "perplexity_ratio",
            "perplexity_ratio_low",
            "perplexity_ratio_high",
            "perplexity_base",
            "perplexity_trained",
        )
        return dict(zip(names, vars(self).values(), strict=True))


def results(before: RealExamination, after: RealExamination) -> list[Result]:
    """Pairs the answers to each task before and after training."""
    trained = after.by_task()
    return [Result(task, before.chance[task], answers, trained[task]) for task, answers in before.by_task().items()]


def perplexity_ratio(before: RealExamination, after: RealExamination) -> Ratio | None:
    """Computes the ratio of perplexities on lambada; None if the data set was not on this machine."""
    if isinstance(before.lambada, str) or isinstance(after.lambada, str):
        return None
    difference = paired_mean_difference(before.lambada, after.lambada)
    between = difference.interval
    low, high = (difference.value, difference.value) if between is None else (between.low, between.high)
    losses = (sum(one) / len(one) for one in (before.lambada, after.lambada))
    return Ratio(*map(math.exp, (difference.value, low, high, *losses)))


def write_real_report(
    out: Path,
    summary: Mapping[str, float | int],
    stages: Sequence[StageRecord],
    metrics: Sequence[Mapping[str, Any]],
    before: RealExamination,
    after: RealExamination,
) -> Path:
    """Writes the report and its plots to `out/report.md` and `out/plots/*.png`; returns the path of the report."""
    found = results(before, after)
    skills = f"{len(found)} narrow skills" if len(found) > 1 else "one narrow skill"
    parts = [
        f"# A released model learns by reinforcement learning, seed {summary['seed']}\n",
        f"The base is {_model(out)}, with {stages[0].figures['parameters']:,} parameters. It was trained on {skills}, "
        "each a kind of short question whose answer a program checks. No answer was ever shown to it. Its own answers were "
        "rewarded: right ones, and a little those that end by themselves.\n",
        *(f"- {markdown_text(one.task)}: {markdown_text(one.before[0].question)}" for one in found),
        "",
        "Problems are held out: training met none of them. Both models answered the same problems, greedily, with room for "
        f"{ROOM} tokens. An answer counts wherever it stands, also in a completion that does not end. Brackets are 95% "
        "intervals, of differences paired by problem.\n",
        "## What the model learned\n",
        markdown_table(
            ["task", "problems", "chance", "base", "trained", "gain in points"], [_row(one, summary) for one in found]
        ),
        *([f"{examined}\n"] if (examined := which_checkpoint(after.step, len(metrics))) else []),
        "Chance is what a guess reaches: always the most frequent answer, or any of the options that the question names, "
        "whichever is better.\n",
        "## Form and correctness\n",
        "A completion is in form if it ends by itself and an answer can be read in it. Much of what RL teaches first is to end. "
        "The gain is parted into more completions in form (at the mean rates of right answers), and more right answers among "
        "those in form and among the others.\n",
        markdown_table(
            [
                "task",
                "tokens, base",
                "tokens, trained",
                "in form, base",
                "in form, trained",
                "right given form, base",
                "right given form, trained",
                *(f"gain by {name}" for name in _PARTS),
                "gain on problems in form both times",
            ],
            [_form_row(one, summary) for one in found],
        ),
        "## What else changed\n",
        *_elsewhere(before, after),
        "## The curve\n",
        "Each step is shown by the completions that it sampled to learn from, at the temperature and length of training. They are "
        "not the problems of the tables above.\n",
        *curves(out, metrics),
        "## Before and after\n",
        *before_and_after(_shown(found, "before"), _shown(found, "after")),
        "## Engine against learner\n",
        agreement(
            summary,
            f"Over the five steps where it came nearest, the mean was {summary.get('mismatch_of_bound', 0.0):.0%} of what rounding "
            "explains at that entropy.",
        ),
        "## Time and cost\n",
        *cost(out, summary, stages, metrics),
        f"`nmoe chat {out}` talks to the trained model, and `nmoe report {out / 'rl'}` shows the run of reinforcement learning.\n",
    ]
    return write_report(out, parts)


def _model(out: Path) -> str:
    """Returns the names of the package and the file that the model was imported from."""
    imported = json_object(out / "model" / RECORD)
    return f"{markdown_text(imported['source'])} ({markdown_text(imported['file'])})"


def _row(one: Result, summary: Mapping[str, float | int]) -> list[object]:
    return [
        one.task,
        len(one.before),
        f"{one.chance:.1%}",
        f"{summary[f'base_{one.task}']:.1%}",
        f"{summary[f'trained_{one.task}']:.1%}",
        f"{_points(one.gain.value)} {_between(one.gain)}",
    ]


def _form_row(one: Result, summary: Mapping[str, float | int]) -> list[object]:
    def share(name: str) -> str:
        return f"{summary[name]:.1%}" if name in summary else "none in form"

    both = one.gain_in_form
    return [
        one.task,
        f"{summary[f'base_tokens_{one.task}']:.0f}",
        f"{summary[f'trained_tokens_{one.task}']:.0f}",
        share(f"base_in_form_{one.task}"),
        share(f"trained_in_form_{one.task}"),
        share(f"base_given_form_{one.task}"),
        share(f"trained_given_form_{one.task}"),
        *(["not known"] * len(_PARTS) if one.parts is None else map(_points, vars(one.parts).values())),
        "too few" if both is None else f"{_points(both.value)} {_between(both)}",
    ]


def _elsewhere(before: RealExamination, after: RealExamination) -> list[str]:
    ratio = perplexity_ratio(before, after)
    if ratio is None:
        why = next(one for one in (before.lambada, after.lambada) if isinstance(one, str))
        parts = [f"Perplexity on CORE's lambada was not measured: {markdown_text(why)}\n"]
    else:
        assert not isinstance(before.lambada, str), "a ratio was measured"
        parts = [
            f"Perplexity of the last word of {len(before.lambada)} passages of CORE's lambada: {ratio.base:.1f} before, "
            f"{ratio.trained:.1f} after, {ratio.value:.3f} times as much [{ratio.low:.3f}, {ratio.high:.3f}]. "
            "Above 1 the model predicts English worse than before.\n"
        ]
    parts.append("Questions that no task asks, answered greedily and cut where the dots are:\n")
    for (question, base), (_, trained) in zip(before.talk, after.talk, strict=True):
        parts.append(f"**{markdown_text(question)}**\n")
        if base == trained:
            parts.append(f"both:\n\n{fenced(base, 'text')}")
        else:
            parts.append(f"base:\n\n{fenced(base, 'text')}")
            parts.append(f"trained:\n\n{fenced(trained, 'text')}")
    return parts


def _shown(found: Sequence[Result], which: str) -> list[Transcript]:
    return [
        Transcript(one.question, one.gold, one.text + ("" if one.ended else " ..."), one.right, one.reason)
        for result in found
        for one in getattr(result, which)[:SHOWN]
    ]


def _share(answers: Sequence[Answer], name: str) -> float:
    return sum(getattr(one, name) for one in answers) / len(answers)


def _with_interval(name: str, difference: PairedDifference) -> dict[str, float]:
    return {name: difference.value, f"{name}_low": difference.interval.low, f"{name}_high": difference.interval.high}


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _between(difference: PairedDifference) -> str:
    return f"[{100 * difference.interval.low:+.1f}, {100 * difference.interval.high:+.1f}]"
