"""Times experts in a profile: CPU seconds of quantising them once, of sampling, and of a training step; and experts that are held
packed: their bytes, and CPU seconds of sampling.

    python benchmarks/expert_profile.py

The model has the shape of the speedrun's; numerics are exact, as there. Profiles take turns, and the figures are medians of CPU
seconds, which other work on the machine disturbs less than the clock's. `mismatch` is the mean difference between the engine's
log-probabilities and the learner's. Packed experts are of a model in bfloat16 with the widths of a released one, beside the
same model dequantised. Results go to benchmarks/results/expert_profile.json, beside what was measured of the
speedrun with such experts (docs/guides/models.md).
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from machine import machine, versions
from result_files import write_results

from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.checkpoint import export_model, load_model
from nmoe.model.config import ModelConfig
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.types import ExpertWeightsForm, Sampling

RESULTS = Path(__file__).parent / "results/expert_profile.json"
PROFILES = (None, "bf16", "fp8", "nvfp4")
SHAPE = {
    "vocab_size": 400,
    "hidden_size": 96,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "context_tokens": 512,
    "experts": 8,
    "experts_per_token": 2,
    "expert_width": 64,
}
SEQUENCES, SAMPLED, PROMPT, ROUNDS = 256, 32, 16, 3
# Qwen3-30B-A3B's widths, with fewer layers and experts.
WIDE = {
    "vocab_size": 400,
    "hidden_size": 2048,
    "layers": 2,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 128,
    "context_tokens": 512,
    "experts": 16,
    "experts_per_token": 4,
    "expert_width": 768,
}
FORMS: tuple[ExpertWeightsForm, ...] = ("dequantized", "fp8", "nvfp4")
HELD_SEQUENCES, HELD_SAMPLED = (1, 64), 8


def once(profile: str | None) -> dict[str, float]:
    model = Transformer(ModelConfig(**SHAPE)).initialize(0).set_numerics("exact")
    learner = Learner(set_expert_profile(model, profile), OptimizerSection(learning_rate=1e-3), 10, 16_384)
    engine = NativeEngine(model, SEQUENCES)
    learner.publish(engine)
    request = Request(tuple(range(PROMPT)), SEQUENCES, Sampling(SAMPLED, seed=0), "r")
    engine.run(engine.generate(request))  # what is made once, packed weights above all
    start = time.process_time()
    samples = engine.run(engine.generate(request))
    sampled = time.process_time()
    ids = torch.tensor([[*range(PROMPT), *sample.token_ids] for sample in samples])
    length = ids.shape[1] - 1
    scored = (torch.arange(length) >= PROMPT - 1).repeat(SEQUENCES)
    routes = torch.cat([torch.as_tensor(sample.routes)[:length] for sample in samples])
    batch = Batch(
        (length,) * SEQUENCES,
        ids[:, :-1].flatten(),
        ids[:, 1:].flatten(),
        scored_T=scored,
        weights_T=scored / scored.sum(),
        routes_TYK=routes,
    )
    gaps = learner.logprobs(batch).result() - torch.tensor([p for sample in samples for p in sample.logprobs])
    before = time.process_time()
    learner.forward_backward(batch, cross_entropy)
    learner.optim_step()
    trained = time.process_time()
    for moe in model.moe_layers():
        moe.quantise()
    return {
        "sample_s": sampled - start,
        "train_s": trained - before,
        "quantise_s": time.process_time() - trained,
        "mismatch": float(gaps.abs().mean()),
    }


def held_bytes(model: Transformer) -> int:
    """The bytes of the routed experts' projections."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if ".gate_up" in name or ".down" in name}
    return sum(tensor.nbytes for name, tensor in tensors.items() if ".ffn." in name)


def held(models: Mapping[str, Transformer]) -> list[dict[str, Any]]:
    """Bytes and CPU seconds of sampling of each form, which take turns."""
    seconds = {(form, count): list[float]() for form in models for count in HELD_SEQUENCES}
    for _ in range(ROUNDS):
        for form, model in models.items():
            engine = NativeEngine(model, max(HELD_SEQUENCES))
            for count in HELD_SEQUENCES:
                request = Request(tuple(range(PROMPT)), count, Sampling(HELD_SAMPLED, seed=0), "r")
                engine.run(engine.generate(request))
                start = time.process_time()
                engine.run(engine.generate(request))
                seconds[form, count].append(time.process_time() - start)
    whole = held_bytes(models["dequantized"])
    rows = []
    for form, model in models.items():
        times = {f"sample_{count}_s": round(statistics.median(seconds[form, count]), 3) for count in HELD_SEQUENCES}
        rows.append({"form": form, "bytes_of_bf16": round(held_bytes(model) / whole, 4), **times})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        export_model(Transformer(ModelConfig(**WIDE)).to(torch.bfloat16).initialize(0), Path(directory, "wide"))
        packed = held(
            {form: load_model(Path(directory, "wide"), torch.bfloat16, expert_weights=form) for form in FORMS}
        )
    rounds = [{profile: once(profile) for profile in PROFILES} for _ in range(ROUNDS)]
    rows = []
    for profile in PROFILES:
        figures = {key: [one[profile][key] for one in rounds] for key in rounds[0][profile]}
        medians = {key: round(statistics.median(values), 5) for key, values in figures.items()}
        rows.append({"profile": profile, **medians})
        print(json.dumps(rows[-1]), flush=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measured = {"date": str(date.today()), "machine": machine(), "versions": versions("torch"), "rows": rows}
    write_results(RESULTS, kept | {"cost": measured, "held": packed})


if __name__ == "__main__":
    main()
