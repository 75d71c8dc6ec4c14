"""Checks of found faults: work that a command deleted, a start that could not be repeated, and a checkout under any name."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from found import Result, check

TINY = """
[run]
steps = 3
threads = 1
[model]
tokenizer = "bytes"
shape = { hidden_size = 32, layers = 1, heads = 2, kv_heads = 2, head_dim = 16, intermediate_size = 64, context_tokens = 64 }
[records]
path = "pairs.jsonl"
tokens_per_step = 64
[optimizer]
learning_rate = 1e-3
"""


def _nmoe(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """The exit code of a command, what it printed, and what it said of errors."""
    code = "from nmoe.cli import main; raise SystemExit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def _tiny() -> None:
    Path("tiny.toml").write_text(TINY)
    lines = [json.dumps({"prompt": f"{n} + 1 =", "completion": f" {n + 1}"}) for n in range(40)]
    Path("pairs.jsonl").write_text("\n".join(lines) + "\n")


def _speedrun(*arguments: str) -> list[str]:
    """`nmoe speedrun`, with stages that each leave one file or run and take no time. Returns the directories that it leaves, or the
    error."""
    code = """
import sys
from importlib import import_module
from pathlib import Path
try:
    pipeline = import_module("nmoe.speedrun.scratch").Scratch
    promised = import_module(pipeline.__base__.__module__)
except ImportError:  # 72e30f8 has one pipeline
    promised = import_module("nmoe.speedrun.speedrun")
    pipeline = promised.Pipeline
def leaves(*names):
    def work(self):
        for name in names:
            Path("runs/speedrun", name).mkdir(parents=True, exist_ok=True)
        return {}
    return work
names = {"tokenizer_and_corpus": ["tokenizer"], "added_data": [], "base": ["base"], "midtraining": ["midtraining"], "fine_tuning":
         ["sft"], "reinforcement_learning": ["rl"], "verifier": ["verifier"], "roles": ["selfplay_roles"], "round": ["selfplay"],
         "evaluation": []}
for method, made in names.items():
    setattr(pipeline, method, leaves(*made))
pipeline.report = lambda self, done: {}
promised.shortfalls = lambda *whatever: []
from nmoe.cli import main
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, "speedrun", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        return [ended.stderr.strip().splitlines()[-1]]
    return sorted(path.name for path in Path("runs/speedrun").iterdir() if path.is_dir())


def _own_run(name: str) -> Any:
    from nmoe.runs.directory import RunDirectory

    text = '[run]\nname = "mine"\nsteps = 1\n'
    return RunDirectory.create(Path("runs/speedrun", name), text, {"argv": ["nmoe", "sft", "x"]}, resume=False)


