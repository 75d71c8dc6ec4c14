"""Trains with the unmodified cookbook of Tinker against `nmoe serve --tinker`: python benchmarks/tinker_recipe.py CLIENT_PYTHON

CLIENT_PYTHON is an interpreter that has tinker and tinker_cookbook (`prepare_tinker` of benchmarks/environments.sh). The recipe is
`math_rl` with its own arithmetic, 32 problems of 16 samples a step. Its base is made here by supervised training on generated sums:
until it knows them, and then on answers of which half are wrong by 1, 2 or 10, so that it has something to unlearn. Each seed makes
another base. Prints the reward before and after, and the CPU seconds of client and server. Exit code 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests")]

from machine import machine  # noqa: E402
from result_files import write_results  # noqa: E402
from served_client import serving  # noqa: E402

from nmoe.config.tables.model import OptimizerSection  # noqa: E402
from nmoe.learner.batch import Batch  # noqa: E402
from nmoe.learner.learner import Learner  # noqa: E402
from nmoe.learner.objectives import cross_entropy  # noqa: E402
from nmoe.model.checkpoint import export_model  # noqa: E402
from nmoe.model.config import ModelConfig  # noqa: E402
from nmoe.model.transformer import Transformer  # noqa: E402
from nmoe.text.tokenizer import Tokenizer  # noqa: E402

# The largest number of the cookbook's arithmetic.
LARGEST = 100
RIGHT = 0.5
# Steps until sums are known, as twenty losses below KNOWN in a row show: seeds differ. Then steps at a falling rate, without which
# a tenth of the sums stayed wrong, and steps with wrong answers.
MOST_STEPS, SURE_STEPS, WRONG_STEPS = 5000, 300, 400
KNOWN = 0.03
# The promises: rewards before and after, the least gain, the steps, and the CPU seconds of client and server.
MOST_FIRST, LEAST_LAST, LEAST_GAIN, MOST_RL_STEPS, MOST_CPU_S = 0.6, 0.9, 0.3, 40, 300.0
END = "<|endoftext|>"


def pieces(a: int, b: int, answer: int) -> list[str]:
    """Returns a conversation as the cookbook's renderer `role_colon` writes it, in the pieces that it encodes."""
    shown = ["User:", " What is 4 + 5?\n\n", "Assistant:", " 9\n\n", "User:", f" What is {a} + {b}?\n\n", "Assistant:"]
    return [*shown, f" {answer}\n\n", "User:"]


def answered(rng: random.Random, right: float) -> list[str]:
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    error = 0 if rng.random() < right else rng.choice((-10, -2, -1, 1, 2, 10))
    return pieces(a, b, max(0, a + b + error))


def make_tokenizer(directory: Path, texts: list[str]) -> Tokenizer:
    """Trains a tokenizer in which a number is two tokens, its last digit and what is before it, with the space: so a small model
    learns sums soon. With a token for each number, or for each digit, it does not."""
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\d*(?=\d(?!\d))|\d| ?[A-Za-z]+|\s+|[^\sA-Za-z\d]"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    return Tokenizer.load(directory)


def make_base(directory: Path, seed: int) -> None:
    """Trains a small model on sums until it knows them, then on answers of which half are wrong, and writes it."""
    rng = random.Random(seed)
    texts = ["".join(answered(rng, 1.0)) for _ in range(20_000)]
    tokenizer = make_tokenizer(directory, texts)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=96, layers=2, heads=3, kv_heads=3, head_dim=32, intermediate_size=384,
        experts=0, experts_per_token=0, context_tokens=128, qk_norm=True, tie_embeddings=True,
    )  # fmt: skip
    model = Transformer(config).initialize(seed)
    optimizer = OptimizerSection(learning_rate=3e-3, warmup_steps=50, min_lr_ratio=1.0, weight_decay=0.01)
    for right, most in ((1.0, MOST_STEPS), (1.0, SURE_STEPS), (RIGHT, WRONG_STEPS)):
        learner, known = Learner(model, optimizer, most, 16_384), 0
        for step in range(most):
            loss = learner.forward_backward(batch_of(tokenizer, rng, right), cross_entropy).result().loss
            learner.optim_step()
            known = known + 1 if loss < KNOWN else 0
            if step % 100 == 0 or step + 1 == most or known == 20:
                print(f"base, {right:.0%} right, step {step}: {loss:.3f}", flush=True)
            if most == MOST_STEPS and known == 20:
                break
        optimizer = optimizer.model_copy(update={"min_lr_ratio": 0.05})
    export_model(model, directory)


