"""An unknown key is answered with the commands that have it, or with our key for one of another framework."""

from pathlib import Path

import pytest

from nmoe.config.commands import COMMANDS, RunConfig
from nmoe.config.loader import load_run
from nmoe.config.problems import ConfigError


def refusals(path: Path, schema: type[RunConfig], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, schema, overrides)
    return [str(mistake).removeprefix(f"{path}:") for mistake in caught.value.problems]


def test_a_key_of_other_commands_is_refused_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "sft.toml"
    path.write_text('[run]\nsteps = 1\n[model]\npath = "base"\n[records]\npath = "r.jsonl"\n[critic]\ngamma = 0.5\n')
    assert refusals(path, COMMANDS["sft"], "--eval.0.split=eval", "--critics.gamma=1") == [
        "7: [critic]: unknown key; `nmoe sft` does not have it, `nmoe rl train` has",
        "--eval.0.split=eval: unknown key; `nmoe sft` does not have it, `nmoe rl train` has",
        "--critics.gamma=1: unknown key; known here: run, model, batch, optimizer, monitor, checkpoint, parallel, "
        "sinks, lora, eval, records, engine, sandbox",
    ]


def test_the_overrides_of_verl_are_answered_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nsteps = 1\n[model]\npath = "base"\n[environment]\nenv_id = "e"\n'
        'task_pool = {type = "generated", task_type = "sort"}\n'
    )
    answers = {
        "--data.train_files=x.parquet": "did you mean --environment.task_pool.path?",
        "--data.train_batch_size=8": "did you mean --batch.prompts_per_step?",
        "--data.max_response_length=8": "did you mean --sampling.max_new_tokens?",
        "--data.novel=1": "`nmoe rl train` has no [data], `nmoe pretrain` has",
        "--data.tokens_per_step=1": "`nmoe rl train` does not have it, `nmoe pretrain` has",
        "--reward_model.enable=true": 'it has no counterpart: name the model in [[rewards]], with type = "reward_model"',
        "--trainer.n_gpus_per_node=1": "it has no counterpart: torchrun starts one process for each GPU",
        "--trainer.total_epochs=2": "did you mean --run.episodes?",
        "--actor_rollout_ref.rollout.n=8": "did you mean --batch.group_size?",
        "--actor_rollout_ref.actor.optim.lr=1e-6": "did you mean --optimizer.learning_rate?",
        "--algorithm.adv_estimator=grpo": "did you mean --algorithm.advantage?",
    }
    found = refusals(path, COMMANDS["rl train"], *answers)
    assert sorted(found) == sorted(f"{text}: unknown key; {answer}" for text, answer in answers.items())
    path.write_text(path.read_text() + "[data]\ntrain_batch_size = 8\nmax_response_length = 4\n")
    assert refusals(path, COMMANDS["rl train"], "--data.val_batch_size=4", "--data.train_files=x") == [
        "8: [data]: unknown table; for train_batch_size write [batch] prompts_per_step, for max_response_length write "
        "[sampling] max_new_tokens",
        "--data.val_batch_size=4: unknown key; `nmoe rl train` has no [data], `nmoe pretrain` has",
        "--data.train_files=x: unknown key; did you mean --environment.task_pool.path?",
    ]
