"""Checks of many ranks on two and on four; checkpoints of ranks, resumed on another number; files that several ranks write."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from safetensors.torch import save_file

from nmoe.parallel.sharded_files import join
from nmoe.rank_checks.run import CHECKS


# Four ranks run those that need more than two.
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, list(CHECKS)),
        pytest.param(4, ["mesh", "dispatch", "families", "hybrid", "one-expert", "loading"], marks=pytest.mark.long),
    ],
)
def test_ranks_train_as_one_process_does(ranks: int, names: list[str]) -> None:
    said = on_ranks(ranks, "checked_ranks.py", *names)
    assert [line.partition(":")[0] for line in said.splitlines()] == names


def test_offloaded_parts_are_loaded_one_whole_weight_at_a_time_and_train() -> None:
    said, worst = on_ranks(2, "offloaded_ranks.py").splitlines()
    found = re.fullmatch(r"3 models on 2 ranks; the highest peak is (0\.\d\d) of the whole model", said)
    assert found is not None
    # Half of the model, and its largest weight: the embedding or the head, a quarter each.
    assert 0.5 < float(found[1]) < 0.9
    # Sums in another order, in fp32, divided by an epsilon of 1e-3.
    assert float(worst) < 1e-5


def test_what_is_wrong_on_one_rank_is_noticed_on_all() -> None:
    """Also where one process computed for an earlier pair, and is not asked again."""
    said = on_ranks(2, "checked_ranks.py").splitlines()
    for name, where, size in (
        ("a gradient", "the gradient of embedding.weight", r"\d\.\de-0[5-9]"),
        ("a weight that is no number", "embedding.weight", "inf"),
        ("a weight", "embedding.weight", r"\d\.\de-0[5-9]"),
    ):
        line = f"2: {name}, dp_replicate 2, ep 1: {where} is off by {size} from one process, more than 1e-09"
        assert sum(bool(re.fullmatch(line, one)) for one in said) == 2, said
    assert sorted(one for one in said if one.startswith(("0:", "1:"))) == ["0: True"] * 6 + ["1: True"] * 6
    assert sum(one.startswith("asked for something else, where a pass over sequences of (11, 10)") for one in said) == 6


@pytest.mark.long
def test_four_ranks_resume_on_one_two_and_three(tmp_path: Path) -> None:
    saved = [json.loads(on_ranks(ranks, "resumed_ranks.py", "gpt_oss", str(tmp_path))) for ranks in (4, 1, 2, 3)]
    four, *others = saved
    assert four[0]["loss"] != four[1]["loss"]
    for other in others:
        for ours, theirs in zip(four, other, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-9)


def saved(ranks: int, directory: Path, case: str = "works") -> dict[str, Any]:
    """What the first rank says of what the ranks wrote."""
    found: dict[str, Any] = json.loads(on_ranks(ranks, "saving_ranks.py", str(directory), case))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_what_ranks_hold_parts_of_is_written_whole(ranks: int, tmp_path: Path) -> None:
    found = saved(ranks, tmp_path)
    assert found["equal"] == {"model.safetensors": True, "optimizer.safetensors": True}
    # Floats, two bytes each in low precision and eight in double.
    assert found["size"] == 4 * (15 + 4 + 14 + 1 + 6) + 2 * 24 + 8 * 3
    assert found["largest"] == 60, "no more than the largest tensor at a time"
    assert not found["left"]


def test_a_rank_that_cannot_write_is_told_of_by_the_first(tmp_path: Path) -> None:
    assert saved(2, tmp_path, "full") == {"error": "[Errno 28] No space left on device", "left": False}


def test_missing_parts_are_refused(tmp_path: Path) -> None:
    place, out = tmp_path / "parts", tmp_path / "out"
    place.mkdir()
    out.mkdir()
    offsets = {"model.safetensors/a": {"saved_offsets": [2]}}
    notes = {"DCP_SHARDING_INFO": json.dumps(offsets)}
    save_file({"model.safetensors/a": torch.ones(2)}, place / "shard-1.safetensors", notes)
    with pytest.raises(ValueError, match="the parts of a are 2 of its 4 numbers"):
        join(place, {"model.safetensors": ["a"]}, out)
    with pytest.raises(ValueError, match="no rank wrote b of model"):
        join(place, {"model.safetensors": ["a", "b"]}, out)
