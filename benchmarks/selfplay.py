"""Measures three rounds of self-play on held-out solutions whose errors an oracle knows and self-play never meets.

    python benchmarks/selfplay.py runs/speedrun/base --out runs/selfplay_benchmark

From a base of the speedrun: it learns to add, then the form of the three roles with reviewers that overlook most errors
(`nmoe.speedrun.roles`), once; then, for each seed, three rounds of `selfplay.toml` with --train. A verifier agrees
where it gives a solution the score that the oracle gives; a reply without a score disagrees. Paired by solution: each round against
the one before, with the seeds' mean for each solution.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from machine import machine, versions
from result_files import write_results

from nmoe.config.commands import SelfplayConfig, SFTConfig
from nmoe.config.loader import load_run
from nmoe.config.packaged import CONFIGS
from nmoe.data.prm import split_steps
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.eval.evaluate import sample_problems
from nmoe.model.policy import load_policy
from nmoe.recipes.sft import sft
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import step_name
from nmoe.selfplay.loop import selfplay
from nmoe.speedrun.roles import LONGEST, SHORTEST, WARM_UP, claim_is_true, write_verifications
from nmoe.speedrun.steps import score, write_problems
from nmoe.statistics import paired_difference
from nmoe.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results/selfplay.json"
HELD_OUT, PROBLEMS, SAMPLES = 400, 1000, 8
ROUNDS = 3
MODES = {"greedy": 1, "sampled": SAMPLES}
ENVIRONMENT = """env_id = "verifications"
version = "1"
format = "harmony"

[task_pool]
type = "jsonl"
path = "held_out.jsonl"
task_type = "proof_verification"
"""


def prepare(out: Path) -> None:
    """Writes what the models are warmed up on, the problems in DeepSeek-Math-V2's form, and the held-out verifications."""
    out.mkdir(parents=True, exist_ok=True)
    for name, (write, count, _, _) in WARM_UP.items():
        write(out / f"{name}.jsonl", 0, count)
    write_problems(out / "inputs.json", 0, PROBLEMS, "train", (SHORTEST, LONGEST))
    write_verifications(out / "held_out.jsonl", 1, HELD_OUT, "eval")
    (out / "held_out.toml").write_text(ENVIRONMENT)


def warm_up(base: Path, out: Path) -> Path:
    """The roles' first checkpoint: the base, after sums, after checks of sums, and after the roles' conversations."""
    start = base
    for name, (_, _, tokens, rate) in WARM_UP.items():
        overrides = {
            "run.name": name,
            "run.directory": str(out),
            "run.resume": "auto",
            "model.path": str(start),
            "records.path": str(out / f"{name}.jsonl"),
            "records.tokens_per_step": tokens,
            "optimizer.learning_rate": rate,
        }
        config = load_run(CONFIGS / "selfplay_roles.toml", SFTConfig, options(overrides))
        start = sft(config)
    return start


