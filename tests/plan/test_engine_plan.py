"""Plans of runs whose engines have GPUs of their own: gpt-oss-120b by hand, from its description in the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nmoe import cli
from nmoe.config.commands import RLConfig
from nmoe.config.loader import load_run
from nmoe.plan.engine_plan import EnginePlan, engine_plan
from nmoe.plan.rank_plan import plan

GIB = 2**30
# Attention with biases and sinks, two norms, a router with bias, and 128 experts of 2880 wide, in each of 36 layers.
_ATTENTION = 2880 * 4096 + 4096 + 2 * (2880 * 512 + 512) + 4096 * 2880 + 2880 + 64
_EXPERTS = 128 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880)
PARAMETERS = 2 * 201088 * 2880 + 2880 + 36 * (_ATTENTION + 2 * 2880 + 2880 * 128 + 128 + _EXPERTS)
# A and B of rank 64 for q, k, v and o.
ADAPTER = 36 * 64 * (2 * (2880 + 4096) + 2 * (2880 + 512))
# 1,024 + 3,072 tokens: keys and values of 8 heads of 64 in bf16, and the picks of 4 experts in int16, in each layer.
SEQUENCE = 4096 * 36 * (2 * 8 * 64 * 2 + 4 * 2)


def configured(*overrides: str) -> RLConfig:
    return load_run(Path("gpt_oss_120b"), RLConfig, overrides)


def planned(*overrides: str) -> EnginePlan:
    found = engine_plan(configured(*overrides))
    assert found is not None
    return found


def test_the_bytes_of_an_engine_by_hand() -> None:
    found = planned()
    assert PARAMETERS == 116_829_156_672
    assert (found.weights, found.sequence, found.tokens, found.published) == (
        2 * PARAMETERS,
        SEQUENCE,
        4096,
        2 * ADAPTER,
    )
    assert found.gpus == 4
    assert found.of_gpu(4) == (2 * PARAMETERS // 4, SEQUENCE // 4)
    assert found.of_gpu(16) == (2 * PARAMETERS // 16, SEQUENCE // 8), (
        "8 heads of keys are on at most 8 GPUs, then copied"
    )
    assert found.missing(80 * GIB) == PARAMETERS // 2 + SEQUENCE // 4 - int(0.85 * 80 * GIB) < 0
    # 13.6 GiB are free beside the weights, for sequences of 72.3 MiB on each GPU: 192.6 of them.
    free = int(0.85 * 80 * GIB) - 2 * PARAMETERS // 4
    assert free // (SEQUENCE // 4) == 192
    assert found.lines(80 * GIB)[-1].endswith("with a cache for 192 sequences")
    assert planned("--engine.weights=disk").published == 2 * PARAMETERS
    assert planned("--engine.weights=disk").keeps == 0
    running = planned('--engine.urls=["http://a:1","http://b:1"]', "--engine.servers=1")
    assert running.gpus == 0
    assert running.lines(None)[0] == "engines: 2, of 4 GPU each; one of these holds:"


def test_differences_keep_earlier_weights_in_memory() -> None:
    """Those of the last publication; and while the next is made its own, beside gradients and activations on a host."""
    delta = ("--engine.kind=server", "--engine.tensor_parallel=1", "--engine.weights=delta", "--model.device=cpu")
    found = planned(*delta)
    assert found.keeps == 2 * 2 * PARAMETERS
    assert f"and rank 0 keeps up to {4 * PARAMETERS / GIB:.1f} GiB of earlier weights in its machine's memory" in (
        found.lines(None)
    )
    held = plan(configured(*delta), 1, 1).held
    free = held["gradients"] + held["activations"]
    assert 0 < free < 2 * PARAMETERS
    assert held["weights published last"] == 2 * 2 * PARAMETERS - free
    assert "weights published last" not in plan(configured(*delta[:-2], delta[-1]), 1, 1).held


def test_the_guidelines_two_engines_lack_bytes_that_are_named() -> None:
    found = planned("--engine.servers=2", "--engine.tensor_parallel=2")
    missing = PARAMETERS + SEQUENCE // 2 - int(0.85 * 80 * GIB)
    assert found.missing(80 * GIB) == missing == 43_966_297_408
    assert found.lines(80 * GIB)[-1] == (
        "an engine does not fit engine.memory_share = 0.85 of 80.0 GiB: 40.9 GiB are missing on each GPU; "
        'engine.kind = "vllm", engine.tensor_parallel = 4 and engine.servers = 1 fit'
    )
    assert found.lines(10 * GIB)[-1].endswith("engine.tensor_parallel = 32 and engine.servers = 1 fit")
    assert found.lines(4 * GIB)[-1].endswith("no engine of up to 32 GPUs fits")


def test_a_server_of_nmoe_has_no_share_that_could_be_set() -> None:
    found = planned("--engine.kind=server", "--engine.tensor_parallel=1", "--engine.weights=disk")
    assert "an engine does not fit 0.85 of 80.0 GiB:" in found.lines(80 * GIB)[-1]


def test_an_engine_of_ones_own_takes_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_engine_of_a_plan.py").write_text("class Own:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert engine_plan(configured("--engine.kind=own_engine_of_a_plan:Own", *NATIVE)) is None


def test_ranks_that_do_not_sample_hold_no_whole_weights_and_no_cache() -> None:
    found, here = plan(configured(), 4, 4), plan(configured("--engine.kind=native", *NATIVE), 4, 4)
    assert found.held["weights"] == pytest.approx(2 * PARAMETERS / 4 + 2 * ADAPTER, rel=1e-3)
    assert here.total - found.total == 2 * PARAMETERS + here.held["key-value cache"]
    assert "weights to sample" not in found.sent, "the adapter is on every rank"
    ring = int(2 * PARAMETERS * 3 / 4)
    assert (
        plan(configured("--engine.weights=disk"), 4, 4).sent["weights to sample"]
        == ring
        == here.sent["weights to sample"]
    )
    assert 'engine.kind = "vllm", on other GPUs' in here.remedies
    assert not any("engine." in one for one in found.remedies)


NATIVE = ("--engine.servers=1", "--engine.tensor_parallel=1", "--engine.weights=auto")


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["--memory-gib=80"], 0, "with a cache for 192 sequences"),
        (["--memory-gib=80", "--parallel.offload=cpu"], 0, "in the machine's memory, by parallel.offload:"),
        (
            ["--memory-gib=80", "--engine.servers=2", "--engine.tensor_parallel=2"],
            1,
            "40.9 GiB are missing on each GPU",
        ),
        (
            ["--engine.servers=2"],
            2,
            "engine.servers times engine.tensor_parallel are 8 GPUs, which leaves none to train on",
        ),
    ],
)
def test_eight_gpus(
    overrides: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nmoe", "plan", "gpt_oss_120b", "--world=8", *overrides])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert ("dp_shard 4, ep 4" in shown.out) == (code < 2), "4 of the 8 train"
