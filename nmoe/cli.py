"""The `nmoe` command: one verb per job, each a few lines that read its arguments and hand over.

What a verb needs is imported inside it, so that `nmoe --help` does not wait for torch.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
import typer.core

from nmoe.errors import UserError

if TYPE_CHECKING:
    from nmoe.config.commands.base import RunConfig

    C = TypeVar("C", bound=RunConfig)

HELP = {"help_option_names": ["-h", "--help"]}


def _group(name: str | None = None) -> typer.Typer:
    return typer.Typer(
        name=name,
        no_args_is_help=True,
        add_completion=name is not None,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=HELP,
    )


app = _group("nmoe")
env, rl, data = _group(), _group(), _group()
app.add_typer(rl, name="rl")
app.add_typer(data, name="data")
app.add_typer(env, name="env")

# The overrides of a training verb are options that only the configuration's schema knows.
WITH_OVERRIDES = {"ignore_unknown_options": True}


class WithKeys(typer.core.TyperCommand):
    """A training verb: its help ends with the keys of its configuration."""

    def get_help(self, ctx: Any) -> str:
        from nmoe.config.commands import COMMANDS
        from nmoe.config.keys import key_lines

        keys = "\n".join(key_lines(COMMANDS["rl train" if self.name == "train" else str(self.name)]))
        return f"{super().get_help(ctx)}\n\nKeys, in the file's tables or as --table.key=VALUE:\n{keys}"


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


ConfigAndOverrides = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG [--section.key=value]",
        help="The run's TOML file, and values to use in place of the file's.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's directory, or one of its checkpoints.")
]
Temperature = Annotated[
    float, typer.Option(min=0.0, callback=_finite, help="Sampling temperature; 0 takes the most likely token.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn at random.")]


def _show_version(wanted: bool) -> None:
    if wanted:
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
      nmoe rl train configs/sort_grpo.toml
    """


@data.callback()
def datasets() -> None:
    """Look at datasets: what their records are taken for, and which of their tokens are learned; sample preference pairs.

    \b
    Example:
      nmoe data show train.jsonl --masks
    """


@env.callback()
def environments() -> None:
    """Look at environments: where problems come from, what a good answer earns.

    \b
    Example:
      nmoe env check environments/skills.toml
    """


@app.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
def pretrain(arguments: ConfigAndOverrides) -> None:
    """Pretrain a model on documents.

    \b
    Example:
      nmoe pretrain configs/tools_base.toml --run.steps=200 --optimizer.learning_rate=3e-4
    """
    from nmoe.config.commands.supervised import PretrainConfig

    config = _configuration(arguments, PretrainConfig)
    from nmoe.recipes.pretrain import pretrain

    _sum_up(pretrain(config), "pretrain")


@app.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
def sft(arguments: ConfigAndOverrides) -> None:
    """Fine-tune a model on what the assistant says in conversations, or on completions of prompts.

    \b
    Example:
      nmoe sft configs/sft.toml --records.path=train.jsonl --records.epochs=3
    """
    from nmoe.config.commands.supervised import SFTConfig

    config = _configuration(arguments, SFTConfig)
    from nmoe.recipes.sft import sft

    _sum_up(sft(config), "sft")


@app.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
def dpo(arguments: ConfigAndOverrides) -> None:
    """Train a policy on preference pairs, by DPO or one of its kin.

    \b
    Example:
      nmoe dpo configs/dpo.toml --preference.loss=ipo
    """
    from nmoe.config.commands.supervised import DPOConfig

    config = _configuration(arguments, DPOConfig)
    from nmoe.recipes.dpo import dpo

    _sum_up(dpo(config), "dpo")


@app.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
def reward(arguments: ConfigAndOverrides) -> None:
    """Train a reward model on preference pairs.

    \b
    Example:
      nmoe reward configs/reward.toml --records.path=pairs.jsonl
    """
    from nmoe.config.commands.supervised import RewardConfig

    config = _configuration(arguments, RewardConfig)
    from nmoe.recipes.reward_model import train_reward_model

    _sum_up(train_reward_model(config), "reward")


