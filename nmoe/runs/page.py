"""Writes the report of one or several runs as one self-contained HTML file, without network, scripts or other files.

Everything that models and programs wrote is escaped and shown as text, and the page's content policy forbids scripts and requests.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe.errors import UserError
from nmoe.runs.charts import COLOURS, CONTROL, Curve, Point, chart, missing, svg
from nmoe.runs.comparison import NOT_COMPARED, is_share
from nmoe.runs.provenance import resumptions
from nmoe.runs.record import RunRecord, interval_of, read_run, value_of
from nmoe.runs.report import PLOTS
from nmoe.runs.samples import heading_of, latest_samples, prompt_of, reasons, shortened
from nmoe.runs.storage import write_atomically
from nmoe.runs.summary import changed_keys, headline
from nmoe.runs.timeline import timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SAMPLE_CHARACTERS = 6000
_ALERTS = 50
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Inches, so small that the text can be read on a phone.
_SIZE, _LINE_SIZE = (5.2, 2.7), (5.2, 2.0)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .5em 0; display: block; overflow-x: auto; }
td, th { border: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top; }
pre { background: #f6f6f6; padding: .6em; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
img { width: 560px; max-width: 100%; } summary { overflow-wrap: anywhere; } h1, p { overflow-wrap: anywhere; }
.key { display: inline-block; width: .9em; height: .9em; margin-right: .4em; }
"""


def write_page(paths: Sequence[Path], file: Path) -> Path:
    """Writes the page of the runs to `file`, which is returned; the curves of all runs are in the same charts.

    Raises UserError for a path that is no run, or for a `file` that cannot be written; StorageError if the disk is full.
    """
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(
            f"{file}: {'is a directory' if file.is_dir() else 'no such directory'}; --html names a file to write"
        )
    runs = [read_run(path) for path in paths]
    title = ", ".join(run.path.resolve().name for run in runs)
    sections = {
        "Runs": _runs(runs),
        "Evaluations": _evaluations(runs),
        "Curves": _curves(runs),
        "Who waited for whom": _timelines(runs),
        "Alerts": _alerts(runs),
        "Samples": _samples(runs),
        "Provenance": _provenance(runs),
        "Configuration": _configurations(runs),
    }
    body = "\n".join(f"<h2>{name}</h2>\n{section}" for name, section in sections.items() if section)
    results = "\n".join(f"<p>{_key(number)}{_result(run)}</p>" for number, run in enumerate(runs))
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{text(title)}</h1>\n{results}\n{body}\n</body>\n</html>\n"
    )
    write_atomically(file, page.encode())
    return file


def _result(run: RunRecord) -> str:
    return f"{_name(run)}: {text(headline(run.evaluations, run.metrics) or 'no step is recorded yet')}"


