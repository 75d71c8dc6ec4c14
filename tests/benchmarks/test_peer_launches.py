"""The launches of benchmarks/rl_vs_peers.py: in the trainers' own keys, and back to the workload that they were written from."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from nmoe.config.commands import COMMANDS
from nmoe.config.launches.command import PROGRAMS, imported
from nmoe.config.launches.read import read_launch
from nmoe.config.loader import load_with

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from peer_launches import PEERS, Workload  # noqa: E402
from rl_vs_peers import main, own_configuration, written  # noqa: E402

WORK = Workload(Path("/models/qwen3-0.6b"), Path("/data"), 7, prompts=24, group=4, learning_rate=3e-6, clip=0.1, seed=5)
KEYS = {
    name.partition(" of ")[0]: keys
    for file in ("trainer_keys.json", "source_keys.json")
    for name, keys in json.loads((ROOT / "tests/config" / file).read_text()).items()
}
PROGRAM = {"verl": "verl ppo", "slime": "slime", "prime-rl": "prime-rl"}
# Megatron's and SGLang's own arguments, which slime's parser takes over.
FOREIGN = {
    "lr_decay_style", "optimizer", "attention_dropout", "hidden_dropout", "sglang_mem_fraction_static", "num_layers", "hidden_size",
    "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels", "vocab_size", "swiglu",
    "normalization", "norm_epsilon", "rotary_base", "qk_layernorm", "use_rotary_position_embeddings", "disable_bias_linear",
    "custom_rm_path",
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_a_launch_is_in_the_trainers_keys_and_imports_to_the_workload(name: str) -> None:
    launch = PEERS[name].launch(WORK)
    (program,) = [one for one in PROGRAMS if one.name == PROGRAM[name]]
    recorded = KEYS[PROGRAM[name]].keys() | (FOREIGN if name == "slime" else set()) | {"inference.parallel.tp"}
    assert {program.canonical(key) for key in read_launch(launch).given} - recorded == set()
    found = imported(launch)
    assert (found.program, found.unknown, found.refused) == (program, [], [])
    wanted = {
        "model.path": "/models/qwen3-0.6b", "run.steps": 7, "batch.prompts_per_step": 24, "batch.group_size": 4,
        "batch.tokens_per_microbatch": 16384, "sampling.max_new_tokens": 512, "optimizer.learning_rate": 3e-6,
        "optimizer.min_lr_ratio": 1.0, "algorithm.clip_high": 0.1, "algorithm.aggregation": "token",
    }  # fmt: skip
    assert {key: found.values.get(key) for key in wanted} == wanted
    assert found.values.get("batch.updates_per_step", 1) == 1
    assert found.values.get("algorithm.kl_coef", 0.0) == 0.0
    assert found.values.get("run.seed", 5) == 5


@pytest.mark.parametrize("name", PEERS)
def test_nmoes_side_is_a_configuration_of_the_same_numbers(name: str) -> None:
    tables = tomllib.loads(written(own_configuration(PEERS[name].launch(WORK), Path("/data"))))
    config = load_with(None, COMMANDS["rl train"], tables, "launch")
    assert (config.batch.prompts_per_step, config.batch.group_size, config.run.steps) == (24, 4, 7)  # type: ignore[attr-defined]
    assert config.algorithm.clip_high == 0.1  # type: ignore[attr-defined]
    assert config.engine.kind == "native"  # type: ignore[attr-defined]


# documented: python benchmarks/rl_vs_peers.py verl --model DIR --python VERL/bin/python
def test_without_a_gpu_one_message_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["prime-rl", "--model", str(tmp_path), "--python", "absent-python"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"rl_vs_peers: needs 2 CUDA GPUs (found 0); a checkpoint of Qwen3-0.6B in --model={tmp_path}; prime-rl: "
    )
    assert line.endswith("an environment `sums` in it")
