"""What an examination of the machine finds, as lines for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Advice:
    """What would be better, and the command or setting that gets it.

    `kind`: "needed" (without it nmoe cannot be used), "faster", "safer", or "more" (something that is optional).
    """

    kind: Literal["needed", "faster", "safer", "more"]
    text: str
    command: str


@dataclass(frozen=True)
class Finding:
    """One topic: `Finding("threads", "2 cores, 1 of them free: ...", {"cores": 2, "free_cores": 1, "quota": None})`."""

    topic: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()


def usable(findings: Sequence[Finding]) -> bool:
    """Whether nothing is missing that nmoe needs."""
    return all(advice.kind != "needed" for finding in findings for advice in finding.advice)


def as_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A paragraph per topic, then what would be better, the most urgent first."""
    width = max(len(finding.topic) for finding in findings) + 2
    for finding in findings:
        first, *others = finding.text.splitlines()
        yield f"{finding.topic:<{width}}{first}"
        yield from (" " * width + line for line in others)
    for kind in ("needed", "faster", "safer", "more"):
        for finding in findings:
            for advice in finding.advice:
                if advice.kind == kind:
                    yield ""
                    yield f"{kind + ':':<{width}}{advice.text}"
                    yield f"{'':<{width}}  {advice.command}"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """For example `{"usable": true, "findings": {"threads": {"cores": 2, ...}, ...}, "advice": [{"topic": "threads", ...}]}`."""
    return {
        "usable": usable(findings),
        "findings": {finding.topic: finding.facts for finding in findings},
        "advice": [{"topic": finding.topic, **asdict(advice)} for finding in findings for advice in finding.advice],
    }
