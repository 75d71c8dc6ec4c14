"""The schema of environments: the documented mixture word for word, and what it refuses."""

import tomllib
from typing import Any

import pytest

from nmoe.config.environment import EnvironmentSettings, held_out, reseeded
from nmoe.config.loader import parse
from nmoe.config.locate import Locator, Place
from nmoe.config.problems import ConfigError
from nmoe.config.tables.pools import GeneratedPool, GeneratedSource, HubSource, MixturePool
from nmoe.config.tables.rewards import Rubric, Weights
from nmoe.config.toml import to_toml

DOCUMENTED_MIXTURE = """
env_id = "math"

[task_pool]
type = "mixture"
seed = 42

[[task_pool.sources]]
name = "gsm8k"
type = "hf"
dataset = "openai/gsm8k"
subset = "main"
split = "train"
task_type = "gsm8k"
problem_field = "question"
answer_field = "answer"
gold_extractor = "gsm8k_hash"
weight = 0.3
max_examples = 100000

[[task_pool.sources]]
name = "math"
type = "hf"
dataset = "hendrycks/competition_math"
split = "train"
task_type = "math"
problem_field = "problem"
answer_field = "solution"
gold_extractor = "boxed"
weight = 0.7
max_examples = 100000
"""

GENERATED = '[task_pool]\ntype = "generated"\ntask_type = "sort"\n'


def environment(text: str) -> EnvironmentSettings:
    return parse(tomllib.loads('env_id = "e"\n' + text), EnvironmentSettings, Locator(Place("e.toml")))


