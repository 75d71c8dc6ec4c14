"""The ledger of a run: metrics, samples, alerts and failures, one JSON object per line; a line is written completely or not at
all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from nmoe.config.modes import why_not_comparable
from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs.storage import append_whole, remove_partials, step_name, step_of, write_atomically
from nmoe.statistics import paired_p_value

# An evaluation that is worse than an earlier one of the same problems, by more than chance. Two in a row that each fall by a
# little are chance in half of all runs, and one fall that stays is not two. So an evaluation is compared with the best before it
# and with the first, problem by problem (`benchmarks/stopping.py`).
# The chance that an evaluation which is as good as all before it counts as a loss.
LEVEL = 0.05


@dataclass(frozen=True)
class Loss:
    """A significant decline between two evaluations: `Loss(before=0.967, now=0.0, p=1e-9)`. `p` is one-sided, and corrected for the
    number of earlier evaluations compared with."""

    before: float
    now: float
    p: float


def loss_of(history: Sequence[Mapping[str, Any]]) -> Loss | None:
    """Tests whether the last of these results is significantly worse than the best before it or than the first, paired by problem;
    None if not. `history` holds the results of one evaluation over the steps, oldest first.

    With k results before the last, the best was chosen among k, so p is multiplied by k (Bonferroni). Only results with `outcomes`
    of the same problems are compared.
    """
    *earlier, last = history
    if not earlier:
        return None
    best = max(earlier, key=_goodness)
    losses = [_loss(one, last, len(earlier)) for one in (best, earlier[0])]
    return next((one for one in losses if one is not None and one.p <= LEVEL), None)


def lasting_loss(history: Sequence[Mapping[str, Any]], evaluations: int) -> Loss | None:
    """Returns the `loss_of` of the whole history, if each of the last `evaluations` results is such a loss; else None."""
    if not 0 < evaluations < len(history):
        return None
    losses = [loss_of(history[: len(history) - skipped]) for skipped in range(evaluations)]
    return None if None in losses else losses[0]


def _goodness(result: Mapping[str, Any]) -> float:
    value: float = result["value"]
    return -value if result.get("lower_is_better") else value


def _loss(before: Mapping[str, Any], now: Mapping[str, Any], comparisons: int) -> Loss | None:
    left, right = before.get("outcomes") or {}, now.get("outcomes") or {}
    if (
        left.keys() != right.keys()
        or not left
        or why_not_comparable(before, now)
        or _goodness(now) >= _goodness(before)
    ):
        return None
    p = paired_p_value([left[key] for key in right], [*right.values()]) / 2
    return Loss(before["value"], now["value"], min(1.0, comparisons * p))


LINE_FILES = ("metrics.jsonl", "failures.jsonl", "alerts.jsonl", "spikes.jsonl", "routing.jsonl")
STEP_DIRECTORIES = ("samples", "eval")
OUTSIDE = "out_of_distribution"
"""The role of an evaluation on problems from another distribution than training's."""

# One for all lines: `json.dumps` makes an encoder each time.
_ENCODER = json.JSONEncoder(allow_nan=False, check_circular=False)

_RESULT_KEYS = {"mode", "dataset", "value", "problems"}


