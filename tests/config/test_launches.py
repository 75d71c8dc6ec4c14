"""Launches of other trainers: each of the hand-written ones in tests/config/launches becomes a configuration that nmoe takes,
with the values written beside it."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nmoe.cli.command import app
from nmoe.config.commands import COMMANDS, RLConfig
from nmoe.config.launches.command import PROGRAMS, imported, summary
from nmoe.config.launches.convert import Imported, convert, nested
from nmoe.config.launches.read import Given, Launch, read_launch, scalar
from nmoe.config.launches.rows import Program
from nmoe.config.launches.shell import statements
from nmoe.config.launches.write import written
from nmoe.config.loader import load_run, load_with
from nmoe.errors import UserError
from nmoe.preflight.preflight import preflight

LAUNCHES = Path(__file__).parent / "launches"
# From wheels, by scripts/trainer_keys.py; and from sources that are in no registry, copied by hand from the commits in their names.
KEYS: dict[str, dict[str, Any]] = {
    name: keys
    for file in ("trainer_keys.json", "source_keys.json")
    for name, keys in json.loads((Path(__file__).parent / file).read_text()).items()
}


def cases() -> Iterator[Any]:
    for file in sorted(LAUNCHES.glob("*.txt")):
        for block in file.read_text().split("=== ")[1:]:
            title, _, rest = block.partition("\n")
            command, *expected = rest.split("\n--- ")
            yield pytest.param(command, "\n".join(expected).strip(), id=f"{file.stem}: {title}")


@pytest.fixture
def at_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the launches name, as the working directory."""
    folder = tmp_path / "launches"
    shutil.copytree(LAUNCHES, folder)
    monkeypatch.chdir(folder)
    return folder


CASES = list(cases())


@pytest.mark.parametrize(("command", "expected"), CASES)
def test_a_launch_becomes_a_configuration(command: str, expected: str, at_launches: Path) -> None:
    found = imported(command)
    assert found.unknown == []
    assert found.refused == []
    wanted = tomllib.loads(expected)
    assert {key: value for key, value in flat(nested(found.values)) if key in dict(flat(wanted))} == dict(flat(wanted))
    file = at_launches / "mine.toml"
    file.write_text(written(found))
    load_run(file, COMMANDS[found.program.command])
    every_key_is_named(command, found)


def flat(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables with dotted keys; a table's index in an array is a part of its key."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        name = f"{above}.{key}".lstrip(".")
        tables = isinstance(below, dict) or (isinstance(below, list) and below and isinstance(below[0], dict))
        if tables and not name.endswith((".columns", "columns", "chat_template_kwargs")):
            yield from flat(below, name)
        else:
            yield name, below


def every_key_is_named(command: str, found: Imported) -> None:
    text = written(found)
    for one in read_launch(command).given.values():
        assert one.key in text, f"{one.key} is dropped"


def test_each_trainer_has_its_launches() -> None:
    counted: dict[str, int] = {}
    for file in LAUNCHES.glob("*.txt"):
        counted[file.stem] = file.read_text().count("\n=== ") + 1
    assert counted == {"openrlhf": 10, "trl": 10, "verl": 10, "skyrl": 10, "slime": 10, "prime_rl": 10, "documents": 4}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_of_a_trainer_is_in_its_catalogue(name: str) -> None:
    (program,) = [one for one in PROGRAMS if one.name == name.partition(" of ")[0]]
    assert [key for key in KEYS[name] if not program.knows(key)] == []


# The newest version of each package; older ones have some other defaults.
NEWEST = [name for name in KEYS if not name.endswith((" openrlhf 0.9.3", " skyrl_train 0.3.1"))]


@pytest.mark.parametrize("name", NEWEST)
def test_defaults_are_those_of_the_package(name: str) -> None:
    (program,) = [one for one in PROGRAMS if one.name == name.partition(" of ")[0]]
    keys = KEYS[name]
    stated = {key: as_json(value) for key, value in program.defaults.items() if key in keys}
    computed = {key: value for key, value in keys.items() if isinstance(value, str) and ("(" in value or "{" in value)}
    assert {key: value for key, value in stated.items() if value != keys[key] and key not in computed} == {}


def as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


SHAPE = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 32}
# One launch of each trainer; all of them in `pytest -m long`.
FIRST = ("openrlhf: GRPO on", "trl: GRPO with two", "verl: GRPO on", "skyrl: GRPO on GSM8K (skyrl 0.4.0)")
QUICK = [case for case in CASES if str(case.id).startswith(FIRST)]
REST = [pytest.param(*case.values, id=case.id, marks=pytest.mark.long) for case in CASES if case not in QUICK]


