"""The commands `nmoe runs ...`, `nmoe report` and `nmoe replay`: show and compare runs, and keep a log of experiments."""

import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import ResearchLog
from nmoe.runs import CHARACTERS, PROBLEMS


def list_runs(directory: Annotated[Path, typer.Argument(metavar="[DIRECTORY]")] = Path("runs")) -> None:
    """List runs: command, steps, start, last reward or loss, status.

    \b
    Example:
      nmoe runs list runs/speedrun

    Args:
        directory: Where the runs are.
    """
    from nmoe.runs.summary import list_runs

    for line in list_runs(directory):
        typer.echo(line)


def show_run(run: Annotated[Path, typer.Argument(metavar="RUN")]) -> None:
    """Show a run: configuration, provenance, evaluations, alerts.

    \b
    Example:
      nmoe runs show runs/speedrun/sort_grpo

    Args:
        run: A run's directory.
    """
    from nmoe.runs.summary import show_run

    for line in show_run(run):
        typer.echo(line)


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    step: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False)] = None,
    of_evaluation: Annotated[bool, typer.Option("--eval")] = False,
    problems: Annotated[int, typer.Option(metavar="N", min=1)] = PROBLEMS,
    characters: Annotated[int, typer.Option(metavar="N", min=0)] = CHARACTERS,
) -> None:
    """Show samples of a run: prompt, completion, and reward with its reason.

    Control characters are shown as escapes.

    \b
    Example:
      nmoe runs samples runs/speedrun/rl
    Example, the whole group of the first step:
      nmoe runs samples runs/speedrun/rl --step 1 --characters 0
    Example, what the run answered in its last evaluation, and how the answers failed:
      nmoe runs samples runs/speedrun/rl --eval

    Args:
        run: A run's directory.
        step: All recorded samples of this step, which answer its first problem; default: samples of the last steps.
        of_evaluation: Answers of the evaluation at --step, or of the last one; the wrong ones first.
        problems: Without --step, and with --eval: how many problems, each with its best and worst sample, or its answers.
        characters: The most characters of a prompt or completion; 0: all.
    """
    from nmoe.runs.record import read_run
    from nmoe.runs.samples import show_answers, show_samples

    path = read_run(run).path
    lines = show_answers(path, step, problems) if of_evaluation else show_samples(path, step, problems, characters)
    for line in lines:
        typer.echo(line)


_RUNS_HELP = "Runs: a directory, several with commas between them, or a quoted glob."


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_RUNS_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_RUNS_HELP)],
) -> None:
    """Compare runs: configurations, metrics and evaluations.

    A and B may be several seeds each; differences are B minus A, with 95% intervals where there are
    several, or where an evaluation has one.

    \b
    Example:
      nmoe runs compare runs/base runs/wide
    Example, several seeds of each:
      nmoe runs compare "runs/base-*" "runs/wide-*"
    """
    from nmoe.runs.comparison import compare_runs

    for line in compare_runs(a, b):
        typer.echo(line)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_RUNS_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_RUNS_HELP)],
) -> None:
    """Show in which keys the configurations of runs differ.

    \b
    Example:
      nmoe runs diff runs/base runs/wide
    """
    from nmoe.runs.comparison import diff_runs

    for line in diff_runs(a, b):
        typer.echo(line)


def table(runs: Annotated[list[str], typer.Argument(metavar="RUN...")]) -> None:
    """Print a table of results to publish, in Markdown.

    Runs that differ only in the seed share a row: median, worst value, and mean with its interval,
    machine and commit.

    \b
    Example:
      nmoe runs table "runs/base-*" "runs/wide-*"

    Args:
        runs: Directories of runs, or quoted globs.
    """
    from nmoe.runs.comparison import results_table

    typer.echo(results_table(runs), nl=False)


