"""The checks of a configuration before it runs: each on a case where it passes and on one that really has its fault."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import DENSE, FAMILIES, MOE

from nmoe.config.commands import COMMANDS, PretrainConfig, RLConfig, RunConfig, SFTConfig, VerifierConfig
from nmoe.config.kinds import command_for
from nmoe.config.loader import load_run_with
from nmoe.config.packaged import packaged_configurations
from nmoe.config.tables.model import OptimizerSection
from nmoe.config.tables.run import SinksSection
from nmoe.errors import UserError
from nmoe.learner.batch import Batch, token_weights
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.checkpoint import new_model
from nmoe.model.config import ModelConfig
from nmoe.plan.estimate import Size, estimate, kept_bytes, size_of
from nmoe.plan.rank_plan import gib, plan
from nmoe.plan.work import Work, prompts_of
from nmoe.preflight import resources
from nmoe.preflight.learning_rate import learning_rate
from nmoe.preflight.needs import sinks
from nmoe.preflight.preflight import preflight, refuse_to_start
from nmoe.preflight.resources import (
    checkpoints_at_once,
    directory,
    disk,
    first_checkpoint,
    memory,
    said_at_the_start,
    weights_fit,
)
from nmoe.recipes.run_loop import open_run
from nmoe.runs.directory import RunLock
from nmoe.runs.running import LOCK
from nmoe.runs.sinks import sinks as sinks_of_runs

SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 64}
TABLES: dict[str, Any] = {
    "run": {"steps": 100},
    "model": {"shape": {**SHAPE, "context_tokens": 64}, "tokenizer": "bytes"},
    "environment": {
        "env_id": "sort",
        "format": "boxed",
        "task_pool": {"type": "generated", "task_type": "sort"},
    },
    "sampling": {"max_new_tokens": 16},
    "batch": {"prompts_per_step": 4, "group_size": 4},
}


def rl(tmp_path: Path, eval: Sequence[dict[str, Any]] = (), **tables: dict[str, Any]) -> RLConfig:
    joined = {name: {**TABLES.get(name, {}), **tables.get(name, {})} for name in TABLES.keys() | tables.keys()}
    joined["eval"] = list(eval)
    joined["run"].setdefault("directory", str(tmp_path))
    return load_run_with(None, RLConfig, joined, "test", "run")


def pretraining(steps: int, warmup: int) -> PretrainConfig:
    tables = {
        "run": {"steps": steps},
        "model": TABLES["model"],
        "data": {"documents": "d.jsonl"},
        "optimizer": {"warmup_steps": warmup},
    }
    return load_run_with(None, PretrainConfig, tables, "test", "run")


@pytest.mark.parametrize(
    ("steps", "warmup", "status", "share"),
    [
        (100, 5, "ok", "100%"),
        (100, 66, "ok", "30%"),  # 20/66
        (100, 67, "fail", "30%"),  # 20/67 = 0.2985
        (100, 90, "fail", "22%"),
        (25, 5, "ok", "100%"),  # the cosine is at 24% by step 20, after its peak
        (10, 1000, "ok", "100%"),  # warm-up is shortened to 9 steps
        (1, 0, "ok", "100%"),
    ],
)
def test_the_learning_rate_of_the_first_20_steps(
    tmp_path: Path, steps: int, warmup: int, status: str, share: str
) -> None:
    check = learning_rate(rl(tmp_path, run={"steps": steps}, optimizer={"warmup_steps": warmup}))
    assert (check.status, check.text.split()[0]) == (status, share)
    if status == "fail":
        assert f"warmup_steps = {warmup} is too long; set 66 or less" in check.text


def test_a_long_supervised_run_has_5_percent_of_its_steps() -> None:
    """2,800 steps with a warm-up of 100 are the speedrun's base: 20% at step 20, and the whole peak at step 140."""
    assert learning_rate(pretraining(2800, 100)).text == "100% of its peak 0.0003 by step 140"
    assert learning_rate(pretraining(2800, 467)).status == "fail"  # 140/467 = 0.2998
    assert learning_rate(pretraining(200, 67)).status == "fail", "20 steps where 5% are fewer"


