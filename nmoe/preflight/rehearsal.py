"""Rehearses a step of reinforcement learning on one problem: prompt template, graders, rewards, and numerical agreement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Protocol

from nmoe.config.commands import RLConfig
from nmoe.config.environment import reseeded
from nmoe.config.tables.rewards import FunctionRewardConfig
from nmoe.engine.api import Engine, Request
from nmoe.engine.function import FunctionEngine
from nmoe.engine.rank_sampling import sampling_engine
from nmoe.envs.environment import Environment
from nmoe.envs.rewards.scored import attach_scorers
from nmoe.envs.tasks import TASKS
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.learner.learner import Learner
from nmoe.model.device import choose_device
from nmoe.model.exactness import numerics_here
from nmoe.monitor.mismatch import highest_mismatch
from nmoe.parallel.gang import everywhere
from nmoe.preflight.check import Check
from nmoe.recipes.setup import load_tokenizer
from nmoe.rl.experience import policy_batch
from nmoe.rl.policy import policy_learner
from nmoe.rollout.collector import Collector
from nmoe.runs.samples import shortened
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Problem, Sample, Sampling
from nmoe.verifier.scorers import RewardModel, load_scorer, load_step_scorer

_TEXT = "x = 3.5 * (2 + 1)\n\n\tOne, two:  <b>caf\u00e9</b> \u4e2d\u6587 \U0001f600"
_SAMPLES = 4
# The most new tokens of a sample: enough to show what the model says, and to compare log-probabilities.
_NEW_TOKENS = 128
# How many of the samples are shown, and how many characters of each.
_SHOWN, _CHARACTERS = 2, 120
# The largest difference of a token's log-probabilities over the highest mean that rounding explains.
_LARGEST_OVER_MEAN = 40.0


class _Collect(Protocol):
    def __call__(self, engine: Engine, *, samples: int, max_new_tokens: int) -> list[Trajectory]: ...


def rehearse(config: RLConfig) -> Iterator[Check]:
    """Rehearses a step of the run on one problem, without training, and yields the checks of its parts.

    Raises UserError if a part of the run cannot be made.
    """
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(reseeded(config.environment, config.run.seed), tokenizer)
    problem = environment.pool.order.at(0)
    yield round_trip(tokenizer)
    yield template(environment, tokenizer, problem, config.sampling.max_new_tokens)
    device = config.model.device
    attach_scorers(
        environment.rewards,
        partial(load_scorer, device=device),
        partial(load_step_scorer, device=device),
        partial(RewardModel.load, device=device),
    )
    learner = everywhere(policy_learner, config, tokenizer)
    environment.leave_out_overlong(learner.model.config.context_tokens, config.sampling.max_new_tokens)
    problem = environment.pool.take(1)[0]
    engine = sampling_engine(learner, _SAMPLES, config.engine.cache_mb, config.engine.expert_parallel)
    with ToolRuntime(environment, config.sandbox) as tools:
        yield Check("sandbox", "ok", "none is needed" if tools.sandboxes is None else tools.sandboxes.describe())
        yield Check("golds", "ok", "all that [task_pool] check_gold selects are graded correct")
        context = learner.model.config.context_tokens

        def collect(engine: Engine, *, samples: int, max_new_tokens: int) -> list[Trajectory]:
            """Samples and grades one group of samples; the result depends only on the engine and the arguments."""
            collector = Collector(engine, environment, context, tools.sandboxes, workspaces=tools.workspaces)
            sampling = Sampling(max_new_tokens, config.sampling.temperature)
            (group,) = collector.collect([problem], samples, sampling, (config.run.seed, "preflight")).groups
            return list(group.trajectories)

        yield rewards(config, environment, engine, learner, problem, collect)
        exact = numerics_here(config.model.numerics, choose_device(device)) == "exact"
        limit = min(_NEW_TOKENS, config.sampling.max_new_tokens)
        sampled = collect(engine, samples=_SAMPLES, max_new_tokens=limit)
        yield mismatch(learner, sampled, exact)
        yield samples(environment, problem, sampled, limit)


def round_trip(tokenizer: Tokenizer) -> Check:
    """Checks that encoding and decoding a text gives the same text."""
    read = tokenizer.decode(tokenizer.encode(_TEXT))
    if read != _TEXT:
        return Check("tokenizer", "fail", f"{_TEXT!r} comes back as {read!r}: text is lost; use another tokenizer")
    return Check("tokenizer", "ok", f"{tokenizer.vocab_size:,} ids; text comes back from its tokens as it was")


def template(environment: Environment, tokenizer: Tokenizer, problem: Problem, max_new_tokens: int) -> Check:
    """Checks that the prompt of a problem contains its messages unchanged, and that a formatted right answer is parsed
    correctly."""
    name, prompt = "template", environment.prompts.ids(problem)
    text = tokenizer.decode(prompt)
    for message in environment.prompts.messages(problem):
        if message.content.strip() not in text:
            lost = (
                f"the prompt of {problem.id} does not have the {message.role} message {message.content[:40]!r} as it is"
            )
            return Check(name, "fail", f"{lost}: the tokenizer loses text, or the template changes it; use another one")
    if not TASKS[problem.task_type].knows_answer(problem):
        return Check(name, "ok", f"the prompt of {problem.id} has {len(prompt)} tokens; its task names no right answer")
    right, _ = TASKS[problem.task_type].example_answers(problem)
    ids, limit = environment.grader.answer_ids(problem, right), environment.prompts.token_limit(max_new_tokens)
    read = environment.grader.answer_text(ids)
    if read is None or right.strip() not in read or ids[-1] not in environment.renderer.stop_ids:
        said = f"the right answer {right[:40]!r} to {problem.id} is read as {(read or '')[:40]!r}"
        return Check(name, "fail", f"{said}: environment.format does not fit the tokenizer")
    said = f"a prompt of {len(prompt)} tokens, its right answer {len(ids)}"
    if environment.renderer.default_system and not environment.settings.system and not problem.history:
        said = f"{said}; the template adds a system message, which the environment's `system` would replace"
    if len(ids) > limit:
        return Check(name, "warn", f"{said}, and completions end at {limit}: raise sampling.max_new_tokens")
    return Check(name, "ok", said)


def rewards(
    config: RLConfig, environment: Environment, engine: Engine, learner: Learner, problem: Problem, collect: _Collect
) -> Check:
    """Checks that equal samples get equal rewards twice, and that the right answer gets a higher reward than a wrong one."""
    name, task = "rewards", TASKS[problem.task_type]
    if not task.knows_answer(problem):
        return Check(name, "ok", "not graded: the task names no right answer")
    limit = environment.prompts.token_limit(config.sampling.max_new_tokens)
    answers = [environment.grader.answer_ids(problem, answer) for answer in task.example_answers(problem)]
    if (longest := max(map(len, answers))) > limit:
        return Check(name, "warn", f"not graded: example answers have {longest} tokens, and completions end at {limit}")
    turn = cycle(answers)

    def say(request: Request, engine: Engine) -> list[Sample]:
        return [Sample(list(ids), [0.0] * len(ids), [], "stop") for ids in islice(turn, request.samples)]

    scripted = FunctionEngine(engine, say, lambda: learner.version, learner.model.config)
    first, again = (collect(scripted, samples=2, max_new_tokens=config.sampling.max_new_tokens) for _ in range(2))
    if why := _why_masked([*first, *again]):
        return Check(name, "fail", f"an example answer to {problem.id} has no reward: {why}")
    # Rewards that say so themselves draw at random, or compare the samples of a group.
    drawn = {
        one.name for one in environment.settings.rewards if isinstance(one, FunctionRewardConfig) and not one.replay
    }
    for pair in zip(first, again, strict=True):
        before, after = ({k: v for k, v in one.grade.components.items() if k not in drawn} for one in pair)
        if before != after:
            said = f"one sample of {problem.id} got {before}, and then {after}"
            return Check(name, "fail", f"{said}: a reward that is not a function of the sample; make it one")
    right, wrong = (trajectory.grade.score for trajectory in first)
    said = f"twice the same; {right:g} for the right answer to {problem.id}, {wrong:g} for a wrong one"
    if right <= wrong:
        return Check(name, "fail", f"{said}: nothing right would be learned; correct the rewards or their weights")
    return Check(name, "ok", said)


def _why_masked(trajectories: Sequence[Trajectory]) -> str:
    """Returns why the first untrainable sample is excluded from training: its failure and the grader's reason; "" if
    all are trainable."""
    masked = next((one.grade for one in trajectories if not one.trainable), None)
    return "" if masked is None else ": ".join(filter(None, (masked.failure, masked.reason)))


def samples(environment: Environment, problem: Problem, sampled: Sequence[Trajectory], limit: int) -> Check:
    """Checks how samples of the untrained model end: shows some with their rewards, and the right answer in the same format."""
    task = TASKS[problem.task_type]
    right = ""
    if task.knows_answer(problem):
        answer, _ = task.example_answers(problem)
        text = environment.tokenizer.decode(environment.grader.answer_ids(problem, answer))
        right = f", whose right answer is {shortened(text, _CHARACTERS)!r}"
    cut = sum(one.truncated for one in sampled)
    ended = f"{cut} of {len(sampled)} samples of {problem.id}{right}, are cut at {limit} tokens"
    shown = "; ".join(_shown_sample(environment, one) for one in sampled[:_SHOWN])
    said = f"{ended}: {shown}"
    if cut == len(sampled) and limit < _NEW_TOKENS:
        return Check("samples", "warn", f"{said}: raise sampling.max_new_tokens, or ask for short answers in `system`")
    return Check("samples", "ok", said)


def _shown_sample(environment: Environment, trajectory: Trajectory) -> str:
    """Formats a sample and its reward as `'The answer is 5' earns 0 (wrong: differs)`."""
    grade = trajectory.grade
    text = shortened(environment.tokenizer.decode(trajectory.token_ids), _CHARACTERS)
    why = (
        grade.failure
        if grade.failure != "ok" or grade.verdict is None
        else f"{grade.verdict.outcome}: {grade.verdict.reason}"
    )
    return f"{text!r} earns {grade.score:g} ({why})"


def mismatch(learner: Learner, sampled: Sequence[Trajectory], exact: bool) -> Check:
    """Checks that the inference engine and the learner compute the same log-probabilities for sampled tokens.

    With exact numerics the difference has to be 0; otherwise it may be as large as rounding explains.
    """
    trajectories = [one for one in sampled if one.trainable]
    if not trajectories:
        return Check("engine and learner", "fail", f"not compared: no sample can be trained on; {_why_masked(sampled)}")
    batch = policy_batch(trajectories, None, "token", _NEW_TOKENS)
    assert batch.behaviour_logprobs_T is not None, "the engine gives the log-probability of each token"
    engine_N = batch.behaviour_logprobs_T[batch.scored_T].double()
    difference_N = (learner.logprobs(batch).result().double().cpu() - engine_N).abs()
    mean, largest = float(difference_N.mean()), float(difference_N.max())
    # What the engine sampled is surprising by its entropy on average.
    precision = str(learner.model.embedding.weight.dtype).removeprefix("torch.")
    bound = 0.0 if exact else highest_mismatch(precision, -float(engine_N.mean()))
    said = f"log-probabilities of {len(difference_N)} tokens differ by {mean:.1e} on average, {largest:.1e} at most"
    if mean > bound or largest > _LARGEST_OVER_MEAN * bound:
        rounding = f"rounding explains {bound:.0e} and {_LARGEST_OVER_MEAN * bound:.0e}"
        more = f"{said}, where {rounding}: the samples would be off-policy from the start"
        return Check("engine and learner", "fail", f'{more}; set model.numerics = "exact", or report it')
    return Check("engine and learner", "ok", said)
