"""Runs that sampled beside their training, executed again in one process to the same weights, and what is refused."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from nmoe.cli.command import app
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.config.tables.evaluation import RLEvalSection
from nmoe.config.tables.pools import JsonlPool, ProgramPool
from nmoe.config.tables.rollout import OfferedTool, ToolServerSettings, ToolsSettings
from nmoe.config.toml import to_toml
from nmoe.engine.native.held import OtherTokensError
from nmoe.errors import UserError
from nmoe.recipes.setup import with_offers
from nmoe.rl.explain import Explainer, Finding
from nmoe.rl.launch import train
from nmoe.rl.replay_bundle import ReplayDifferenceError
from nmoe.rl.replay_run import refuse_other_numbers, replay_run
from nmoe.rollout.journal import FILE
from nmoe.runs.ledger import read_lines
from nmoe.text.tokenizer import Tokenizer

# Drawn at random, the model answers to the limit of tokens, so that weights come while it samples.
RUN = """
[run]
name = "run"
directory = "{here}"
steps = 4
threads = 1

[model]
tokenizer = "{here}/tokenizer"
numerics = "exact"

[model.shape]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
experts = 4
experts_per_token = 2
expert_width = 32
context_tokens = 160

[environment]
path = "draw.toml"

[sampling]
max_new_tokens = 64

[batch]
prompts_per_step = 2
group_size = 4

[engine]
kind = "server"
max_sequences = 4

[async]
max_staleness = 3

[optimizer]
learning_rate = 1e-2

[checkpoint]
every_steps = 2
keep = 9
"""
ENVIRONMENT = """
env_id = "draw"

[task_pool]
type = "generated"
task_type = "reverse"
difficulty = [3, 3]

[rubric]
correctness = 0.0

