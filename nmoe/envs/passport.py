"""The passport of an environment: what `nmoe env certify` found, as lines for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nmoe.errors import shown

Status = Literal["pass", "fail", "not tried"]


@dataclass(frozen=True)
class Example:
    """An answer that shows a failure: the problem, its gold, the answer as it was given, and its verdict."""

    problem: str
    question: str
    gold: str
    kind: str
    answer: str
    verdict: str

    def lines(self) -> Iterator[str]:
        yield f"problem {self.problem}: {shown(self.question)}"
        yield f"  gold {shown(self.gold)}"
        yield f"  {self.kind}: {shown(self.answer)}"
        yield f"  {self.verdict}"


@dataclass(frozen=True)
class Row:
    """One question of a passport with its answer. `figures` are the numbers behind it."""

    name: str
    status: Status
    said: str
    remedy: str = ""
    examples: Sequence[Example] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Passport:
    """The result of examining one environment. `missing` says why it could not be examined, where its data is not here."""

    environment: str
    version: str
    pool: str
    rows: Sequence[Row] = ()
    missing: str = ""

    @property
    def failed(self) -> bool:
        return any(row.status == "fail" for row in self.rows)

    @property
    def tried(self) -> bool:
        """Whether answers were graded."""
        return any(row.name == "attacks" and row.status != "not tried" for row in self.rows)

    def record(self) -> dict[str, Any]:
        """Returns the passport as JSON values."""
        return {
            "environment": self.environment,
            "version": self.version,
            "pool": self.pool,
            "result": "no data here"
            if self.missing
            else "fail"
            if self.failed
            else "pass"
            if self.tried
            else "not tried",
            "missing": self.missing,
            "rows": {
                row.name: {
                    "status": row.status,
                    "said": row.said,
                    "remedy": row.remedy,
                    "examples": [vars(one) for one in row.examples],
                    **row.figures,
                }
                for row in self.rows
            },
        }

    def lines(self) -> Iterator[str]:
        """Yields the passport for people."""
        yield f"environment  {self.environment}, version {self.version}: {self.pool}"
        if self.missing:
            yield f"no data here: {self.missing}"
        for row in self.rows:
            yield f"{row.name:<11}  {row.status:<9}  {row.said}"
            for example in row.examples:
                yield from (f"{'':<24}{line}" for line in example.lines())
            if row.remedy:
                yield f"{'':<24}remedy: {row.remedy}"
