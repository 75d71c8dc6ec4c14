"""Overrides on the command line, unknown keys, and modes of a command."""

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.base import Array, Section
from nmoe.config.commands import COMMANDS, RunConfig
from nmoe.config.loader import load_run
from nmoe.config.locate import locate
from nmoe.config.modes import Mode, mode_of, why_not_comparable
from nmoe.config.overrides import joined, lay_over, malformed, override_document, read_override, read_value
from nmoe.config.problems import ConfigError
from nmoe.config.toml import to_toml, toml_value
from nmoe.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-6", 1e-6),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("2024-01-31", datetime.date(2024, 1, 31)),
        ('"7"', "7"),
        ("grpo", "grpo"),
        ("runs/a b", "runs/a b"),
        ("", ""),
        ("1 # no comment", "1 # no comment"),
        ("1, b = 2", "1, b = 2"),
        ("1}\nc = {d = 2", "1}\nc = {d = 2"),
        ("a=b", "a=b"),
        ("[" * 5000, "[" * 5000),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_a_value_is_toml_or_else_a_string(text: str, value: Any) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


@given(
    st.recursive(
        st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda items: st.lists(items) | st.dictionaries(st.text(), items),
        max_leaves=8,
    )
)
def test_any_value_written_as_toml_is_read_back(value: Any) -> None:
    assert read_value(toml_value(value)) == value


def test_only_dashes_dots_and_an_equals_sign_make_an_override() -> None:
    assert read_override("--a.b-c.d=x=y") == (("a", "b-c", "d"), "x=y")
    assert read_override("--a=1") == (("a",), 1)
    bad = ["a.b=1", "-a.b=1", "--a.b", "--.b=1", "--a..b=1", "--=1", "7", ""]
    assert malformed([*bad, "--a.b="]) == bad


def test_overrides_replace_values_and_join_tables() -> None:
    text = "[a]\nx = 1\nl = [1, 2]\n[a.t]\ny = 2\n"
    data = {"a": {"x": 1, "l": [1, 2], "t": {"y": 2}}}
    where = locate(text, Path("f.toml"))
    for override in ("--a.l=[3]", "--a.t={z = 3}", "--n.m=4", "--a.l=[5]"):
        path_and_value = read_override(override)
        assert path_and_value is not None
        lay_over(data, where, *override_document(*path_and_value, override))
    assert data == {"a": {"x": 1, "l": [5], "t": {"y": 2, "z": 3}}, "n": {"m": 4}}
    places = {
        ("a", "x"): "f.toml:2",
        ("a", "l"): "--a.l=[5]",
        ("a", "l", 0): "--a.l=[5]",
        ("a", "t"): "f.toml:4",
        ("a", "t", "y"): "f.toml:5",
        ("a", "t", "z"): "--a.t={z = 3}",
        ("n", "m"): "--n.m=4",
        ("n",): "f.toml",
    }
    assert {path: str(where.place(path)) for path in places} == places


def test_a_value_may_follow_its_key() -> None:
    given = ["x.toml", "--run.seed", "3", "--a.b=1", "--optimizer.eps", "-1e-8", "--run.resume", "--mode", "step"]
    assert joined(given) == [
        "x.toml",
        "--run.seed=3",
        "--a.b=1",
        "--optimizer.eps=-1e-8",
        "--run.resume",
        "--mode",
        "step",
    ]
    assert joined(["--run.name", "a b", "--c.d"]) == ["--run.name=a b", "--c.d"]


class Leaf(Section):
    name: str
    weight: float = 1.0
    note: str | None = None


class Tree(Section):
    text: str = 'a "quoted" \\ line\nand \x7f \x00 é 🙂'
    rate: float = 1e-6
    big: float = 1e22
    on: bool = True
    pair: Array[int] = (1, 2)
    none: Array[Leaf] = ()
    leaf: Leaf = Leaf(name="a")
    leaves: Array[Leaf] = (Leaf(name="b", note="n"), Leaf(name="c"))
    count: int = 3


def test_the_text_of_a_small_tree() -> None:
    assert to_toml(Leaf(name="b", note="n")) == 'name = "b"\nweight = 1.0\nnote = "n"\n'
    assert to_toml(Tree(text="t")) == (
        'text = "t"\nrate = 1e-06\nbig = 1e+22\non = true\npair = [\n    1,\n    2,\n]\nnone = []\n'
        'leaves = [\n    { name = "b", weight = 1.0, note = "n" },\n    { name = "c", weight = 1.0 },\n]\ncount = 3\n'
        '\n[leaf]\nname = "a"\nweight = 1.0\n'
    )


