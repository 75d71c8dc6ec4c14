"""Bad input ends with one clear message and its exit code, no traceback, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Result
from safetensors.torch import load_file, save_file

from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

Nmoe = Callable[..., Result]

JSONL = """
[run]
steps = 2
threads = 1
[model]
path = "BASE"
[environment]
env_id = "pool"
task_pool = { type = "jsonl", path = "pool.jsonl", task_type = "TASK", problem_field = "question" }
[sampling]
max_new_tokens = 24
[batch]
prompts_per_step = 4
group_size = 2
"""
GOOD = {"question": "Reverse: 12", "answer": "21"}


def refused(result: Result, *parts: str, code: int = 2) -> None:
    """Checks that a command ended as bad input does; its message has to hold the parts."""
    assert result.code == code, result
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err
    assert result.err.count("error: ") == 1


@pytest.fixture
def pool(base: Path, tmp_path: Path) -> Callable[..., str]:
    """Writes pool.jsonl and the configuration of a run on it, whose name is returned."""

    def pool(*lines: object, task: str = "reverse") -> str:
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "pool.jsonl").write_text("".join(line + "\n" for line in text))
        (tmp_path / "x.toml").write_text(JSONL.replace("BASE", str(base)).replace("TASK", task))
        return "x.toml"

    return pool


def nothing_started(tmp_path: Path) -> bool:
    return not (tmp_path / "runs").exists()


def test_every_mistake_of_a_configuration_in_one_message(command: Nmoe, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        '[run]\nsteps = "ten"\n[model]\npath = "nowhere"\n[environment]\nenv_id = "e"\n'
        'task_pool = { type = "generated", task_type = "reverse", dificulty = [3, 3] }\n[optimizer]\nlearnng_rate = 0.1\n'
    )
    result = command("rl", "train", "x.toml", "--sampling.temperature=warm")
    refused(result, "error: 4 problems")
    assert result.out == ""
    assert result.err.splitlines()[1:] == [
        'x.toml:2: [run] steps = "ten": expected an integer, got a string',
        "x.toml:7: [environment.task_pool] dificulty = [3, 3]: unknown key; did you mean 'difficulty'?",
        "x.toml:9: [optimizer] learnng_rate = 0.1: unknown key; did you mean 'learning_rate'?",
        "--sampling.temperature=warm: expected a number, got a string",
    ]
    assert nothing_started(tmp_path)


def test_missing_files(nmoe: Nmoe, pool: Callable[..., str], tmp_path: Path) -> None:
    refused(nmoe("rl", "train", "nowhere.toml"), "nowhere.toml: no such file")
    refused(nmoe("rl", "train", pool(GOOD), "--model.path=nowhere"), "nowhere: neither a checkpoint")
    refused(
        nmoe("rl", "train", pool(GOOD), "--model.path=Qwen/Qwen3-0.6B"),
        "--model.path=Qwen/Qwen3-0.6B: neither a checkpoint",
        "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B",
    )
    refused(
        nmoe("rl", "train", "sort_grpo"),
        'sort_grpo.toml:9: [model] path = "runs/speedrun/base": neither a checkpoint',
        "; `nmoe speedrun --scratch` makes it, or",
    )
    # A configuration with a shape has the tokenizer alone from there.
    refused(
        nmoe("pretrain", "code_fix_base"),
        'tokenizer = "runs/code_fix/tokenizer": neither a tokenizer',
        "; a command in the first lines of the configuration that asks for it makes it",
    )
    (tmp_path / "pool.jsonl").unlink()
    refused(
        nmoe("rl", "train", "x.toml"),
        'x.toml:9: [environment.task_pool] path = "pool.jsonl": cannot be read: No such file',
    )
    for verb in (["eval", "nowhere", "x.toml"], ["chat", "nowhere"]):
        refused(nmoe(*verb), "nowhere: neither a checkpoint")
    refused(nmoe("report", "nowhere"), "nowhere: not the directory of a run")
    assert nothing_started(tmp_path)


def test_checkpoints_that_are_not_what_they_should_be(
    nmoe: Nmoe, base: Path, pool: Callable[..., str], tmp_path: Path
) -> None:
    config = json.loads((resolve_checkpoint(base) / "config.json").read_text())
    for name, changes, message in [
        ("bert", {"model_type": "bert"}, "'bert' is not a family nmoe knows; the nearest name is "),
        (
            "wider",
            {"hidden_size": 96, "head_dim": 24},
            "embedding.weight has shape [294, 64], config.json asks for [294, 96]",
        ),
        ("dense", {"experts": 0, "intermediate_size": 64}, "is not part of this architecture"),
        ("strange", {"rotary": 1}, "unknown keys rotary"),
    ]:
        shutil.copytree(resolve_checkpoint(base), tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
        refused(nmoe("rl", "train", pool(GOOD), f"--model.path={name}"), f"{name}/", message)
    torn = tmp_path / "wider" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    (tmp_path / "wider" / "config.json").write_text(json.dumps(config))
    refused(nmoe("chat", "wider"), "wider/model.safetensors: torn or not a safetensors file")
    Tokenizer.train(["abcdefg hijklmnop qrstuvw xyz reverse the digits of this number"] * 9, 400).save(tmp_path / "big")
    vocabulary = Tokenizer.load(tmp_path / "big").vocab_size
    assert vocabulary > config["vocab_size"]
    refused(
        nmoe("rl", "train", "x.toml", "--model.tokenizer=big"),
        f"big: the tokenizer has {vocabulary} ids, the embedding of {base} only {config['vocab_size']}",
    )
    assert nothing_started(tmp_path)


def test_checkpoints_of_other_places_that_can_not_be_read(
    command: Nmoe, nmoe: Nmoe, base: Path, tmp_path: Path
) -> None:
    source = resolve_checkpoint(base)
    tensors = load_file(source / "model.safetensors")
    name = "blocks.1.ffn.down"
    index = {"weight_map": {name: "../elsewhere.safetensors"}}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for directory in ("poisoned", "indexed", "lost"):
        shutil.copytree(source, tmp_path / directory)
    tensors[name][0, 0, 0] = float("nan")
    save_file(tensors, tmp_path / "poisoned" / "model.safetensors")
    (tmp_path / "indexed" / "model.safetensors").unlink()
    (tmp_path / "indexed" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "lost" / "model.safetensors").unlink()
    index["weight_map"] = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    (tmp_path / "lost" / "model.safetensors.index.json").write_text(json.dumps(index))
    messages = {
        "poisoned": ("error: poisoned/model.safetensors: blocks.1.ffn.down holds NaN or infinite values",),
        "indexed": ("error: indexed/model.safetensors.index.json: ", "'../elsewhere.safetensors'", name),
        "lost": (
            "error: lost/model-00001-of-00002.safetensors: no such file, though model.safetensors.index.json names",
        ),
        "adapter": ("error: adapter/adapter_config.json: peft_type = None is not supported",),
    }
    for directory, message in messages.items():
        refused(nmoe("export", directory, "out"), *message)
        refused(nmoe("chat", directory), *([] if directory == "adapter" else message))
    refused(command("export", "poisoned", "out"), *messages["poisoned"])
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_adapters_that_can_not_be_loaded(command: Nmoe, nmoe: Nmoe, workshop: Path, base: Path, tmp_path: Path) -> None:
    train = ("rl", "train", workshop / "rl.toml", "--run.directory=runs", "--run.steps=1")
    small = ("--batch.prompts_per_step=2", "--batch.group_size=2")
    made = nmoe(*train, *small, "--lora.rank=2", "--run.directory=made")
    assert (made.code, made.err) == (0, "")
    good = resolve_checkpoint(tmp_path / "made" / "rl")
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    for directory in ("poisoned", "cut", "wide"):
        shutil.copytree(good, tmp_path / directory)
    tensors = load_file(good / "adapter_model.safetensors")
    save_file(tensors | {name: tensors[name] * float("nan")}, tmp_path / "poisoned" / "adapter_model.safetensors")
    save_file(tensors | {name: tensors[name][:, 1:].clone()}, tmp_path / "wide" / "adapter_model.safetensors")
    cut = (good / "adapter_model.safetensors").read_bytes()[:-100]
    (tmp_path / "cut" / "adapter_model.safetensors").write_bytes(cut)
    messages = {
        "poisoned": (f"poisoned/adapter_model.safetensors: {name} holds NaN or infinite values",),
        "cut": ("cut/adapter_model.safetensors: torn",),
        "wide": ("wide/adapter_model.safetensors: an adapter for another base: ", f"{name} has shape [2, 63]"),
        "nowhere": ("nowhere: neither a checkpoint",),
    }
    for directory, message in messages.items():
        refused(nmoe(*train, f"--lora.path={directory}"), *message)
    refused(command(*train, "--lora.path=wide"), *messages["wide"])
    refused(
        nmoe(*train, "--lora.rank=1000"), "lora.rank = 1000 is more than 32, the smallest dimension", "self_attn.k_proj"
    )
    refused(nmoe("plan", workshop / "rl.toml", "--lora.rank=1000"), "lora.rank = 1000 is more than 32, the smallest")
    refused(nmoe(*train, '--lora.targets=["q_b_proj"]'), "lora target 'q_b_proj' is not in this model", "did you mean")
    refused(nmoe("chat", "poisoned"), *messages["poisoned"])
    assert nothing_started(tmp_path)


def test_pools_and_documents_that_can_not_be_read(
    command: Nmoe, nmoe: Nmoe, workshop: Path, pool: Callable[..., str], tmp_path: Path
) -> None:
    refused(command("rl", "train", pool(GOOD, '{"question": ')), "pool.jsonl:2: not JSON")
    refused(nmoe("rl", "train", pool()), "pool.jsonl: no records; a task pool needs at least one problem")
    refused(nmoe("rl", "train", pool(GOOD, GOOD | {"answer": "two"})), "pool.jsonl:2: the gold answer", "'two'")
    unreadable = {"question": "1 + 1", "answer": "two"}
    refused(nmoe("rl", "train", pool(unreadable, task="arithmetic")), "pool.jsonl:1: ", "'two'")
    (tmp_path / "d.jsonl").write_text('{"text": "fine"}\n{"txet": "typo"}\n')
    pretrain = ("pretrain", workshop / "base.toml", "--data.documents=d.jsonl", "--run.directory=runs")
    refused(nmoe(*pretrain), "d.jsonl:2: neither `text`")
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    held_out = "--data.held_out_documents="
    for count in (3, 4, 7):
        refused(nmoe(*pretrain, f"{held_out}{count}"), "d.jsonl: ", "data.held_out_documents")
    assert nothing_started(tmp_path)


def test_a_prompt_longer_than_the_context(command: Nmoe, nmoe: Nmoe, pool: Callable[..., str], tmp_path: Path) -> None:
    long = {"question": f"Reverse: {'12' * 40}", "answer": "21" * 40}
    result = command("rl", "train", pool(long, long))
    refused(result, "problem pool/", "its prompt of", "the model's context of 64", "lower sampling.max_new_tokens")
    assert nothing_started(tmp_path)
    result = command("rl", "train", pool(GOOD, GOOD, GOOD, long))
    assert result.code == 0
    assert (
        "1 of 4 problems are left out: their prompts have more than 40 tokens, and with completions of 24 they"
        in result.out
    )
    (tmp_path / "environment.toml").write_text(
        'env_id = "pool"\n[task_pool]\ntype = "jsonl"\npath = "pool.jsonl"\ntask_type = "reverse"\nproblem_field = "question"\n'
    )
    base = (tmp_path / "x.toml").read_text().split('path = "')[1].split('"')[0]
    refused(
        nmoe("eval", base, "environment.toml", "--problems=2"),
        "environment pool: a prompt of",
        "tokens leaves no room in the model's context of 64",
    )


def test_a_generated_prompt_that_outgrows_the_context(nmoe: Nmoe, workshop: Path, base: Path, tmp_path: Path) -> None:
    # The first problem fits; those of the endless pool that do not are passed over as they come, and counted.
    difficulty = "--environment.task_pool.difficulty=[3, 60]"
    flags = ("--run.steps=2", "--optimizer.warmup_steps=0", "--eval=[]")
    result = nmoe("rl", "train", workshop / "rl.toml", "--run.directory=runs", "--run.seed=2", difficulty, *flags)
    assert result.code == 0, result
    steps = [json.loads(line) for line in (tmp_path / "runs" / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert all(step["problems_left_out"] > 0 for step in steps)


def test_a_run_is_not_written_over_and_not_resumed_as_another(nmoe: Nmoe, workshop: Path, tmp_path: Path) -> None:
    verb = (
        "pretrain",
        workshop / "base.toml",
        "--run.directory=runs",
        "--run.steps=1",
        "--optimizer.warmup_steps=0",
        "--eval=[]",
    )
    assert nmoe(*verb).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    refused(nmoe(*verb), "runs/base: exists and is not empty; pass --run.resume=true", "--run.name=NAME")
    refused(
        nmoe(*verb, "--run.resume=true", "--optimizer.learning_rate=0.5"),
        "optimizer.learning_rate: 0.002 in the run, 0.5 now",
    )
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == before


def test_greedy_evaluation_of_several_samples(nmoe: Nmoe, workshop: Path, base: Path) -> None:
    result = nmoe("eval", base, workshop / "reverse.toml", "--samples=2")
    refused(
        result, "temperature 0 gives the same completion 2 times: use 1 sample, a temperature above 0, or the mode "
    )
