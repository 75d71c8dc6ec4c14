"""Has verifiers play nmoe's environments: `PYTHON .ci/in_verifiers.py`, for version 0.3.1 and 0.4.0.

The Python has verifiers and, behind it, nmoe (`prepare_lent` in benchmarks/environments.sh). A server in this process speaks for
the model: it knows the answers, gives every second one wrong, guesses once before it is right, and has a tool compute its sums.
The rewards that verifiers report have to be the ones of the answers, and an environment whose grader has a bug must not be worth 0.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nmoe.adapters.environment import SharedEnvironment

COUNT = 2
BUGGY = """
import nmoe


class Buggy(nmoe.Task):
    def prompt(self, record):
        return "What?"

    def grade(self, record, answer):
        raise RuntimeError("the grader has a bug")


def records():
    return [{"number": number} for number in range(4)]
"""
BUGGY_TOML = """
env_id = "buggy"
task = "buggy:Buggy"
[task_pool]
type = "python"
call = "buggy:records"
check_gold = "off"
"""
V1 = """
from nmoe.adapters.verifiers_v1 import NmoeEnv, NmoeTaskset

__all__ = ["NmoeEnv", "NmoeTaskset"]
"""


class Model:
    """Answers by what was asked first: the right answer, or a wrong one for every second problem."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[str, int]] = {}
        for name in ("word_problems", "guess", "tools"):
            with SharedEnvironment(name) as shared:
                for index, row in enumerate(shared.rows(COUNT)):
                    self.answers[row["prompt"][-1]["content"]] = (shared.problem(row["label"]).gold, index)

    def reply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        messages = [one for one in body["messages"] if one["role"] != "system"]
        asked, turns = messages[0]["content"], sum(one["role"] == "assistant" for one in messages)
        if isinstance(asked, list):
            asked = asked[0]["text"]
        if asked == "What?":
            return {"content": "That."}
        gold, index = self.answers[asked]
        right = gold if index % 2 == 0 else str(int(gold) + 1)
        if asked.startswith("Guess"):
            return {"content": right if turns else str(int(gold) - 1)}
        if asked.startswith("Add") and not turns:
            call = {"name": "python", "arguments": json.dumps({"code": f"print({asked.removeprefix('Add: ')})"})}
            if body.get("tools"):
                return {"content": None, "tool_calls": [{"id": "call_7", "type": "function", "function": call}]}
            spelled = json.dumps({**call, "arguments": json.loads(call["arguments"])})
            return {"content": f"<tool_call>\n{spelled}\n</tool_call>"}
        if asked.startswith("Add"):
            assert gold in str(messages[-1]["content"]), messages[-1]
            if body.get("tools"):
                assert messages[-1]["tool_call_id"] == "call_7", messages[-1]
        return {"content": right}


