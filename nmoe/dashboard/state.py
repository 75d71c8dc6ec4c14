"""What the server knows of its runs, and the answers to the page's questions."""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmoe.dashboard.curves import Metrics, band
from nmoe.dashboard.findings import findings
from nmoe.dashboard.index import COUNTED, ORDERS, Index, Query
from nmoe.dashboard.runs import Run, find_runs, flat
from nmoe.dashboard.tokens import Vocabulary, columns_of, tokenizers_of
from nmoe.errors import UserError
from nmoe.runs.lanes import METRICS, bars, waits

TEXT_CHARACTERS = 20_000
TOKENS = 2_000
ROWS = 50
LANE_STEPS = 40
"""Steps whose lanes are drawn at once; more would be lines."""
_STRETCHES = 200
# The most steps that a running mean goes over.
_WINDOW = 1000
_PAGE_S = 2.0
# CPU seconds of building an index in one go, and the pause after it in parts of it: a build takes a third of a core.
_SLICE_S, _PAUSE = 0.1, 2.0
# Seconds that a build waits for the first view of a run, and the number of files that are read at once instead.
_FIRST_S, _FEW = 1.0, 20
# Names by which runs always differ.
_NOT_COMPARED = ("run.name", "run.directory", "run.resume")

Params = Mapping[str, str]


@dataclass
class _Open:
    """A run that somebody looked at: its metrics, and the index of its samples."""

    metrics: Metrics
    index: Index
    alerts: list[dict[str, Any]] = field(default_factory=list)
    generation: int = 0
    vocabulary: Vocabulary | None = None
    waits: tuple[str, list[dict[str, float]]] = ("", [])
    """Who waited in an asynchronous run, and the cursor of the metrics that say so."""


