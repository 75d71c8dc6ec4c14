"""Model checkpoints: what is saved comes back to the bit; what is broken is refused by file, tensor and remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe.errors import UserError
from nmoe.model.checkpoint import load_model, load_weights, save_model
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer

MakeModel = Callable[..., Transformer]


def logits(model: Transformer) -> Tensor:
    ids = torch.arange(20) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(20), PackedAttention([20], ids.device), RouterTrace()))


@pytest.mark.parametrize("changes", [{}, {"experts": 0, "tie_embeddings": True}, {"router_scores": "sigmoid"}], ids=str)
def test_a_saved_model_comes_back_to_the_bit(tmp_path: Path, tiny_model: MakeModel, changes: dict[str, Any]) -> None:
    model = tiny_model(rope_theta=77.0, **changes)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    # The router biases are part of it, the rotary tables are not but are there.
    assert torch.equal(logits(loaded), logits(model))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_weights_load_into_a_model_that_is_there(tmp_path: Path, tiny_model: MakeModel) -> None:
    saved, model = tiny_model(0), tiny_model(1)
    save_model(saved, tmp_path)
    parameter = model.embedding.weight
    load_weights(model, tmp_path)
    assert model.embedding.weight is parameter  # in place: an optimizer holds on to it
    assert torch.equal(logits(model), logits(saved))


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        raw = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))

    return edit


def edit_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return edit


def cut(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:-10])


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(content) and None


NARROW = torch.zeros(32)
COMMON = [
    (remove("config.json"), r"config\.json: no such file; a checkpoint is a directory with"),
    (remove("model.safetensors"), r"model\.safetensors: no such file"),
    (write("config.json", b"{"), r"config\.json: cannot be read"),
    (write("config.json", b"\xff\xfe"), r"config\.json: cannot be read"),
    (write("config.json", b"[]"), r"config\.json: not a JSON object"),
    (
        edit_config(model_type="qwen3moe"),
        r"config\.json: model_type = 'qwen3moe' is not a family nmoe knows; the nearest name is 'qwen3_moe', and it knows .*llama",
    ),
    (
        # Not imported, although registries find objects of modules by such names.
        edit_config(model_type="shutil:rmtree"),
        r"config\.json: model_type = 'shutil:rmtree' is not a family nmoe knows; the nearest name is ",
    ),
    (edit_config(model_type=None), r"config\.json: model_type = None"),
    (cut("model.safetensors"), r"model\.safetensors: torn or not a safetensors file"),
    (write("model.safetensors", b""), r"model\.safetensors: torn or not"),
]
OWN = [
    (edit_config(wings=2, beak=1), r"config\.json: unknown keys beak, wings"),
    (edit_config(hidden_size=None, layers=None), r"config\.json: missing keys hidden_size, layers"),
    (edit_config(kv_heads=3), r"config\.json: kv_heads = 3: must divide heads = 4"),
    (edit_config(heads="4"), r'config\.json: heads = "4"'),
    (
        edit_tensors(lambda t: t.pop("blocks.1.ffn.down")),
        r"model\.safetensors: not a checkpoint of the architecture in its config\.json: blocks\.1\.ffn\.down is missing$",
    ),
    (
        edit_tensors(lambda t: t.update({"blocks.9.wing": NARROW})),
        r"model\.safetensors: .*: blocks\.9\.wing is not part of this architecture$",
    ),
    (
        edit_tensors(lambda t: t.update({"embedding.weight": NARROW})),
        r"model\.safetensors: .*: embedding\.weight has shape \[32\], config\.json asks for \[48, 32\]$",
    ),
    (edit_config(layers=5), r"model\.safetensors: .* is missing; .*; and \d+ more$"),
    *(
        (edit_config(**{name: 10**9}), rf"config\.json: {name} = 1000000000: must be at most {most}$")
        for name, most in (("layers", 4096), ("context_tokens", 2**25), ("experts", 2**16), ("shared_experts", 2**16))
    ),
    *(
        (edit_config(**{name: 2**31 - 1}), r"config\.json: \d layers .* are more than the memory of cpu can hold: ")
        for name in ("hidden_size", "vocab_size", "expert_width")
    ),
    (edit_config(vocab_size=10**18), r"config\.json: vocab_size = 1000000000000000000: must be at most 2147483647$"),
    (edit_config(tie_embeddings=True), r"model\.safetensors: .*: head\.weight is not part of this architecture$"),
]


@pytest.mark.parametrize(("damage", "message"), COMMON + OWN)
def test_what_is_broken_is_refused(
    tmp_path: Path, tiny_model: MakeModel, damage: Callable[[Path], None], message: str
) -> None:
    save_model(tiny_model(), tmp_path)
    load_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        load_model(tmp_path)
    assert str(raised.value).startswith(str(tmp_path))
    assert raised.value.exit_code == 2


def save_as_qwen3_moe(directory: Path) -> None:
    """The smallest checkpoint of the family, by the names and shapes of its public layout."""
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 10,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "max_position_embeddings": 32,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    shapes = {"model.embed_tokens": (10, 8), "model.norm": (8,), "lm_head": (10, 8)}
    for layer in range(2):
        attention = {
            "q_proj": (12, 8),
            "k_proj": (6, 8),
            "v_proj": (6, 8),
            "o_proj": (8, 12),
            "q_norm": (6,),
            "k_norm": (6,),
        }
        expert = {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
            "mlp.gate": (3, 8),
        }
        parts |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        parts |= {f"mlp.experts.{e}.{name}": shape for e in range(3) for name, shape in expert.items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    generator = torch.Generator().manual_seed(0)
    save_file(
        {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config))


QWEN3_MOE = [
    (edit_config(num_experts=None, hidden_size=None), r"config\.json: missing keys hidden_size, num_experts$"),
    (edit_config(rope_theta="big"), r"config\.json: rope_theta = 'big'"),
    (edit_config(num_key_value_heads=0), r"config\.json: kv_heads = 0"),
    (edit_config(mlp_only_layers=7), r"config\.json: mlp_only_layers = 7 is not a list of whole numbers"),
    (edit_config(mlp_only_layers=[1]), r"config\.json: intermediate_size = 0: dense_layers need the width"),
    (edit_config(decoder_sparse_step=0), r"config\.json: decoder_sparse_step = 0"),
    (edit_config(rope_scaling={"rope_type": "yarn"}), r"config\.json: missing keys factor"),
    (edit_config(rope_scaling=3), r"config\.json: rope_scaling = 3 is not a table"),
    (
        edit_config(rope_parameters={"rope_type": "proportional", "rope_theta": 1.0}),
        r"config\.json: qwen3_moe: rope type 'proportional' is not supported",
    ),
    (edit_config(attention_bias=True), r"model\.safetensors: .* model\.layers\.0\.self_attn\.q_proj\.bias is missing"),
    (edit_config(attention_bias="yes"), r"config\.json: attention_bias = 'yes' is neither true nor false"),
    (edit_config(quantization_config={"quant_method": "awq"}), r"config\.json: qwen3_moe: quantization_config.* 'awq'"),
    (edit_config(hidden_act="gelu"), r"config\.json: qwen3_moe: hidden_act = 'gelu'"),
    (
        edit_tensors(lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight")),
        r"model\.safetensors: .* model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight is missing$",
    ),
    (
        edit_tensors(lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(6, 4)})),
        r"model\.safetensors: .* model\.layers\.0\.self_attn\.k_proj\.weight has shape \[6, 4\], config\.json asks for \[6, 8\]$",
    ),
    (
        edit_config(num_hidden_layers=1),
        r"model\.safetensors: .* model\.layers\.1\.input_layernorm\.weight is not part of this architecture; ",
    ),
    (
        edit_config(num_experts=2),
        r"model\.safetensors: .* model\.layers\.0\.mlp\.gate\.weight has shape \[3, 8\], config\.json asks for \[2, 8\]; ",
    ),
]


@pytest.mark.parametrize(("damage", "message"), COMMON + QWEN3_MOE)
def test_what_is_broken_in_a_foreign_checkpoint_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    save_as_qwen3_moe(tmp_path)
    load_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        load_model(tmp_path)
    assert str(raised.value).startswith(str(tmp_path))


def test_a_foreign_checkpoint_becomes_an_own_one(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "own").mkdir()
    save_as_qwen3_moe(tmp_path / "foreign")
    model = load_model(tmp_path / "foreign")
    theirs = load_file(tmp_path / "foreign" / "model.safetensors")
    assert torch.equal(model.moe_layers()[1].gate_up[2, :, 4:], theirs["model.layers.1.mlp.experts.2.up_proj.weight"].T)
    save_model(model, tmp_path / "own")
    assert torch.equal(logits(load_model(tmp_path / "own")), logits(model))


def test_a_tied_head_saved_all_the_same_and_tables_of_old_versions_say_nothing(tmp_path: Path) -> None:
    save_as_qwen3_moe(tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    edit_tensors(lambda t: t.update(old))(tmp_path)
    untied = load_model(tmp_path)
    edit_config(tie_word_embeddings=True)(tmp_path)
    with pytest.raises(UserError, match=r"lm_head\.weight is another tensor; set tie_word_embeddings to false"):
        load_model(tmp_path)
    edit_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(tmp_path)
    tied = load_model(tmp_path)
    assert untied.head is not None
    assert tied.head is None
    assert torch.equal(tied.embedding.weight, untied.embedding.weight)
    assert not torch.equal(tied.embedding.weight, untied.head.weight)
