"""A model provider for inspect-ai that samples from a checkpoint in this process (optional dependency `inspect`).

    import inspect_ai
    import nmoe.eval.inspect_model  # registers the provider
    inspect_ai.eval(task, model="nmoe/runs/sort_grpo", temperature=0.0)

Conversations are rendered in the format of the run's environment, or in the tokenizer's chat format for other
checkpoints. Requests that arrive during sampling wait, and are then sampled together. Requests with tools are refused,
because nmoe runs only its own tools, in a sandbox.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import anyio.to_thread
from inspect_ai.model import (  # type: ignore[import-not-found]
    ContentReasoning,
    ContentText,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import renderer_as_trained
from nmoe.envs.pools.pool import stable_hash
from nmoe.errors import UserError
from nmoe.model.policy import load_policy_on
from nmoe.runs.resolve import resolve_checkpoint, trained_on
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Sample, Sampling

# Settings that would change the sampled tokens, and that the engine lacks.
_REFUSED = ("stop_seqs", "best_of", "frequency_penalty", "presence_penalty", "logit_bias", "num_choices", "logprobs")
_SEQUENCES = 256


@modelapi(name="nmoe")
class NmoeAPI(ModelAPI):
    """The inspect-ai model of a run or checkpoint.

    Raises UserError if the checkpoint cannot be loaded, and for a request with tools or with a setting that the engine
    lacks.
    """

    def __init__(self, model_name: str, device: str = "auto", **given: Any) -> None:
        super().__init__(model_name, **given)
        checkpoint = Path(model_name)
        directory = resolve_checkpoint(checkpoint)
        self._renderer = renderer_as_trained(trained_on(checkpoint), Tokenizer.load(directory))
        model = load_policy_on(directory, device, named="device").requires_grad_(False)
        self._context_tokens = model.config.context_tokens
        self._engine = NativeEngine(model, _SEQUENCES)
        self._lock, self._works = Lock(), False
        self._waiting: list[tuple[Request, Future[Sample]]] = []
        self._asked: Counter[tuple[int, ...]] = Counter()

    def max_connections(self) -> int:
        return 32

    async def generate(self, input: Sequence[Any], tools: Sequence[Any], tool_choice: Any, config: Any) -> ModelOutput:
        named = [name for name in _REFUSED if getattr(config, name) not in (None, False)]
        if named or tools:
            raise UserError(f"{', '.join(named) or 'tools'}: not followed by the provider nmoe; leave out")
        prompt = tuple(self._renderer.prompt_ids([Message(one.role, one.text) for one in input]))
        room = self._context_tokens - len(prompt)
        if room < 1:
            return ModelOutput.from_content(self.model_name, "", stop_reason="model_length")
        found: Future[Sample] = Future()
        with self._lock:
            self._asked[prompt] += 1
            # The epochs of a problem differ, in any order of requests.
            seed = stable_hash(config.seed or 0, prompt, self._asked[prompt])
            sampling = Sampling(
                min(config.max_tokens or room, room),
                temperature=1.0 if config.temperature is None else config.temperature,
                top_p=config.top_p or 1.0,
                top_k=config.top_k or 0,
                stop_ids=tuple(self._renderer.stop_ids),
                seed=seed,
            )
            self._waiting.append((Request(prompt, 1, sampling, f"{seed:x}"), found))
            begins, self._works = not self._works, True
        if begins:
            Thread(target=self._work, name="nmoe-inspect", daemon=True).start()
        sample = await anyio.to_thread.run_sync(found.result)
        reasoning, text = self._renderer.said(sample.token_ids)
        content = [*([ContentReasoning(reasoning=reasoning)] if reasoning else []), ContentText(text=text)]
        stop = "stop" if sample.finish_reason == "stop" else "max_tokens"
        output = ModelOutput.from_content(self.model_name, content, stop_reason=stop)
        read, said = len(prompt), len(sample.token_ids)
        output.usage = ModelUsage(input_tokens=read, output_tokens=said, total_tokens=read + said)
        return output

    def _work(self) -> None:
        """Samples the waiting requests in batches until none is left."""
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, []
                if not batch:
                    self._works = False
                    return

            async def all_of_them(asked: Sequence[tuple[Request, Future[Sample]]] = batch) -> list[list[Sample]]:
                return await asyncio.gather(*(self._engine.generate(request) for request, _ in asked))

            try:
                for (_, found), (sample,) in zip(batch, self._engine.run(all_of_them()), strict=True):
                    found.set_result(sample)
            except BaseException as error:
                for _, found in batch:
                    if not found.done():
                        found.set_exception(error)
