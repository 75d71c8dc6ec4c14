"""The examination of a released model before and after RL: the same held-out problems, greedy, graded leniently.

All tasks have equally many problems, regardless of their weights in training. There is room to end, and the answer counts
wherever it stands (`nmoe.eval.lenient`), so that a gain is not brevity alone. Beside it stands whether a completion ends by
itself and can be read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from nmoe.config.commands import RLConfig
from nmoe.config.environment import EnvironmentSettings, reseeded
from nmoe.config.tables.pools import MixturePool
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.plain import ChoiceTask, OrderTask
from nmoe.errors import UserError
from nmoe.eval.core import CORE, find_sets, read_set, scores
from nmoe.eval.evaluate import distinct_problems
from nmoe.eval.lenient import lenient_verdict
from nmoe.eval.outcomes import key_of
from nmoe.model.policy import load_policy
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import device_and_dtype, settle
from nmoe.rollout.collector import Collector
from nmoe.runs.checkpoint import checkpoint_step
from nmoe.runs.progress import counting
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.waiting import wait_for
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group
from nmoe.types import Message, Problem, Sampling

PROBLEMS = 200
"""Held-out problems of each task; fewer where it has no more."""
ROOM = 128
"""Tokens that a completion may have, many times what an answer in the form asked for needs."""
PASSAGES = 300
"""Of CORE's lambada, after the shuffle that every harness shares."""
SEQUENCES = 64

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why do leaves fall in autumn?",
    "Translate into French: Good morning.",
    "Give me three ideas for dinner.",
)
"""What no task asks, so that a reader sees whether the model still talks as before."""

_LAMBADA = next(one for one in CORE if one.name == "lambada_openai")


@dataclass(frozen=True)
class Answer:
    """A greedy completion of one problem. `in_form`: it ended by itself in the environment's form, and there is an answer in it.
    `right`: the answer is, wherever it stands.

    Example: `Answer("compare", "5f2c01d9a7b3e846", "Which number is larger, 843 or 181?", "843", "The answer is 843", 5,
    ended=True, in_form=True, right=True, reason="read '843'")`.
    """

    task: str
    key: str
    question: str
    gold: str
    text: str
    tokens: int
    ended: bool
    in_form: bool
    right: bool
    reason: str


@dataclass(frozen=True)
class RealExamination:
    """The results of one model.

    chance: by task, what a guess reaches (`guessed`). talk: each of `QUESTIONS` with the model's words. lambada: the loss of each
    passage's last word in nats, or why it was not measured. step: the examined checkpoint's; the base has none.
    """

    answers: list[Answer]
    chance: dict[str, float]
    talk: list[tuple[str, str]]
    lambada: list[float] | str
    step: int | None

    def by_task(self) -> dict[str, list[Answer]]:
        """The answers of each task, tasks in the order of their names."""
        return {name: [one for one in self.answers if one.task == name] for name in sorted(self.chance)}


def examine(who: str, path: Path, config: RLConfig, seed: int) -> RealExamination:
    """Examines the model that a path names on held-out problems of the configuration's environment, in the precision in which RL
    trains. Its lines on the console begin with `who`."""
    config, _ = settle(config)
    directory = resolve_checkpoint(path)
    tokenizer = Tokenizer.load(directory)
    device, dtype = device_and_dtype(config.model)
    model = load_policy(directory, dtype, device)[0].set_numerics(config.model.numerics).requires_grad_(False)
    engine = NativeEngine(model, SEQUENCES, config.engine.cache_mb)
    settings = reseeded(config.environment, seed)
    environment = Environment.from_settings(settings, tokenizer)
    problems = held_out_problems(settings, tokenizer)
    groups = _completed(who, engine, environment, model.config.context_tokens, problems)
    answers = wait_for(_graded(groups, environment))
    for name in sorted({one.task for one in answers}):
        of_task = [one for one in answers if one.task == name]
        right, ended = (
            sum(values) / len(of_task) for values in zip(*((a.right, a.ended) for a in of_task), strict=True)
        )
        print(f"{who}: {name}, {len(of_task)} held-out problems: {right:.1%} right, {ended:.1%} ended", flush=True)
    return RealExamination(
        answers=answers,
        chance=wait_for(guessed(problems)),
        talk=list(zip(QUESTIONS, _talk(engine, environment), strict=True)),
        lambada=_lambada(who, model, tokenizer),
        step=checkpoint_step(directory) if directory.parent.name == "checkpoints" else None,
    )


