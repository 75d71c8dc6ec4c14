"""A checkpoint of four ranks goes on with any other number of them, in fp64."""

import json
from pathlib import Path

import pytest
from forked_ranks import on_ranks


@pytest.mark.long
def test_four_ranks_resume_on_one_two_and_three(tmp_path: Path) -> None:
    saved = [json.loads(on_ranks(ranks, "resumed_ranks.py", "gpt_oss", str(tmp_path))) for ranks in (4, 1, 2, 3)]
    four, *others = saved
    assert four[0]["loss"] != four[1]["loss"]
    for other in others:
        for ours, theirs in zip(four, other, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-9)
