"""Every recipe on an accelerator, driven by the fake device: nothing it computes with is left on the host, and its numbers are
those of a run on the CPU."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeKind, fake_device

from nmoe.config.commands import (
    DPOConfig,
    PretrainConfig,
    RewardConfig,
    RLConfig,
    SelfplayConfig,
    SFTConfig,
    VerifierConfig,
)
from nmoe.config.loader import load_run
from nmoe.errors import UserError
from nmoe.model.checkpoint import load_model, save_model
from nmoe.model.transformer import Transformer
from nmoe.recipes.dpo import dpo
from nmoe.recipes.pretrain import pretrain
from nmoe.recipes.reward_model import train_reward_model
from nmoe.recipes.sft import sft
from nmoe.rl.launch import train
from nmoe.runs.ledger import read_metrics
from nmoe.runs.provenance import read_provenance
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.selfplay.loop import selfplay
from nmoe.text.tokenizer import Tokenizer
from nmoe.verifier.train import verifier

REINFORCED = """
[environment]
path = "HERE/reverse.toml"
[sampling]
max_new_tokens = 8
[batch]
prompts_per_step = 3
group_size = 3
"""
RECORDS = """
[records]
path = "HERE/records.jsonl"
tokens_per_step = 200
held_out = 0.25
[[eval]]
every_steps = 2
"""
PAIRS = RECORDS.replace("records.jsonl", "pairs.jsonl").replace("200", "400")
LORA = "[lora]\nrank = 4\n"
SELFPLAY = """
[selfplay]
problem_source = "deepseek_math_v2_inputs:HERE/inputs.json"
max_problems = 4
verifications = 2
meta_verifications = 1
confirmations = 1
train = true
rounds = 1
generator_steps = 1
verifier_epochs = 1
[sampling]
max_new_tokens = 10
[batch]
prompts_per_step = 2
group_size = 2
"""

Recipe = Callable[[Any], Path]
RECIPES: dict[str, tuple[Recipe, type[Any], str]] = {
    "pretrain": (
        pretrain,
        PretrainConfig,
        '[data]\ndocuments = "HERE/corpus.jsonl"\nheld_out_documents = 10\ntokens_per_step = 256\n[[eval]]\nevery_steps = 2\n',
    ),
    "sft": (sft, SFTConfig, RECORDS),
    "sft of an adapter": (sft, SFTConfig, LORA + RECORDS),
    "dpo": (dpo, DPOConfig, PAIRS),
    "reward": (train_reward_model, RewardConfig, PAIRS),
    "verifier": (
        verifier,
        VerifierConfig,
        '[verifier]\nprm_source = "HERE/steps.jsonl"\nheld_out_share = 0.25\nhead = "discriminative"\nlanguage_weight = 1.0\n'
        "tokens_per_step = 256\n[[eval]]\nevery_steps = 2\nproblems = 4\n",
    ),
    "grpo with a reference": (
        train,
        RLConfig,
        "[algorithm]\nkl_coef = 0.1\n[[eval]]\nevery_steps = 2\nproblems = 2\n" + REINFORCED,
    ),
    "grpo of an adapter": (train, RLConfig, LORA + "[algorithm]\nkl_coef = 0.1\n" + REINFORCED),
    "grpo, nucleus": (train, RLConfig, REINFORCED.replace("[batch]", "top_p = 0.9\ntop_k = 20\n[batch]")),
    "ppo": (train, RLConfig, '[algorithm]\nadvantage = "gae"\n[critic]\n' + REINFORCED),
    "ppo on one trunk": (train, RLConfig, '[algorithm]\nadvantage = "gae"\n[critic]\nshared = true\n' + REINFORCED),
    "distillation": (train, RLConfig, '[distillation]\nteacher = "HERE/teacher"\n' + REINFORCED),
    "selfplay": (selfplay, SelfplayConfig, SELFPLAY),
}
RUN = """
[run]
name = "run"
directory = "RUNS"
steps = 2
threads = 1
[model]
path = "HERE/base"
[optimizer]
learning_rate = 1e-3
"""


@pytest.fixture(scope="module")
def here(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base that knows a little, as `base` and as `teacher`, and what the recipes read."""
    here = tmp_path_factory.mktemp("devices")
    for file in ("corpus.jsonl", "reverse.toml"):
        (here / file).write_bytes((workshop / file).read_bytes())
    for name, steps in (("base", 60), ("teacher", 1)):
        overrides = [f"--run.directory={here}", f"--run.name={name}", f"--run.steps={steps}"]
        rate = "--optimizer.learning_rate=5e-3"
        pretrain(load_run(workshop / "base.toml", PretrainConfig, [*overrides, rate, "--model.device=cpu"]))
    # Roles read long prompts.
    checkpoint, roles = resolve_checkpoint(here / "base"), here / "roles"
    roles.mkdir()
    shape = load_model(checkpoint).config.model_copy(update={"context_tokens": 1200})
    save_model(Transformer(shape).initialize(0), roles)
    Tokenizer.load(checkpoint).save(roles)
    records, pairs, labelled = [], [], []
    for number in (number for number in range(213, 231) if number % 10 != 2):
        back, same = str(number)[::-1], str(number)
        right, wrong = (
            [
                {"role": "assistant", "content": "back", "channel": "analysis"},
                {"role": "assistant", "content": answer, "channel": "final"},
            ]
            for answer in (back, same)
        )
        records.append({"messages": [{"role": "user", "content": f"Reverse: {number}"}, *right]})
        pairs.append({"prompt": f"Reverse: {number}", "chosen": right, "rejected": wrong})
        labelled.append({"prompt": f"Reverse: {number}", "completions": ["back", same], "labels": [True, False]})
    inputs = [
        {"id": str(n), "question": f"Reverse: {n}", "answer": "", "contest": "digits", "problem_idx": str(n)}
        for n in range(210, 214)
    ]
    for file, rows in (("records", records), ("pairs", pairs), ("steps", labelled)):
        (here / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "inputs.json").write_text(json.dumps(inputs))
    return here


