"""`nmoe env check` shows what an environment does with a problem; `nmoe env list` lists the environments.

The check reads the settings and the local data, renders one problem, and grades a right and a wrong answer to a problem of every
source with the task's verifier, which may be the user's code. Of other user code it imports only a pool of type `python`, and it
uses no network but for tool servers, which it asks for their tools; it says which parts it could not check for that reason.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe.config.base import split_path
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import load_environment, located
from nmoe.config.packaged import find_environment
from nmoe.config.tables.pools import (
    GeneratedPool,
    HubPool,
    MixturePool,
    PrmPool,
    ReasoningGymPool,
    SelfplayPool,
    TaskPool,
    VerifiersPool,
)
from nmoe.config.tables.rewards import (
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    RewardConfig,
    RewardModelRewardConfig,
    Rubric,
    VerifierRewardConfig,
)
from nmoe.config.tables.rollout import BudgetSettings, SandboxSettings, WorkspaceSettings
from nmoe.data.rows import local_copy
from nmoe.envs.environment import Environment, in_format, renderer_of
from nmoe.envs.golds import check_golds
from nmoe.envs.pools.records import record_order
from nmoe.envs.rewards.judge import template_of
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.choice import MultipleChoiceTask
from nmoe.envs.tasks.conversation import AnsweringTask
from nmoe.envs.tasks.live import LiveTask
from nmoe.envs.tasks.task import RecordTask, SandboxTask
from nmoe.envs.tasks.text import OpenTask
from nmoe.envs.tools.builtin import check_source, sandbox_limits
from nmoe.envs.tools.servers import pinned, server_tools
from nmoe.envs.tools.session import ToolSession
from nmoe.envs.user_code import find_definition
from nmoe.errors import UserError, shown
from nmoe.runs.resolve import resolve_tokenizer
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.sandbox.workspaces.sources import WorkspaceError, identity_of, source_of
from nmoe.text.conversation import ToolDefinition
from nmoe.text.printable import printable, token_table
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from nmoe.types import Exchange, Grade, Metadata, Problem, Turn, single_turn

# Stands in for a dataset that is not available locally. Every task with short answers can pose and grade it.
_STAND_IN = ("What is 6 * 7?", "42")
# For tasks that read records in a special form.
_STAND_IN_RECORDS: dict[str, dict[str, Any]] = {
    "humaneval": {
        "task_id": "stand-in",
        "prompt": 'def add(a, b):\n    """Adds two numbers."""\n',
        "canonical_solution": "    return a + b\n",
        "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    },
    "mbpp": {
        "text": "Write a function to add two numbers.",
        "code": "def add(a, b):\n    return a + b",
        "test_list": ["assert add(2, 3) == 5"],
    },
    "program": {
        "problem": "Add the two numbers on the first line.",
        "solutions": ["print(sum(map(int, input().split())))"],
        "tests": [{"type": "stdin_stdout", "input": "2 3\n", "output": "5\n"}],
    },
}
# Stands in for a tool of the user's, whose module is not imported.
_STAND_IN_TOOL = ToolDefinition("stand_in", "A tool.", {"type": "object", "properties": {}})
_DATALESS = GeneratedPool(type="generated", task_type="sort")


@dataclass(frozen=True)
class _Graded:
    """An example answer after grading: the token ids of its completion, its verdict in words, and whether that verdict is as
    expected.
    """

    answer: str
    completion_ids: list[int]
    said: str
    as_wanted: bool


def check_environment(named: Path, tokenizer_of: Path | None) -> Iterator[str]:
    """Checks an environment and yields the report line by line. If there are mistakes, raises UserError at the end with all of
    them, one line each.

    Raises ConfigError, with all its problems, if the settings themselves are invalid. Raises UserError at once for `format =
    "chat"` without a tokenizer.
    """
    path = find_environment(str(named))
    settings = load_environment(path)
    if settings.format == "chat" and tokenizer_of is None:
        raise UserError(
            f'{path}: format = "chat" is rendered by the template of a tokenizer: name one with --tokenizer'
        )
    tokenizer, origin = tokenizer_of_directory(tokenizer_of)
    by_tokenizer = ", chosen by the tokenizer" if settings.format == "auto" else ""
    settings = in_format(settings, tokenizer)
    # A byte tokenizer makes the example answers longer than a policy's. The check is about form, so it lifts the budget.
    unlimited = settings.model_copy(update={"budget": BudgetSettings()})
    yield f"environment  {settings.env_id}, version {settings.version}, from {path}"
    if settings.description:
        yield f"             {settings.description}"
    yield f"format       {settings.format}{by_tokenizer}"
    yield f"pool         {describe_pool(settings.task_pool)}"
    yield f"reward       {_describe_reward(settings)}"
    yield f"tokenizer    {origin}"
    mistakes: list[str] = []
    for name in () if settings.tools is None else settings.tools.use:
        try:
            yield f"tool         {name}" + (f", defined in {check_source(name)}, not imported" if ":" in name else "")
        except UserError as error:
            yield f"tool         {name}: cannot be used"
            mistakes.append(_placed(path, error))
    if settings.tools is not None and settings.tools.servers:
        try:
            tools = pinned(settings.tools)
            yield from (
                f"tool         {one.name}, of the server {one.server.settings.name}" for one in server_tools(tools)
            )
        except UserError as error:
            yield "tool         of a server: cannot be used"
            mistakes.append(_placed(path, error))
            tools = settings.tools.model_copy(update={"servers": ()})
        unlimited = unlimited.model_copy(update={"tools": tools if tools.use or tools.servers else None})
    if settings.tools is not None and any(":" in name for name in settings.tools.use):
        yield "             the prompt below declares the tools of nmoe alone; yours are declared once they are imported"
        try:  # yours are not loaded, and a format that takes no tools refuses them when a run begins
            renderer_of(settings, tokenizer, [_STAND_IN_TOOL])
        except UserError as error:
            mistakes.append(_placed(path, error, "[tools] "))
    for reward in settings.rewards:
        try:
            yield f"reward       {reward.name}: {_describe_source(reward)}"
        except UserError as error:
            yield f"reward       {reward.name}: cannot be used"
            mistakes.append(_placed(path, error))
    problems: list[Problem] = []
    rendered = False
    for name, pool in sources_of(settings):
        yield ""
        here = is_here(pool)
        try:
            # Without its data, an environment's format, system message and rewards can still be checked.
            its_own = unlimited.model_copy(update={"env_id": name, "task_pool": pool if here else _DATALESS})
            environment = Environment(its_own, tokenizer, user_code=False)
        except UserError as error:
            yield f"source {name}: cannot be used"
            mistakes.append(_placed(path, error, f"source {name}: "))
            continue
        if environment.pool.order.read_as:
            yield f"records      {environment.pool.order.read_as}"
        problem = environment.pool.order.at(0) if here else _stand_in(name, pool)
        if not here:
            yield f"source {name}: {describe_pool(pool)}: not here and not fetched, so that its records were not checked"
            yield "the problem below stands in for them" if problem else "no problem can stand in for them"
        if problem is None:
            continue
        problems.append(problem)
        if here:
            try:
                yield from _checked_golds(environment)
            except UserError as error:
                mistakes.append(_placed(path, error, f"source {name}: "))
        right, wrong = _graded(environment, problem)
        if not rendered:
            rendered = True
            yield from _rendered(environment, tokenizer, problem, right)
        if isinstance(TASKS[problem.task_type], OpenTask):
            yield f"problem {problem.id}: open, so that no answer to it is right or wrong"
            continue
        if TASKS[problem.task_type].knows_answer(problem):
            yield f"problem {problem.id}, gold {shown(problem.gold)}"
            yield f"  right answer {shown(right.answer)}: {right.said}"
            yield f"  wrong answer {shown(wrong.answer)}: {wrong.said}"
            mistakes += (f"{path}: {said}" for said in _verdict_mistakes(problem, right, wrong))
        else:
            yield f"problem {problem.id}: no right answer to it is known, so that none was graded"
        if isinstance(TASKS[problem.task_type], AnsweringTask):
            try:
                yield from _conversation(environment, tokenizer, problem, wrong)
            except UserError as error:
                mistakes.append(_placed(path, error, f"problem {problem.id}: "))
    yield ""
    if settings.workspace is not None:
        try:
            yield f"workspace    {_describe_workspace(settings.workspace, problems)}"
        except (UserError, WorkspaceError) as error:
            yield "workspace    cannot be used"
            mistakes.append(f"{path}: [workspace] {error}")
    if mistakes:
        count = "" if len(mistakes) == 1 else f"{len(mistakes)} problems\n"
        raise UserError(count + "\n".join(mistakes))
    yield "ok"


def _placed(path: Path, error: UserError, within: str = "") -> str:
    """Returns a mistake as text, headed by the settings file and the line that names the missing part; if that line is unknown, by
    the file and `within`.
    """
    placed = located(error, path, (), EnvironmentSettings)
    return f"{path}: {within}{error}" if placed is error else str(placed)


def describe_pool(pool: TaskPool) -> str:
    """Describes a pool in a few words: `generated sort`, `jsonl data.jsonl as math`, `mixture of add (generated add), gsm8k (hf
    openai/gsm8k as gsm8k)`.
    """
    if isinstance(pool, MixturePool):
        return "mixture of " + ", ".join(f"{source.name} ({describe_pool(source)})" for source in pool.sources)
    if isinstance(pool, ReasoningGymPool):
        return f"reasoning_gym {pool.dataset}"
    if isinstance(pool, VerifiersPool):
        return f"verifiers {pool.environment} in {pool.venv}"
    if isinstance(pool, SelfplayPool):
        return f"selfplay {pool.source}"
    if isinstance(pool, PrmPool):
        return f"prm {pool.source} as {pool.task_type}"
    data = getattr(pool, "path", None) or getattr(pool, "dataset", None)
    return f"{pool.type} {pool.task_type}" if data is None else f"{pool.type} {data} as {pool.task_type}"


def tokenizer_of_directory(of: Path | None) -> tuple[Tokenizer, str]:
    """Returns the tokenizer of a directory, or an untrained byte tokenizer with Harmony's control tokens, and its description."""
    if of is None:
        origin = "nmoe's own, untrained: each byte a token (--tokenizer takes a run, checkpoint or tokenizer directory)"
        return Tokenizer.train((), SMALLEST_VOCABULARY), origin
    directory = resolve_tokenizer(of)
    return Tokenizer.load(directory), str(directory)


