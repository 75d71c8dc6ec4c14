"""Checkpoints in several files, and the memory that loading takes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import qwen3_moe
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model, load_weights, save_model
from nmoe.model.config import ModelConfig
from nmoe.model.families import FAMILIES
from nmoe.model.families.base import Packing
from nmoe.model.shards import INDEX, Shards, write_shards
from nmoe.model.transformer import Transformer

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint of Qwen3-MoE."""
    directory = tmp_path_factory.mktemp("sharded")
    (directory / "single").mkdir()
    qwen3_moe.CASES[0].make().save_pretrained(directory / "single")
    export_model(load_model(directory / "single"), directory / "whole", 20_000)
    return directory / "whole"


@pytest.fixture
def sharded(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def shard_of(directory: Path, tensor: str = NORM) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][tensor]


def edit_index(directory: Path, **places: str) -> None:
    raw = json.loads((directory / INDEX).read_text())
    raw["weight_map"] |= {NORM if name == "norm" else name: file for name, file in places.items()}
    (directory / INDEX).write_text(json.dumps(raw))


def edit_tensor(directory: Path, change: Callable[[Tensor], Any], name: str = NORM) -> None:
    path = shard_of(directory, name)
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def garble_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 20 + path.read_bytes()[28:])


def set_to(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return change


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda d: shard_of(d).unlink(), r"{shard}: no such file, though model\.safetensors\.index\.json names it$"),
    (lambda d: cut(shard_of(d)), r"{shard}: torn or not a safetensors file: "),
    (lambda d: garble_header(shard_of(d)), r"{shard}: torn or not a safetensors file: "),
    (lambda d: shard_of(d).write_text("version https://git-lfs.github.com/spec/v1\n"), r"{shard}: torn or not "),
    (
        lambda d: edit_index(d, norm=shard_of(d, "model.norm.weight").name),
        r"{index}: model\.layers\.1\.input_layernorm\.weight should be in model-\S+, which has no such tensor$",
    ),
    (
        lambda d: edit_index(d, **{"model.wing": shard_of(d).name}),
        r"{index}: model\.wing should be in model-\S+, which has no such tensor$",
    ),
    (
        lambda d: edit_index(d, norm="../model.safetensors"),
        r"{index}: .* '\.\./model\.safetensors', which is not a file of",
    ),
    (lambda d: edit_index(d, norm="/etc/passwd"), r"{index}: .* '/etc/passwd', which is not a file of this directory$"),
    (lambda d: edit_index(d, norm=".."), r"{index}: .* '\.\.', which is not a file of this directory$"),
    (lambda d: edit_index(d, norm=""), r"{index}: .* '', which is not a file of this directory$"),
    (lambda d: (d / INDEX).write_text("{"), r"{index}: cannot be read as an index of shards"),
    (lambda d: (d / INDEX).write_text("[]"), r"{index}: cannot be read as an index of shards"),
    (lambda d: (d / INDEX).write_text('{"weight_map": []}'), r"{index}: cannot be read as an index of shards"),
    (lambda d: (d / INDEX).unlink(), r"model\.safetensors: no such file"),
    (
        lambda d: edit_tensor(d, set_to(float("nan"))),
        r"{shard}: model\.layers\.1\.input_layernorm\.weight holds NaN or infinite values$",
    ),
    (
        lambda d: edit_tensor(d, set_to(float("-inf"))),
        r"{shard}: model\.layers\.1\.input_layernorm\.weight holds NaN or infinite values$",
    ),
    (
        lambda d: edit_tensor(d, lambda x: x[:5].clone()),
        r"{shard}: .*: model\.layers\.1\.input_layernorm\.weight has shape \[5\], config\.json asks for \[32\]$",
    ),
    (
        lambda d: edit_tensor(d, lambda x: x.to(torch.int8)),
        r"{shard}: .*: model\.layers\.1\.input_layernorm\.weight is stored as I8, which is not a float",
    ),
    (
        lambda d: edit_tensor(d, lambda x: x.to(torch.float8_e4m3fn)),
        r"{shard}: .*: model\.layers\.1\.input_layernorm\.weight is stored as F8_E4M3, which is not a float",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message[:60] for _, message in DAMAGE])
