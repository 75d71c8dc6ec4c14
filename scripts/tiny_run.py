"""A tiny model and tiny runs from it, for the scripts that look at whole runs: seconds each, on one core.

The base has read questions such as "Reverse: 301" with answers in Harmony, of which half are right and two in five leave the answer
in the wrong channel; so its samples differ, and every group has something to learn.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tomllib
from pathlib import Path

import tokenizers
import tomli_w
from commits import environment

RUNS = Path(__file__).with_name("tiny_runs.toml")

VERBS = {
    "base": ["pretrain"],
    "grpo": ["rl", "train"],
    "one_prompt": ["rl", "train"],
    "dpo": ["dpo"],
    "sft": ["sft"],
    "reward": ["reward"],
    "verifier": ["verifier"],
    "selfplay": ["selfplay"],
}
"""The command of each configuration in `RUNS`."""

NMOE = "from nmoe.cli import main; main()"

# Each word one token: short documents are soon learned.
_WORDS = "user\nReverse: \nassistant\nanalysis\nback\nsame\nfinal\n"
_TOKENIZER = f"""
from pathlib import Path
from nmoe.text.tokenizer import Tokenizer
Tokenizer.train([{_WORDS!r}] * 10, 400).save(Path('tokenizer'))
"""


def make_workshop(tree: Path, workshop: Path) -> None:
    """Fills the directory `workshop` with all that the runs of `VERBS` read; the code of `tree` trains tokenizer and base."""
    write_configurations(workshop)
    subprocess.run([sys.executable, "-c", _TOKENIZER], cwd=workshop, env=environment(tree), check=True)
    _write_data(workshop)
    run(tree, workshop, "base")


def write_configurations(workshop: Path) -> None:
    """Writes each table of `RUNS` as NAME.toml."""
    for name, table in tomllib.loads(RUNS.read_text()).items():
        (workshop / f"{name}.toml").write_text(tomli_w.dumps(table))


def run(tree: Path, workshop: Path, name: str, *overrides: str) -> Path:
    """Runs one configuration by the code of `tree` and returns the run's directory. Raises CalledProcessError where it fails, after
    what it said."""
    command = [sys.executable, "-c", NMOE, *VERBS[name], f"{name}.toml", *overrides]
    ended = subprocess.run(command, cwd=workshop, env=environment(tree), capture_output=True, text=True)
    if ended.returncode:
        print(ended.stdout + ended.stderr, file=sys.stderr)
        ended.check_returncode()
    given = dict(override.removeprefix("--").split("=", 1) for override in overrides)
    return workshop / given.get("run.directory", ".") / name


def _write_data(workshop: Path) -> None:
    """corpus.jsonl for the base, pairs.jsonl for DPO, records.jsonl for SFT, steps.jsonl for a verifier and problems.jsonl for
    self-play; always the same."""
    backend = tokenizers.Tokenizer.from_file(str(workshop / "tokenizer" / "tokenizer.json"))
    rng = random.Random(0)
    corpus, pairs, records = [], [], []
    while len(corpus) < 4000:
        digits = "".join(rng.choices("0123456789", k=3))
        if digits == digits[::-1]:
            continue
        right, copied = ("back", digits[::-1]), ("same", digits)
        thought, answer = right if rng.random() < 0.5 else copied
        channel = "final" if rng.random() < 0.6 else "analysis"
        text = (
            f"<|start|>user<|message|>Reverse: {digits}<|end|><|start|>assistant<|channel|>analysis<|message|>{thought}<|end|>"
            f"<|start|>assistant<|channel|>{channel}<|message|>{answer}<|return|>"
        )
        corpus.append({"token_ids": backend.encode(text).ids})
        pairs.append({"prompt": f"Reverse: {digits}", "chosen": _turn(*right), "rejected": _turn(*copied)})
        records.append({"messages": [{"role": "user", "content": f"Reverse: {digits}"}, *_turn(*right)]})
    steps = [
        {
            "prompt": f"Sum: {number}",
            "completions": ["4+7=11", "11+2=13", "13+5=18"][: wrong + 1] + (["wrong"] if wrong < 2 else []),
            "labels": [True] * (wrong + 1) + ([False] if wrong < 2 else []),
        }
        for number in range(120)
        for wrong in [number % 3]
    ]
    problems = [{"problem": f"Sum: 4+{number}"} for number in range(4)]
    files = {"corpus": corpus, "pairs": pairs[:160], "records": records[:320], "steps": steps, "problems": problems}
    for name, rows in files.items():
        (workshop / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _turn(thought: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant", "content": thought, "channel": "analysis"},
        {"role": "assistant", "content": answer, "channel": "final"},
    ]