def sources_of(settings: EnvironmentSettings) -> Iterator[tuple[str, TaskPool]]:
    """Yields the sources of an environment's problems by name."""
    pool = settings.task_pool
    if isinstance(pool, MixturePool):
        yield from ((source.name, source) for source in pool.sources)
    else:
        yield settings.env_id, pool


def is_here(pool: TaskPool) -> bool:
    """Returns whether the records of a pool are on this machine; any but a dataset of the hub are, or do not load."""
    return not isinstance(pool, HubPool) or local_copy(split_path(pool.dataset)[0]) is not None


def _stand_in(name: str, pool: TaskPool) -> Problem | None:
    """Returns an example problem for a dataset that is not stored locally; None if the dataset's task cannot pose one."""
    assert isinstance(pool, HubPool), "only a dataset can be elsewhere"
    if isinstance(TASKS[pool.task_type], OpenTask):
        return Problem(f"{name}/stand-in", pool.task_type, _STAND_IN[0], "", name)
    if isinstance(TASKS[pool.task_type], RecordTask):
        record = _STAND_IN_RECORDS.get(pool.task_type)
        return None if record is None else record_order(name, pool, [("stand-in", record)], "stand-in").at(0)
    task, (question, gold) = TASKS[pool.task_type], _STAND_IN
    metadata: Metadata = {}
    if isinstance(task, MultipleChoiceTask):
        question, gold, metadata = task.pose(question, gold, {"choices": ["36", gold]})
    problem = Problem(f"{name}/stand-in", pool.task_type, question, gold, name, metadata=metadata)
    try:
        task.check_gold(problem)
    except UserError:
        return None
    return problem


