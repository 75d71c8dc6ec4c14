"""Asynchronous runs: engine servers sample beside the trainer, and no group is lost, trained on twice or too old."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nmoe.runs.ledger import read_lines, read_metrics

Reinforce = Callable[..., Path]
SERVERS = ("--engine.kind=server", "--engine.servers=2", "--model.numerics=exact")
SMALL = ("--run.steps=6", "--batch.prompts_per_step=4", "--batch.group_size=4", *SERVERS)


def test_a_step_trains_on_groups_that_were_sampled_beside_the_one_before(reinforce: Reinforce) -> None:
    run = reinforce(*SMALL, "--async.max_staleness=1")
    rows = read_metrics(run)
    assert len(rows) == 6
    for row in rows:
        assert 0 <= row["staleness_mean"] <= row["staleness_max"] <= 1
        assert row["tokens_sampled"] == row["tokens_trained"] + row["tokens_void"] + row["tokens_in_flight"]
        assert row["groups_running"] + row["groups_ready"] <= 8
        assert 0 <= row["engine_idle_share"] <= 1
        assert row["trainer_wait_s"] == row["time_rollout_s"] < row["time_step_s"]
        assert (
            row["canary_abs_max"] == row.get("mismatch_abs_max", 0.0) == row.get("mismatch_mixed_abs_max", 0.0) == 0.0
        )
    assert max(row["staleness_max"] for row in rows) == 1, "something was sampled beside the trainer"
    assert rows[-1]["groups_running"] == rows[-1]["groups_ready"] == 0, "no group is sampled for a step after the last"
    assert 'correction = "tis"' in (run / "config.toml").read_text()
    trained = [one for step in range(1, 7) for one in read_lines(run / f"samples/step_{step:06}.jsonl")]
    assert len({one["seed"] for one in trained}) == len(trained) // 4
