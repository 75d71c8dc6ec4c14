"""Every recipe on ranks: two take the steps of one process, number for number but for the rounding of fp32."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from forked_ranks import on_ranks
from recipes_on_ranks import run
from safetensors.torch import load_file

from nmoe.runs.ledger import read_metrics

# What only ranks that share experts have.
OF_RANKS = {"rdep_bytes", "time_dispatch_s"}

SUPERVISED = """
[run]
directory = "HERE"
steps = 3
threads = 1
[model]
path = "BASE"
numerics = "exact"
[records]
path = "RECORDS"
tokens_per_step = 512
held_out = 0.25
[[eval]]
every_steps = 2
"""
VERIFIER = """
[run]
name = "verifier"
directory = "HERE"
steps = 3
threads = 1
[model]
tokenizer = "TOKENIZER"
numerics = "exact"
[model.shape]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
experts = 4
experts_per_token = 2
expert_width = 32
context_tokens = 400
[verifier]
prm_source = "HERE/steps.jsonl"
held_out_share = 0.2
tokens_per_step = 512
[[eval]]
every_steps = 2
problems = 20
"""
SMALL = ["--run.steps=3", "--batch.prompts_per_step=4", "--batch.group_size=4", "--model.numerics=exact"]


@pytest.fixture
def jobs(workshop: Path, base: Path, tmp_path: Path) -> list[tuple[str, str, list[str]]]:
    rng = random.Random(3)
    digits = ["".join(rng.choices("0123456789", k=3)) for _ in range(60)]
    turns = [
        [
            {"role": "assistant", "content": thought, "channel": "analysis"},
            {"role": "assistant", "content": answer, "channel": "final"},
        ]
        for one in digits
        for thought, answer in (("back", one[::-1]), ("same", one + "0"))
    ]
    pairs = [
        {"prompt": f"Reverse: {one}", "chosen": turns[2 * i], "rejected": turns[2 * i + 1]}
        for i, one in enumerate(digits)
    ]
    conversations = [
        {"messages": [{"role": "user", "content": f"Reverse: {one}"}, *turns[2 * i]]} for i, one in enumerate(digits)
    ]
    steps = [
        {"prompt": f"Reverse: {one}", "completions": [one, one[::-1]], "labels": [bool(i % 3), True]}
        for i, one in enumerate(digits)
    ]
    for name, lines in (("pairs", pairs), ("conversations", conversations), ("steps", steps)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, records in (("sft", "conversations"), ("dpo", "pairs"), ("reward", "pairs")):
        text = SUPERVISED.replace("HERE", str(tmp_path)).replace("BASE", str(base))
        text = text.replace("RECORDS", f"{tmp_path}/{records}.jsonl").replace("[run]", f'[run]\nname = "{name}"', 1)
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "verifier.toml").write_text(
        VERIFIER.replace("HERE", str(tmp_path)).replace("TOKENIZER", f"{workshop}/tokenizer")
    )
    rl = (workshop / "rl.toml").read_text().replace("reverse.toml", f"{workshop}/reverse.toml")
    (tmp_path / "rl.toml").write_text(rl)

    def reinforce(name: str, *more: str) -> tuple[str, str, list[str]]:
        return "rl", f"{tmp_path}/rl.toml", [*SMALL, f"--run.name={name}", *more]

    corpus = (workshop / "corpus.jsonl").read_text()
    (tmp_path / "streamed.jsonl").write_text(corpus * (1_100_000 // len(corpus) + 1))

    def stream(name: str, *more: str) -> tuple[str, str, list[str]]:
        fixed = [f"--data.documents={tmp_path}/streamed.jsonl", "--data.shuffle_mb=1", "--data.workers=1"]
        return (
            "pretrain",
            str(workshop / "base.toml"),
            [*fixed, "--optimizer.schedule_steps=3", f"--run.name={name}", *more],
        )

    def three_steps(name: str) -> list[tuple[str, str, list[str]]]:
        return [stream(name, "--run.steps=2"), stream(name, "--run.steps=3", "--run.resume=true")]

    critic = ("--algorithm.advantage=gae", "--critic.learning_rate=1e-3")
    return [
        ("pretrain", str(workshop / "base.toml"), ["--run.steps=3", "--model.router_aux_loss_coef=0.01"]),
        ("pretrain", str(workshop / "base.toml"), ["--run.name=muon", "--run.steps=3", "--optimizer.kind=muon"]),
        stream("streamed", "--run.steps=3"),
        *three_steps("resumed"),
        *three_steps("moved"),
        *((name, f"{tmp_path}/{name}.toml", []) for name in ("sft", "dpo", "reward", "verifier")),
        ("verifier", f"{tmp_path}/verifier.toml", ["--run.name=judge", "--verifier.head=discriminative"]),
        reinforce("reference", "--algorithm.kl_coef=0.05", "--algorithm.reference_every_steps=2"),
        reinforce("divided", "--engine.expert_parallel=true"),
        reinforce("adapter", "--lora.rank=4"),
        reinforce("critic", *critic, "--batch.updates_per_step=2"),
        reinforce("shared", *critic, "--critic.shared=true"),
        reinforce("taught", f"--distillation.teacher={base}", "--distillation.coef=1.0"),
    ]


@pytest.mark.timeout(1000)
def test_two_ranks_are_one_process(jobs: list[tuple[str, str, list[str]]], tmp_path: Path) -> None:
    def below(where: str, name: str, path: str, more: list[str]) -> tuple[str, str, list[str]]:
        return name, path, [*more, f"--run.directory={tmp_path}/{where}"]

    def goes_on_elsewhere(job: tuple[str, str, list[str]]) -> bool:
        return "--run.name=moved" in job[2] and "--run.resume=true" in job[2]

    (tmp_path / "jobs.json").write_text(json.dumps([below("two", *job) for job in jobs if not goes_on_elsewhere(job)]))
    on_ranks(2, "recipes_on_ranks.py", str(tmp_path / "jobs.json"))
    # What two ranks began, one process ends.
    run([below("two", *job) for job in jobs if goes_on_elsewhere(job)])
    runs = run([below("one", *job) for job in jobs])
    for (recipe, *_), alone in zip(jobs, runs, strict=True):
        together = read_metrics(tmp_path / "two" / alone.name)
        assert len(together) == 3
        for ours, theirs in zip(together, read_metrics(alone), strict=True):
            assert ours.keys() - OF_RANKS == theirs.keys()
            # Also of what updates changed, on fewer sequences than ranks.
            assert recipe != "rl" or ours["skipped"] or (ours["update_kl"] > 0) == (ours["grad_norm"] > 0)
            for name, value in ours.items():
                if name not in OF_RANKS and not name.startswith("time") and not name.endswith("per_second"):
                    assert value == pytest.approx(theirs[name], rel=2e-4, abs=2e-6), (alone.name, ours["step"], name)
    # A corpus that is larger than its buffer: resumed, two ranks have the same batches, and the same numbers.
    streamed, resumed = (
        [
            # The first part of the resumed run is evaluated at its end.
            {name: row[name] for name in row if not re.search("time|per_second|held_out", name)}
            for row in read_metrics(tmp_path / "two" / run)
        ]
        for run in ("streamed", "resumed")
    )
    assert resumed == streamed
    # A renewed reference, of which each rank holds a part, is saved whole.
    ours, theirs = (
        load_file(tmp_path / where / "reference/checkpoints/latest/reference/model.safetensors")
        for where in ("two", "one")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
