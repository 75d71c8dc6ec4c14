"""Files written for an older version are told what keys and modules are called today, and which command has a key."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from nmoe.config import ConfigError
from nmoe.config.commands import COMMANDS, RunConfig, load_run
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.moved import KEYS, MODULES, key_today, module_today
from nmoe.config.registry import REWARDS, TOOLS
from nmoe.config.schema import paths_of
from nmoe.envs.user_code import find_definition, load_function
from nmoe.errors import UserError

# Names that another module has taken since.
TAKEN = {"nmoe.rl.rewards"}


def test_every_key_that_moved_is_gone_and_its_successor_is_there() -> None:
    known = {".".join(path) for schema in (*COMMANDS.values(), EnvironmentSettings) for path in paths_of(schema)}
    assert KEYS.keys() & known == set()
    assert set(KEYS.values()) - known == set()


def test_every_module_that_moved_is_gone_and_its_successor_is_there() -> None:
    def there(module: str) -> bool:
        try:
            return find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    assert [old for old in MODULES if there(old) and old not in TAKEN] == []
    assert [new for new in set(MODULES.values()) if not there(new)] == []


def test_a_name_below_a_moved_one_moves_with_it() -> None:
    assert module_today("nmoe.rl.tools.tool") == "nmoe.envs.tools.tool"
    assert module_today("nmoe.rl.tools.event") == "nmoe.types"
    assert module_today("nmoe.rl.grading.policy") == "nmoe.grading.math.policy"
    assert module_today("nmoe.rl.grading.extraction") == "nmoe.grading.extraction"
    assert module_today("nmoe.rl.train") is None
    assert module_today("words") is None
    assert key_today(("model", "shape", "router_bias_rate")) == "model.router_bias_rate"
    assert key_today(("eval", "environment", "model", "shape", "router_bias_rate")) == "model.router_bias_rate"
    assert key_today(("model", "router_bias_rate")) is None


def refusals(path: Path, schema: type[RunConfig], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, schema, overrides)
    return [str(mistake).removeprefix(f"{path}:") for mistake in caught.value.problems]


def test_a_renamed_key_is_named_with_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(
        '[run]\nsteps = 1\n[model]\npath = "base"\n[algorithm]\nloss = "dual_clip"\ndual_clip = 3.0\n'
        '[environment]\nenv_id = "e"\ntask_pool = {type = "generated", task_type = "sort"}\n'
    )
    found = refusals(path, COMMANDS["rl train"], "--model.shape.router_bias_rate=1e-3")
    assert "7: [algorithm] dual_clip = 3.0: unknown key; it is called algorithm.dual_clip_bound now" in found
    assert "--model.shape.router_bias_rate=1e-3: unknown key; it is called model.router_bias_rate now" in found
    assert len(found) == 2, "an override begins no [model.shape], whose required keys would be missing"


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


def test_code_of_the_user_that_names_a_moved_module_is_told_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words_of_old.py").write_text("from nmoe.rl.tools.tool import ToolOutput\n")
    (tmp_path / "scores_of_old.py").write_text("from nmoe.rl.rewards import FunctionReward\n")
    with pytest.raises(UserError, match=r"nmoe\.rl\.tools is nmoe\.envs\.tools now$"):
        load_function(TOOLS, "words_of_old:lookup")
    with pytest.raises(UserError, match=r"nmoe\.rl\.rewards is nmoe\.envs\.rewards now$"):
        load_function(REWARDS, "scores_of_old:score")
    with pytest.raises(UserError, match=r"nmoe\.rl\.tasks\.sort is nmoe\.envs\.tasks\.sort now$"):
        find_definition("tool", "nmoe.rl.tasks.sort:sort")
    with pytest.raises(UserError, match=r"No module named 'nowhere'$"):
        load_function(TOOLS, "nowhere:f")
