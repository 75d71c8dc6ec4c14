"""Which differences between two runs' metrics scripts/same_numbers.py prints."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from same_numbers import Figures, compared, differences, read


def test_only_timings_may_differ() -> None:
    before = [{"step": 1, "loss": 0.5, "time_step_s": 1.0, "tokens_per_second": 9.0}]
    assert list(differences(before, [before[0] | {"time_step_s": 2.0, "tokens_per_second": 8.0}])) == []
    assert list(differences(before, [before[0] | {"loss": 0.5 + 1e-12}])) == [
        "loss: 0.5 before, 0.500000000001 after, at step 1"
    ]


def test_every_key_is_named_once_with_its_first_step() -> None:
    before = [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": 1, "b": 1}, {"step": 3, "a": 1, "b": 1}]
    after = [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": 2, "c": 1}]
    assert list(differences(before, after)) == [
        "3 steps before, 2 after",
        "a: 1 before, 2 after, at step 2",
        "b: 1 before, absent after, at step 2",
        "c: absent before, 1 after, at step 2",
    ]


def test_metrics_and_files_of_a_run_are_compared(tmp_path: Path) -> None:
    def figures(name: str, loss: float, time: float, answer: str, weights: bytes) -> Figures:
        run = tmp_path / name
        for directory in ("samples", "checkpoints/latest/critic"):
            (run / directory).mkdir(parents=True)
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "time_step_s": time}) + "\n")
        record = {"answer": answer, "tools": [{"name": "python", "wall_s": time}]}
        (run / "samples/step_000001.jsonl").write_text(json.dumps(record) + "\n")
        (run / "checkpoints/latest/critic/model.safetensors").write_bytes(weights)
        return Figures.read(run)

    before = figures("before", 0.5, 1.0, "103", b"w")
    again = figures("again", 0.5, 2.0, "103", b"w")
    assert again == before, "but for times"
    assert again.line("grpo").split() == before.line("grpo").split()
    assert list(compared({"grpo": before}, {"grpo": again, "base": again})) == []
    after = figures("after", 0.25, 1.0, "301", b"x")
    assert list(compared({"grpo": before, "dpo": before}, {"grpo": after})) == [
        "grpo: loss: 0.5 before, 0.25 after, at step 1",
        "grpo: checkpoints/latest/critic/model.safetensors is another",
        "grpo: samples/step_000001.jsonl is another",
    ]
    kept = tmp_path / "figures.json"
    kept.write_text(json.dumps({"grpo": asdict(before)}))
    assert read(kept) == {"grpo": before}