@pytest.mark.parametrize(("command", "expected"), [*QUICK, *REST])
def test_the_configuration_passes_preflight(command: str, expected: str, at_launches: Path) -> None:
    """With a tiny model for the launch's own, and a few problems for its data."""
    found = imported(command)
    tables = nested(
        {key: value for key, value in found.values.items() if not key.startswith(("lora.", "sinks.", "parallel."))}
    )
    tables["run"]["directory"] = str(at_launches / "runs")
    longest = tables.get("sampling", {}).get("max_new_tokens", 200) + 600
    shape = {**SHAPE, "context_tokens": longest}
    tables["model"] = {"tokenizer": "bytes", "device": "cpu", "shape": shape}
    tables["batch"]["tokens_per_microbatch"] = max(longest, tables["batch"].get("tokens_per_microbatch", 16384))
    if "critic" in tables:
        tables["critic"] = {"shared": True}
    if "records" in tables:
        file_of_examples(tables["records"], at_launches / "examples.jsonl")
        tables.setdefault("eval", [{"every_steps": 50}])
    else:
        tables["optimizer"]["allow_slow_warmup"] = True  # the file has too few problems for a warm-up
        tables["batch"] |= {"prompts_per_step": 2, "updates_per_step": 1}
        file_of_problems(tables["environment"], at_launches / "problems.jsonl", 0)
        for index, probe in enumerate(tables.get("eval", [])):
            file_of_problems(probe["environment"], at_launches / f"probe{index}.jsonl", 1000)
    config = load_with(None, COMMANDS[found.program.command], tables, "launch")
    if isinstance(config, RLConfig):
        assert config.environment.task_pool is not None
    assert [str(check) for check in preflight(config) if check.status == "fail"] == []


def file_of_problems(environment: dict[str, Any], path: Path, start: int) -> None:
    """Writes sums with the columns of a pool, and names the file in the pool; rewards that are not here are left out."""
    pool = environment["task_pool"]
    question, answer = pool.get("problem_field", "prompt"), pool.get("answer_field", "answer")
    rewards = [one for one in environment.get("rewards", []) if one.get("call", "").startswith("trl.")]
    environment["rewards"] = rewards
    environment.pop("chat_template_kwargs", None)
    if environment["task"] == "open" and not rewards:
        environment["task"] = "math"
    with path.open("w") as file:
        for number in range(start, start + 40):
            text, total = f"What is {number} + 1?", str(number + 1)
            messages = [{"role": "user", "content": text}]
            record: dict[str, Any] = {"prompt": messages, "env_class": "gsm8k", "reward_spec": {"ground_truth": total}}
            if environment["task"] != "skyrl_gym":
                record = {question: messages if question == "prompt" else text}
                above, _, below = answer.partition(".")
                record[above] = {below: total} if below else total
            file.write(json.dumps(record) + "\n")
    kept = {key: pool[key] for key in ("problem_field", "answer_field") if key in pool}
    environment["task_pool"] = {"type": "jsonl", "path": str(path), **kept}


def file_of_examples(records: dict[str, Any], path: Path) -> None:
    """Writes examples that serve SFT and preferences, and names the file in [records]."""
    columns = {name: name for name in ("prompt", "completion", "chosen", "rejected")} | records.get("columns", {})
    with path.open("w") as file:
        for number in range(200):
            texts = {
                "prompt": f"{number} + 1?",
                "completion": str(number + 1),
                "chosen": str(number + 1),
                "rejected": "no",
            }
            kept = ("chosen", "rejected", "prompt") if "better" in columns.values() else ("prompt", "completion")
            file.write(json.dumps({columns[name]: texts[name] for name in kept}) + "\n")
    for key in ("subset", "data_files", "held_out_path"):
        records.pop(key, None)
    if "held_out_split" in records:
        records.pop("held_out_split")
    records |= {"path": str(path), "split": "train", "held_out": 20.0}


