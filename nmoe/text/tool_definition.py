"""A tool as a policy is told of it: name, description, and its parameters as a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolDefinition:
    """Worked example:

        ToolDefinition("square", "Squares a number.",
                       {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]})

    `parameters` describes an object; None where there are none.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] | None

    def as_function(self) -> dict[str, Any]:
        """The form that chat templates take: `{"type": "function", "function": {...}}`."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}
