"""What a newcomer writes, and the message that it gets: the suggestion is the thing that was meant."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nmoe.cli import main
from nmoe.config.commands import COMMANDS
from nmoe.config.elsewhere import COMMANDS as MEANT
from nmoe.config.elsewhere import SIMILAR, SPELLINGS, VALUES, WITHOUT, closest, keys_meant
from nmoe.config.launches.command import PROGRAMS
from nmoe.config.schema import paths_of

RL = """
[run]
steps = 1
[model]
tokenizer = "bytes"
[model.shape]
hidden_size = 32
layers = 1
heads = 2
kv_heads = 2
head_dim = 16
intermediate_size = 64
context_tokens = 1024
[environment]
env_id = "qa"
format = "boxed"
[environment.task_pool]
type = "jsonl"
path = "qa.jsonl"
task_type = "math"
"""
START = '[run]\nsteps = 1\n[model]\npath = "nowhere"\n[environment]\npath = "sort"\n'
SFT = '[run]\nsteps = 1\n[model]\ntokenizer = "bytes"\n[model.shape]\nhidden_size = 32\nlayers = 1\nheads = 2\n'
SFT += 'kv_heads = 2\nhead_dim = 16\nintermediate_size = 64\ncontext_tokens = 64\n[records]\npath = "chat.jsonl"\n'
Told = Callable[..., str]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """The last line that a command prints, which ends with exit code 2 and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("rl.toml").write_text(RL)
    Path("start.toml").write_text(START)
    Path("sft.toml").write_text(SFT)
    Path("own.toml").write_text(f'version = "1"\n{RL.partition("[environment]")[2].replace("environment.", "")}')
    Path("qa.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    Path("chat.jsonl").write_text('{"prompt": "2+2?", "completion": "4"}\n')

    def told(*arguments: str) -> str:
        before = sorted(tmp_path.iterdir())
        monkeypatch.setattr(sys, "argv", ["nmoe", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert sorted(tmp_path.iterdir()) == before
        return capsys.readouterr().err.splitlines()[-1].removeprefix("error: ").removeprefix("Error: ")

    return told


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("--lr=1e-5", "--optimizer.learning_rate"),
        ("--optimizer.lr=1e-5", "--optimizer.learning_rate"),
        ("--algorithm.kl_beta=0.1", "--algorithm.kl_coef"),
        ("--beta=0.1", "--algorithm.kl_coef"),
        ("--num_generations=8", "--batch.group_size"),
        ("--batch.num-generations=8", "--batch.group_size"),
        ("--actor_rollout_ref.rollout.n=8", "--batch.group_size"),
        ("--actor_rollout_ref.actor.optim.lr=1e-6", "--optimizer.learning_rate"),
        ("--critic.optim.lr=1e-6", "--critic.learning_rate"),
        ("--n_samples_per_prompt=8", "--batch.group_size"),
        ("--max_completion_length=64", "--sampling.max_new_tokens"),
        ("--reward_funcs=x", "--environment.rewards"),
        ("--report_to=wandb", "--sinks.to"),
        ("--save_steps=5", "--checkpoint.every_steps"),
        ("--use_vllm=true", "--engine.kind"),
        ("--gradient_accumulation_steps=4", "--batch.tokens_per_microbatch"),
        ("--prompt_key=question", "--environment.task_pool.problem_field"),
        ("--algorithm.filter_groups.enable=true", "--batch.max_refills"),
        ("--trainer.algorithm.eps_clip_low=0.1", "--algorithm.clip_low"),
    ],
)
def test_names_of_other_frameworks(told: Told, override: str, meant: str) -> None:
    assert told("rl", "train", "rl.toml", override) == f"{override}: unknown key; did you mean {meant}?"


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("--dataloader_num_workers=4", "a run reads its data in its own process"),
        (
            "--optimizer.lr-scheduler-type=cosine",
            "the learning rate rises linearly and falls as a cosine to optimizer.min_",
        ),
    ],
)
def test_a_key_without_a_counterpart_is_led_to_no_other(told: Told, override: str, instead: str) -> None:
    assert told("rl", "train", "rl.toml", override).startswith(
        f"{override}: unknown key; it has no counterpart: {instead}"
    )


