"""GGUF files that cannot be read: one message with file and reason, wherever the file is cut or damaged."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from family_cases import CASES
from gguf import GGMLQuantizationType as Kind
from gguf_files import finish, write_gguf

from nmoe.errors import UserError
from nmoe.gguf_file import read_header
from nmoe.model.checkpoint import load_model, read_config
from nmoe.model.gguf.tensors import GGUFTensors


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