class State:
    """Answers questions about the runs below some directories."""

    def __init__(self, roots: list[Path], cache: Path | None) -> None:
        """`cache` is the folder of the indices, None to keep them in memory. Raises UserError for a root that is no directory."""
        self._roots, self._cache = roots, cache
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._found_at = 0.0
        self._open: dict[str, _Open] = {}
        self._wanted = threading.Event()
        self._find()
        self.answers: dict[str, Callable[[Params], dict[str, Any]]] = {
            "runs": self.runs, "run": self.run, "curves": self.curves, "diff": self.diff, "load": self.load, "step": self.step,
            "time": self.time, "samples": self.samples, "sample": self.sample, "tokens": self.tokens, "problems": self.problems,
            "bands": self.bands, "lanes": self.lanes,
        }  # fmt: skip

    def _find(self) -> None:
        now = time.monotonic()
        if self._runs and now - self._found_at < _PAGE_S:
            return
        with self._lock:
            # A run keeps its name when others come to the directories.
            known = {run.path: name for name, run in self._runs.items()}
            for name, path in find_runs(
                [root for root in self._roots if root.is_dir() or not self._runs], known
            ).items():
                if name not in self._runs:
                    self._runs[name] = Run(name, path)
            self._found_at = now

    def _named(self, params: Params, key: str = "run") -> Run:
        run = self._runs.get(params.get(key, ""))
        if run is None:
            raise UserError(f"{params.get(key, '')!r}: no run of this name here; the list shows those there are")
        return run

    def path_of(self, params: Params) -> Path:
        return self._named(params).path

    def _opened(self, run: Run) -> _Open:
        with self._lock:
            found = self._open.get(run.name)
            if found is None:
                found = self._open[run.name] = _Open(Metrics(run.path), Index(run.path, self._cache))
            found.metrics.read()
            alerts = [alert for _, alert in run.alerts.new()]
            if run.alerts.generation != found.generation:
                found.alerts, found.generation = [], run.alerts.generation
            found.alerts += alerts
            found.index.look()
        if found.index.missing:
            if found.index.is_empty or found.index.missing < _FEW:
                found.index.build(0.02)  # the newest steps, so that there is something to show
            self._wanted.set()
        return found

    def complete(self, name: str) -> Index:
        """Returns the index of a run, with all of its samples."""
        index = self._opened(self._named({"run": name})).index
        index.build(math.inf)
        return index

    def index_in_background(self, ended: threading.Event) -> None:
        """Completes the indices of the runs that were looked at, until `ended` is set."""
        while not ended.is_set():
            if not self._wanted.wait(0.5):
                continue
            self._wanted.clear()
            ended.wait(_FIRST_S)  # what somebody is looking at comes first
            for name, opened in list(self._open.items()):
                try:
                    while opened.index.missing and not ended.is_set():
                        opened.index.build(_SLICE_S)
                        ended.wait(_PAUSE * _SLICE_S)
                except Exception as error:  # of one run, which must not end the indices of the others
                    print(f"{name}: its samples cannot be indexed: {error}", file=sys.stderr, flush=True)

    def runs(self, params: Params) -> dict[str, Any]:
        self._find()
        rows = [run.summary() for run in self._runs.values()]
        return {"runs": rows, "roots": [str(root) for root in self._roots]}

    def run(self, params: Params) -> dict[str, Any]:
        run = self._named(params)
        opened = self._opened(run)
        totals = opened.index.totals()
        return {
            **run.summary(),
            "command": " ".join(run.provenance().get("argv", [])),
            "config": flat(run.tables),
            "recipe": recipe(flat(run.tables)),
            "metrics": sorted(opened.metrics.columns),
            "layers": opened.metrics.layers,
            "alerts": opened.alerts[-500:],
            "evaluations": run.evaluations(),
            "findings": findings(opened.metrics, totals, opened.alerts),
            "totals": totals,
            "indexing": opened.index.missing,
            "torn": _torn(run, opened),
        }

    def curves(self, params: Params) -> dict[str, Any]:
        """Returns curves of several runs, each from its cursor on; with `smooth`, their running means over that many steps, too."""
        points, window = min(4000, int(params.get("points", "800"))), min(_WINDOW, int(params.get("smooth", "0")))
        names = [name for name in params.get("names", "").split(",") if name]
        runs = params.get("runs", "").split("\n")
        cursors = dict(zip(runs, params.get("since", "").split(","), strict=False))
        found = {}
        for name in runs:
            run = self._named({"run": name})
            opened = self._opened(run)
            metrics = opened.metrics
            first = metrics.since(cursors.get(name, ""))
            found[name] = {
                "cursor": metrics.cursor,
                "first": first,
                "curves": {one: metrics.curve(one, first, points) for one in names if one in metrics.columns},
                "smooth": {one: metrics.smoothed(one, first, points, window) for one in names if one in metrics.columns}
                if window
                else {},
                "alerts": len(opened.alerts),
                "samples": opened.index.generation,
                "status": run.status(),
            }
        return {"runs": found}

    def bands(self, params: Params) -> dict[str, Any]:
        """Returns the median and the range of metrics over several runs, at the steps after `after` that all of them have."""
        points, window = min(4000, int(params.get("points", "800"))), min(_WINDOW, int(params.get("smooth", "0")))
        after = int(params.get("after", "0"))
        every = [self._opened(self._named({"run": name})).metrics for name in params.get("runs", "").split("\n")]
        firsts = [bisect_right(metrics.steps, after) for metrics in every]
        found = {}
        for name in filter(None, params.get("names", "").split(",")):
            if all(name in metrics.columns for metrics in every):
                curves = [
                    metrics.smoothed(name, first, sys.maxsize, max(1, window))
                    for metrics, first in zip(every, firsts, strict=True)
                ]
                found[name] = band(curves, points)
        return {"bands": found}

    def lanes(self, params: Params) -> dict[str, Any]:
        """Returns what trainer and engines of an asynchronous run did in the `LANE_STEPS` steps around the step `at` or in
        the last ones, and the shares of the time in which they waited over the whole run, in stretches of steps."""
        opened = self._opened(self._named(params))
        metrics, count = opened.metrics, len(opened.metrics.steps)
        if "trainer_wait_s" not in metrics.columns:
            return {"bars": [], "over": []}
        at = int(params.get("at") or (metrics.steps[-1] if count else 0))
        middle = next((row for row, step in enumerate(metrics.steps) if step >= at), count)
        first = max(0, min(middle - LANE_STEPS // 2, count - LANE_STEPS))
        if opened.waits[0] != metrics.cursor:
            opened.waits = metrics.cursor, waits(metrics.at(METRICS, range(count)), math.ceil(count / _STRETCHES))
        shown = metrics.at(METRICS, range(first, min(first + LANE_STEPS, count)))
        return {"bars": bars(shown), "over": opened.waits[1]}

    def diff(self, params: Params) -> dict[str, Any]:
        names = params.get("runs", "").split("\n")
        configs = [flat(self._named({"run": name}).tables) for name in names]
        keys = dict.fromkeys(key for config in configs for key in config if key not in _NOT_COMPARED)
        rows = [[key, *(repr(config[key]) if key in config else "absent" for config in configs)] for key in keys]
        return {"runs": names, "rows": [row for row in rows if len(set(row[1:])) > 1], "same": len(rows)}

    def load(self, params: Params) -> dict[str, Any]:
        metrics = self._opened(self._named(params)).metrics
        return metrics.load(int(params.get("layer", "0")), min(400, int(params.get("columns", "200"))))

    def time(self, params: Params) -> dict[str, Any]:
        return {"means": self._opened(self._named(params)).metrics.mean_times()}

    def step(self, params: Params) -> dict[str, Any]:
        opened, step = self._opened(self._named(params)), int(params["step"])
        near = [alert for alert in opened.alerts if abs(int(alert.get("step", 0)) - step) <= 10]
        return {"step": step, "changed": opened.metrics.changed(step), "alerts": near}

    def samples(self, params: Params) -> dict[str, Any]:
        index, query = self._opened(self._named(params)).index, query_of(params)
        if query.text:
            before = tuple(map(int, params["before"].split(":"))) if params.get("before") else None
            rows, rest = index.search(query, before, ROWS)  # type: ignore[arg-type]
            more = None if rest is None else {"before": ":".join(map(str, rest))}
            return {"rows": rows, "more": more, "indexing": index.missing}
        first = int(params.get("first", "0"))
        rows = index.rows(query, first, ROWS)
        more = {"first": str(first + ROWS)} if len(rows) == ROWS else None
        count = index.count(query)
        return {"rows": rows, "more": more, "count": count, "counted": count < COUNTED, "indexing": index.missing}

    def sample(self, params: Params) -> dict[str, Any]:
        run = self._named(params)
        index, step, line = self._opened(run).index, int(params["step"]), int(params["line"])
        record = index.read(step, line)
        if record is None:
            raise UserError(f"{run.name}: sample {line} of step {step} is not there, or its file was deleted meanwhile")
        first = int(params.get("first", "0"))
        text = str(record.get("text", ""))
        shown = {key: record[key] for key in _SHOWN_KEYS if key in record}
        group = [row for row in index.rows(Query({"step": step}, {}, {}, order="oldest"), 0, 10_000)
                 if row["grp"] == record.get("group", 0)]  # fmt: skip
        return {
            **shown,
            "line": line,
            "text": text[first : first + TEXT_CHARACTERS],
            "text_length": len(text),
            "tokens": len(record.get("token_ids") or ()),
            "prompt_tokens": len(record.get("prompt_ids") or ()),
            "siblings": group[:200],
        }

    def tokens(self, params: Params) -> dict[str, Any]:
        run = self._named(params)
        opened = self._opened(run)
        step, line, first = int(params["step"]), int(params["line"]), int(params.get("first", "0"))
        record = opened.index.read(step, line)
        if record is None:
            raise UserError(f"{run.name}: sample {line} of step {step} is not there, or its file was deleted meanwhile")
        if opened.vocabulary is None:
            opened.vocabulary = Vocabulary(list(tokenizers_of(run.path, run.tables)))
        ids, mask = record.get("token_ids") or [], record.get("mask") or []
        part = slice(first, first + TOKENS)
        columns = columns_of(run.path, step, line, mask, first, TOKENS)
        behaviour = (record.get("logprobs") or [])[part]
        kept = (record.get("kept_ids") or [])[part]
        found = {
            "first": first,
            "of": len(ids),
            "ids": ids[part],
            "texts": opened.vocabulary.texts(ids[part]),
            "mask": mask[part],
            "behaviour": behaviour,
            "versions": (record.get("versions") or [])[part],
            "kept": [len(one) for one in kept] or None,
            **columns,
        }
        if "logprob" in columns:
            pairs = zip(columns["logprob"], behaviour, strict=False)
            found["mismatch"] = [None if learner is None else learner - sampler for learner, sampler in pairs]
        return found

    def problems(self, params: Params) -> dict[str, Any]:
        index = self._opened(self._named(params)).index
        order = "never" if params.get("order", "never") == "never" else "mean"
        return {"rows": index.problems(order, 200), "totals": index.totals(), "indexing": index.missing}


def recipe(config: Mapping[str, Any]) -> str:
    """Returns what runs of one recipe have in common: their configuration, but for names and the seed."""
    said = repr(sorted((key, repr(value)) for key, value in config.items() if key not in (*_NOT_COMPARED, "run.seed")))
    return hashlib.sha256(said.encode(errors="replace")).hexdigest()[:16]


_SHOWN_KEYS = (
    *(
        "step",
        "problem",
        "task_type",
        "source",
        "history",
        "question",
        "gold",
        "metadata",
        "index",
        "group",
        "left_out",
        "spans",
    ),
    *(
        "finish_reasons",
        "tool_events",
        "exchanges",
        "failure",
        "reason",
        "reward",
        "components",
        "weights",
        "extras",
        "answer",
    ),
    *("verdict", "environment", "sampling"),
)


def query_of(params: Params) -> Query:
    """Reads a query from the page's parameters. Raises UserError for a bound that is no number."""
    equal: dict[str, Any] = {}
    for name in ("problem", "failure", "outcome", "left_out", "source"):
        if params.get(name):
            equal[name] = params[name]
    if params.get("wrong"):
        equal["wrong"] = 1
    at_least, at_most = dict[str, float](), dict[str, float]()
    for name, column in (("step", "step"), ("reward", "reward"), ("tokens", "tokens"), ("version", "newest")):
        for bounds, ending in ((at_least, "_min"), (at_most, "_max")):
            if value := params.get(name + ending):
                try:
                    bounds[column] = float(value)
                except ValueError:
                    raise UserError(f"{name}{ending} = {value!r}: is no number") from None
    order = params.get("order", "newest")
    return Query(equal, at_least, at_most, params.get("text", ""), order if order in ORDERS else "newest")


def _torn(run: Run, opened: _Open) -> list[str]:
    """Names the lines of the run that cannot be read."""
    files = {"metrics.jsonl": opened.metrics.lines, "alerts.jsonl": run.alerts}
    return [f"{name}:{line}" for name, lines in files.items() for line in lines.torn] + opened.index.torn()
