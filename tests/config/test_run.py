"""The schema of runs: what it accepts, which combinations it refuses, and what the arithmetic says of it."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.base import Section
from nmoe.config.commands import COMMANDS, DPOConfig, PretrainConfig, RewardConfig, RLConfig, RunConfig, SFTConfig
from nmoe.config.kinds import command_for
from nmoe.config.loader import load, load_environment, load_preparation, load_run, parse
from nmoe.config.locate import Locator, Place
from nmoe.config.packaged import CONFIGS
from nmoe.config.preparation import PreparationSettings
from nmoe.config.problems import ConfigError
from nmoe.config.schema import description_of, item_of, paths_of, sections_of
from nmoe.config.tables.algorithm import PolicyLossSection
from nmoe.config.tables.pools import GeneratedPool
from nmoe.config.toml import to_toml, toml_value

SHAPE = """
[run]
steps = 100
[model]
tokenizer = "tok"
[model.shape]
hidden_size = 64
layers = 2
heads = 4
kv_heads = 2
head_dim = 16
context_tokens = 512
intermediate_size = 128
"""
SORT = 'env_id = "sort"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\n'
ENVIRONMENT = '[environment]\npath = "sort.toml"\n'
DATA = '[data]\ndocuments = "d.jsonl"\n'


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "sort.toml").write_text(SORT)

    def write(text: str) -> Path:
        path = tmp_path / "tiny sort.toml"
        path.write_text(text)
        return path

    return write


Write = Callable[[str], Path]


def refusals(path: Path, schema: type[RunConfig], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, schema, overrides)
    return [str(problem).removeprefix(f"{path}:") for problem in caught.value.problems]


def test_a_resolved_configuration_reloads_to_an_equal_one(config: Write, tmp_path: Path) -> None:
    text = SHAPE + ENVIRONMENT + '[[eval]]\nevery_steps = 10\nenvironment.path = "sort.toml"\n'
    loaded = load_run(config(text), RLConfig, ["--eval.0.environment.task_pool.split=eval", "--algorithm.clip_high=3"])
    assert loaded.environment.task_pool == GeneratedPool(type="generated", task_type="sort")
    assert loaded.eval[0].environment is not None
    assert loaded.eval[0].environment.task_pool == GeneratedPool(type="generated", task_type="sort", split="eval")
    resolved = tmp_path / "elsewhere" / "config.toml"
    resolved.parent.mkdir()
    resolved.write_text(to_toml(loaded))
    assert load_run(resolved, RLConfig) == loaded


@pytest.mark.parametrize(
    ("table", "overrides", "message"),
    [
        (
            "[eval]\nevery_steps = 5\n",
            (),
            "[eval]: expected an array, got a table; write [[eval]], once for each table",
        ),
        (
            "",
            ("--eval.every_steps=5",),
            "--eval.every_steps=5: eval is an array of tables; say which, counted from 0, as in --eval.0.every_steps",
        ),
        (
            "[[eval]]\n",
            ("--eval.2.problems=5",),
            "--eval.2.problems=5: eval has 1 tables, counted from 0; the next is --eval.1",
        ),
        (
            "[[eval]]\n",
            ("--eval.1.problems=5",),
            " [eval[1]]: its results look like those from [eval[0]]: both are greedy_pass@1 on sort; choose "
            "another mode, or give its environment another env_id",
        ),
        (
            '[[eval]]\nrole = "out_of_distribution"\n',
            (),
            " [eval[0]] environment: is required: problems from outside the training environment",
        ),
        (
            '[[eval]]\nmode = "greedy_pass@1"\ntemperature = 0.5\n',
            (),
            "greedy_pass@1 is at temperature 0, and 0.5 is asked for; use sampling_pass@1",
        ),
    ],
)
def test_tables_of_evaluations_that_cannot_be_used(
    config: Write, table: str, overrides: tuple[str, ...], message: str
) -> None:
    (line,) = refusals(config(SHAPE + ENVIRONMENT + table), RLConfig, *overrides)
    assert message.strip() in line


def test_an_override_changes_one_table_or_adds_the_next(config: Write) -> None:
    path = config(SHAPE + ENVIRONMENT + "[[eval]]\nproblems = 9\n")
    loaded = load_run(path, RLConfig, ["--eval.0.every_steps=7", "--eval.1.samples=4", "--eval.1.temperature=0.5"])
    assert [(one.every_steps, one.problems, one.sampled.name) for one in loaded.eval] == [
        (7, 9, "greedy_pass@1"),
        (20, 200, "sampling_pass@4"),
    ]
    assert load_run(path, RLConfig, ["--eval=[]"]).eval == ()


def test_a_run_is_named_after_its_file_unless_it_has_a_name(config: Write) -> None:
    path = config(SHAPE + DATA)
    assert load_run(path, PretrainConfig).run.name == "tiny_sort"
    assert load_run(path, PretrainConfig, ["--run.name=a-b.2"]).run.name == "a-b.2"
    assert load(path, PretrainConfig).run.name == "run"


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "-x", "a\n"])
def test_a_name_is_one_directory(config: Write, name: str) -> None:
    (line,) = refusals(config(SHAPE + DATA), PretrainConfig, f"--run.name={name}")
    assert "is a directory's name" in line


def test_a_path_without_characters_is_refused_in_plain_words(config: Write) -> None:
    overrides = ["--run.directory=", "--data.documents=''"]
    expected = [f"{override}: must not be empty" for override in overrides]
    assert refusals(config(SHAPE + DATA), PretrainConfig, *overrides) == expected


def test_each_verb_requires_its_own_table(config: Write) -> None:
    path = config(SHAPE)
    assert load_run(path, RunConfig).run.steps == 100
    assert refusals(path, RLConfig) == [" [environment]: required table is missing; it needs env_id, task_pool"]
    assert refusals(path, PretrainConfig) == [" [data]: required table is missing"]


# Of each command a table or a key that another has, which it would not look at.
NOT_ITS_OWN = {
    "pretrain": ("--critic.gamma=0.5", "--records.path=r", "--eval.0.split=eval", "--batch.group_size=4"),
    "sft": ("--critic.gamma=0.5", "--preference.beta=1", "--algorithm.loss=gspo", "--sampling.top_p=0.9"),
    "dpo": (
        "--reward_model.margin=1",
        "--records.share_prefixes=true",
        "--sampling.top_k=9",
        "--monitor.replay_sample_rate=0",
    ),
    "reward": (
        "--preference.beta=1",
        "--engine.cache_mb=9",
        "--records.share_prefixes=true",
        "--distillation.teacher=t",
    ),
    "verifier": ("--records.path=r", "--critic.gamma=0.5", "--environment.env_id=e", "--eval.0.environment.env_id=e"),
    "rl train": ("--data.documents=d", "--records.path=r", "--preference.beta=1", "--selfplay.rounds=2"),
    "selfplay": (
        *("--algorithm.multi_reward=gdpo", "--algorithm.mask_truncated=true", "--algorithm.kl_coef=0.1"),
        *("--algorithm.step_reward_coef=0", "--batch.updates_per_step=4", "--batch.passes_per_step=2"),
        *(
            "--batch.solve_rate=[0.1, 0.9]",
            "--batch.oversampling=2",
            "--batch.max_refills=0",
            "--distillation.teacher=t",
        ),
        *("--critic.gamma=0.5", "--lora.rank=4", "--eval.0.every_steps=2", "--monitor.replays_per_failure=2"),
    ),
}


@pytest.mark.parametrize(("command", "override"), [(c, o) for c, overrides in NOT_ITS_OWN.items() for o in overrides])
def test_what_a_command_does_not_read_is_refused(command: str, override: str, config: Write) -> None:
    (problem,) = (p for p in refusals(config(SHAPE), COMMANDS[command], override) if "--" in p)
    assert ": unknown key" in problem


def test_a_file_of_another_kind_is_answered_in_one_line(tmp_path: Path) -> None:
    environment, run, sft, mixed = (tmp_path / f"{name}.toml" for name in ("env", "rl", "sft", "mixed"))
    environment.write_text('env_id = "e"\nversion = "1"\n[task_pool]\ntype = "generated"\ntask_type = "sort"\n')
    run.write_text(
        '[run]\nsteps = 1\n[model]\npath = "m"\n[environment]\npath = "env.toml"\n[sampling]\n[batch]\ngroup_size = 2\n'
    )
    sft.write_text('[run]\nsteps = 1\n[model]\npath = "m"\n[records]\npath = "r.jsonl"\n')
    mixed.write_text('[run]\nsteps = 1\n[model]\npath = "m"\n[environment]\npath = "rl.toml"\n')

    def said(load: Callable[[], object]) -> str:
        with pytest.raises(ConfigError) as caught:
            load()
        return str(caught.value)

    an_environment = (
        f'{environment}: is an environment, not a configuration of `nmoe rl train`; name it by [environment] path = "'
    )
    for overrides in ([], ["--model.path=m", "--run.steps=2"]):
        assert said(lambda: load_run(environment, RLConfig, overrides)) == f'{an_environment}{environment}"'  # noqa: B023
    assert said(lambda: load_environment(run)) == (
        f"{run}: is a configuration of `nmoe rl train`, not an environment; its environment is env.toml"
    )
    assert said(lambda: load_run(run, SFTConfig)) == (
        f"{run}: is a configuration of `nmoe rl train`, not a configuration of `nmoe sft`"
    )
    assert said(lambda: load_run(sft, RLConfig)) == (
        f"{sft}: is a configuration of `nmoe sft`, not a configuration of `nmoe rl train`"
    )
    assert said(lambda: load_run(mixed, RLConfig)) == (
        f"{run}: is a configuration of `nmoe rl train`, not an environment; its environment is env.toml (named at {mixed}:6)"
    )
    assert said(lambda: load_preparation(sft)).startswith(
        f"{sft}: is a configuration of `nmoe sft`, not a configuration of"
    )
    # One table too many, or an override that brings the required one, leaves a file what it is.
    assert load_run(sft, DPOConfig).records.path == "r.jsonl"
    assert len(refusals(run, SFTConfig, "--records.path=r.jsonl")) == 3


def test_a_resolved_configuration_holds_what_applies(config: Write) -> None:
    loaded = load_run(config(SHAPE + DATA), PretrainConfig)
    tables = tomllib.loads(to_toml(loaded))
    assert tables.keys() == {
        "run",
        "model",
        "batch",
        "optimizer",
        "monitor",
        "checkpoint",
        "parallel",
        "sinks",
        "eval",
        "data",
    }
    assert tables["batch"] == {"tokens_per_microbatch": 16384}
    assert tables["eval"] == []


def test_a_model_is_a_checkpoint_or_a_shape(config: Write) -> None:
    assert refusals(config(SHAPE.replace('tokenizer = "tok"', 'path = "p"')), RunConfig) == [
        '5: [model] path = "p": a checkpoint has its own shape; give either path or [model.shape]'
    ]
    assert refusals(config(SHAPE.replace('tokenizer = "tok"', "")), RunConfig) == [
        "4: [model] tokenizer: a new model needs the directory of a tokenizer"
    ]
    assert refusals(config("[run]\nsteps = 1\n[model]\n"), RunConfig) == [
        "3: [model]: needs either path (a checkpoint) or [model.shape] (a new model)"
    ]
    assert load_run(config('[run]\nsteps = 1\n[model]\npath = "p"\n'), RunConfig).model.path == "p"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--model.shape.kv_heads=3"], ["--model.shape.kv_heads=3: must divide heads = 4"]),
        (["--model.shape.head_dim=15"], ["--model.shape.head_dim=15: must be even"]),
        (
            ["--model.shape.intermediate_size=0"],
            ["--model.shape.intermediate_size=0: a dense model (experts = 0) needs the width of its FFN"],
        ),
        (
            ["--model.shape.experts=4", "--model.shape.experts_per_token=5"],
            [
                "6: [model.shape] expert_width: a mixture-of-experts model needs the width of an expert",
                "--model.shape.experts_per_token=5: must be between 1 and experts = 4",
            ],
        ),
        (["--model.shape.experts=4", "--model.shape.experts_per_token=4", "--model.shape.expert_width=8"], []),
        (
            ["--batch.tokens_per_microbatch=511"],
            ["--batch.tokens_per_microbatch=511: a sequence of model.shape.context_tokens = 512 does not fit"],
        ),
        (["--batch.tokens_per_microbatch=512"], []),
        (
            ["--model.expert_profile=fp8"],
            ["--model.expert_profile=fp8: fp8 is for routed experts, and shape.experts = 0: leave it out"],
        ),
        (
            ["--model.expert_profile=nvfp"],
            ['--model.expert_profile=nvfp: must be one of "bf16", "fp8", "nvfp4"; did you mean \'nvfp4\'?'],
        ),
        (
            ["--sampling.max_new_tokens=512"],
            ["--sampling.max_new_tokens=512: leaves no room for a prompt in model.shape.context_tokens = 512"],
        ),
        (["--sampling.max_new_tokens=511"], []),
        (["--run.threads=1024", "--run.steps=1000000000", "--batch.group_size=65536"], []),
        (
            ["--model.shape.hidden_size=2147483647", "--model.shape.head_dim=2147483646"],
            [
                "--model.shape.hidden_size=2147483647: makes with heads x head_dim a matrix of 18,446,744,047,939,747,848 numbers, "
                "which no machine holds"
            ],
        ),
        (["--run.threads=1025"], ["--run.threads=1025: must be at most 1024"]),
        (["--run.steps=1000000001"], ["--run.steps=1000000001: must be at most 1000000000"]),
        (["--checkpoint.keep=1000000000001"], ["--checkpoint.keep=1000000000001: must be at most 1,000,000,000,000"]),
        (
            ["--batch.group_size=65537"],
            [
                "--batch.group_size=65537: prompts_per_step x group_size = 1,048,592 samples of a step; at most 1,048,576"
            ],
        ),
        (
            ["--batch.prompts_per_step=200000"],
            [
                "--batch.prompts_per_step=200000: prompts_per_step x group_size = 1,600,000 samples of a step; at most 1,048,576"
            ],
        ),
        (
            ["--sampling.temperature=0"],
            ["--sampling.temperature=0: at 0 all completions of a group are equal, so nothing is learned"],
        ),
        (["--eval.0.every_steps=5"], []),
        (
            ["--eval.0.every_steps=5", "--environment.task_pool.split=all"],
            [
                "--eval.0.every_steps=5: the training problems have no eval split; name another environment in eval.environment, "
                "or train on a part of them (`train[200:]`) and name one with the rest (`train[:200]`)"
            ],
        ),
        (
            ["--batch.group_size=1"],
            ['--batch.group_size=1: must be at least 2: advantage = "dr_grpo" compares within a group'],
        ),
        (["--batch.group_size=1", "--algorithm.advantage=reinforce_pp"], []),
        (["--batch.group_size=1", "--algorithm.advantage=gae", "--critic.shared=true"], []),
        (
            ["--algorithm.advantage=gae"],
            ["--algorithm.advantage=gae: gae needs a critic; add a [critic] table"],
        ),
        (
            ["--critic.shared=true"],
            [' [critic]: advantage = "dr_grpo" uses no critic; set algorithm.advantage = "gae"'],
        ),
        (
            ["--algorithm.advantage=gae", "--critic.gamma=1"],
            [" [critic]: a separate critic starts from a checkpoint; name it in critic.path, or set shared"],
        ),
        (
            ["--algorithm.advantage=gae", "--critic.path=c", "--critic.warmup_steps=10", "--run.steps=10"],
            ["--critic.warmup_steps=10: leaves no step for the policy (run.steps = 10)"],
        ),
        (
            ["--algorithm.advantage=gae", "--critic.path=c", "--critic.shared=true", "--critic.warmup_steps=1"],
            [
                "--critic.path=c: a shared critic is a head on the policy's trunk and has no separate checkpoint",
                "--critic.warmup_steps=1: training a shared critic changes the policy; only a separate critic has a warm-up",
            ],
        ),
        (
            ["--algorithm.loss=gspo", "--algorithm.aggregation=token"],
            [
                "--algorithm.aggregation=token: gspo has one ratio per sequence, so long sequences would count more; "
                'set algorithm.aggregation = "sequence"'
            ],
        ),
        (["--algorithm.loss=gspo", "--algorithm.aggregation=sequence"], []),
        (["--distillation.teacher=t", "--batch.group_size=1"], []),
        (
            ["--distillation.teacher=t", "--distillation.reward_coef=0.5", "--batch.group_size=1"],
            ['--batch.group_size=1: must be at least 2: advantage = "dr_grpo" compares within a group'],
        ),
        (
            ["--distillation.teacher=t", "--algorithm.advantage=gae", "--critic.shared=true"],
            [" [critic]: distillation.reward_coef is 0, so there are no rewards for a critic to predict"],
        ),
        (
            ["--distillation.teacher=t", "--algorithm.kl_coef=0.1", "--algorithm.kl_in=reward"],
            ["--algorithm.kl_in=reward: distillation.reward_coef is 0, so rewards do not count"],
        ),
        (
            ["--algorithm.loss=cispo", "--algorithm.clip_low=0.1"],
            ["--algorithm.clip_low=0.1: cispo has no lower bound"],
        ),
        (
            ["--algorithm.dual_clip_bound=2"],
            ['--algorithm.dual_clip_bound=2: is for loss = "dual_clip", and loss is "clip"'],
        ),
        (
            ["--algorithm.loss=dppo", "--algorithm.correction=tis"],
            [
                "--algorithm.correction=tis: the ratio of dppo is already to the sampler; a correction would count it twice"
            ],
        ),
        (
            ["--algorithm.correction=mask", "--algorithm.correction_cap=3", "--algorithm.correction_window=[1.5, 2]"],
            [
                '--algorithm.correction_cap=3: correction = "mask" caps nothing',
                "--algorithm.correction_window=[1.5, 2]: must be two ratios around 1, such as [0.5, 2.0]",
            ],
        ),
        (
            ["--algorithm.correction=tis", "--algorithm.correction_window=[0.5, 2.0]"],
            ['--algorithm.correction_window=[0.5, 2.0]: correction = "tis" has no window'],
        ),
        (
            ["--algorithm.multi_reward=gdpo"],
            [
                '--algorithm.multi_reward=gdpo: gdpo normalises as advantage = "grpo" does, and not as "dr_grpo"',
            ],
        ),
        (
            ["--algorithm.advantage=maxrl", "--algorithm.overlong_buffer=8"],
            [
                "--algorithm.overlong_buffer=8: maxrl divides by the mean reward, which may not become negative",
            ],
        ),
        (
            ["--algorithm.kl_in=reward", "--algorithm.reference_every_steps=5"],
            [
                "--algorithm.kl_in=reward: needs kl_coef above 0",
                "--algorithm.reference_every_steps=5: needs kl_coef above 0",
            ],
        ),
        (
            ["--algorithm.overlong_buffer=257"],
            ["--algorithm.overlong_buffer=257: is more than sampling.max_new_tokens = 256"],
        ),
        (
            ["--batch.solve_rate=[0.9, 0.1]"],
            [
                "--batch.solve_rate=[0.9, 0.1]: must be two rates between 0 and 1, the lower one first, such as [0.1, 0.9]"
            ],
        ),
        (
            ["--batch.group_size=1", "--algorithm.advantage=reinforce_pp", "--batch.solve_rate=[0.1, 0.9]"],
            ["--batch.solve_rate=[0.1, 0.9]: a group of one has a rate of 0 or 1, so no group would be trained on"],
        ),
        (
            ["--batch.updates_per_step=17"],
            ["--batch.updates_per_step=17: an update takes whole groups, and a step has prompts_per_step = 16 of them"],
        ),
        (
            ["--algorithm.loss=dual_clip", "--algorithm.dual_clip_bound=1.0"],
            ["--algorithm.dual_clip_bound=1.0: must be more than 1"],
        ),
        (["--algorithm.clip_low=1"], ["--algorithm.clip_low=1: must be less than 1"]),
        (["--sampling.top_p=0"], ["--sampling.top_p=0: must be more than 0"]),
        (["--run.steps=0"], ["--run.steps=0: must be more than 0, unless run.episodes is given"]),
        (["--optimizer.warmup_steps=10", "--run.steps=1"], []),
        (["--run.seed=-1"], ["--run.seed=-1: must be at least 0"]),
    ],
)
def test_impossible_combinations_and_values(config: Write, overrides: list[str], expected: list[str]) -> None:
    path = config(SHAPE + ENVIRONMENT)
    if expected:
        assert refusals(path, RLConfig, *overrides) == expected
    else:
        load_run(path, RLConfig, overrides)


@pytest.mark.parametrize(
    ("schema", "more", "rate"),
    [
        (RLConfig, [], 1e-6),
        (RLConfig, ["--optimizer.learning_rate=3e-6", "--lora.rank=8"], 3e-6),
        (RLConfig, ["--lora.rank=8"], 1e-5),
        (SFTConfig, ["--records.path=x.jsonl"], 1e-5),
        (SFTConfig, ["--records.path=x.jsonl", "--lora.rank=8"], 1e-4),
        (DPOConfig, ["--records.path=x.jsonl"], 1e-6),
        (RewardConfig, ["--records.path=x.jsonl"], 1e-5),
        (PretrainConfig, ["--data.documents=x.jsonl"], 3e-4),
    ],
)
def test_the_learning_rate_is_the_commands_where_none_is_given(
    config: Write, schema: type[RunConfig], more: list[str], rate: float
) -> None:
    text = '[run]\nsteps = 10\n[model]\npath = "checkpoint"\n' + (ENVIRONMENT if schema is RLConfig else "")
    loaded = load_run(config(text), schema, more)
    assert loaded.optimizer.learning_rate == pytest.approx(rate)


def test_pretraining_evaluates_on_held_out_documents(config: Write) -> None:
    path = config(SHAPE + DATA)
    assert refusals(path, PretrainConfig, "--eval.0.every_steps=5") == [
        "--eval.0.every_steps=5: nothing to evaluate on; set data.held_out_documents"
    ]
    overrides = ["--eval.0.every_steps=5", "--data.held_out_documents=10"]
    assert load_run(path, PretrainConfig, overrides).data.held_out_documents == 10


def test_a_conflict_in_one_section_hides_no_errors_of_others(config: Write) -> None:
    path = config(SHAPE + '[environment]\npath = "nope.toml"\n')
    lines = refusals(path, RLConfig, "--model.shape.heads=3", "--batch.group_size=x", "--eval.0.every_steps=1")
    assert lines == [
        "10: [model.shape] kv_heads = 2: must divide heads = 3",
        f"{path.parent}/nope.toml: no such file (named at {path}:15)",
        "--batch.group_size=x: expected an integer, got a string",
    ]


VALUES = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["hf", "mixture", "generated", "sort.toml"]),
    lambda items: (
        st.lists(items, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "path", "name", "sources", "stages", "gate", "x"]), items, max_size=3
        )
    ),
    max_leaves=5,
)
OVERRIDES = st.lists(st.tuples(st.sampled_from(sorted({*paths_of(RLConfig)})), VALUES), min_size=1, max_size=4)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OVERRIDES)
def test_any_values_anywhere_are_accepted_or_reported(
    config: Write, overrides: list[tuple[tuple[str, ...], object]]
) -> None:
    path = config(SHAPE + ENVIRONMENT)
    texts = [f"--{'.'.join(key)}={toml_value(value)}" for key, value in overrides]
    accepted, problems = None, []
    try:
        accepted = load_run(path, RLConfig, texts)
    except ConfigError as error:
        problems = error.problems
    if accepted is None:
        assert problems
    else:
        assert parse(tomllib.loads(to_toml(accepted)), RLConfig, Locator(Place("resolved"))) == accepted


def test_every_key_is_documented() -> None:
    def undocumented(section: type[Section]) -> Iterator[str]:
        for key, known in section.model_fields.items():
            if key != "type" and not description_of(section, key):
                yield f"{section.__name__}.{key}"
            for below in (*sections_of(known.annotation), *sections_of(item_of(known.annotation, 0))):
                yield from undocumented(below)

    for schema in (*COMMANDS.values(), PreparationSettings):
        assert list(undocumented(schema)) == []


def test_arithmetic_of_a_post_training_run(config: Write) -> None:
    overrides = ["--batch.prompts_per_step=10", "--batch.group_size=6", "--sampling.max_new_tokens=100"]
    overrides += ["--batch.tokens_per_microbatch=1050", "--eval.0.every_steps=30", "--batch.max_refills=2"]
    assert batch_arithmetic(load_run(config(SHAPE + ENVIRONMENT), RLConfig, overrides)) == [
        "step: 10 prompts x 6 completions = 60 samples of at most 100 tokens = at most 6,000 sampled tokens",
        "refills: at most 2 a step = at most 180 samples drawn",
        "micro-batches: 1,050 tokens each = at most 6 a step, prompts not counted",
        "run: 100 optimizer steps = 6,000 samples = at most 600,000 sampled tokens",
        "evaluation: before step 1, every 30 steps, at the end = 5 times 200 problems",
        "checkpoints: every 50 steps, the newest 2 kept",
    ]


def test_arithmetic_of_several_updates_with_a_critic(config: Write) -> None:
    overrides = ["--batch.prompts_per_step=10", "--batch.group_size=6", "--sampling.max_new_tokens=100"]
    overrides += ["--batch.oversampling=1.25", "--batch.updates_per_step=5", "--batch.passes_per_step=2"]
    overrides += ["--algorithm.advantage=gae", "--critic.path=c", "--critic.warmup_steps=7"]
    lines = batch_arithmetic(load_run(config(SHAPE + ENVIRONMENT), RLConfig, overrides))
    assert lines[1] == "refills: at most 1 a step = at most 156 samples drawn"
    assert lines[3:6] == [
        "updates: 5 of a pass x 2 passes = at most 10 optimizer steps a step = 1,000 in all",
        "run: 100 steps = 6,000 samples = at most 600,000 sampled tokens",
        "critic: trained alone for the first 7 steps",
    ]


def test_arithmetic_of_a_pretraining_run(config: Write) -> None:
    overrides = ["--batch.tokens_per_microbatch=2048", "--eval.0.every_steps=25", "--data.held_out_documents=64"]
    overrides += ["--data.tokens_per_step=5000"]
    assert batch_arithmetic(load_run(config(SHAPE + DATA), PretrainConfig, overrides)) == [
        "step: at most 5,000 tokens in micro-batches of at most 2,048",
        "run: 100 optimizer steps = at most 500,000 tokens",
        "evaluation: before step 1, every 25 steps, at the end = 5 times 64 documents",
        "checkpoints: every 50 steps, the newest 2 kept",
    ]
    assert "evaluation: none during the run" in batch_arithmetic(load_run(config(SHAPE + DATA), PretrainConfig))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("precision=bfloat16", "exact is for float32, and precision is bfloat16"),
        ("compile=true", "exact fixes the order of sums"),
    ],
)
def test_exact_numerics_go_with_nothing_that_rounds_otherwise(config: Write, keys: str, message: str) -> None:
    path = config(SHAPE + DATA)
    assert load_run(path, PretrainConfig, ["--model.numerics=exact"]).model.precision is None
    (refusal,) = refusals(path, PretrainConfig, "--model.numerics=exact", f"--model.{keys}")
    assert "model.numerics" in refusal
    assert message in refusal


def test_an_adapter_has_a_base_and_one_source_of_its_settings(config: Write) -> None:
    assert refusals(config(SHAPE + ENVIRONMENT), RLConfig, "--lora.rank=8")[0].endswith(
        "an adapter needs a base; name its checkpoint in model.path"
    )
    path = config('[run]\nsteps = 1\n[model]\npath = "base"\n' + ENVIRONMENT + "[lora]\n")
    for overrides, problems in {
        ("--lora.path=adapter", "--lora.rank=4", "--lora.rslora=true"): ["the adapter in lora.path has its own"] * 2,
        ('--lora.targets=["o_proj", "q_projj"]',): ["did you mean 'q_proj'?"],
        ("--lora.rank=0",): ["must be more than 0"],
        ("--lora.alpha=-1",): ["must be more than 0"],
    }.items():
        found = refusals(path, RLConfig, *overrides)
        assert [message[-len(end) :] for message, end in zip(found, problems, strict=True)] == problems
    lora = load_run(path, RLConfig, ['--lora.targets=["q_proj", "experts.down_proj"]']).lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.rslora, lora.targets) == (32, None, False, ("q_proj", "experts.down_proj"))
    assert load_run(config(SHAPE + ENVIRONMENT), RLConfig).lora is None


def test_a_longer_context_is_for_a_checkpoint_whose_weights_are_all_trained(config: Write) -> None:
    longer = "--model.context_tokens=4096"
    assert refusals(config(SHAPE + ENVIRONMENT), RLConfig, longer)[0].endswith(
        "is for a checkpoint; a new model's context is model.shape.context_tokens"
    )
    base = '[run]\nsteps = 1\n[model]\npath = "base"\n' + ENVIRONMENT
    assert load_run(config(base), RLConfig, [longer]).model.context_tokens == 4096
    assert "an adapter does not record it" in refusals(config(base + "[lora]\n"), RLConfig, longer)[0]


def test_a_device_is_named_as_torch_names_it(config: Write) -> None:
    path = config(SHAPE + DATA)
    for name in ("auto", "cpu", "cuda", "cuda:1"):
        assert load_run(path, PretrainConfig, [f"--model.device={name}"]).model.device == name
    (refusal,) = refusals(path, PretrainConfig, "--model.device=gpu")
    assert "model.device" in refusal
    assert "is no device: auto, cpu, cuda or, of several, cuda:1; did you mean 'cuda'?" in refusal


@pytest.mark.parametrize(
    ("loss", "bounds"),
    [
        ("clip", (0.1, 0.1)),
        ("dual_clip", (0.1, 0.1)),
        ("gspo", (3e-4, 4e-4)),
        ("cispo", (None, 4.0)),
        ("dppo", (0.2, 0.2)),
        ("module:own", (0.1, 0.1)),
    ],
)
def test_each_loss_has_its_clip_range(loss: str, bounds: tuple[float | None, float]) -> None:
    settings = {"loss": loss, "aggregation": "sequence" if loss == "gspo" else "constant"}
    assert PolicyLossSection.model_validate(settings).clip_range == bounds
    assert PolicyLossSection.model_validate({**settings, "clip_high": 0.3}).clip_range == (bounds[0], 0.3)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_record_of_a_packaged_run_is_read_back(path: Path, tmp_path: Path) -> None:
    config = load_run(path, schema := COMMANDS[command_for(path)])
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml", schema) == config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_packaged_run_with_a_measured_curve_names_its_clip_range(path: Path) -> None:
    """The documented figures come from these ranges, not from the default. The others have no figure yet."""
    table = tomllib.loads(path.read_text())
    if "environment" in table and path.stem not in ("qwen3_0.6b", "smollm2_135m", "speedrun_gpu_rl"):
        assert {"clip_low", "clip_high"} <= table["algorithm"].keys()