def _graded(environment: Environment, problem: Problem) -> tuple[_Graded, _Graded]:
    right, wrong = TASKS[problem.task_type].example_answers(problem)
    return _grade(environment, problem, right, True), _grade(environment, problem, wrong, False)


def _grade(environment: Environment, problem: Problem, answer: str, wanted: bool) -> _Graded:
    ids = environment.grader.answer_ids(problem, answer)
    grade = asyncio.run(graded_in_session(environment, problem, ids))
    if grade.verdict is None:
        said, correct = f"not compared ({grade.failure})", False
    else:
        verdict = grade.verdict
        components = ", ".join(f"{name} {value:g}" for name, value in grade.components.items())
        said = f"{verdict.outcome} ({verdict.layer}: {verdict.reason}); {components}"
        correct = verdict.outcome == "correct"
    return _Graded(answer, ids, said, as_wanted=correct == wanted and grade.failure == "ok")


def _checked_golds(environment: Environment) -> Iterator[str]:
    notes: list[str] = []
    sandboxes = sandboxes_for(environment) if environment.wants_sandbox else None
    if sandboxes is not None:
        notes.append(f"sandbox: {sandboxes.describe()}")
    check_golds(environment, sandboxes, notes.append)
    yield from notes


def sandboxes_for(environment: Environment) -> Sandboxes:
    """Returns the factory of sandboxes for solutions and tests, which come with the data and therefore run under the same isolation
    as a policy's code.
    """
    return Sandboxes(SandboxSettings(warm=0), sandbox_limits(environment.budget))


