"""Compares runs: `nmoe runs compare` and `diff`, and `table`, which makes a table of results to publish."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from statistics import fmean, median
from typing import Any

from nmoe.config.listing import columns
from nmoe.config.modes import why_not_comparable
from nmoe.errors import UserError
from nmoe.runs.provenance import resumptions
from nmoe.runs.record import RunRecord, form_of, interval_of, read_run
from nmoe.runs.report import SUMMARY, markdown_table
from nmoe.statistics import (
    Estimate,
    Interval,
    PairedDifference,
    by_cluster,
    mean_interval,
    newcombe,
    paired_difference,
    paired_mean_difference,
    welch,
    within_share,
)

# Keys that name a run, are its seed or its machine's, or say where its metrics go: two that differ in nothing else are repetitions
# of one experiment.
NOT_COMPARED = (
    *("run.name", "run.directory", "run.seed", "run.resume", "run.threads", "run.require_clean"),
    *("run.metrics_directory", "run.samples_directory", "run.spikes_file"),
    *("sinks.to", "sinks.project", "sinks.wandb_mode"),
)
# How a configuration names parts that a program passed: `__main__:vowels`, `passed:Records`.
_PASSED = re.compile(r"\b(?:__main__|passed):[\w.]+")
_METRICS = (*SUMMARY, "held_out_loss", "held_out_accuracy")
# Those that lie between 0 and 1.
_SHARES = (
    *("correctness", "format_ok", "truncated", "held_out_accuracy"),
    *("verifier_f1", "verifier_accuracy", "verifier_ece"),
)


def read_group(names: str) -> list[RunRecord]:
    """Reads the runs that `names` lists: directories or globs, separated by commas, each run once. Raises UserError for an entry
    that matches no run."""
    runs: list[RunRecord] = []
    for part in names.split(","):
        paths = sorted(map(Path, glob(part))) if any(sign in part for sign in "*?[") else [Path(part)]
        if not paths:
            raise UserError(f"{part}: no run matches; `nmoe runs list` shows those there are")
        runs += [read_run(path) for path in paths]
    return once(runs)


def once(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs without repetitions, which would count one result as several independent ones."""
    found: dict[Path, RunRecord] = {}
    for run in runs:
        found.setdefault(run.path.resolve(), run)
    return list(found.values())


def diff_runs(a: str, b: str) -> Iterator[str]:
    """Yields the settings in which the configurations of A and B differ, one a line. Raises UserError as `read_run` does."""
    yield from _diff_lines(read_group(a), read_group(b))


def compare_runs(a: str, b: str) -> Iterator[str]:
    """Yields lines that compare two runs or groups of runs: configurations, metrics at the last step, and last evaluations, B minus
    A.

    Differences have 95% intervals; for rates they are clipped to -1 and 1. With two single runs, an evaluation is paired by problem
    if both were asked the same problems, and otherwise has Newcombe's interval for unpaired values. With groups, metrics and
    evaluations are means over the runs: paired by seed if both groups have the same seeds, with Welch's t interval otherwise.
    Raises UserError as `read_run` does.
    """
    group_a, group_b = read_group(a), read_group(b)
    for name, group in (("A", group_a), ("B", group_b)):
        yield f"{name}: " + ", ".join(f"{run.path} (step {run.last_step}, {run.status})" for run in group)
    if both := [str(run.path) for run in group_a if run.path.resolve() in {one.path.resolve() for one in group_b}]:
        yield f"warning: {', '.join(both)} stands on both sides, so that the difference is drawn to 0"
    for name, group in (("A", group_a), ("B", group_b)):
        if mixed := _mixed(group):
            yield f"warning: the runs of {name} differ in {', '.join(mixed)}, so that they are no seeds of one experiment"
    yield "configuration"
    yield from _diff_lines(group_a, group_b)
    commands = {run.command for run in (*group_a, *group_b)}
    differing = len(_differences(group_a, group_b))
    if len(commands) > 1:
        yield f"warning: these are runs of different commands ({', '.join(sorted(commands))}): a name may mean two things"
    elif differing > 1:
        yield f"warning: A and B differ in {differing} keys, so that no difference below has one cause"
    if len({run.last_step for run in (*group_a, *group_b)}) > 1:
        ends = (", ".join(map(str, sorted({run.last_step for run in group}))) for group in (group_a, group_b))
        yield "warning: the runs end at different steps (A at {}, B at {})".format(*ends)
    rows = [
        ("metric", "A", "B", "B - A"),
        *_metric_rows(group_a, group_b),
    ]
    if len(rows) > 1:
        yield "metrics at the last step" + (" (means over the runs)" if len(group_a) + len(group_b) > 2 else "")
        yield from columns([(f"  {row[0]}", *row[1:]) for row in rows])
    rows = [("evaluation", "A", "B", "B - A [95%]"), *_evaluation_rows(group_a, group_b)]
    if len(rows) > 1:
        yield "last evaluations"
        yield from columns([(f"  {row[0]}", *row[1:]) for row in rows])


