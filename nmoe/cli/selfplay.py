"""`nmoe selfplay`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import ConfigAndOverrides, configured, sum_up


def selfplay(
    arguments: ConfigAndOverrides,
    problem_source: Annotated[
        str | None,
        typer.Option(
            "--problem_source",
            metavar="SOURCE",
            help="prm800k[:PATH], math_shepherd[:PATH], hf:NAME[:SUBSET]:SPLIT, deepseek_math_v2_inputs:PATH or jsonl:PATH.",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output_dir", metavar="DIR", help="The run's directory, in place of the file's.")
    ] = None,
    max_problems: Annotated[
        int | None, typer.Option("--max_problems", metavar="N", min=1, help="The most problems of one round.")
    ] = None,
    replay_sample_rate: Annotated[
        float | None,
        typer.Option(
            "--replay_sample_rate",
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Share of the rejected trajectories kept as replay bundles; all accepted ones are kept.",
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train verifier and generator at the end of each round.")
    ] = False,
) -> None:
    """Let a model write and verify proofs, and train on the result.

    Proofs are verified, and verifications checked in turn. Confirmed judgements are kept as training data.

    \b
    Example, data only:
      nmoe selfplay selfplay --problem_source=jsonl:problems.jsonl --output_dir=runs/proofs --max_problems=1000
    Example, two rounds of generation and training:
      nmoe selfplay selfplay --train --selfplay.rounds=2
    """
    from nmoe.config.commands.selfplay import SelfplayConfig

    given = {
        "selfplay.problem_source": problem_source,
        "run.directory": None if output_dir is None else str(output_dir.absolute().parent),
        "run.name": None if output_dir is None else output_dir.absolute().name,
        "selfplay.max_problems": max_problems,
        "monitor.replay_sample_rate": replay_sample_rate,
        "selfplay.train": train or None,
    }
    overrides = [f"--{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    with configured([*arguments, *overrides], SelfplayConfig) as config:
        from nmoe.selfplay.loop import selfplay

        run = selfplay(config)
    sum_up(run, "selfplay")
