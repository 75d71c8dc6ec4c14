"""Peak memory of loading: the model and little more, whatever the layout and the dtypes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nmoe.model.checkpoint import export_model, save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer

# 55 million parameters, no tensor of which is a tenth: 220 MB in fp32.
DENSE = ModelConfig(
    vocab_size=4096,
    hidden_size=1024,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate_size=3072,
    context_tokens=512,
)
MOE = ModelConfig(
    vocab_size=4096,
    hidden_size=1024,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=128,
    experts=16,
    experts_per_token=2,
    expert_width=192,
    context_tokens=512,
)

# The interpreter, torch and what a first load makes once are there before the memory is read: a tiny model goes first.
MEASURE = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from nmoe.model.checkpoint import load_model

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

torch.set_num_threads(1)
load_model(Path(sys.argv[1]))
before = kilobytes("VmRSS")
model = load_model(Path(sys.argv[2]), getattr(torch, sys.argv[3]))
print(before, kilobytes("VmHWM"), sum(t.nbytes for t in model.state_dict().values()) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell a process's peak")
@pytest.mark.parametrize(
    ("config", "layout", "stored", "loaded"),
    [
        (DENSE, "own", "float32", "float32"),
        (DENSE, "hf", "bfloat16", "float32"),
        (MOE, "hf sharded", "float32", "float32"),
        (MOE, "hf", "float32", "bfloat16"),
    ],
    ids=["own", "hf-bf16-to-fp32", "moe-sharded", "moe-fp32-to-bf16"],
)
def test_loading_peaks_below_1_3_times_the_model(
    tmp_path: Path, config: ModelConfig, layout: str, stored: str, loaded: str
) -> None:
    small = ModelConfig(**{**config.to_dict(), "hidden_size": 64, "vocab_size": 64, "windows": (), "dense_layers": ()})
    for name, shape in (("small", small), ("large", config)):
        model = Transformer(shape).to(getattr(torch, stored))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        (tmp_path / name).mkdir()
        if layout == "own":
            save_model(model, tmp_path / name)
        else:
            export_model(model, tmp_path / name, 50_000_000 if layout == "hf sharded" else 10**10)
        del model
    assert (len(list((tmp_path / "large").glob("model-*"))) > 3) == (layout == "hf sharded")
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "large", loaded],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    before, peak, model_kilobytes = map(int, output.split())
    assert model_kilobytes > 200_000 if loaded == "float32" else model_kilobytes > 100_000
    # At least the model itself: the figure is one of memory that is really there.
    ratio = (peak - before) / model_kilobytes
    assert 0.97 < ratio < 1.3, ratio


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell a process's peak")
@pytest.mark.parametrize("name", ["stacked experts", "stacked experts in MXFP4"])
def test_stacked_experts_are_read_a_few_at_a_time(tmp_path: Path, name: str) -> None:
    """The checkpoints of `benchmarks/loading.py` at 170 MB, the largest tensor of which has 50 MB."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import loading

    case = loading.CASES[name]
    config = case.config.model_copy(update={"layers": 2, "experts": 12, "vocab_size": 4096})
    found = loading.measure(replace(case, config=config), tmp_path)
    assert found["model"] > 170e6
    assert found["largest"] == 12 * 1024 * 2048 * 2
    assert 0.97 * found["model"] < found["beyond"] < found["model"] + loading.BOUND * found["largest"]
