"""The checks of many ranks, on two and on four: one start of ranks for each number, since a start costs seconds."""

import re

import pytest
from forked_ranks import on_ranks

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


def test_what_is_wrong_on_one_rank_is_noticed_on_all() -> None:
    """Also where one process computed for an earlier pair, and is not asked again."""
    said = on_ranks(2, "damaged_ranks.py").splitlines()
    for name, where, size in (
        ("a gradient", "the gradient of embedding.weight", r"\d\.\de-0[5-9]"),
        ("a weight that is no number", "embedding.weight", "inf"),
        ("a weight", "embedding.weight", r"\d\.\de-0[5-9]"),
    ):
        line = f"2: {name}, dp_replicate 2, ep 1: {where} is off by {size} from one process, more than 1e-09"
        assert sum(bool(re.fullmatch(line, one)) for one in said) == 2, said
    assert sorted(one for one in said if one.startswith(("0:", "1:"))) == ["0: True"] * 6 + ["1: True"] * 6
    assert sum(one.startswith("asked for something else, where a pass over sequences of (11, 10)") for one in said) == 6