def batch_of(tokenizer: Tokenizer, rng: random.Random, right: float) -> Batch:
    """Returns conversations of which the last answer is scored."""
    rows, begins, shared = [], [], 0
    for _ in range(64):
        parts = [tokenizer.encode(piece) for piece in answered(rng, right)]
        rows.append([token for part in parts for token in part])
        begins.append(sum(map(len, parts[:-2])) - 1)
        shared = sum(map(len, parts[:5]))  # the first question is always the same
    inputs = [row[:-1] for row in rows]
    scored = [[n >= begin for n in range(len(row))] for row, begin in zip(inputs, begins, strict=True)]
    scored_T = torch.tensor([one for row in scored for one in row])
    return Batch(
        tuple(map(len, inputs)),
        torch.tensor([one for row in inputs for one in row]),
        torch.tensor([one for row in rows for one in row[1:]]),
        scored_T,
        scored_T.float() / scored_T.sum(),
        prefixes=((0, shared),) * len(rows),
    )


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_s(process: int) -> float:
    """Returns the CPU seconds of a process and of the system for it."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def kept(run: dict[str, Any]) -> bool:
    """Returns whether a run keeps the promises that each of them has to keep."""
    first, last = run["first_reward"], run["last_reward"]
    learned = first <= MOST_FIRST and last >= first + LEAST_GAIN
    return learned and run["steps"] <= MOST_RL_STEPS and run["client_cpu_s"] + run["server_cpu_s"] <= MOST_CPU_S


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", help="an interpreter with the cookbook")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--loss", default="importance_sampling")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for seed in asked.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            base = Path(scratch) / "base"
            base.mkdir()
            make_base(base, seed)
            runs.append({"seed": seed, **train(asked, base, Path(scratch))})
        print(json.dumps(runs[-1], indent=2), flush=True)
        if asked.out is not None:
            settings = {"loss": asked.loss, "learning_rate": asked.learning_rate, "sure_steps": SURE_STEPS}
            write_results(asked.out, {"settings": settings, "runs": runs, "machine": machine()})
    return int(not all(map(kept, runs)) or median(run["last_reward"] for run in runs) < LEAST_LAST)


def train(asked: argparse.Namespace, base: Path, scratch: Path) -> dict[str, Any]:
    """Runs the recipe, and returns its figures."""
    before = children_s()
    saved = ("--saved", str(scratch / "saved"))
    with serving(base, "--tinker", "--threads", "1", *saved, key="tml-bench") as server:
        command = [
            asked.client, "-m", "tinker_cookbook.recipes.math_rl.train", f"model_name={base}", "renderer_name=role_colon",
            "env=arithmetic", "groups_per_batch=32", "group_size=16", "max_tokens=8", f"max_steps={asked.steps}",
            f"loss_fn={asked.loss}", f"learning_rate={asked.learning_rate}", "eval_every=0", "save_every=0",
            f"log_path={scratch / 'log'}", "behavior_if_log_dir_exists=delete",
        ]  # fmt: skip
        environment = os.environ | {
            "TINKER_BASE_URL": str(server.http.base_url).rstrip("/"), "TINKER_API_KEY": "tml-bench", "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0",
        }  # fmt: skip
        log = scratch / "client.log"
        with log.open("wb") as written:
            done = subprocess.run(command, env=environment, cwd=scratch, stdout=written, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(f"the recipe ended with {done.returncode}:\n{log.read_text()[-4000:]}")
        client_s = children_s() - before
        server_s = cpu_s(server.process.pid)  # it is no child of this process
    rows = [json.loads(line) for line in (scratch / "log/metrics.jsonl").read_text().splitlines()]
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    correct = [row["env/all/correct"] for row in rows if "env/all/correct" in row]
    for step, (reward, right) in enumerate(zip(rewards, correct, strict=True)):
        print(f"step {step}: reward {reward:.3f}, correct {right:.3f}")
    return {
        "steps": len(rewards),
        "first_reward": rewards[0],
        "last_reward": sum(rewards[-3:]) / len(rewards[-3:]),
        "client_cpu_s": client_s,
        "server_cpu_s": server_s,
        "rewards": rewards,
    }


if __name__ == "__main__":
    sys.exit(main())