def refusals(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        environment(text)
    return [str(problem).removeprefix("e.toml: ") for problem in caught.value.problems]


def test_the_documented_mixture_is_accepted_word_for_word() -> None:
    settings = parse(tomllib.loads(DOCUMENTED_MIXTURE), EnvironmentSettings, Locator(Place("math.toml")))
    keys: dict[str, Any] = {"type": "hf", "split": "train", "max_examples": 100000}
    assert settings.task_pool == MixturePool(
        type="mixture",
        seed=42,
        sources=(
            HubSource(
                **keys,
                name="gsm8k",
                dataset="openai/gsm8k",
                subset="main",
                task_type="gsm8k",
                problem_field="question",
                answer_field="answer",
                gold_extractor="gsm8k_hash",
                weight=0.3,
            ),
            HubSource(
                **keys,
                name="math",
                dataset="hendrycks/competition_math",
                task_type="math",
                problem_field="problem",
                answer_field="solution",
                gold_extractor="boxed",
                weight=0.7,
            ),
        ),
    )
    assert EnvironmentSettings.model_validate(tomllib.loads(to_toml(settings))) == settings


def test_defaults() -> None:
    settings = environment(GENERATED)
    assert settings.task_pool == GeneratedPool(type="generated", task_type="sort", difficulty=(1, 3), split="train")
    assert settings.rubric is None
    assert (settings.version, settings.format, settings.system, settings.curriculum) == ("1", "auto", "", None)
    assert settings.budget.completion_tokens is None


def test_a_rubric_keeps_correctness_and_a_stage_does_not() -> None:
    settings = environment(
        GENERATED
        + """
[[curriculum.stages]]
name = "format"
weights = {format = 1}
gate = {metric = "format_ok", at_least = 0.9}
[[curriculum.stages]]
name = "all"
weights = {format = 0.1, correctness = 1.0}
"""
    )
    assert environment(GENERATED + "[rubric]\nformat = 0.2\n").rubric == Rubric(format=0.2, correctness=1.0)
    assert settings.curriculum is not None
    assert settings.curriculum.window_steps == 4
    assert [stage.weights for stage in settings.curriculum.stages] == [
        Weights(format=1.0, correctness=0.0),
        Weights(format=0.1, correctness=1.0),
    ]
    assert EnvironmentSettings.model_validate(tomllib.loads(to_toml(settings))) == settings


@pytest.mark.parametrize(
    ("difficulty", "fits"), [("[1, 1]", True), ("[2, 8]", True), ("[3, 2]", False), ("[0, 2]", False)]
)
def test_difficulty_is_a_range_from_one_up(difficulty: str, fits: bool) -> None:
    text = f"{GENERATED}difficulty = {difficulty}\n"
    if fits:
        pool = environment(text).task_pool
        assert isinstance(pool, GeneratedPool)
        assert list(pool.difficulty) == tomllib.loads(f"d = {difficulty}")["d"]
    else:
        assert refusals(text) == [
            f"[task_pool] difficulty = {difficulty}: must be [least, most] with 1 <= least <= most"
        ]


def test_a_range_has_two_ends() -> None:
    assert refusals(f"{GENERATED}difficulty = [1]\n") == ["[task_pool] difficulty[1]: required item is missing"]
    assert refusals(f"{GENERATED}difficulty = [1, 2, 3]\n") == [
        "[task_pool] difficulty = [1, 2, 3]: expected 2 items, got 3"
    ]


def test_mixtures_need_sources_with_names_of_their_own() -> None:
    assert refusals('[task_pool]\ntype = "mixture"\nsources = []\n') == [
        "[task_pool] sources = []: a mixture needs at least one [[task_pool.sources]]"
    ]
    source = '[[task_pool.sources]]\ntype = "jsonl"\npath = "p"\ntask_type = "math"\nname = "a"\nweight = 1\n'
    assert refusals(f'[task_pool]\ntype = "mixture"\n{source}{source}') == [
        '[task_pool.sources[1]] name = "a": is used before; names must be unique'
    ]
    assert refusals(f'[task_pool]\ntype = "mixture"\n{source.replace("weight = 1", "weight = 0.0")}') == [
        "[task_pool.sources[0]] weight = 0.0: must be more than 0"
    ]


def test_curriculum_gates_stand_between_stages() -> None:
    weights = "weights = {format = 1.0}\n"
    gate = 'gate = {metric = "correctness", at_least = 0.5}\n'
    stages = f'[[curriculum.stages]]\nname = "a"\n{weights}[[curriculum.stages]]\nname = "b"\n{weights}{gate}'
    assert refusals(GENERATED + stages) == [
        "[curriculum.stages[0]] gate: is required, or the stages after this one never open",
        "[curriculum.stages[1].gate]: must be left out: no stage follows the last one",
    ]
    assert refusals(GENERATED + "[curriculum]\nstages = []\n") == [
        "[curriculum] stages = []: a curriculum needs at least one [[curriculum.stages]]"
    ]


def stages(*rows: tuple[str, str | None], order: str = "strict") -> str:
    """Stages by their weights and the metric of their gate."""
    text = f'[curriculum]\norder = "{order}"\n'
    for number, (weights, metric) in enumerate(rows):
        gate = "" if metric is None else f'gate = {{metric = "{metric}", at_least = 0.5}}\n'
        text += f'[[curriculum.stages]]\nname = "{number}"\nweights = {{{weights}}}\n{gate}'
    return GENERATED + text


TOO_EARLY, TOO_EAGER = "correctness is scored before the format", "efficiency is rewarded before correctness"


@pytest.mark.parametrize(
    ("rows", "strict"),
    [
        # The five stages of the story.
        (
            [
                ("format = 1", "format_ok"),
                ("reasoning = 1", "reasoning_ok"),
                ("tool_use = 1", "tool_use_ok"),
                ("correctness = 1", "correctness"),
                ("correctness = 1, efficiency = 0.3", None),
            ],
            [],
        ),
        # However little; tool use in good form is a gate on the format, too.
        ([("format = 1, correctness = 0.01", "format_ok"), ("correctness = 1", None)], [TOO_EARLY]),
        ([("tool_use = 1", "tool_use_ok"), ("correctness = 1", None)], []),
        ([("structure = 1", "structure_ok"), ("correctness = 1", None)], [TOO_EARLY]),
        ([("correctness = 1, format = 0.1", "correctness"), ("efficiency = 1", None)], [TOO_EARLY]),
        ([("format = 1", "format_ok"), ("correctness = 1, efficiency = 0.1", None)], [TOO_EAGER]),
        (
            [("format = 1", "tool_use_ok"), ("format = 1", "reasoning_ok"), ("correctness = 1", None)],
            ["reasoning_ok is the capability before tool_use_ok"],
        ),
    ],
)
def test_stages_build_on_one_another(rows: list[tuple[str, str | None]], strict: list[str]) -> None:
    for order, expected in (("strict", strict), ("any", [])):
        text = stages(*rows, order=order)
        said = refusals(text) if expected else []
        assert len(said) == len(expected)
        for one, part in zip(said, expected, strict=True):
            assert part in one
        if not expected:
            assert environment(text).curriculum is not None


def test_rewards_that_are_always_zero_are_refused() -> None:
    assert refusals(GENERATED + "[rubric]\ncorrectness = 0\n") == [
        "[rubric]: all weights are 0, so every reward would be 0"
    ]


def test_held_out_problems_are_the_eval_split_of_generated_pools() -> None:
    settings = environment(GENERATED + "seed = 3\n")
    held = held_out(settings)
    assert held is not None
    assert held.task_pool == GeneratedPool(type="generated", task_type="sort", seed=3, split="eval")
    assert held.model_copy(update={"task_pool": settings.task_pool}) == settings, "nothing else changes"
    assert held_out(environment(GENERATED + 'split = "all"\n')) is None
    assert held_out(environment(GENERATED + 'split = "eval"\n')) is None


def test_held_out_mixtures_are_generated_throughout() -> None:
    generated = '[[task_pool.sources]]\ntype = "generated"\ntask_type = "add"\nname = "a"\nweight = 1\n'
    dataset = '[[task_pool.sources]]\ntype = "jsonl"\npath = "p"\ntask_type = "math"\nname = "b"\nweight = 1\n'
    held = held_out(environment('[task_pool]\ntype = "mixture"\n' + generated))
    assert held is not None
    assert isinstance(held.task_pool, MixturePool)
    assert [source.split for source in held.task_pool.sources if isinstance(source, GeneratedSource)] == ["eval"]
    assert held_out(environment('[task_pool]\ntype = "mixture"\n' + generated + dataset)) is None
    assert held_out(environment(dataset.replace("[[task_pool.sources]]", "[task_pool]").partition("name")[0])) is None


def test_a_seed_is_added_to_every_pool() -> None:
    source = {"type": "generated", "task_type": "sort", "weight": 1.0, "seed": 5}
    pool = {"type": "mixture", "seed": 2, "sources": [source | {"name": "a"}, source | {"name": "b", "seed": 0}]}
    settings = EnvironmentSettings.model_validate({"env_id": "e", "task_pool": pool})
    moved = reseeded(settings, 10).task_pool
    assert isinstance(moved, MixturePool)
    assert (moved.seed, [s.seed for s in moved.sources]) == (12, [15, 10])
    assert reseeded(settings, 0) == settings


def test_a_rubric_beside_a_curriculum_would_be_ignored() -> None:
    stage = '[[curriculum.stages]]\nname = "a"\nweights = {format = 1}\n'
    (refusal,) = refusals(GENERATED + "[rubric]\nformat = 0.2\n" + stage)
    assert refusal.startswith("[rubric]: the weights of the curriculum's stages apply")


def test_a_stage_closes_below_what_opened_it() -> None:
    gate = 'gate = {metric = "format_ok", at_least = 0.8, close_below = 0.8}\n'
    weights = "weights = {format = 1}\n"
    stages = f'[[curriculum.stages]]\nname = "a"\n{weights}{gate}[[curriculum.stages]]\nname = "b"\n{weights}'
    (refusal,) = refusals(GENERATED + stages)
    assert "close_below = 0.8: must be below at_least = 0.8" in refusal


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("use = []", "names no tool"),
        ('use = ["pyhton"]', "did you mean 'python'?"),
        ('use = ["bash", "my.tools:bash"]', "is the second tool named 'bash'"),
    ],
)
def test_tools_that_can_not_be(table: str, reason: str) -> None:
    (refusal,) = refusals(GENERATED + f"[tools]\n{table}\n")
    assert reason in refusal


def test_boxed_text_has_no_form_for_calls() -> None:
    (refusal,) = refusals('format = "boxed"\n' + GENERATED + '[tools]\nuse = ["bash"]\n')
    assert "the boxed format has no tool calls" in refusal


@pytest.mark.parametrize(
    "table",
    [
        '[task_pool]\ntype = "jsonl"\ntask_type = "sort"\npath = "a\\u0000.jsonl"\n',
        '[task_pool]\ntype = "hf"\ntask_type = "sort"\ndataset = "a\\u0000"\n',
        GENERATED + '[workspace]\ndirectory = "a\\u0000"\n',
    ],
)
def test_a_path_has_no_null_character(table: str) -> None:
    with pytest.raises(ConfigError, match=r"(path|dataset|directory)\b.* is a path, and has a null character"):
        environment(table)
