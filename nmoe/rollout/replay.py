"""Replays a recorded trajectory: prompt, parsing of every turn, tool results and grade must all be the same as recorded.

Each check names the compared part and locates the first difference. `nmoe.rl.replay_bundle` adds the log-probabilities, which need
the model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from nmoe.config import registry
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.tables.pools import GeneratedPool, ProgramPool, VerifiersPool
from nmoe.config.tables.rewards import FunctionRewardConfig, Rubric
from nmoe.envs.environment import Environment, identity_of
from nmoe.envs.grade import COMPONENTS
from nmoe.envs.rewards.conversation import samples_of
from nmoe.envs.rewards.reward import Rating, RewardError
from nmoe.envs.rewards.rewards import rate, with_ratings
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.conversation import AnsweringTask
from nmoe.envs.tasks.live import LiveTask
from nmoe.envs.tools.executor import AsyncToolExecutor
from nmoe.envs.tools.session import ToolSession
from nmoe.errors import UserError
from nmoe.rollout.bundle import Bundle
from nmoe.rollout.named_code import refuse_named_code
from nmoe.sandbox.api import OpensSandboxes
from nmoe.sandbox.workspaces.prepare import Workspaces
from nmoe.sandbox.workspaces.sources import WorkspaceError
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Exchange, Failure, Given, Grade, ToolEvent, Turn

# Failures that grading itself determines; every other failure ended the trajectory before it was graded.
_OF_THE_GRADE: frozenset[Failure] = frozenset({"ok", "parse_error", "truncated", "engine_error", "grader_error"})


@dataclass(frozen=True)
class Check:
    """The result of one comparison: `Check("prompt", "57 tokens", None)`. `difference` describes the first difference and its
    location; None if there is none.
    """

    name: str
    compared: str
    difference: str | None = None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.name:<12} {self.compared}: the same"
        return f"{self.name:<12} differs: {self.difference}"


async def replay(
    bundle: Bundle,
    tokenizer: Tokenizer,
    sandboxes: OpensSandboxes | None = None,
    workspaces: Workspaces | None = None,
    *,
    allow_user_code: bool = False,
) -> AsyncIterator[Check]:
    """Yields all checks that need no model, in the order in which the trajectory was produced.

    `sandboxes` are for tools that need one, `workspaces` for an environment that provides files. If the record is
    inconsistent, the replay ends after its first check.

    Raises UserError if the tokenizer differs from the recorded one, if the task is unknown, if tools are missing, or if the bundle
    names user code and `allow_user_code` is not set; none of that code has run then.
    """
    if not allow_user_code:
        refuse_named_code(bundle)
    if tokenizer.fingerprint != bundle.tokenizer:
        raise UserError(
            f"{bundle.path}: rendered with the tokenizer {bundle.tokenizer}, and this one is {tokenizer.fingerprint}; name "
            "the right one with --tokenizer"
        )
    torn = next(bundle.inconsistencies(), None)
    yield Check("record", f"{len(bundle.record['token_ids'])} tokens and their columns", torn)
    if torn is not None:
        return
    yield _environment(bundle)
    trajectory = bundle.trajectory()
    if trajectory.problem.task_type not in registry.TASKS:
        known = ", ".join(registry.TASKS.names())
        raise UserError(f"{bundle.path}: the task {trajectory.problem.task_type!r} is not one of {known}")
    environment = _as_it_was(bundle.settings, trajectory, tokenizer)
    # What asked the policy is not run again: the prompts that it made are in the record alone.
    asks = isinstance(bundle.settings.task_pool, ProgramPool | VerifiersPool)
    if not asks:
        yield _prompt(environment, trajectory)
    yield _text(bundle, tokenizer)
    yield _turns(bundle, environment, trajectory)
    prepare = None if workspaces is None else partial(workspaces.prepare, trajectory.problem)
    async with ToolSession(
        sandboxes, prepare, environment.prompts.files(trajectory.problem), environment.access
    ) as session:
        if workspaces is not None:
            yield await _workspace(trajectory, session)
        if not asks:
            yield await _tools(environment, trajectory, session)
        if isinstance(TASKS[trajectory.problem.task_type], AnsweringTask):
            yield _exchanges(environment, trajectory)
        answered = replace(trajectory, turns=trajectory.turns[-1:]) if asks else trajectory
        yield await _grade(environment, answered, session)
    if bundle.settings.rewards:
        yield await _rewards(bundle.settings, environment, trajectory)
    # Last, because the other checks locate a difference, and a digest only names the part, such as the log-probabilities.
    yield Check("digests", "every part as it was written", _altered(bundle))


async def regraded(settings: EnvironmentSettings, tokenizer: Tokenizer, trajectory: Trajectory) -> Check:
    """Grades a trajectory of an environment without tools and files again, and compares the grade. `[[rewards]]` are not asked."""
    environment = _as_it_was(settings, trajectory, tokenizer)
    async with ToolSession(None) as session:
        return await _grade(environment, trajectory, session)


def _environment(bundle: Bundle) -> Check:
    recorded, now = dict(bundle.record["environment"]), identity_of(bundle.settings)
    name = f"{now['env_id']}, version {now['version']}"
    return Check("environment", name, _first_of(recorded, now, "environment"))


def _as_it_was(settings: EnvironmentSettings, trajectory: Trajectory, tokenizer: Tokenizer) -> Environment:
    """Rebuilds the environment with the recorded reward weights, without its problems, whose data may not be here."""
    update = {
        "task_pool": GeneratedPool(type="generated", task_type="sort"),
        "rubric": Rubric(**_without_rewards(trajectory.grade).weights),
        "curriculum": None,
        # Rewards that a replay does not ask again are dropped, so that no token or service is needed.
        "rewards": tuple(one for one in settings.rewards if isinstance(one, FunctionRewardConfig) and one.replay),
    }
    return Environment.from_settings(settings.model_copy(update=update), tokenizer)


def _prompt(environment: Environment, trajectory: Trajectory) -> Check:
    rendered = environment.prompts.ids(trajectory.problem)
    return Check(
        "prompt",
        f"{len(rendered)} tokens",
        _first_in(trajectory.prompt_ids, rendered, "prompt token", "rendered"),
    )


def _text(bundle: Bundle, tokenizer: Tokenizer) -> Check:
    ids, text = bundle.record["token_ids"], bundle.record["text"]
    decoded = tokenizer.decode(ids)
    difference = None
    if decoded != text:
        # A character can take several tokens, so a prefix may end within one.
        agree = next((n for n, (a, b) in enumerate(zip_longest(text, decoded)) if a != b), 0)
        index = next((n for n in range(len(ids)) if len(tokenizer.decode(ids[: n + 1])) > agree), len(ids) - 1)
        difference = (
            f"token {index}: the tokens say {_around(decoded, agree)}, and the record's text {_around(text, agree)}"
        )
    return Check("text", f"{len(text)} characters decoded from {len(ids)} tokens", difference)


def _turns(bundle: Bundle, environment: Environment, trajectory: Trajectory) -> Check:
    now = [environment.renderer.transcript(turn.said_ids) for turn in trajectory.turns]
    difference = None
    for index, read in enumerate(now):
        recorded = bundle.transcript[index] if index < len(bundle.transcript) else []
        difference = difference or _first_in(recorded, read, f"turn {index}, message", "read")
    messages = sum(map(len, now))
    return Check("turns", f"{len(now)} turns in {messages} messages", difference)


async def _workspace(trajectory: Trajectory, session: ToolSession) -> Check:
    """Creates the workspace again and compares: it must have the same files, or fail again."""
    recorded = dict(trajectory.workspace or {})
    try:
        await session.prepare()
    except WorkspaceError as error:
        # The message may name temporary files; only the fact that it fails again counts.
        now: dict[str, Any] = {"failed": recorded.get("failed", str(error))}
    else:
        assert session.prepared is not None, "an environment with workspaces prepares one"
        keys = ("failed", "base_commit", "target_commit", "content")
        now = {key: session.prepared.provenance.get(key) for key in keys}
    difference = _first_of({key: recorded.get(key) for key in now}, now, "workspace")
    return Check("workspace", f"files {now.get('content', 'that could not be had')}", difference)


async def _tools(environment: Environment, trajectory: Trajectory, session: ToolSession) -> Check:
    """Runs every recorded tool call again, in order, and compares results and rendered answers. Times may differ. The answers of
    servers are taken from the record."""
    executor = AsyncToolExecutor(environment.tools, environment.budget)
    recorded, rounds, differences = list(trajectory.tool_events), list[list[ToolEvent]](), list[str]()
    for index, turn in enumerate(trajectory.turns):
        events = [event for event in recorded if event.call.call_id.startswith(f"{index}/")]
        following = trajectory.turns[index + 1] if index + 1 < len(trajectory.turns) else None
        if not events and following is None:
            break  # the policy was done, or its budget used up
        calls = environment.renderer.calls(index, turn.sample.token_ids)
        said = _first_in([event.call for event in events], calls, f"turn {index}, call", "read")
        if said is not None:
            differences.append(said)
            break
        ours = [event for event in events if not executor.asks_server([event.call])]
        for old, new in zip(ours, await executor.run([event.call for event in ours], session), strict=True):
            said = _first_of(_returned(old), _returned(new), f"turn {index}, call {old.call.call_id}, {old.call.name}")
            differences += [] if said is None else [said]
        rounds.append(events)
        if following is not None and events:
            given = environment.renderer.answer_calls(environment.prompts.messages(trajectory.problem), rounds)
            said = _kind(following, "tool") or _first_in(
                following.given_ids, given, f"turn {index + 1}, given token", "rendered"
            )
            differences += [] if said is None else [said]
    compared = f"{len(recorded)} calls and what they returned" if recorded else "no calls"
    if taken := sum(executor.asks_server([event.call]) for event in recorded):
        compared += f" ({taken} by servers, taken from the record)"
    return Check("tools", compared, differences[0] if differences else None)


def _exchanges(environment: Environment, trajectory: Trajectory) -> Check:
    """Has the task respond to every turn again, and compares the exchanges and the rendered user messages. A live environment is
    not asked: its words are taken from the record."""
    problem, recorded = trajectory.problem, {exchange.turn: exchange for exchange in trajectory.exchanges}
    done: list[Exchange] = []
    ended = len(trajectory.turns)
    for index, turn in enumerate(trajectory.turns):
        turns = trajectory.turns[: index + 1]
        calls = environment.renderer.calls(index, turn.sample.token_ids)
        try:
            if calls:
                now = None
            elif isinstance(TASKS[problem.task_type], LiveTask):
                now = _again(environment, trajectory, turns, done, recorded.get(index))
            else:
                now = environment.respond(problem, trajectory.seed, trajectory.index, turns, done)
        except Exception as error:
            # It may also have raised when the trajectory was recorded, which stopped that run.
            return Check("exchanges", "", f"turn {index}: the task raises {type(error).__name__}: {error}")
        old, new = ({} if one is None else asdict(one) for one in (recorded.get(index), now))
        if (said := _first_of(old, new, f"turn {index}, exchange")) is not None:
            return Check("exchanges", "", said)
        if calls:
            continue
        if now is None or now.user is None:
            ended = index + 1
            break
        done.append(now)
        if index + 1 < len(trajectory.turns):
            following = trajectory.turns[index + 1]
            kind, given = environment.prompts.follow_up(problem, turns, trajectory.tool_events, done)
            said = _kind(following, kind) or _first_in(following.given_ids, given, "given token", "rendered")
            if said is not None:
                return Check("exchanges", "", f"turn {index + 1}, {said}")
    if ended < len(trajectory.turns):
        return Check("exchanges", "", f"turn {ended}: there in the bundle, after a conversation that is over")
    return Check("exchanges", f"{len(recorded)} turns that the task answered")


def _again(
    environment: Environment,
    trajectory: Trajectory,
    turns: Sequence[Turn],
    done: Sequence[Exchange],
    recorded: Exchange | None,
) -> Exchange | None:
    """Returns the recorded answer of a live environment if the last turn is one that it answers. None, too, if it was lost then."""
    return None if environment.to_answer(trajectory.problem, turns, done) is None else recorded


def _kind(turn: Turn, now: Given) -> str | None:
    """Describes the difference if a turn's given tokens are of another kind (tool, user, prompt) than recorded; None if they are
    not.
    """
    return None if turn.given == now else f"given as: {_short(turn.given)} in the bundle, {_short(now)} now"


def _returned(event: ToolEvent) -> dict[str, Any]:
    return {"failure": event.failure, "output": event.output, "reason": event.reason}


async def _grade(environment: Environment, trajectory: Trajectory, session: ToolSession) -> Check:
    recorded, last = _without_rewards(trajectory.grade), trajectory.turns[-1].sample
    ended = None if recorded.failure in _OF_THE_GRADE else recorded.failure
    if recorded.failure == "truncated" and environment.renderer.calls(len(trajectory.turns) - 1, last.token_ids):
        ended = "truncated"  # no tokens were left for the turn after the call
    if recorded.failure == "truncated" and trajectory.exchanges and trajectory.exchanges[-1].user is not None:
        ended = "truncated"  # nor for the turn after the user's message
    try:
        now = await environment.grader.grade(
            trajectory.problem,
            trajectory.turns,
            trajectory.sampling.max_new_tokens,
            ended=ended,
            tool_events=trajectory.tool_events,
            session=session,
            exchanges=trajectory.exchanges,
        )
    except Exception as error:
        # It may also have raised when the trajectory was recorded, which stopped that run.
        return Check("grade", "", f"the grader raises {type(error).__name__}: {error}")
    if recorded.reason:
        # A reward was not available; its failure replaced the trajectory's own, which was not recorded.
        now = replace(now, failure=recorded.failure, reason=recorded.reason)
    return Check("grade", _said(now), _first_of(_graded(recorded), _graded(now), "grade"))


def _without_rewards(grade: Grade) -> Grade:
    """Returns the grade with the rubric's components only, without `[[rewards]]`."""
    if grade.weights.keys() <= set(COMPONENTS):
        return grade
    components = {name: value for name, value in grade.components.items() if name in COMPONENTS}
    weights = {name: value for name, value in grade.weights.items() if name in COMPONENTS}
    score = sum(weights[name] * value for name, value in components.items())
    return replace(grade, components=components, weights=weights, score=score, step_rewards=())


