"""Commands as a user runs them, `nmoe doctor` among them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import Result
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.model.checkpoint import load_model, save_model
from nmoe.model.transformer import Transformer
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sampling

Nmoe = Callable[..., Result]
EVALUATION = re.compile(r"(\S+) on reverse (\d+\.\d)% \[(\d+\.\d)%, (\d+\.\d)%\] of (\d+)(?:, \d+ \w+)*")


def numbers(line: str) -> tuple[str, float, float, float, int]:
    match = EVALUATION.fullmatch(line)
    assert match is not None, line
    return match[1], float(match[2]), float(match[3]), float(match[4]), int(match[5])


def test_eval(command: Nmoe, nmoe: Nmoe, trained: Path, workshop: Path) -> None:
    greedy = command("eval", trained, workshop / "reverse.toml", "--problems=100")
    assert (greedy.code, greedy.err) == (0, "")
    note, line = greedy.out.splitlines()
    assert note == "on the eval split, which training never meets"
    mode, value, low, high, problems = numbers(line)
    assert (mode, problems) == ("greedy_pass@1", 100)
    assert low < value <= high <= 100
    assert value > 80
    assert nmoe("eval", trained, workshop / "reverse.toml", "--problems=100", "--out=kept.json").out == greedy.out
    kept = json.loads(Path("kept.json").read_text())
    assert (kept["problems"], kept["evaluations"][0]["mode"]) == (100, "greedy_pass@1")
    assert 100 * kept["evaluations"][0]["value"] == sum(one["correct"] == [True] for one in kept["answers"])
    right = next(one for one in kept["answers"] if one["correct"] == [True])
    assert right["answers"] == [right["gold"]] == [right["question"].removeprefix("Reverse: ")[::-1]]

    sampled = nmoe("eval", trained, workshop / "reverse.toml", "--problems=50", "--samples=4", "--temperature=1")
    rows = list(map(numbers, sampled.out.splitlines()[1:]))
    assert [row[0] for row in rows] == ["sampling_pass@1", "pass@2", "pass@3", "pass@4", "sampling_pass@4"]
    assert {row[4] for row in rows} == {50}
    first, *more = rows[:4]
    assert first[2] < first[1] < first[3]
    assert first[1] < more[0][1] <= more[1][1] <= more[2][1]


def test_report(nmoe: Nmoe, base: Path, trained: Path) -> None:
    for run, steps in ((base, 600), (trained, 30)):
        result = nmoe("report", run)
        assert (result.code, result.out, result.err) == (0, f"{run}/report.md\n", "")
        report = (run / "report.md").read_text()
        assert f"{steps} steps are recorded, 1 to {steps}." in report
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lowest = min(row["loss"] for row in rows)
        assert re.search(rf"\| loss \|.*\| {lowest:.4g} \|", report)
        for picture in re.findall(r"\]\((plots/\S+\.png)\)", report):
            assert (run / picture).read_bytes().startswith(b"\x89PNG")


QUESTIONS = "Reverse: 120\n\n/new\n  Reverse: 735  \n"


def test_chat_answers_each_question(command: Nmoe, nmoe: Nmoe, trained: Path) -> None:
    first = command("chat", trained, "--temperature=0", stdin=QUESTIONS)
    assert (first.code, first.err) == (0, "")
    assert first.out.splitlines() == [
        "[reasoning] back",
        "021",
        "[reasoning] back",
        "537",
    ]
    assert nmoe("chat", trained, "--temperature=0", "--seed=9", stdin=QUESTIONS).out == first.out


def test_chat_shows_what_is_cut_off(nmoe: Nmoe, trained: Path) -> None:
    result = nmoe("chat", trained, "--temperature=0", "--max-new-tokens=4", stdin="Reverse: 120\n")
    assert result.out.splitlines() == [
        "[reasoning] back",
        "(cut off: the answer is incomplete)",
    ]
    assert (result.code, result.err) == (0, "")


def test_chat_shows_what_is_not_harmony(nmoe: Nmoe, base: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(resolve_checkpoint(base))
    ignorant = Transformer(load_model(resolve_checkpoint(base)).config).initialize(0)
    with torch.no_grad():  # all logits are 0: the first token of the vocabulary is what it says
        ignorant.embedding.weight.zero_()
    (tmp_path / "ignorant").mkdir()
    save_model(ignorant, tmp_path / "ignorant")
    tokenizer.save(tmp_path / "ignorant")
    result = nmoe("chat", "ignorant", "--temperature=0", stdin="Reverse: 120\n")
    assert (result.code, result.err) == (0, "")
    assert result.out == "\n(cut off: the answer is incomplete)\n"


def test_chat_refuses_what_does_not_fit_and_goes_on(nmoe: Nmoe, trained: Path) -> None:
    result = nmoe("chat", trained, "--temperature=0", stdin=f"Reverse: {'1' * 99}\nReverse: 735\n")
    lines = result.out.splitlines()
    assert re.fullmatch(r"\d+ tokens are more than the context of 64", lines[0])
    assert lines[1:] == ["[reasoning] back", "537"]


# documented: nmoe export RUN DIRECTORY --dtype bfloat16
def test_export(nmoe: Nmoe, base: Path, tmp_path: Path) -> None:
    """The base's routers choose by score and bias, which no known family does; without the bias it is a Qwen3-MoE."""
    result = nmoe("export", base, "out")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: blocks.0.ffn.router.bias is not zero, and qwen3_moe cannot store it")
    shutil.copytree(resolve_checkpoint(base), tmp_path / "plain")
    model = load_model(tmp_path / "plain")
    for moe in model.moe_layers():
        moe.router.bias.zero_()
    save_model(model, tmp_path / "plain")
    result = nmoe("export", "plain", "out")
    assert (result.code, result.out, result.err) == (0, "out\n", "")
    half = nmoe("export", "plain", "half", "--dtype", "bfloat16")
    assert (half.code, half.out) == (0, "half\n")
    assert load_file("half/model.safetensors")["model.embed_tokens.weight"].dtype == torch.bfloat16
    # What transformers then generates is what nmoe's engine does, to the end of the turn.
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    prompt = tokenizer("<|start|>user<|message|>Reverse: 120<|end|><|start|>assistant", return_tensors="pt")
    (ids,) = theirs.generate(**prompt, max_new_tokens=20, do_sample=False).tolist()
    request = Request(tuple(prompt.input_ids[0].tolist()), 1, Sampling(20, 0.0, stop_ids=tuple(ends(tokenizer))), "r")
    engine = NativeEngine(load_model(tmp_path / "out"), 1)
    (sample,) = engine.run(engine.generate(request))
    assert (sample.finish_reason, ids[len(request.prompt_ids) :]) == ("stop", sample.token_ids)


