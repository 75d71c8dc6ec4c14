"""Loads a reward model or verifier as a scorer, by the protocols that rewards and best-of-n use (`nmoe.envs.rewards.reward`).

Concurrent questions to one model are answered in one forward pass.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from nmoe.data.pairs import render_answer
from nmoe.data.prm import split_steps
from nmoe.envs.rewards.reward import Scorer, StepScorer
from nmoe.errors import UserError
from nmoe.learner.passes import batch_head_outputs
from nmoe.model.device import choose_device
from nmoe.model.head import Head, load_head
from nmoe.model.policy import load_policy
from nmoe.model.transformer import Transformer
from nmoe.recipes.preferences import last_token_batch
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.conversation import ChatMessage
from nmoe.text.renderers import Renderer, make_renderer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from nmoe.verifier.form import Mode
from nmoe.verifier.judge import DESCRIPTION, Judge

# Per pass. With exact numerics, the batch does not change a score.
TOKENS_PER_PASS = 16384

Ids = tuple[int, ...]


def load_scorer(path: Path, device: str = "auto") -> Scorer:
    """Loads the run or checkpoint at `path` as a scorer of whole answers. Raises UserError if it is neither a reward model nor a
    verifier.
    """
    described = (resolve_checkpoint(path) / DESCRIPTION).exists()
    return Verifier.load(path, device) if described else RewardModel.load(path, device)


def load_step_scorer(path: Path, device: str = "auto") -> StepScorer:
    """Loads the run or checkpoint at `path` as a scorer of steps. Raises UserError if it is no verifier, or a verifier of whole
    solutions.
    """
    verifier = Verifier.load(path, device)
    if verifier.mode != "step":
        raise UserError(
            f"{path}: this verifier scores whole solutions, and steps are to be judged; train one with --mode=step"
        )
    return verifier


class RewardModel:
    """A reward model trained by `nmoe reward`: the score is its head's output at the last token of prompt and answer.

    Concurrent calls share one forward pass in a separate thread. A score depends on the text only, not on the other sequences of
    the pass, because the model runs with exact numerics. Recent scores are cached.
    """

    def __init__(self, model: Transformer, head: Head, renderer: Renderer, origin: str) -> None:
        self._model, self._head, self._renderer, self._origin = model.set_numerics("exact"), head, renderer, origin
        self._together = Together[Ids, float](lambda taken: self._run(taken))

    @classmethod
    def load(cls, path: Path, device: str = "auto") -> RewardModel:
        """Loads a reward model's checkpoint. Raises UserError if it has no head or one of another kind, or if the device does not
        exist.
        """
        directory = resolve_checkpoint(path)
        model = load_policy(directory, device=choose_device(device))[0].requires_grad_(False)
        head = load_head(directory, model.config.hidden_size, "reward").requires_grad_(False)
        if (outputs := head.weight.shape[0]) != 1:
            raise UserError(f"{directory / 'head.json'}: a reward is one number, and this head has {outputs} outputs")
        return cls(model, head.to(model.device), make_renderer(Tokenizer.load(directory)), str(path))

    async def score(self, messages: Sequence[Message], answer: str) -> float:
        """Returns the reward of an answer, on the model's own scale. Raises UserError if prompt and answer do not fit the model's
        context.
        """
        prompt = tuple(ChatMessage(message.role, message.content, name=message.name) for message in messages)
        ids = tuple(render_answer(self._renderer, prompt, answer).ids)
        if len(ids) > self._model.config.context_tokens:
            raise UserError(
                f"{self._origin}: prompt and answer are {len(ids)} tokens, and this reward model reads at most "
                f"{self._model.config.context_tokens}"
            )
        return await self._together.ask(ids)

    def _run(self, sequences: Sequence[Ids]) -> list[float]:
        batch = last_token_batch(sequences)
        rewards: list[float] = batch_head_outputs(self._model, self._head, batch, TOKENS_PER_PASS)[:, 0].tolist()
        return rewards


Question = tuple[tuple[Message, ...], tuple[str, ...]]


class Verifier:
    """A verifier trained by `nmoe verifier`: scores whole answers (`Scorer`) and, if it judges steps, each step (`StepScorer`).

    An answer's steps are its lines. The score of an answer is the probability that every step is right, the product of the
    steps' probabilities (Lightman et al. 2023, arXiv:2305.20050, section 2.6); a verifier of solutions gives the expected
    score instead. The model runs with exact numerics, so that a score does not depend on the other sequences of a pass.
    """

    def __init__(self, judge: Judge, mode: Mode) -> None:
        self._judge, self.mode = judge, mode
        judge.model.set_numerics("exact").requires_grad_(False)
        self._together = Together[Question, tuple[tuple[float, ...], ...]](self._run)

    @classmethod
    def load(cls, path: Path, device: str = "auto") -> Verifier:
        """Loads a verifier's checkpoint. Raises UserError if it is not a verifier or is incomplete, or if the device does not
        exist.
        """
        judge, described = Judge.load(path, device)
        return cls(judge, described.mode)

    async def score(self, messages: Sequence[Message], answer: str) -> float:
        """Returns the answer's score in [0, 1]; 0 for an answer without a step, or if the steps do not fit the model's context."""
        steps = split_steps(answer)
        if not steps:
            return 0.0
        if self.mode == "step":
            return math.prod(await self.step_scores(messages, steps))
        ((worst, half, best),) = await self._ask(messages, steps)
        return 0 * worst + 0.5 * half + 1 * best

    async def step_scores(self, messages: Sequence[Message], steps: Sequence[str]) -> list[float]:
        """Returns the probability that each step is right; a neutral step counts as right."""
        assert self.mode == "step", "load_step_scorer refuses a verifier of whole solutions"
        return [1 - said[0] for said in await self._ask(messages, steps)]

    async def _ask(self, messages: Sequence[Message], steps: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        return await self._together.ask((tuple(messages), tuple(steps)))

    def _run(self, questions: Sequence[Question]) -> list[tuple[tuple[float, ...], ...]]:
        return [tuple(map(tuple, said_MK.tolist())) for said_MK in self._judge.probabilities(questions)]


# The number of cached answers; an entry is a few hundred bytes.
REMEMBERED = 2**16

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Together(Generic[K, V]):
    """Batches concurrent calls of a function: waiting keys are answered together by one call in a separate thread. Recent answers
    are cached.

    An answer must depend on its key alone.
    """

    def __init__(self, answer: Callable[[Sequence[K]], Sequence[V]]) -> None:
        self._answer_all = answer
        self._known: OrderedDict[K, V] = OrderedDict()
        self._pass = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: dict[K, asyncio.Future[V]] = {}
        self._next: list[K] = []

    async def ask(self, key: K) -> V:
        """Returns the answer for a key. An exception of the function is raised for all keys of the same call."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # callers in another loop ended with it
            self._loop, self._asked, self._next = loop, {}, []
        if key not in self._asked:
            self._asked[key] = loop.create_future()
            self._next.append(key)
            if len(self._next) == 1:
                # Runs after everything that is ready now, so that all concurrent callers are waiting by then.
                loop.call_soon(lambda: loop.create_task(self._answer()))
        return await asyncio.shield(self._asked[key])

    async def _answer(self) -> None:
        """Answers all waiting keys by one call of the function."""
        taken, self._next = self._next, []
        waiting = {key: self._asked[key] for key in taken}
        try:
            answers = await asyncio.to_thread(self._run, taken)
        except BaseException as error:
            for future in waiting.values():
                if isinstance(error, Exception):
                    future.set_exception(error)
                else:
                    future.cancel()
            if not isinstance(error, Exception):
                raise
        else:
            for (key, future), value in zip(waiting.items(), answers, strict=True):
                self._known[key] = value
                future.set_result(value)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        finally:
            for key in taken:
                self._asked.pop(key, None)

    def _run(self, keys: Sequence[K]) -> Sequence[V]:
        with self._pass:
            return self._answer_all(keys)
