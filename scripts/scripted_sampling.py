"""Draws completions by a hash instead of a model's samples, for tiny runs whose model could not yet call a tool or judge a proof.

Each is rendered in Harmony, and its log-probabilities are the model's own: the run learns from it as from any sample.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmoe.engine.api import Engine, Request
    from nmoe.types import Message, Sample

GenerateFunction = Callable[["Request", "Engine"], Any]


def uses_the_tool(tokenizer_directory: Path) -> GenerateFunction:
    """A `generate_fn` whose episodes append the digits to a file with the python tool, read all of it, and answer with what it
    shows, reversed or not. So an episode that found another one's file would answer something else."""
    from nmoe.types import Message

    def turn(text: str, rng: random.Random) -> list[Message]:
        if "<|start|>functions.python" not in text:
            digits = text.rpartition("Reverse: ")[2][:3]
            arguments = json.dumps({"code": f"open('kept','a').write('{digits}')\nprint(open('kept').read())"})
            return [Message("assistant", arguments, "commentary", recipient="functions.python", content_type="json")]
        shown = "".join(letter for letter in text.rpartition("functions.python")[2] if letter.isdigit())
        return [Message("assistant", shown[::-1] if rng.random() < 0.6 else shown, "final")]

    return _generates(tokenizer_directory, turn)


def plays_the_roles(tokenizer_directory: Path) -> Callable[[Engine, Request], AsyncIterator[tuple[int, Sample]]]:
    """In place of `NativeEngine.samples`: the proofs, verifications and checks of self-play, with random scores, one in ten not in
    its form."""
    from nmoe.types import Message

    def turn(text: str, rng: random.Random) -> list[Message]:
        score = rng.choice(("0", "0", "0.5", "1"))
        evaluation = (
            f"Here is my evaluation of the solution:\nStep {rng.randint(1, 3)}.\n"
            f"Based on my evaluation, the final overall score should be: {score}"
        )
        if rng.random() < 0.1:
            return [Message("assistant", "no idea", "final")]
        if "## Evaluation\n" in text:
            return [Message("assistant", evaluation, "analysis"), Message("assistant", rng.choice("011"), "final")]
        if "## Solution\n" in text:
            return [Message("assistant", evaluation, "analysis"), Message("assistant", score, "final")]
        proof = f"## Solution\n4+{rng.randint(1, 9)}\n\n## Self Evaluation\n{evaluation}"
        return [Message("assistant", evaluation, "analysis"), Message("assistant", proof, "final")]

    generate = _generates(tokenizer_directory, turn)

    async def samples(engine: Engine, request: Request) -> AsyncIterator[tuple[int, Sample]]:
        for index, sample in enumerate(await generate(request, engine)):
            sample.versions = [0] * len(sample.token_ids)
            yield index, sample

    return samples


def _generates(directory: Path, turn: Callable[[str, random.Random], list[Message]]) -> GenerateFunction:
    """A `generate_fn` that samples the messages which `turn` returns for the text so far and a generator of random numbers."""
    from nmoe.text.harmony import Harmony
    from nmoe.text.tokenizer import Tokenizer
    from nmoe.types import Sample

    tokenizer = Tokenizer.load(directory)
    harmony = Harmony(tokenizer)

    async def generate(request: Request, engine: Engine) -> list[Sample]:
        text, samples = tokenizer.decode(request.prompt_ids), []
        for index in range(request.samples):
            rng = random.Random(f"{request.request_id} {index} {request.sampling.seed} {text}")
            ids = harmony.render_completion(turn(text, rng))
            logprobs = await engine.score((*request.prompt_ids, *ids))
            samples.append(Sample(ids, logprobs[-len(ids) :], [], "stop"))
        return samples

    return generate