def test_a_broken_sharded_checkpoint_is_refused(sharded: Path, damage: Callable[[Path], Any], message: str) -> None:
    model = load_model(sharded)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shard = shard_of(sharded)
    damage(sharded)
    places = {"{shard}": str(shard), "{index}": str(sharded / INDEX)}
    for mark, path in places.items():
        message = message.replace(mark, "^" + path.replace(".", r"\."))
    with pytest.raises(UserError, match=message) as raised:
        load_model(sharded)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    # Into a model that is there: unless only the values are wrong, it stays as it was.
    with pytest.raises(UserError, match=message):
        load_weights(model, sharded)
    if "NaN" not in message:
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "model.layers.2.mlp.experts.5.down_proj.weight"])
def test_values_are_looked_at_wherever_they_lie(sharded: Path, tensor: str) -> None:
    edit_tensor(sharded, set_to(float("inf")), tensor)
    with pytest.raises(UserError, match=f"{tensor} holds NaN or infinite values$".replace(".", r"\.")):
        load_model(sharded)


def test_a_value_too_large_for_the_dtype_asked_for(sharded: Path) -> None:
    edit_tensor(sharded, set_to(1e6))
    assert load_model(sharded, torch.bfloat16).blocks[1].attention_norm.weight[3] == 1e6 // 4096 * 4096
    with pytest.raises(UserError, match=r"holds NaN or infinite values once converted to torch\.float16$"):
        load_model(sharded, torch.float16)


def test_the_dtype_asked_for_and_routers_and_buffers_in_fp32(sharded: Path) -> None:
    full, half = load_model(sharded), load_model(sharded, torch.bfloat16)
    for (name, wide), narrow in zip(full.state_dict().items(), half.state_dict().values(), strict=True):
        assert narrow.dtype == (torch.float32 if "router" in name else torch.bfloat16)
        assert torch.equal(wide.to(narrow.dtype), narrow), name
    assert half.rope_cos.dtype == torch.float32
    assert torch.equal(half.rope_cos, full.rope_cos)


def test_each_stored_tensor_is_read_once(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, list[int]] = {}

    class Counting(Shards):
        def read(self, name: str, rows: slice | None = None) -> Tensor:
            whole = range(self.shapes[name][0])
            read.setdefault(name, []).extend(whole if rows is None else whole[rows])
            return super().read(name, rows)

    monkeypatch.setattr("nmoe.model.shards.Shards", Counting)
    monkeypatch.setattr("nmoe.model.families.base._PIECE_BYTES", 1000)
    load_model(sharded)
    shapes = Shards(sharded).shapes
    assert read == {name: list(range(shape[0])) for name, shape in shapes.items()}


def test_shards_are_as_large_as_allowed_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((size,), float(i)) for i, size in enumerate([10, 20, 30, 100, 5, 5])}
    write_shards(tmp_path, [(name, t.nbytes, lambda t=t: t) for name, t in tensors.items()], 4 * 60)
    index = json.loads((tmp_path / INDEX).read_text())
    one, two, three = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    # 10 + 20 + 30 fill the first to the byte; what is larger than a shard has one of its own.
    assert index == {
        "metadata": {"total_size": 4 * 170},
        "weight_map": {"t0": one, "t1": one, "t2": one, "t3": two, "t4": three, "t5": three},
    }
    shards = Shards(tmp_path)
    assert shards.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
    assert all(torch.equal(shards.read(name), t) for name, t in tensors.items())


def test_a_packed_tensor_is_unpacked_from_its_parts(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
        return blocks.float() * scales.unsqueeze(-1)

    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    path = shard_of(sharded, name)
    tensors = load_file(path)
    shape = tensors.pop(name).shape
    blocks = torch.arange(shape.numel()).view(shape).to(torch.int8)
    tensors |= {name + "_blocks": blocks, name + "_scales": torch.arange(1.0, 1 + shape[0])}
    save_file(tensors, path)
    raw = json.loads((sharded / INDEX).read_text())
    del raw["weight_map"][name]
    raw["weight_map"] |= {name + "_blocks": path.name, name + "_scales": path.name}
    (sharded / INDEX).write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"up_proj\.weight is missing"):
        load_model(sharded)
    family = FAMILIES.get("qwen3_moe")
    monkeypatch.setattr(family, "PACKINGS", (Packing(("_blocks", "_scales"), unpack),))
    expected = (blocks.float() * torch.arange(1.0, 1 + shape[0]).unsqueeze(-1)).T
    assert torch.equal(load_model(sharded).moe_layers()[0].gate_up[1, :, 24:], expected)
    monkeypatch.setattr(family, "PACKINGS", (Packing(("_blocks", "_scales"), lambda b, s: b[1:]),))
    with pytest.raises(UserError, match=r"up_proj\.weight has shape \[23, 32\], config\.json asks for \[24, 32\]$"):
        load_model(sharded)


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