def _differences(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> dict[str, tuple[str, str]]:
    keys = dict.fromkeys(key for run in (*a, *b) for key in run.config)
    shown = {key: (_values(a, key), _values(b, key)) for key in keys if key not in NOT_COMPARED}
    return {key: pair for key, pair in shown.items() if pair[0] != pair[1]}


def _mixed(group: Sequence[RunRecord]) -> list[str]:
    """Returns the settings in which the runs of a group differ, although they should be seeds of one experiment."""
    keys = dict.fromkeys(key for run in group for key in run.config if key not in NOT_COMPARED)
    return [key for key in keys if len({repr(run.config.get(key)) for run in group}) > 1]


def _values(group: Sequence[RunRecord], key: str) -> str:
    return ", ".join(sorted({repr(run.config[key]) if key in run.config else "absent" for run in group}))


def _diff_lines(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> Iterator[str]:
    differences = _differences(a, b)
    if not differences:
        yield "  the same, but for name, seed, threads and sinks"
    yield from columns([(f"  {key}", left, right) for key, (left, right) in differences.items()])
    for run in (*a, *b):
        if any("changed" in resumed for resumed in run.provenance["resumed"]):
            yield from (f"  {run.path} was resumed {line}" for line in resumptions(run.provenance))
    if passed := sorted({name for run in (*a, *b) for name in _PASSED.findall(str(run.tables))}):
        yield f"  only the names of parts passed in Python are compared, not code and records: {', '.join(passed)}"


def _metric_rows(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> Iterator[tuple[str, str, str, str]]:
    for name in _METRICS:
        left, right = _present(run.last(name) for run in a), _present(run.last(name) for run in b)
        if left and right:
            means = sum(left) / len(left), sum(right) / len(right)
            interval = _over_runs(a, b, left, right, name in _SHARES)
            yield name, f"{means[0]:.4g}", f"{means[1]:.4g}", _difference(means[1] - means[0], *interval)


def _evaluation_rows(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> Iterator[tuple[str, str, str, str]]:
    left, right = [last_results(run) for run in a], [last_results(run) for run in b]
    kinds = dict.fromkeys(kind for results in left for kind in results)
    yield from _modes_apart(left, right)
    for kind in kinds:
        of_a, of_b = _present(x.get(kind) for x in left), _present(x.get(kind) for x in right)
        if not of_a or not of_b:
            continue
        if (why := why_not_comparable(of_a[0], of_b[0])) is not None:
            yield f"{kind[0]} on {kind[1]}", "", "", f"not compared: {why}"
            continue
        means = [sum(result["value"] for result in group) / len(group) for group in (of_a, of_b)]
        if len(of_a) == len(of_b) == 1:
            interval: tuple[Interval | None, str] = _of_two(of_a[0], of_b[0])
        else:
            values, other = ([result["value"] for result in group] for group in (of_a, of_b))
            interval = _over_runs(a, b, values, other, is_share(of_a[0]))
        form = form_of(of_a[0])
        difference = _difference(means[1] - means[0], *interval, form)
        yield f"{kind[0]} on {kind[1]}", f"{means[0]:{form}}", f"{means[1]:{form}}", difference


def _modes_apart(
    left: Sequence[Mapping[tuple[str, str], Any]], right: Sequence[Mapping[tuple[str, str], Any]]
) -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each dataset on which both were evaluated, but in no common mode."""
    of_a, of_b = ([kind for results in side for kind in results] for side in (left, right))
    for dataset in dict.fromkeys(dataset for _, dataset in of_a):
        a, b = ([mode for mode, on in kinds if on == dataset] for kinds in (of_a, of_b))
        if b and not set(a) & set(b):
            yield dataset, "", "", f"not compared: {why_not_comparable({'mode': a[0]}, {'mode': b[0]})}"


def _of_two(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Interval | None, str]:
    """Returns the interval of the difference of two results (None if one has no interval), and how they are paired."""
    left, right = a.get("outcomes") or {}, b.get("outcomes") or {}
    if len(left) > 1 and left.keys() == right.keys():
        return difference_of_results(a, b).interval, "paired by problem"
    if interval_of(a) is None or interval_of(b) is None:
        return None, ""
    return newcombe(*((result["value"], result["low"], result["high"]) for result in (a, b))), "unpaired"


def difference_of_results(a: Mapping[str, Any], b: Mapping[str, Any]) -> Estimate | PairedDifference:
    """Returns the difference of two results on the same problems, b minus a, paired by problem and weighted by b's `weights`."""
    left, right, weights = a["outcomes"], b["outcomes"], b.get("weights")
    values = [left[key] for key in right], list(right.values()), weights and [weights[key] for key in right]
    return paired_difference(*values) if is_share(b) else paired_mean_difference(*values)


def is_share(result: Mapping[str, Any]) -> bool:
    """Returns whether the result is a rate between 0 and 1, as all but losses are."""
    return not result.get("lower_is_better")


def _over_runs(
    a: Sequence[RunRecord], b: Sequence[RunRecord], left: Sequence[float], right: Sequence[float], shares: bool
) -> tuple[Interval | None, str]:
    """Returns the interval of the difference of the means of two groups (None for repeated seeds or too few runs), and how they are
    paired. `left` and `right` are the values of the runs, `shares` says that they are rates between 0 and 1."""
    seeds = [[run.config.get("run.seed", 0) for run in group] for group in (a, b)]
    if any(len(set(drawn)) < len(drawn) for drawn in seeds):
        return None, ""  # runs of one seed are no independent draws
    same = sorted(seeds[0]) == sorted(seeds[1]) and len(set(seeds[0])) == len(seeds[0]) > 1
    if not same or len(left) != len(a) or len(right) != len(b):
        interval, how = welch(left, right), "unpaired"
    else:
        other = dict(zip(seeds[1], right, strict=True))
        interval, how = paired_mean_difference(left, [other[seed] for seed in seeds[0]]).interval, "paired by seed"
    return interval and interval.clipped(-1.0, 1.0) if shares else interval, how


def last_results(run: RunRecord) -> dict[tuple[str, str], Any]:
    """Returns the results of a run's last evaluation, by mode and dataset."""
    evaluated = [record for record in run.evaluations if record["results"]]
    return {(result["mode"], result["dataset"]): result for result in evaluated[-1]["results"]} if evaluated else {}


def _present(values: Any) -> list[Any]:
    return [value for value in values if value is not None]


def _difference(value: float, interval: Interval | None, how: str, form: str = ".4g") -> str:
    return f"{value:+{form}}" + (f" [{interval.low:+{form}}, {interval.high:+{form}}] {how}" if interval else "")


_HEADER = ("experiment", "seeds", "steps", "result", "median", "worst", "mean [95%]", "machine", "commit")


def results_table(names: Sequence[str]) -> str:
    """Returns a Markdown table of the runs' last evaluations: median and worst over the seeds, and the mean with an interval (over
    three seeds or more a t interval, for a single run the evaluation's own). A commit with `+` had uncommitted changes.

    Raises UserError for a path that is no run, and for a run without evaluations.
    """
    experiments: dict[str, list[RunRecord]] = {}
    for run in once([run for name in names for run in read_group(name)]):
        compared = {key: value for key, value in run.config.items() if key not in NOT_COMPARED}
        key = json.dumps([run.command, compared, run.last_step], sort_keys=True, default=str)
        experiments.setdefault(key, []).append(run)
    return markdown_table(_HEADER, [row for group in experiments.values() for row in _rows(group)])


def _rows(group: Sequence[RunRecord]) -> Iterator[list[str]]:
    results = [last_results(run) for run in group]
    for run, of_run in zip(group, results, strict=True):
        if not of_run:
            raise UserError(f"{run.path}: has no evaluation; give it an [[eval]], or leave it out of the table")
    name, drawn = group[0].path.name, [run.config.get("run.seed", 0) for run in group]
    if len(group) > 1:
        name += f" and {len(group) - 1} more"
    for mode, dataset in results[0]:
        evaluated = [
            (of_run[mode, dataset], seed)
            for of_run, seed in zip(results, drawn, strict=True)
            if (mode, dataset) in of_run
        ]
        found, seeds = [result for result, _ in evaluated], [seed for _, seed in evaluated]
        values = [float(result["value"]) for result in found]
        worst = max(values) if found[0].get("lower_is_better") else min(values)
        form = form_of(found[0])
        row = [f"{mode} on {dataset}", f"{median(values):{form}}", f"{worst:{form}}", _mean(values, seeds, found[0])]
        yield [name, str(len(set(seeds))), str(group[0].last_step), *row, _machine(group), _commit(group)]


def _mean(values: Sequence[float], seeds: Sequence[Any], result: dict[str, Any]) -> str:
    """Writes the mean of the values, with its 95% interval over seeds or, for a single value, the evaluation's own. Values of one
    seed are averaged first, because they are not independent."""
    interval = interval_of(result) if len(values) == 1 else None
    if len(set(seeds)) > 1:
        estimate = mean_interval(*by_cluster(values, seeds))
        interval = (within_share(estimate) if is_share(result) else estimate).interval
    form = form_of(result)
    return f"{fmean(values):{form}}" + (f" [{interval.low:{form}}, {interval.high:{form}}]" if interval else "")


def _machine(group: Sequence[RunRecord]) -> str:
    return "; ".join(dict.fromkeys(_machine_of(run) for run in group))


def _machine_of(run: RunRecord) -> str:
    device, cpu = run.provenance.get("device", "cpu"), run.provenance.get("cpu", "?")
    return f"{cpu}, {run.provenance.get('threads', '?')} threads" if device == "cpu" else str(device)


def _commit(group: Sequence[RunRecord]) -> str:
    return ", ".join(dict.fromkeys(map(_commit_of, group)))


def _commit_of(run: RunRecord) -> str:
    """Returns nmoe's commit, or the version if it is installed as a package, and the commit of the repository that the run was
    started in."""
    kept = run.provenance
    parts = [
        f"{kept[f'{kind}_commit'][:10]}{'+' * bool(kept.get(f'{kind}_dirty'))}"
        for kind in ("git", "directory")
        if kept.get(f"{kind}_commit")
    ]
    return " / ".join(parts if kept.get("git_commit") else [f"nmoe {kept.get('nmoe', '?')}", *parts])