def test_a_run_that_is_extended_says_what_becomes_of_its_schedule(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000020"
    checkpoint.mkdir(parents=True)
    began = {"steps": 40, "schedule": {"total_steps": 40, "warmup_steps": 10}}  # 20 steps of 2 updates
    (checkpoint / "optimizer.json").write_text(json.dumps(began))

    def said(steps: int, schedule_steps: int = 0, **more: Any) -> str:
        optimizer = {"learning_rate": 1e-3, "warmup_steps": 5, "schedule_steps": schedule_steps}
        run = {"steps": steps, "resume": True}
        config = rl(tmp_path, run=run, optimizer=optimizer, batch={"updates_per_step": 2}, **more)
        check = learning_rate(config)
        assert check.status == "ok"
        return check.text

    assert said(20) == "goes on as the run began"
    assert said(30).startswith("goes on as it began, falling until optimizer step 40, and stays at 0.0001 after it")
    assert said(30, schedule_steps=30).startswith("from here on the schedule of 60 optimizer steps")
    assert said(30, schedule_steps=20) == "goes on as the run began", "as the config.toml of the extended run has it"
    # While the critic warms up, the policy's schedule waits: 23 steps of the run are 20 of the policy.
    critic: dict[str, Any] = {"critic": {"warmup_steps": 3, "path": "critic"}, "algorithm": {"advantage": "gae"}}
    assert said(23, **critic) == said(30, schedule_steps=23, **critic) == "goes on as the run began"


def test_what_a_start_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"warmup_steps": 90}
    with pytest.raises(UserError, match=r"^learning rate: 22% of its peak .*allow_slow_warmup = true"):
        refuse_to_start(rl(tmp_path, optimizer=slow))
    allowed = rl(tmp_path, optimizer=slow | {"allow_slow_warmup": True})
    refuse_to_start(allowed)
    assert learning_rate(allowed).status == "warn"
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"^disk: a checkpoint has .* 0.0 MiB free"):
        refuse_to_start(allowed)
    # A run that has begun cannot have another schedule.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    monkeypatch.undo()
    refuse_to_start(rl(tmp_path, run={"steps": 100, "resume": True}, optimizer=slow))


def test_no_packaged_configuration_is_refused(tmp_path: Path) -> None:
    checked = 0
    for one in packaged_configurations():
        if one.path is None or one.package != "nmoe":
            continue
        command = command_for(one.path)
        if said := re.search(rf"nmoe ([a-z ]+) {one.name}\b", one.path.read_text()):
            assert command == said[1]
        config: RunConfig = load_run_with(one.path, COMMANDS[command], {"run": {"directory": str(tmp_path)}}, "t", "r")
        assert learning_rate(config).status == "ok", one.name
        checked += 1
    assert checked > 15


def test_the_size_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """The bytes of the tensors that a learner saves after one step."""
    shape, ids = {**SHAPE, "context_tokens": 64, "experts": 4, "experts_per_token": 2, "expert_width": 16}, range(9)
    size = size_of(rl(tmp_path, model={"shape": shape, "tokenizer": "bytes"}))
    model = new_model(size.shape, torch.float32, "cpu").initialize(0)
    learner = Learner(model, OptimizerSection(), 1, 64)
    learner.forward_backward(batch_of([list(ids)]), cross_entropy).result()
    learner.optim_step().result()
    learner.save(tmp_path)
    tensors = [tensor for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).values()]
    saved = sum(tensor.nbytes for tensor in tensors)
    assert size.checkpoint == pytest.approx(saved, rel=0.001)  # AdamW counts the steps of each tensor
    low = Size(size.shape, size.device, torch.bfloat16, size.parameters, size.trained, adapts=False)
    assert (low.weights, low.optimizer) == (2 * size.parameters, 12 * size.parameters)


def batch_of(sequences: list[list[int]]) -> Batch:
    lengths = tuple(map(len, sequences))
    ids = torch.tensor([one for sequence in sequences for one in sequence])
    scored = torch.ones(len(ids), dtype=torch.bool)
    return Batch(lengths, ids, ids, scored, token_weights("token", scored, lengths))


