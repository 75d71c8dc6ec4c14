"""Ranks that divide the experts of the model that they sample."""

from __future__ import annotations

import json

import pytest
from forked_ranks import on_ranks


@pytest.mark.parametrize(("family", "adapts"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_samples_are_to_the_bit_as_of_whole_models(family: str, adapts: bool) -> None:
    said = json.loads(on_ranks(2, "divided_ranks.py", json.dumps([family, adapts])))
    for what in ("1", "12", "0", "after", "score"):
        assert said[f"divided {what}"] == said[f"whole {what}"], what
    assert [len(group) for group in said["divided 12"]] == [1, 2] * 6
    assert [len(group[0][0]) for group in said["whole 12"]] == [4 + i for i in range(12)]
    for divided, whole in zip(said["divided held"], said["whole held"], strict=True):
        assert 0 < sum(divided) * 2 == sum(whole)
