"""CORE's rules a second time, written from their description: jinja templates, transformers, one padded batch for each item."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import torch

from nmoe.eval.core import CoreSet

SHOTS = "{%- for shot in shots -%}\n"
TEMPLATES = {
    "multiple_choice": SHOTS
    + "{{ shot.query }}{{ sep }}{{ shot.choices[shot.gold] }}\n\n{% endfor -%}\n{{ item.query }}{{ sep }}{{ option }}",
    "schema": SHOTS
    + "{{ shot.context_options[shot.gold] }}{{ sep }}{{ shot.continuation }}\n\n{% endfor -%}\n"
    + "{{ option }}{{ sep }}{{ item.continuation }}",
    "language_modeling": SHOTS
    + "{{ shot.context | trim }}{{ sep }}{{ shot.continuation }}\n\n{% endfor -%}\n{{ item.context | trim }}{{ sep }}{{ option }}",
}


def reference(model: Any, tokenizer: Any, one: CoreSet, items: Sequence[Mapping[str, Any]], place: int) -> bool:
    """The decision on one item."""
    item, shots = items[place], []
    if one.shots:
        numbers = list(range(len(items)))
        numbers.remove(place)
        shots = [items[number] for number in random.Random(1234 + place).sample(numbers, one.shots)]
    options = item.get("choices") or item.get("context_options") or ["", item["continuation"]]
    template = jinja2.Template(TEMPLATES[one.kind])
    texts = [template.render(shots=shots, sep=one.delimiter, item=item, option=option) for option in options]
    if one.kind == "language_modeling":
        texts[0] = texts[0].strip()
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    rows = [[bos, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
    if one.kind == "schema":
        same = 0
        while len({row[-1 - same] for row in rows}) == 1:
            same += 1
        starts = [len(row) - same for row in rows]
    else:
        same = 0
        while same < min(map(len, rows)) and len({row[same] for row in rows}) == 1:
            same += 1
        starts = [same] * len(rows)
    longest = model.config.max_position_embeddings
    starts = [max(1, start - max(0, len(row) - longest)) for start, row in zip(starts, rows, strict=True)]
    rows = [row[-longest:] for row in rows]
    padded = torch.tensor([row + [bos] * (max(map(len, rows)) - len(row)) for row in rows])
    with torch.no_grad():
        logits = model(padded).logits
    if one.kind == "language_modeling":
        best = logits[1].argmax(-1)[starts[1] - 1 : len(rows[1]) - 1]
        return bool(best.tolist() == rows[1][starts[1] :])
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), padded[:, 1:], reduction="none")
    means = [losses[n, start - 1 : len(rows[n]) - 1].mean().item() for n, start in enumerate(starts)]
    # Of the options "C" and "Cu" the first has no token of its own, and so no mean. nanochat's NaN wins where it comes first.
    means = [math.inf if math.isnan(mean) else mean for mean in means]
    return bool(min(range(len(means)), key=means.__getitem__) == item["gold"])
