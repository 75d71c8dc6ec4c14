"""Parts that installed packages offer, used through TOML by their names; and the example in each public docstring."""

from __future__ import annotations

import doctest
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nmoe
from nmoe.config import registry
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.errors import UserError

MODULE = '''
"""Parts of a package."""

import nmoe

CALLED = set()


class Shout(nmoe.Task):
    def prompt(self, record):
        return f"Shout {record['word']}."

    def grade(self, record, answer):
        return answer == record["word"].upper()


def words():
    CALLED.add("pool")
    return [{"word": "moe"}, {"word": "expert"}]


def lookup(word: str) -> str:
    """Looks a word up."""
    return word


def length(completions, **columns):
    CALLED.add("reward")
    return [float(number) for number in range(len(completions))]


def centred(rewards_B, group_ids_B):
    CALLED.add("advantage")
    return rewards_B - rewards_B.mean()


def reinforce(algorithm):
    def objective(outputs, scored):
        CALLED.add(f"loss, aggregation {algorithm.aggregation}")
        return -(scored.weights_N * scored.advantages_N * outputs.logprobs_N).sum(), {}

    return objective
'''
OFFERS = """
[nmoe.tasks]
shout = shouting:Shout
[nmoe.pools]
words = shouting:words
[nmoe.tools]
lookup = shouting:lookup
[nmoe.rewards]
length = shouting:length
[nmoe.advantages]
centred = shouting:centred
[nmoe.losses]
plain = shouting:reinforce
"""
RUN = """
[run]
name = "shout"
steps = 1
threads = 1

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
env_id = "shout"
format = "harmony"
task = "shout"
[environment.task_pool]
type = "python"
call = "words"
[environment.tools]
use = ["lookup"]
[[environment.rewards]]
type = "function"
name = "length"
call = "length"

[algorithm]
advantage = "centred"
loss = "plain"

[sampling]
max_new_tokens = 4
[batch]
prompts_per_step = 2
group_size = 2
"""

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package: its name, its module's text, its entry points."""
    tables = [table for table in vars(registry).values() if isinstance(table, registry.Registry)]

    def forget() -> None:
        for table in tables:
            table.__dict__.pop("_offered", None)

    def install(name: str, module: str, offers: str) -> None:
        (tmp_path / f"{name}.py").write_text(module)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(offers)
        forget()

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    forget()


def test_parts_of_an_installed_package_are_named_in_toml(install: Install) -> None:
    install("shouting", MODULE, OFFERS)
    Path("run.toml").write_text(RUN)
    run = nmoe.train_rl(config="run.toml")

    import shouting  # type: ignore[import-not-found]

    assert {"pool", "reward", "advantage", "loss, aggregation constant"} == shouting.CALLED
    samples = [json.loads(line) for line in (run.path / "samples/step_000001.jsonl").read_text().splitlines()]
    assert sorted(sample["components"]["length"] for sample in samples) == [0, 1], "of the first group"
    assert {sample["source"] for sample in samples} == {"shout"}
    tokenizer = nmoe.Tokenizer.load(run.checkpoint)
    environment = nmoe.Environment.from_settings(load_run(Path("run.toml"), RLConfig).environment, tokenizer)
    assert "type lookup = (_: {" in tokenizer.decode(environment.prompts.ids(environment.pool.take(1)[0]))


@pytest.mark.parametrize("name", ["countdown", "sort"])
def test_a_name_taken_twice_is_refused_with_both_owners(install: Install, name: str) -> None:
    install("first", MODULE, f"[nmoe.tasks]\n{name} = first:Shout\n")
    if name == "sort":
        with pytest.raises(UserError, match=r"task 'sort' of first 1\.0 has the name of a built-in one"):
            registry.TASKS.names()
        return

    class Other(nmoe.Task):
        pass

    with pytest.raises(UserError, match=r"'countdown' is registered twice: by first 1\.0 and by .*Other"):
        registry.TASKS.register("countdown", Other)
    install("second", MODULE, "[nmoe.tasks]\ncountdown = second:Shout\n")
    with pytest.raises(UserError, match="'countdown' is offered by several packages") as raised:
        registry.TASKS.get("countdown")
    for part in ("first 1.0", "second 1.0", "`first:Shout`", "`second:Shout`"):
        assert part in str(raised.value)


class Values(doctest.OutputChecker):
    """Compares what an expression gives. A statement may print the progress of a run; an exception fails all the same."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model over bytes, after one step."""
    directory = tmp_path_factory.mktemp("checkpoint")
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 512}
    config = {"run.directory": str(directory)}
    return nmoe.train_sft(shape, data=[{"prompt": "2 + 2 =", "completion": " 4"}], config=config).checkpoint


@pytest.mark.parametrize("name", nmoe.__all__)
def test_the_example_of_a_public_name_runs(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Names that the example of a decorator registers are free again for another test.
    registry = importlib.import_module("nmoe.config.registry")
    for table in (registry.REWARDS, registry.TOOLS):
        monkeypatch.setattr(table, "_registered", dict(table._registered))
    text = getattr(nmoe, name).__doc__
    example = doctest.DocTestParser().get_doctest(text, {"checkpoint": checkpoint}, name, None, None)
    assert len(example.examples) >= 2, f"{name} has no example"
    runner = doctest.DocTestRunner(checker=Values())
    said: list[str] = []
    runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)
