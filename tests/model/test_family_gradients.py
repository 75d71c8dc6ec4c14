"""The gradient of every weight against transformers': what trains is the same function of the checkpoint, not only what it says."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from family_cases import CASES
from family_cases.case import VOCAB, Case
from transformers import AutoModelForCausalLM

from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.logprobs import head_logprobs
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention

LENGTHS = [2, 40, 17, 64]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_a_token_loss_equal_transformers(tmp_path: Path, case: Case) -> None:
    reference = case.make()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]

    loss = torch.zeros(())
    for ids in sequences:
        logits = reference(ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        loss = loss + F.cross_entropy(logits, ids[1:], reduction="sum")
    loss.backward()

    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    states = model(torch.cat(sequences), positions, PackedAttention(LENGTHS, positions.device), RouterTrace())
    spans = zip(states.split(LENGTHS), sequences, strict=True)
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
