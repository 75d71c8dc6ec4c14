"""A pipeline of a TOML file goes on where it was killed, repeats what has changed, with consent, and is planned without data."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recipes.interrupted_runs import figures, interrupted_at

from nmoe.cli import main
from nmoe.config.loader import load
from nmoe.config.packaged import PIPELINES
from nmoe.config.pipeline import BudgetSection, PipelineSettings
from nmoe.config.problems import ConfigError
from nmoe.errors import UserError
from nmoe.model.config import ModelConfig
from nmoe.plan.budget import Cost, costs, on_meta, training_flops_per_token
from nmoe.plan.estimate import count
from nmoe.runs.ledger import read_metrics
from nmoe.speedrun.planned import Planned
from nmoe.speedrun.speedrun import speedrun
from nmoe.text.tokenizer import Tokenizer

BASE = """
[run]
steps = 4
threads = 1
[model]
[model.shape]
hidden_size = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
intermediate_size = 32
context_tokens = 64
[data]
documents = "HERE/corpus.jsonl"
held_out_documents = 10
tokens_per_step = 256
[[eval]]
every_steps = 2
[checkpoint]
every_steps = 2
keep = 1
"""
RL = """
[run]
steps = 1
threads = 1
[model]
[environment]
path = "sort"
[environment.task_pool]
difficulty = [2, 2]
[sampling]
max_new_tokens = 4
[batch]
prompts_per_step = 2
group_size = 2
"""
PIPELINE = """
directory = "HERE/out"
[data]
"HERE/corpus.jsonl" = "cp elsewhere HERE/corpus.jsonl"
[[stage]]
name = "tokenizer"
texts = ["HERE/corpus.jsonl"]
vocab_size = 300
[[stage]]
name = "base"
config = "HERE/base.toml"
start = "tokenizer"
[[stage]]
name = "rl"
config = "HERE/rl.toml"
start = "base"
[[stage]]
name = "evaluation"
models = ["base", "rl"]
benchmarks = ["sort"]
problems = 4
max_tokens = 4
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rng = random.Random(0)
    digits = ["".join(rng.choices("0123456789", k=3)) for _ in range(60)]
    lines = (json.dumps({"text": f"Sort: {one} gives {''.join(sorted(one))}"}) for one in digits)
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    for name, text in (("base", BASE), ("rl", RL), ("pipeline", PIPELINE)):
        (tmp_path / f"{name}.toml").write_text(text.replace("HERE", str(tmp_path)))
    return tmp_path


def change(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))


@pytest.fixture
def run(place: Path) -> Callable[..., Path]:
    def run(resume: bool = True, replace: bool = False, out: Path | None = None) -> Path:
        pipeline = Planned(str(place / "pipeline.toml"), out, 0, resume, "cpu")
        pipeline.run(replace)
        return place / "out" if out is None else out

    return run


def attempts(out: Path) -> dict[str, int]:
    return {one["name"]: one["attempts"] for one in json.loads((out / "stages.json").read_text())["done"]}


# documented: torchrun --standalone --nproc_per_node=8 -m nmoe speedrun nanochat_d20 --resume
def test_a_killed_pipeline_goes_on_and_ends_with_the_same_numbers_and_a_report(
    run: Callable[..., Path], place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run(resume=False, out=place / "whole")
    with interrupted_at(3):
        run(resume=False)
    assert list(attempts(place / "out")) == ["tokenizer"]
    capfd.readouterr()
    out = run()
    said = capfd.readouterr().out
    assert "== tokenizer: done before" in said
    assert "resumed from step 3" in said
    assert attempts(out) == {"tokenizer": 1, "base": 2, "rl": 1, "evaluation": 1}
    for name in ("base", "rl"):
        assert figures(read_metrics(out / name)) == figures(read_metrics(whole / name))
    summary, other = (json.loads((one / "summary.json").read_text()) for one in (out, whole))
    assert summary["tokenizer: tokens in the vocabulary"] == Tokenizer.load(out / "tokenizer").vocab_size <= 300
    assert summary["base: held-out loss"] == read_metrics(out / "base")[-1]["held_out_loss"]
    same = [name for name in summary if ":" in name]
    assert [summary[name] for name in same] == [other[name] for name in same]
    report = (out / "report.md").read_text()
    assert "# Pipeline pipeline\n" in report
    assert "attempt 2, whose seconds these are" in report
    found = json.loads((out / "evaluation/results.json").read_text())["results"]
    assert [(one["label"], one["benchmark"], one["evaluations"][0]["problems"]) for one in found] == [
        ("base", "sort", 4),
        ("rl", "sort", 4),
    ]
    assert f"| base | {found[0]['evaluations'][0]['value']:.1%} [" in report
    assert "- [rl](rl/report.md)" in report
    with pytest.raises(
        UserError, match=r"holds the pipeline pipeline; go on with nmoe speedrun pipeline --out .*out --resume"
    ):
        speedrun(out=out, resume=True)


def test_stages_whose_settings_changed_are_made_again_with_consent(run: Callable[..., Path], place: Path) -> None:
    out = run(resume=False)
    kept = (out / "base/metrics.jsonl").read_bytes()
    change(place / "base.toml", "keep = 1", "keep = 2")
    change(place / "rl.toml", "max_new_tokens = 4", "max_new_tokens = 5")
    with pytest.raises(
        UserError, match=r"have changed, so that they are made again:\n.*out/rl\n.*out/evaluation\n.*--replace"
    ):
        run()
    assert len(read_metrics(out / "rl")) == 1
    run(replace=True)
    assert (out / "base/metrics.jsonl").read_bytes() == kept, "checkpoints that are kept change no result"
    assert attempts(out) == {"tokenizer": 1, "base": 1, "rl": 1, "evaluation": 1}
    assert "max_new_tokens = 5" in (out / "rl/config.toml").read_text()


def test_data_that_is_missing_is_named_with_its_command_before_anything_runs(
    run: Callable[..., Path], place: Path
) -> None:
    (place / "corpus.jsonl").unlink()
    said = f"missing: {place}/corpus.jsonl (for tokenizer, base): cp elsewhere {place}/corpus.jsonl"
    with pytest.raises(UserError) as refused:
        run(resume=False)
    assert str(refused.value) == said
    assert not (place / "out").exists()
    assert list(Planned(str(place / "pipeline.toml"), None, 0, False, "cpu").dry_run())[-1] == said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('start = "base"', 'start = "bose"', "'bose' is no earlier stage that makes a model or tokenizer"),
        ("vocab_size = 300", 'benchmarks = ["sort"]', "needs one of texts"),
        ('name = "rl"', 'name = "base"', "is used before; names must be unique"),
        ("max_tokens = 4", 'start = "rl"', "is of no stage with benchmarks; leave it out"),
        ('benchmarks = ["sort"]', 'benchmarks = ["sort", "core"]', "core is evaluated alone"),
        ("max_tokens = 4", "max_token = 4", "max_token"),
    ],
)
def test_mistakes_are_named_with_file_and_line(place: Path, before: str, after: str, said: str) -> None:
    change(place / "pipeline.toml", before, after)
    with pytest.raises(ConfigError, match=r"pipeline\.toml:\d+") as refused:
        Planned(str(place / "pipeline.toml"), None, 0, False, "cpu")
    assert said in str(refused.value)


