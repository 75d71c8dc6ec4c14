"""Samples and grades problems, and reports the share that is solved, with a confidence interval."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe.config.environment import EnvironmentSettings
from nmoe.config.modes import Mode, mode_of
from nmoe.config.tables.pools import task_types
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.text import OpenTask
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.eval.outcomes import Outcome, identity_of, key_of, outcomes_of
from nmoe.rollout.collector import Collector
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.samples import how_ended
from nmoe.statistics import binomial_interval, pass_at_k, share_interval
from nmoe.trajectory import Group
from nmoe.types import FAILURES, ExpertWeightsForm, Precision, Problem, Sampling

if TYPE_CHECKING:
    from nmoe.engine.remote.served import ServedFleet


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: a mean over problems, with its 95% confidence interval.

    Example: `Evaluation("greedy_pass@1", "skills/sort", problems=400, value=0.93, low=0.90, high=0.95)`. `mode` says
    how the completions were sampled, and `dataset` names the problems; results of different modes are not comparable.
    The other fields are optional:

    - `outcomes` maps the key of each problem to its value, so that two models can be compared problem by problem;
    - `sampling` has the temperature, the samples per problem, the token limit and the reasoning effort;
    - `trained_on` is the number of problems that the model was trained on, if that was permitted;
    - `failures` counts the completions by how they ended, over all problems: `{"ok": 6, "truncated": 44}`;
    - `answers` has the first problems with their sampled answers.
    """

    mode: str
    dataset: str
    problems: int
    value: float
    low: float
    high: float
    outcomes: Mapping[str, float] | None = field(default=None, compare=False, repr=False)
    sampling: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    trained_on: int | None = field(default=None, compare=False, repr=False)
    failures: Mapping[str, int] | None = field(default=None, compare=False, repr=False)
    answers: Sequence[Mapping[str, Any]] | None = field(default=None, compare=False, repr=False)

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        trained = "" if self.trained_on is None else f", {self.trained_on} of them trained on"
        ended = how_ended(self.record())
        return (
            f"{self.mode} on {self.dataset} {self.value:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.problems}{trained}"
            f"{f', {ended}' if ended else ''}"
        )


def evaluate(
    engine: Engine,
    environment: Environment,
    context_tokens: int,
    *,
    problems: int,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    runtime: ToolRuntime | None = None,
) -> list[Evaluation]:
    """Evaluates the environment's next `problems` distinct problems; returns results over all of them first, then by source.

    One sample per problem gives `greedy_pass@1` or `sampling_pass@1`, with the exact binomial interval. Several samples
    give

    - `sampling_pass@1`, the mean accuracy over the samples, with an interval over problems;
    - `pass@k` for every k from 2 to the number of samples, the probability that at least one of k samples is right;
    - `sampling_pass@n`, the share of problems whose most frequent answer is right (of equally frequent ones, the first).

    Prints a warning if the environment has fewer problems. Raises UserError if its problems have no right answers.
    """
    refuse_open_problems(environment)
    groups = sample_problems(
        engine,
        environment,
        context_tokens,
        problems=problems,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        runtime=runtime,
    )
    say_if_fewer(environment, problems, len(groups))
    return summarise(groups, environment.settings.env_id, temperature)


def sample_problems(
    engine: Engine,
    environment: Environment,
    context_tokens: int,
    *,
    problems: int,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    runtime: ToolRuntime | None = None,
    on_group: Callable[[Group], None] | None = None,
    nondeterminism: bool = False,
    done: Collection[str] = (),
) -> list[Group]:
    """Samples and grades `samples` completions for each of the environment's next problems; returns one group per problem.

    `on_group` is called with each finished group. Several samples at temperature 0 raise UserError, unless
    `nondeterminism` permits them for the mode `nondet_proxy_pass@n`. Problems whose keys are in `done` are left out;
    this does not change the samples of the others.
    """
    if not nondeterminism:
        mode_of(None, samples, temperature)
    sandboxes, workspaces = (None, None) if runtime is None else (runtime.sandboxes, runtime.workspaces)
    collector = Collector(engine, environment, context_tokens, sandboxes, workspaces=workspaces)
    key = (seed, "eval", samples, str(temperature))
    sampling = Sampling(max_new_tokens, temperature)
    distinct = distinct_problems(environment, problems)
    asked = [(index, problem) for index, problem in enumerate(distinct) if key_of(problem) not in done]
    indices, left = [index for index, _ in asked], [problem for _, problem in asked]
    return collector.collect(left, samples, sampling, key, indices, on_group, state=None).groups


