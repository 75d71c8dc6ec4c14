"""Writes the report of a run: results, curves and times, as report.md with plots in plots/."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs import CHARACTERS, PROBLEMS
from nmoe.runs.charts import missing, plot_curves, png
from nmoe.runs.ledger import read_lines
from nmoe.runs.provenance import read_provenance, resumptions
from nmoe.runs.record import form_of, interval_of, read_evaluations
from nmoe.runs.record_links import refuse_missing
from nmoe.runs.samples import answer_lines, how_ended, latest_samples, sample_lines
from nmoe.runs.storage import write_atomically
from nmoe.runs.summary import ends_of, headline
from nmoe.runs.timeline import timeline


@dataclass(frozen=True)
class Plot:
    """The title, axis and metrics of one plot of the report: `Plot("grad_norm", "Gradient norm before clipping", "norm",
    ("grad_norm",))`."""

    file: str
    title: str
    ylabel: str
    names: tuple[str, ...]
    log: bool = False


PLOTS = (
    Plot("reward", "Reward", "mean per response", ("reward_mean", "correctness", "format_ok")),
    Plot("loss", "Loss", "loss", ("loss",)),
    Plot("response_length", "Response length", "tokens", ("response_length_mean",)),
    Plot("entropy", "Entropy of the policy", "nats per token", ("entropy_mean", "entropy_p10", "entropy_p90")),
    Plot("mismatch", "Rollout against learner", "nats", ("mismatch_abs_mean", "mismatch_abs_max"), log=True),
    Plot("grad_norm", "Gradient norm before clipping", "norm", ("grad_norm",)),
    Plot(
        "staleness", "Age of the samples trained on", "versions", ("staleness_mean", "staleness_p90", "staleness_max")
    ),
)
SUMMARY = (
    "reward_mean",
    "correctness",
    "format_ok",
    "truncated",
    "loss",
    "response_length_mean",
    "entropy_mean",
    "ppo_kl",
    "grad_norm",
    "mismatch_abs_mean",
    "tokens_per_second",
    "staleness_mean",
    "staleness_p90",
    "reprefill_tokens",
    "trainer_wait_s",
    "engine_idle_share",
    "verifier_f1",
    "verifier_accuracy",
    "verifier_ece",
)
# Figures of each layer of a mixture of experts, of which the report draws the mean over layers, with their titles and units.
EXPERTS = (
    Plot(
        "expert_load_max_violation",
        "Load of the busiest expert",
        "over the mean load, less 1",
        ("expert_load_max_violation",),
    ),
    Plot("router_entropy", "Entropy of the router", "nats per token", ("router_entropy",)),
    Plot("expert_load_divergence", "Tasks apart in their experts", "nats", ("expert_load_divergence",)),
)
_LAST_ALERTS = 10
_EXPERTS_SHOWN = 8


def write_report(run: Path) -> Path:
    """Writes `run/report.md` and the PNG files of `run/plots/` from the run's records, and returns the report's path. For a
    speedrun's directory it reports the `rl` run.

    Sections without records are left out. Without matplotlib a line says how to get the pictures. Raises UserError if `run` is not
    the directory of a run, or if a record in it cannot be read; StorageError if the disk is full.
    """
    if not (run / "config.toml").exists() and (run / "rl" / "config.toml").exists():
        run = run / "rl"  # of a speedrun's directory, as everywhere
    config = run / "config.toml"
    if not config.exists():
        raise UserError(f"{run}: not the directory of a run (no config.toml)")
    refuse_missing(run)
    metrics = read_lines(run / "metrics.jsonl")
    parts = [
        f"# Run {markdown_text(run.resolve().name)}\n",
        _headline(read_evaluations(run / "eval"), metrics),
        _steps_line(metrics),
        _section("Start and end", _ends_table(metrics, SUMMARY)),
        _section("Evaluations", _evaluations_table(run / "eval")),
        _section("Answers", _answers(read_evaluations(run / "eval"))),
        _section("Calibration", _calibration_table(run / "eval")),
        _section("Curves", f"{line}\n" if metrics and (line := missing()) else _curves(metrics, run, PLOTS)),
        _section("Experts", _experts(metrics, run)),
        _section("Time per stage", _time_table(metrics) + _timeline(metrics, run)),
        _section("Samples", _samples(run)),
        _section("Last alerts", _alerts_table(read_lines(run / "alerts.jsonl"))),
        _section("Provenance", _provenance_table(read_provenance(run))),
        _section("Configuration", fenced(config.read_text(errors="replace").strip(), "toml")),
    ]
    report = run / "report.md"
    write_atomically(report, "\n".join(part for part in parts if part).encode(errors="replace"))
    return report


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table, with columns of numbers aligned to the right. Floats are formatted by `figure`.

    Raises ValueError for a row that does not have as many cells as the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells under a header of {len(header)}: {row!r}")
    numeric = [
        bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(header))
    ]
    lines = [header, ["---:" if right else "---" for right in numeric], *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def markdown_text(text: str) -> str:
    """Escapes a text for a line of Markdown or a cell of a table, so that it is neither HTML, nor a link, nor code."""
    plain = re.sub(r"([\\|`]|\](?=\())", r"\\\1", " ".join(text.splitlines()))
    return plain.replace("&", "&amp;").replace("<", "&lt;")


def fenced(text: str, language: str) -> str:
    """Returns the text as a block of code, whose fence is longer than any run of backticks in it."""
    fence = "`" * max([3, *(1 + len(run) for run in re.findall("`+", text))])
    return f"{fence}{language}\n{text}\n{fence}\n"


def figure(value: float) -> str:
    """Formats a number with four significant digits, or with all digits before the point, and zero without a sign: `14,183`,
    `0.1235`, `0`."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _cell(value: object) -> str:
    return figure(value) if isinstance(value, float) else markdown_text(str(value))


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _headline(evaluations: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> str:
    result = headline(evaluations, metrics)
    return f"{markdown_text(result)}\n" if result else ""


def _samples(run: Path) -> str:
    """Returns the section with the latest samples of several problems."""
    bodies = ("\n".join(sample_lines(record, CHARACTERS)) for record in latest_samples(run))
    return "\n".join(fenced(body, "text") for body in bodies)


def _steps_line(metrics: Sequence[Mapping[str, Any]]) -> str:
    if not metrics:
        return "No step is recorded yet.\n"
    return f"{len(metrics)} steps are recorded, {metrics[0]['step']} to {metrics[-1]['step']}.\n"


def _ends_table(metrics: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    rows = []
    count = ends_of(len(metrics))
    for name in names:
        values = [row[name] for row in metrics if name in row]
        if values:
            first, last = values[:count], values[-count:]
            ends = (sum(first) / len(first), sum(last) / len(last), min(values), max(values))
            rows.append([name, *map(float, ends)])
    steps = "step" if count == 1 else f"{count} steps"
    header = ["metric", f"first {steps}", f"last {steps}", "lowest step", "highest step"]
    return markdown_table(header, rows) if rows else ""


def _evaluations_table(directory: Path) -> str:
    rows = [
        [
            record["step"],
            result["mode"],
            result["dataset"],
            result["problems"],
            f"{result['value']:{(form := form_of(result))}}",
            f"{interval.low:{form}} to {interval.high:{form}}" if (interval := interval_of(result)) else "",
            how_ended(result),
        ]
        for record in read_evaluations(directory)
        for result in record["results"]
    ]
    header = ["step", "mode", "dataset", "problems", "value", "95% interval", "failed"]
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return markdown_table(header, rows) if rows else ""


def _answers(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Returns the section with answers of the last evaluation that kept any, the wrong ones first."""
    kept = [record for record in evaluations if any(result.get("answers") for result in record["results"])]
    if not kept:
        return ""
    results = [result for result in kept[-1]["results"] if result.get("answers")]
    return "\n".join(fenced("\n".join(answer_lines(kept[-1]["step"], one, PROBLEMS)), "text") for one in results)


def _calibration_table(directory: Path) -> str:
    """Returns the calibration table of the last evaluation that has one: for each range of predicted probabilities, their number,
    their mean, and the share of cases that occurred (a step that was right, or a score)."""
    records = [json_of(path.read_text()) for path in sorted(directory.glob("step_*.json"))]
    measured = [record for record in records if "calibration" in record]
    if not measured:
        return ""
    last = measured[-1]
    rows = [[part["count"], part["probability"], part["rate"]] for part in last["calibration"]]
    figures = f"Step {last['step']}: expected calibration error {last['ece']:.4f}, Brier score {last['brier']:.4f}.\n\n"
    return figures + markdown_table(["judgements", "mean probability", "rate"], rows)


def _experts(metrics: Sequence[Mapping[str, Any]], run: Path) -> str:
    """Returns the section on a mixture of experts: figures and curves, averaged over layers; "" for a dense model."""
    names = [plot.names[0] for plot in EXPERTS]
    means = [{"step": row["step"]} | mean_over_layers(row, names) for row in metrics]
    if not (table := _ends_table(means, names)):
        return ""
    by_task = _experts_by_task(read_lines(run / "routing.jsonl"), metrics)
    return f"Means over the layers.\n\n{table}\n{_curves(means, run, EXPERTS)}{by_task}"


def _experts_by_task(routing: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of each task's routing to experts, at the first recorded step and the last, in the layer where tasks differ
    most at the end."""
    rows_by_step = {row["step"]: row for row in metrics}
    # Of a step under way the routing may be recorded, and the metrics not yet.
    whole = [record for record in routing if record["step"] in rows_by_step]
    if not whole:
        return ""
    first, last = whole[0], whole[-1]
    measured = rows_by_step[last["step"]].items()
    apart = {name: value for name, value in measured if name.startswith("expert_load_divergence/")}
    layer = int(max(apart, key=lambda name: apart[name]).rpartition("/")[2])
    before, after = ({task: shares[layer] for task, shares in one["shares"].items()} for one in (first, last))
    spread = [max(shares) - min(shares) for shares in zip(*after.values(), strict=True)]
    shown = sorted(sorted(range(len(spread)), key=lambda expert: -spread[expert])[:_EXPERTS_SHOWN])
    rows = [
        [
            task,
            *(
                f"{before[task][one]:.1%} to {shares[one]:.1%}" if task in before else f"{shares[one]:.1%}"
                for one in shown
            ),
        ]
        for task, shares in after.items()
    ]
    which = (
        f" The {len(shown)} of {len(spread)} experts in which tasks differ most." if len(shown) < len(spread) else ""
    )
    return (
        f"\nRouting by task in layer {layer}, where tasks lie farthest apart at step {last['step']}: the share of a task's router "
        f"picks that each expert gets, at step {first['step']} and at step {last['step']}.{which}\n\n"
        f"{markdown_table(['task', *(f'expert {one}' for one in shown)], rows)}"
    )


def mean_over_layers(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Averages metrics that a row has per layer: `router_entropy/0` and `router_entropy/1` to `router_entropy`. Names that the row
    lacks are left out."""
    found = {name: [value for key, value in row.items() if key.startswith(f"{name}/")] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def _curves(metrics: Sequence[Mapping[str, Any]], run: Path, plots: Sequence[Plot]) -> str:
    images = []
    for plot in plots:
        path = run / "plots" / f"{plot.file}.png"
        if plot_curves(metrics, plot.names, path, plot.title, plot.ylabel, plot.log):
            images.append(f"![{plot.title}](plots/{plot.file}.png)\n")
    return "\n".join(images)


def _time_table(metrics: Sequence[Mapping[str, Any]]) -> str:
    sums: dict[str, float] = {}
    for row in metrics:
        for name, value in row.items():
            if name.startswith("time_") and name.endswith("_s"):
                sums[name] = sums.get(name, 0.0) + value
    if not sums:
        return ""
    # Grading runs beside sampling, several trajectories at a time, so that its sum is not a part of the step's time.
    stages = {name: seconds for name, seconds in sums.items() if name not in ("time_step_s", "time_grade_s")}
    whole = sums.get("time_step_s", sum(stages.values()))
    rows = [[name, f"{seconds:.1f}", f"{seconds / whole:.1%}" if whole else ""] for name, seconds in stages.items()]
    if "time_grade_s" in sums:
        rows.append(["time_grade_s (beside sampling, summed over trajectories)", f"{sums['time_grade_s']:.1f}", ""])
    if "time_step_s" in sums:
        rows.append(["time_step_s (whole steps)", f"{whole:.1f}", ""])
    return markdown_table(["stage", "seconds", "of whole steps"], rows)


def _timeline(metrics: Sequence[Mapping[str, Any]], run: Path) -> str:
    """Draws who waited for whom in an asynchronous run, and returns the picture's line; "" for another run."""
    if (drawn := timeline(metrics)) is None:
        return ""
    (run / "plots").mkdir(exist_ok=True)
    write_atomically(run / "plots" / "timeline.png", png(drawn))
    return "\n![Who waited for whom](plots/timeline.png)\n"


def _alerts_table(alerts: Sequence[Mapping[str, Any]]) -> str:
    rows = [[alert["step"], alert["message"]] for alert in alerts[-_LAST_ALERTS:]]
    return markdown_table(["step", "alert"], rows) if rows else ""


def _provenance_table(provenance: Mapping[str, Any]) -> str:
    rows = [[key, " ".join(value) if key == "argv" else value] for key, value in provenance.items() if key != "resumed"]
    rows += [["resumed", line] for line in resumptions(provenance)]
    return markdown_table(["what", "value"], [[key, str(value)] for key, value in rows])