def options(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={json.dumps(value)}" for key, value in values.items()]


def play(roles: Path, out: Path, seed: int) -> tuple[Path, list[Path], float]:
    """A run of self-play, its verifiers before the first and after each round, and the processor's seconds that it took."""
    overrides = {
        "run.name": f"seed_{seed}",
        "run.directory": str(out),
        "run.seed": seed,
        "run.resume": "auto",
        "model.path": str(roles),
        "selfplay.train": True,
        "selfplay.rounds": ROUNDS,
        "checkpoint.keep": ROUNDS,
        "selfplay.problem_source": f"deepseek_math_v2_inputs:{out / 'inputs.json'}",
    }
    config = load_run(CONFIGS / "selfplay.toml", SelfplayConfig, options(overrides))
    batches = math.ceil(config.selfplay.max_problems / config.batch.prompts_per_step)
    of_round = batches + config.run.steps // ROUNDS
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": of_round})})
    began = time.process_time()
    run = selfplay(config)
    after = [run / "checkpoints" / step_name(of_round * round_) / "verifier" for round_ in range(1, ROUNDS + 1)]
    return run, [roles, *after], time.process_time() - began


def agreement(checkpoint: Path, out: Path, samples: int) -> list[float]:
    """For each held-out solution the share of the verifier's replies that agree with the oracle; greedy where one is taken."""
    directory = resolve_checkpoint(checkpoint)
    environment = Environment.from_toml(out / "held_out.toml", Tokenizer.load(directory))
    model = load_policy(directory)[0]
    groups = sample_problems(
        NativeEngine(model, 256),
        environment,
        model.config.context_tokens,
        problems=HELD_OUT,
        samples=samples,
        temperature=1.0 if samples > 1 else 0.0,
        max_new_tokens=170,
        seed=0,
    )
    right = [[t.grade.verdict is not None and t.grade.verdict.score == 1 for t in g.trajectories] for g in groups]
    return [sum(replies) / len(replies) for replies in right]


def labels(run: Path) -> dict[str, Any]:
    """How good the labels were that the run trained on, by round; and the claims, true and confirmed."""
    found: dict[str, Counter[str]] = {}
    for line in map(json.loads, (run / "proof_verifier_train.jsonl").open()):
        right = line["score"] == score(line["problem"], split_steps(line["proof"]))
        found.setdefault(f"round_{line['round']}", Counter())["right" if right else "wrong"] += 1
    for line in map(json.loads, (run / "proof_generator_train.jsonl").open()):
        right = line["proof"] is not None and score(line["problem"], split_steps(line["proof"])) == 1
        found.setdefault(f"round_{line['round']}", Counter())["right_proofs" if right else "other_proofs"] += 1
    for line in map(json.loads, (run / "proof_meta_verifier_train.jsonl").open()):
        counts = found.setdefault(f"round_{line['round']}", Counter())
        true = "true" if claim_is_true(split_steps(line["proof"]), line["evaluation"]) else "false"
        if line["confirmed"] is not None:
            counts[f"{true}_claims_{'confirmed' if line['confirmed'] else 'refuted'}"] += 1
        if line["settled"]:
            counts[f"{true}_claims_settled_as_{'true' if line['score'] == 1 else 'false'}"] += 1
    return {name: dict(counts) for name, counts in found.items()} | {
        "counts": json.loads((run / "counts.json").read_text())
    }


def compared(before: list[float], after: list[float]) -> dict[str, float]:
    """Means with the paired interval of their difference."""
    difference = paired_difference(before, after)
    return {
        "before": sum(before) / len(before),
        "after": sum(after) / len(after),
        "difference": difference.value,
        "low": difference.interval.low,
        "high": difference.interval.high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="a base of the speedrun")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write to; runs in it that are done are kept"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--roles", type=Path, help="checkpoint of the roles, in place of warming up the base")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = arguments.out.absolute()
    prepare(out)
    roles = arguments.roles or warm_up(arguments.base, out)
    before = {mode: agreement(roles, out, samples) for mode, samples in MODES.items()}
    # For each mode and round the agreement on each solution, of each seed.
    found: dict[str, list[list[list[float]]]] = {mode: [[] for _ in range(ROUNDS + 1)] for mode in MODES}
    results = []
    for seed in arguments.seeds:
        run, verifiers, seconds = play(roles, out, seed)
        result: dict[str, Any] = {"seed": seed, "processor_seconds": seconds}
        for mode, samples in MODES.items():
            after = [before[mode], *(agreement(verifier, out, samples) for verifier in verifiers[1:])]
            for one, of_seed in zip(found[mode], after, strict=True):
                one.append(of_seed)
            result[mode] = compared(after[0], after[-1]) | {"rounds": [sum(one) / len(one) for one in after]}
        results.append(result | {"labels": labels(run)})
        print(json.dumps(results[-1]), flush=True)
    rounds = [
        {"mode": mode, "round": round_, **compared(*(averaged(found[mode][at]) for at in (round_ - 1, round_)))}
        for mode in MODES
        for round_ in range(1, ROUNDS + 1)
    ]
    settings = {"machine": machine(), **versions("torch"), "held_out": HELD_OUT}
    write_results(RESULTS, {**settings, "results": results, "rounds": rounds})
    print(f"| seed | mode | {' | '.join(['before', *(f'round {n}' for n in range(1, ROUNDS + 1))])} |")
    for result in results:
        for mode in MODES:
            print(f"| {result['seed']} | {mode} | {' | '.join(f'{one:.1%}' for one in result[mode]['rounds'])} |")
    for one in rounds:
        shown = f"{100 * one['difference']:+.1f} [{100 * one['low']:+.1f}, {100 * one['high']:+.1f}]"
        print(f"| round {one['round']} | {one['mode']} | {one['before']:.1%} | {one['after']:.1%} | {shown} |")


def averaged(of_seeds: list[list[float]]) -> list[float]:
    """The mean over seeds for each solution."""
    return [sum(values) / len(values) for values in zip(*of_seeds, strict=True)]


if __name__ == "__main__":
    main()
