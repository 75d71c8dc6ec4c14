"""Evaluates the speedrun's new model before and after training, and writes the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.config.commands import RLConfig
from nmoe.config.environment import reseeded
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.eval.evaluate import Evaluation, sample_problems, summarise
from nmoe.model.policy import load_policy
from nmoe.recipes.setup import device_and_dtype
from nmoe.runs.checkpoint import checkpoint_step
from nmoe.runs.report import markdown_table
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.speedrun.report import (
    Transcript,
    agreement,
    before_and_after,
    cost,
    curves,
    reason,
    which_checkpoint,
    write_report,
)
from nmoe.speedrun.stages import StageRecord
from nmoe.statistics import paired_difference
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group

SAMPLED_PROBLEMS = 1200
GREEDY_PROBLEMS = 600
PASS16_PROBLEMS = 150
LONGER_PROBLEMS = 600


@dataclass(frozen=True)
class Examination:
    """The evaluation results of one model, by sampling mode. The first result of each list is over all skills, the
    others are by skill.

    `step` is the step of the evaluated checkpoint; None in results of older versions. `longer` has problems beyond the
    trained lengths.
    """

    sampled: list[Evaluation]
    greedy: list[Evaluation]
    pass16: list[Evaluation]
    longer: list[Evaluation]
    longer_greedy: list[Evaluation]
    format_ok: float
    longer_format_ok: float
    response_tokens: float
    transcripts: list[Transcript]
    outcomes: list[float]  # 1 or 0 for each sampled problem, in their order
    step: int | None = None

    def figures(self, who: str) -> dict[str, float | int]:
        """Returns the results as figures for summary.json, such as `trained_correctness` and `greedy_trained_reverse`."""
        out: dict[str, float | int] = {
            f"{who}_correctness": self.sampled[0].value,
            f"{who}_correctness_low": self.sampled[0].low,
            f"{who}_correctness_high": self.sampled[0].high,
            f"{who}_problems": self.sampled[0].problems,
            f"{who}_response_tokens": self.response_tokens,
        }
        kinds = {
            "correctness": self.sampled[1:],
            "greedy": self.greedy,
            "pass16": self.pass16,
            "ood": self.longer,
            "ood_greedy": self.longer_greedy,
        }
        for kind, evaluations in kinds.items():
            for evaluation in evaluations:
                skill = evaluation.dataset.partition("/")[2]
                out[f"{kind}_{who}" + (f"_{skill}" if skill else "")] = evaluation.value
        return out


def examine(who: str, path: Path, config: RLConfig, longer: Path, seed: int) -> Examination:
    """Evaluates the model at `path` on the held-out split of the configuration's environment, and on problems of the
    file `longer`.

    Lines on the console begin with the name `who`.
    """
    directory = resolve_checkpoint(path)
    tokenizer = Tokenizer.load(directory)
    device, dtype = device_and_dtype(config.model)
    model = load_policy(directory, dtype, device)[0].set_numerics(config.model.numerics).requires_grad_(False)
    engine = NativeEngine(model, config.engine.max_sequences, config.engine.cache_mb)

    def ask(environment: Environment, problems: int, samples: int, temperature: float) -> list[Group]:
        return sample_problems(
            engine,
            environment,
            model.config.context_tokens,
            problems=problems,
            samples=samples,
            temperature=temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            seed=seed,
        )

    def held_out() -> Environment:
        return Environment.from_settings(reseeded(config.environment, seed), tokenizer).held_out()

    def beyond() -> Environment:
        return Environment.from_toml(longer, tokenizer)

    sampled = ask(held_out(), SAMPLED_PROBLEMS, 1, 1.0)
    longer_sampled = ask(beyond(), LONGER_PROBLEMS, 1, 1.0)
    env_id, longer_id = config.environment.env_id, beyond().settings.env_id
    examination = Examination(
        sampled=summarise(sampled, env_id, 1.0),
        greedy=summarise(ask(held_out(), GREEDY_PROBLEMS, 1, 0.0), env_id, 0.0),
        pass16=[
            evaluation
            for evaluation in summarise(ask(held_out(), PASS16_PROBLEMS, 16, 1.0), env_id, 1.0)
            if evaluation.mode == "pass@16"
        ],
        longer=summarise(longer_sampled, longer_id, 1.0),
        longer_greedy=summarise(ask(beyond(), LONGER_PROBLEMS, 1, 0.0), longer_id, 0.0),
        format_ok=_mean(sampled, "format_ok"),
        longer_format_ok=_mean(longer_sampled, "format_ok"),
        response_tokens=sum(group.trajectories[0].sampled_tokens for group in sampled) / len(sampled),
        transcripts=_transcripts(sampled, tokenizer),
        outcomes=[group.trajectories[0].grade.extras["correctness"] for group in sampled],
        step=checkpoint_step(directory),
    )
    for result in [examination.sampled, examination.greedy, examination.pass16, examination.longer]:
        print(f"{who}: {result[0]}")
    return examination


def _mean(groups: Sequence[Group], name: str) -> float:
    return sum(group.trajectories[0].grade.extras[name] for group in groups) / len(groups)


def _transcripts(groups: Sequence[Group], tokenizer: Tokenizer) -> list[Transcript]:
    """Returns the transcript of the first problem of each skill."""
    first: dict[str, Group] = {}
    for group in groups:
        first.setdefault(group.problem.source, group)
    return [
        Transcript(
            group.problem.question,
            group.problem.gold,
            tokenizer.decode(group.trajectories[0].token_ids),
            group.trajectories[0].grade.extras["correctness"] == 1,
            reason(group.trajectories[0].grade),
        )
        for _, group in sorted(first.items())
    ]


def write_scratch_report(
    out: Path,
    course: str,
    summary: Mapping[str, float | int],
    stages: Sequence[StageRecord],
    metrics: Sequence[Mapping[str, Any]],
    before: Examination,
    after: Examination,
) -> Path:
    """Writes the report and its plots to `out/report.md` and `out/plots/*.png`; returns the path of the report.

    `course` describes in words how the base model was trained.
    """
    gain = paired_difference(before.outcomes, after.outcomes)
    parts = [
        f"# Speedrun, seed {summary['seed']}\n",
        f"A small mixture-of-experts base, pretrained on a corpus that knows three skills badly, then {course}. "
        "Problems are held out: no stage met any of them. "
        "Longer ones have a digit more than any that reinforcement learning trained on; the base has met their length, not their "
        "questions. Brackets are 95% intervals.\n",
        "## What the model learned\n",
        markdown_table(["skill", "mode", "base", "trained"], _rows(before, after)),
        f"On the same problems, sampled, the trained model is right {100 * gain.value:.1f} points more often "
        f"[{100 * gain.interval.low:.1f}, {100 * gain.interval.high:.1f}], paired.\n",
        *([f"{examined}\n"] if (examined := which_checkpoint(after.step, len(metrics))) else []),
        f"In the required format: {before.format_ok:.1%} before, {after.format_ok:.1%} after "
        f"(longer problems: {before.longer_format_ok:.1%}, {after.longer_format_ok:.1%}). "
        f"Response length: {before.response_tokens:.1f} tokens before, {after.response_tokens:.1f} after.\n",
        "Greedy and pass@16 stand beside the sampled rate because part of any gain is sharpening: what pass@16 of the base "
        "already reaches was there to be found, what greedy gains was not yet preferred.\n",
        "## How\n",
        *curves(out, metrics),
        "## Before and after\n",
        *before_and_after(before.transcripts, after.transcripts),
        "## Engine against learner\n",
        agreement(summary, f"{summary.get('route_flips', 0):.0f} router picks came out differently."),
        "## Time and cost\n",
        *cost(out, summary, stages, metrics),
    ]
    return write_report(out, parts)


def _rows(before: Examination, after: Examination) -> list[list[str]]:
    rows = []
    for name, base, trained in (
        ("sampled at temperature 1", before.sampled, after.sampled),
        ("greedy", before.greedy, after.greedy),
        ("pass@16", before.pass16, after.pass16),
        ("longer problems, sampled", before.longer, after.longer),
        ("longer problems, greedy", before.longer_greedy, after.longer_greedy),
    ):
        for one, other in zip(base, trained, strict=True):
            skill = one.dataset.partition("/")[2] or f"**all** ({one.problems} problems)"
            rows.append([skill, name, _shown(one), _shown(other)])
    return rows


def _shown(evaluation: Evaluation) -> str:
    return f"{evaluation.value:.1%} [{evaluation.low:.1%}, {evaluation.high:.1%}]"