[[rewards]]
name = "low"
type = "function"
call = "low_ids:low"
weight = 1.0
"""
REWARD = """
def low(completion_ids, **columns):
    return [sum(one < 100 for one in ids) / len(ids) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def recorded(forked_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run on a server."""
    here = tmp_path_factory.mktemp("recorded")
    Tokenizer.train(["Reverse: analysis final back same"] * 10, 400).save(here / "tokenizer")
    (here / "run.toml").write_text(RUN.format(here=here))
    (here / "draw.toml").write_text(ENVIRONMENT)
    (here / "low_ids.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(here)
        run = train(load_run(here / "run.toml", RLConfig))
        for _ in range(4):  # which weights a token gets is a matter of time
            if most_versions(run) > 1:
                break
            shutil.rmtree(run)
            run = train(load_run(here / "run.toml", RLConfig))
        yield run


def most_versions(run: Path) -> int:
    """How many weights sampled the sample with the most of them."""
    events = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
    return max(len(spans) for event in events for spans in event.get("spans", {}).values())


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return shutil.copytree(recorded, tmp_path / "run", symlinks=True)


def replayed(run: Path, out: Path | None = None) -> list[str]:
    said: list[str] = []
    replay_run(run, out, said.append, allow_user_code=True)
    return said


def rewrite(file: Path, change: Callable[[str], str]) -> None:
    before = file.read_text()
    file.write_text(change(before))
    assert file.read_text() != before


def test_a_run_on_a_server_is_executed_again_to_the_same_bytes(recorded: Path, tmp_path: Path) -> None:
    assert most_versions(recorded) > 1, "a sample got new weights on its way"
    # documented: nmoe replay RUN --train
    arguments = ["replay", str(recorded), "--train", "--out", str(tmp_path / "again"), "--allow-user-code"]
    said = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert said[1:] == [
        "checkpoint of step 2: the same",
        "checkpoint of step 4: the same",
        "metrics of 4 steps: the same",
        "all the same",
    ]
    # What it leaves is a run of the same weights.
    weights = "checkpoints/step_000004/model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (recorded / weights).read_bytes()
    with pytest.raises(UserError, match="is there already"):
        replayed(recorded, tmp_path / "again")


def test_differences_are_counted_and_named(run: Path) -> None:
    file = run / "checkpoints/step_000002/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    content[-9] ^= 1
    file.write_bytes(content)
    rewrite(run / "metrics.jsonl", lambda text: text.replace('"staleness_max": 0', '"staleness_max": 7', 1))
    said: list[str] = []
    with pytest.raises(ReplayDifferenceError) as error:
        replay_run(run, None, said.append, allow_user_code=True)
    assert said[1:] == [
        f"checkpoint of step 2 differs: model.safetensors: 2 of {len(content):,} bytes",
        "checkpoint of step 4: the same",
        "metrics of 4 steps differs: step 1, staleness_max: 7 in the run, 0 now",
    ]
    assert str(error.value).endswith(
        f"first difference: checkpoint of step 2: model.safetensors: 2 of {len(content):,} bytes (and 1 more)"
    )
    assert error.value.exit_code == 1


def test_a_journal_of_other_samples_is_noticed(run: Path) -> None:
    """It says that a sample was longer than the limit."""
    lines = (run / FILE).read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"arrive"' in line)
    event = json.loads(lines[at])
    event["spans"]["0/0"][-1][1] += 1
    lines[at] = json.dumps(event)
    (run / FILE).write_text("\n".join(lines) + "\n")
    with pytest.raises(OtherTokensError, match="sample 0 has 64 tokens where 65 were recorded") as error:
        replayed(run)
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("config.toml", 'in_flight = "recompute"', 'in_flight = "stale_kv"', 'train with "recompute" or "drain"'),
        ("config.toml", 'kind = "server"', 'kind = "vllm"', 'train with "server"'),
        ("provenance.json", '"exact"', '"exact, but for norms"', "its numerics were exact, but for norms"),
        (FILE, '"ranks": 1', '"ranks": 2', "2 ranks added their gradients up"),
        (FILE, '"event": "train", "step": 2', '"event": "train", "step": 9', "does not say what step 2 trained on"),
    ],
)
def test_runs_that_do_not_repeat_are_refused(run: Path, file: str, old: str, new: str, said: str) -> None:
    rewrite(run / file, lambda text: text.replace(old, new))
    with pytest.raises(UserError, match=said) as error:
        replayed(run)
    assert error.value.exit_code == 2


def test_a_step_without_the_samples_of_its_groups_is_refused(run: Path) -> None:
    event = next(one for one in map(json.loads, (run / FILE).read_text().splitlines()) if one["event"] == "train")
    first = event["positions"][0]

    def without(text: str) -> str:
        return "".join(
            line for line in text.splitlines(True) if f'"arrive", "step": 1, "position": {first}, ' not in line
        )

    rewrite(run / FILE, without)
    with pytest.raises(UserError, match=f"has no samples of position {first}, which step 1 trained on"):
        replayed(run)


def test_a_run_that_others_took_part_in_is_refused(run: Path) -> None:
    config = load_run(run / "config.toml", RLConfig)
    refuse_other_numbers(run, config, allow_user_code=True)
    for pool, said in (
        (
            JsonlPool(type="jsonl", path="records.jsonl", task_type="skyrl_gym"),
            r"environments beside it answered the policy \(task skyrl_gym\)",
        ),
        (
            ProgramPool(type="program", path="records.jsonl", task_type="gsm8k", command=("agent",)),
            "programs asked the policy",
        ),
    ):
        other = config.model_copy(update={"environment": config.environment.model_copy(update={"task_pool": pool})})
        with pytest.raises(UserError, match=said):
            refuse_other_numbers(run, other, allow_user_code=True)


def test_servers_that_only_the_journal_has_the_answers_of_are_refused(run: Path) -> None:
    config = load_run(run / "config.toml", RLConfig)
    offer = OfferedTool(name="add", description="Adds.", parameters='{"type": "object"}')
    server = ToolServerSettings(name="notes", command=["notes"])
    asked, environment = (
        config.environment.model_copy(update={"tools": ToolsSettings(servers=[one])})
        for one in (server, server.model_copy(update={"offers": (offer,)}))
    )
    # As a run stores it.
    with_server = with_offers(config.model_copy(update={"environment": asked}), SimpleNamespace(settings=environment))  # type: ignore[arg-type]
    assert tomllib.loads(to_toml(with_server))["environment"]["tools"]["servers"][0]["offers"] == [offer.model_dump()]
    refuse_other_numbers(run, with_server.model_copy(update={"eval": ()}), allow_user_code=True)
    evaluation = RLEvalSection(every_steps=1)
    elsewhere = evaluation.model_copy(update={"environment": environment})
    in_step = config.asynchrony.model_copy(update={"max_staleness": 0})
    for other in (
        with_server.model_copy(update={"eval": (), "async": in_step}),
        with_server.model_copy(update={"eval": (evaluation,)}),
        config.model_copy(update={"eval": (elsewhere,)}),
    ):
        with pytest.raises(UserError, match=r"tools of servers \(\[\[tools.servers\]\]\) answered the policy"):
            refuse_other_numbers(run, other, allow_user_code=True)


def test_code_of_users_runs_where_it_is_allowed(run: Path) -> None:
    with pytest.raises(UserError, match=r"reward function low_ids:low from .*low_ids\.py.*--allow-user-code"):
        replay_run(run, None, print)


def test_a_run_that_sampled_in_step_has_nothing_to_replay(run: Path) -> None:
    (run / FILE).unlink()
    with pytest.raises(UserError, match=r"there is no journal; only a run with async\.max_staleness above 0"):
        replayed(run)


def test_options_that_do_not_fit_together_are_refused(run: Path) -> None:
    for arguments, said in (
        (["--train", "--checkpoint", "x"], "--checkpoint and --tokenizer are for bundles"),
        (["--out", "x"], "add --train"),
    ):
        outcome = CliRunner().invoke(app, ["replay", str(run), *arguments])
        assert isinstance(outcome.exception, UserError)
        assert said in str(outcome.exception)


def test_tokens_of_older_weights_are_not_compared_with_newer_ones(run: Path) -> None:
    # Which weights sampled a token is a matter of time. Here the second half of each sample of the third step got newer ones.
    file = run / "samples/step_000003.jsonl"
    records = list(read_lines(file))
    for record in records:
        half = len(record["versions"]) // 2
        record["versions"] = [1] * half + [2] * (len(record["versions"]) - half)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    explainer = Explainer(run)

    def sampled_by(step: int) -> list[tuple[int, Finding]]:
        """Each token's version, with the comparison of its log-probability."""
        found = []
        for line, record in enumerate(read_lines(run / f"samples/step_{step:06d}.jsonl")):
            for token, version in enumerate(record["versions"]):
                one = explainer.explain(step, line, token)
                assert [str(other) for other in one if other.recorded is not None] == []
                found += [(version, other) for other in one if other.name == "log-probability"]
        return found

    fresh = sampled_by(1)
    assert len(fresh) > 100
    assert {(version, one.why_not) for version, one in fresh} == {(0, "")}
    # The learner replays the routes before the newer weights.
    assert {(version, one.why_not) for version, one in sampled_by(3)} == {
        (1, "version 1 of the weights sampled it, and the step began with 2"),
        (2, "the learner replayed routes of older weights, which samples/ does not hold"),
    }


def test_a_step_whose_weights_are_gone_is_trained_up_to_by_the_journal(run: Path) -> None:
    kept = Explainer(run, allow_user_code=True).step(3)
    assert kept.weights == str(run / "checkpoints/step_000002")
    shutil.rmtree(run / "checkpoints/step_000002")
    with pytest.raises(UserError, match=r"in the run's beginning, 2 steps before\. Repeat with --replay"):
        Explainer(run, allow_user_code=True).explain(3, 0, 0)
    explainer = Explainer(run, replay=True, allow_user_code=True)
    found = [one for token in range(0, 64, 9) for one in explainer.explain(3, 0, token)]
    assert [str(one) for one in found if one.recorded is not None] == []
    again = explainer.step(3)
    assert again.weights == "weights trained again from the run's beginning"
    assert {name: column.tolist() for name, column in again.columns.items()} == {
        name: column.tolist() for name, column in kept.columns.items()
    }
    assert len(again.columns["logprob"]) > 100


def test_a_replay_for_explaining_asks_what_a_replay_asks(run: Path) -> None:
    with pytest.raises(UserError, match=r"reward function low_ids:low from .*low_ids\.py.*--allow-user-code"):
        Explainer(run, replay=True).explain(4, 0, 0)
    rewrite(run / FILE, lambda text: text.replace('"ranks": 1', '"ranks": 2'))
    with pytest.raises(UserError, match="2 ranks added their gradients up"):
        Explainer(run, replay=True, allow_user_code=True).explain(4, 0, 0)