@pytest.mark.parametrize(
    "shape", [DENSE, MOE, FAMILIES["deepseek_v3"], FAMILIES["qwen3"], FAMILIES["qwen3_next"], FAMILIES["mixtral"]]
)
def test_activations_are_what_autograd_keeps(shape: dict[str, Any]) -> None:
    """The estimate is rough: within 25% of the storage that the backward pass of real tokens is given, and a third where
    experts are so small that a CPU pads their rows."""
    config = ModelConfig(**shape)
    model = new_model(config, torch.float32, "cpu").initialize(0)
    learner = Learner(model, OptimizerSection(), 1, 2048)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    batch = batch_of([list(torch.randint(0, config.vocab_size, (60,)).tolist()) for _ in range(16)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.forward_backward(batch, cross_entropy).result()
    real = sum(storage.nbytes() for storage in kept.values())
    work = Work(batch.tokens, batch.tokens, batch.tokens)
    rough = 0.33 if shape is FAMILIES["mixtral"] else 0.25
    assert kept_bytes(config, work, 4, checkpointing=False) == pytest.approx(real, rel=rough)
    assert kept_bytes(config, work, 4, checkpointing=True) < 0.75 * real


def test_memory_against_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rl(tmp_path, algorithm={"kl_coef": 0.1})
    size = size_of(config)
    parts = estimate(config, size)
    assert parts["gradients"] * 2 == parts["optimizer"] == 8 * size.parameters
    assert parts["reference"] == parts["weights"] == 4 * size.parameters, "the reference is as large as the policy"
    # Two times 4 groups, as one refill is allowed, of a prompt of at most 64 - 16 tokens and 4 times 16 sampled ones, in blocks of
    # 16, with two more for each of 32 sequences, of 2 layers x 1 head x (16 + 16) numbers.
    assert parts["key-value cache"] == (8 * (48 + 4 * 16) // 16 + 2 * 32) * 16 * 2 * 32 * 4
    small = rl(tmp_path, engine={"max_sequences": 2})
    # What 2 sequences of 64 tokens fill at most, and a block more for each.
    assert estimate(small, size)["key-value cache"] == 2 * (64 // 16 + 1) * 16 * 2 * 32 * 4
    assert parts["sampled tokens"] == 4 * 4 * 16 * (2 * 8 + 32 + 24), (
        "an integer and a float of Python, and two places in lists"
    )
    needed = plan(config, 1, 1, prompts_of(config)).total
    assert needed < sum(parts.values()), "prompts are shorter than they may be"
    for total, free, status in [(needed - 1, needed - 1, "fail"), (needed, needed - 1, "warn"), (needed, needed, "ok")]:
        monkeypatch.setattr(resources, "memory_of", lambda device, total=total, free=free: (total, free))
        assert memory(config).status == status
    monkeypatch.setattr(resources, "memory_of", lambda device: (1, 1))
    said = memory(config).text
    helps = [said.find(key) for key in ("checkpoint_activations", "tokens_per_microbatch", "[lora]", "more ranks")]
    assert -1 not in helps
    assert helps == sorted(helps), "in the order of the guidelines"


@pytest.mark.parametrize(
    ("steps", "evaluated", "beside"), [(50, False, False), (51, False, True), (50, True, True), (0, False, True)]
)
def test_a_copy_for_a_checkpoint(tmp_path: Path, steps: int, evaluated: bool, beside: bool) -> None:
    """Saves happen every 50 steps, after the last one, and where an evaluation finds the best. What is saved between two steps lies
    beside their gradients and activations; after the last one it takes their memory, and while RL samples."""
    tables: dict[str, Any] = {"model": TABLES["model"], "batch": {"tokens_per_microbatch": 64}}
    tables["records"] = {"path": "r.jsonl", "tokens_per_step": 64, "held_out": 0.5 if evaluated else 0.0}
    tables["run"] = {"steps": steps, "directory": str(tmp_path)}
    if not steps:
        tables["records"]["epochs"] = 1.0
    if evaluated:
        tables["eval"] = [{"every_steps": 10}]
    config = load_run_with(None, SFTConfig, tables, "test", "run")
    size, parts = size_of(config), estimate(config, size_of(config))
    free = 0 if beside else parts["gradients"] + parts["activations"]
    assert parts.get("copy for a checkpoint", 0) == max(0, size.checkpoint - free)
    assert estimate(rl(tmp_path), size)["activations"] > size.checkpoint
    assert "copy for a checkpoint" not in estimate(rl(tmp_path), size)


def test_ranks_are_held_against_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of a machine each have half of its memory, and half of the weights."""
    config = rl(tmp_path)
    alone = estimate(config, size_of(config))
    monkeypatch.setattr(resources, "gang", lambda: SimpleNamespace(size=2, local_size=2))
    monkeypatch.setattr(resources, "memory_of", lambda device: (2**40, 2**39))
    check = memory(config)
    assert f"weights {gib(alone['weights'] / 2)}" in check.text
    assert check.text.endswith("on each of 2 ranks, 256.0 GiB free of 512.0 GiB on cpu")
    assert said_at_the_start(config)[-1] == "fits 512 GiB"


def test_a_run_says_what_it_takes_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line where it fits one process, else the table and what helps."""
    config = rl(tmp_path)
    needed = plan(config, 1, 1, prompts_of(config)).total
    monkeypatch.setattr(resources, "memory_of", lambda device: (needed, 0))
    (line,) = said_at_the_start(config)
    assert line.startswith(f"memory: about {gib(needed)} (weights ")
    assert line.endswith(f"), of {gib(needed)}")
    monkeypatch.setattr(resources, "memory_of", lambda device: (needed - 1, 0))
    assert "does not fit" in said_at_the_start(config)[-1]
    monkeypatch.setattr(resources, "memory_of", lambda device: (0, 0))
    assert said_at_the_start(config) == [line.removesuffix(f", of {gib(needed)}")]


def test_weights_that_no_free_memory_could_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 a parameter takes 4 bytes, its gradient 4 and AdamW 8. What is free now does not count, nor what is estimated."""
    config = rl(tmp_path, run={"steps": 100, "name": "one"})
    needed = 16 * size_of(config).parameters
    assert sum(estimate(config, size_of(config)).values()) > needed
    monkeypatch.setattr(resources, "memory_of", lambda device: (needed, 0))
    refuse_to_start(config)
    monkeypatch.setattr(resources, "memory_of", lambda device: (needed - 1, needed - 1))
    part = gib(needed // 4)
    with pytest.raises(UserError) as refused:
        refuse_to_start(config)
    assert refused.value.exit_code == 2
    assert str(refused.value) == (
        f"memory: weights {part}, gradients {part}, optimizer {gib(needed // 2)}, which alone do not fit the {gib(needed)} "
        "that cpu has in all; what helps: a smaller model, an adapter by [lora] or more ranks"
    )
    # Two ranks of one machine have half of its memory each, and half of all three.
    monkeypatch.setattr(resources, "gang", lambda: SimpleNamespace(size=2, local_size=2))
    monkeypatch.setattr(resources, "memory_of", lambda device: (needed, 0))
    assert weights_fit(config, size_of(config)).status == "ok"
    monkeypatch.setattr(resources, "memory_of", lambda device: (needed // 2, 0))
    assert weights_fit(config, size_of(config)).status == "fail"
    monkeypatch.setattr(resources, "memory_of", lambda device: (0, 0))
    assert weights_fit(config, size_of(config)).status == "ok", "where the memory is not known"


def test_weights_that_are_not_trained_need_no_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"run": {"steps": 1, "directory": str(tmp_path)}, "model": TABLES["model"]}
    for head, weight, bytes_each in (("discriminative", 0.0, 4), ("discriminative", 0.5, 16), ("generative", 0.0, 16)):
        section = {"prm_source": "prm800k/phase2", "head": head, "language_weight": weight}
        config = load_run_with(None, VerifierConfig, tables | {"verifier": section}, "test", "run")
        size = size_of(config)
        for lacking, status in ((0, "ok"), (1, "fail")):
            monkeypatch.setattr(resources, "memory_of", lambda device, n=size.parameters * bytes_each - lacking: (n, n))
            assert weights_fit(config, size).status == status


def test_the_limit_of_the_control_group(tmp_path: Path) -> None:
    assert resources._group_limit(tmp_path) == 2**63
    (tmp_path / "memory.max").write_text("max\n")
    assert resources._group_limit(tmp_path) == 2**63
    (tmp_path / "memory.max").write_text("4096\n")
    assert resources._group_limit(tmp_path) == 4096


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rl(tmp_path, checkpoint={"every_steps": 10, "keep": 3}, eval=[{"every_steps": 10}])
    size = size_of(config)
    assert checkpoints_at_once(config) == 5, "three that are kept, the best, and the one being written"
    unevaluated = rl(tmp_path, checkpoint={"every_steps": 50, "keep": 3})
    assert checkpoints_at_once(unevaluated) == 2, "at steps 50 and 100"
    needed = 5 * size.checkpoint
    for free, status in [(needed - 1, "fail"), (needed, "warn"), (needed + 5 * 2**30, "ok")]:
        monkeypatch.setattr(resources.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert disk(config, size).status == status
        assert first_checkpoint(config, size).status == "ok"


def test_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert directory(rl(tmp_path)).text == f"{tmp_path / 'run'} is free"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    with pytest.raises(UserError, match=r"exists and is not empty; pass --run.resume=true"):
        directory(rl(tmp_path))
    lock = RunLock(tmp_path / "run" / LOCK)
    with pytest.raises(UserError, match=rf"run: this run is being written by process {os.getpid()}; wait"):
        directory(rl(tmp_path))
    lock.release()
    assert directory(rl(tmp_path, run={"steps": 3, "resume": True})).text.endswith("is resumed")
    # Root, who may run the tests, can write everywhere.
    monkeypatch.setattr(resources.os, "access", lambda path, mode: Path(path) != tmp_path / "closed")
    (tmp_path / "closed").mkdir()
    closed = directory(rl(tmp_path, run={"directory": str(tmp_path / "closed"), "steps": 3}))
    assert (closed.status, closed.text.split()[0]) == ("fail", str(tmp_path / "closed"))


def test_the_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sinks(SinksSection()).text == "none but metrics.jsonl"
    monkeypatch.setattr(sinks_of_runs, "find_spec", lambda name: None)
    assert sinks(SinksSection(to=("csv",))).status == "ok"
    with pytest.raises(UserError, match=r"trackio: not installed; run: pip install 'trackio>=0\.43'"):
        sinks(SinksSection(to=("csv", "trackio")))
    monkeypatch.setattr(sinks_of_runs, "find_spec", lambda name: SimpleNamespace(origin="there"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = SinksSection(to=("wandb",))
    assert sinks(online).status == "fail"
    assert "run: wandb login" in sinks(online).text
    assert sinks(SinksSection(to=("wandb",), wandb_mode="offline")).text == "wandb"
    (tmp_path / "netrc").write_text("machine other.example login user password x\n")
    assert sinks(online).status == "fail"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert sinks(online).status == "ok"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8080")
    assert sinks(online).status == "fail", "the key is another host's"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert sinks(online).text == "wandb; metrics leave this machine for W&B at wandb.example"


@pytest.mark.parametrize("variable", ["TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"])
def test_trackio_sends_nothing_elsewhere_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setattr(sinks_of_runs, "find_spec", lambda name: SimpleNamespace(origin="there"))
    for name in sinks_of_runs._TRACKIO_REMOTE:
        monkeypatch.delenv(name, raising=False)
    local = SinksSection(to=("trackio",))
    assert sinks(local).text == "trackio"
    monkeypatch.setenv(variable, "someone/runs")
    with pytest.raises(UserError, match=rf"as {variable} in the environment asks; .* sinks.trackio_remote = true$"):
        sinks(local)
    agreed = SinksSection(to=("trackio",), trackio_remote=True)
    assert sinks(agreed).text == f"trackio; metrics leave this machine for {variable}"
    assert sinks(SinksSection(to=("csv",))).text == "csv"
    with pytest.raises(UserError, match=variable), open_run(rl(tmp_path, sinks={"to": ["trackio"]}), threads=1):
        pass
    assert list(tmp_path.iterdir()) == [], "refused before anything is written"


def test_every_check_is_one_line(tmp_path: Path) -> None:
    found = {check.name: check for check in preflight(rl(tmp_path))}
    assert {check.status for check in found.values()} <= {"ok", "warn"}
    assert all("\n" not in str(check) for check in found.values())
    assert "4 prompts x 4 completions = 16 samples" in found["batch"].text
    assert found["sinks"].text == "none but metrics.jsonl"
    missing = rl(tmp_path, model={"path": str(tmp_path / "nothing"), "shape": None})
    (failed,) = [check for check in preflight(missing) if check.status == "fail"]
    assert (failed.name, str(failed).count("neither a checkpoint")) == ("model", 1)
