"""The commands that train: `nmoe pretrain`, `sft`, `dpo`, `reward`, `verifier`, `selfplay` and `rl train`; and a check
of ranks."""

import json
from pathlib import Path
from typing import Annotated

import typer

from nmoe.cli.arguments import ConfigAndOverrides, configured, file_and_overrides, read_configuration, sum_up
from nmoe.errors import UserError


def pretrain(arguments: ConfigAndOverrides) -> None:
    """Pretrain a model on documents.

    \b
    Example:
      nmoe pretrain tools_base --run.steps=200 --optimizer.learning_rate=3e-4
    """
    from nmoe.config.commands import PretrainConfig

    with configured(arguments, PretrainConfig) as config:
        from nmoe.recipes.pretrain import pretrain

        run = pretrain(config)
    sum_up(run, "pretrain")


def sft(arguments: ConfigAndOverrides) -> None:
    """Fine-tune a model on conversations or completions.

    Trains on the assistant's messages in conversations, and on the completions of prompts.

    \b
    Example:
      nmoe sft sft --records.path=train.jsonl --records.epochs=3
    """
    from nmoe.config.commands import SFTConfig

    with configured(arguments, SFTConfig) as config:
        from nmoe.recipes.sft import sft

        run = sft(config)
    sum_up(run, "sft")


def dpo(arguments: ConfigAndOverrides) -> None:
    """Train a policy on preference pairs, by DPO or a related loss.

    \b
    Example:
      nmoe dpo dpo --preference.loss=ipo
    """
    from nmoe.config.commands import DPOConfig

    with configured(arguments, DPOConfig) as config:
        from nmoe.recipes.dpo import dpo

        run = dpo(config)
    sum_up(run, "dpo")


def reward(arguments: ConfigAndOverrides) -> None:
    """Train a reward model on preference pairs.

    \b
    Example:
      nmoe reward reward --records.path=pairs.jsonl
    """
    from nmoe.config.commands import RewardConfig

    with configured(arguments, RewardConfig) as config:
        from nmoe.recipes.reward_model import train_reward_model

        run = train_reward_model(config)
    sum_up(run, "reward")


def verifier(
    arguments: ConfigAndOverrides,
    prm_source: Annotated[str | None, typer.Option("--prm_source", metavar="SOURCE")] = None,
    prm_split: Annotated[str | None, typer.Option("--prm_split", metavar="SPLIT")] = None,
    mode: Annotated[str | None, typer.Option("--mode", metavar="MODE")] = None,
) -> None:
    """Train a verifier on labelled solution steps.

    \b
    Example:
      nmoe verifier verifier --prm_source=prm800k --prm_split=train[:1024]
    Example, scores of whole solutions, from a file:
      nmoe verifier verifier --prm_source=labelled.jsonl --mode=score

    Args:
        prm_source: prm800k, math_shepherd, both, or a file, directory or Hugging Face name.
        prm_split: A split, with an optional slice such as train[:1024].
        mode: step: a label for every step; score: 0, 0.5 or 1 for whole solutions.
    """
    from nmoe.config.commands import VerifierConfig

    named = {"prm_source": prm_source, "prm_split": prm_split, "mode": mode}
    overrides = [f"--verifier.{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    with configured([*arguments, *overrides], VerifierConfig) as config:
        from nmoe.verifier.train import verifier

        run = verifier(config)
    sum_up(run, "verifier")


def selfplay(
    arguments: ConfigAndOverrides,
    problem_source: Annotated[str | None, typer.Option("--problem_source", metavar="SOURCE")] = None,
    output_dir: Annotated[Path | None, typer.Option("--output_dir", metavar="DIR")] = None,
    max_problems: Annotated[int | None, typer.Option("--max_problems", metavar="N", min=1)] = None,
    replay_sample_rate: Annotated[
        float | None, typer.Option("--replay_sample_rate", metavar="SHARE", min=0.0, max=1.0)
    ] = None,
    train: Annotated[bool, typer.Option("--train")] = False,
) -> None:
    """Let a model write and verify proofs, and train on the result.

    The model verifies its proofs, and then checks the verifications. Confirmed judgements are kept as training data.

    \b
    Example, data only:
      nmoe selfplay selfplay --problem_source=jsonl:problems.jsonl --output_dir=runs/proofs --max_problems=1000
    Example, two rounds of generation and training:
      nmoe selfplay selfplay --train --selfplay.rounds=2

    Args:
        problem_source: prm800k[:PATH], math_shepherd[:PATH], hf:NAME[:SUBSET]:SPLIT, deepseek_math_v2_inputs:PATH or jsonl:PATH.
        output_dir: The run's directory, in place of the file's.
        max_problems: The most problems of one round.
        replay_sample_rate: Share of the rejected trajectories kept as replay bundles; all accepted ones are kept.
        train: Train verifier and generator at the end of each round.
    """
    from nmoe.config.commands import SelfplayConfig

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


def train(arguments: ConfigAndOverrides) -> None:
    """Post-train a model on the problems of an environment.

    The default is GRPO; [algorithm] in the configuration chooses among its variants, PPO and distillation.

    \b
    Example:
      nmoe rl train sort_grpo --run.name=wide --batch.group_size=16
    Example, resuming after an interruption:
      nmoe rl train sort_grpo --run.name=wide --batch.group_size=16 --run.resume=true
    Example, with two engine servers that are started again when they fail:
      nmoe rl train sort_grpo --engine.kind=server --placement.engines=2
    """
    from nmoe.config.commands import RLConfig

    config = read_configuration(arguments, RLConfig)
    if config.has_parent:
        from nmoe.cluster.parent import run_placed

        run_placed(config, *file_and_overrides(arguments))
        return
    with configured(arguments, RLConfig, config) as config:
        from nmoe.rl.launch import train

        run = train(config)
    sum_up(run, "rl")


def check_ranks(only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME")] = None) -> None:
    """Check that several ranks compute together the same results as one process.

    Start it with torchrun; it uses NCCL if each rank has its own GPU, else gloo. Prints one line per check, and ends at the
    first check that fails or exceeds its deadline.

    \b
    Example:
      torchrun --standalone --nproc_per_node=2 -m nmoe.rl tests-dist

    Args:
        only: Run this check alone; may be repeated.
    """
    from nmoe.parallel.gang import everywhere, gang
    from nmoe.rank_checks.run import run_checks

    if gang().size == 1:
        raise UserError(
            "tests-dist is about many ranks; start it as torchrun --standalone --nproc_per_node=2 -m nmoe.rl tests-dist"
        )
    import torch.distributed as dist

    typer.echo(f"{gang().size} ranks over {dist.get_backend()}")
    # Pairs of family and axes grow with the ranks, which seldom have a core each.
    everywhere(run_checks, tuple(only or ()), brief=gang().size > 4)