BAD = {
    "an empty command": (" ", "empty command"),
    "no trainer": ("ls -l", "starts no trainer"),
    "an unknown trainer": ("python train.py --foo 1 --bar 2", "of no trainer that is known"),
    "an open quote": ("trl grpo --output_dir 'out --beta 0.1", "command:1: the quote ' is not closed"),
    "an open double quote": ('trl grpo --output_dir "out', "is not closed"),
    "a key twice": ("trl grpo --beta 0.1 --learning_rate 1e-6 --beta 0.2", "beta is given twice"),
    "two spellings of a key": (
        "python -m openrlhf.cli.train_ppo_ray --actor_learning_rate 1e-6 --actor.adam.lr 2e-6", "are the same key",
    ),
    "a script that is not there": ("absent.sh", "absent.sh: no such file"),
    "a script in a command that is not there": ("bash absent.sh --beta 0.1", "absent.sh: no such file"),
    "a YAML that is not there": ("trl grpo --config absent.yaml", "absent.yaml: no such file (named at command:1)"),
    "a YAML that is a list": ("list.yaml", "list.yaml: no mapping"),
    "a YAML with a key twice": ("twice.yaml", "twice.yaml:3: trainer.seed is given twice, first in line 2"),
    "a YAML that is none": ("broken.yaml", "broken.yaml: "),
    "a word for a number": (
        "python -m openrlhf.cli.train_ppo_ray --actor_learning_rate 1e-6 --eps_clip tight",
        "command:1: eps_clip = tight: not values",
    ),
    "two launches": ("two.sh", "two.sh: has 2 launches (two.sh:1 trl sft, two.sh:2 trl dpo)"),
    "keys of several programs": ("flat.yaml", "name one with --program"),
}  # fmt: skip


@pytest.mark.parametrize(("command", "message"), BAD.values(), ids=list(BAD))
def test_bad_input_is_one_message(command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.yaml").write_text("- trainer\n- seed\n")
    (tmp_path / "twice.yaml").write_text("trainer:\n  seed: 1\n  seed: 2\n")
    (tmp_path / "broken.yaml").write_text("trainer: [1,\n")
    (tmp_path / "two.sh").write_text("trl sft --seed 1\ntrl dpo --seed 1\n")
    (tmp_path / "flat.yaml").write_text("learning_rate: 1e-6\nseed: 1\n")
    with pytest.raises(UserError) as caught:
        imported(command)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", ["abc", [], {"a": 1}, 1e300, -1, True], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_values_of_any_kind_are_taken_or_refused(program: Program, value: object) -> None:
    """With each key in turn: a message, or a configuration that the schema has judged."""
    taken, refused = 0, list[str]()
    for name in sorted({name for row in program.rows if row.convert for name in row.theirs if "*" not in name}):
        launch = Launch(program.name, "launch", {name: Given(name, value, "launch:1")})
        try:
            found = convert(launch, program)
        except UserError as error:
            refused.append(str(error))
        else:
            taken += program.trainer in written(found)
    assert taken > 0
    assert [message for message in refused if not message.startswith("launch:1: ")] == []


def test_an_unknown_program_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"--program=trl ppo: unknown; one of trl grpo, trl rloo"):
        imported("python train.py --seed 1", "trl ppo")