Take = Callable[..., Path]


@pytest.fixture
def take(here: Path, tmp_path: Path) -> Take:
    """Takes the two steps of a recipe's run, and returns its directory."""

    def take(name: str, *overrides: str) -> Path:
        recipe, schema, text = RECIPES[name]
        file = tmp_path / "run.toml"
        file.write_text((RUN + text).replace("HERE", str(here)).replace("RUNS", str(tmp_path)))
        if schema is SelfplayConfig:  # its steps follow from its rounds
            file.write_text(file.read_text().replace("steps = 2\n", "", 1).replace("/base", "/roles"))
        return recipe(load_run(file, schema, overrides))

    return take


@pytest.fixture
def device() -> Iterator[FakeKind]:
    with fake_device() as kind:
        yield kind


def figures(run: Path) -> list[Mapping[str, float]]:
    """The numbers of every step, without those of time."""
    return [
        {
            name: value
            for name, value in row.items()
            if isinstance(value, float | int) and not name.startswith("time_") and "per_second" not in name
        }
        for row in read_metrics(run)
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_the_same_steps_on_a_device(take: Take, name: str) -> None:
    on_cpu = take(name, "--run.name=cpu", "--model.device=cpu")
    with fake_device() as kind:
        on_device = take(name, "--run.name=cuda", "--model.device=cuda", "--model.precision=float32")
        assert kind.calls["prepare"] == 1
    expected, found = figures(on_cpu), figures(on_device)
    assert len(expected) >= 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-5, nan_ok=True)
    assert read_provenance(on_device)["device"] == "cuda:0 (a test's)"


def test_a_device_gives_the_precision_that_is_left_open_and_a_run_may_go_on_elsewhere(take: Take) -> None:
    with fake_device():
        first = take("sft", "--run.steps=1", "--checkpoint.every_steps=1")
    assert tomllib.loads((first / "config.toml").read_text())["model"]["precision"] == "bfloat16"
    assert load_model(resolve_checkpoint(first), torch.bfloat16).embedding.weight.is_cpu
    again = take("sft", "--run.steps=2", "--run.resume=true", "--model.device=cpu")
    log = (again / "log.txt").read_text()
    assert "on cpu, and before on cuda:0 (a test's): numbers repeat only on one device" in log
    # Its own default on a CPU would be float32, which the optimizer's state is not of.
    assert tomllib.loads((again / "config.toml").read_text())["model"]["precision"] == "bfloat16"
    assert [row["step"] for row in read_metrics(again)] == [1, 2]
    assert read_provenance(again)["resumed"][0]["device"] == "cpu"


def test_a_run_on_a_device_that_is_not_there_ends_before_it_begins(
    take: Take, tmp_path: Path, device: FakeKind
) -> None:
    device.devices = 0
    with pytest.raises(
        UserError, match=r'^\[model\] device = "cuda": no CUDA device was found; this one is a test\'s, or'
    ):
        take("sft", "--model.device=cuda")
    assert not (tmp_path / "run").exists()
    assert read_provenance(take("sft"))["device"] == "cpu"  # auto
