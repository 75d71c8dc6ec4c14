"""Models in GGUF: each family against the safetensors of the same weights and transformers; and files that cannot be read."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from family_cases import CASES
from family_cases.case import SHAPE, VOCAB, Case
from gguf import GGMLQuantizationType as Kind
from gguf_files import add_keys, finish, write_gguf
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nmoe.errors import UserError
from nmoe.gguf_file import read_header
from nmoe.model.checkpoint import copy_gguf, load_model, read_config
from nmoe.model.gguf.tensors import GGUFTensors
from nmoe.model.moe import RouterTrace
from nmoe.model.mxfp4 import dequantised
from nmoe.model.packed import PackedAttention
from nmoe.types import ExpertWeightsForm

BY_NAME = {case.name: case for case in CASES}
GROUPED = {"intermediate_size": 64, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 6, "num_experts_per_tok": 2}
READ = ["llama3", "llama-tied", "llama-linear", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"]


@pytest.mark.parametrize("name", READ)
def test_a_file_is_the_checkpoint_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    model = BY_NAME[name].make()
    if name == "gpt_oss":
        model.config.swiglu_limit = 7.0  # the releases'; llama.cpp writes none
    path = write_gguf(model, tmp_path / "hf", tmp_path / "model.gguf")
    assert read_config(path) == read_config(tmp_path / "hf")
    ours, wanted = load_model(path).state_dict(), load_model(tmp_path / "hf").state_dict()
    assert ours.keys() == wanted.keys()
    for key, values in wanted.items():
        # Gemma's norms are stored with one added, which rounds them.
        rounding = 1e-6 if name == "gemma3_text" and "norm" in key else 0
        torch.testing.assert_close(ours[key], values, rtol=0, atol=rounding, msg=lambda said, key=key: f"{key}: {said}")


# What transformers reads of a file: it takes the usual widths of Qwen3's heads and experts, and knows neither scaled frequencies
# nor those of Gemma's layers with a window.
AS_RELEASED = [
    BY_NAME["llama-tied"],
    BY_NAME["qwen2"],
    Case("qwen3", Qwen3Config(**SHAPE, **GROUPED, head_dim=128), Qwen3ForCausalLM),
    Case(
        "qwen3_moe",
        Qwen3MoeConfig(**SHAPE, **GROUPED, **EXPERTS, head_dim=128, norm_topk_prob=True),
        Qwen3MoeForCausalLM,
    ),
    Case("gemma3", Gemma3TextConfig(**SHAPE, **GROUPED, sliding_window=6, pad_token_id=None), Gemma3ForCausalLM),
]


@pytest.mark.parametrize("case", AS_RELEASED, ids=lambda case: case.name)
@torch.no_grad()
def test_logits_are_those_of_transformers_reading_the_same_file(case: Case, tmp_path: Path) -> None:
    path = write_gguf(case.make(), tmp_path / "hf", tmp_path / "model.gguf", Kind.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    )
    ids = torch.arange(40) * 7 % VOCAB
    ours = load_model(path)
    attend = PackedAttention([40], torch.device("cpu"))
    logits = ours.logits(ours(ids, torch.arange(40), attend, RouterTrace()))
    torch.testing.assert_close(logits, theirs(ids[None], use_cache=False).logits[0], rtol=0, atol=1e-4)


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Bytes of quantised rows; of types that the library only reads, random ones with scales that are finite."""
    rng = np.random.default_rng(seed)
    try:
        return gguf.quantize(rng.standard_normal((rows, columns), dtype=np.float32), kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
        scales = rng.uniform(0.01, 0.1, (len(blocks), 2)).astype(np.float16).view(np.uint8)
        at = {Kind.Q4_K: slice(0, 4), Kind.Q6_K: slice(-2, None)}[kind]
        blocks[:, at] = scales[:, : len(range(size)[at])]
        return blocks.reshape(rows, -1)


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "MXFP4"]


