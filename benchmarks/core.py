"""Decides CORE-18 with a model of random weights, by nmoe and by a second implementation.

    python benchmarks/core.py            on ../shared/eval_data, or on the core/ below $NMOE_DATASETS

At most 500 items of a set, all of which tests/core_reference.py decides, too. A set is within chance where the baseline lies in the
95% interval of its accuracy. Random weights continue nothing correctly, so that on sets of language modelling the two could only
agree that all is wrong. These are decided once more, after a few steps of training on their texts. Each set is written to
benchmarks/results/core.json when it is done, and not decided again by the next call; remove the file to measure anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine, versions
from result_files import write_results

from nmoe.eval.core import CoreSet, decisions, find_sets, prompts, read_set
from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.model.policy import load_policy
from nmoe.model.transformer import Transformer
from nmoe.statistics import binomial_interval
from nmoe.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from core_reference import reference
from real_benchmarks import DATA

RESULTS = Path(__file__).parent / "results/core.json"
ITEMS, STEPS = 500, 400

Row = dict[str, Any]
Sets = Mapping[CoreSet, Sequence[Mapping[str, Any]]]
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "intermediate_size": 96,
}


def decided(directory: Path, one: CoreSet, items: Sequence[Mapping[str, Any]]) -> Row:
    """Both implementations' decisions on every item of a set, with the model in `directory`."""
    model, tokenizer = load_policy(directory)[0].requires_grad_(False), Tokenizer.load(directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    hub = transformers.AutoTokenizer.from_pretrained(directory)
    began = time.process_time()
    found = decisions(model, tokenizer, one, items)
    seconds = time.process_time() - began
    differing = sum(reference(theirs, hub, one, items, place) != right for place, right in enumerate(found))
    interval = binomial_interval(sum(found), len(items))
    return {
        "set": one.name,
        "shots": one.shots,
        "items": len(items),
        "right": sum(found),
        "baseline": one.baseline,
        "centred": one.centred(sum(found) / len(items)),
        "within_chance": interval.low <= one.baseline <= interval.high,
        "differing": differing,
        "cpu_seconds": round(seconds, 2),
    }


def teach(directory: Path, encode: Callable[[str], list[int]], read: Sets, steps: int) -> None:
    """Trains the model in `directory` on the few-shot texts of these sets, with their answers."""
    texts = [prompts(one, items, place)[-1] for one, items in read.items() for place in range(len(items))]
    ids_T = torch.tensor(list(chain.from_iterable(map(encode, texts))))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids_T) - 256, (8,), generator=generator).tolist()
        batch = torch.stack([ids_T[start : start + 256] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"taught: loss {loss.item():.3f}", file=sys.stderr)
    model.save_pretrained(directory)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ.setdefault("NMOE_DATASETS", str(DATA))
    read = {one: read_set(one, path, ITEMS) for one, path in find_sets().items()}
    texts = [str(text) for item in chain.from_iterable(read.values()) for text in item.values()]
    tokenizer = Tokenizer.train(texts, 2048)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_tokens=2048, tie_embeddings=True, **SHAPE)
    model = Transformer(config).initialize(0)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows: dict[str, list[Row]] = {kind: kept.get(kind, []) for kind in ("random_weights", "taught")}

    def decide(kind: str, directory: Path, sets: Sets) -> None:
        for one, items in sets.items():
            if one.name not in {row["set"] for row in rows[kind]}:
                rows[kind].append(decided(directory, one, items))
                print(rows[kind][-1], file=sys.stderr, flush=True)
                write_results(RESULTS, summary(sum(map(torch.numel, model.parameters())), rows))

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        export_model(model, directory)
        tokenizer.save(directory)
        decide("random_weights", directory, read)
        continued = {one: items for one, items in read.items() if one.kind == "language_modeling"}
        if len(rows["taught"]) < len(continued):
            teach(directory, tokenizer.encode, continued, STEPS)
            decide("taught", directory, continued)


def summary(parameters: int, rows: Mapping[str, list[Row]]) -> dict[str, Any]:
    random = rows["random_weights"]
    both = [*random, *rows["taught"]]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine() | versions("torch", "transformers"),
        "parameters": parameters,
        "decisions": sum(row["items"] for row in both),
        "differing": sum(row["differing"] for row in both),
        "sets": len(random),
        "within_chance": sum(row["within_chance"] for row in random),
        "score": sum(row["centred"] for row in random) / len(random),
        **rows,
    }


if __name__ == "__main__":
    main()
