"""Self-play as a run: its streams and counts, training on them, bundles that replay, and kills at any moment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import selfplay_by_script
from forked import Forked
from selfplay_by_script import ByScript

from nmoe.config.commands import RunConfig, SelfplayConfig
from nmoe.config.loader import load_run
from nmoe.config.problems import ConfigError
from nmoe.engine.api import Request
from nmoe.engine.remote.server import Served
from nmoe.envs.tasks.proofs import CLOSING, OPENING
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.monitor.monitor import Monitor
from nmoe.monitor.rules import monitor_of
from nmoe.rl.replay_bundle import replay_command
from nmoe.runs.ledger import read_metrics
from nmoe.selfplay import loop
from nmoe.selfplay.loop import Moment, Schedule, selfplay, selfplay_environment
from nmoe.selfplay.training import dealt, evidence, groups
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sample

SCRIPT = Path(__file__).with_name("selfplay_by_script.py")
CONFIG = """
[run]
steps = 4
threads = 1
[model]
path = "{directory}/model"
[selfplay]
problem_source = "deepseek_math_v2_inputs:{directory}/inputs.json"
max_problems = 7
verifications = 4
more_verifications = 2
confirmations = 1
[sampling]
max_new_tokens = 400
[batch]
prompts_per_step = 3
group_size = 2
[optimizer]
learning_rate = 1e-3
[monitor]
replay_sample_rate = 0.1
[checkpoint]
every_steps = 2
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, inputs in their real form, one of them twice, and a configuration."""
    directory = tmp_path_factory.mktemp("selfplay")
    tokenizer = Tokenizer.train([OPENING, CLOSING, "## Solution\n## Self Evaluation\n4+7=11"] * 20, 400)
    model = Transformer(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=16,
            layers=1,
            heads=2,
            kv_heads=1,
            head_dim=8,
            context_tokens=1200,
            intermediate_size=16,
        )
    ).initialize(0)
    (directory / "model").mkdir()
    save_model(model, directory / "model")
    tokenizer.save(directory / "model")
    inputs = [
        {"id": f"x-{n}", "question": f"Sum: 4+{n % 9}", "answer": "secret", "contest": "sums", "problem_idx": str(n)}
        for n in range(10)
    ]
    (directory / "inputs.json").write_text(json.dumps(inputs))
    (directory / "config.toml").write_text(CONFIG.format(directory=directory))
    return directory


def by_script(directory: Path, *arguments: str) -> str:
    done = Forked(directory, SCRIPT, directory, *arguments, main="forked:script").ended()
    assert done.code == 0, done.err
    return done.out


def left(run: Path) -> dict[str, Any]:
    """Everything that a run leaves and that has no time in it."""
    timings = re.compile(r"time_|tokens_per_second")
    rows = [{k: v for k, v in row.items() if not timings.match(k)} for row in read_metrics(run)]
    files = [*run.glob("*_train.jsonl"), run / "counts.json", *run.glob("replay/*/*"), *run.glob("samples/*")]
    last = (run / "checkpoints" / "latest").resolve()
    return {"metrics": rows} | {
        str(file.relative_to(run)): file.read_bytes() for file in [*files, *last.rglob("*")] if file.is_file()
    }


@pytest.mark.parametrize("train", [False, True])
def test_killed_at_any_moment_it_leaves_what_it_leaves_undisturbed(
    directory: Path, tmp_path: Path, train: bool
) -> None:
    for name in ("model", "inputs.json", "config.toml"):
        (tmp_path / name).symlink_to(directory / name)
    overrides = ["--selfplay.train=true", "--selfplay.rounds=2"] if train else []
    said = by_script(tmp_path, "7" if train else "3", "12", *overrides)
    killed = int(said.split("killed ")[1].split()[0])
    assert killed >= 6
    whole, broken = left(tmp_path / "whole"), left(tmp_path / "broken")
    assert whole.keys() == broken.keys()
    for name, content in whole.items():
        assert broken[name] == content, name
    check_streams(tmp_path / "whole", rounds=2 if train else 1)
    if train:
        assert any("verifier_loss" in row for row in whole["metrics"])
        assert any("ppo_kl" in row for row in whole["metrics"])


def check_streams(run: Path, rounds: int) -> None:
    """The streams agree with the counts and with one another."""
    streams = {path.name: list(map(json.loads, path.open())) for path in run.glob("*_train.jsonl")}
    counts = json.loads((run / "counts.json").read_text())
    assert counts["problems"] == {"records": 10, "duplicate": 1, "overlong": 0}
    proofs = 7 * 2 * rounds
    outcomes = counts["outcomes"]
    assert sum(outcomes.values()) == proofs == sum(counts["failures/generator"].values())
    verifier = streams["proof_verifier_train.jsonl"]
    assert len({(line["round"], line["id"]) for line in verifier}) == len(verifier)
    for score in (0.0, 0.5, 1.0):
        assert sum(line["score"] == score for line in verifier) == outcomes.get(f"accepted_{score:g}", 0)
    for line in verifier:
        for analysis in line["analyses"]:
            assert not analysis["evidence"] or analysis["evaluation_score"] == line["score"]
            assert not analysis["evidence"] or analysis["confirmed"] in (True, None)
    meta = streams["proof_meta_verifier_train.jsonl"]
    assert {line["score"] for line in meta} == {0.0, 1.0}  # both labels are kept
    # The majority of its checks decides about a claim if it is certain: what unreadable checks could have said would not change it.
    accepted_with = {(line["round"], line["id"]): line["score"] for line in verifier}
    for line in meta:
        scores = [check["score"] for check in line["checks"]]
        confirmed = True if scores.count(1.0) > len(scores) / 2 else None
        if scores.count(1.0) + scores.count(None) <= len(scores) / 2:
            confirmed = False
        assert line["confirmed"] == confirmed
        # The score of an accepted proof settles it, above all that no claim about a right proof is true.
        of_proof = accepted_with.get((line["round"], line["id"].rpartition("/")[0]))
        if of_proof == 1.0:
            assert (line["settled"], line["score"]) == (True, 0.0)
        else:
            assert confirmed is not None
            assert line["score"] == confirmed
            assert not line["settled"] or (
                of_proof is not None and (line["evaluation_score"] == of_proof or not confirmed)
            )
    assert 0 < sum(len(line["checks"]) for line in meta) < sum(counts["failures/meta_verifier"].values())
    generator = streams["proof_generator_train.jsonl"]
    assert outcomes["no_proof"] < len(generator) <= len(verifier) + outcomes["no_proof"]
    assert not any("secret" in path.read_text() for path in run.glob("*_train.jsonl"))
    # A bundle for the accepted proof and for each verification that carries its score, and a tenth or so of the rest.
    kept = [path.name for path in run.glob("replay/step_*")]
    accepted = [name for name in kept if "-accepted_generator-" in name]
    carrying = [name for name in kept if "-accepted_verifier-" in name]
    assert len(accepted) == len(verifier)
    assert len(carrying) == sum(analysis["evidence"] for line in verifier for analysis in line["analyses"])
    rest = sum(sum(counts[f"failures/{role}"].values()) for role in ("generator", "verifier", "meta_verifier"))
    rest -= len(accepted) + len(carrying)
    assert 0.02 * rest < sum("-sampled-" in name for name in kept) < 0.25 * rest


def test_every_bundle_replays(directory: Path, tmp_path: Path) -> None:
    for name in ("model", "inputs.json", "config.toml"):
        (tmp_path / name).symlink_to(directory / name)
    by_script(tmp_path, "0", "0")
    bundles = list((tmp_path / "whole" / "replay").glob("step_*"))
    assert len(bundles) > 20
    for bundle in bundles:
        assert list(replay_command(bundle, None, None))[-1] == "all the same"
    assert os.listdir(tmp_path / "whole" / "replay").count("tokenizer") == 1


def test_schedule() -> None:
    schedule = Schedule(rounds=2, problems=7, batches=3, updates=2)
    assert schedule.steps == 10
    assert [schedule.at(step) for step in (1, 3, 4, 5, 6, 10)] == [
        Moment(1, False, 0),
        Moment(1, False, 2),
        Moment(1, True, 0),
        Moment(1, True, 1),
        Moment(2, False, 0),
        Moment(2, True, 1),
    ]
    assert schedule.round_steps == 5


def test_examples_are_dealt_out_evenly() -> None:
    hands = dealt(7, 2, 4, "seed", 1)
    assert [len(hand) for hand in hands] == [3, 4, 3, 4]
    places = [place for hand in hands for place in hand]
    assert sorted(places[:7]) == sorted(places[7:]) == list(range(7))
    assert hands == dealt(7, 2, 4, "seed", 1) != dealt(7, 2, 4, "seed", 2)
    assert dealt(0, 2, 3, "seed") == [[], [], []]


def test_what_is_trained_on(directory: Path) -> None:
    def analysis(ids: list[int], carries: bool) -> dict[str, Any]:
        return {
            "token_ids": ids,
            "mask": [1] * len(ids),
            "logprobs": [-1.0] * len(ids),
            "versions": [0] * len(ids),
            "evidence": carries,
            "reward": 1.0,
        }

    line = {"id": "p/0", "round": 1, "score": 0.0, "prompt_ids": [1, 2]}
    line["analyses"] = [analysis([3, 4], True), analysis([3, 4], True), analysis([5], False), analysis([6], True)]
    found = evidence(iter([line, {**line, "round": 2}]), 1)
    assert [trajectory.token_ids for trajectory in found] == [[3, 4]]
    assert found[0].prompt_ids == (1, 2)
    # Of verifications that all differ there is no most repeated one.
    line["analyses"] = [analysis([3, 4], True), analysis([6], True), analysis([5], False)]
    assert [trajectory.token_ids for trajectory in evidence(iter([line]), 1)] == [[3, 4], [6]]
    # Of a verification with a tool only what the verifier sampled is trained on, each turn after what came before it.
    called = analysis([3, 4, 7, 7, 5], True) | {"mask": [1, 1, 0, 0, 1]}
    (trajectory,) = evidence(iter([{**line, "analyses": [called]}]), 1)
    assert [(turn.given_ids, turn.sample.token_ids) for turn in trajectory.turns] == [((), [3, 4]), ((7, 7), [5])]
    assert trajectory.mask == [1, 1, 0, 0, 1]

    config = load_run(directory / "config.toml", SelfplayConfig)

    def proof(group: str, reward: float) -> dict[str, Any]:
        return {
            "round": 1,
            "group": group,
            "prompt_ids": [1],
            **analysis([2, 3], True),
            "reward": reward,
            "score": None,
        }

    lines = [proof("a", 1.0), proof("b", 0.5), proof("a", 0.24), proof("b", 0.5), proof("c", 1.0)]
    (group,) = groups(iter(lines), 1, config)
    assert [trajectory.grade.score for trajectory in group.samples] == [1.0, 0.24]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--selfplay.confirmations=5"], "are more than the verifications = 4"),
        (["--selfplay.rounds=2"], "only differ if training happens between them"),
        (["--sampling.temperature=0"], "at 0 all verifications of a proof are equal"),
        (["--selfplay.train=true", "--sampling.top_k=5"], "training needs the full distribution"),
        (["--selfplay.train=true", "--selfplay.rounds=3"], "must be a multiple of selfplay.rounds = 3"),
        (["--selfplay.train=true", "--batch.group_size=1"], "at least 2"),
        (["--selfplay.train=true", "--selfplay.generator_steps=5"], "are more than the steps of a round"),
        (["--environment.path=sums"], 'must be "selfplay": problems without answers'),
        (["--selfplay.train=true", "--algorithm.overlong_buffer=999"], "is more than sampling.max_new_tokens"),
        (["--algorithm.multi_reward=gdpo"], "unknown key"),
        (["--selfplay.max_problem=4"], "max_problems"),
    ],
)
def test_settings_that_can_not_work(directory: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(directory / "config.toml", SelfplayConfig, overrides)
    assert message in str(error.value)


OWN = """
env_id = "own"
format = "harmony"
system = "Use the tool."
[task_pool]
type = "selfplay"
source = "deepseek_math_v2_inputs:{directory}/inputs.json"
[tools]
use = ["bash"]
"""


def test_an_environment_of_ones_own_gives_problems_tools_and_words(directory: Path, tmp_path: Path) -> None:
    """The run's environment is that of all roles; [selfplay] may name other problems."""
    path = tmp_path / "own.toml"
    path.write_text(OWN.format(directory=directory))
    text = (directory / "config.toml").read_text()
    config_path = tmp_path / "config.toml"
    without = "\n".join(line for line in text.splitlines() if not line.startswith("problem_source"))
    config_path.write_text(without)
    with pytest.raises(ConfigError, match="is required, or an"):
        load_run(config_path, SelfplayConfig)
    config = load_run(config_path, SelfplayConfig, [f"--environment.path={path}", "--run.seed=3"])
    settings = selfplay_environment(config)
    assert (settings.env_id, settings.system, settings.task_pool.seed) == ("own", "Use the tool.", 3)
    assert settings.tools is not None
    assert settings.tools.use == ("bash",)
    other = load_run(
        config_path, SelfplayConfig, [f"--environment.path={path}", "--selfplay.problem_source=jsonl:other.jsonl"]
    )
    assert getattr(selfplay_environment(other).task_pool, "source", None) == "jsonl:other.jsonl"
    path.write_text(OWN.format(directory=directory) + "[rubric]\nformat = 1.0\n")
    with pytest.raises(ConfigError, match="self-play has its own rewards"):
        load_run(config_path, SelfplayConfig, [f"--environment.path={path}"])


