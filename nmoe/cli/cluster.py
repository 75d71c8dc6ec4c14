"""The commands that try a run of many machines without them: `nmoe simulate` and `nmoe rehearse`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nmoe.cli.arguments import ConfigAndOverrides, file_and_overrides, finite, read_configuration

Seconds = Annotated[float | None, typer.Option(metavar="SECONDS", min=1e-6, callback=finite, show_default=False)]
Count = Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False)]


def simulate(
    arguments: ConfigAndOverrides,
    engines: Count = None,
    tickets: Count = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, show_default=False)] = None,
    like: Annotated[Path | None, typer.Option(metavar="RUN", show_default=False)] = None,
    mean_tokens: Annotated[
        float | None, typer.Option(metavar="NUMBER", min=1.0, callback=finite, show_default=False)
    ] = None,
    token_s: Seconds = None,
    learn_s: Seconds = None,
    sync_s: Seconds = None,
    prefill_s: Seconds = None,
    tool_s: Seconds = None,
    faults: Annotated[float, typer.Option(metavar="NUMBER", min=0.0, callback=finite)] = 0.0,
) -> None:
    """Simulate a run with several values of async.max_staleness, and say which one to choose.

    A virtual clock drives the run's own accounts and guards against simulated engines. Prints a table: trained samples a second
    against the synchronous form, idle shares of trainer and engines, ages of groups, and what dropping overdue groups does to
    lengths. The sizes are the configuration's. Lengths are log-normal, and equal seeds give equal schedules.

    \b
    Example:
      nmoe simulate speedrun --engines 4 --mean-tokens 20 --learn-s 0.5
    Example, with lengths and times of a run that sampled and trained in turn:
      nmoe simulate speedrun --like runs/speedrun/rl --engines 4 --faults 2

    Args:
        engines: Engine servers; default: engine.servers, or the number of engine.urls.
        tickets: Groups to sample; default: as many as 80 steps train on.
        seed: Seed of lengths and faults; default: run.seed.
        like: A run whose metrics say how long its samples, steps and publications are, and how many groups have equal rewards.
        mean_tokens: Mean length of a sample; default: a quarter of sampling.max_new_tokens, or the mean of --like.
        token_s: Seconds for a token of one sample; default: 0.02.
        learn_s: Seconds to train a step; default: 10.
        sync_s: Seconds to publish weights; default: 1.
        prefill_s: Seconds to read a token of a running sample again, when its engine gets new weights; default: token_s divided by
            four times the engine's slots.
        tool_s: Median of the seconds that a sample spends in tools; default: 0.
        faults: Deaths, hangs and wrong weights of each engine in an hour.
    """
    from nmoe.config.commands import RLConfig

    config = read_configuration(arguments, RLConfig)
    from nmoe.cluster.simulate import report

    setting = report.setting_of(config)
    given: dict[str, Any] = {"engines": engines, "tickets": tickets, "seed": seed}
    setting = replace(setting, **{name: value for name, value in given.items() if value is not None})
    if like is not None:
        setting = report.measured(like, setting)
    times: dict[str, Any] = {
        "mean_tokens": mean_tokens,
        "token_s": token_s,
        "learn_s": learn_s,
        "sync_s": sync_s,
        "prefill_s": prefill_s,
        "tool_s": tool_s,
    }
    setting = replace(setting, **{name: value for name, value in times.items() if value is not None})
    if prefill_s is None:
        setting = replace(setting, prefill_s=setting.token_s / (4 * setting.slots))
    if faults:
        setting = report.with_faults(setting, faults)
    for line in report.lines(setting):
        typer.echo(line)


def rehearse(
    arguments: ConfigAndOverrides,
    gpus: Count = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", metavar="GIB", min=0.1, callback=finite, show_default=False)
    ] = None,
) -> None:
    """Rehearse a cluster's run on this machine, and say what would have gone wrong.

    CONFIG is the run's own file. It is checked as it is. Then its run takes steps with a model of the same architecture that has
    about a thousandth of the weights, two engine servers and short samples, while processes are killed, stopped and made to answer
    wrongly. Prints one line per check and fault: ok, warn or fail. Exits with 2 if one fails. Writes to a temporary directory.

    \b
    Example:
      nmoe rehearse sort_grpo --gpus 8 --memory-gib 80

    Args:
        gpus: GPUs of the cluster.
        memory_gib: Memory of one of its GPUs.
    """
    file, overrides = file_and_overrides(arguments)
    from nmoe.cluster.rehearse.rehearse import rehearse as rehearsed
    from nmoe.preflight.check import Check

    out, failed = sys.stdout, []

    def report(check: Check) -> None:
        print(check, file=out, flush=True)
        failed.extend([check.name] * (check.status == "fail"))

    rehearsed(file, overrides, gpus, None if memory_gib is None else int(memory_gib * 2**30), report)
    if failed:
        raise typer.Exit(2)
