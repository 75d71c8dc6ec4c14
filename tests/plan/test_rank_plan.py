"""Plans of ranks: memory against real tensors, traffic against FSDP and expert groups, and the work of a step by hand."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from nmoe import cli
from nmoe.config.commands import PretrainConfig, RLConfig, SFTConfig
from nmoe.config.loader import load_run, load_run_with
from nmoe.config.tables.model import ParallelSection
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.learner.learner import Learner
from nmoe.parallel import mesh
from nmoe.parallel.ranks import Ranks, offloads
from nmoe.plan.rank_plan import gib, lines, plan, with_offload
from nmoe.plan.work import Prompts, Work, prompts_of, work_of
from nmoe.recipes.setup import build_model, load_tokenizer, optimizer_settings

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


@contextmanager
def fake_ranks(world: int, per_node: int) -> Iterator[None]:
    """For the block this process is rank 0 of `world` ranks that are not there: collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = os.environ.get("LOCAL_WORLD_SIZE")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


def held_bytes(tensors: list[torch.Tensor]) -> int:
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


@pytest.mark.parametrize(
    ("world", "axes"),
    [
        (4, ()),
        (4, ("--parallel.ep=2",)),
        (4, ("--parallel.ep=1", "--parallel.dp_replicate=2")),
        (3, ()),
        (4, ("--optimizer.kind=muon",)),
    ],
)
def test_bytes_are_those_of_real_tensors(workshop: Path, world: int, axes: tuple[str, ...]) -> None:
    """Rank 0's own part of real weights, their gradients, and the state of an optimizer that took a step."""
    config = load_run(workshop / "base.toml", PretrainConfig, axes)
    planned = plan(config, world, world)
    with fake_ranks(world, world):
        model = build_model(config.model, load_tokenizer(config.model), 0)
        learner = Learner(model, optimizer_settings(config), 10, 512, ranks=Ranks(config.parallel))
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        learner.optimizer.step()
        trained_by = [one for one in (learner.optimizer.adamw, learner.optimizer.muon) if one is not None]
        states = [state for one in trained_by for state in one.state.values()]
        moments = [value for state in states for name, value in state.items() if name != "step"]
        counted = {
            "weights": held_bytes(parameters),
            "gradients": held_bytes(parameters),
            "optimizer": held_bytes(moments),
        }
    for name, real in counted.items():
        assert planned.held[name] == real, name


def test_what_a_rank_sends_by_hand(workshop: Path) -> None:
    config = load_run(workshop / "base.toml", PretrainConfig, ["--parallel.ep=2", "--data.tokens_per_step=4096"])
    planned = plan(config, 4, 4)
    # 4 experts of 64 x 128 and 64 x 64 in each of 2 layers; 4096 / 4 tokens to 2 experts each, in one micro-batch.
    experts = 2 * 4 * (64 * 128 + 64 * 64)
    dense = planned.parameters - experts
    gathered = (
        dense * 3 / 4 + experts / 2 * 1 / 2
    )  # over all ranks; half of the experts over the 2 ranks that share them
    assert planned.sent == {
        "gathered weights": int(gathered * 4 * 2),
        "scattered gradients": int(gathered * 4),
        "rows to experts": 1024 * 2 * 2 * 64 * 4 * 2 * 2 // 2,
    }
    assert planned.axes.efsdp == planned.axes.ep == 2
    assert plan(load_run(workshop / "base.toml", PretrainConfig), 1, 1).sent == {}