def test_an_unknown_key_is_named_with_its_line_and_the_closest(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("MODEL=m\ntrl grpo --model_name_or_path $MODEL \\\n  --learning_rat 1e-6 \\\n  --api_token abc\n")
    found = imported(str(script))
    assert found.values["model.path"] == "m"
    assert found.unknown == [
        f"{script}:3: learning_rat = 1e-06 (closest: learning_rate)", f"{script}:4: api_token",
    ]  # fmt: skip
    assert "abc" not in written(found)
    assert any("learning_rat" in line for line in summary(found))


def test_keys_of_wandb_are_not_written() -> None:
    found = imported(
        "python -m openrlhf.cli.train_ppo_ray --pretrain m --use_wandb 0123secret --n_samples_per_prompt 2"
    )
    assert found.values["sinks.to"] == ["wandb"]
    assert "0123secret" not in written(found)


VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet "
HOLDING = {
    "a variable of Ray, in verl": (
        f"{VERL} +ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY=abcdef123456",
        "ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY",
    ),
    "a table of variables": (
        f"""ray job submit --runtime-env-json='{{"env_vars":{{"WANDB_API_KEY":"abcdef123456"}}}}' -- {VERL}""",
        "--runtime-env-json: an option of what starts the trainer",
    ),
    "a table with an unset variable": (
        f"""ray job submit --runtime-env-json="{{'env_vars':{{'A':'$A','B':'abcdef123456'}}}}" -- {VERL}""",
        "--runtime-env-json: an option of what starts the trainer",
    ),
    "a table in an unknown key": (f"{VERL} +extra='{{api_key: abcdef123456, a: 1}}'", "extra = {'api_key': '...', 'a': 1}"),
    "a URL": (f"{VERL} +reward.remote_url=http://user:abcdef123456@host/v1", "http://...@host/v1"),
    "a header": ("trl sft --model_name_or_path m --header 'Authorization: Bearer abcdef123456'", "Bearer ..."),
    "a key of the hub": ("trl sft --model_name_or_path m --hub_token abcdef123456", "hub_token"),
}  # fmt: skip


@pytest.mark.parametrize(("command", "line"), HOLDING.values(), ids=list(HOLDING))
def test_keys_and_passwords_are_not_written(command: str, line: str) -> None:
    found = imported(command)
    text = written(found)
    assert "abcdef123456" not in text
    assert "abcdef123456" not in " ".join(summary(found))
    assert line in " ".join(text.replace("#", " ").split())


def test_a_message_of_values_that_are_wrong_has_no_key() -> None:
    command = "python -m openrlhf.cli.train_ppo_ray --pretrain m --eps_clip http://user:abcdef123456@host"
    with pytest.raises(UserError) as caught:
        imported(command)
    assert "eps_clip = http://...@host" in str(caught.value)


def test_switches_of_a_yaml_file_are_on_or_off(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model_name_or_path: m\ngradient_checkpointing: off\nuse_vllm: no\nmask_truncated_completions: Off\nuse_peft: on\n"
        "run_name: 'off'\n"
    )
    given = read_launch(f"trl grpo --config {file}").given
    assert [given[key].value for key in ("gradient_checkpointing", "use_vllm", "use_peft")] == [False, False, True]
    assert given["run_name"].value == "off"
    found = imported(f"trl grpo --config {file}").values
    assert found.get("model.checkpoint_activations", False) is False
    assert found.get("algorithm.mask_truncated", False) is False
    assert found.get("engine.kind") != "vllm"
    assert "lora.rank" in found
    assert scalar("[no, off]") == ["no", "off"]


def test_a_warm_up_of_optimizer_steps_is_one_of_steps() -> None:
    grpo = "trl grpo --model_name_or_path m --num_processes 1 --gradient_accumulation_steps 4 --steps_per_generation 32"
    found = imported(f"{grpo} --warmup_steps 100 --max_steps 800")
    assert (found.values["run.steps"], found.values["batch.updates_per_step"]) == (100, 8)
    assert found.values["optimizer.warmup_steps"] == 13
    assert any(
        line.startswith("100 steps of warm-up are no multiple of the 8 optimizer steps") for line in found.differs
    )
    assert imported(f"{grpo} --num_iterations 2 --warmup_steps 32").values["optimizer.warmup_steps"] == 2
    assert imported("trl sft --model_name_or_path m --warmup_steps 32").values["optimizer.warmup_steps"] == 32
    skyrl = "python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=m"
    found = imported(f"{skyrl} trainer.update_epochs_per_batch=2 trainer.policy.optimizer_config.num_warmup_steps=80")
    assert (found.values["batch.updates_per_step"], found.values["optimizer.warmup_steps"]) == (4, 10)


def test_another_mask_of_the_loss_is_named() -> None:
    sft = "trl sft --model_name_or_path m --dataset_name d.jsonl"
    named = "assistant_only_loss = false (default of TRL): nmoe trains on the assistant's turns alone"
    assert any(line.startswith(named) for line in imported(sft).differs)
    assert not any("only_loss" in line for line in imported(f"{sft} --assistant_only_loss true").differs)
    assert any(
        line.startswith("completion_only_loss = false: ")
        for line in imported(f"{sft} --completion_only_loss false").differs
    )


def test_a_bound_of_cispo_below_1_is_named() -> None:
    cispo = "trl grpo --model_name_or_path m --num_processes 1 --loss_type cispo"
    found = imported(cispo)
    assert found.values["algorithm.clip_high"] == 1e-3
    assert any("TRL weighs no token by more than 0.2" in line for line in found.differs)
    found = imported(f"{cispo} --epsilon_high 5.0")
    assert found.values["algorithm.clip_high"] == 4.0
    assert not any("weighs no token" in line for line in found.differs)


def test_variables_that_the_script_does_not_set_are_to_be_filled_in() -> None:
    keys = "actor_rollout_ref.rollout.n=$N actor_rollout_ref.actor.clip_ratio_high=$HIGH data.max_response_length=$L"
    found = imported(f"{VERL} {keys}")
    assert found.to_fill["batch.group_size"].endswith("rollout.n = $N: the script does not set this variable")
    assert found.to_fill["algorithm.clip_high"].endswith(
        "clip_ratio_high = $HIGH: the script does not set this variable"
    )
    assert "data.max_response_length = $L" in found.to_fill["sampling.max_new_tokens"]
    assert not any("$L" in line for line in found.without)
    found = imported("trl grpo --model_name_or_path m --num_generations $G --per_device_train_batch_size $B")
    assert found.values["batch.group_size"] == 8
    assert "num_generations = $G" in found.to_fill["batch.group_size"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trl grpo --model_name_or_path m --num_generations many", "num_generations = many: not values"),
        (f"{VERL} actor_rollout_ref.rollout.n=many", "actor_rollout_ref.rollout.n = many: not values"),
    ],
)
def test_a_word_for_a_count_is_refused(command: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        imported(command)
    assert message in str(caught.value)


def test_a_configuration_that_nmoe_refuses_is_said_to_be() -> None:
    found = imported(
        "trl grpo --model_name_or_path m --dataset_name a.jsonl --reward_funcs accuracy_reward --num_generations 1"
    )
    (refused,) = found.refused
    assert "must be at least 2" in refused
    assert refused in " ".join(written(found).replace("#", " ").split())


def test_arguments_behind_a_script_count_over_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text('trl grpo --model_name_or_path $1 --beta 0.1 --seed 1 "$@"\n')
    found = imported("PYTHONUNBUFFERED=1 bash train.sh mine --beta 0.2 2>&1 | tee log.txt")
    assert (found.values["algorithm.kl_coef"], found.values["run.seed"]) == (0.2, 1)
    assert found.values["model.path"] == "mine"


# documented: nmoe config import train_grpo.sh --out mine.toml --program "trl grpo"
def test_the_command_writes_a_file_and_says_what_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_grpo.sh").write_text("python train.py --model_name_or_path m --num_processes 1 --foo 1\n")
    arguments = ["config", "import", "train_grpo.sh", "--out", "mine.toml", "--program", "trl grpo"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert done.stdout == ""
    assert "unknown: train_grpo.sh:1: foo = 1" in done.stderr
    assert "to fill in: environment.task: " in done.stderr
    assert tomllib.loads((tmp_path / "mine.toml").read_text())["batch"]["prompts_per_step"] == 1
    again = CliRunner().invoke(app, arguments)
    assert "--out=mine.toml: exists" in str(again.exception)


def test_the_command_prints_a_refused_configuration_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["config", "import", "trl grpo --model_name_or_path m --num_generations 1"])
    assert done.exit_code == 1
    assert tomllib.loads(done.stdout)["batch"]["group_size"] == 1
    assert "refused: " in done.stderr


SCRIPT = r"""
# a comment with 'a quote
A=1; B="two words"
: "${C:="$A-default"}"
LIST=(x=1
  y="2 3")
read -r -d '' HERE <<EOF
--one 1 \
--two 2
EOF
run $A "$B" $B ${C} ${D:-none} $((A * 3 + 1)) "${LIST[@]}" $HERE 'it is $A' $UNSET   `# between` next > out.txt 2>&1 && echo done
"""


def test_a_script_is_read_as_a_shell_reads_it() -> None:
    found = [[word.text for word in one.words] for one in statements(SCRIPT, "script")]
    assert found[2][:12] == [
        "run",
        "1",
        "two words",
        "two",
        "words",
        "1-default",
        "none",
        "4",
        "x=1",
        "y=2 3",
        "--one",
        "1",
    ]
    assert found[2][12:] == ["--two", "2", "it is $A", "$UNSET", "next"]
    assert found[3] == ["echo", "done"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("2.0e-5", 2e-5), ("16", 16), ("True", True), ("null", None), ("'a'", "a"), ("[1, 2e-1]", [1, 0.2]),
        ("['a.parquet','b.parquet']", ["a.parquet", "b.parquet"]), ("{a: false}", {"a": False}), ("a b", "a b"), ("-1", -1),
    ],
)  # fmt: skip
def test_words_are_values(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)
