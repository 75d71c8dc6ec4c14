"""Has agents and harnesses that know nothing of nmoe talk to `nmoe serve`:

    python .ci/agents.py CLIENTS_PYTHON

A small model is trained to add two digits, by a call of `add` where it has that tool, and served. The package openai's loop over
tool calls (examples/tool_loop.py) has to answer with the tool's result, and inspect-ai (examples/sums_inspect.py) has to find its
answers right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from check import hold
from served import ROOT, serving

sys.path.append(str(ROOT / "examples"))

from chat_templates import QWEN, qwen

from nmoe.config.commands import PretrainConfig
from nmoe.config.loader import load_run
from nmoe.recipes.pretrain import pretrain
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.turns import chat_format

RUN = """
[run]
name = "adder"
directory = "HERE"
steps = 500
threads = 1
[model]
tokenizer = "HERE/tokenizer"
[model.shape]
hidden_size = 64
layers = 2
heads = 4
kv_heads = 2
head_dim = 16
intermediate_size = 192
context_tokens = 512
[data]
documents = "HERE/corpus.jsonl"
held_out_documents = 20
tokens_per_step = 2048
[optimizer]
learning_rate = 3e-3
warmup_steps = 20
beta2 = 0.98
[checkpoint]
every_steps = 500
keep = 1
"""
# The tests' template leaves out calls of earlier turns; this one has them.
LEFT_OUT = """{{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
"""
TEMPLATE = QWEN.replace(
    LEFT_OUT,
    LEFT_OUT
    + """        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
""",
)
assert TEMPLATE != QWEN
ADD = ToolDefinition(
    "add",
    "Adds two numbers.",
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
)
PAIRS = [(a, b) for a in range(1, 6) for b in range(1, 6)]
CORPUS_ROUNDS = 30


def corpus(directory: Path) -> None:
    """Writes what the model learns: to call, to repeat what the tool said, and to add by itself where it has no tool."""
    # Words that are one token each make short documents.
    words = f"{TEMPLATE} {json.dumps(ADD.as_function())} What is the sum"
    tokenizer = qwen(directory / "tokenizer", TEMPLATE, words)
    form, end = chat_format(tokenizer), [tokenizer.special_id("<|im_end|>")]
    documents = []
    for a, b in PAIRS:
        asked = ChatMessage("user", f"What is {a} + {b}?")
        called = ChatMessage("assistant", "", calls=(FunctionCall("add", {"a": a, "b": b}, "call_1"),))
        said = ChatMessage("tool", str(a + b), name="add", call_id="call_1")
        call = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}\n</tool_call>"
        for messages, tools, reply in (
            ([asked], [ADD], call),
            ([asked, called, said], [ADD], f"The sum is {a + b}."),
            ([asked], [], f"The sum is {a + b}."),
        ):
            documents.append(form.prompt_ids(messages, tools) + tokenizer.encode(reply, control_tokens=True) + end)
    lines = [json.dumps({"token_ids": ids}) for ids in documents] * CORPUS_ROUNDS
    (directory / "corpus.jsonl").write_text("\n".join(lines) + "\n")


def run(python: str, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    place = Path(python).parent
    command = [str(place / command[0]), *command[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        corpus(place)
        (place / "run.toml").write_text(RUN.replace("HERE", scratch))
        model = pretrain(load_run(place / "run.toml", PretrainConfig))
        with serving(model, "--served-model-name", "adder", "--threads", "1") as client:
            url = f"{str(client.http.base_url).rstrip('/')}/v1"
            right, called = 0, 0
            for a, b in PAIRS[::3]:
                loop = ["python", "examples/tool_loop.py", "adder", f"What is {a} + {b}?"]
                done = run(python, loop, OPENAI_BASE_URL=url, OPENAI_API_KEY="none")
                right += done.stdout.strip() == f"The sum is {a + b}."
                called += "add(" in done.stderr
                print(done.stdout.strip(), done.stderr.strip()[-300:], sep=" | ", flush=True)
            harness = ["inspect", "eval", "examples/sums_inspect.py", "--model", "openai-api/local/adder"]
            harness += ["--log-dir", str(place / "logs"), "--log-format", "json", "--display", "plain"]
            done = run(python, harness, LOCAL_BASE_URL=url, LOCAL_API_KEY="none")
            logs = sorted((place / "logs").glob("*.json"))
            if done.returncode or not logs:
                sys.exit(f"inspect-ai failed:\n{(done.stdout + done.stderr)[-3000:]}")
            log = json.loads(logs[-1].read_text())
    asked = len(PAIRS[::3])
    accuracy = log["results"]["scores"][0]["metrics"]["accuracy"]["value"] if log["status"] == "success" else 0.0
    hold(
        {
            "answers of the loop that are right": (right, asked, asked),
            "of those with a call": (called, asked, asked),
            "accuracy that inspect-ai finds": (accuracy, 0.95, 1.0),
        },
        [],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
