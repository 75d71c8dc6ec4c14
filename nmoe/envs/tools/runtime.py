"""The runtime of an environment's tools: sandboxes with the environment's limits on time, memory and processes, and the
workspaces that provide their files.

It also grades the environment's gold answers once, before anything else is graded.
"""

from __future__ import annotations

from typing import Any, Self

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.envs.environment import Environment
from nmoe.envs.golds import check_golds, to_stderr
from nmoe.envs.tools.builtin import sandbox_limits
from nmoe.envs.tools.servers import close_servers
from nmoe.runs.waiting import wait_for
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.sandbox.workspaces.prepare import Workspaces


class ToolRuntime:
    """Holds the sandboxes and workspaces of an environment, and closes them and the environment's tool servers when its context
    ends. Starts no sandbox if the environment needs none.
    """

    def __init__(self, environment: Environment, settings: SandboxSettings) -> None:
        """Prepares the sandboxes and workspaces that the environment needs, and grades its gold answers. Raises SandboxSetupError
        if the requested isolation level is not available, UserError for gold answers that are not graded correct, and
        InfrastructureError if their grader was lost.
        """
        self.sandboxes: Sandboxes | None = None
        self.workspaces: Workspaces | None = None
        self._settings = settings
        self._tools = environment.tools
        if environment.wants_sandbox:
            self.sandboxes = Sandboxes(settings, sandbox_limits(environment.budget))
            if environment.settings.workspace is not None:
                name, files = environment.settings.env_id, environment.settings.workspace
                self.workspaces = Workspaces(name, files, self.sandboxes.describe())
        try:
            check_golds(environment, self.sandboxes, to_stderr)
        except BaseException:
            self.close()
            raise

    def record(self) -> dict[str, Any] | None:
        """Returns the sandboxes' settings and the isolation in force, as a replay needs them; None without sandboxes.

        {"settings": {"level": "bubblewrap", ...}, "in_force": "bubblewrap 0.8.0, seccomp, ..."}
        """
        if self.sandboxes is None:
            return None
        return {"settings": self._settings.model_dump(mode="json"), "in_force": self.sandboxes.describe()}

    def provenance(self) -> dict[str, str]:
        """Returns a description of the sandbox that runs code which the policy writes, as {"sandbox": TEXT} for a run's provenance;
        empty if the environment runs no such code."""
        return {} if self.sandboxes is None else {"sandbox": self.sandboxes.describe()}

    def close(self) -> None:
        close_servers(self._tools.values())
        if self.workspaces is not None:
            self.workspaces.close()
        if self.sandboxes is not None:
            wait_for(self.sandboxes.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