def _runs(runs: Sequence[RunRecord]) -> str:
    rows = [
        [
            _key(number) + text(run.path),
            run.command,
            run.status,
            f"{run.last_step} of {run.steps or '?'}",
            _started(run),
        ]
        for number, run in enumerate(runs)
    ]
    overview = _table(
        ["run", "command", "status", "steps", "started (UTC)"], [[row[0], *map(text, row[1:])] for row in rows]
    )
    if len(runs) == 1:
        given = [[text(key), text(repr(value))] for key, value in changed_keys(runs[0]).items()]
        return overview + "<p>What differs from the defaults:</p>\n" + _table(["key", "value"], given)
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.config) if key not in NOT_COMPARED]
    rows = [[key, *(repr(run.config[key]) if key in run.config else "absent" for run in runs)] for key in keys]
    differing = [[*map(text, row)] for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return overview + "<p>The configurations are the same, but for name, seed, threads and sinks.</p>\n"
    return overview + "<p>What the configurations differ in:</p>\n" + _table(["key", *map(_name, runs)], differing)


def _evaluations(runs: Sequence[RunRecord]) -> str:
    kinds: dict[tuple[str, str], dict[int, list[tuple[int, Mapping[str, Any]]]]] = {}
    rows = []
    for number, run in enumerate(runs):
        for record in run.evaluations:
            for result in record["results"]:
                of_run = kinds.setdefault((result["mode"], result["dataset"]), {}).setdefault(number, [])
                of_run.append((record["step"], result))
    for (mode, dataset), by_run in kinds.items():
        for number, found in by_run.items():
            best = max(found, key=lambda pair: pair[1]["value"] if is_share(pair[1]) else -pair[1]["value"])
            cells = [f"{value_of(result)} at step {step}" for step, result in (found[0], best, found[-1])]
            rows.append([_key(number) + _name(runs[number]), text(f"{mode} on {dataset}"), *map(text, cells)])
    if not rows:
        return ""
    (mode, dataset), by_run = next(iter(kinds.items()))
    curves = [
        Curve(
            "",
            [(step, float(result["value"])) for step, result in found],
            _colour(number),
            [(step, bounds.low, bounds.high) for step, result in found if (bounds := interval_of(result))],
        )
        for number, found in by_run.items()
    ]
    percent = all(is_share(result) for found in by_run.values() for _, result in found)
    name = f"{mode} on {dataset}, 95% intervals"
    return _table(["run", "evaluation", "first", "best", "last"], rows) + _image(
        name, chart(name, "", curves, percent=percent, size=_SIZE)
    )


def _curves(runs: Sequence[RunRecord]) -> str:
    found = {
        (name, plot): curves
        for plot in PLOTS
        for name in plot.names
        if (curves := [Curve("", points, _colour(at)) for at, run in enumerate(runs) if (points := _points(run, name))])
    }
    if not found:
        return ""
    if line := missing():
        return f"<p>{text(line)}</p>\n"
    legend = " ".join(f"{_key(number)}{_name(run)}" for number, run in enumerate(runs))
    shown = "\n".join(
        _image(name, chart(name, plot.ylabel, curves, plot.log, size=_SIZE)) for (name, plot), curves in found.items()
    )
    return f"<p>{legend}</p>\n{shown}\n"


def _timelines(runs: Sequence[RunRecord]) -> str:
    """Returns the time line of each run that samples beside its training."""
    drawn = ((number, run, _image("time line", timeline(run.metrics, _LINE_SIZE))) for number, run in enumerate(runs))
    return "\n".join(f"<p>{_key(number)}{_name(run)}</p>\n{line}" for number, run, line in drawn if line)


def _image(name: str, drawn: Figure | None) -> str:
    """Returns a picture as HTML; "" without one."""
    if drawn is None:
        return ""
    return f'<img alt="{text(name)}" src="data:image/svg+xml;base64,{base64.b64encode(svg(drawn)).decode()}">'


def _points(run: RunRecord, name: str) -> list[Point]:
    return [(row["step"], float(row[name])) for row in run.metrics if isinstance(row.get(name), int | float)]


def _alerts(runs: Sequence[RunRecord]) -> str:
    rows = [
        [
            _key(number) + _name(run),
            text(alert["step"]),
            text(alert["message"]),
            "<br>".join(text(remedy) for remedy in alert.get("remedies", ())),
        ]
        for number, run in enumerate(runs)
        for alert in run.alerts[-_ALERTS:]
    ]
    return _table(["run", "step", "alert", "what to try"], rows) if rows else ""


def _samples(runs: Sequence[RunRecord]) -> str:
    parts = []
    for number, run in enumerate(runs):
        for record in latest_samples(run.path):
            heading, why = heading_of(record), "; ".join(reasons(record))
            asked, said = (
                text(shortened(one, _SAMPLE_CHARACTERS)) for one in (prompt_of(record), record.get("text", ""))
            )
            parts.append(f"<p>{_key(number)}{_name(run)}, {text(heading)}<br>{text(why)}</p>\n")
            parts.append(f"<pre>{asked}</pre>\n<pre>{said}</pre>\n")
    return "".join(parts)


def _provenance(runs: Sequence[RunRecord]) -> str:
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.provenance) if key != "resumed"]
    rows = [[text(key), *(text(_shown(run.provenance.get(key))) for run in runs)] for key in keys]
    rows.append(["resumed", *(text("; ".join(resumptions(run.provenance)) or "never") for run in runs)])
    diffs = [
        _folded(f"{run.path.resolve().name}: {file.name}", file)
        for run in runs
        for file in sorted(run.path.glob("code*.diff"))
    ]
    return _table(["what", *map(_name, runs)], rows) + "".join(diffs)


def _configurations(runs: Sequence[RunRecord]) -> str:
    return "".join(_folded(run.path.resolve().name, run.path / "config.toml") for run in runs)


def _folded(title: str, file: Path) -> str:
    return f"<details><summary>{text(title)}</summary><pre>{text(file.read_text(errors='replace'))}</pre></details>\n"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _started(run: RunRecord) -> str:
    return str(run.provenance.get("started_utc", "?"))


def _name(run: RunRecord) -> str:
    return text(run.path.resolve().name)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _key(number: int) -> str:
    """Returns a square in the colour of a run's curves, as HTML."""
    return f'<span class="key" style="background: {_colour(number)}"></span>'


def text(value: object) -> str:
    """Escapes a value for HTML, so that it is shown as text and nothing in it is executed."""
    return escape(CONTROL.sub("\ufffd", str(value)))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an HTML table; the cells are HTML already."""
    lines = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in header)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>\n"
