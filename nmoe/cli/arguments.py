"""Command-line arguments that several commands share, and functions that load a training command's configuration."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from nmoe.errors import UserError
from nmoe.types import ExpertWeightsForm, Precision

if TYPE_CHECKING:
    from nmoe.config.commands import RunConfig

    C = TypeVar("C", bound=RunConfig)


def finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


ConfigAndOverrides = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG [--section.key=value]",
        help="The run's TOML file or a packaged name, and values that override the file's; --require-clean stands for "
        "--run.require_clean=true.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's directory, one of its checkpoints, or a .gguf file."),
]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="NUMBER", min=0.0, callback=finite, help="Sampling temperature; 0 takes the most likely token."
    ),
]
TemperatureOfMode = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        min=0.0,
        callback=finite,
        help="Sampling temperature; 0 takes the most likely token; default: 0, or as --mode needs.",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="What the model computes on: auto (a GPU where there is one), cpu, cuda or, of several, cuda:1.",
    ),
]
ExpertWeights = Annotated[
    ExpertWeightsForm,
    typer.Option(
        help="Hold experts packed: mxfp4 as a released gpt-oss stores them; fp8 and nvfp4 (0.5 and 0.28 of bfloat16's memory) "
        "quantise any checkpoint's."
    ),
]
PrecisionOfWeights = Annotated[
    Precision | None,
    typer.Option(
        "--precision",
        help="Of weights and activations; default: bfloat16 on a GPU, and on a CPU that multiplies bfloat16 for weights stored in "
        "it, else float32.",
        show_default=False,
    ),
]
ForCommand = Annotated[
    str | None,
    typer.Option(
        "--command",
        metavar="COMMAND",
        help="The command that CONFIG is for, such as dpo or 'rl train'; default: the first that has its tables.",
    ),
]
ResearchLog = Annotated[Path, typer.Option(metavar="FILE", help="The research log, a file of the repository.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of all random draws.")]


@contextmanager
def configured(arguments: list[str], schema: "type[C]", config: "C | None" = None) -> "Iterator[C]":
    """Loads the configuration of a training command if it is not given, checks it, prints the memory that the run will need, and
    yields it.

    Raises UserError for a run that cannot succeed (see `nmoe preflight`). If the `with` block raises UserError because
    an input is missing, the error is extended by the file and line that name this input.
    """
    config = config or read_configuration(arguments, schema)
    from nmoe.config.loader import located
    from nmoe.config.packaged import find_configuration
    from nmoe.preflight.preflight import refuse_to_start
    from nmoe.preflight.resources import said_at_the_start, settled

    try:
        refuse_to_start(config)
        run = Path(config.run.directory) / config.run.name
        if config.run.resume == "auto" and not (run / "config.toml").exists():
            typer.echo(f"{run}: no run to resume yet, so it starts from the beginning")
        with suppress(UserError):  # the run itself reports a missing checkpoint
            config = settled(config)
            for line in said_at_the_start(config):
                typer.echo(line)
        yield config
    except UserError as error:
        file, overrides = file_and_overrides(arguments)
        if (placed := located(error, find_configuration(str(file)), overrides, schema)) is error:
            raise
        raise placed from error


def configuration_of_any(arguments: list[str], command: str | None) -> "tuple[str, RunConfig]":
    """Loads a configuration of any training command; returns the command's name and the configuration.

    `command` names the command; by default it is found from the tables in the file. Raises UserError for an unknown
    `command`.
    """
    from nmoe.config.commands import COMMANDS
    from nmoe.config.kinds import command_for

    name = command or command_for(*file_and_overrides(arguments))
    if name not in COMMANDS:
        raise UserError(f"--command={name}: no training command; one of {', '.join(COMMANDS)}")
    return name, read_configuration(arguments, COMMANDS[name])


def file_and_overrides(arguments: list[str]) -> tuple[Path, list[str]]:
    """Divides the arguments of a command into the path of its configuration and a list of `--section.key=value` overrides.

    Raises UserError if no path is given.
    """
    from nmoe.config.overrides import joined

    arguments = ["--run.require_clean=true" if one == "--require-clean" else one for one in joined(arguments)]
    files = [argument for argument in arguments if not argument.startswith("-")]
    if not files:
        raise UserError(
            f"{arguments[0]} without a CONFIG; name the run's TOML file, then --section.key=value overrides"
        )
    overrides = list(arguments)
    overrides.remove(files[0])
    return Path(files[0]), overrides


def read_configuration(arguments: list[str], schema: "type[C]") -> "C":
    """Loads the configuration that a command's arguments name, with the overrides among them applied."""
    from nmoe.config.loader import load_run

    if sys.stderr.isatty():  # loading torch takes seconds in which nothing else appears
        typer.echo(f"nmoe {' '.join(arguments[:1])}: loading", err=True)
    file, overrides = file_and_overrides(arguments)
    return load_run(file, schema, overrides)


def sum_up(run: Path, verb: str) -> None:
    """Prints a summary of a finished run; `verb` is the command that ran it, such as "sft"."""
    from nmoe.runs.summary import run_summary

    for line in run_summary(run, verb):
        typer.echo(line)
