"""A table of results to publish: one row an experiment, whose runs differ in the seed alone."""

import json
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from nmoe.errors import UserError
from nmoe.runs.comparison import NOT_COMPARED, is_share, last_results, once, read_group
from nmoe.runs.record import RunRecord, interval_of
from nmoe.runs.report import markdown_table
from nmoe.statistics import by_cluster, mean_interval, within_share

# The first that a run has stands for it where it was kept in metrics alone, as pretraining once did; of losses less is better.
_METRICS = ("held_out_accuracy", "held_out_loss")
_HEADER = ("experiment", "seeds", "steps", "result", "median", "worst", "mean [95%]", "machine", "commit")


def results_table(names: Sequence[str]) -> str:
    """Markdown of the runs' last evaluations: median and worst over the seeds, and the mean with its t interval over three
    seeds or more, or of a single run with the evaluation's own. A commit with `+` had changes that no commit holds.

    Raises UserError for what is no run (`read_group`), or has not been evaluated.
    """
    experiments: dict[str, list[RunRecord]] = {}
    for run in once([run for name in names for run in read_group(name)]):
        compared = {key: value for key, value in run.config.items() if key not in NOT_COMPARED}
        key = json.dumps([run.command, compared, run.last_step], sort_keys=True, default=str)
        experiments.setdefault(key, []).append(run)
    return markdown_table(_HEADER, [row for group in experiments.values() for row in _rows(group)])


def _rows(group: Sequence[RunRecord]) -> Iterator[list[str]]:
    results = [last_results(run) or _measured(run) for run in group]
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
        middle = f"{median(values):.4g}"
        row = [f"{mode} on {dataset}", middle, f"{worst:.4g}", _mean(values, seeds, found[0])]
        yield [name, str(len(set(seeds))), str(group[0].last_step), *row, _machine(group), _commit(group)]


def _measured(run: RunRecord) -> dict[tuple[str, str], Any]:
    """The run's first metric of held-out data, as a result without an interval."""
    for name in _METRICS:
        if (value := run.last(name)) is not None:
            return {(name, "held-out data"): {"value": value, "lower_is_better": name.endswith("loss")}}
    return {}


def _mean(values: Sequence[float], seeds: Sequence[Any], result: dict[str, Any]) -> str:
    """Runs of one seed are no independent draws, so that their spread says nothing of other seeds."""
    interval = interval_of(result) if len(values) == 1 else None
    if len(set(seeds)) > 1:
        estimate = mean_interval(*by_cluster(values, seeds))
        interval = (within_share(estimate) if is_share(result) else estimate).interval
    return f"{fmean(values):.4g}" + (f" [{interval.low:.4g}, {interval.high:.4g}]" if interval else "")


def _machine(group: Sequence[RunRecord]) -> str:
    return "; ".join(dict.fromkeys(_machine_of(run) for run in group))


def _machine_of(run: RunRecord) -> str:
    device, cpu = run.provenance.get("device", "cpu"), run.provenance.get("cpu", "?")
    return f"{cpu}, {run.provenance.get('threads', '?')} threads" if device == "cpu" else str(device)


def _commit(group: Sequence[RunRecord]) -> str:
    return ", ".join(dict.fromkeys(map(_commit_of, group)))


def _commit_of(run: RunRecord) -> str:
    """nmoe's commit, or of an installed nmoe the version, and that of the repository the run was started in."""
    kept = run.provenance
    parts = [
        f"{kept[f'{kind}_commit'][:10]}{'+' * bool(kept.get(f'{kind}_dirty'))}"
        for kind in ("git", "directory")
        if kept.get(f"{kind}_commit")
    ]
    return " / ".join(parts if kept.get("git_commit") else [f"nmoe {kept.get('nmoe', '?')}", *parts])