def test_a_table_of_another_framework_and_a_key_of_another_command(told: Told) -> None:
    Path("rl.toml").write_text(f"{RL}[actor]\ngrad_clip = 1.0\noptim = {{lr = 1e-6, foreach = true}}\n")
    assert told("rl", "train", "rl.toml") == (
        "rl.toml:21: [actor]: unknown table; for grad_clip write [optimizer] max_grad_norm, for optim.lr write [optimizer] "
        "learning_rate"
    )
    assert told("sft", "sft.toml", "--num_generations=8") == (
        "--num_generations=8: unknown key; num_generations is of `nmoe rl train`"
    )
    assert told("sft", "sft.toml", "--lr", "1e-5") == "1e-5: not an override; those are written --section.key=value"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--algorithm.advantage=GRPO", "; did you mean 'grpo'?"),
        ("--algorithm.advantage=reinforce++", "; did you mean 'reinforce_pp'?"),
        ("--algorithm.loss=ppo", "; did you mean 'clip'?"),
        ("--algorithm.loss=GSPO", "; did you mean 'gspo'?"),
        ("--algorithm.kl_estimator=low_var_kl", "; did you mean 'k3'?"),
        ("--algorithm.aggregation=seq-mean-token-mean", "; did you mean 'sequence'?"),
        ("--environment.task_pool.type=JSONL", "; did you mean 'jsonl'?"),
        ("--environment.format=Harmony", "; did you mean 'harmony'?"),
        ("--model.precision=bf16", "; did you mean 'bfloat16'?"),
        ("--model.device=GPU", "; did you mean 'cuda'?"),
        ("--sinks.to=tensorboard", """; write --sinks.to='["tensorboard"]'"""),
        ("--sinks.to=[wandb,csv]", """; write --sinks.to='["wandb", "csv"]'"""),
        ("--run.steps=1e3", "; write --run.steps=1000"),
        ("--run.resume=True", "; write --run.resume=true"),
        ("--run.steps", "--run.steps: has no value; write --run.steps=VALUE"),
        ("run.steps=5", "run.steps=5: not an override; did you mean --run.steps=5?"),
        ("--environment.task_pool.path=qa.jsonl[:10]", ": a slice stands behind @; write qa.jsonl@[:10]"),
        ("--run.directory=~/runs", f": ~ stands for a home in a shell alone; write {Path('~/runs').expanduser()}"),
        ("--environment.task_pool.path=~/x.jsonl", f"; write {Path('~/x.jsonl').expanduser()}"),
    ],
)
def test_values(told: Told, override: str, said: str) -> None:
    assert told("rl", "train", "rl.toml", override).endswith(said)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("train rl.toml", "rl train rl.toml"),
        ("train sft.toml", "sft sft.toml"),
        ("train", "rl train"),
        ("grpo rl.toml", "rl train rl.toml"),
        ("rl grpo", "rl train"),
        ("rl rl.toml", "rl train rl.toml"),
        ("sft.toml", "sft sft.toml"),
        ("finetune sft.toml", "sft"),
        ("evaluate runs/x", "eval"),
    ],
)
def test_commands(told: Told, arguments: str, meant: str) -> None:
    assert told(*arguments.split()).endswith(f"Did you mean `nmoe {meant}`?")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("rl train start.toml", 'start.toml:4: [model] path = "nowhere": neither a checkpoint'),
        ("rl train start.toml --model.path=qa.jsonl", "--model.path=qa.jsonl: is a file; name the directory"),
        ("rl train rl.toml --model.tokenizer=nope", "--model.tokenizer=nope: neither a tokenizer (no tokenizer.json"),
        (
            "sft sft.toml --records.path=no.jsonl@[:3]",
            "--records.path=no.jsonl@[:3]: no.jsonl: cannot be read: No such",
        ),
        ("sft sft.toml --records.path=no/such", "--records.path=no/such: dataset 'no/such'"),
        ("sft sft.toml --records.path=rl.toml", "--records.path=rl.toml: files of type '.toml' are not read"),
    ],
)
def test_missing_inputs_have_the_place_that_names_them(told: Told, arguments: str, said: str) -> None:
    assert told(*arguments.split()).startswith(said)


def test_data_that_is_missing_or_a_directory(told: Told) -> None:
    Path("rl.toml").write_text(RL.replace("qa.jsonl", "qb.jsonl"))
    assert told("rl", "train", "rl.toml") == (
        'rl.toml:19: [environment.task_pool] path = "qb.jsonl": cannot be read: No such file or directory'
    )
    said = told("rl", "train", "rl.toml", "--environment.task_pool.path=.")
    assert said == "--environment.task_pool.path=.: cannot be read: Is a directory; name a file in it"


def test_an_environment_in_a_file_of_its_own_names_its_own_line(told: Told) -> None:
    Path("own.toml").write_text(Path("own.toml").read_text().replace("qa.jsonl", "gone/x.jsonl"))
    Path("rl.toml").write_text(f'{RL.partition("[environment]")[0]}[environment]\npath = "own.toml"\n')
    assert told("rl", "train", "rl.toml") == (
        'own.toml:7: [task_pool] path = "gone/x.jsonl": cannot be read: No such file or directory'
    )


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("rl train", '[environment.task_pool] type = "jsonl", path = "qa.jsonl" and task_type = "math"'),
        ("sft", '[records] path = "qa.jsonl"'),
        ("pretrain", '[data] documents = "qa.jsonl"'),
        ("env check", '[task_pool] type = "jsonl", path = "qa.jsonl" and task_type = "math"'),
    ],
)
def test_data_in_the_place_of_a_configuration(told: Told, command: str, hint: str) -> None:
    assert (
        told(*command.split(), "qa.jsonl") == f"qa.jsonl: is data, and no TOML file of settings; name it in one: {hint}"
    )


