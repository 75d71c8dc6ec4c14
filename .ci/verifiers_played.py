"""Trains a tiny model on environments of the unmodified package verifiers:

    python .ci/verifiers_played.py V1_VENV V0_VENV [--json RESULTS]

A base that writes 20% of texts backwards and copies the others plays the taskset of examples/verifiers, once through verifiers
0.4.0 and once through 0.3.1, and has to know the taskset's own evaluation split afterwards. Every trajectory of training and
evaluation is compared with what the engine was asked and drew. TextArena's GuessTheNumber is played, and vf-eval asks a server.
Environments of both versions fail in each way, after the budget has ended the episode, and none of it may be a reward of 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from check import hold
from served import ROOT, serving

sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from chat_templates import qwen
from machine import machine
from result_files import write_results
from scripted_engine import ScriptedEngine

from nmoe.config.commands import PretrainConfig, RLConfig
from nmoe.config.loader import load_run
from nmoe.engine.api import Request
from nmoe.envs.environment import Environment
from nmoe.recipes.pretrain import pretrain
from nmoe.rl.launch import train
from nmoe.rollout.collector import Collected, Collector, UserCodeFailedError
from nmoe.rollout.episode import Episode, Player
from nmoe.text.conversation import ChatMessage
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import chat_format
from nmoe.trajectory import Trajectory
from nmoe.types import Sample, Sampling

RIGHT = 0.2
BASE = """
[run]
name = "base"
directory = "HERE"
steps = 900
threads = 1
[model]
tokenizer = "HERE/tokenizer"
[model.shape]
hidden_size = 64
layers = 2
heads = 4
kv_heads = 2
head_dim = 16
intermediate_size = 128
rope_theta = 1000.0
context_tokens = 256
[data]
documents = "HERE/corpus.jsonl"
held_out_documents = 50
tokens_per_step = 512
[optimizer]
learning_rate = 2e-3
warmup_steps = 5
beta2 = 0.98
[checkpoint]
every_steps = 900
keep = 1
"""
RL = """
[run]
name = "NAME"
directory = "HERE"
steps = 12
threads = 1
[model]
path = "HERE/base"
[environment]
env_id = "backwards"
format = "chat"
task_pool = { type = "verifiers", venv = "VENV", TRAIN }
[sampling]
max_new_tokens = 12
[batch]
prompts_per_step = 16
group_size = 8
[optimizer]
learning_rate = 2.5e-3
eps = 1e-2
[[eval]]
every_steps = 12
problems = 200
samples = 1
temperature = 1.0
[eval.environment]
env_id = "held_out"
format = "chat"
task_pool = { type = "verifiers", venv = "VENV", EVAL }
[checkpoint]
keep = 1
"""
# Each asks for a third turn, which the budget does not have, and then its reward fails as its task says.
FAULTS = ("none", "none", "bug", "lost", "late", "silent", "none")
FAULTY_V1 = """
import asyncio
import verifiers.v1 as vf

class FaultyData(vf.TaskData):
    fault: str