def ends(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])


# documented: nmoe doctor [--json]
def test_what_is_missing_is_named_with_its_remedy(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = command("doctor", "--json")
    assert (result.code, result.err) == (0, "")
    said = json.loads(result.out)
    assert said["usable"]
    assert list(said["findings"]) == [
        "packages", "extras", "processor", "threads", "compiler", "idle threads", "gpu", "kernels", "sandbox", "caches",
    ]  # fmt: skip
    assert said["findings"]["packages"]["torch"] == torch.__version__
    assert said["findings"]["compiler"] == {"command": "/nonexistent/c++", "path": None, "version": None}
    assert said["findings"]["kernels"]["compiled"] is False
    assert {
        "topic": "kernels",
        "kind": "faster",
        "text": "with the C++ kernels sampling takes a fifth of the time",
        "command": "unset CXX, or name a C++ compiler in it",
    } in said["advice"]
    assert said["findings"]["caches"]["compiled kernels"]["path"] == str(tmp_path / "cache/nmoe/kernels")


def test_lines_and_the_exit_code(nmoe: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    from nmoe.preflight import doctor
    from nmoe.preflight.doctor import Advice, Finding

    found = [Finding("threads", "2 cores", {"cores": 2}, (Advice("faster", "stop others", "top"),))]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    lines = "threads  2 cores\n\nfaster:  stop others\n           top\n"
    assert nmoe("doctor") == Result(0, lines, "")
    found.append(Finding("torch", "none", {}, (Advice("needed", "get it", "pip install torch"),)))
    assert nmoe("doctor").code == 1
