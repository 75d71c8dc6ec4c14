"""Runs of reinforcement learning whose samples come from engine servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe.runs.ledger import read_metrics

Reinforce = Callable[..., Path]
SMALL = ("--run.steps=3", "--batch.prompts_per_step=6", "--batch.group_size=4", "--model.numerics=exact")
ENGINES = ("publish", "canary", "engine", "time_", "tokens_per_second")


def figures(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(ENGINES)} for row in read_metrics(run)]


@pytest.mark.parametrize("servers", [1, 3])
def test_servers_sample_what_one_process_samples(reinforce: Reinforce, servers: int) -> None:
    here = reinforce(*SMALL, "--run.name=here")
    there = reinforce(*SMALL, "--run.name=there", "--engine.kind=server", f"--engine.servers={servers}")
    assert figures(there) == figures(here)
    for row in read_metrics(there):
        assert row["mismatch_abs_max"] == row["canary_abs_max"] == 0.0
        assert row["canary_coverage"] >= 0.99
        assert (row["engines_serving"], row["engine_requests_retried"]) == (servers, 0)


def test_a_run_with_an_adapter_sends_the_adapter_alone(reinforce: Reinforce) -> None:
    adapter = (*SMALL, "--lora.rank=2", "--lora.targets=['q_proj', 'v_proj']")
    here = reinforce(*adapter, "--run.name=here")
    there = reinforce(*adapter, "--run.name=there", "--engine.kind=server")
    assert figures(there) == figures(here)
    # A and B of rank 2, beside 64 wide projections to 64 and 32, in two layers of fp32.
    assert {row["publish_bytes"] for row in read_metrics(there)} == {4 * 2 * 2 * (64 + 64 + 64 + 32)}
    merged = reinforce(*adapter, "--run.name=merged", "--engine.kind=server", "--engine.weights=disk")
    rows = read_metrics(merged)
    assert all(row["canary_abs_max"] <= 1e-5 and row["mismatch_abs_max"] <= 1e-5 for row in rows)
    assert min(row["publish_bytes"] for row in rows) > 500_000
