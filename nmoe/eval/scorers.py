"""Scorers that are models: a reward model's checkpoint behind the protocol that rewards and best-of-n ask (`nmoe.rl.scorer`)."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from nmoe.data.messages import ChatMessage
from nmoe.data.pairs import render_answer
from nmoe.data.rendering import Renderer, make_renderer
from nmoe.errors import UserError
from nmoe.learner.forward import batch_head_outputs
from nmoe.model.head import Head, load_head
from nmoe.model.policy import load_policy
from nmoe.model.transformer import Transformer
from nmoe.recipes.pair_batch import last_token_batch
from nmoe.rl.scorer import Scorer
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.harmony import Message
from nmoe.text.tokenizer import Tokenizer

# Of one pass. With exact numerics what is scored together changes no score.
TOKENS_PER_PASS = 16384
# Answers whose scores are remembered; an entry is a few hundred bytes.
REMEMBERED = 2**16

Ids = tuple[int, ...]


def load_scorer(path: Path) -> Scorer:
    """What the run or checkpoint at `path` scores answers with. Raises UserError where it is no scorer."""
    return RewardModel.load(path)


class RewardModel:
    """A reward model: the number its head gives at the last token of prompt and answer, as `nmoe reward` trained it to.

    Calls that wait at the same time are answered in one pass, in a thread of its own. A score is a pure function of the text: the
    model runs with exact numerics, so that what else is in the pass does not matter, and a text that was scored lately is not run
    again.
    """

    def __init__(self, model: Transformer, head: Head, renderer: Renderer, origin: str) -> None:
        self._model, self._head, self._renderer, self._origin = model.set_numerics("exact"), head, renderer, origin
        self._scores: OrderedDict[Ids, float] = OrderedDict()
        self._pass = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: dict[Ids, asyncio.Future[float]] = {}
        self._next: list[Ids] = []

    @classmethod
    def load(cls, path: Path) -> RewardModel:
        """Raises UserError where the checkpoint has no head, or one of another kind."""
        directory = resolve_checkpoint(path)
        model = load_policy(directory)[0].requires_grad_(False)
        head = load_head(directory, model.config.hidden_size, "reward").requires_grad_(False)
        if (outputs := head.weight.shape[0]) != 1:
            raise UserError(f"{directory / 'head.json'}: a reward is one number, and this head has {outputs} outputs")
        return cls(model, head, make_renderer(Tokenizer.load(directory)), str(path))

    async def score(self, messages: Sequence[Message], answer: str) -> float:
        """The reward. Raises UserError for a prompt and answer that do not fit the model's context."""
        prompt = tuple(ChatMessage(message.role, message.content, name=message.name) for message in messages)
        ids = tuple(render_answer(self._renderer, prompt, answer).ids)
        if len(ids) > self._model.config.context_tokens:
            raise UserError(
                f"{self._origin}: prompt and answer are {len(ids)} tokens, and this reward model reads at most "
                f"{self._model.config.context_tokens}"
            )
        if ids in self._scores:
            self._scores.move_to_end(ids)
            return self._scores[ids]
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # whoever waited in another loop is gone with it
            self._loop, self._asked, self._next = loop, {}, []
        if ids not in self._asked:
            self._asked[ids] = loop.create_future()
            self._next.append(ids)
            if len(self._next) == 1:
                # Behind all that is ready to run now: whoever asks at the same time will be waiting then.
                loop.call_soon(lambda: loop.create_task(self._answer()))
        return await asyncio.shield(self._asked[ids])

    async def _answer(self) -> None:
        """One pass over everything that waits."""
        taken, self._next = self._next, []
        waiting = {ids: self._asked[ids] for ids in taken}
        try:
            scores = await asyncio.to_thread(self._run, taken)
        except BaseException as error:
            for future in waiting.values():
                if isinstance(error, Exception):
                    future.set_exception(error)
                else:
                    future.cancel()
            if not isinstance(error, Exception):
                raise
        else:
            for (ids, future), value in zip(waiting.items(), scores, strict=True):
                self._scores[ids] = value
                future.set_result(value)
            while len(self._scores) > REMEMBERED:
                self._scores.popitem(last=False)
        finally:
            for ids in taken:
                self._asked.pop(ids, None)

    def _run(self, sequences: Sequence[Ids]) -> list[float]:
        with self._pass:
            batch = last_token_batch(sequences)
            rewards: list[float] = batch_head_outputs(self._model, self._head, batch, TOKENS_PER_PASS)[:, 0].tolist()
        return rewards
