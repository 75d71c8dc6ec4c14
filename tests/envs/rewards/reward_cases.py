"""What the tests of rewards share: a problem, and the tables of an environment that reward answers to it."""

from __future__ import annotations

from nmoe.types import Problem

SORT = '[task_pool]\ntype = "generated"\ntask_type = "sort"\n'
PROBLEM = Problem(
    "demo/0", "sort", "Sort: 312", "123", "demo", {"difficulty": 3}, {"answer": "123", "tags": ["a", "b"]}
)


def reward(call: str, name: str = "mine", **keys: object) -> str:
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
    return "\n".join(["[[rewards]]", f'name = "{name}"', 'type = "function"', f'call = "{call}"', *lines, ""])