async def graded_in_session(environment: Environment, problem: Problem, ids: list[int]) -> Grade:
    sandboxes = sandboxes_for(environment) if isinstance(TASKS[problem.task_type], SandboxTask) else None
    async with ToolSession(sandboxes) as session:
        return await environment.grader.grade(problem, single_turn(ids), len(ids), session=session)


def _verdict_mistakes(problem: Problem, right: _Graded, wrong: _Graded) -> Iterator[str]:
    if not right.as_wanted:
        yield f"problem {problem.id}: its gold answer {shown(right.answer)} has to be graded correct, and is {right.said}"
    if not wrong.as_wanted:
        yield f"problem {problem.id}: the wrong answer {shown(wrong.answer)} has to be graded incorrect, and is {wrong.said}"


def _conversation(environment: Environment, tokenizer: Tokenizer, problem: Problem, wrong: _Graded) -> Iterator[str]:
    """Yields the report's lines on how the conversation continues after the wrong answer. Raises UserError if the task responds to
    the same turn in two ways, because such a conversation cannot be replayed.
    """
    turns = single_turn(wrong.completion_ids)
    task = TASKS[problem.task_type]
    if isinstance(task, LiveTask):
        problem, exchange = asyncio.run(_live_answer(task, environment, problem, turns))
        again = exchange  # a replay asks no live environment
        yield f"  opened with the seed 0, it asks {shown(problem.question)}"
    else:
        exchange, again = (environment.respond(problem, 0, 0, turns, ()) for _ in range(2))
    if exchange != again:
        raise UserError(
            f"its task answers one turn in two ways, {exchange} and {again}: such a conversation does not replay"
        )
    if exchange is None or exchange.user is None:
        yield f"  after the wrong answer the conversation is over, in the state {exchange and exchange.state}"
        return
    kind, given_ids = environment.prompts.follow_up(problem, turns, (), [exchange])
    yield f"  after the wrong answer the user says {shown(exchange.user)}, in the state {exchange.state}; " + (
        "a new branch begins:" if kind == "prompt" else "the same branch goes on:"
    )
    yield from _indented(tokenizer.decode(given_ids))