@rl.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
def train(arguments: ConfigAndOverrides) -> None:
    """Post-train a model with GRPO on the problems of an environment.

    \b
    Example:
      nmoe rl train configs/sort_grpo.toml --run.name=wide --batch.group_size=16
    Going on after an interruption:
      nmoe rl train configs/sort_grpo.toml --run.name=wide --batch.group_size=16 --run.resume=true
    """
    from nmoe.config.commands.rl import RLConfig

    config = _configuration(arguments, RLConfig)
    from nmoe.rl.train import train

    _sum_up(train(config), "rl")


@app.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
@rl.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
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
        int | None, typer.Option("--max_problems", min=1, help="The most problems of one round.")
    ] = None,
    replay_sample_rate: Annotated[
        float | None,
        typer.Option(
            "--replay_sample_rate",
            min=0.0,
            max=1.0,
            help="Share of what was not accepted that is kept as replay bundles; what was accepted all is.",
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train verifier and generator at the end of each round.")
    ] = False,
) -> None:
    """Have proofs written, verified and the verifications verified; keep what is confirmed as training data, and train on it.

    \b
    Example, data alone:
      nmoe selfplay configs/selfplay.toml --problem_source=jsonl:problems.jsonl --output_dir=runs/proofs --max_problems=1000
    Example, two rounds of generation and training:
      nmoe selfplay configs/selfplay.toml --train --selfplay.rounds=2
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
    config = _configuration([*arguments, *overrides], SelfplayConfig)
    from nmoe.selfplay.loop import selfplay

    _sum_up(selfplay(config), "selfplay")


@data.command()
def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A file, a directory or a Hugging Face name; @[a:b] behind it takes a part.",
            show_default=False,
        ),
    ],
    masks: Annotated[bool, typer.Option("--masks", help="Show the first records token by token.")] = False,
    records: Annotated[int, typer.Option(min=1, help="How many records --masks shows.")] = 3,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR_OR_RUN", help="Whose tokenizer to render with; one of bytes without it.")
    ] = None,
    format: Annotated[
        Literal["auto", "harmony", "chat", "text"],
        typer.Option(help="How records become tokens; auto: Harmony, or the tokenizer's chat template."),
    ] = "auto",
    kind: Annotated[
        str | None, typer.Option(help="The format of the records; told by their columns without it.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=NAME", help="Which column of the data to take, such as prompt=question."),
    ] = None,
    subset: Annotated[str | None, typer.Option(help="The dataset's configuration, such as main.")] = None,
    split: Annotated[str, typer.Option(help="The split, slices such as train[:100] included.")] = "train",
) -> None:
    """Say what the records of a dataset are, count and measure them, and show which of their tokens are learned.

    \b
    Example:
      nmoe data show train.jsonl@[:1000]
    Example, token by token, as a run's tokenizer has them:
      nmoe data show train.jsonl --masks --tokenizer runs/speedrun
    Example, columns of other names:
      nmoe data show questions.csv --column prompt=question --column completion=answer
    """
    from nmoe.eval.show_data import dataset_settings, show_data

    settings = dataset_settings(file, kind, column or [], subset, split)
    for line in show_data(settings, tokenizer, format, masks, records):
        typer.echo(line)


@app.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
@rl.command(cls=WithKeys, context_settings=WITH_OVERRIDES)
def verifier(
    arguments: ConfigAndOverrides,
    prm_source: Annotated[
        str | None,
        typer.Option("--prm_source", help="prm800k, math_shepherd, both, or a file, directory or Hugging Face name."),
    ] = None,
    prm_split: Annotated[
        str | None, typer.Option("--prm_split", help="A split, slices such as train[:1024] included.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="step: a label for every step; score: 0, 0.5 or 1 for solutions.")
    ] = None,
) -> None:
    """Train a verifier on steps that are labelled right or wrong.

    \b
    Example:
      nmoe verifier configs/verifier.toml --prm_source=prm800k --prm_split=train[:1024]
    Example, scores of whole solutions, from a file:
      nmoe verifier configs/verifier.toml --prm_source=labelled.jsonl --mode=score
    """
    from nmoe.config.commands.supervised import VerifierConfig

    named = {"prm_source": prm_source, "prm_split": prm_split, "mode": mode}
    overrides = [f"--verifier.{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    config = _configuration([*arguments, *overrides], VerifierConfig)
    from nmoe.verifier.train import verifier

    _sum_up(verifier(config), "verifier")


@env.command()
def check(
    environment: Annotated[
        str,
        typer.Argument(metavar="ENVIRONMENT", help="A TOML file, a directory with environment.toml, a packaged name."),
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR_OR_RUN", help="Whose tokenizer to render with; one of bytes without it.")
    ] = None,
) -> None:
    """Validate an environment: its settings, its local data, a rendered prompt, and the grades of a right and a wrong answer.
    No user code is imported and no network reached.

    \b
    Example:
      nmoe env check environments/skills.toml
    Example, with the tokens of a trained model:
      nmoe env check my_environment --tokenizer runs/speedrun
    """
    from nmoe.envs.check import check_environment

    for line in check_environment(Path(environment), tokenizer):
        typer.echo(line)


@env.command("list")
def list_() -> None:
    """List the environments that have a name: those of nmoe and those that installed packages offer.

    \b
    Example:
      nmoe env list
    """
    from nmoe.envs.check import list_environments

    for line in list_environments():
        typer.echo(line)


@env.command()
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove workspaces that are half made, past their age, or beyond their environment's quota.

    They lie in the directory that NMOE_WORKSPACES names, by default in ~/.cache/nmoe/workspaces.

    \b
    Example:
      nmoe env gc --dry-run
    """
    from nmoe.sandbox.workspaces.collect import collect
    from nmoe.sandbox.workspaces.store import workspaces_root

    for line in collect(workspaces_root(), dry_run=dry_run):
        typer.echo(line)


