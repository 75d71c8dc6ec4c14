"""CORE against a second implementation of its rules: jinja templates, transformers, one padded batch for each item."""

from __future__ import annotations

import csv
import json
import random
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers
from core_reference import reference
from scipy import stats
from tiny_models import DENSE

from nmoe.errors import UserError
from nmoe.eval.core import CORE, CoreResult, CoreSet, SetResult, core_command, decisions, find_sets, read_set
from nmoe.eval.likelihood import Continuation, likelihoods
from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.model.policy import load_policy
from nmoe.model.transformer import Transformer
from nmoe.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[3] / "shared" / "eval_data"
# Every kind, with and without shots, a delimiter of its own, and prompts longer than the context.
SAMPLED = ("copa", "arc_easy", "piqa", "winograd", "bigbench_operators", "lambada_openai", "agi_eval_lsat_ar")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights in the form of Hugging Face."""
    directory = tmp_path_factory.mktemp("core")
    tokenizer = Tokenizer.train(["the answer is what question which of these does not do"] * 3, 320)
    config = ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size, "context_tokens": 512})
    export_model(Transformer(config).initialize(3), directory)
    tokenizer.save(directory)
    return directory


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    if not DATA.exists():
        pytest.skip("shared/eval_data is not beside the repository")
    monkeypatch.setenv("NMOE_DATASETS", str(DATA))


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", SAMPLED)
def test_each_decision_is_that_of_the_second_implementation(checkpoint: Path, name: str) -> None:
    one = next(one for one in CORE if one.name == name)
    items = read_set(one, find_sets()[one], 11)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    hub = transformers.AutoTokenizer.from_pretrained(checkpoint)
    expected = [reference(theirs, hub, one, items, place) for place in range(4)]
    assert decisions(load_policy(checkpoint)[0], Tokenizer.load(checkpoint), one, items)[:4] == expected


def test_a_continuation_has_the_likelihood_that_the_model_gives_it_alone(checkpoint: Path) -> None:
    """Packed with others, behind a beginning that is computed once, and over several passes."""
    model = load_policy(checkpoint)[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    rng = random.Random(0)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(300) for _ in range(count)]

    groups = []
    for _ in range(30):
        shared = drawn(rng.randrange(1, 150))
        members = [[*shared, *drawn(rng.randrange(1, 60))] for _ in range(3)]
        groups.append([Continuation(one, rng.randrange(1, len(one) + 1)) for one in members])
    found = list(likelihoods(model, groups))
    for one, scored in zip(chain.from_iterable(groups), chain.from_iterable(found), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([one.token_ids])).logits[0]
        wanted = torch.tensor(one.token_ids[one.start :])
        rows = logits[one.start - 1 : -1]
        assert scored.logprobs == pytest.approx(
            rows.log_softmax(-1).gather(1, wanted[:, None])[:, 0].tolist(), abs=1e-4
        )
        assert scored.greedy == bool((rows.argmax(-1) == wanted).all())


def test_of_options_that_are_the_same_the_first_is_taken(checkpoint: Path) -> None:
    model, tokenizer = load_policy(checkpoint)[0], Tokenizer.load(checkpoint)
    one = CoreSet("one", "one", "multiple_choice", 0, 0.5)
    items = [{"query": "a", "choices": ["same", "same"], "gold": gold} for gold in (0, 1)]
    assert decisions(model, tokenizer, one, items) == [True, False]


def test_the_score_is_the_mean_of_centred_accuracies() -> None:
    sets = [SetResult("a", 100, 75, 0.5, 0.5), SetResult("b", 50, 5, 0.0, 0.1)]
    result = CoreResult("model", sets, ["squad"])
    assert (result.name, result.score) == ("CORE-2", pytest.approx(0.3))
    # Weights 2/3 and 1/3: mean (1.5 + 0.1)/3. With two items more at it, 76.0667 of 102 and 6.0667 of 52 are right, so the variance
    # is 4/9 * 0.189614/100 + 1/9 * 0.103058/50 = 0.00107174. The score is 3/2 of the share, minus 1/2.
    mean, variance = 1.6 / 3, 0.00107174
    items = mean * (1 - mean) / variance
    low, high = stats.beta(mean * items, items - mean * items + 1), stats.beta(mean * items + 1, items - mean * items)
    assert result.interval.low == pytest.approx(1.5 * low.ppf(0.025) - 0.5, abs=1e-5)
    assert result.interval.high == pytest.approx(1.5 * high.ppf(0.975) - 0.5, abs=1e-5)
    assert [round(one.centred(0.62), 3) for one in CORE if one.name in ("boolq", "piqa")] == [0.24, 0.0]
    assert next(reversed(list(result.lines()))) == "CORE-2 of model: 0.3000 [0.2004, 0.3983], without squad"


def test_the_command_writes_what_it_prints_and_says_what_is_missing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path))
    with pytest.raises(UserError, match="holds none of CORE's sets; copy there"):
        core_command([checkpoint], None, "cpu", None)
    (tmp_path / "core" / "deep").mkdir(parents=True)
    rows = [{"query": f"{n}", "choices": ["yes", "no", "or"], "gold": n % 3} for n in range(9)]
    file = tmp_path / "core" / "deep" / "copa.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    core_command([checkpoint], 6, "cpu", tmp_path / "out.json")
    (written,) = json.loads((tmp_path / "out.json").read_text())
    (one,) = written["sets"]
    assert (one["name"], one["items"], len(written["missing"])) == ("copa", 6, 21)
    bounds = {name: written["score"][name] for name in ("low", "high")}
    assert bounds["low"] < one["centred"] < bounds["high"]
    assert written["score"] == {"name": "CORE-1", "value": one["centred"]} | bounds
    assert f"CORE-1 of {checkpoint}: {one['centred']:.4f}" in capsys.readouterr().out
    file.write_text(json.dumps({"query": "a", "choices": ["b", "c"], "gold": 2}) + "\n")
    with pytest.raises(UserError, match=r"copa.jsonl:1: an item of copa needs 'gold', .* of its 2 options, not 2"):
        core_command([checkpoint], None, "cpu", None)
    file.write_text(json.dumps({"query": "a", "choices": "b"}) + "\n")
    with pytest.raises(UserError, match="an item of copa needs a list of texts 'choices'"):
        core_command([checkpoint], None, "cpu", None)


def test_the_table_is_that_of_dclm() -> None:
    """Shots and baselines, as `eval_meta_data.csv` has them."""
    if not DATA.exists():
        pytest.skip("shared/eval_data is not beside the repository")
    with (DATA / "core" / "eval_meta_data.csv").open() as file:
        known = {row["Eval Task"]: row for row in csv.DictReader(file)}
    assert len({one.name for one in CORE}) == 22
    for one in CORE:
        row = known[one.name]
        kind = row["Task Type"].replace(" ", "_")
        expected = kind, int(row["#shots"]), float(row["Random baseline"]) / 100
        assert (one.kind, one.shots, one.baseline) == pytest.approx(expected), one.name
