"""Holds runs of sort_grpo.toml and sort_ppo.toml against docs/guides/algorithms.md, with answers sampled at
temperature 1 to held-out problems: `python .ci/check_sort.py runs/speedrun/base runs/speedrun/sort_grpo runs/speedrun/sort_ppo`"""

import sys
from pathlib import Path
from statistics import fmean

from holding import hold

from nmoe.config.packaged import ENVIRONMENTS
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.eval.evaluate import evaluate
from nmoe.model.checkpoint import load_model
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

ENVIRONMENT = ENVIRONMENTS / "sort.toml"


def sampled_correctness(run: Path) -> float:
    directory = resolve_checkpoint(run)
    tokenizer, model = Tokenizer.load(directory), load_model(directory)
    environment = Environment.from_toml(ENVIRONMENT, tokenizer).held_out()
    assert environment is not None
    arguments = {"problems": 200, "samples": 8, "temperature": 1.0, "max_new_tokens": 48, "seed": 0}
    return evaluate(NativeEngine(model, 256), environment, model.config.context_tokens, **arguments)[0].value


base, *runs = map(Path, sys.argv[1:])
figures = {f"{base.name}: sampled correctness": (sampled_correctness(base), 0.0, 0.3)}
for run in runs:
    steps = read_metrics(run)
    mismatch = max(step["mismatch_abs_mean"] for step in steps if "mismatch_abs_mean" in step)
    figures[f"{run.name}: sampled correctness"] = (sampled_correctness(run), 0.9, 1.0)
    figures[f"{run.name}: mismatch_abs_mean"] = (mismatch, 0.0, 1e-6)
    figures[f"{run.name}: seconds of all steps"] = (sum(step["time_step_s"] for step in steps), 0.0, 600.0)
    if "explained_variance" in steps[-1]:
        explained = fmean(step["explained_variance"] for step in steps)
        figures[f"{run.name}: explained_variance, mean"] = (explained, 0.0, 1.0)
hold(figures, [base, *runs])