def test_a_tree_reloads_to_an_equal_one() -> None:
    tree = Tree()
    assert Tree.model_validate(tomllib.loads(to_toml(tree))) == tree


def test_a_settings_object_of_tables_alone_starts_without_a_blank_line() -> None:
    class Root(Section):
        leaf: Leaf

    assert to_toml(Root(leaf=Leaf(name="a"))) == '[leaf]\nname = "a"\nweight = 1.0\n'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        ("a\tb", '"a\tb"'),
        ([1.5, "x"], '[1.5, "x"]'),
        ({"a b": 1, "c": []}, '{"a b" = 1, c = []}'),
        *((1e-6, "1e-6"), (2.5e-10, "2.5e-10"), (1e22, "1e22"), (0.0003, "0.0003"), (1_900_000_000, "1900000000")),
    ],
)
def test_values(value: object, text: str) -> None:
    assert toml_value(value) == text


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
        "--critics.gamma=1: unknown key; gamma is of `nmoe rl train`",
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
        "--trainer.n_gpus_per_node=1": "did you mean --placement.learner_gpus?",
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
        "--data.val_batch_size=4: unknown key; it has no counterpart: a run reads its data in its own process, in an order drawn "
        "from its seed",
        "--data.train_files=x: unknown key; did you mean --environment.task_pool.path?",
    ]


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ({}, Mode("greedy_pass@1", 1, 0.0)),
        ({"temperature": 1.0}, Mode("sampling_pass@1", 1, 1.0)),
        ({"samples": 8, "temperature": 0.7}, Mode("sampling_pass@8", 8, 0.7)),
        ({"name": "sampling_pass@8"}, Mode("sampling_pass@8", 8, 0.6)),
        ({"name": "sampling_pass@4", "samples": 4, "temperature": 1.0}, Mode("sampling_pass@4", 4, 1.0)),
        ({"name": "greedy_pass@1", "temperature": 0.0}, Mode("greedy_pass@1", 1, 0.0)),
        ({"name": "nondet_proxy_pass@8"}, Mode("nondet_proxy_pass@8", 8, 0.0)),
    ],
)
def test_what_a_mode_stands_for(asked: dict[str, object], mode: Mode) -> None:
    assert mode_of(**asked) == mode  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"samples": 8}, "temperature 0 gives the same completion 8 times: .*nondet_proxy_pass@8"),
        (
            {"name": "greedy_pass@1", "temperature": 0.6},
            "is at temperature 0, and 0.6 is asked for; use sampling_pass@1",
        ),
        ({"name": "greedy_pass@8"}, "one completion; write greedy_pass@1"),
        ({"name": "sampling_pass@8", "temperature": 0.0}, "at temperature 0 nothing is drawn"),
        ({"name": "nondet_proxy_pass@8", "temperature": 0.6}, "use sampling_pass@8"),
        ({"name": "nondet_proxy_pass@1"}, "one greedy completion is greedy_pass@1"),
        ({"name": "sampling_pass@8", "samples": 4}, "is of 8 samples, and 4 are asked for"),
        ({"name": "sampling_pas@8"}, "is no mode: .*did you mean 'sampling_pass@8'"),
        ({"name": "sampling_pass@0"}, "is no mode"),
        ({"name": "likelihood_text"}, "samples nothing: it is a mode of `nmoe eval` on multiple choice"),
        ({"name": "likelihod_text"}, "did you mean 'likelihood_text'"),
    ],
)
def test_what_does_not_fit_a_mode(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mode_of(**asked)  # type: ignore[arg-type]


def test_results_of_different_modes_or_settings_are_not_compared() -> None:
    greedy, drawn = {"mode": "greedy_pass@1"}, {"mode": "sampling_pass@8", "sampling": {"temperature": 0.6}}
    assert why_not_comparable(greedy, drawn) == (
        "greedy_pass@1 and sampling_pass@8 are different modes, which are never compared: evaluate both in one"
    )
    warmer = {"mode": "sampling_pass@8", "sampling": {"temperature": 1.0}}
    assert why_not_comparable(drawn, warmer) == (
        "both are sampling_pass@8, but with temperature 0.6 and 1.0: evaluate both with the same settings"
    )
    assert why_not_comparable(drawn, dict(drawn)) is None
    assert why_not_comparable(drawn, {"mode": "sampling_pass@8"}) is None