def test_a_30b_model_on_1024_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    arguments = ["qwen3_30b_a3b", "--world=1024", f"--model.path={tmp_path}"]
    for memory, code in (("80", 0), ("40", 1)):
        monkeypatch.setattr(sys, "argv", ["nmoe", "plan", *arguments, f"--memory-gib={memory}"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == code
        said = capsys.readouterr().out
        assert "30,532,122,624 parameters, 29,905,186 on rank 0 (1.003 of an even share)" in said
        assert ("fits 80 GiB" if code == 0 else "does not fit 40 GiB; what helps") in said


@pytest.mark.parametrize("named", ["qwen3_30b_a3b", "Qwen/Qwen3-30B-A3B"])
def test_a_model_of_the_hub_is_planned_by_its_description(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the hub's repository only config.json is asked for, and nothing else is there."""
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(sys, "argv", ["nmoe", "plan", named, "--world=8", "--model.precision=bfloat16"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    assert asked == [("Qwen/Qwen3-30B-A3B", ["config.json"])]
    said = capsys.readouterr().out
    assert "30,532,122,624 parameters" in said
    # The packaged configuration trains an adapter, and fine-tuning all weights.
    assert ("gradient of a block" in said) == (named == "Qwen/Qwen3-30B-A3B")


def test_ranks_that_sample_hold_whole_weights(workshop: Path, base: Path) -> None:
    planned = plan(load_run(workshop / "rl.toml", RLConfig), 2, 2)
    assert planned.held["weights to sample"] == planned.parameters * 4
    divided = plan(load_run(workshop / "rl.toml", RLConfig, ["--engine.expert_parallel=true"]), 2, 2)
    experts = 2 * 4 * 64 * 3 * 64  # layers, experts, width, projections, width of an expert
    assert divided.held["weights to sample"] == (planned.parameters - experts // 2) * 4
    reading = plan(load_run(workshop / "rl.toml", RLConfig, ["--algorithm.kl_coef=0.1"]), 2, 2)
    assert reading.held["reference"] == reading.held["weights"] == reading.local_parameters * 4
    assert planned.sent["weights to sample"] == planned.parameters * 4 // 2


def test_experts_in_a_profile_are_counted_beside_their_weights(workshop: Path) -> None:
    config = load_run(workshop / "base.toml", PretrainConfig, ["--model.expert_profile=fp8"])
    model = build_model(config.model, load_tokenizer(config.model), 0)
    for moe in model.moe_layers():
        moe.quantise()
    kept = [one.value for moe in model.moe_layers() if moe.profile for one in moe.profile._kept.values()]
    held = plan(config, 1, 1).held["experts in their profile"]
    assert len(kept) == 4
    assert held == held_bytes(kept) == 2 * 4 * (64 * 128 + 64 * 64) * 4
    # Ranks quantise their own experts of each layer that they gather, of one layer at a time where blocks are recomputed.
    assert plan(config, 4, 4).axes.ep == 4
    assert plan(config, 4, 4).held["experts in their profile"] == held // 4
    recomputed = load_run(
        workshop / "base.toml", PretrainConfig, ["--model.expert_profile=fp8", "--model.checkpoint_activations=true"]
    )
    assert plan(recomputed, 4, 4).held["experts in their profile"] == held // 8


def test_what_is_offloaded_is_in_the_memory_of_the_machine(workshop: Path, base: Path) -> None:
    """Weights, gradients and optimizer move, and "auto" moves them where that makes them fit, alone."""
    config = load_run(workshop / "base.toml", PretrainConfig)
    moved = load_run(workshop / "base.toml", PretrainConfig, ["--parallel.offload=cpu"])
    before, after = plan(config, 4, 4), plan(moved, 4, 4)
    parts = ("weights", "gradients", "optimizer")
    assert before.host == {}
    assert after.host == {name: before.held[name] for name in parts}
    assert after.total == before.total - sum(before.held[name] for name in parts)
    for memory, chosen in (
        (before.total, "none"),
        (before.total - 1, "cpu"),
        (after.total, "cpu"),
        (after.total - 1, "none"),
    ):
        assert with_offload(config, 4, 4, memory).parallel.offload == chosen
    assert with_offload(config, 1, 1, 1).parallel.offload == "none", "one process shards nothing"
    assert f"and {gib(sum(after.host.values()))} in the machine's memory, by parallel.offload:" in lines(after, None)
    reading = load_run(workshop / "rl.toml", RLConfig, ["--algorithm.kl_coef=0.1", "--parallel.offload=cpu"])
    host = plan(reading, 4, 4).host
    assert host["reference"] == host["weights"] > 0, "the reference is sharded and moved as the policy is"
    assert any("parallel.offload" in one for one in before.remedies)
    assert not any("parallel.offload" in one for one in after.remedies)


@pytest.mark.parametrize("offload", ["cpu", "none"])
def test_offloading_reaches_fsdp(offload: Literal["cpu", "none"], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that shards a module has the policy, and what is on a CPU or not sharded is refused."""
    policies: list[type] = []

    def record(module: torch.nn.Module, **options: Any) -> None:
        policies.append(type(options["offload_policy"]))

    monkeypatch.setattr(mesh, "fully_shard", record)
    parallel = ParallelSection(offload=offload)
    with torch.device("meta"):
        blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
    with fake_ranks(2, 2):
        Ranks(parallel).shard(torch.nn.Sequential(*blocks, torch.nn.Linear(8, 8, device="meta")), blocks)
    assert policies == [CPUOffloadPolicy if offload == "cpu" else OffloadPolicy] * 3
    if offload == "none":
        assert not offloads(parallel, 1, "cpu")
        return
    with fake_ranks(2, 2), pytest.raises(UserError, match=r"parallel.offload = .*no separate memory"):
        Ranks(parallel).shard(torch.nn.Sequential(torch.nn.Linear(8, 8)), [])
    with pytest.raises(UserError, match=r"one process shards nothing"):
        offloads(parallel, 1, "cuda")


SHAPE = {"hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "context_tokens": 512}
MODEL = {"shape": {**SHAPE, "intermediate_size": 16}, "tokenizer": "bytes"}


def rl(**tables: Any) -> RLConfig:
    environment = {"env_id": "reverse", "task": "reverse", "task_pool": {"type": "generated"}}
    batch = {"prompts_per_step": 4, "group_size": 8, "max_refills": 0} | tables.pop("batch", {})
    joined = {"run": {"steps": 2}, "model": MODEL, "environment": environment, "sampling": {"max_new_tokens": 30}}
    return load_run_with(None, RLConfig, joined | {"batch": batch} | tables, "test", "run")


KNOWN = Prompts(20, {})


@pytest.mark.parametrize(
    ("tables", "ranks", "work"),
    [
        # 32 samples of 20 + 30 tokens; each of 4 prompts runs once.
        ({}, 1, Work(32 * 50, 4 * 20 + 32 * 30, 32 * 30, 32, 4 * 20 + 32 * 30)),
        # A micro-batch of 512 tokens takes 10 samples, which are of two groups.
        ({"batch": {"tokens_per_microbatch": 512}}, 1, Work(500, 2 * 20 + 300, 300, 32, 1040)),
        # Each of two updates takes half of the groups, and each of two ranks half of those samples.
        ({"batch": {"updates_per_step": 2}}, 2, Work(8 * 50, 20 + 8 * 30, 8 * 30, 32, 1040)),
        # 6 prompts are drawn for 4, and as many again once more.
        ({"batch": {"oversampling": 1.5, "max_refills": 1}}, 1, Work(1600, 1040, 960, 96, 12 * (20 + 8 * 30))),
        # The evaluation samples more than a step does: 200 problems, two completions each.
        (
            {"eval": [{"problems": 200, "samples": 2, "temperature": 1.0, "max_tokens": 40}]},
            1,
            Work(1600, 1040, 960, 400, 200 * (20 + 2 * 40)),
        ),
    ],
)
def test_a_step_of_rl_by_hand(tables: dict[str, Any], ranks: int, work: Work) -> None:
    assert work_of(rl(**tables), 512, KNOWN, ranks) == work


def test_prompts_that_are_not_known_are_as_long_as_they_may_be() -> None:
    assert work_of(rl(), 512).rows == 4 * (512 - 30) + 32 * 30
    environment = {**rl().environment.model_dump(exclude_unset=True), "budget": {"prompt_tokens": 100}}
    assert work_of(rl(environment=environment), 512).rows == 4 * 100 + 32 * 30
    # What tools say is part of a sequence too.
    environment |= {"tools": {"use": ["python"]}}
    assert work_of(rl(environment=environment), 512, KNOWN).tokens == 32 * 512


def test_prompts_are_measured() -> None:
    config = rl()
    environment = Environment.from_settings(config.environment, load_tokenizer(config.model))
    found = prompts_of(config)
    assert found is not None
    assert found.training == max(len(environment.prompts.ids(environment.pool.order.at(place))) for place in range(64))
    assert found.probes == {}
    assert prompts_of(rl(model={"path": "missing"})) is None


def test_supervised_steps_fill_micro_batches(tmp_path: Path) -> None:
    def sft(**tables: Any) -> SFTConfig:
        joined = {"run": {"steps": 2}, "model": MODEL, "records": {"path": "r.jsonl", "tokens_per_step": 4096}}
        return load_run_with(None, SFTConfig, joined | tables, "test", "run")

    assert work_of(sft(), 512) == Work(4096, 4096, 4096)
    assert work_of(sft(), 512, ranks=4).tokens == 1024
    assert work_of(sft(batch={"tokens_per_microbatch": 512}), 512).tokens == 512
