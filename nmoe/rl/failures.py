"""The names of what can end a trajectory; every trajectory carries exactly one of them, counted on each step."""

from __future__ import annotations

from typing import Literal, get_args

Failure = Literal[
    "ok",
    "parse_error",
    "truncated",
    "timeout",
    "budget_exceeded",
    "tool_error",
    "unknown_tool",
    "output_limit",
    "disk_full",
    "sandbox_denied",
    "sandbox_setup_failed",
    "workspace_failed",
    "command_not_found",
    "out_of_memory",
    "nonzero_exit",
    "grader_error",
    "engine_error",
    "internal_error",
]

FAILURES: tuple[Failure, ...] = get_args(Failure)

# The policy did not cause these, so its tokens must not be trained on them: the collector masks such samples. Every
# other name is an outcome of what the policy wrote, and is graded (`timeout` and `disk_full` included: a program that
# loops or fills its disk was the policy's own).
INFRASTRUCTURE: frozenset[Failure] = frozenset(
    {"sandbox_setup_failed", "workspace_failed", "grader_error", "engine_error", "internal_error"}
)