def say_if_fewer(environment: Environment, problems: int, found: int) -> None:
    """Prints a warning to stderr if an environment has only `found` distinct problems and more were requested."""
    if found < problems:
        left_out = f", and {environment.overlong:,} do not fit the context" if environment.overlong else ""
        there = f"there are only {found:,} different ones to ask{left_out}"
        print(f"{environment.settings.env_id}: problems = {problems:,}, and {there}", file=sys.stderr)


def distinct_problems(environment: Environment, count: int) -> list[Problem]:
    """Returns the environment's next `count` problems with different questions; fewer if it does not have so many.

    A problem that counted twice would make the confidence interval too narrow.
    """
    found: dict[tuple[object, ...], Problem] = {}
    # A finite pool starts over after its size. An endless one may repeat itself, if it generates from a small space.
    for _ in range(environment.pool.size or 20 * count):
        (problem,) = environment.pool.take(1)
        found.setdefault(identity_of(problem), problem)
        if len(found) == count:
            break
    return list(found.values())


def refuse_open_problems(environment: Environment) -> None:
    """Raises UserError if the environment has open problems, which have no right answer and therefore no solve rate."""
    if any(isinstance(TASKS[name], OpenTask) for name in task_types(environment.settings.task_pool)):
        raise UserError(
            f"environment {environment.settings.env_id!r} has open problems, which have no right answer, so there is no solve rate "
            "to report; a run's metrics `reward/NAME` show its [[rewards]]"
        )


def summarise(groups: Sequence[Group], env_id: str, temperature: float) -> list[Evaluation]:
    """Computes evaluation results from graded groups, as `summarise_outcomes` does from outcomes."""
    return summarise_outcomes(outcomes_of(groups), env_id, temperature)


def summarise_outcomes(outcomes: Sequence[Outcome], env_id: str, temperature: float) -> list[Evaluation]:
    """Computes evaluation results: over all problems, by source if there are several, and by level and subject if
    problems name them.

    The `dataset` of a result is "math", "math/SOURCE", "math/level=Level 5" or "math/subject=Algebra". Results over all
    problems contain the value of each problem, and the first of them counts how the completions ended.
    """
    sources = sorted({one.source for one in outcomes})
    parts: list[tuple[str, Sequence[Outcome]]] = []
    if len(sources) > 1:
        parts += [(f"{env_id}/{source}", [one for one in outcomes if one.source == source]) for source in sources]
    named = sorted({name for one in outcomes for name in one.groups})
    parts += [(f"{env_id}/{name}", [one for one in outcomes if name in one.groups]) for name in named]
    whole = [
        replace(evaluation, outcomes=dict(zip((one.key for one in outcomes), values, strict=True)))
        for evaluation, values in _evaluations(env_id, outcomes, temperature)
    ]
    whole[0] = replace(whole[0], failures=_failures(outcomes))
    return whole + [one for dataset, part in parts for one, _ in _evaluations(dataset, part, temperature)]


def _failures(outcomes: Sequence[Outcome]) -> dict[str, int] | None:
    counted = Counter(failure for one in outcomes for failure in one.failures)
    return {name: counted[name] for name in FAILURES if counted[name]} or None


def _evaluations(dataset: str, outcomes: Sequence[Outcome], temperature: float) -> list[tuple[Evaluation, list[float]]]:
    """Computes the evaluation results over these problems, each with the list of the problems' values."""
    samples = len(outcomes[0].correct)
    first = [float(one.correct[0]) for one in outcomes]
    if samples == 1:
        return [_shown("greedy_pass@1" if temperature == 0 else "sampling_pass@1", dataset, first)]
    rights = [sum(one.correct) for one in outcomes]
    if temperature == 0:
        return [_shown(f"nondet_proxy_pass@{samples}", dataset, [float(count > 0) for count in rights])]
    voted = [float(one.correct[one.voted]) for one in outcomes]
    return [
        _shown("sampling_pass@1", dataset, [count / samples for count in rights], binary=False),
        *(
            _shown(f"pass@{k}", dataset, [pass_at_k(count, samples, k) for count in rights], binary=k == samples)
            for k in range(2, samples + 1)
        ),
        _shown(f"sampling_pass@{samples}", dataset, voted),
    ]