@check(0, "a test of a device's waits in a checkout called nmoe", "1 passed")
def checkout_called_nmoe() -> Result:
    import nmoe

    tree, copy = Path(nmoe.__file__).parents[1], Path("with a space/nmoe")
    for part in ("nmoe", "tests"):
        shutil.copytree(tree / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(tree / "pyproject.toml", copy)
    test = "tests/engine/test_waiting.py::test_a_decode_step_waits_a_fixed_number_of_times[plain]"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore", test],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy.absolute())},
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.search(r"\d+ (passed|failed|error)", ended.stdout.splitlines()[-1])
    return said[0] if said else f"exit code {ended.returncode}", ended.returncode == 0


@check(0, "errors that asyncio prints while garbage is collected, after the engine failed under 600 requests", "0")
def engine_error_printed_later() -> Result:
    import asyncio
    import logging

    import torch

    from nmoe.engine.api import Request
    from nmoe.engine.native.engine import NativeEngine
    from nmoe.engine.native.llm_engine import LLMEngine
    from nmoe.model.checkpoint import new_model
    from nmoe.model.config import ModelConfig
    from nmoe.types import Sampling

    found: list[str] = []
    logging.getLogger("asyncio").addFilter(lambda record: bool(found.append(record.getMessage())))
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
    config = ModelConfig(vocab_size=64, context_tokens=64, **shape)
    engine = NativeEngine(new_model(config, torch.float32, torch.device("cpu")).initialize(0), 4)
    step, steps = LLMEngine.step, iter([True, True])

    def breaking(self: LLMEngine) -> Any:
        return step(self) if next(steps, False) else [][1]

    LLMEngine.step = breaking  # type: ignore[method-assign]

    async def everyone() -> None:
        asked = [Request((1, 2, 3), 1, Sampling(4), str(n)) for n in range(600)]
        await asyncio.gather(*map(engine.generate, asked))

    with contextlib.suppress(IndexError):
        engine.run(everyone())
    gc.collect()
    late = sum("never retrieved" in message for message in found)
    return str(late), late == 0


@check(1, "the user's run beside two speedruns, and one that is being written", "mine kept; the other refused and kept")
def speedrun_beside_own_runs() -> Result:
    _speedrun()
    _own_run("mine").close()
    kept = "mine" in _speedrun()
    running = _own_run("verifier")
    said = _speedrun("--full")
    there = Path("runs/speedrun/verifier/config.toml").exists()
    running.close()
    refused = said[0].startswith("error: ") and "is being written by process" in said[0]
    first = "mine kept" if kept else "mine deleted"
    return f"{first}; the other {'refused' if refused else 'not refused'} and {'kept' if there else 'deleted'}", (
        kept and refused and there
    )


@check(
    1,
    "a plain speedrun extended by --full --resume, and a run of the user's under a stage's name",
    "extended; named and kept",
)
def speedrun_extended() -> Result:
    _speedrun()
    extended = {"base", "rl", "sft", "verifier"} <= set(_speedrun("--full", "--resume"))
    for path in sorted(Path("runs/speedrun").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    _speedrun()
    _own_run("verifier").close()
    said = _speedrun("--full", *(["--resume"] if extended else []))
    kept = Path("runs/speedrun/verifier/config.toml").exists()
    named = len(said) == 1 and "--replace" in said[0]
    return f"{'extended' if extended else 'not extended'}; {'named and kept' if named and kept else 'deleted'}", (
        extended and named and kept
    )


@check(1, "the remedy that `nmoe selfplay selfplay` prints beside a speedrun", "nmoe speedrun --full --resume")
def selfplay_remedy() -> Result:
    Path("runs/speedrun").mkdir(parents=True)
    Path("runs/speedrun/stages.json").touch()
    _, _, said = _nmoe("selfplay", "selfplay")
    remedy = said.partition("; `")[2].partition("`")[0]
    return remedy or said.strip()[-120:], remedy == "nmoe speedrun --full --resume"


@check(2, "METRICS_LOG_DIR empty or run.directory, and a start after it", "exit codes 0, 0 and 0, metrics in the run")
def metrics_in_the_runs_directory() -> Result:
    _tiny()
    codes = [_nmoe("sft", "tiny.toml", "--run.name=empty", METRICS_LOG_DIR="")[0]]
    for _ in range(2):
        codes.append(_nmoe("sft", "tiny.toml", "--run.name=own", METRICS_LOG_DIR="runs")[0])
        if not codes[-1]:
            codes.append(_nmoe("sft", "tiny.toml", "--run.name=own2", METRICS_LOG_DIR="runs")[0])
            break
    there = all(Path("runs", name, "metrics.jsonl").is_file() for name in ("empty", "own", "own2"))
    return f"exit codes {', '.join(map(str, codes))}{', metrics in the run' if there else ''}", (
        there and codes == [0, 0, 0]
    )


@check(2, "--run.resume=true with a misspelt name", "exit code 2, names the run that is meant, starts nothing")
def resume_of_a_misspelt_name() -> Result:
    _tiny()
    _nmoe("sft", "tiny.toml", "--run.name=attempt")
    code, _, said = _nmoe("sft", "tiny.toml", "--run.name=atempt", "--run.resume=true")
    named, started = "runs/attempt " in said, Path("runs/atempt").exists()
    line = f"exit code {code}, {'names the run that is meant' if named else 'names nothing'}"
    return f"{line}, {'starts it' if started else 'starts nothing'}", code == 2 and named and not started


@check(
    3,
    "the config.toml of a run of 3 steps that was resumed for 6, run anew",
    "the same 6 learning rates; runs diff tells it",
)
def extended_run_repeated() -> Result:
    from nmoe.runs.comparison import diff_runs
    from nmoe.runs.ledger import read_metrics

    _tiny()
    for more in ((), ("--run.steps=6", "--run.resume=true")):
        _nmoe("sft", "tiny.toml", "--run.name=a", *more)
    _nmoe("sft", "runs/a/config.toml", "--run.name=b", "--run.resume=false")
    rates = [[row["learning_rate"] for row in read_metrics(Path("runs", name))] for name in "ab"]
    told = any("run.steps 3 -> 6" in line for line in diff_runs("runs/a", "runs/b"))
    scheduled = tomllib.loads(Path("runs/a/config.toml").read_text())["optimizer"]["schedule_steps"]
    same = rates[0] == rates[1] and len(rates[0]) == 6
    line = "the same 6 learning rates" if same else f"learning rate of step 4: {rates[0][3]:.3g} and {rates[1][3]:.3g}"
    return f"{line}; schedule_steps {scheduled}; runs diff {'tells it' if told else 'is silent'}", same and told


@check(31, "pip with the extra trackio and constraints.txt; the documented line", "resolved; with the tested versions")
def trackio_and_constraints() -> Result:
    import nmoe

    tree = Path(nmoe.__file__).parents[1]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "-c", str(tree / "constraints.txt")]
    code = subprocess.run([*command, "trackio>=0.43"], capture_output=True, check=False).returncode
    pages = [tree / "README.md", tree / "docs/guides/operations.md"]
    constrained = any('-c nmoe/constraints.txt "./nmoe[report]"' in page.read_text() for page in pages)
    line = (
        f"{'resolved' if code == 0 else 'no solution'}; with {'the tested' if constrained else 'the newest'} versions"
    )
    return line, code == 0 and constrained


@check(31, "DPO's held-out accuracy at the start, where all four pairs are ties", "50.0% [0.0%, 100.0%], says ties")
def ties_of_dpo() -> Result:
    import torch

    from nmoe.config.commands import DPOConfig
    from nmoe.config.loader import load_run_with
    from nmoe.data.pairs import Pair
    from nmoe.recipes.preferences import held_out_pairs
    from nmoe.text.renderers import Rendered

    tables = {"run": {"steps": 1}, "model": {"path": "m"}, "records": {"path": "p.jsonl", "tokens_per_step": 64}}
    config = load_run_with(None, DPOConfig, tables, "check", "dpo")
    pairs = [Pair(f"p:{n}", Rendered([n, 1], [-100, 1]), Rendered([n, 2], [-100, 2]), str(n)) for n in range(4)]
    note = held_out_pairs(torch.zeros(8), pairs, config).note
    return note, "50.0% [0.0%, 100.0%]" in note and "ties" in note


@check(31, "an evaluation of 50 problems from a pool that has fewer", "says that there are fewer")
def fewer_problems_than_asked() -> Result:
    Path("digits.toml").write_text(
        'env_id = "digits"\nversion = "1"\nformat = "boxed"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\n'
        "difficulty = [1, 1]\n"
    )
    _tiny()
    _nmoe("sft", "tiny.toml", "--run.name=m")
    _, out, said = _nmoe("eval", "runs/m", "digits.toml", "--problems", "50", "--max-tokens", "2")
    told = re.search(r"only (\d+) different", out + said)
    return f"says that there are {told[1]}" if told else "says nothing", told is not None