class FaultyTask(vf.Task[FaultyData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def judged(self, trace: vf.Trace) -> float:
        fault = self.data.fault
        if fault == "lost":
            raise ConnectionResetError("no judge")
        if fault == "late":
            await asyncio.sleep(60)
        return {"none": 0.5, "silent": None}.get(fault) if fault != "bug" else 1 / 0

class FaultyTaskset(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self):
        for fault in ("none", "bug", "lost", "late", "silent"):
            yield FaultyTask(FaultyData(prompt="Go on.", fault=fault, timeout={"scoring": 1.0}), self.config.task)

class FaultyConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class FaultyEnv(vf.Env[FaultyConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                segment = await interaction.turn("Go on.")

__all__ = ["FaultyEnv", "FaultyTaskset"]
"""
FAULTY_V0 = """
import verifiers as vf
from datasets import Dataset

def judged(answer: str) -> float:
    if answer == "lost":
        raise ConnectionResetError("no judge")
    return {"none": 0.5, "silent": None}.get(answer) if answer != "bug" else 1 / 0

class Faulty(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        if state["answer"] == "late":
            raise TimeoutError("no database")
        return [vf.UserMessage(content="Go on.")]

def load_environment() -> vf.Environment:
    rows = [{"question": f"Go on: {fault}", "answer": fault} for fault in ("none", "bug", "lost", "late", "silent")]
    return Faulty(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[judged]), max_turns=3)
"""
V1 = 'environment = { taskset = { id = "reverse_text_v1", split = "SPLIT" } }'
V0 = 'environment = { id = "reverse_text_v0" }, split = "SPLIT"'


def corpus(directory: Path) -> Tokenizer:
    """Writes what the base learns: to write a few texts backwards, and to copy the others. None is of the evaluation split."""
    tokenizer = qwen(directory / "tokenizer", text="Write backwards: user assistant")
    form, end = chat_format(tokenizer), [tokenizer.special_id("<|im_end|>")]
    texts = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
    random.Random(0).shuffle(texts)
    rng = random.Random(1)
    with (directory / "corpus.jsonl").open("w") as file:
        for _ in range(8000):
            text = rng.choice(texts[200:])
            answer = text[::-1] if rng.random() < RIGHT else text
            asked = [ChatMessage("user", f"Write backwards: {text}")]
            ids = form.prompt_ids(asked, []) + tokenizer.encode(answer) + end
            file.write(json.dumps({"token_ids": ids}) + "\n")
    return tokenizer


class Seen:
    """Compares every trajectory with what the engine was asked and drew for it."""

    def __init__(self) -> None:
        self.turns = self.trajectories = self.lost = 0
        self._drawn: dict[tuple[object, ...], tuple[tuple[int, ...], Sample]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches all collectors inside the context."""
        drawn, sampled, collected = self._drawn, Player._sample, Collector.sample

        async def sample(player: Player, episode: Episode, prompt_ids: tuple[int, ...], tokens: int) -> Sample:
            found = await sampled(player, episode, prompt_ids, tokens)
            drawn[*episode.key, episode.index, len(episode.turns)] = (prompt_ids, found)
            return found

        def collect(collector: Collector, tickets: Sequence[Any], *more: Any) -> Collected:
            found = collected(collector, tickets, *more)
            for ticket, group in zip(tickets, found.groups, strict=True):
                for one in group.trajectories:
                    self.compare(one, (*ticket.terms.key, ticket.position))
            drawn.clear()
            return found

        Player._sample, Collector.sample = sample, collect  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Player._sample, Collector.sample = sampled, collected  # type: ignore[method-assign]

    def compare(self, one: Trajectory, key: tuple[object, ...]) -> None:
        """Fails if the trajectory has other tokens, log-probabilities or versions than the engine gave."""
        self.trajectories += 1
        if not one.trainable:
            print(f"lost: {one.grade.failure}: {one.grade.reason}", flush=True)
            self.lost += 1
            return
        place = 0
        for branch in one.branches:
            ids = list(branch.prompt_ids)
            for turn in branch.turns:
                ids += turn.given_ids
                asked, drawn = self._drawn[*key, one.index, place]
                assert tuple(ids) == tuple(asked), "the prompt is what the engine was asked"
                assert turn.sample is drawn, "the sample is what the engine drew"
                ids += turn.sample.token_ids
                place += 1
        self.turns += place


def games(tokenizer: Tokenizer, venv: str, place: Path) -> dict[str, tuple[float, float, float]]:
    """Plays eight games of GuessTheNumber by halving, and returns what has to hold of them."""
    path = place / "guess.toml"
    pool = f'type = "verifiers"\nvenv = "{venv}"\nenvironment = {{ taskset = {{ id = "guess_number_v1", seeds = 8 }} }}'
    path.write_text(f'env_id = "guess"\nformat = "chat"\n[task_pool]\n{pool}\n')
    environment = Environment.from_toml(path, tokenizer)

    def halve(request: Request, index: int) -> list[int]:
        low, high, last = 1, 20, 0
        for number, hint in re.findall(r"\[(\d+)\]|(higher|lower)", tokenizer.decode(list(request.prompt_ids)[asked:])):
            last = int(number) if number else last
            low, high = (last + 1, high) if hint == "higher" else (low, last - 1) if hint else (low, high)
        return [*tokenizer.encode(f"[{(low + high) // 2}]"), *environment.renderer.stop_ids]

    engine = ScriptedEngine(halve)
    problems = environment.pool.take(8)
    asked = len(environment.prompts.ids(problems[0]))
    seen = Seen()
    with seen.watching():
        found = Collector(engine, environment, 4000).collect(problems, 1, Sampling(400), (0, "games"))  # type: ignore[arg-type]
    played = [one for group in found.groups for one in group.trajectories]
    won = sum(one.grade.components["correctness"] == 1 for one in played)
    turns = [len(one.turns) for one in played]
    print(f"GuessTheNumber: {won} of {len(played)} won, in {turns} turns", flush=True)
    return {
        "GuessTheNumber: games won": (won, 8, 8),
        "GuessTheNumber: games in one branch": (sum(len(one.branches) == 1 for one in played), 8, 8),
        "GuessTheNumber: turns as the engine drew them": (seen.turns, sum(turns), sum(turns)),
    }


def faults(tokenizer: Tokenizer, venv: str, place: Path, name: str) -> list[str]:
    """Plays the episodes of FAULTS one after the other in one process, and returns what each came to."""
    module = f"faulty_{name}"
    (place / f"{module}.py").write_text(FAULTY_V1 if name == "v1" else FAULTY_V0)
    path = place / f"{module}.toml"
    given = f'{{ taskset = {{ id = "{module}" }} }}' if name == "v1" else f'{{ id = "{module}" }}'
    pool = f'[task_pool]\ntype = "verifiers"\nvenv = "{venv}"\nenvironment = {given}\n'
    path.write_text(f'env_id = "faulty"\nformat = "chat"\nbudget = {{ turns = 2 }}\n{pool}')
    environment = Environment.from_toml(path, tokenizer)
    problems = {problem.metadata["record"]: problem for problem in environment.pool.take(5)}
    engine = ScriptedEngine(lambda *_: [*tokenizer.encode("yes"), *environment.renderer.stop_ids])
    collector = Collector(engine, environment, 4000)  # type: ignore[arg-type]
    found = []
    for number, fault in enumerate(FAULTS):
        problem = problems[("none", "bug", "lost", "late", "silent").index(fault)]
        try:
            (group,) = collector.collect([problem], 1, Sampling(400), (0, "faults", number)).groups
        except UserCodeFailedError as error:
            found.append(f"{fault}: stops the run")
            print(f"{name}: {error}", flush=True)
            continue
        (one,) = group.trajectories
        found.append(
            f"{fault}: {one.grade.failure}, {one.grade.components['correctness'] if one.trainable else 'masked'}"
        )
        print(f"{name}: {found[-1]}, {len(one.turns)} turns {one.grade.reason}", flush=True)
    return found


WANTED = [
    "none: budget_exceeded, 0.5",
    "none: budget_exceeded, 0.5",
    "bug: stops the run",
    "lost: environment_error, masked",
    "late: environment_error, masked",
    "silent: stops the run",
    "none: budget_exceeded, 0.5",
]


def held_out(run: Path) -> list[float]:
    """Returns the mean rewards of the evaluations of a run."""
    records = [json.loads(path.read_text()) for path in sorted((run / "eval").glob("step_*.json"))]
    return [record["results"][0]["value"] for record in records]


def evaluated(run: Path, venv: str, place: Path) -> tuple[int, float]:
    """Has `vf-eval` ask a server of the trained model, and returns how many episodes it has, and their mean reward."""
    asked = ["--no-push", "--no-rich", "--env.taskset.split", "eval", "--env.agent.harness.id", "null"]
    asked += ["--env.agent.runtime.type", "subprocess"]
    # It finds uv on the path, with which the harness makes itself an environment.
    environment = os.environ | {"PATH": f"{venv}/bin:{os.environ['PATH']}", "PYTHONPATH": ".", "HF_HUB_OFFLINE": "1"}
    with serving(run, "--served-model-name", "tiny", "--threads", "1") as client:
        url = f"{str(client.http.base_url).rstrip('/')}/v1"
        command = [f"{venv}/bin/vf-eval", "reverse_text_v1", "-m", "tiny", "-n", "8", "-r", "1", *asked]
        command += [
            "--client.base-url",
            url,
            "--client.api-key-var",
            "NO_KEY",
            "--output-dir",
            str(place / "evaluated"),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    files = list((place / "evaluated").rglob("traces.jsonl"))
    if done.returncode or not files:
        sys.exit(f"vf-eval failed:\n{(done.stdout + done.stderr)[-3000:]}")
    traces = [trace for line in files[0].read_text().splitlines() for trace in json.loads(line)["traces"]]
    rewards = [trace["rewards"]["backwards"]["score"] for trace in traces if trace["ok"]]
    print(f"vf-eval: {rewards}", flush=True)
    return len(rewards), sum(rewards) / max(1, len(rewards))


def cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("v1", type=Path)
    options.add_argument("v0", type=Path)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    venvs = {"v1": str(asked.v1.resolve()), "v0": str(asked.v0.resolve())}
    results = None if asked.json is None else asked.json.resolve()
    record: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), **machine()}
    checks: dict[str, tuple[float, float, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        tokenizer = corpus(place)
        os.chdir(place)  # where the environments' modules are found
        for name, of in venvs.items():
            right = sum(one == wanted for one, wanted in zip(faults(tokenizer, of, place, name), WANTED, strict=True))
            checks[f"{name}: faults that are no reward"] = (right, len(WANTED), len(WANTED))
        os.chdir(ROOT / "examples/verifiers")
        checks |= games(tokenizer, venvs["v1"], place)
        (place / "base.toml").write_text(BASE.replace("HERE", scratch))
        began = cpu_s(resource.RUSAGE_SELF)
        pretrain(load_run(place / "base.toml", PretrainConfig))
        print(f"base: {cpu_s(resource.RUSAGE_SELF) - began:.0f} CPU s", flush=True)
        for name, pool in (("v1", V1), ("v0", V0)):
            text = RL.replace("TRAIN", pool.replace("SPLIT", "train")).replace("EVAL", pool.replace("SPLIT", "eval"))
            (place / "rl.toml").write_text(
                text.replace("HERE", scratch).replace("NAME", name).replace("VENV", venvs[name])
            )
            began, wall = cpu_s(resource.RUSAGE_SELF), time.monotonic()
            seen = Seen()
            with seen.watching():
                run = train(load_run(place / "rl.toml", RLConfig))
            first, *_, last = held_out(run)
            record[name] = {
                "held_out": [first, last],
                "episodes": seen.trajectories,
                "lost": seen.lost,
                "turns_as_drawn": seen.turns,
                "cpu_s_of_nmoe": round(cpu_s(resource.RUSAGE_SELF) - began, 1),
                "wall_s": round(time.monotonic() - wall),
            }
            print(f"{name}: {record[name]}", flush=True)
            checks[f"{name}: solve rate before"] = (first, 0.0, 0.3)
            checks[f"{name}: solve rate after"] = (last, 0.6, 1.0)
            played = seen.trajectories - seen.lost
            checks[f"{name}: turns as the engine drew them"] = (seen.turns, played, played)
            if name == "v1":
                answered, mean = evaluated(run, venvs[name], place)
                checks["vf-eval: episodes"] = (answered, 8, 8)
                checks["vf-eval: mean reward"] = (mean, 0.375, 1.0)
            checks[f"{name}: share of episodes lost"] = (seen.lost / seen.trajectories, 0.0, 0.01)
    if results is not None:
        write_results(results, record | {"checks": {name: value for name, (value, _, _) in checks.items()}})
    hold(checks, [])


if __name__ == "__main__":
    main()
