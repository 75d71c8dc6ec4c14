"""Has lm-evaluation-harness judge one checkpoint by three routes, which have to agree on every item:

    python .ci/lm_eval_routes.py [DATA]

over HTTP (`local-completions` with the server's tokenizer, of `nmoe serve`), in this process (nmoe.eval.lm_eval_model), and by
transformers (`hf`). DATA holds arc_easy.jsonl and lambada_openai.jsonl (default: ../shared/eval_data/core); fifty items of each are
asked, whose decisions have to be the same and whose log-probabilities differ by at most 1e-4 from route to route.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from math import inf
from pathlib import Path
from typing import Any

import lm_eval
from check import hold
from lm_eval.tasks import TaskManager
from served import ROOT, draw, serving

from nmoe.eval.lm_eval_model import NmoeLM

ITEMS, CONTEXT = 50, 1024
TASKS = {
    "arc_easy": "output_type: multiple_choice\ndoc_to_text: '{{query}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: gold\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "lambada_openai": "output_type: loglikelihood\ndoc_to_text: '{{context}}'\ndoc_to_target: ' {{continuation}}'\n"
    "metric_list: [{metric: acc}, {metric: perplexity}]\n",
}


def evaluated(model: Any, tasks: Path, **settings: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    names = [f"own_{name}" for name in TASKS]
    found = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0, **settings)
    assert found is not None
    return dict(found["samples"])


def main(data: str = str(ROOT.parent / "shared/eval_data/core")) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        directory = draw(place / "drawn", context_tokens=CONTEXT)
        for name, rest in TASKS.items():
            lines = (Path(data) / f"{name}.jsonl").read_text().splitlines()[:ITEMS]
            (place / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
            files = f"{{data_files: {{test: {place / name}.jsonl}}}}"
            text = f"task: own_{name}\ndataset_path: json\ndataset_kwargs: {files}\ntest_split: test\n{rest}"
            (place / f"{name}.yaml").write_text(text)
        with serving(directory, "--numerics", "exact", "--threads", "1") as client:
            url = str(client.http.base_url).rstrip("/")
            arguments = f"model=tiny,base_url={url}/v1/completions,tokenizer_backend=remote,tokenized_requests=True"
            routes = {
                "HTTP": evaluated(
                    "local-completions", place, model_args=f"{arguments},max_length={CONTEXT},batch_size=8"
                ),
                "in process": evaluated(NmoeLM(directory, "cpu"), place),
                "hf": evaluated("hf", place, model_args=f"pretrained={directory},dtype=float32,device=cpu"),
            }
    figures: dict[str, tuple[float, float, float]] = {}
    for one, other in itertools.combinations(routes, 2):
        same, largest, compared = 0, 0.0, 0
        for name, samples in routes[one].items():
            for a, b in zip(samples, routes[other][name], strict=True):
                assert a["doc_hash"] == b["doc_hash"]
                pairs = list(zip(a["filtered_resps"], b["filtered_resps"], strict=True))
                largest = max(largest, *(abs(float(x[0]) - float(y[0])) for x, y in pairs))
                compared += len(pairs)
                decided = [name for name in a["metrics"] if name.startswith("acc")]
                same += all(x[1] == y[1] for x, y in pairs) and all(a[name] == b[name] for name in decided)
        figures[f"{one} and {other}: items that are decided alike"] = (same, len(TASKS) * ITEMS, len(TASKS) * ITEMS)
        figures[f"{one} and {other}: log-probabilities compared"] = (compared, 4 * ITEMS, inf)
        figures[f"{one} and {other}: their largest difference"] = (largest, 0.0, 1e-4)
    hold(figures, [])


if __name__ == "__main__":
    main(*sys.argv[1:])