def attempt(
    arguments: Annotated[list[str], typer.Argument(metavar="NAME [--section.key=value]", show_default=False)],
    config: Annotated[Path, typer.Option(metavar="CONFIG")],
    hypothesis: Annotated[str, typer.Option(metavar="TEXT")],
    log: ResearchLog = Path("research_log.md"),
) -> None:
    """Begin an attempt: branch, tag and entry of the research log.

    The branch is attempt-XX-NAME and the tag attempt-XX-start. The entry lists the changes in the
    configuration and the overrides since the attempt before. The working tree has to be clean;
    nothing but the log is written.

    \b
    Example:
      nmoe runs attempt higher-lr --config grpo.toml --hypothesis "1e-5 learns faster"
    Example, a value of the command line:
      nmoe runs attempt higher-lr --config grpo.toml --hypothesis "faster" --optimizer.learning_rate=1e-5

    Args:
        arguments: A short description, such as higher-lr, and the values with which the attempt overrides the file's.
        config: The attempt's TOML file, in this repository.
        hypothesis: The expected result.
    """
    from nmoe.config.overrides import joined, malformed
    from nmoe.errors import UserError
    from nmoe.runs.attempts import start_attempt

    arguments = joined(arguments)
    names = [argument for argument in arguments if not argument.startswith("-")]
    overrides = [argument for argument in arguments if argument.startswith("-")]
    if len(names) != 1 or malformed(overrides):
        wrong = ", ".join(malformed(overrides) or names) or "nothing"
        raise UserError(f"an attempt takes one NAME, and overrides such as --section.key=value, not {wrong}")
    for line in start_attempt(names[0], config, hypothesis, log, overrides):
        typer.echo(line)


def log_attempt(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    lesson: Annotated[str, typer.Option(metavar="TEXT")],
    log: ResearchLog = Path("research_log.md"),
) -> None:
    """Write an attempt's results into the research log, and commit it.

    \b
    Example:
      nmoe runs log "runs/higher-lr-*" --lesson "faster, but the entropy collapses"

    Args:
        runs: Directories of runs, or quoted globs.
        lesson: The conclusion from the results.
    """
    from nmoe.runs.attempts import finish_attempt

    for line in finish_attempt(runs, lesson, log):
        typer.echo(line)


