r"""CORE-18 of a model of random weights: near every baseline, as it should be, and decided as a second implementation decides.

    NMOE_DATASETS=../shared/eval_data python benchmarks/core.py > benchmarks/results/core.json

`--items` bounds the items of a set, `--checked` those of them that tests/core_reference.py decides, too. A set is within chance
where the baseline lies in the 95% interval of its accuracy.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import transformers

from nmoe.eval.core import decisions
from nmoe.eval.core_sets import find_sets, read_set
from nmoe.model.checkpoint import export_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.statistics import wilson
from nmoe.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from core_reference import reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--checked", type=int, default=500)
    asked = parser.parse_args()
    read = {one: read_set(one, path, asked.items) for one, path in find_sets().items()}
    texts = [str(text) for item in chain.from_iterable(read.values()) for text in item.values()]
    tokenizer = Tokenizer.train(texts, 2048)
    shape: dict[str, Any] = {
        "hidden_size": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 12,
        "intermediate_size": 96,
    }
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_tokens=2048, tie_embeddings=True, **shape)
    model = Transformer(config).initialize(0).requires_grad_(False)
    with tempfile.TemporaryDirectory() as directory:
        export_model(model, Path(directory))
        tokenizer.save(Path(directory))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        hub = transformers.AutoTokenizer.from_pretrained(directory)
    sets = []
    for one, items in read.items():
        began = time.process_time()
        found = decisions(model, tokenizer, one, items)
        seconds = time.process_time() - began
        checked = range(min(asked.checked, len(items)))
        differing = sum(reference(theirs, hub, one, items, place) != found[place] for place in checked)
        interval = wilson(sum(found), len(items))
        within = interval.low <= one.baseline <= interval.high
        row = {"set": one.name, "items": len(items), "accuracy": sum(found) / len(items), "baseline": one.baseline}
        sets.append(row | {"within": within, "checked": len(checked), "differing": differing, "cpu_seconds": seconds})
        print(sets[-1], file=sys.stderr, flush=True)
    parameters = sum(weight.numel() for weight in model.parameters())
    within_chance = sum(bool(row["within"]) for row in sets)
    print(json.dumps({"parameters": parameters, "sets": sets, "within_chance": within_chance}, indent=1))


if __name__ == "__main__":
    main()
