"""Preference pairs from a policy's own samples: for each problem, a correct sample preferred to an incorrect one. `nmoe data pairs
RUN ENVIRONMENT FILE`

Both sides are well-formed turns, so that they differ in their answers and not in their form. A problem without both a correct
and an incorrect well-formed sample gives no pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nmoe.config.modes import mode_of
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.outcomes import is_correct
from nmoe.eval.subject import SamplingInterruptedError, open_subject
from nmoe.runs.storage import write_atomically
from nmoe.trajectory import Group, Trajectory
from nmoe.types import ExpertWeightsForm


def write_pairs(
    checkpoint: Path,
    environment: Path,
    out: Path,
    problems: int,
    samples: int,
    temperature: float,
    seed: int,
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
) -> str:
    """Writes a line with `prompt`, `chosen` and `rejected`, each a list of messages, for every problem that gives a pair. Returns a
    line that says how many there are.

    Raises UserError where there is none, and for a format without messages. After Ctrl-C the pairs of finished problems are
    written before SamplingInterruptedError is raised.
    """
    with open_subject(
        checkpoint, environment, problems, on_held_out=False, device=device, expert_weights=expert_weights
    ) as subject:
        if subject.environment.settings.format == "boxed":
            raise UserError(f'{environment}: format = "boxed" has no messages to write a pair as')
        interrupted: SamplingInterruptedError | None = None
        groups: Sequence[Group]
        try:
            groups = subject.sample(problems, mode_of(None, samples, temperature), seed)
        except SamplingInterruptedError as error:
            groups, interrupted = error.groups, error
        lines = [json.dumps(record) + "\n" for group in groups for record in _pair(subject.environment, group)]
    if interrupted is not None and not lines:
        raise interrupted
    if not lines:
        raise UserError(
            f"{environment}: none of {len(groups)} problems has both a right and a wrong sample in good form; take more "
            "samples, or a policy that is neither perfect nor hopeless"
        )
    write_atomically(out, "".join(lines).encode())
    written = f"{out}: {len(lines)} pairs from {len(groups)} problems of {samples} samples each"
    if interrupted is not None:
        print(written)
        raise interrupted
    return written


def _pair(environment: Environment, group: Group) -> Iterator[dict[str, Any]]:
    sides: dict[bool, list[dict[str, str]]] = {}
    for trajectory in group.trajectories:
        if trajectory.grade.extras["format_ok"] == 1 and len(trajectory.turns) == 1:
            messages = _messages(environment, trajectory)
            # An empty message is well-formed, but a record with one would be refused.
            if all(message["content"].strip() for message in messages):
                sides.setdefault(is_correct(trajectory), messages)
    if len(sides) == 2:
        prompt = [{"role": m.role, "content": m.content} for m in environment.messages(group.problem)]
        yield {"problem": group.problem.id, "prompt": prompt, "chosen": sides[True], "rejected": sides[False]}


def _messages(environment: Environment, trajectory: Trajectory) -> list[dict[str, str]]:
    """The turn in OpenAI's format, plus Harmony's channels."""
    said = environment.transcript(trajectory.turns[-1].sample.token_ids)
    kept = [{key: value for key, value in message.items() if value is not None} for message in said]
    return [{"role": "assistant"} | message for message in kept if "content" in message]