async def _rewards(settings: EnvironmentSettings, environment: Environment, trajectory: Trajectory) -> Check:
    """Calls the functions of `[[rewards]]` again on this single sample, takes other rewards as recorded, and compares the grade."""
    recorded, state = trajectory.grade, trajectory.trainer_state
    if state is None:
        return Check("rewards", "none were asked")
    ratings = {one.name: (one.weight, Rating(recorded.components.get(one.name))) for one in settings.rewards}
    samples = samples_of(environment, [trajectory], state)
    try:
        for reward in environment.rewards:
            (rating,) = await rate(reward, samples)
            ratings[reward.name] = (reward.weight, rating)
        now = with_ratings(_without_rewards(recorded), ratings)
    except RewardError as error:
        return Check("rewards", "", str(error))
    if recorded.reason:
        return Check("rewards", f"none to compare: {recorded.reason}")
    asked = [reward.name for reward in environment.rewards]
    rest = [name for name in ratings if name not in asked]
    compared = "; ".join(
        f"{', '.join(names)} {how}" for names, how in ((asked, "asked again"), (rest, "taken as recorded")) if names
    )
    return Check("rewards", compared, _first_of(_graded(recorded), _graded(now), "grade"))


def _graded(grade: Grade) -> dict[str, Any]:
    """Returns the parts of a grade that must be reproduced. The reason of a verdict is left out, because its wording may change,
    and so are a verifier's step rewards and the names of cached ratings."""
    values = asdict(grade)
    del values["cached"], values["step_rewards"]  # of a verifier, which a replay does not ask
    if values["verdict"] is not None:
        del values["verdict"]["reason"]
    return values


