"""[run], [checkpoint] and [sinks]: name, directory and length of a run, its checkpoints, and where its metrics go."""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import MAX_SEED, Array, Conflict, Section
from nmoe.cores import MOST_THREADS

NAME = r"\w[\w.+=-]*"

# At a thousand steps a second, eleven days.
MOST_STEPS = 10**9


class RunSection(Section):
    """[run]: the name, directory and length of a run."""

    name: str = "run"
    """name of the run, which is written to directory/name; default: the name of this file"""
    directory: str = Field(default="runs", min_length=1)
    """the directory of all runs"""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """seed of all random draws"""
    threads: int = Field(default=0, ge=0, le=MOST_THREADS)
    """CPU threads; 0: `OMP_NUM_THREADS`, or as many as there are cores to use"""
    steps: int = Field(gt=0, le=MOST_STEPS)
    """optimizer steps"""
    resume: bool | Literal["auto"] = False
    """true: resume from the run's latest checkpoint; refused where there is no run of this name. "auto": resume it or, where there
    is none, start it, so that a scheduler can repeat one command"""
    require_clean: bool = False
    """refuse to start if some code is not committed to git"""
    metrics_directory: str | None = Field(default=None, min_length=1)
    """write metrics.jsonl to a folder NAME of this directory; default: $METRICS_LOG_DIR"""
    samples_directory: str | None = Field(default=None, min_length=1)
    """write samples/ to a folder NAME of this directory; default: $SAMPLES_LOG_DIR"""
    spikes_file: str | None = Field(default=None, min_length=1)
    """write spikes.jsonl to this file; default: $SPIKE_LOG_PATH"""

    def conflicts(self) -> Iterator[Conflict]:
        if not re.fullmatch(NAME, self.name):
            yield Conflict("name", "is a directory's name: letters, digits and . _ + = -, the first a letter or digit")


class RecordsRunSection(RunSection):
    """[run] of a command that learns from records: its length can be given in epochs instead."""

    steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """optimizer steps; 0: as many as records.epochs takes"""


class SamplingRunSection(RunSection):
    """[run] of a command whose policy generates completions."""

    show_sample_every: int = Field(default=25, ge=0)
    """steps between samples shown on the console, from the first step on: prompt, completion, reward and its reasons; 0: none"""


class RLRunSection(SamplingRunSection):
    """[run] of reinforcement learning: its length can be given in episodes instead."""

    steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """training steps, each with batch.prompts_per_step prompts; 0: as many as `episodes` takes"""
    episodes: float | None = Field(default=None, gt=0)
    """passes over the task pool, in place of steps: each has (number of problems) // batch.prompts_per_step steps"""


class SelfplayRunSection(SamplingRunSection):
    """[run] of self-play; `steps` count the verifier's training alone."""

    steps: int = Field(default=1, gt=0, le=MOST_STEPS)
    """optimizer steps of the verifier over all rounds; unused without training"""


class CheckpointSection(Section):
    """[checkpoint]: how often a run saves, and how many checkpoints it keeps."""

    every_steps: int = Field(default=50, gt=0)
    """steps between checkpoints"""
    keep: int = Field(default=2, gt=0)
    """number of newest checkpoints to keep; the best one is kept in addition"""
    asynchronous: bool = True
    """write checkpoints while training goes on, from a copy of the state in host memory; false: wait for each"""
    export_directory: str | None = Field(default=None, min_length=1)
    """also write each checkpoint's weights and tokenizer, without the state needed to resume, to a folder with the run's name in
    this directory"""


SinkName = Literal["csv", "tensorboard", "wandb", "trackio"]


class SinksSection(Section):
    """[sinks]: where a run's metrics go besides metrics.jsonl. Nothing leaves the machine unless `to` names "wandb", or "trackio"
    with `trackio_remote`."""

    to: Array[SinkName] = ()
    """any of "csv", "tensorboard", "wandb", "trackio"; empty: metrics.jsonl alone"""
    project: str = Field(default="nmoe", min_length=1)
    """the project of W&B and trackio"""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: written to the run's directory, for `wandb sync` later"""
    trackio_remote: bool = False
    """lets trackio send metrics and alerts where TRACKIO_SPACE_ID, TRACKIO_SERVER_URL or TRACKIO_WEBHOOK_URL says; a run whose
    environment sets one of these is refused without it"""

    def conflicts(self) -> Iterator[Conflict]:
        if len(set(self.to)) < len(self.to):
            yield Conflict("to", "names a sink twice")
