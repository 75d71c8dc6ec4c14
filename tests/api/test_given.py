"""What a program may hand over: records of many kinds, lambdas, modules and optimizers; each works, or is refused with the way that
works."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

import nmoe
from nmoe.api.environments import environment_table, read_config
from nmoe.api.given import checked_generate_fn, model_path, rows_of
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.registry import load_object
from nmoe.errors import UserError

TINY = {"hidden_size": 16, "layers": 1, "heads": 2, "context_tokens": 64}
SHORT: dict[str, Any] = {
    "run.steps": 1,
    "run.threads": 1,
    "sampling.max_new_tokens": 8,
    "batch.prompts_per_step": 1,
    "batch.group_size": 4,
}
ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ones(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def test_rewards_are_added_to_the_grade_of_a_right_answer() -> None:
    run = nmoe.train_rl(TINY, env=ROWS[:1], rewards=[ones], config=SHORT)
    sample = json.loads((run.path / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    assert (sample["task_type"], sample["gold"]) == ("math", "4")
    assert sample["components"] | {"correctness": 0.0, "ones": 1.0} == sample["components"]
    assert (sample["weights"]["correctness"], sample["weights"]["ones"], sample["reward"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "task"),
    [
        ({"env": ROWS, "rewards": [ones]}, "math"),
        ({"env": None, "data": ROWS, "rewards": [ones]}, "math"),
        ({"env": [{"prompt": "a", "letter": "a"}], "rewards": [ones]}, "open"),
        ({"env": [{"prompt": "a", "answer": None}], "rewards": [ones]}, "open"),
        ({"env": [{"prompt": "a", "reward_model": {"ground_truth": "1"}}], "rewards": [ones]}, "math"),
        ({"env": ROWS}, "math"),
        ({"env": {"task": "open"}, "data": ROWS, "rewards": [ones]}, "open"),
        ({"env": None, "data": "rows.jsonl", "rewards": [ones]}, "math"),
        ({"env": None, "data": "open.jsonl", "rewards": [ones]}, "open"),
    ],
)
def test_the_task_of_records(arguments: dict[str, Any], task: str) -> None:
    Path("rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    Path("open.jsonl").write_text('{"prompt": "a"}\n')
    assert environment_table(**arguments)["task"] == task


def test_how_records_are_read_stays_where_data_replaces_them() -> None:
    table = {"env_id": "x", "task_pool": {"task_type": "math", "problem_field": "q", "seed": 7}}
    pool = environment_table(table, data=[{"q": "1+1", "answer": "2"}])["task_pool"]
    assert (pool["type"], pool["problem_field"], pool["seed"], pool["task_type"]) == ("python", "q", 7, "math")
    assert load_object("pool", pool["call"]) == [{"q": "1+1", "answer": "2"}]
    with pytest.raises(UserError, match=r"env: task_pool.path = 'x.jsonl' names problems, and data names others"):
        environment_table({"task_pool": {"type": "jsonl", "path": "x.jsonl"}}, data=ROWS)


def test_a_path_in_the_table_of_an_environment_is_read_and_the_rest_lies_over_it() -> None:
    table = environment_table({"path": "sort", "format": "boxed", "task_pool": {"difficulty": (2, 3)}}, rewards=[ones])
    assert (table["env_id"], table["format"]) == ("sort", "boxed")
    assert table["task_pool"]["task_type"] == "sort"
    assert table["task_pool"]["difficulty"] == (2, 3)
    assert table["rewards"][0]["name"] == "ones"


@pytest.mark.parametrize(
    "make",
    [
        datasets.Dataset.from_list,
        lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
        lambda rows: datasets.Dataset.from_list(rows).to_pandas(),
        lambda rows: datasets.Dataset.from_list(rows).data.table,
        iter,
        tuple,
    ],
    ids=["Dataset", "IterableDataset", "DataFrame", "Table", "iterator", "tuple"],
)
def test_records_of_many_kinds_are_the_same_records(make: Callable[[Any], Any]) -> None:
    assert rows_of(make(ROWS), "data") == ROWS
    assert load_object("pool", environment_table(make(ROWS))["task_pool"]["call"]) == ROWS


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
            r"DatasetDict of several splits; pass one, data\['train'\]",
        ),
        ({"prompt": ["a"], "answer": ["b"]}, "a dict of columns, or one record; pass a list of dicts"),
        (["text"], "record 0 of data is 'text', not a dict"),
        ([], "data has no records"),
        (7, "data is 7, and no records"),
    ],
)
def test_what_is_no_records(data: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        rows_of(data, "data")


def test_lambdas_and_partials_are_rewards_with_names_of_their_own() -> None:
    rewards = [
        lambda completions, **columns: [0.5] * len(completions),
        lambda completions, **columns: [0.25] * len(completions),
    ]
    table = environment_table([{"prompt": "a"}], [*rewards, partial(ones)])
    assert [reward["name"] for reward in table["rewards"]] == ["lambda", "lambda_2", "partial"]
    assert [load_object("reward", reward["call"])(["x"]) for reward in table["rewards"]] == [[0.5], [0.25], [1.0]]
    settings = parse(table, EnvironmentSettings, Locator(Place("here")))
    assert [reward.name for reward in settings.rewards] == ["lambda", "lambda_2", "partial"]


def contradictions() -> dict[str, tuple[dict[str, Any], str]]:
    made = {"type": "generated", "task_type": "sort"}
    env = {"env_id": "x", "format": "boxed", "task_pool": made}
    return {
        "model.path": ({"model": "a", "config": {"model.path": "b"}}, "model.path = 'b', and model says 'a'"),
        "shape": ({"config": {"model.shape.layers": 3}}, "model.shape.layers = 3, and model says 1"),
        "format": (
            {"env": env, "config": {"environment.format": "chat"}},
            "environment.format = 'chat', and env says 'boxed'",
        ),
        "path": ({"config": {"environment.path": "add"}}, "environment = 'add', and env names one as well"),
        "twice": ({"config": {"run.steps": 1, "run": {"steps": 2}}}, "run.steps is given twice, as 1 and as 2"),
        "task": ({"env": env | {"task": "add"}}, "task_pool.task_type = 'sort' says another task"),
        "module": ({"model": torch.nn.Linear(2, 2)}, "model is a Linear in memory, and a run starts from a path"),
        "optimizer": ({"optimizer": None}, "optimizer: no such argument; a run makes its own AdamW"),
        "optimizer_config": (
            {"config": {"optimizer": torch.optim.SGD([torch.zeros(1)])}},
            "write the loop: examples/rl_loop.py",
        ),
        "function": ({"config": {"algorithm.loss": ones}}, "is no setting; functions and objects are arguments"),
        "null": ({"config": {"run.name": None}}, "is no setting; leave it out for its default"),
        "lr": ({"lr": 1e-5}, r"lr: no such argument; a setting is passed as config=\{'optimizer.learning_rate'"),
        "vllm": (
            {"use_vllm": True},
            r"use_vllm: no such argument; a setting is passed as config=\{'engine.kind'",
        ),
        "reward_funcs": ({"reward_funcs": [ones]}, "reward_funcs: no such argument; did you mean rewards?"),
        "config lr": ({"config": {"lr": 1e-5}}, r"lr = 1e-5: unknown key; did you mean \[optimizer\] learning_rate"),
        "agent": ({"env": ones}, "what answers the policy turn by turn is a MultiTurnEnv"),
        "prompt": ({"generate_fn": lambda prompt: "x"}, "does not take a request and an engine"),
        "tools": ({"tools": ones}, r"is not a list; write tools=\[...\]"),
    }


@pytest.mark.parametrize("name", contradictions())
def test_what_contradicts_itself_or_comes_from_elsewhere_is_refused_with_the_way_that_works(name: str) -> None:
    arguments, said = contradictions()[name]
    with pytest.raises(UserError, match=said):
        nmoe.train_rl(**({"model": TINY, "env": "sort"} | arguments))
    assert not list(Path().glob("runs/*"))


def test_records_named_twice_are_refused() -> None:
    data = [{"prompt": "a", "completion": "b"}]
    with pytest.raises(UserError, match=r"records.path = 'x.jsonl', and data names records as well"):
        nmoe.train_sft(TINY, data=data, config={"records.path": "x.jsonl"})
    with pytest.raises(UserError, match=r"train_sft: train_dataset: no such argument; did you mean data\?"):
        nmoe.train_sft(TINY, train_dataset=data)  # type: ignore[call-arg]
    assert not list(Path().glob("runs/*"))


def test_models_in_memory() -> None:
    class Released:
        def save_pretrained(self, path: str) -> None:
            """As transformers' models have it."""

    with pytest.raises(UserError, match=r'model.save_pretrained\("start"\) and tokenizer.save_pretrained'):
        model_path(Released())
    with pytest.raises(UserError, match="a dict is the shape of a new model, which has learned nothing yet"):
        nmoe.generate(TINY, "a")  # type: ignore[arg-type]
    assert model_path(nmoe.TrainedRun(Path("runs/x"))) == Path("runs/x")


def test_functions_that_sample() -> None:
    checked_generate_fn(lambda request, engine: [])
    checked_generate_fn(lambda *both: [])
    with pytest.raises(UserError, match="generate_fn is a dict, which is no function"):
        checked_generate_fn({})


def test_numbers_of_other_libraries_are_settings() -> None:
    config = {"optimizer.learning_rate": torch.tensor(0.5), "run": {"steps": torch.tensor(3)}}
    assert read_config(config)[1] == {"optimizer": {"learning_rate": 0.5}, "run": {"steps": 3}}