def serve(model: Model) -> str:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer("application/json", json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = {"role": "assistant", **model.reply(body)}
            end = "tool_calls" if said.get("tool_calls") else "stop"
            base = {"id": "x", "created": 0, "model": "tiny"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            if not body.get("stream"):
                choice = {"index": 0, "message": said, "finish_reason": end}
                whole = {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
                return self.answer("application/json", json.dumps(whole))
            delta = {**said, "tool_calls": [{"index": 0, **one} for one in said.get("tool_calls", ())]}
            part = {**base, "object": "chat.completion.chunk"}
            chunks = [
                {**part, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
                {**part, "choices": [{"index": 0, "delta": {}, "finish_reason": end}]},
                {**part, "choices": [], "usage": usage},
            ]
            self.answer(
                "text/event-stream", "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
            )

        def answer(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def of_v0(url: str, environment: str, **more: Any) -> list[float]:
    """Returns the rewards that verifiers before 0.4 give, with more settings; raises what a rollout raises."""
    import verifiers as vf
    from verifiers.types import ClientConfig

    (Path.cwd() / "nmoe_lent.py").write_text("from nmoe.adapters.verifiers_v0 import load_environment\n")
    env = vf.load_environment("nmoe_lent", environment=environment, count=COUNT, **more)
    client = ClientConfig(api_base_url=url, api_key_var="NONE_KEY", max_retries=0)
    found = asyncio.run(env.evaluate(client, "tiny", num_examples=COUNT, rollouts_per_example=1))
    outputs = sorted(found["outputs"], key=lambda one: one["example_id"])
    errors = [one["error"] for one in outputs if one.get("error")]
    if errors:
        raise RuntimeError(str(errors[0]))
    return [float(one["reward"]) for one in outputs]


def of_v1(url: str, environment: str) -> list[float]:
    """Returns the rewards that `vf-eval` of verifiers 0.4 writes; raises the errors of an episode."""
    (Path.cwd() / "nmoe_lent.py").write_text(V1)
    out = Path(tempfile.mkdtemp())
    command = [Path(sys.executable).parent / "vf-eval", "nmoe-lent", "-m", "tiny"]
    command += ["--env.taskset.environment", environment, "--env.player.harness.id", "null"]
    command += ["--env.player.runtime.type", "subprocess", "--select.limit", str(COUNT), "-r", "1"]
    command += ["--client.base-url", url, "--client.api-key-var", "NONE_KEY", "--no-push", "--no-rich"]
    command += ["--output-dir", out]
    place = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        list(map(str, command)), env=os.environ | {"PYTHONPATH": place, "PATH": path}, capture_output=True, text=True
    )
    traces = [json.loads(line) for file in sorted(out.rglob("traces.jsonl")) for line in file.read_text().splitlines()]
    if len(traces) != COUNT:
        raise RuntimeError(f"{len(traces)} episodes of {COUNT}: {(done.stdout + done.stderr)[-3000:]}")
    rewards = {}
    for episode in traces:
        runs = episode.get("traces", [episode])
        if errors := [*episode.get("errors", ()), *(error for run in runs for error in run.get("errors", ()))]:
            raise RuntimeError(str(errors[0]))
        rewards[runs[0]["task"]["data"]["idx"]] = sum(map(_paid, runs[0]["rewards"].values()))
    return [rewards[index] for index in sorted(rewards)]


def _paid(reward: Any) -> float:
    return float(reward["score"] * reward["weight"] if isinstance(reward, dict) else reward)


def main() -> None:
    os.environ.setdefault("NONE_KEY", "none")
    os.chdir(tempfile.mkdtemp())
    sys.path.insert(0, str(Path.cwd()))
    Path("buggy.py").write_text(BUGGY)
    Path("buggy.toml").write_text(BUGGY_TOML)
    version = importlib.metadata.version("verifiers")
    rewards = of_v0 if version < "0.4" else of_v1
    url = serve(Model())
    failed = 0
    for environment in ("word_problems", "tools", "guess"):
        found, right = rewards(url, environment), expected(environment)
        same = [abs(one - other) < 1e-6 for one, other in zip(found, right, strict=True)]
        failed += not all(same)
        print(
            f"{'ok  ' if all(same) else 'FAIL'} verifiers {version}, {environment}: {found}, wanted {right}", flush=True
        )
    if version < "0.4":
        # Its limit of turns ends an episode before the environment gets the last one.
        for environment, turns in (("word_problems", 1), ("guess", 2)):
            found, right = of_v0(url, environment, max_turns=turns), expected(environment)
            if environment == "guess":
                right[1] = 0.0  # its second guess is wrong, too, and the episode is cut
            same = [abs(one - other) < 1e-6 for one, other in zip(found, right, strict=True)]
            failed += not all(same)
            print(
                f"{'ok  ' if all(same) else 'FAIL'} {environment} with max_turns={turns}: {found}, wanted {right}",
                flush=True,
            )
    try:
        found = rewards(url, "buggy.toml")
    except Exception as error:
        held = "the grader has a bug" in f"{error!r} {error.__cause__!r}"
        failed += not held
        print(f"{'ok  ' if held else 'FAIL'} a grader with a bug ends in {str(error)[:200]!r}")
    else:
        failed += 1
        print(f"FAIL a grader with a bug gave {found}")
    sys.exit(failed > 0)


def expected(environment: str) -> list[float]:
    """Plays the same turns without verifiers."""
    model, scores = Model(), []
    with SharedEnvironment(environment) as shared:
        for row in shared.rows(COUNT):
            episode = shared.episode(row["label"])
            messages = episode.begin()
            while True:
                said = {"role": "assistant", **model.reply({"messages": messages, "tools": shared.tools})}
                step = episode.step(said)
                if step.grade is not None:
                    scores.append(step.grade.score)
                    break
                messages = [*messages, said, *step.messages]
    return scores


if __name__ == "__main__":
    main()
