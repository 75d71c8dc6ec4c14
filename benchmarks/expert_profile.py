"""Times experts in a profile: CPU seconds of quantising them once, of sampling, and of a training step.

    python benchmarks/expert_profile.py

The model has the shape of the speedrun's; numerics are exact, as there. Profiles take turns, and the figures are medians of CPU
seconds, which other work on the machine disturbs less than the clock's. `mismatch` is the mean difference between the engine's
log-probabilities and the learner's. Results go to benchmarks/results/expert_profile.json, beside what was measured of the
speedrun with such experts (docs/guides/models.md).
"""

from __future__ import annotations

import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from machine import machine, versions
from result_files import write_results

from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import cross_entropy
from nmoe.model.config import ModelConfig
from nmoe.model.precision import set_expert_profile
from nmoe.model.transformer import Transformer
from nmoe.types import Sampling

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


def main() -> None:
    torch.set_num_threads(1)
    rounds = [{profile: once(profile) for profile in PROFILES} for _ in range(ROUNDS)]
    rows = []
    for profile in PROFILES:
        figures = {key: [one[profile][key] for one in rounds] for key in rounds[0][profile]}
        medians = {key: round(statistics.median(values), 5) for key, values in figures.items()}
        rows.append({"profile": profile, **medians})
        print(json.dumps(rows[-1]), flush=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measured = {"date": str(date.today()), "machine": machine(), "versions": versions("torch"), "rows": rows}
    write_results(RESULTS, kept | {"cost": measured})


if __name__ == "__main__":
    main()
