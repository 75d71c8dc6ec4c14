"""Episodes that an environment plays in a separate process, asking the policy by OpenAI's API (`nmoe.envs.outside`).

The process gets a task, the address and the name of a session, and answers with the reward. The session's turns are the trajectory,
and have to be the ones that the environment says it heard: a reward for other words would teach the wrong ones.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nmoe.envs.outside.process import Answer, Host
from nmoe.envs.tasks.live import EnvironmentLostError
from nmoe.envs.tasks.own import TaskError
from nmoe.rollout.programs import Session, ended_in_time
from nmoe.types import Exchange, Failure


async def play_outside(host: Host, url: str, name: str, session: Session, seconds: float) -> Failure | None:
    """Plays a session's episode to its end, and records its reward as the exchange of its last turn. `seconds` bound the time in
    which the environment waits for no turn.

    Returns how the episode ended, None if the environment ended it. Raises EnvironmentLostError if the environment or its process
    is lost or takes too long, TaskError for an environment that raises or gives no reward, and a failure of the
    run while it sampled.
    """
    episode = session.episode
    record = episode.problem.metadata
    running = await host.started()  # which may take longer than an episode
    playing = asyncio.ensure_future(host.play(running, int(record["record"]), str(record["key"]), url, name))
    try:
        ended = await ended_in_time(playing, session, seconds)
    finally:
        playing.cancel()
    if session.error is not None:
        raise session.error
    if not ended:
        raise EnvironmentLostError(f"{host.name} took longer than {seconds:g} s (budget.wall_s)")
    answer = playing.result()
    if "ended" in answer and session.ended is not None:
        return session.ended  # it had no further turn, and the environment cannot score what there was
    if reason := answer.get("lost") or answer.get("ended"):
        raise EnvironmentLostError(f"{host.name}: {reason}")
    if "broken" in answer:
        raise TaskError(f"{host.name}: {answer['broken']}")
    _agree(host.name, answer, session)
    info = {kind: {key: _plain(value) for key, value in answer[kind].items()} for kind in ("rewards", "metrics")}
    episode.exchanges.append(Exchange(len(episode.turns) - 1, info, None, _reward(host.name, answer)))
    return session.ended


def _agree(name: str, answer: Answer, session: Session) -> None:
    """Compares what the environment heard with what the policy said."""
    heard, said = Counter[str](answer["said"]), Counter(session.said)
    if other := heard - said:
        raise TaskError(
            f"{name}: it scored {next(iter(other))!r}, which the policy did not say: {session.said}; other text would have to be "
            "encoded again, and the policy did not sample it"
        )
    if missing := said - heard:
        raise EnvironmentLostError(f"{name}: it did not hear the turn {next(iter(missing))!r}")
    if not session.said:
        raise EnvironmentLostError(f"{name}: it ended, and never asked for a turn")


def _reward(name: str, answer: Mapping[str, Any]) -> float:
    reward = answer["reward"]
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return float(reward)
    raise TaskError(f"{name}: it gave the reward {reward!r}, not a finite number")


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) and math.isfinite(value) else str(value)