async def _live_answer(
    task: LiveTask, environment: Environment, problem: Problem, turns: Sequence[Turn]
) -> tuple[Problem, Exchange | None]:
    """Returns the problem as an episode asks it, and its answer to the turns."""
    live = task.begin(environment.budget.wall_s)
    try:
        problem = await live.open(problem, 0)
        said = environment.to_answer(problem, turns, ())
        return problem, None if said is None else await live.step(said, 0)
    finally:
        await live.close()


def _rendered(environment: Environment, tokenizer: Tokenizer, problem: Problem, right: _Graded) -> Iterator[str]:
    prompt_ids = environment.prompts.ids(problem)
    if (default := environment.renderer.default_system) and not problem.history:
        own = (
            "which the environment's `system` replaces" if environment.settings.system else "set `system` to replace it"
        )
        yield f"system       the template has a default, {shown(default)}: {own}"
    yield "prompt, as sampling starts from it:"
    yield from _indented(tokenizer.decode(prompt_ids))
    yield "right answer, as it would be sampled:"
    yield from _indented(tokenizer.decode(right.completion_ids))
    yield f"tokens, {len(prompt_ids)} of the prompt and {len(right.completion_ids)} sampled (mask 1: trained on):"
    ids = prompt_ids + right.completion_ids
    yield from token_table(ids, [int(index >= len(prompt_ids)) for index in range(len(ids))], tokenizer)
    yield ""


def _indented(text: str) -> Iterator[str]:
    yield from (f"  | {line}" for line in printable(text).split("\n"))


def _describe_source(reward: RewardConfig) -> str:
    """Describes where a reward comes from (function and file, service or model) without importing code or calling a service. Raises
    UserError for a missing function or template.
    """
    match reward:
        case FunctionRewardConfig():
            file, _ = find_definition("reward function", reward.call)
            return f"{reward.call}, defined in {file}, not imported: `nmoe preflight` calls it"
        case HttpRewardConfig():
            return f"{reward.url}, not asked"
        case JudgeRewardConfig():
            template_of(reward)
            return f"{reward.model} at {reward.url}, not asked"
        case VerifierRewardConfig():
            return f"the verifier {reward.path}, not loaded"
        case RewardModelRewardConfig():
            return f"the reward model {reward.path}, not loaded"


def _describe_reward(settings: EnvironmentSettings) -> str:
    further = {reward.name: reward.weight for reward in settings.rewards}
    if settings.curriculum is None:
        return _sum((settings.rubric or Rubric()).model_dump() | further)
    stages = settings.curriculum.stages
    return "; ".join(f"stage {stage.name}: {_sum(stage.weights.model_dump() | further)}" for stage in stages)


def _describe_workspace(settings: WorkspaceSettings, problems: Sequence[Problem]) -> str:
    """Describes where the workspace's files come from: a directory, or a repository at the commit of the first problem.

    Raises UserError or WorkspaceError if they are not available, or uv for a bootstrap by it.
    """
    at = problems[0] if problems else Problem("any", "", "", "", "")
    origin = identity_of(source_of(settings, at))
    if settings.bootstrap == "uv" and shutil.which("uv") is None:
        raise UserError('bootstrap = "uv", and there is no command uv; install it')
    where = origin.get("directory") or f"{origin['repository']} at {origin['base_commit'][:12]}"
    return f"{where}; bootstrap {settings.bootstrap}, not run by a check; keep {settings.keep}"


def _sum(weights: dict[str, float]) -> str:
    return " + ".join(f"{weight:g} {name}" for name, weight in weights.items() if weight)
