"""Self-play whose replies are a script, killed where the script of kills says: run by test_selfplay_run.py in a process of its own.

    python selfplay_by_script.py DIRECTORY SEED KILLS [--section.key=value ...]

Runs once to the end into DIRECTORY/whole, then into DIRECTORY/broken as often as it takes: each of KILLS attempts kills itself, as
`kill -9` would, at a random one of the moments in which it touches a file. Every attempt is a fork, so that torch is imported once.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any

import nmoe.selfplay.loop as recipe
from nmoe.config.commands import SelfplayConfig
from nmoe.config.loader import load_run
from nmoe.engine.api import Request
from nmoe.envs.pools.pool import stable_hash
from nmoe.envs.tasks.proofs import CLOSING, OPENING
from nmoe.model.transformer import Transformer
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Sample

# What Python tells an audit hook before it does it; opening is by far the most frequent.
TOUCHES = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.symlink",
    "os.listdir",
    "shutil.rmtree",
}


class ByScript:
    """Stands in for the native engine: a reply is drawn by a hash of prompt, seed, index and weight version, right or wrong, in its
    form or not."""

    def __init__(self, model: Transformer, max_sequences: int, cache_mb: int = 0) -> None:
        self.version = 0

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)

    async def update_weights(self, source: Any, version: int) -> None:
        self.version = version

    def sleep(self) -> None:
        return None

    async def samples(self, request: Request) -> AsyncGenerator[tuple[int, Sample], None]:
        for index in range(request.samples):
            yield index, self.reply(request, index)

    def reply(self, request: Request, index: int) -> Sample:
        rng = random.Random(stable_hash(request.prompt_ids, request.sampling.seed, index, self.version))
        prompt = TOKENIZER.decode(request.prompt_ids)
        # Nobody finds anything in some of the solutions, so that these are accepted with 1.
        right = re.search("## Solution\n4\\+[12]\\D", prompt) is not None
        score = "1" if right else rng.choice(("0", "0", "0.5", "1"))
        evaluation = f"{OPENING}\nStep {rng.randint(1, 3)}.\n{CLOSING} {score}"
        reasoning, answer = evaluation, score
        if "## Evaluation\n" in prompt:
            answer = rng.choice(("0", "1", "1"))
        elif "## Solution\n" not in prompt:
            answer = f"## Solution\n4+{rng.randint(1, 9)}\n\n## Self Evaluation\n{evaluation}"
        if rng.random() < 0.1 and not right:
            answer = "no idea"
        messages = [
            Message("assistant", text, channel=name) for text, name in ((reasoning, "analysis"), (answer, "final"))
        ]
        ids = Harmony(TOKENIZER).render_completion(messages)
        cut = rng.random() < 0.1 and not right
        ids = ids[:-3] if cut else ids
        return Sample(ids, [-0.5] * len(ids), [self.version] * len(ids), "length" if cut else "stop")


def kill_at(touch: int) -> None:
    """From now on this process dies at the `touch`-th of the moments in which it touches a file below the run's directory."""
    left = touch

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in TOUCHES and "broken" in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def attempt(arguments: list[str], touch: int | None) -> int:
    """One run in a fork of this process; its exit status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    try:
        if touch is not None:
            kill_at(touch)
        recipe.selfplay(load_run(Path(arguments[0]), SelfplayConfig, arguments[1:]))
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    directory, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    TOKENIZER = Tokenizer.load(directory / "model")
    recipe.NativeEngine = ByScript  # type: ignore[assignment, misc]
    recipe.sampling_engine = lambda learner, *sizes: ByScript(learner.model, *sizes[:2])  # type: ignore[assignment]
    here = [str(directory / "config.toml"), f"--run.directory={directory}", *sys.argv[4:]]
    assert attempt([*here, "--run.name=whole"], None) == 0
    rng = random.Random(seed)
    killed = 0
    for _ in range(kills):
        status = attempt([*here, "--run.name=broken", "--run.resume=auto"], rng.randint(1, 120))
        assert status in (0, signal.SIGKILL), status
        killed += status == signal.SIGKILL
    assert attempt([*here, "--run.name=broken", "--run.resume=auto"], None) == 0
    print(f"killed {killed} of {kills}")
