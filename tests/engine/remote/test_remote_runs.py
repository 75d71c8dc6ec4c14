"""Runs of reinforcement learning whose samples come from engine servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from recipes.interrupted_runs import interrupted_at

from nmoe.engine.api import Request
from nmoe.engine.remote.server import EngineServer
from nmoe.envs.rewards.function import FunctionReward
from nmoe.errors import UserError
from nmoe.runs.ledger import read_lines, read_metrics
from nmoe.types import Sample

pytestmark = pytest.mark.usefixtures("forked_servers")
Reinforce = Callable[..., Path]
SMALL = ("--run.steps=3", "--batch.prompts_per_step=6", "--batch.group_size=4", "--model.numerics=exact")
ENGINES = ("publish", "canary", "engine", "time_", "tokens_per_second", "mismatch_abs_mean/")


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
        each = {name: value for name, value in row.items() if name.startswith("mismatch_abs_mean/")}
        assert set(each) <= {f"mismatch_abs_mean/engine_{number}" for number in range(servers)}
        assert ({*each.values()} == {0.0}) == (servers > 1)


def test_rewards_are_opened_once_for_a_run_over_servers(
    reinforce: Reinforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for each batch where the engine is in the process; the rewards are the same."""
    source = "def length(completions, **_):\n    return [len(one[-1]['content']) / 8 for one in completions]\n"
    (tmp_path / "remote_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    open_reward, opened = FunctionReward.opened, []

    def counted(self: FunctionReward) -> AbstractAsyncContextManager[Any]:
        opened.append(self.name)
        return open_reward(self)

    monkeypatch.setattr(FunctionReward, "opened", counted)
    text = '[[environment.rewards]]\nname = "long"\ntype = "function"\ncall = "remote_rewards:length"\n'
    here = reinforce(*SMALL, "--run.name=here", text=text)
    rows = read_metrics(here)
    assert len(opened) == len(rows) + sum(row["refills"] for row in rows)
    opened.clear()
    there = reinforce(*SMALL, "--run.name=there", "--engine.kind=server", text=text)
    assert opened == ["long"]
    assert figures(there) == figures(here)


def test_the_server_whose_log_probabilities_are_wrong_is_named(
    reinforce: Reinforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two is off by 0.3 a token in rollouts, and right whenever it is compared after a publication."""
    right = EngineServer.generate

    async def generate(self: EngineServer, request: Request, *rest: Any) -> list[Sample]:
        samples = await right(self, request, *rest)
        if self.name == "server_1" and not request.request_id.startswith("canary/"):
            for sample in samples:
                sample.logprobs = [logprob - 0.3 for logprob in sample.logprobs]
        return samples

    monkeypatch.setattr(EngineServer, "generate", generate)
    run = reinforce(*SMALL, "--engine.kind=server", "--engine.servers=2")
    for row in read_metrics(run):
        assert row["mismatch_abs_mean/engine_0"] == row["canary_abs_max"] == 0.0
        assert row["mismatch_abs_mean/engine_1"] == pytest.approx(0.3, abs=1e-6)
        assert 0.05 < row["mismatch_abs_mean"] < 0.25, "the mean over both"
    (alert,) = [one for one in read_lines(run / "alerts.jsonl") if one.get("rule") == "mismatch"]
    said = "engine_1 of 2 and learner differ by 0.3 a token, 2 steps in a row, and with exact numerics by nothing"
    assert (alert["step"], alert["message"]) == (2, said)
    assert alert["remedies"][1].startswith("start that server again")
    turns = {number for record in read_lines(run / "samples/step_000001.jsonl") for number in record["engines"]}
    assert turns <= {0, 1}


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


def test_a_run_that_sends_differences_has_the_numbers_of_one_process(reinforce: Reinforce, tmp_path: Path) -> None:
    delta = ("--engine.kind=server", "--engine.weights=delta", f"--engine.shared_directory={tmp_path}")
    here = reinforce(*SMALL, "--run.name=here")
    there = reinforce(*SMALL, "--run.name=there", "--engine.servers=2", *delta)
    assert figures(there) == figures(here)
    rows = read_metrics(there)
    assert [row["publish_full"] for row in rows] == [2, 2, 2], "before the first step, and never again"
    assert [row["engines_healed"] for row in rows] == [0, 0, 0]
    whole = rows[0]["publish_bytes"]
    assert all(0.1 * whole < row["publish_bytes"] < 0.95 * whole for row in rows[1:]), "each element of fp32 changes"
    assert not list(tmp_path.glob("nmoe_weights_*"))

    adapter = (*SMALL, "--lora.rank=2", "--lora.targets=['q_proj', 'v_proj']", "--engine.kind=server")
    merged = reinforce(*adapter, "--run.name=merged", "--engine.weights=disk")
    changed = reinforce(*adapter, "--run.name=changed", *delta)
    assert figures(changed) == figures(merged)
    assert read_metrics(changed)[-1]["publish_bytes"] < 0.2 * read_metrics(merged)[-1]["publish_bytes"]


def test_weights_are_published_every_third_step(reinforce: Reinforce) -> None:
    """Interrupted or not, the same: a run that is asked to stop between two publications does so after the next."""
    third = (
        *("--run.steps=7", "--engine.publish_every=3", "--checkpoint.every_steps=5", "--algorithm.correction=tis"),
        *SMALL[1:],
        "--engine.kind=server",
    )
    whole = reinforce(*third, "--run.name=whole")
    rows = read_metrics(whole)
    # The step that is saved, and the last one, publish too.
    assert [row["engine_age"] for row in rows] == [0, 1, 2, 0, 1, 0, 0]
    assert [samples[0]["versions"][0] for samples in samples_of(whole)] == [0, 0, 0, 1, 1, 2, 3]
    for row in rows:
        fresh = row["engine_age"] == 0
        assert fresh == ("mismatch_abs_max" in row) == (row["correction_ess"] == pytest.approx(1, abs=1e-9))
        assert row.get("mismatch_abs_max", 0.0) == row["canary_abs_max"] == 0.0
    with interrupted_at(4):
        reinforce(*third, "--run.name=cut")
    cut = reinforce(*third, "--run.name=cut", "--run.resume=true")
    assert figures(cut) == figures(whole)
    assert samples_of(cut) == samples_of(whole)


def samples_of(run: Path) -> list[list[dict[str, Any]]]:
    """The samples of each step, without what belongs to the run and the machine."""
    files = sorted((run / "samples").glob("*.jsonl"))
    kept = ("token_ids", "logprobs", "versions")
    return [[{name: one[name] for name in kept} for one in map(json.loads, file.open())] for file in files]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("--algorithm.correction=tis",),
            "publish_every=2: needs engine.kind = 'server' or 'vllm'",
        ),
        (
            ("--engine.kind=server",),
            "publish_every=2: trains on samples of older weights; correct for it: algorithm.correction",
        ),
        (
            ("--engine.kind=server", "--engine.weights=group", "--algorithm.correction=tis"),
            'weights=group: "group" cannot send the last publication once more .*; use "disk"',
        ),
    ],
)
def test_older_weights_are_refused_where_they_cannot_be_corrected_or_sent_again(
    reinforce: Reinforce, given: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        reinforce("--engine.publish_every=2", *given)


def test_an_evaluation_samples_the_present_weights(reinforce: Reinforce) -> None:
    evaluated = (
        *SMALL[1:],
        "--run.steps=2",
        "--algorithm.correction=tis",
        "--eval.0.every_steps=1",
        "--eval.0.problems=10",
    )
    every = reinforce(*evaluated, "--run.name=every", "--engine.kind=server")
    second = reinforce(*evaluated, "--run.name=second", "--engine.kind=server", "--engine.publish_every=2")
    assert [row["engine_age"] for row in read_metrics(second)] == [0, 0]
    assert figures(second) == figures(every)
