"""Every family against transformers: packed batches, one sequence, cached decode, export, and the gradient of every weight."""

import asyncio
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from family_cases import CASES
from family_cases.case import VOCAB, Case, mean_entropy
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.model.checkpoint import export_model, load_model, read_config
from nmoe.model.families import FAMILIES, family_of
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.types import Sample, Sampling

LENGTHS = [5, 1, 17, 30, 9, 64, 17]


@dataclass(repr=False)
class Checkpoint:
    case: Case
    reference: PreTrainedModel
    directory: Path
    model: Transformer

    @torch.no_grad()
    def reference_logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.reference(ids.unsqueeze(0), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    reference = request.param.make()
    directory = tmp_path_factory.mktemp(request.param.name)
    reference.save_pretrained(directory)
    return Checkpoint(request.param, reference, directory, load_model(directory))


def random_sequences(lengths: list[int], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def packed_logits(model: Transformer, sequences: list[Tensor]) -> Tensor:
    lengths = [len(ids) for ids in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    attend = PackedAttention(lengths, positions.device)
    return model.logits(model(torch.cat(sequences), positions, attend, RouterTrace()))


def test_a_packed_batch_of_ragged_lengths_has_transformers_logits(checkpoint: Checkpoint) -> None:
    sequences = random_sequences(LENGTHS)
    theirs = torch.cat([checkpoint.reference_logits(ids) for ids in sequences])
    assert mean_entropy(theirs) <= 0.5 * math.log(VOCAB)
    torch.testing.assert_close(packed_logits(checkpoint.model, sequences), theirs, rtol=0, atol=1e-4)


def test_one_whole_sequence_has_transformers_logits(checkpoint: Checkpoint) -> None:
    (ids,) = random_sequences([64], seed=2)
    theirs = checkpoint.reference_logits(ids)
    torch.testing.assert_close(packed_logits(checkpoint.model, [ids]), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_cached_decode_has_transformers_logprobs(checkpoint: Checkpoint, temperature: float) -> None:
    prompts = random_sequences([3, 20, 33], seed=3)
    requests = [
        Request(tuple(ids.tolist()), 2, Sampling(30, temperature=temperature, seed=i), f"r{i}")
        for i, ids in enumerate(prompts)
    ]
    engine = NativeEngine(checkpoint.model, 4)  # fewer rows than samples: some begin while others run

    async def everyone() -> list[list[Sample]]:
        return await asyncio.gather(*map(engine.generate, requests))

    for request, samples in zip(requests, engine.run(everyone()), strict=True):
        for sample in samples:
            assert len(sample.token_ids) == 30
            ids = torch.tensor([*request.prompt_ids, *sample.token_ids])
            logits = checkpoint.reference_logits(ids[:-1])[len(request.prompt_ids) - 1 :]
            if temperature == 0:
                assert sample.token_ids == logits.argmax(-1).tolist()
                continue
            theirs = (logits / temperature).log_softmax(-1).gather(-1, ids[-30:].unsqueeze(-1)).squeeze(-1)
            ours = torch.tensor(sample.logprobs)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000], ids=["single", "sharded"])
def test_an_export_is_the_checkpoint_it_came_from(checkpoint: Checkpoint, tmp_path: Path, shard_bytes: int) -> None:
    export_model(checkpoint.model, tmp_path, shard_bytes)
    files = {path.name for path in tmp_path.iterdir()}
    assert ("model.safetensors.index.json" in files) == (shard_bytes == 20_000)
    if shard_bytes == 20_000:
        assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
        assert all(path.stat().st_size < 30_000 for path in tmp_path.glob("*.safetensors"))
    theirs, ours = stored_tensors(checkpoint.directory), stored_tensors(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    # Back in transformers: the same settings, and logits equal to the bit.
    reloaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(reloaded) is checkpoint.case.model
    (ids,) = random_sequences([64], seed=4)
    with torch.no_grad():
        assert torch.equal(reloaded(ids.unsqueeze(0)).logits[0], checkpoint.reference_logits(ids))
    # Back in nmoe.
    model = load_model(tmp_path)
    assert model.config == checkpoint.model.config
    for name, tensor in checkpoint.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_the_released_form_of_a_configuration_is_the_same_decoder(checkpoint: Checkpoint, tmp_path: Path) -> None:
    raw = json.loads((checkpoint.directory / "config.json").read_text())
    for key, value in checkpoint.case.released.items():
        if value is None:
            raw.pop(key, None)
        else:
            raw[key] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path)[1] == checkpoint.model.config
    # That transformers reads it the same way is what makes the test's form a right one.
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.rope_parameters.items() >= checkpoint.case.config.rope_parameters.items()


def test_token_ids_and_generation_settings_are_carried_along(checkpoint: Checkpoint, tmp_path: Path) -> None:
    export_model(checkpoint.model, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(checkpoint.case.config, name), name
    written, read = (
        json.loads((directory / "generation_config.json").read_text()) for directory in (tmp_path, checkpoint.directory)
    )
    assert written == read


def test_entries_fill_every_parameter_exactly_once(checkpoint: Checkpoint) -> None:
    config = checkpoint.model.config
    family = family_of(config)
    assert family is FAMILIES.get(checkpoint.case.config.model_type)
    with torch.device("meta"):
        names = {name for name, _ in Transformer(config).named_parameters()}
    times = {name: torch.zeros(tensor.shape) for name, tensor in checkpoint.model.state_dict().items()}
    for entry in family.entries(config):
        part = times[entry.ours][entry.index]
        part += 1
        assert entry.write(part).shape == entry.shape, entry.theirs
        assert entry.read(entry.write(part)).shape == part.shape, entry.theirs
    assert {name for name, tensor in times.items() if (tensor == 1).all()} >= names
    assert all((tensor == tensor.flatten()[0]).all() and tensor.max() <= 1 for tensor in times.values())


GRADIENT_LENGTHS = [2, 40, 17, 64]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_a_token_loss_equal_transformers(tmp_path: Path, case: Case) -> None:
    reference = case.make()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(VOCAB, (length,), generator=generator) for length in GRADIENT_LENGTHS]

    loss = torch.zeros(())
    for ids in sequences:
        logits = reference(ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        loss = loss + F.cross_entropy(logits, ids[1:], reduction="sum")
    loss.backward()

    positions = torch.cat([torch.arange(length) for length in GRADIENT_LENGTHS])
    states = model(torch.cat(sequences), positions, PackedAttention(GRADIENT_LENGTHS, positions.device), RouterTrace())
    spans = zip(states.split(GRADIENT_LENGTHS), sequences, strict=True)
    rows, targets = zip(*((x[:-1], ids[1:]) for x, ids in spans), strict=True)
    ours = -head_logprobs(torch.cat(rows), model.head_weight, torch.cat(targets))[0].sum()
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)

    # A checkpoint maps gradients as it maps weights, for it only reorders numbers: transformers reads ours as its own.
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
        for buffer in (moe.router.bias for moe in model.moe_layers()):
            buffer.zero_()
    (tmp_path / "gradients").mkdir()
    export_model(model, tmp_path / "gradients")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "gradients", attn_implementation="eager")
    gradients = dict(read.named_parameters())
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None, name
        largest = parameter.grad.abs().max()
        assert largest > 0, name
        error = (gradients[name] - parameter.grad).abs().max() / largest
        assert error <= 1e-4, (name, float(error))