def sync(
    target: Annotated[str, typer.Argument(metavar="HOST:DIR")],
    paths: Annotated[list[Path] | None, typer.Argument(metavar="[PATH...]", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    evaluation: Annotated[str | None, typer.Option("--eval", metavar="ARGUMENTS", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", show_default=False)] = None,
    python: Annotated[str | None, typer.Option(metavar="PYTHON", show_default=False)] = None,
    fetch: Annotated[str | None, typer.Option(metavar="NAME", show_default=False)] = None,
) -> None:
    """Copy code and runs to a second machine, check them there, and evaluate there.

    The commit of this repository is copied as a git bundle to DIR/code, and the paths by rsync to the
    same paths below DIR. Commit, SHA-256 sums and versions of packages are compared with the ones here.

    \b
    Example:
      nmoe runs sync spare:work runs/base data/pool.jsonl --dry-run
    Example, an evaluation there, and its result:
      nmoe runs sync spare:work runs/base --eval "runs/base sort" --name base-sort
      nmoe runs sync spare:work --fetch base-sort

    Args:
        target: Where to, as ssh names it; or a directory.
        paths: Runs, adapters and data files to copy.
        dry_run: Say what would be copied, and copy nothing.
        evaluation: Then start an evaluation there with these arguments, in tmux or by nohup, with a log.
        name: The name of the evaluation.
        python: The Python there; default: code/.venv/bin/python, else python3.
        fetch: Copy the result of the evaluation of this name to evals/HOST/NAME, and nothing else.
    """
    from nmoe.errors import UserError
    from nmoe.runs.second_machine import compare_packages, fetch_evaluation, start_evaluation
    from nmoe.runs.sync import sync as synchronise

    if fetch is not None:
        if paths or dry_run or evaluation is not None:
            raise UserError("--fetch copies one result here; leave out paths, --dry-run and --eval")
        lines = fetch_evaluation(target, fetch)
    elif evaluation is None:
        lines = chain(synchronise(target, paths or [], dry_run), () if dry_run else compare_packages(target, python))
    elif dry_run:
        raise UserError("--dry-run starts no evaluation; leave out --eval")
    else:
        lines = chain(synchronise(target, paths or [], dry_run), start_evaluation(target, evaluation, name, python))
    for line in lines:
        typer.echo(line)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    html: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
) -> None:
    """Write each run's report, or one page of all, and print its path.

    \b
    Example:
      nmoe report runs/speedrun/sort_grpo
    Example, several runs on one page:
      nmoe report runs/base runs/wide --html both.html

    Args:
        runs: Directories of runs.
        html: Write one page of all runs instead, which needs no network and no other file.
    """
    if html is not None:
        from nmoe.runs.page import write_page

        typer.echo(write_page(runs, html))
        return
    from nmoe.runs.report import write_report

    for run in runs:
        typer.echo(write_report(run))


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    step: Annotated[int, typer.Argument(metavar="STEP", min=1)],
    sample: Annotated[int, typer.Argument(metavar="SAMPLE", min=0)],
    token: Annotated[int, typer.Argument(metavar="TOKEN", min=0)],
    replay: Annotated[bool, typer.Option("--replay")] = False,
    allow_user_code: Annotated[bool, typer.Option("--allow-user-code")] = False,
) -> None:
    """Derive the numbers of a recorded token again, and compare each with the record.

    Log-probability, entropy, route, mask, reward, advantage, weight in the loss and share of the gradient are computed by the run's
    own code from the weights that its step began with. With exact numerics they are the same to the bit. Exits with 1 if any
    differs.

    \b
    Example:
      nmoe explain runs/mine 3 0 7
    Example, a step whose weights were not kept:
      nmoe explain runs/mine 4 0 7 --replay

    Args:
        run: A run's directory.
        step: The step that trained on the sample.
        sample: The sample's line in the step's file in samples/, from 0.
        token: The token's index in the sample, from 0.
        replay: If the weights that the step began with were not kept, train up to it again, from the nearest checkpoint before.
        allow_user_code: Import and run code that the run names: rewards, tools, tasks, an advantage, a loss, an engine.
    """
    from nmoe.rl.explain import explain_command

    for line in explain_command(run, step, sample, token, replay=replay, allow_user_code=allow_user_code):
        typer.echo(line)


def replay(
    recorded: Annotated[Path, typer.Argument(metavar="BUNDLE_OR_RUN")],
    checkpoint: Annotated[Path | None, typer.Option(metavar="RUN_OR_CHECKPOINT")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR_OR_RUN")] = None,
    train: Annotated[bool, typer.Option("--train")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    allow_user_code: Annotated[bool, typer.Option("--allow-user-code")] = False,
) -> None:
    """Repeat a recorded trajectory, or with --train a whole run, and report the first difference.

    For a trajectory: renders the prompt, parses the turns, runs the tools and grades the result; with a checkpoint, rescores the
    log-probabilities. For a run that sampled beside its training ([async]): trains again in one process, and compares the weights
    of every kept checkpoint, and the metrics, byte for byte. Exits with 1 if anything differs.

    \b
    Example:
      nmoe replay runs/mine/replay/step_000010-parse_error-sort_3-2-81f0
    Example, with the weights that sampled it:
      nmoe replay runs/mine/replay/step_000011-sampled-sort_7-0-20c4 --checkpoint runs/mine/checkpoints/step_000010
    Example, a whole run:
      nmoe replay runs/mine --train

    Args:
        recorded: A directory in a run's replay/, or with --train a run's directory.
        checkpoint: The weights that sampled a trajectory, to rescore its log-probabilities.
        tokenizer: A trajectory's tokenizer, if the replay/ directory does not hold it.
        train: Train again as the run did.
        out: Where to keep the new run; default: nowhere.
        allow_user_code: Import and run the code that the record names: custom tools, tasks and rewards, a workspace's bootstrap.
    """
    from nmoe.errors import UserError

    if train:
        if checkpoint is not None or tokenizer is not None:
            raise UserError(
                "--train has a run's own weights and tokenizer: --checkpoint and --tokenizer are for bundles"
            )
        from nmoe.rl.replay_run import replay_run

        replay_run(recorded, out, partial(typer.echo, file=sys.stdout), allow_user_code=allow_user_code)
        return
    if out is not None:
        raise UserError("--out keeps what --train trains again; add --train")
    from nmoe.rl.replay_bundle import replay_command

    for line in replay_command(recorded, checkpoint, tokenizer, allow_user_code=allow_user_code):
        typer.echo(line)