class Ledger:
    """Writes the records of a run into `directory`, which has to exist with its `samples/` and `eval/`.

    Every method raises ValueError naming the entry when a number is NaN or infinite (JSON has no such number, and null would hide
    it), TypeError when a value is no JSON value (a tensor, say), and StorageError when the disk is full.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a step's metrics to metrics.jsonl, `{"step": 10, "reward_mean": 0.41, ...}`; `docs/reference/metrics.md` lists
        the names."""
        for name, value in values.items():
            if value is None:
                raise ValueError(f"metric {name} of step {step} is None; leave out metrics that were not measured")
        self._append("metrics.jsonl", {"step": step} | dict(values))

    def samples(self, step: int, records: Iterable[Mapping[str, Any]], columns: bytes | None = None) -> int:
        """Writes samples/step_000010.jsonl, one record per line, replacing an earlier file of the step; returns the bytes written.
        `columns`, values of their tokens as a safetensors file, become samples/step_000010.safetensors, which is there before the
        records are."""
        lines = b"".join(_sample_line(record, f"sample of step {step}") for record in records)
        if columns is not None:
            write_atomically(self._directory / "samples" / f"{step_name(step)}.safetensors", columns)
        write_atomically(self._directory / "samples" / f"{step_name(step)}.jsonl", lines)
        return len(lines) + len(columns or b"")

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Writes eval/step_000010.json. An evaluation names the data and the mode of each value:

            {"step": 10, "results": [{"mode": "greedy_pass@1", "dataset": "arithmetic", "problems": 200,
                                      "value": 0.415, "low": 0.349, "high": 0.484}]}

        `low` and `high` bound the 95% interval; a loss on few sequences has none. Other keys are kept; a loss has
        `"lower_is_better": true`. Raises ValueError when a mode, dataset, number of problems or value is missing.
        """
        for result in record["results"]:
            if missing := _RESULT_KEYS - result.keys():
                raise ValueError(f"evaluation of step {step}: a result lacks {', '.join(sorted(missing))}")
        content = _line({"step": step} | dict(record), f"evaluation of step {step}")
        write_atomically(self._directory / "eval" / f"{step_name(step)}.json", content)

    def has_evaluation(self, step: int) -> bool:
        """Returns whether this step has an evaluation."""
        return (self._directory / "eval" / f"{step_name(step)}.json").exists()

    def best_step(self, step: int) -> int | None:
        """Returns the step whose deciding result is the best from step 1 to `step`, and the latest of equals; None if none of them
        was evaluated. Step 0 is only the baseline."""
        values = {at: value for at, value in self.probes().items() if 0 < at <= step}
        return max(values, key=lambda at: (values[at], at), default=None)

    def probes(self) -> dict[int, float]:
        """Returns the deciding value of each evaluation so far, by step (see `probe_values`)."""
        return probe_values(self.evaluations())

    def probed(self) -> dict[int, dict[str, float]]:
        """Returns by step the values that the stopping rules see: `{"probe": 0.31}`, and where the result has significantly
        declined (`loss_of`) also the value before, `{"probe": 0.31, "probe_before": 0.5}`. Higher is better: a held-out loss is
        negated."""
        decisive = decisive_results(self.evaluations())
        values, history, found = self.probes(), list[Mapping[str, Any]](), dict[int, dict[str, float]]()
        for step, result in decisive.items():
            history.append(result)
            loss, sign = loss_of(history), -1 if result.get("lower_is_better") else 1
            found[step] = {"probe": values[step]} | ({} if loss is None else {"probe_before": sign * loss.before})
        return found

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the records of eval/, oldest first."""
        return [json_of(path.read_text()) for path in sorted((self._directory / "eval").glob("step_*.json"))]

    def failure(self, record: Mapping[str, Any]) -> None:
        """Appends a failed sample to failures.jsonl: `{"step": 10, "failure": "timeout", ...}`."""
        self._append("failures.jsonl", record, required=("step", "failure"))

    def alert(self, record: Mapping[str, Any]) -> None:
        """Appends an alert to alerts.jsonl: `{"step": 10, "message": "truncated 0.83 is above 0.8", ...}`."""
        self._append("alerts.jsonl", record, required=("step", "message"))

    def spike(self, record: Mapping[str, Any]) -> None:
        """Appends a step whose update went far off to spikes.jsonl, with its prompts and worst samples: `{"step": 10, "grad_norm":
        73.0, ...}`."""
        self._append("spikes.jsonl", record, required=("step",))

    def routing(self, step: int, shares: Mapping[str, Any]) -> None:
        """Appends to routing.jsonl each source's share of the router's picks, per layer and expert: `{"step": 20, "shares":
        {"sums": [[0.24, 0.26, 0.31, 0.19], ...], ...}}`."""
        self._append("routing.jsonl", {"step": step, "shares": dict(shares)}, required=("shares",))

    def cut_back(self, step: int | None) -> None:
        """Removes every record after `step` (None: all records), and a last line that a kill left incomplete.

        Each file is rewritten as a whole. Raises UserError, naming file and line, for a line that is not a record.
        """
        for name in LINE_FILES:
            path = self._directory / name
            if path.exists():
                _cut_lines(path, step)
        for name in STEP_DIRECTORIES:
            remove_partials(self._directory / name)
            for path in (self._directory / name).iterdir():
                of = step_of(path.stem)
                if of is not None and (step is None or of > step):
                    path.unlink()

    def _append(self, name: str, record: Mapping[str, Any], required: tuple[str, ...] = ("step",)) -> None:
        for key in required:
            if key not in record:
                raise ValueError(f"a record of {name} lacks '{key}'")
        append_whole(self._directory / name, _line(record, f"{name}, step {record['step']}"))


