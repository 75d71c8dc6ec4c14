"""The failure names are a contract: files written by one version are read by the next."""

from __future__ import annotations

from nmoe.types import FAILURES, INFRASTRUCTURE


def test_the_names() -> None:
    names = (
        "ok parse_error truncated timeout budget_exceeded tool_error unknown_tool output_limit disk_full sandbox_denied "
        "sandbox_setup_failed workspace_failed command_not_found out_of_memory nonzero_exit grader_error engine_error "
        "internal_error"
    )
    assert tuple(names.split()) == FAILURES
    assert set(FAILURES) > INFRASTRUCTURE


def test_what_the_policy_caused_is_not_masked() -> None:
    assert not INFRASTRUCTURE & {"ok", "parse_error", "truncated", "timeout", "budget_exceeded", "nonzero_exit"}
