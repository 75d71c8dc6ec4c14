"""A problem: one verifiable question with the gold answer that a task's grader compares against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nmoe.text.harmony_format import Message

Metadata = Mapping[str, str | int | float]

# What a dataset says of a problem's kind; rates are reported for each value of these.
GROUPS = ("level", "subject")


@dataclass(frozen=True)
class Problem:
    """One question, as a pool hands it out.

    `id` is unique within a pool and stable between runs; `source` is the name of the pool, or of the source within a
    mixture, that it came from. `columns` are the fields of its record, kept where an environment has `[[rewards]]` to read
    them; `history` are the messages before the question, where the record's prompt is a conversation. Worked example, the
    eighteenth record of the source "gsm8k" of a mixture:

        Problem(id="gsm8k/17", task_type="gsm8k", question="Ann has 3 boxes of 6 eggs. How many eggs?", gold="18",
                source="gsm8k", metadata={"record": 17})
    """

    id: str
    task_type: str
    question: str
    gold: str
    source: str
    metadata: Metadata = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Message, ...] = ()

    @property
    def groups(self) -> list[str]:
        """The groups it belongs to: ["level=Level 5", "subject=Algebra"]."""
        return [f"{key}={self.metadata[key]}" for key in GROUPS if key in self.metadata]