def test_a_stage_with_processes_of_its_own_is_refused(place: Path) -> None:
    with (place / "rl.toml").open("a") as file:
        file.write('[engine]\nkind = "server"\n[placement]\nengines = 1\n')
    with pytest.raises(UserError, match=r"rl\.toml: \[placement\] starts processes"):
        Planned(str(place / "pipeline.toml"), None, 0, False, "cpu")


def test_the_cost_of_a_stage_by_hand() -> None:
    """nanochat's d20, and a mixture of which two of four experts run."""
    planned = Planned("nanochat_d20", None, 0, False, "cpu")
    config = planned._configs["base"]
    assert config.model.shape is not None
    shape = ModelConfig(vocab_size=65_536, **config.model.shape.model_dump())
    model = on_meta(shape)
    assert count(model) == pytest.approx(564e6, rel=0.002)
    assert {parameter.device for parameter in model.parameters()} == {torch.device("meta")}
    # 6 x (20 x (4 x 1280^2 + 3 x 1280 x 3456) + 65536 x 1280) + 12 x 20 x 1280 x 2048, but for the norms.
    assert training_flops_per_token(model) == pytest.approx(2.8823e9 + 0.62915e9, rel=1e-3)
    budget = load(PIPELINES / "nanochat_d20.toml", PipelineSettings).machine
    (base,) = costs("base", config, shape, budget)
    assert (base.steps, base.tokens) == (21_400, 21_400 * 524_288)
    assert base.hours(budget) == pytest.approx(11.22e9 * 3.5117e9 / (8 * 989e12 * 0.45) / 3600, rel=1e-3)
    assert Cost("an hour of the peak", 1, 1, 8 * 989e12 * 3600, 1.0).hours(budget) == 1.0
    assert Cost("none", 1, 1, 1.0, 1.0).hours(BudgetSection()) is None
    experts = {
        "hidden_size": 16,
        "layers": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 16,
        "experts": 4,
        "experts_per_token": 2,
    }
    mixture = on_meta(ModelConfig(vocab_size=300, expert_width=8, context_tokens=32, tie_embeddings=True, **experts))
    active = count(mixture) - 2 * 3 * 16 * 8
    assert training_flops_per_token(mixture) == 6 * active + 12 * 16 * 32


# documented: nmoe speedrun nanochat_d20 --dry-run
# documented: nmoe speedrun nanochat_d32 --dry-run
def test_the_documented_plan_is_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nmoe", "speedrun", "nanochat_d20", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs/guides/gpu.md").read_text()
    assert said.partition("missing: ")[0] in page
    missing = [line.partition(" (for")[0] for line in said.splitlines() if line.startswith("missing: ")]
    assert "missing: fineweb/*.parquet" in missing
    assert {"missing: cais/mmlu", "missing: openai/gsm8k", "missing: HuggingFaceTB/smol-smoltalk"} < set(missing)
    assert list(tmp_path.iterdir()) == []
    larger = list(Planned("nanochat_d32", None, 0, False, "cpu").dry_run())
    # 32 x (4 x 2048^2 + 3 x 2048 x 5504) + 2 x 65536 x 2048 parameters, and the norms.
    assert larger[1].startswith("base: 1,887,578,112 parameters, ")
    assert "37.6B" in next(line for line in larger if line.startswith("base "))
