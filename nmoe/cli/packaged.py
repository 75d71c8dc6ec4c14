"""The commands `nmoe config ...` and `nmoe env ...`: list and show packaged configurations and environments, import launches of
other trainers, check an environment, and offer it to other trainers."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def list_configurations() -> None:
    """List the packaged configurations, with the command that runs each.

    \b
    Example:
      nmoe config list
    """
    from nmoe.config.listing import list_configurations

    for line in list_configurations():
        typer.echo(line)


def show_configuration(name: Annotated[str, typer.Argument()]) -> None:
    """Print a packaged configuration, to be changed and run as your own.

    \b
    Example:
      nmoe config show sort_grpo > mine.toml
      nmoe rl train mine.toml

    Args:
        name: One of `nmoe config list`.
    """
    from nmoe.config.listing import show_configuration

    typer.echo(show_configuration(name), nl=False)


def import_launch(
    launch: Annotated[str, typer.Argument(metavar="LAUNCH")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE")] = None,
    program: Annotated[str | None, typer.Option("--program", metavar="PROGRAM")] = None,
) -> None:
    """Convert a launch of TRL, OpenRLHF, verl, SkyRL, slime or prime-rl to nmoe's TOML.

    Every key of the launch is a value of the TOML, or named in its comments with the reason why it has no counterpart. Where
    the other trainer has another default than nmoe, its default is written. Nothing is run. Exits with 1 if nmoe refuses
    the result as it stands.

    \b
    Example:
      nmoe config import "trl grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name train.jsonl --beta 0.01"
    Example, a script of OpenRLHF:
      nmoe config import train_grpo.sh --out mine.toml
      nmoe preflight mine.toml

    Args:
        launch: The command in quotes, or a shell script or YAML file with it.
        out: The file to write; default: the TOML is printed.
        program: The program that the keys are for, such as "trl grpo" or "openrlhf ppo"; default: recognised.
    """
    from nmoe.config.launches.command import imported, summary
    from nmoe.config.launches.write import written
    from nmoe.errors import UserError

    found = imported(launch, program)
    if out is None:
        typer.echo(written(found), nl=False)
    elif out.exists():
        raise UserError(f"--out={out}: exists; name another file, or remove it")
    else:
        out.write_text(written(found))
    for line in summary(found):
        typer.echo(line, err=True)
    if found.refused:
        raise typer.Exit(1)


def check(
    environment: Annotated[str, typer.Argument(metavar="ENVIRONMENT")],
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR_OR_RUN")] = None,
) -> None:
    """Check an environment: settings, local data, a prompt, two grades.

    A prompt is rendered, and a right and a wrong answer are graded. Of your own code only tasks and pools are
    imported, and the network is not used.

    \b
    Example:
      nmoe env check skills
    Example, with the tokens of a trained model:
      nmoe env check my_environment --tokenizer runs/speedrun

    Args:
        environment: A TOML file, a directory with environment.toml, or a packaged name.
        tokenizer: Whose tokenizer to render with; default: a byte tokenizer.
    """
    from nmoe.envs.check import check_environment

    for line in check_environment(Path(environment), tokenizer):
        typer.echo(line)


def write_records(
    environment: Annotated[str, typer.Argument(metavar="ENVIRONMENT")],
    out: Annotated[Path, typer.Argument(metavar="FILE.jsonl")],
    count: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False)] = None,
    split: Literal["train", "validation", "eval"] = "train",
) -> None:
    """Write an environment's problems as records for OpenRLHF and SkyRL.

    A record has the prompt as messages, and a label by which the adapters of nmoe find the problem again. docs/ecosystem.md has
    both trainers' settings.

    \b
    Example:
      nmoe env records word_problems train.jsonl --count 10000
    Example, held-out problems:
      nmoe env records word_problems validation.jsonl --count 200 --split eval

    Args:
        environment: A TOML file, a directory with environment.toml, or a packaged name.
        out: The file to write.
        count: How many problems; default: all, of an environment that has an end.
        split: Whether they are problems to train on, or held out.
    """
    from nmoe.adapters.records import write_records

    typer.echo(f"{out}: {write_records(environment, out, count, split):,} records")


def serve_rewards(
    environment: Annotated[str, typer.Argument(metavar="ENVIRONMENT")],
    end: Annotated[list[str], typer.Option(metavar="TEXT", show_default=False)],
    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535)] = 5000,
    stage: Annotated[str | None, typer.Option(metavar="NAME", show_default=False)] = None,
) -> None:
    """Serve an environment's rewards to OpenRLHF, as its --reward.remote_url.

    The route is POST /get_reward, as of OpenRLHF's own server of reward models. A response that was cut earns nothing. Other
    machines need the key NMOE_REWARDS_KEY, which they have in the address: http://nmoe:KEY@HOST:5000/get_reward.

    \b
    Example, for a Qwen model:
      nmoe env serve word_problems --port 5000 --end '<|im_end|>'
    Example, for trainers on other machines:
      NMOE_REWARDS_KEY=... nmoe env serve word_problems --host 0.0.0.0 --end '<|im_end|>'

    Args:
        environment: A TOML file, a directory with environment.toml, or a packaged name.
        end: The text of the token that ends the policy's turn, without which a response was cut; give it again for another one.
        host: The address to listen on.
        port: The port to listen on; 0: any free one.
        stage: The stage of the curriculum whose weights count; default: the last.
    """
    from nmoe.adapters.openrlhf import serve

    serve(environment, host, port, end, stage)


def certify(
    environments: Annotated[list[str], typer.Argument(metavar="ENVIRONMENT...")],
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR_OR_RUN")] = None,
    attacks: Annotated[int, typer.Option("--attacks", metavar="N", min=1)] = 300,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Examine environments: do golds pay, and do attacks not?

    Writes a passport for each: golds pay, 300 answers that solve nothing do not, verdicts are the same twice, neither the
    prompt nor the sandbox has the answer, and how long a verdict takes. Exits with 1 if something fails, which is shown with
    the very answer, and with 2 if no answer was graded: of no environment the data is here, and a grader of nmoe. Runs tasks
    and pools of your own; the network is not used.

    \b
    Example:
      nmoe env certify sort compare
    Example, for a program:
      nmoe env certify my_environment --json

    Args:
        environments: TOML files, directories with environment.toml, or packaged names.
        tokenizer: Whose tokenizer to render with; default: a byte tokenizer.
        attacks: Answers that must not be paid.
        as_json: Print one JSON object for each environment, a line each.
    """
    import json

    from nmoe.envs.certify import certify

    passports = []
    for named in environments:
        passport = certify(Path(named), tokenizer, attacks)
        passports.append(passport)
        for line in [json.dumps(passport.record())] if as_json else [*passport.lines(), ""]:
            typer.echo(line)
    if any(passport.failed for passport in passports):
        raise typer.Exit(1)
    if not any(passport.tried for passport in passports):
        raise typer.Exit(2)


def list_environments() -> None:
    """List the named environments of nmoe and of installed packages.

    \b
    Example:
      nmoe env list
    """
    from nmoe.config.listing import list_environments

    for line in list_environments():
        typer.echo(line)


def show_environment(name: Annotated[str, typer.Argument()]) -> None:
    """Print a packaged environment, to be changed and used as your own.

    \b
    Example:
      nmoe env show sort > mine.toml
      nmoe env check mine.toml

    Args:
        name: One of `nmoe env list`.
    """
    from nmoe.config.listing import show_environment

    typer.echo(show_environment(name), nl=False)


def gc(dry_run: Annotated[bool, typer.Option("--dry-run")] = False) -> None:
    """Remove workspaces that are incomplete, too old or over quota.

    Each environment sets its age and quota. Workspaces lie in $NMOE_WORKSPACES, by default ~/.cache/nmoe/workspaces.

    \b
    Example:
      nmoe env gc --dry-run

    Args:
        dry_run: Print what would be removed, and remove nothing.
    """
    from nmoe.sandbox.workspaces.store import collect, workspaces_root

    for line in collect(workspaces_root(), dry_run=dry_run):
        typer.echo(line)