@data.command()
def pairs(
    checkpoint: Checkpoint,
    environment: Annotated[
        Path,
        typer.Argument(
            metavar="ENVIRONMENT", help="The environment that grades: a TOML file, a directory, a packaged name."
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Where to write the pairs.")],
    problems: Annotated[int, typer.Option(min=1, help="How many problems.")] = 1000,
    samples: Annotated[int, typer.Option(min=2, help="Completions of each problem.")] = 8,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
) -> None:
    """Sample preference pairs from a checkpoint: of each problem a completion that the environment finds right, and a wrong one.

    \b
    Example:
      nmoe data pairs runs/speedrun/base environments/skills.toml pairs.jsonl --problems 4000 --samples 6
    """
    from nmoe.recipes.sampled_pairs import write_pairs

    typer.echo(write_pairs(checkpoint, environment, file, problems, samples, temperature, seed))


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    environment: Annotated[
        Path | None,
        typer.Argument(
            metavar="[ENVIRONMENT]",
            help="The environment to evaluate on: a TOML file, a directory, a packaged name. --format-check takes that of the "
            "run where there is none.",
            show_default=False,
        ),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="How many problems; by default 200, and 20 with --format-check.", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each problem.")] = 1,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    best_of: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_OR_CHECKPOINT", help="A reward model or verifier that chooses among the samples of a problem."
        ),
    ] = None,
    format_check: Annotated[
        bool,
        typer.Option(
            "--format-check",
            help="Say whether the model is ready for reinforcement learning on the environment, or what to do first.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Keep the results here, with every problem's answers.", show_default=False
        ),
    ] = None,
) -> None:
    """Evaluate a checkpoint on an environment.

    \b
    Example, greedy:
      nmoe eval runs/speedrun/sort_grpo environments/sort.toml --out sort.json
    Example, eight samples of each problem:
      nmoe eval runs/speedrun/sort_grpo environments/sort.toml --samples 8 --temperature 0.6
    Example, the one of eight that a reward model scores highest, beside majority vote:
      nmoe eval runs/speedrun/sort_grpo environments/sort.toml --samples 8 --temperature 0.6 --best-of runs/speedrun/reward
    Example, whether a model is ready for reinforcement learning:
      nmoe eval runs/base environments/math.toml --format-check
    """
    if format_check:
        if samples > 1 or temperature > 0 or best_of is not None:
            raise UserError(
                "--format-check decides itself how problems are sampled; leave --samples, --temperature and --best-of out"
            )
        from nmoe.eval.format_check import format_check as check_format

        for line in check_format(checkpoint, environment, problems or 20, seed):
            typer.echo(line)
        return
    if environment is None:
        raise UserError("eval without an ENVIRONMENT; name a TOML file, a directory or a packaged environment")
    from nmoe.eval.command import evaluate_command
    from nmoe.verifier.scorers import load_scorer

    evaluate_command(checkpoint, environment, problems or 200, samples, temperature, seed, load_scorer, best_of, out)


