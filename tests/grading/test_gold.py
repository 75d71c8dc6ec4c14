"""Gold answers out of the answer fields that the known datasets have."""

from __future__ import annotations

import pytest

from nmoe.errors import UserError
from nmoe.grading.gold import extract_gold


@pytest.mark.parametrize(
    ("extractor", "field", "gold"),
    [
        ("none", " 42 \n", "42"),
        ("gsm8k_hash", "6 * 3 = <<6*3=18>>18 eggs\n#### 1,018", "1,018"),
        ("gsm8k_hash", "#### 3 was wrong\n#### -4\n", "-4"),
        ("boxed", r"The area is $\boxed{\frac{\sqrt{3}}{2}}$.", r"\frac{\sqrt{3}}{2}"),
        ("last_number", "It was 17, now 18.", "18"),
    ],
)
def test_extract_gold(extractor: str, field: str, gold: str) -> None:
    assert extract_gold(extractor, field) == gold


@pytest.mark.parametrize(
    ("extractor", "field", "reason"),
    [
        ("none", "  ", "finds no text"),
        ("gsm8k_hash", "18", "finds no '#### ANSWER' in '18'"),
        ("gsm8k_hash", "18 ####", "finds no '#### ANSWER'"),
        ("boxed", r"\boxed{5", r"finds no \\boxed\{ANSWER\} that closes"),
        ("boxed", r"\boxed{ }", "finds no"),
        ("last_number", "five " * 100, r"'\.\.\.e five .{60,70}'; mend the record"),
    ],
)
def test_a_gold_that_is_not_there_is_an_error(extractor: str, field: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        extract_gold(extractor, field)
