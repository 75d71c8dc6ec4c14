"""The time line of an asynchronous run, as SVG: when the trainer waited for samples, and when the engines waited for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nmoe.runs.charts import COLOURS, text

_WIDTH, _LEFT, _RIGHT = 560, 62, 10
_LANES = {"trainer": 26, "engines": 54}
_LANE, _HEIGHT = 20, 118
# The last steps of a run; more would be lines.
_MOST_STEPS = 40
_GREY = "#cccccc"
# What the trainer did, in the order of a step, with its colour.
_DID = (
    ("trainer_wait_s", "waits for groups", _GREY),
    ("time_learn_s", "trains", COLOURS[0]),
    ("time_sync_s", "publishes", COLOURS[1]),
)


def timeline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws the last steps of a run from its metrics as an `<svg>`; "" for a run that does not sample beside its training.

    The upper lane is the trainer. In the lower one, the coloured part of each interval is the share in which an engine had a
    request. An interval ends when a step has its groups, so that it reaches back into the training of the step before.
    """
    rows = [row for row in rows if "trainer_wait_s" in row and "time_step_s" in row][-_MOST_STEPS:]
    whole = sum(row["time_step_s"] for row in rows)
    if whole <= 0:
        return ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="time line">',
        f'<text x="{_LEFT}" y="16" font-size="13" font-weight="bold">Who waited for whom, steps {rows[0]["step"]} to '
        f"{rows[-1]['step']}</text>",
    ]

    def bar(lane: str, begin: float, end: float, colour: str, said: str) -> str:
        scale = (_WIDTH - _LEFT - _RIGHT) / whole
        return (
            f'<rect x="{_LEFT + begin * scale:.2f}" y="{_LANES[lane]}" width="{max(end - begin, 0.0) * scale:.2f}" '
            f'height="{_LANE}" fill="{colour}"><title>{text(said)}</title></rect>'
        )

    for lane, y in _LANES.items():
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 14}" font-size="11" text-anchor="end">{lane}</text>')
    at = since = 0.0
    for row in rows:
        began = at
        for name, doing, colour in _DID:
            seconds = row.get(name, 0.0)
            parts.append(bar("trainer", at, at + seconds, colour, f"step {row['step']} {doing}: {seconds:.2f} s"))
            at += seconds
        took = began + row["trainer_wait_s"]
        busy = (1 - row["engine_idle_share"]) * (took - since)
        said = f"until step {row['step']} had its groups: busy {busy:.2f} of {took - since:.2f} s"
        parts += [
            bar("engines", since, since + busy, COLOURS[2], said),
            bar("engines", since + busy, took, _GREY, said),
        ]
        since, at = took, began + row["time_step_s"]
    x = _LEFT
    for said, colour in [(doing, colour) for _, doing, colour in _DID] + [("engines have requests", COLOURS[2])]:
        parts.append(f'<rect x="{x}" y="86" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="95" font-size="11">{said}</text>')
        x += 24 + 6 * len(said)
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="112" font-size="11" text-anchor="end">{whole:.1f} s</text>')
    return "\n".join([*parts, "</svg>"])
