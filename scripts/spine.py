"""Draws the rooms of nmoe/ and one prompt's way through them: python scripts/spine.py > docs/images/spine.svg

The rooms and their order come from the imports of nmoe/, the way from the spine in docs/architecture.md: the files that one prompt
of a GRPO step runs through, in reading order. `scripts/trace_step.py` lists all files that it enters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

from commits import ROOT
from count_code import imports, sources

PAGE = ROOT / "docs/architecture.md"

_LABEL, _COLUMN, _ROW, _TOP = 80, 108, 19, 44
_BLUE, _INK, _GREY, _LINE = "#3f51b5", "#222", "#999", "#e3e6ee"


@dataclass(frozen=True)
class Step:
    """A file of the spine, e.g. Step("problem", "envs/pools/pool.py"), whose path is below nmoe/."""

    stage: str
    file: str

    @property
    def room(self) -> str:
        return self.file.split("/")[0].removesuffix(".py")


def spine(page: str) -> list[Step]:
    """The rows `| stage | file | ... |` of the table under the heading "The spine". An empty stage is that of the row above."""
    rows = re.findall(r"^\| *([\w ]*?) *\| `nmoe/([\w/]+\.py)` \|", _section(page, "The spine"), re.MULTILINE)
    steps: list[Step] = []
    for stage, file in rows:
        steps.append(Step(stage or steps[-1].stage, file))
    return steps


def beside(page: str) -> list[str]:
    """The files in the rows "| kind | folder | `name`, `name` | ... |" under the heading "Beside the spine", below nmoe/."""
    rows = re.findall(
        r"^\| *[\w ]*? *\| `nmoe/([\w/]*)` \| ([^|]+) \|", _section(page, "Beside the spine"), re.MULTILINE
    )
    return [f"{folder}{name}.py" for folder, names in rows for name in re.findall(r"`(\w+)`", names)]


def _section(page: str, heading: str) -> str:
    """The text under a heading, down to the next one of its level. Raises ValueError where there is none."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE.relative_to(ROOT)} has no heading {heading!r}")
    return found[1]


def rooms(tree: Path) -> list[str]:
    """The rooms of nmoe/ by the imports of their modules: each stands above those that it imports, and as low as that allows."""
    files = [
        (path, module, text)
        for path, module, text in sources(tree)
        if path.parts[1] not in ("__init__.py", "__main__.py")
    ]
    known = {module for _, module, _ in files}
    graph: dict[str, set[str]] = {}
    for path, module, text in files:
        if path.name == "__main__.py":
            continue
        room = module.split(".")[1]
        found = imports(module, text, known, path.name == "__init__.py")
        graph.setdefault(room, set()).update(
            name.split(".")[1] for name in (found.at_once | found.later) if name.count(".")
        )
    return sorted(graph, key=lambda room: (-_height(room, _frozen(graph)), room))


def _frozen(graph: Mapping[str, set[str]]) -> tuple[tuple[str, frozenset[str]], ...]:
    return tuple((room, frozenset(below - {room})) for room, below in graph.items())


@cache
def _height(room: str, graph: tuple[tuple[str, frozenset[str]], ...]) -> int:
    return max((1 + _height(other, graph) for other in dict(graph)[room]), default=0)


def picture(order: Sequence[str], steps: Sequence[Step]) -> str:
    """An SVG with a row for each room, a column for each stage, and the files of the spine where they meet, joined in order.
    Rooms without a file of the spine that follow one another share a row."""
    return "\n".join(_lines(order, steps)) + "\n"


def _lines(order: Sequence[str], steps: Sequence[Step]) -> Iterator[str]:
    stages = list(dict.fromkeys(step.stage for step in steps))
    entered = {step.room for step in steps}
    cells: dict[tuple[str, str], list[int]] = {}
    for number, step in enumerate(steps):
        cells.setdefault((step.room, step.stage), []).append(number)
    rows = [list(group) for _, group in groupby(order, lambda room: room if room in entered else "")]
    tops, at = {}, _TOP
    for row in rows:
        tops[row[0]] = at
        at += _ROW * max(1, *(len(cells.get((row[0], stage), ())) for stage in stages)) + 3
    width, height = _LABEL + _COLUMN * len(stages) + 8, at + 8
    title = "The rooms of nmoe, each above those that it imports, and one prompt's way through them"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" '
        f'role="img" aria-label="{escape(title)}">'
    )
    yield (
        '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{_BLUE}"/></marker></defs>'
    )
    yield f'<rect width="{width}" height="{height}" fill="#fff"/>'
    for number, stage in enumerate(stages):
        middle = _LABEL + _COLUMN * (number + 0.5)
        yield f'<text x="{middle}" y="28" text-anchor="middle" font-weight="bold" fill="{_INK}">{escape(stage)}</text>'
    yield from (f'<path d="M0 {top - 2}H{width}" stroke="{_LINE}"/>' for top in tops.values())
    boxes = []
    for number, step in enumerate(steps):
        row = cells[step.room, step.stage].index(number)
        boxes.append((_LABEL + _COLUMN * stages.index(step.stage) + 3, tops[step.room] + _ROW * row))
    for (x, y), (to_x, to_y) in pairwise(boxes):
        yield f'<path d="{_arrow(x, y, to_x, to_y)}" fill="none" stroke="{_BLUE}" stroke-width="1.2" marker-end="url(#a)"/>'
    for row in rows:
        colour, weight = (_INK, "bold") if row[0] in entered else (_GREY, "normal")
        yield f'<text x="8" y="{tops[row[0]] + 13}" font-weight="{weight}" fill="{colour}">{escape(", ".join(row))}</text>'
    for number, (step, (x, y)) in enumerate(zip(steps, boxes, strict=True), 1):
        name = Path(step.file).stem
        yield f'<rect x="{x}" y="{y}" width="{_COLUMN - 12}" height="{_ROW - 3}" rx="4" fill="#eef2fb" stroke="{_BLUE}"/>'
        yield f'<text x="{x + 5}" y="{y + 12}" fill="{_INK}">{number} {escape(name)}</text>'
    yield "</svg>"


def _arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """A path from one box to the next: from edge to edge in a column, from side to side between two."""
    box, half = _COLUMN - 12, (_ROW - 3) // 2
    if x == to_x:
        start, end = (y + 2 * half, to_y) if to_y > y else (y, to_y + 2 * half)
        return f"M{x + box - 10} {start}V{end}"
    return f"M{x + box} {y + half}C{x + box + 14} {y + half} {to_x - 14} {to_y + half} {to_x} {to_y + half}"


def main() -> None:
    print(picture(rooms(ROOT), spine(PAGE.read_text())), end="")


if __name__ == "__main__":
    main()