@app.command()
def grade(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.jsonl",
            help='Lines of {"gold": "...", "prediction": "..."}, with an "id" where wanted; - for stdin.',
        ),
    ],
    extract: Annotated[
        Literal["whole", "boxed", "prose", "last_number", "harmony"],
        typer.Option(help="Where in a prediction the answer is."),
    ] = "whole",
    answer_order: Annotated[
        Literal["any", "as_gold"], typer.Option(help="Whether a list without brackets has an order.")
    ] = "any",
    units: Annotated[
        Literal["as_gold", "any"], typer.Option(help="Which units an answer may add to a gold that has none.")
    ] = "as_gold",
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out lines whose gold can not be read, and count them.")
    ] = False,
) -> None:
    """Grade recorded predictions against their golds: one JSON line each, and a summary on stderr.

    \b
    Example:
      nmoe grade predictions.jsonl > verdicts.jsonl
    Example, answers in boxes, from a pipe:
      zcat predictions.jsonl.gz | nmoe grade - --extract boxed
    """
    from nmoe.grading.math.policy import Policy
    from nmoe.grading.regrade import regrade

    regrade(file, extract, sys.stdout, Policy(answer_order, units), skip_unreadable=skip_unreadable)


@app.command()
def chat(
    checkpoint: Checkpoint,
    temperature: Temperature = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of one answer.")] = 256,
    system: Annotated[
        str | None,
        typer.Option(
            help="The system message; without it that of the environment that a run was trained on.", show_default=False
        ),
    ] = None,
    format: Annotated[
        Literal["auto", "harmony", "chat", "text"],
        typer.Option(
            help="How the conversation becomes tokens; auto: as the run's environment has it, else Harmony or the tokenizer's chat "
            "template."
        ),
    ] = "auto",
    seed: Seed = 0,
) -> None:
    """Talk to a checkpoint in the terminal. What was said before is part of the conversation; /new begins another one.

    \b
    Example:
      nmoe chat runs/speedrun/sort_grpo --temperature 0
    Example, any checkpoint of a known family, by its own chat template:
      nmoe chat models/Qwen3-0.6B --system "Answer in one sentence."
    """
    from nmoe.serve.chat import chat

    chat(checkpoint, temperature, max_new_tokens, seed, system, format)


