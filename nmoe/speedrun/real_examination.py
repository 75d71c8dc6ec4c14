"""Evaluates a released model before and after RL: greedy answers to the same held-out problems, graded leniently.

All tasks have equally many problems, regardless of their weights in training. Completions have ample room to end, and a
right answer counts anywhere in them (`nmoe.eval.lenient`), so that a gain is not only brevity. The results also say
whether each completion ends by itself and can be parsed.
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
"""The number of held-out problems per task; a task may have fewer."""
ROOM = 128
"""The most tokens of a completion, many times the length of a well-formed answer."""
PASSAGES = 300
"""The number of passages taken from CORE's lambada data set, after the shuffle that all CORE harnesses use."""
SEQUENCES = 64

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why do leaves fall in autumn?",
    "Translate into French: Good morning.",
    "Give me three ideas for dinner.",
)
"""Questions outside of all tasks, with which a reader can see whether the model still talks as before."""

_LAMBADA = next(one for one in CORE if one.name == "lambada_openai")


@dataclass(frozen=True)
class Answer:
    """A greedy completion of one problem, and its grade.

    `in_form`: it ended by itself, has the environment's format and contains an answer. `right`: it contains the right
    answer anywhere.

    Example: `Answer("compare", "5f2c01d9a7b3e846", "Which number is larger, 843 or 181?", "843", "The answer is 843",
    5, ended=True, in_form=True, right=True, reason="read '843'")`.
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
    """The evaluation results of one model.

    chance: by task, the accuracy of guessing (`guessed`).
    talk: each of `QUESTIONS` with the model's answer.
    lambada: the loss of each passage's last word in nats, or a text that says why it was not measured.
    step: the step of the evaluated checkpoint; None for the base model.
    """

    answers: list[Answer]
    chance: dict[str, float]
    talk: list[tuple[str, str]]
    lambada: list[float] | str
    step: int | None

    def by_task(self) -> dict[str, list[Answer]]:
        """Returns the answers by task, in the order of the tasks' names."""
        return {name: [one for one in self.answers if one.task == name] for name in sorted(self.chance)}


def examine(who: str, path: Path, config: RLConfig, seed: int) -> RealExamination:
    """Evaluates the model at `path` on held-out problems of the configuration's environment, in the precision of training.

    Lines on the console begin with the name `who`.
    """
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
    """Returns the first `PROBLEMS` distinct held-out problems of each of the environment's tasks; fewer if a task does
    not have so many."""
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
    """Returns the accuracy of guessing by task, which is the better of two guesses.

    They are always the most frequent answer, and a random one of the options that the question names.
    """
    found = {}
    for name in sorted({problem.source for problem in problems}):
        of_task = [problem for problem in problems if problem.source == name]
        frequent = Counter(problem.gold for problem in of_task).most_common(1)[0][0]
        always = [await _share(problem, [frequent] if frequent else []) for problem in of_task]
        picked = [await _share(problem, _options(problem)) for problem in of_task]
        found[name] = max(sum(always), sum(picked)) / len(of_task)
    return found


def _options(problem: Problem) -> list[str]:
    """Returns the answers that a question offers; for a task of ordering, all orders except the question's own."""
    task = TASKS[problem.task_type]
    if isinstance(task, OrderTask):
        return [", ".join(one) for one in list(permutations(task.options(problem)))[1:]]
    return task.options(problem) if isinstance(task, ChoiceTask) else []


async def _share(problem: Problem, guesses: Sequence[str]) -> float:
    """Returns the share of the guesses that are right."""
    verdicts = [await TASKS[problem.task_type].verify(problem, Attempt(guess)) for guess in guesses]
    return sum(verdict.outcome == "correct" for verdict in verdicts) / max(1, len(verdicts))


def _talk(engine: NativeEngine, environment: Environment) -> list[str]:
    """Returns the model's greedy answers to `QUESTIONS`, with the environment's system message, as `nmoe chat` would."""
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
    """Returns the loss of the last word of each lambada passage, in nats; a text with the reason if the data set is missing."""
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