def _shown(mode: str, dataset: str, values: list[float], binary: bool = True) -> tuple[Evaluation, list[float]]:
    """Returns the mean of the problems' values as a result: with the exact binomial interval if all are 0 or 1, else
    with `share_interval`."""
    if binary:
        return share_of(mode, dataset, [value == 1 for value in values]), values
    interval = share_interval(values)
    return Evaluation(mode, dataset, len(values), sum(values) / len(values), interval.low, interval.high), values


def share_of(mode: str, dataset: str, outcomes: Sequence[bool]) -> Evaluation:
    """Returns the share of true values, one per problem, as a result with the exact binomial interval."""
    interval = binomial_interval(sum(outcomes), len(outcomes))
    return Evaluation(mode, dataset, len(outcomes), sum(outcomes) / len(outcomes), interval.low, interval.high)


@dataclass(frozen=True)
class Asked:
    """The settings of an evaluation: sampling mode, number of problems, seed, and overrides.

    `max_tokens` limits a completion, by default to the rest of the context, and `reasoning_effort` replaces the
    environment's. `best_of` is the path of a scorer that chooses among the samples. `allow_trained_on` permits problems
    that the model was trained on. `engine` has servers that sample in place of the checkpoint's own weights.
    """

    mode: Mode
    problems: int
    seed: int
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    device: str = "auto"
    expert_weights: ExpertWeightsForm = "dequantized"
    best_of: Path | None = None
    allow_trained_on: bool = False
    precision: Precision | None = None
    engine: ServedFleet | None = None


def sampling_record(mode: Mode, max_tokens: int | None, effort: str | None) -> dict[str, Any]:
    """Returns the sampling settings to store with an evaluation; results are comparable if these are equal."""
    settings = {"temperature": mode.temperature, "samples": mode.samples}
    return {**settings, "max_tokens": max_tokens, "reasoning_effort": effort}


def effortful(settings: EnvironmentSettings, effort: str | None) -> EnvironmentSettings:
    """Returns the environment's settings with another reasoning effort. Raises UserError if its format has no reasoning effort."""
    if effort is None:
        return settings
    if settings.format == "boxed":
        raise UserError(f"{settings.env_id}: plain text has no place for a reasoning effort; drop --reasoning-effort")
    return settings.model_copy(update={"reasoning_effort": effort})


NO_LABELS: Mapping[Path, str] = {}
_LABEL = re.compile(r"(?P<label>[^=/]+)=(?P<path>.+)", re.DOTALL)


def without_labels(named: Sequence[Path]) -> tuple[list[Path], dict[Path, str]]:
    """Returns the arguments `NAME=PATH` or `PATH` without their labels, and the label of each path that has one.

    A path that exists is no label, even with = in it. Raises UserError if two models have the same label, or a model has two.
    """
    paths: list[Path] = []
    labels: dict[Path, str] = {}
    for one in named:
        found = None if one.exists() else _LABEL.fullmatch(str(one))
        path = one if found is None else Path(found["path"])
        paths.append(path)
        if found is None:
            continue
        if path in labels:
            raise UserError(f"{path}: is named twice, {labels[path]} and {found['label']}; name it once")
        if found["label"] in labels.values():
            raise UserError(f"{one}: another model is called {found['label']}, too; labels must be unique")
        labels[path] = found["label"]
    return paths, labels


def label_of(checkpoint: Path, labels: Mapping[Path, str]) -> dict[str, str]:
    """Returns the entry of a record with a model's label; empty for a model without one."""
    return {"label": labels[checkpoint]} if checkpoint in labels else {}


def models_and_benchmarks(
    named: Sequence[Path], labels: Mapping[Path, str] = NO_LABELS
) -> tuple[list[Path], list[Path]]:
    """Divides the arguments `CHECKPOINT... BENCHMARK...` into models and benchmarks.

    The first argument is a model, and so are the arguments directly after it that have a label or are paths of models; the last
    is always a benchmark. Raises UserError if there is no benchmark.
    """
    count = 1
    while count < len(named) - 1 and (named[count] in labels or _holds_a_model(named[count])):
        count += 1
    if len(named) < 2:
        raise UserError("eval needs a BENCHMARK behind the checkpoints: a TOML file, a directory or a packaged name")
    if labelled := [f"{labels[one]}={one}" for one in named[count:] if one in labels]:
        raise UserError(
            f"{labelled[0]}: stands where a benchmark does; a label is of a checkpoint, and these come first"
        )
    return list(named[:count]), list(named[count:])


def _holds_a_model(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        resolve_checkpoint(path)
    except UserError:
        return False
    return True