def _said(grade: Grade) -> str:
    verdict = "no verdict" if grade.verdict is None else f"{grade.verdict.outcome} ({grade.verdict.layer})"
    return f"reward {grade.score:g}, {verdict}, {grade.failure}"


def _altered(bundle: Bundle) -> str | None:
    if not bundle.altered:
        return None
    return f"changed since it was written: {', '.join(bundle.altered)}"


def _first_in(recorded: Sequence[Any], now: Sequence[Any], where: str, done: str) -> str | None:
    """Describes the first index at which two sequences differ; None if they are equal."""
    for index, (old, new) in enumerate(zip(recorded, now, strict=False)):
        if old != new:
            return f"{where} {index}: {_short(old)} in the bundle, {_short(new)} {done}"
    if len(recorded) != len(now):
        return f"{where} {min(len(recorded), len(now))}: {len(recorded)} in the bundle, {len(now)} {done}"
    return None


def _first_of(recorded: dict[str, Any], now: dict[str, Any], path: str) -> str | None:
    """Describes the first key whose values differ between two tables; None if they are equal."""
    for key in [*recorded, *(key for key in now if key not in recorded)]:
        old, new = recorded.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            below = _first_of(old, new, f"{path}.{key}")
            if below is not None:
                return below
        elif old != new:
            return f"{path}.{key}: {_short(old)} in the bundle, {_short(new)} now"
    return None


def _around(text: str, index: int) -> str:
    return repr(text[max(0, index - 10) : index + 20])


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else shown[:117] + "..."
