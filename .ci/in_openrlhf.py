"""Has OpenRLHF's own client ask for nmoe's rewards: `PYTHON .ci/in_openrlhf.py WHEEL`

The wheel is that of `pip download --no-deps openrlhf==0.11.2`; the Python has nmoe and aiohttp (.venv-lent-0.3.1 has both).
OpenRLHF's `SingleTurnAgentExecutor` runs as it is, over an engine and a tokenizer that are stood for here: by HTTP from
`nmoe env serve`, and by the file that it imports. A response that is right, one that is wrong and one that was cut have to get
their rewards, and a reward that fails has to be missing, not 0.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nmoe.adapters.openrlhf as adapter
from nmoe.adapters.environment import SharedEnvironment

ENVIRONMENT, END = "word_problems", "<|im_end|>"
PROMPT = f"How many?{END}\n"
# Reward and score of a response that is right, one that is wrong, and one that was cut.
WANTED = [(1.1, 1.0), (0.1, 0.0), (0.0, 0.0)]


class Tokenizer:
    """One token for each letter."""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": [SimpleNamespace(tolist=lambda: [ord(letter) for letter in text])]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def asked(executor: Any, response: str, label: str) -> dict[str, Any]:
    class Engine:
        async def generate(self, ids: list[int], *_: Any, **__: Any) -> Any:
            tokens = [ord(letter) for letter in response]
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason="stop", logprobs=None)])

    params = SimpleNamespace(max_tokens=100, logprobs=None)
    answered: dict[str, Any] = asyncio.run(executor.execute(PROMPT, label, params, 1000, Tokenizer(), Engine()))
    return answered


def number(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def holds(name: str, executor: Any, label: str, gold: str) -> bool:
    responses = [f"{gold}{END}", f"many{END}", gold]
    answers = [asked(executor, response, label) for response in responses]
    found = [(number(one["reward"]), number(one["scores"])) for one in answers]
    right = all(
        abs(one - other) < 1e-6
        for pair, wanted in zip(found, WANTED, strict=True)
        for one, other in zip(pair, wanted, strict=True)
    )
    logs = all("correctness" in one["extra_logs"] for one in answers)
    lost = asked(executor, gold, "train/0/00000000")["reward"]
    held = right and logs and lost is None
    print(
        f"{'ok  ' if held else 'FAIL'} OpenRLHF, {name}: {found}; of another environment's record: {lost}", flush=True
    )
    return held


def main(wheel: str) -> None:
    stands: Any = types.ModuleType("openrlhf.utils.logging_utils")
    stands.init_logger = logging.getLogger
    sys.modules[stands.__name__] = stands
    folder = Path(tempfile.mkdtemp())
    with zipfile.ZipFile(wheel) as files:
        (name,) = (one for one in files.namelist() if one.endswith("/openrlhf/utils/agent.py"))
        source = Path(files.extract(name, folder))
    spec = importlib.util.spec_from_file_location("openrlhf_agent", source)
    assert spec is not None
    assert spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    with SharedEnvironment(ENVIRONMENT) as shared:
        label = shared.rows(1)[0]["label"]
        gold = shared.problem(label).gold
    command = [sys.executable, "-m", "nmoe", "env", "serve", ENVIRONMENT, "--port", "0", "--end", END]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = re.search(r"http://\S+", server.stdout.readline())
        assert url is not None
        by_http = holds("by HTTP", agent.SingleTurnAgentExecutor(url[0]), label, gold)
        server.terminate()
    os.environ |= {"NMOE_ENVIRONMENT": ENVIRONMENT, "NMOE_END": END}
    by_file = holds("by its file", agent.SingleTurnAgentExecutor(str(adapter.__file__)), label, gold)
    sys.exit(not (by_http and by_file))


if __name__ == "__main__":
    main(*sys.argv[1:])
