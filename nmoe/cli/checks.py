"""The commands that check before a run: `nmoe doctor` the machine, `nmoe preflight` a configuration, `nmoe plan` its memory."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from nmoe.cli.arguments import ConfigAndOverrides, ForCommand, configuration_of_any, file_and_overrides
from nmoe.errors import UserError


def doctor(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Examine this machine, and advise how to make runs faster or safer.

    Examines processor, GPUs, free cores, kernels, compiler, sandbox, packages and caches. Exits with 1 if something
    required is missing.

    \b
    Example:
      nmoe doctor
    Example, for a program:
      nmoe doctor --json

    Args:
        as_json: Print one JSON object instead of lines.
    """
    from nmoe.preflight import doctor as examination

    found = examination.examine()
    if as_json:
        typer.echo(json.dumps(examination.as_json(found), indent=1))
    else:
        for line in examination.as_lines(found):
            typer.echo(line)
    if not examination.usable(found):
        raise typer.Exit(1)


def preflight(arguments: ConfigAndOverrides, command: ForCommand = None) -> None:
    """Check a configuration before it runs.

    Prints one line per check: ok, warn or fail, the value, and the remedy. Exits with 2 if one fails. Writes nothing but the
    cache of graded gold answers.

    \b
    Example:
      nmoe preflight sort_grpo --run.steps=200
    Example, pairs for a reward model:
      nmoe preflight mine.toml --command reward
    """
    name, config = configuration_of_any(arguments, command)
    from nmoe.preflight.preflight import preflight

    typer.echo(f"nmoe {name}, run {config.run.name}")
    failed = 0
    for check in preflight(config):
        typer.echo(str(check))
        failed += check.status == "fail"
    if failed:
        raise typer.Exit(2)


if TYPE_CHECKING:
    from nmoe.config.commands import RunConfig


def plan(
    arguments: ConfigAndOverrides,
    world: Annotated[int, typer.Option("--world", metavar="N", min=1)] = 8,
    per_node: Annotated[int, typer.Option("--per-node", metavar="N", min=1)] = 8,
    memory_gib: Annotated[float | None, typer.Option("--memory-gib", metavar="GIB", min=0.1)] = None,
    command: ForCommand = None,
) -> None:
    """Plan the memory and network traffic of a run on N GPUs, without running it.

    CONFIG may be the name of a model on the Hugging Face hub, for its supervised fine-tuning; no weights are fetched.

    Prints the bytes that each rank holds, and the bytes that it sends for one optimizer step; with engine servers, also what
    a GPU of theirs holds and what a publication moves. Exits with 2 if the sizes in [parallel] do not fit the ranks, and
    with 1 if the memory of a rank or of an engine's GPU exceeds --memory-gib.

    \b
    Example:
      nmoe plan sort_grpo --world 4
    Example, a 30B model on 128 machines:
      nmoe plan qwen3_30b_a3b --world 1024 --memory-gib 80
    Example, a 120B model on 4 GPUs, and its engine on 4 more:
      nmoe plan gpt_oss_120b --world 8 --memory-gib 80
    Example, a model of the hub with all weights trained:
      nmoe plan Qwen/Qwen3-30B-A3B --world 64 --model.precision=bfloat16

    Args:
        world: GPUs in all: one for each rank that trains, and the GPUs of engine servers that the run starts.
        per_node: Ranks of one machine; at most those that train.
        memory_gib: Memory of one GPU, to compare the plan with.
    """
    config = _of_model(arguments) if command is None else None
    config = config or configuration_of_any(arguments, command)[1]
    from nmoe.plan.engine_plan import engine_plan
    from nmoe.plan.rank_plan import lines, plan, with_offload

    engines = engine_plan(config)
    if engines is not None and (world := world - engines.gpus) < 1:
        raise UserError(
            f"--world {world + engines.gpus}: engine.servers times engine.tensor_parallel are {engines.gpus} GPUs, which leaves "
            "none to train on; name more"
        )
    per_node = min(per_node, world)
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    if memory is not None:
        config = with_offload(config, world, per_node, memory)
    found = plan(config, world, per_node)
    for line in [*lines(found, memory), *(engines.lines(memory) if engines is not None else ())]:
        typer.echo(line)
    if memory is not None and (found.total > memory or (engines is not None and engines.missing(memory) > 0)):
        raise typer.Exit(1)


def _of_model(arguments: list[str]) -> "RunConfig | None":
    """Returns the configuration to fine-tune a model of the Hugging Face hub if its name is given instead of a file; else None."""
    from nmoe.config.commands import COMMANDS
    from nmoe.config.loader import load_run
    from nmoe.runs.resolve import is_hub_name

    name, overrides = file_and_overrides(arguments)
    if name.suffix == ".toml" or not is_hub_name(name):
        return None
    with TemporaryDirectory() as directory:
        file = Path(directory) / f"{name.name}.toml"
        file.write_text(f'[run]\nsteps = 1\n[model]\npath = "{name}"\n[records]\npath = "records.jsonl"\n')
        return load_run(file, COMMANDS["sft"], overrides)