@pytest.mark.parametrize("name", KINDS)
def test_every_type_is_the_librarys_dequantisation_whole_and_by_rows(name: str, tmp_path: Path) -> None:
    kind, rows, columns = Kind[name], 24, 512
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_keys(writer, {"llama__embedding_length": columns, "llama__block_count": 1, "llama__attention__head_count": 2})
    stored = {
        part: random_blocks(kind, rows, columns, seed) for seed, part in enumerate(["token_embd", "blk.0.attn_q"])
    }
    for part, blocks in stored.items():
        writer.add_tensor(f"{part}.weight", blocks, raw_dtype=kind)
    tensors = GGUFTensors(finish(writer))
    plain, turned = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
    values = {part: torch.from_numpy(gguf.dequantize(blocks, kind).copy()) for part, blocks in stored.items()}
    # Two heads of twelve rows; the file has rows 0 and 6 of a head first, then 1 and 7.
    order = [head * 12 + 2 * (row % 6) + row // 6 for head in range(2) for row in range(12)]
    for ours, wanted in ((plain, values["token_embd"]), (turned, values["blk.0.attn_q"][order])):
        assert tensors.dtype_name(ours) == name
        assert torch.equal(tensors.read(ours).float(), wanted)
        assert wanted.isfinite().all()
        assert len(wanted.unique()) > 10
        for rows_ in (slice(0, 5), slice(5, 13), slice(23, 24)):
            assert torch.equal(tensors.read(ours, rows_).float(), wanted[rows_])


def in_mxfp4(tmp_path: Path) -> tuple[Path, GptOssConfig]:
    sizes = SHAPE | {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = GptOssConfig(
        **sizes,
        intermediate_size=32,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    case = Case("gpt_oss-mxfp4", config, GptOssForCausalLM)
    return write_gguf(case.make(), tmp_path / "hf", tmp_path / "model.gguf", Kind.MXFP4), config


def test_gpt_oss_in_mxfp4_is_dequantised_or_kept_in_it(tmp_path: Path) -> None:
    path, _ = in_mxfp4(tmp_path)
    stored = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}
    state, tensors = load_model(path).state_dict(), GGUFTensors(path)
    for layer in range(2):
        gate, up, down = (torch.tensor(stored[f"blk.{layer}.ffn_{one}_exps.weight"]) for one in ("gate", "up", "down"))
        assert torch.equal(state[f"blocks.{layer}.ffn.gate_up"], torch.cat([gate, up], 1).transpose(1, 2))
        assert torch.equal(state[f"blocks.{layer}.ffn.down"], down.transpose(1, 2))
    kept = load_model(path, expert_weights="mxfp4").state_dict()
    for part in ("gate_up", "down"):
        blocks, scales = (kept[f"blocks.0.ffn.{part}_packed.{one}"] for one in ("blocks", "scales"))
        assert torch.equal(dequantised(blocks, scales).float(), state[f"blocks.0.ffn.{part}"])
    assert tensors.shapes["model.layers.0.mlp.experts.gate_up_proj_blocks"] == (3, 64, 2, 16)


@pytest.mark.parametrize("keep", ["mxfp4", "dequantized"])
def test_a_copy_of_gpt_oss_keeps_its_experts_bytes(keep: ExpertWeightsForm, tmp_path: Path) -> None:
    path, _ = in_mxfp4(tmp_path)
    (tmp_path / "copy").mkdir()
    copy_gguf(path, tmp_path / "copy")
    assert load_file(tmp_path / "copy/model.safetensors")["model.layers.0.mlp.experts.down_proj_scales"].shape == (
        3,
        64,
        1,
    )
    copied, wanted = (load_model(one, torch.bfloat16, expert_weights=keep) for one in (tmp_path / "copy", path))
    for key, values in wanted.state_dict().items():
        # Routers, which stay in fp32 in a model, are rounded as all that is not bytes.
        rounded = values.bfloat16().float() if values.dtype == torch.float32 else values
        assert torch.equal(copied.state_dict()[key], rounded), key


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_a_copy_is_in_the_dtype_of_the_files_matrices(kind: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(BY_NAME["qwen2"].make(), tmp_path / "hf", tmp_path / "model.gguf", Kind[kind])
    (tmp_path / "copy").mkdir()
    copy_gguf(path, tmp_path / "copy")
    assert {str(one.dtype) for one in load_file(tmp_path / "copy/model.safetensors").values()} == {f"torch.{dtype}"}
    copied, wanted = load_model(tmp_path / "copy").state_dict(), load_model(path).state_dict()
    for key, values in wanted.items():
        assert torch.equal(copied[key], values.to(getattr(torch, dtype)).float()), key


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in Q8_0."""
    here = tmp_path_factory.mktemp("whole")
    case = next(case for case in CASES if case.name == "llama3")
    return write_gguf(case.make(), here / "hf", here / "model.gguf", Kind.Q8_0)


def test_a_file_cut_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    content, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    header = min(one.offset for one in read_header(whole).tensors.values())
    assert 1000 < header < len(content) / 2
    ends = [0, 3, 4, 7, 8, 16, 24, 30, *range(40, header, 97), header, header + 1, len(content) // 2, len(content) - 40]
    said = set()
    for end in ends:
        cut.write_bytes(content[:end])
        with pytest.raises(UserError, match=r"cut\.gguf") as error:
            load_model(cut)
        said.add("torn" in str(error.value))
        assert "fetch it again" in str(error.value) or "is missing" in str(error.value)
    assert said == {True, False}  # of what is too short for the letters GGUF nothing more is known


def test_a_damaged_header_is_a_users_error_or_a_model(whole: Path, tmp_path: Path) -> None:
    content, damaged = whole.read_bytes(), tmp_path / "damaged.gguf"
    header = min(one.offset for one in read_header(whole).tensors.values())
    rng, refused = random.Random(0), list[str]()
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            changed[rng.randrange(header)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        damaged.write_bytes(changed)
        read_header.__globals__["_header"].cache_clear()
        try:
            load_model(damaged)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("damaged.gguf" in said for said in refused)


def small(path: Path, arch: str = "llama", kind: Kind = Kind.F32, **keys: int | str) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key.replace("__", "."), value)
    size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.zeros((4, 256 // size[0] * size[1]), np.uint8 if size[0] > 1 else np.float32)
    writer.add_tensor("token_embd.weight", stored, raw_dtype=None if kind == Kind.F32 else kind)
    return finish(writer)


@pytest.mark.parametrize(
    ("arch", "keys", "said"),
    [
        (
            "mamba",
            {},
            "general.architecture = 'mamba' is not read from GGUF, only gemma3, gpt-oss, llama, qwen2, qwen3, qwen3moe",
        ),
        ("llama", {}, "the file lacks llama.attention.head_count; it is not a whole language model"),
        ("llama", {"llama__attention__head_count": "four"}, "llama.attention.head_count = 'four' is not of the type"),
        ("llama", {"split__count": 3}, "one of 3 parts of a model; join them with llama-gguf-split --merge"),
    ],
)
def test_a_file_that_is_no_model_read_here_is_refused(
    arch: str, keys: dict[str, int], said: str, tmp_path: Path
) -> None:
    path = small(tmp_path / "model.gguf", arch, **keys)
    with pytest.raises(UserError) as error:
        read_config(path)
    assert str(error.value).startswith(f"{path}: {said}")


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = small(tmp_path / "model.gguf", kind=Kind.Q8_K)
    with pytest.raises(UserError, match=r"token_embd.weight is of type Q8_K, which is not read; use a file in Q8_0"):
        GGUFTensors(path)
    content = path.read_bytes()
    at = content.index(struct.pack("<IQQI", 2, 256, 4, int(Kind.Q8_K))) + 20
    path.write_bytes(content[:at] + struct.pack("<I", 4711) + content[at + 4 :])
    with pytest.raises(UserError, match=r"token_embd.weight is of type number 4711, which is not read"):
        GGUFTensors(path)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "GGUF version 1 is not read, only 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "a big-endian GGUF file"),
        (b"", "not a GGUF file"),
    ],
)
def test_another_format_is_named(head: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(head)
    with pytest.raises(UserError, match=f"model.gguf: {said}"):
        read_header(tmp_path / "model.gguf")


def test_a_tensor_of_another_family_is_named_with_its_file(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(whole.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(
        UserError, match=r"model.layers.1.mlp.up_proj.weight is missing; blk.1.ffn_xx.weight is not part"
    ):
        load_model(copy)