def test_from_a_fresh_model(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows the form yet, so that nothing is a proof; the run is whole all the same, and its experts are watched."""
    watched: list[int] = []

    def monitored(config: RunConfig, experts: int, directory: Path) -> Monitor:
        watched.append(experts)
        return monitor_of(config, experts, directory)

    monkeypatch.setattr("nmoe.recipes.run_loop.monitor_of", monitored)
    text = (
        (directory / "config.toml")
        .read_text()
        .replace(f'path = "{directory}/model"', f'tokenizer = "{directory}/model"')
    )
    shape = (
        "[model.shape]\nhidden_size = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nhead_dim = 8\nintermediate_size = 16\n"
        "context_tokens = 1200\nexperts = 4\nexperts_per_token = 2\nexpert_width = 8\n"
    )
    (tmp_path / "config.toml").write_text(text + shape)
    overrides = {
        "run.directory": tmp_path,
        "selfplay.max_problems": 2,
        "selfplay.train": "true",
        "sampling.max_new_tokens": 8,
        "run.steps": 2,
        "batch.tokens_per_microbatch": 2048,
    }
    config = load_run(
        tmp_path / "config.toml", SelfplayConfig, [f"--{key}={value}" for key, value in overrides.items()]
    )
    run = selfplay(config)
    assert watched == [4]
    assert json.loads((run / "counts.json").read_text())["outcomes"] == {"no_proof": 4}
    assert (run / "checkpoints/latest/generator/model.safetensors").exists()


def test_a_meta_verifier_on_servers_judges_as_the_one_of_this_process(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers answer by the script of this process's engines."""
    asked: dict[str, list[str]] = {"here": [], "servers": []}

    class Here(ByScript):
        where = "here"

        def reply(self, request: Request, index: int) -> Sample:
            asked[self.where].append(selfplay_by_script.TOKENIZER.decode(request.prompt_ids))
            return super().reply(request, index)

    class Servers(Here):
        where = "servers"

        def served(self) -> list[Served]:
            return [Served("nmoe", "f", 400, 1200, 0, "")]

    @contextmanager
    def served(urls: tuple[str, ...], checkpoint: Path, *_: Any) -> Iterator[Servers]:
        assert (urls, checkpoint) == (("http://a:1",), directory / "model")
        yield Servers(None, 0)

    monkeypatch.setattr(selfplay_by_script, "TOKENIZER", Tokenizer.load(directory / "model"), raising=False)
    monkeypatch.setattr(loop, "NativeEngine", Here)
    monkeypatch.setattr(loop, "served_engine", served)
    whole = []
    for name, urls in (("here", "[]"), ("there", "['http://a:1']")):
        overrides = [f"--run.directory={tmp_path}", f"--run.name={name}", f"--selfplay.meta_verifier_urls={urls}"]
        run = selfplay(load_run(directory / "config.toml", SelfplayConfig, overrides))
        whole.append({file.name: file.read_bytes() for file in [*run.glob("*_train.jsonl"), run / "counts.json"]})
        checks = ["## Evaluation\n" in prompt for prompt in asked["here"]]
        assert any(checks) == (name == "here")
        asked["here"].clear()
    assert whole[0] == whole[1]
    assert asked["servers"]
    assert all("## Evaluation\n" in prompt for prompt in asked["servers"])
