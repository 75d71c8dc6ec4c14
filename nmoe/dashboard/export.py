"""Writes the dashboard of some runs as one self-contained page: `nmoe dashboard RUNS --export FILE.html`.

The page carries its scripts, styles and answers. It works from a file, asks nothing of anybody, and its content policy names the
script and the style that it has by their hashes. It holds all curves and configurations, and a part of the samples.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from nmoe.dashboard.index import Query
from nmoe.dashboard.page import PAGE
from nmoe.dashboard.server import finite
from nmoe.dashboard.state import State
from nmoe.errors import UserError
from nmoe.runs.storage import write_atomically

SAMPLES = 60
"""Samples of each run that a page carries: some of its first and last steps, and some that were rewarded though wrong."""
SMOOTHINGS = ("5", "20", "100")
"""Numbers of steps over which the page's curves can be smoothed."""
_PER_STEP = 8
_STEPS = 40
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) ([\w$]+))", re.MULTILINE)


def export(roots: list[Path], file: Path) -> Path:
    """Writes the page of the runs below `roots` to `file`, which is returned. Raises UserError if there are none, or the file
    cannot be written there."""
    if file.is_dir() or not file.parent.is_dir():
        what = "is a directory" if file.is_dir() else "no such directory"
        raise UserError(f"{file}: {what}; --export names a file to write")
    state = State(roots, None)
    answers = dict(_answers(state))
    if not answers["runs?"]["runs"]:
        raise UserError(f"{', '.join(map(str, roots))}: no runs there to export")
    write_atomically(file, _page(answers).encode(errors="replace"))
    return file


def _answers(state: State) -> Iterator[tuple[str, Any]]:
    """Yields the page's questions, as `ask` of page/js/ask.js writes them, with their answers."""

    def answer(name: str, **params: str) -> tuple[str, Any]:
        return f"{name}?{_query(params)}", state.answers[name](params)

    yield answer("runs")
    recipes = dict[str, list[str]]()
    for name in [run["name"] for run in state.runs({})["runs"]]:
        index = state.complete(name)
        address, run = answer("run", run=name)
        yield address, run
        asked = {"runs": name, "names": ",".join(run["metrics"])}
        every = state.curves({**asked, "points": "400"})["runs"][name]
        every["smoothed"] = {
            window: state.curves({**asked, "points": "200", "smooth": window})["runs"][name]["smooth"]
            for window in SMOOTHINGS
        }
        yield f"every?run={quote_plus(name)}", every
        recipes.setdefault(run["recipe"], []).append(name)
        for layer in range(run["layers"]):
            yield answer("load", columns="200", layer=str(layer), run=name)
        yield answer("time", run=name)
        yield answer("lanes", run=name)
        for order in ("never", "mean"):
            yield answer("problems", order=order, run=name)
        rows = _chosen(index)
        for row in rows:
            about = {"line": str(row["line"]), "run": name, "step": str(row["step"])}
            address, sample = answer("sample", **about)
            yield address, sample
            yield answer("tokens", first="0", **about)
            row["text"] = sample["text"] + sample.get("question", "")
        yield f"rows?run={quote_plus(name)}", rows
        steps = {row["step"] for row in rows} | {alert.get("step") for alert in run["alerts"][:_STEPS]}
        steps |= {found["step"] for found in run["findings"] if "step" in found}
        for step in sorted(step for step in steps if isinstance(step, int)):
            yield answer("step", run=name, step=str(step))
    for runs in filter(lambda names: len(names) > 1, recipes.values()):
        names = ",".join(state.run({"run": runs[0]})["metrics"])
        for window in ("", *SMOOTHINGS):
            said = {"runs": "\n".join(runs), "smooth": window}
            yield (
                f"bands?{_query(said)}",
                state.bands({**said, "smooth": window or "0", "names": names, "points": "200"}),
            )


def _chosen(index: Any) -> list[dict[str, Any]]:
    found: dict[tuple[int, int], dict[str, Any]] = {}
    queries = (
        Query({"wrong": 1}, {}, {}, order="newest"),
        Query({}, {}, {}, order="newest"),
        Query({}, {}, {}, order="oldest"),
        Query({}, {}, {}, order="reward"),
    )
    for query in queries:
        per_step: dict[int, int] = {}
        left = SAMPLES // len(queries)
        for row in index.rows(query, 0, 2000):
            per_step[row["step"]] = per_step.get(row["step"], 0) + 1
            if left and per_step[row["step"]] <= _PER_STEP and (row["step"], row["line"]) not in found:
                found[row["step"], row["line"]] = row
                left -= 1
    return sorted(found.values(), key=lambda row: (-row["step"], row["line"]))


def _query(params: dict[str, str]) -> str:
    """Writes parameters as a browser's URLSearchParams does, sorted."""
    return "&".join(f"{name}={_quoted(value)}" for name, value in sorted(params.items()))


def _quoted(text: str) -> str:
    return quote_plus(text, safe="*").replace("~", "%7E")


def _page(answers: dict[str, Any]) -> str:
    paths = PAGE.paths()
    library = paths["vendored/uPlot.iife.min.js"].read_text()
    script = (
        f"{library}\n{bundled({Path(at).stem: path.read_text() for at, path in paths.items() if at.startswith('js/')})}"
    )
    styles = "\n".join(paths[at].read_text() for at in ("css/base.css", "css/dashboard.css", "vendored/uPlot.min.css"))
    data = json.dumps(finite(answers)).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    body = paths["index.html"].read_text().partition("<body>")[2].partition("</body>")[0]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>nmoe dashboard</title>\n<style>{styles}</style>\n</head>\n<body>{body}"
        f'<script type="application/json" id="answers">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def bundled(modules: dict[str, str]) -> str:
    """Joins modules, by their names, to one script: each becomes a function that returns its exports, after those that it
    imports."""
    done: list[str] = []
    parts: list[str] = []

    def add(name: str) -> None:
        if name in done:
            return
        text = modules[name]
        for _, other in _IMPORT.findall(text):
            add(other)
        done.append(name)
        exports = ", ".join(_EXPORT.findall(text))
        inside = _EXPORT.sub("", _IMPORT.sub(lambda found: f"const {{{found[1]}}} = $module_{found[2]};\n", text))
        parts.append(f"const $module_{name} = (() => {{\n{inside}\nreturn {{ {exports} }};\n}})();")

    for name in sorted(modules):
        add(name)
    return '"use strict";\n' + "\n".join(parts)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