def test_a_null_gold_is_named_with_its_line(told: Told) -> None:
    Path("qa.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n{"question": "3+3?", "answer": null}\n')
    assert told("rl", "train", "rl.toml") == "qa.jsonl:2: field 'answer' is null; fill it in or remove the record"
    Path("qa.jsonl").write_text('{"question": "3+3?", "answer": null}\n')
    assert told("rl", "train", "rl.toml") == "qa.jsonl:1: the field 'answer' is null; fill it in or remove the record"


def test_a_service_that_is_down_ends_the_run_before_it_starts(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    reward = '[[environment.rewards]]\ntype = "http"\nname = "style"\nurl = "http://127.0.0.1:9/score"\n'
    Path("rl.toml").write_text(RL + reward)
    assert told("rl", "train", "rl.toml") == (
        "services: [[rewards]] style: nothing answers at 127.0.0.1:9 (connection refused); start the service, or correct url"
    )


def test_every_name_of_the_tables_leads_to_a_key_a_value_or_a_command() -> None:
    known = {".".join(path) for schema in COMMANDS.values() for path in paths_of(schema, in_arrays=True)}
    rows = [(name, ours) for program in PROGRAMS for row in program.rows for name, ours in row.keys.items()]
    spelled = [(name, (ours,)) for ours, names in SPELLINGS.items() for name in names]
    for name, keys in [*rows, *spelled, *SIMILAR.items()]:
        assert [key for key in keys if key.replace(".0.", ".") not in known] == [], name
    for name, keys in spelled:
        assert name == name.lower().replace("-", "_")
        assert name not in known
        assert keys[0] in keys_meant((name,)), name
    assert {key for key in VALUES if key not in known} == set()
    assert [name for name in WITHOUT if name in known or keys_meant((name,))] == []
    assert closest("Mine", ("mine", "other")) == "mine"
    assert closest("xyz", ("mine", "other")) is None
    assert json.dumps(MEANT)


def test_a_function_that_is_none_is_refused_with_its_line_by_check_and_run(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "brief", None)
    monkeypatch.delitem(sys.modules, "brief")
    Path("brief.py").write_text("limit = 3\n\ndef long(completions): ...\n")
    reward = '[[environment.rewards]]\nname = "brief"\ntype = "function"\ncall = "{}"\n'
    here = Path("brief.py").resolve()
    for call, in_run, in_check in (
        ("brief:limit", "3 is not a function", f"3 is not a function ({here}:1)"),
        (
            "brief:short",
            f"{here} has no 'short'; it defines long",
            f"{here} has no function 'short'; its functions are long",
        ),
        (
            "nomodule:f",
            "importing nomodule failed: ModuleNotFoundError: No module named 'nomodule'",
            "there is no module 'nomodule', in the working directory or installed",
        ),
    ):
        Path("rl.toml").write_text(RL + reward.format(call))
        assert told("rl", "train", "rl.toml") == f'rl.toml:24: [environment.rewards[0]] call = "{call}": {in_run}'
        own = Path("own.toml").read_text().partition("[[rewards]]")[0] + reward.format(call).replace("environment.", "")
        Path("own.toml").write_text(own)
        assert told("env", "check", "own.toml") == f'own.toml:12: [rewards[0]] call = "{call}": {in_check}'


def test_a_run_in_the_place_of_records_is_named_in_one_line(told: Told) -> None:
    Path("old/checkpoints").mkdir(parents=True)
    Path("old/config.toml").write_text("")
    assert told("sft", "sft.toml", "--records.path=old") == (
        "--records.path=old: is a run, not a dataset; name a file of rows or a dataset"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("eval", "m", "sort", "--precision", "float8"), "'float8' is not one of 'float32', 'bfloat16', 'float16'."),
        (("eval", "m", "sort", "--problems", "many"), "'many' should be a valid integer"),
        (("chat", "m", "--temperature", "-1"), "'-1' should be greater than or equal to 0"),
        (("chat", "m", "--temperature", "nan"), "'nan' should be greater than or equal to 0"),
    ],
)
def test_a_wrong_value_of_an_option_is_shown(arguments: tuple[str, ...], said: str, told: Told) -> None:
    assert told(*arguments) == f"Invalid value for '{arguments[-2]}': {said}"