@app.command()
def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A directory in a run's replay/.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_OR_CHECKPOINT", help="The weights it was sampled with, to rescore its log-probabilities."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR_OR_RUN", help="Its tokenizer, where that is not in the same replay/.")
    ] = None,
    allow_user_code: Annotated[
        bool,
        typer.Option(
            "--allow-user-code",
            help="Import and run what the bundle names: tools and rewards of your own, a workspace's bootstrap.",
        ),
    ] = False,
) -> None:
    """Go through a recorded trajectory again: render the prompt, read the turns, run the tools, grade, and with a checkpoint
    rescore. Exit code 1 where anything comes out differently; the first difference is named with its place.

    \b
    Example:
      nmoe replay runs/mine/replay/step_000010-parse_error-sort_3-2-81f0
    Example, with the weights that sampled it:
      nmoe replay runs/mine/replay/step_000011-sampled-sort_7-0-20c4 --checkpoint runs/mine/checkpoints/step_000010
    """
    from nmoe.rl.replay import replay_command

    for line in replay_command(bundle, checkpoint, tokenizer, allow_user_code=allow_user_code):
        typer.echo(line)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Write a run's report and print where it is.

    \b
    Example:
      nmoe report runs/speedrun/sort_grpo
    """
    from nmoe.runs.report import write_report

    typer.echo(write_report(run))


@app.command()
def export(
    checkpoint: Checkpoint,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where to write to; made, or empty.")],
    format: Annotated[
        Literal["hf", "peft"],
        typer.Option(
            help="hf: a Hugging Face checkpoint, with an adapter merged into its base; peft: the adapter alone."
        ),
    ] = "hf",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="The dtype of the weights written; as they are stored where left out."),
    ] = None,
) -> None:
    """Write a checkpoint that transformers and servers load: weights, configuration, tokenizer, chat template. A run with [lora]
    gives its adapter merged into the base or, for PEFT, by itself.

    \b
    Example:
      nmoe export runs/speedrun/sort_grpo exported
    Example, one of a run's checkpoints, in half the bytes:
      nmoe export runs/speedrun/sort_grpo/checkpoints/best exported --format hf --dtype bfloat16
    Example, the adapter that a run trained:
      nmoe export runs/speedrun/sort_grpo adapter --format peft
    """
    from nmoe.runs.export import export_checkpoint

    export_checkpoint(checkpoint, directory, dtype, format)
    typer.echo(directory)


@app.command()
def speedrun(
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="The directory to write to.")] = Path("runs/speedrun"),
    full: Annotated[
        bool, typer.Option("--full", help="Every kind of training: mid-training, SFT, a verifier and self-play, too.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the one in OUT: what is done is not done again.")
    ] = False,
) -> None:
    """Go from nothing to a post-trained small model: tokenizer, pretraining, GRPO, evaluation, report.

    \b
    Example:
      nmoe speedrun --seed 1 --out runs/speedrun-1
    """
    from nmoe.speedrun import speedrun

    speedrun(out, seed, full, resume)


def _configuration(arguments: list[str], schema: "type[C]") -> "C":
    """Loads the CONFIG among the arguments of a training verb; all others are overrides, wherever they stand."""
    from nmoe.config.commands.base import load_run
    from nmoe.config.overrides import joined

    _show_start(arguments)
    arguments = joined(arguments)
    files = [argument for argument in arguments if not argument.startswith("-")]
    if not files:
        raise UserError(
            f"{arguments[0]} without a CONFIG; name the run's TOML file, then --section.key=value overrides"
        )
    overrides = list(arguments)
    overrides.remove(files[0])
    config = load_run(Path(files[0]), schema, overrides)
    run = Path(config.run.directory) / config.run.name
    if config.run.resume and not (run / "config.toml").exists():
        typer.echo(f"{run}: no run to go on with yet, so that it starts from the beginning")
    return config


def _show_start(arguments: Sequence[str]) -> None:
    """Says on a terminal that the command has begun: until torch is loaded there is nothing else to see."""
    if sys.stderr.isatty():
        typer.echo(f"nmoe {' '.join(arguments[:1])}: loading", err=True)


def _sum_up(run: Path, verb: str) -> None:
    """Says what the run has come to."""
    from nmoe.runs.summary import run_summary

    for line in run_summary(run, verb):
        typer.echo(line)


def run(command: typer.Typer, program: str) -> None:
    """Runs `command` on the process's arguments and exits with its code.

    0 when all went well, 2 for bad input, 1 for a full disk, 130 after Ctrl-C; a UserError is printed without its
    traceback, any other exception is a defect and keeps it.
    """
    warnings.formatwarning = _one_line
    try:
        try:
            command(prog_name=program)
        finally:
            sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Whoever read stdout, such as `head`, has left. Python flushes once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """A warning as whoever runs a command reads it, without the line of Python that gave it."""
    return f"warning: {message}\n"


def main() -> None:
    """The entry point of `nmoe`."""
    run(app, "nmoe")