def probe_values(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns by step the value of the deciding result, negated for a loss so that higher is better. `records` come from eval/,
    oldest first."""
    decisive = decisive_results(records).items()
    return {step: -one["value"] if one.get("lower_is_better") else one["value"] for step, one in decisive}


def decisive_results(records: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Returns by step the result that decides which checkpoint is the best: from the first evaluation outside of the training
    distribution or, without one, from the first evaluation. `records` come from eval/, oldest first."""
    results = [(record["step"], result) for record in records for result in record["results"]]
    found: dict[int, Mapping[str, Any]] = {}
    if not results:
        return found
    decisive = next((one for _, one in results if one.get("role") == OUTSIDE), results[0][1])
    for step, one in results:
        if all(one.get(key) == decisive.get(key) for key in ("mode", "dataset", "role")):
            found.setdefault(step, one)
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a JSON-lines file, oldest first; none if the file is absent. An incomplete last line is left out.

    Raises UserError, naming file and line, for any other line that is not a JSON object with a `step`.
    """
    if not path.exists():
        return []
    return [record for _, record in _whole_lines(path)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run's steps in order, each `{"step": 10, "reward_mean": 0.41, ...}`; `path` is the run or its file.

    Raises UserError if the file is missing, or for a line that is not a record.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{file}: no metrics there; name the directory of a run that has taken a step")
    return read_lines(file)


def _cut_lines(path: Path, step: int | None) -> None:
    kept = b"".join(line for line, record in _whole_lines(path) if step is not None and record["step"] <= step)
    if len(kept) != path.stat().st_size:
        write_atomically(path.resolve(), kept)  # it may be a link (`nmoe.runs.record_links`)


def _whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Reads each complete line with its record. A last line without a newline was left by a kill and is ignored."""
    *lines, _torn = path.read_bytes().split(b"\n")
    pairs = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json_of(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            shown = line[:80].decode(errors="replace")
            raise UserError(
                f"{path}:{number}: not a JSON object with a whole-number 'step': {shown!r}; remove the line"
            )
        pairs.append((line + b"\n", record))
    return pairs


def _line(record: Mapping[str, Any], where: str) -> bytes:
    try:
        # ASCII escapes, because model output may hold lone surrogates, which have no UTF-8.
        return _ENCODER.encode(record).encode("ascii") + b"\n"
    except (ValueError, TypeError):
        _refuse_unwritable(record, where)
        raise


def _sample_line(record: Mapping[str, Any], where: str) -> bytes:
    """Returns the line that `_line` does, without blanks, in a fifth of the time: most of a sample are numbers, slow for `json`."""
    try:
        line = to_json(record, inf_nan_mode="constants")
    except PydanticSerializationError:  # a lone surrogate, or no JSON value
        return _line(record, where)
    # A number that JSON does not have, or only these words in a text; and characters that `_line` escapes.
    same = line.isascii() and b"\x7f" not in line and b"NaN" not in line and b"Infinity" not in line
    return line + b"\n" if same else _line(record, where)


def _refuse_unwritable(value: Any, where: str) -> None:
    """Raises ValueError or TypeError naming the entry that JSON cannot hold; `json.dumps` would only say that there is one."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _refuse_unwritable(entry, f"{where}: {key}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _refuse_unwritable(entry, f"{where}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}")
    elif not isinstance(value, str | int | None):
        raise TypeError(f"{where} is a {type(value).__name__}; give a Python number")
