"""What a trajectory records of tools: the calls that the policy made, and what came of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nmoe.rl.failures import Failure


@dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it: `ToolCall("python", '{"code": "print(6 * 7)"}', "0/0")`.

    `arguments` is the text of the arguments, JSON or not; `call_id` is turn/place, unique in a trajectory. `fault` says
    why the call can not be read at all, where its form is that of the format and not of Harmony's header; it is then
    empty otherwise.
    """

    name: str
    arguments: str
    call_id: str
    fault: str = ""


@dataclass(frozen=True)
class ToolEvent:
    """A call and what came of it, as `ToolEvent(call, "ok", "42\\n", "", started_s=0.12, wall_s=0.004)`.

    `failure` is the event's own and ends the trajectory only where it is one of the infrastructure; `output` is what
    the policy was shown, the `reason` of a failure in it. Times are seconds, `started_s` from the start of the
    trajectory.
    """

    call: ToolCall
    failure: Failure
    output: str
    reason: str
    started_s: float
    wall_s: float

    def record(self) -> dict[str, Any]:
        """JSON-able, all fields flat."""
        return {**vars(self.call), **{name: value for name, value in vars(self).items() if name != "call"}}
