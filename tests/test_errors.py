"""What messages show of values: one line of limited length, whatever the value is."""

from __future__ import annotations

import numpy as np

from nmoe.errors import cut, shown


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError


def test_a_value_is_one_line_of_limited_length() -> None:
    assert shown("a  b\nc") == "'a  b\\nc'"
    assert shown(np.array([[1, 2], [3, 4]])) == "array([[1, 2], [3, 4]])"
    assert shown("x" * 78) == f"'{'x' * 78}'"
    assert shown("x" * 79) == f"'{'x' * 76}..."
    assert shown("x" * 9, characters=10) == "'xxxxxx..."
    assert shown(Unshown()) == "what cannot be shown (RuntimeError)"


def test_a_long_text_ends_in_dots() -> None:
    assert (cut("abcdef", 6), cut("abcdefg", 6)) == ("abcdef", "abc...")
