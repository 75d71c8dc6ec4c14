"""`nmoe tokenizer harmonize`: Harmony's control tokens in other models' tokenizers, and what stays as it was."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.config import ModelConfig
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.shards import Shards
from nmoe.model.transformer import Transformer
from nmoe.runs.harmonize import harmonize, harmonized
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.harmony import CONTROL_TOKENS, Harmony
from nmoe.text.renderers import HarmonyRenderer, natural_format
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from tests.chat_templates import gemma, llama, qwen
from tests.tiny_models import DENSE

TEXTS = ("the cat sat on 42 mats\n", "<|return|> is text here", "é", "")


def model_in(directory: Path, tokenizer: Tokenizer, padding: int, tied: bool = True) -> None:
    """A small Llama in bfloat16 with the tokenizer's vocabulary, and rows beyond it."""
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(**DENSE | {"vocab_size": tokenizer.vocab_size + padding, "tie_embeddings": tied, "qk_norm": False})
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    export_model(model.to(torch.bfloat16), directory)


def hidden(directory: Path, ids: list[int]) -> tuple[Transformer, Tensor]:
    model = load_model(directory)
    attend = PackedAttention([len(ids)], torch.device("cpu"), model.exact)
    with torch.no_grad():
        return model, model(torch.tensor(ids), torch.arange(len(ids)), attend, RouterTrace())


def logits(directory: Path, ids: list[int]) -> Tensor:
    model, states_TD = hidden(directory, ids)
    state = model.state_dict()
    return states_TD @ state.get("head.weight", state["embedding.weight"]).T


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [0, 3, 40])
def test_all_other_weights_and_logits_keep_their_bits(tied: bool, padding: int, tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    before = qwen(source)
    model_in(source, before, padding, tied)
    lines = list(harmonize(source, out))
    after = Tokenizer.load(out)
    added = [name for name in CONTROL_TOKENS if not before.has_special(name)]
    # The first new token comes after the last old one, in a row that was padding if there is one.
    assert [after.special_id(name) for name in added] == list(range(before.vocab_size, before.vocab_size + len(added)))
    rows = max(before.vocab_size + padding, before.vocab_size + len(added))
    assert len(lines) == len(added) + 1
    assert f"{rows:,} rows" in lines[-1]
    old, new = Shards(source), Shards(out)
    assert old.files.keys() == new.files.keys()
    tables = {"model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])}
    kept = [row for row in range(before.vocab_size + padding) if row not in map(after.special_id, added)]
    ends = {"<|end|>": "<|im_end|>", "<|return|>": "<|im_end|>", "<|start|>": "<|im_start|>"}
    for name in old.files:
        theirs, ours = old.read(name), new.read(name)
        if name not in tables:
            assert torch.equal(theirs, ours), name
            continue
        assert len(ours) == rows
        assert torch.equal(theirs[kept], ours[kept])
        for token, like in ends.items():
            assert torch.equal(ours[after.special_id(token)], theirs[before.special_id(like)])
        (line_break,), (colon,) = before.encode("\n"), before.encode(":")
        assert torch.equal(ours[after.special_id("<|channel|>")], theirs[line_break])
        assert torch.equal(ours[after.special_id("<|message|>")], theirs[colon])
        mean = theirs.double().mean(0).to(torch.bfloat16)
        assert torch.equal(ours[after.special_id("<|constrain|>")], mean)
    ids = before.encode("the cat sat on 42 mats")
    assert torch.equal(logits(source, ids)[:, kept], logits(out, ids)[:, kept])
    for text in TEXTS:
        assert before.encode(text) == after.encode(text)


def test_a_turn_ends_and_is_written_as_harmony_has_it(tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    before = gemma(source)
    model_in(source, before, 0)
    list(harmonize(source, out, "mean"))
    after = Tokenizer.load(out)
    assert natural_format(after) == "harmony"
    returns, call, padding = (after.special_id(name) for name in ("<|return|>", "<|call|>", "<|endoftext|>"))
    settings = json.loads((out / "generation_config.json").read_text())
    # Harmony's ends first, then the model's former habits; how its authors sample stays.
    former = json.loads((source / "generation_config.json").read_text())["eos_token_id"]
    assert settings["eos_token_id"] == [returns, call, *former]
    assert (settings["pad_token_id"], settings["top_k"]) == (padding, 64)
    assert HarmonyRenderer(after).stop_ids == (returns, call, *former)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == after.vocab_size
    # The mean of all rows for each new token.
    table = Shards(out).read("model.embed_tokens.weight")
    assert torch.equal(table[returns], table[call])
    # The template writes what the renderer does, for prompts and for training.
    messages = [Message("system", "Be brief."), Message("user", "2 + 2?")]
    assert ChatTemplate(after).prompt_ids(messages) == HarmonyRenderer(after).prompt_ids(messages)
    said = [*messages, Message("assistant", "4", "final"), Message("user", "And 3?")]
    plain = [Message(one.role, one.content) for one in said]
    assert ChatTemplate(after).prompt_ids(plain) == Harmony(after).render_prompt(said)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    chat = [{"role": one.role, "content": one.content} for one in said]
    written = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert written == Harmony(after).render_prompt(said)
    assert theirs.eos_token_id == returns
    assert len(theirs) == after.vocab_size


def test_ids_in_reserve_are_renamed(tmp_path: Path) -> None:
    llama(tmp_path)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    first = max(token["id"] for token in definition["added_tokens"])
    first = max(first, *definition["model"]["vocab"].values()) + 1
    names = [f"<|reserved_special_token_{number}|>" for number in range(3)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, name in enumerate(names):
        definition["added_tokens"].append({"id": first + number, "content": name, "special": True, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    before = Tokenizer.load(tmp_path)
    before.save(tmp_path)
    files = {name: (tmp_path / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    given = harmonized(before, files)
    lacking = [name for name in CONTROL_TOKENS if not before.has_special(name)]
    assert [(token.name, token.id, token.renamed) for token in given.added[:3]] == [
        (name, first + number, names[number]) for number, name in enumerate(lacking[:3])
    ]
    assert [token.id for token in given.added[3:]] == list(
        range(before.vocab_size, before.vocab_size + len(lacking) - 3)
    )
    for name, text in given.files.items():
        (tmp_path / name).write_text(text)
    after = Tokenizer.load(tmp_path)
    assert not any(after.has_special(name) for name in names)
    assert after.vocab_size == before.vocab_size + len(lacking) - 3
    like = {token.name: token.like for token in given.added}
    assert (like["<|start|>"], like["<|message|>"], like["<|end|>"]) == (
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    )


def test_what_cannot_be_harmonized_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    model_in(source, qwen(source), 0)
    list(harmonize(source, out))
    with pytest.raises(UserError, match="has all control tokens of Harmony already"):
        list(harmonize(out, tmp_path / "again"))
    with pytest.raises(UserError, match="out: exists; name another directory with --out"):
        list(harmonize(source, out))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="an adapter; make a whole model of it first: nmoe export"):
        list(harmonize(tmp_path / "adapter", tmp_path / "again"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="a GGUF file; make a checkpoint of it first: nmoe model import"):
        list(harmonize(tmp_path / "x.gguf", tmp_path / "again"))
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="torn"):
        list(harmonize(source, tmp_path / "again"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model", "out", "x.gguf"]
