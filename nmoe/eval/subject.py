"""Opens a checkpoint together with an environment, for commands that sample problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nmoe.config.environment import EnvironmentSettings, held_out
from nmoe.config.loader import load_environment
from nmoe.config.modes import Mode
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.cores import choose_threads
from nmoe.engine.api import Engine
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.served import ServedFleet
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.errors import UserError
from nmoe.eval.evaluate import distinct_problems, sample_problems, say_if_fewer
from nmoe.generation import sampling_notes
from nmoe.model.policy import config_of, load_policy_on
from nmoe.runs.progress import counting
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group
from nmoe.types import ExpertWeightsForm, Precision


class SamplingInterruptedError(UserError):
    """Raised if Ctrl-C interrupts sampling. `groups` has the finished problems.

    They are a biased sample of all problems, because short completions finish first.
    """

    exit_code = 130

    def __init__(self, groups: Sequence[Group], problems: int) -> None:
        super().__init__(f"interrupted after {len(groups):,} of {problems:,} problems")
        self.groups = tuple(groups)


@dataclass(frozen=True)
class Subject:
    """A loaded model with an inference engine and an environment.

    `directory` is the model's checkpoint. `max_new_tokens` is the room that the longest prompt leaves in the model's
    context, unless a lower limit was given. `start` is the state of the environment before its first problem.
    """

    directory: Path
    environment: Environment
    engine: Engine
    context_tokens: int
    max_new_tokens: int
    runtime: ToolRuntime
    start: dict[str, Any]

    def collect(
        self, problems: int, mode: Mode, seed: int, on_group: Callable[[Group], None], done: Collection[str] = ()
    ) -> list[Group]:
        """Samples and grades the environment's first `problems` problems, which are the same on every call, and returns
        their groups.

        `on_group` is called with each finished group. Problems whose keys are in `done` are left out.
        """
        self.environment.load_state(self.start)
        return sample_problems(
            self.engine,
            self.environment,
            self.context_tokens,
            problems=problems,
            samples=mode.samples,
            temperature=mode.temperature,
            max_new_tokens=self.max_new_tokens,
            seed=seed,
            runtime=self.runtime,
            on_group=on_group,
            nondeterminism=mode.is_of_nondeterminism,
            done=done,
        )

    def sample(self, problems: int, mode: Mode, seed: int) -> list[Group]:
        """Samples and grades as `collect` does, and shows the progress.

        Prints a note if the model's authors recommend another way of sampling. At Ctrl-C raises
        SamplingInterruptedError with the finished groups.
        """
        for line in sampling_notes(self.directory, mode.temperature):
            print(line)
        done: list[Group] = []
        with counting("problems", problems) as count:

            def on_group(group: Group) -> None:
                done.append(group)
                count(len(done))

            try:
                return self.collect(problems, mode, seed, on_group)
            except KeyboardInterrupt as error:
                raise SamplingInterruptedError(done, problems) from error


@contextmanager
def open_subject(
    checkpoint: Path,
    environment: Path | EnvironmentSettings,
    problems: int,
    *,
    on_held_out: bool,
    prepare: Callable[[Environment], None] = lambda _: None,
    device: str = "auto",
    expert_weights: ExpertWeightsForm = "dequantized",
    max_tokens: int | None = None,
    precision: Precision | None = None,
    engine: ServedFleet | None = None,
) -> Iterator[Subject]:
    """Loads the model of a run or checkpoint, and an environment, for a `with` block.

    `on_held_out` selects the environment's evaluation split, if it has one. `prepare` may remove problems from the
    environment. `max_tokens` limits a completion. Prints a warning if there are fewer than `problems` distinct
    problems. `engine` has servers that sample in place of the checkpoint's weights, which are not loaded then. Raises
    UserError if the model or the environment cannot be loaded, if the device is missing, if one of the first `problems`
    prompts fills the model's context, and if the servers' context is too short for what may be sampled.
    """
    torch.set_num_threads(choose_threads(0))
    directory = resolve_checkpoint(checkpoint)
    settings = environment if isinstance(environment, EnvironmentSettings) else load_environment(environment)
    loaded = Environment.from_settings(settings, Tokenizer.load(directory))
    if on_held_out and held_out(loaded.settings) is not None:
        loaded = loaded.held_out()
        print("on the eval split, which training never meets")
    prepare(loaded)
    samples_with: Engine
    if engine is None:
        samples_with = NativeEngine(
            load_policy_on(directory, device, expert_weights, precision).requires_grad_(False), 256
        )
    else:
        samples_with = engine
    context = config_of(directory).context_tokens
    start = loaded.state()
    first = distinct_problems(loaded, problems)
    say_if_fewer(loaded, problems, len(first))
    longest = max(len(loaded.prompts.ids(problem)) for problem in first)
    if longest >= context:
        raise UserError(
            f"environment {settings.env_id}: a prompt of {longest} tokens leaves no room in the model's context of "
            f"{context}"
        )
    new_tokens = min(context - longest, max_tokens or context)
    theirs = context if engine is None else engine.served()[0].context_tokens
    if longest + new_tokens > theirs:
        raise UserError(
            f"environment {settings.env_id}: prompts of up to {longest} tokens and completions of {new_tokens} do not fit the "
            f"servers' context of {theirs}; set --max-tokens to {max(theirs - longest, 0)} or less, or start them with a longer "
            "context"
        )
    with ToolRuntime(loaded, SandboxSettings()) as runtime:
        yield Subject(directory, loaded, samples_with, min(context, theirs), new_tokens, runtime, start)
