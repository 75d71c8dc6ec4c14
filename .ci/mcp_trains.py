"""Trains a tiny model on episodes whose tool is a server of the package mcp, over pipes, as `.ci/long trainers` does.

    .venv-mcp/bin/python .ci/mcp_trains.py

Its base has read episodes that ask the server and then answer. The form is rewarded, in which its samples differ. The checks: every
step has a gradient, the learner scored what the engine drew and not what the server said, and bundles and the whole run replay with
the server's program deleted.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import nmoe.rl.update
from nmoe.config.commands import PretrainConfig, RLConfig
from nmoe.config.loader import load_environment, load_run
from nmoe.envs.environment import Environment
from nmoe.recipes.pretrain import pretrain
from nmoe.rl.experience import policy_batch
from nmoe.rl.launch import train
from nmoe.rl.replay_bundle import replay_command
from nmoe.rl.replay_run import replay_run
from nmoe.rollout.bundle import read_bundle
from nmoe.runs.ledger import read_metrics
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

SERVER = '''
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("words")


@server.tool()
def flip(text: str) -> str:
    """Flips."""
    with Path("calls").open("a") as file:
        file.write("call\\n")
    return text[::-1]


server.run("stdio")
'''
ENVIRONMENT = """
env_id = "flipped"
[task_pool]
type = "generated"
task_type = "reverse"
difficulty = [2, 2]
[rubric]
format = 1.0
tool_use = 0.5
[tools]
[[tools.servers]]
name = "words"
command = ["{python}", "server.py"]
scope = "run"
"""
BASE = """
[run]
name = "base"
directory = "."
steps = 250
threads = 1
[model]
tokenizer = "tokenizer"
[model.shape]
hidden_size = 64
layers = 2
heads = 4
kv_heads = 2
head_dim = 16
intermediate_size = 256
context_tokens = 256
[data]
documents = "corpus.jsonl"
held_out_documents = 20
tokens_per_step = 1024
[optimizer]
learning_rate = 3e-3
warmup_steps = 5
"""
TRAINED = """
[run]
name = "rl"
directory = "."
steps = 3
threads = 1
[model]
path = "base"
numerics = "exact"
[environment]
path = "flipped.toml"
[sampling]
max_new_tokens = 64
[batch]
prompts_per_step = 4
group_size = 8
max_refills = 0
[optimizer]
learning_rate = 1e-3
[monitor]
replay_sample_rate = 1.0
[engine]
kind = "server"
[async]
max_staleness = 1
"""
STEPS = 3


def written(tokenizer: Tokenizer) -> None:
    """Writes documents that ask the server; half of them answer what it says, and half another word."""
    environment = Environment.from_settings(load_environment(Path("flipped.toml")), tokenizer)
    harmony, rng = Harmony(tokenizer), random.Random(0)
    with Path("corpus.jsonl").open("w") as file:
        for position in range(2000):
            problem = environment.pool.order.at(position)
            digits = problem.question.removeprefix("Reverse: ")
            call = Message(
                "assistant", json.dumps({"text": digits}), "commentary", "functions.flip", content_type="json"
            )
            reply = Message("tool", digits[::-1], "commentary", recipient="assistant", name="functions.flip")
            answer = Message("assistant", digits[::-1] if rng.random() < 0.5 else digits, "final")
            ids = [
                *environment.prompts.ids(problem),
                *harmony.render_completion([call]),
                *harmony.render_prompt([reply]),
                *harmony.render_completion([answer]),
            ]
            file.write(json.dumps({"token_ids": ids}) + "\n")


def proven() -> None:
    Path("server.py").write_text(SERVER)
    Path("flipped.toml").write_text(ENVIRONMENT.format(python=sys.executable))
    Path("base.toml").write_text(BASE)
    Path("rl.toml").write_text(TRAINED)
    prompts = Environment.from_settings(load_environment(Path("flipped.toml")), plain := Tokenizer.train((), 320))
    prompt = plain.decode(prompts.prompts.ids(prompts.pool.order.at(0)))
    words = '\nassistant\ncommentary\nfinal\nto=functions.flip\njson\n{"text": "\n"}'
    Tokenizer.train([prompt + words] * 10, 600).save(Path("tokenizer"))
    written(Tokenizer.load(Path("tokenizer")))
    base = pretrain(load_run(Path("base.toml"), PretrainConfig))
    batches: list[Any] = []

    def noted(trajectories: Any, *arguments: Any) -> Any:
        batch = policy_batch(trajectories, *arguments)
        batches.append((list(trajectories), batch))
        return batch

    nmoe.rl.update.policy_batch = noted  # type: ignore[assignment]
    directory = train(load_run(Path("rl.toml"), RLConfig))
    nmoe.rl.update.policy_batch = policy_batch
    rows = read_metrics(directory)
    called = len(Path("calls").read_text().splitlines())
    drawn = said = 0
    for trajectories, batch in batches:
        tool = [sum(stop - start for kind, _, start, stop in one.spans if kind == "tool") for one in trajectories]
        scored, expected = int(batch.scored_T.sum()), sum(one.sampled_tokens for one in trajectories)
        assert scored == expected, (scored, expected)
        for one in trajectories:
            for kind, _, start, stop in one.spans:
                assert set(one.mask[start:stop]) == {int(kind == "sampled")}, one.spans
        assert float(batch.weights_T[~batch.scored_T].abs().sum()) == 0
        drawn, said = drawn + scored, said + sum(tool)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["grad_norm"] > 0 for row in rows), rows
    assert rows[0]["mismatch_abs_max"] == 0, "the first step's samples are of the weights that it trains"
    assert said > 0
    events = [event for trajectories, _ in batches for one in trajectories for event in one.tool_events]
    answered = [event for event in events if event.failure == "ok"]
    assert answered
    print(f"{len(answered)} of {len(events)} calls answered by the server, {called} of them seen by it")
    print(f"{drawn} tokens that the engine drew were learned, {said} of the server's read only")
    Path("server.py").unlink()
    every = [file.parent for file in sorted(directory.glob("replay/*/bundle.json"))]
    bundles = [path for path in every if read_bundle(path).trajectory().tool_events]
    assert bundles
    for path in bundles[:5]:
        lines = list(replay_command(path, base, None, allow_user_code=False))
        assert lines[-1] == "all the same", lines
        assert any("by servers, taken from the record" in line for line in lines), lines
    replay_run(directory, None, print, allow_user_code=False)
    assert len(Path("calls").read_text().splitlines()) == called, "a replay asked the server"
    print(f"{min(5, len(bundles))} bundles and the run replayed without a server")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        proven()