def held_out_problems(settings: EnvironmentSettings, tokenizer: Tokenizer) -> list[Problem]:
    """The first `PROBLEMS` different held-out problems of each of the environment's tasks, all of one that has fewer."""
    pool = settings.task_pool
    tasks = {one.name: one for one in pool.sources} if isinstance(pool, MixturePool) else {settings.env_id: pool}
    alone = [settings.model_copy(update={"env_id": name, "task_pool": one}) for name, one in tasks.items()]
    return [
        problem
        for one in alone
        for problem in distinct_problems(Environment.from_settings(one, tokenizer).held_out(), PROBLEMS)
    ]


def _completed(
    who: str, engine: NativeEngine, environment: Environment, context_tokens: int, problems: Sequence[Problem]
) -> list[Group]:
    done = 0
    with counting(f"{who}: problems", len(problems)) as count:

        def on_group(_: Group) -> None:
            nonlocal done
            done += 1
            count(done)

        collector = Collector(engine, environment, context_tokens)
        return collector.collect(
            problems, 1, Sampling(ROOM, temperature=0.0), ("examination",), on_group=on_group, state=None
        ).groups


async def _graded(groups: Sequence[Group], environment: Environment) -> list[Answer]:
    answers = []
    for group in groups:
        (one,) = group.trajectories
        text = environment.grader.answer_text(one.token_ids) or ""
        verdict = await lenient_verdict(group.problem, text)
        answers.append(
            Answer(
                task=group.problem.source,
                key=key_of(group.problem),
                question=group.problem.question,
                gold=group.problem.gold,
                text=text,
                tokens=one.sampled_tokens,
                ended=not one.truncated,
                in_form=one.grade.extras["format_ok"] == 1 and verdict is not None,
                right=verdict is not None and verdict.outcome == "correct",
                reason="there is no answer in it" if verdict is None else verdict.reason,
            )
        )
    return answers


async def guessed(problems: Sequence[Problem]) -> dict[str, float]:
    """The chance level of each task: the better of two guesses, always the most frequent answer, or any of the options that the
    question names."""
    found = {}
    for name in sorted({problem.source for problem in problems}):
        of_task = [problem for problem in problems if problem.source == name]
        frequent = Counter(problem.gold for problem in of_task).most_common(1)[0][0]
        always = [await _share(problem, [frequent] if frequent else []) for problem in of_task]
        picked = [await _share(problem, _options(problem)) for problem in of_task]
        found[name] = max(sum(always), sum(picked)) / len(of_task)
    return found


def _options(problem: Problem) -> list[str]:
    """The options that a question names; where they are to be put in order, all orders but the question's own."""
    task = TASKS[problem.task_type]
    if isinstance(task, OrderTask):
        return [", ".join(one) for one in list(permutations(task.options(problem)))[1:]]
    return task.options(problem) if isinstance(task, ChoiceTask) else []


async def _share(problem: Problem, guesses: Sequence[str]) -> float:
    """The share of guesses that the problem's task judges right."""
    verdicts = [await TASKS[problem.task_type].verify(problem, Attempt(guess)) for guess in guesses]
    return sum(verdict.outcome == "correct" for verdict in verdicts) / max(1, len(verdicts))


def _talk(engine: NativeEngine, environment: Environment) -> list[str]:
    """The model's greedy answers to `QUESTIONS`, under the environment's system message, as `nmoe chat` asks."""
    system = [Message("system", environment.settings.system)] if environment.settings.system else []

    async def ask(question: str) -> str:
        prompt = tuple(environment.renderer.prompt_ids([*system, Message("user", question)]))
        (sample,) = await engine.generate(
            Request(prompt, 1, Sampling(ROOM // 2, temperature=0.0, stop_ids=environment.renderer.stop_ids), question)
        )
        cut = " ..." if sample.finish_reason == "length" else ""
        return f"{environment.grader.answer_text(sample.token_ids) or '(nothing)'}{cut}"

    async def everything() -> list[str]:
        return list(await asyncio.gather(*map(ask, QUESTIONS)))

    return engine.run(everything())


def _lambada(who: str, model: Transformer, tokenizer: Tokenizer) -> list[float] | str:
    """The loss of the last word of each passage, in nats; where the set is not on this machine, why."""
    try:
        path = find_sets().get(_LAMBADA)
        if path is None:
            return f"there is no {_LAMBADA.file}.jsonl among CORE's sets on this machine"
        items = read_set(_LAMBADA, path, PASSAGES)
    except UserError as error:
        return str(error)
    losses = []
    with counting(f"{who}: passages", len(items)) as count:
        for (continuation,) in scores(model, tokenizer, _LAMBADA, items):
            losses.append(-sum(continuation.logprobs))
            count(len(losses))
    return losses
