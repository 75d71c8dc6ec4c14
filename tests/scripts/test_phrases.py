"""Which expressions scripts/phrases.py finds, and when it objects."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from phrases import PHRASES, WORDS, Phrase, added_lines, risen


def positions(phrase: Phrase, text: str) -> list[str]:
    return [text[start:].split("\n")[0] for start in phrase.matches(text)]


def test_an_expression_is_found_across_lines_and_comment_signs() -> None:
    phrase = Phrase("those of", "", "")
    text = "Those of a\nthose\n    of b\n# those\n# of c\nthoseof thus those often"
    assert positions(phrase, text) == ["Those of a", "those", "those"]


def test_an_allowed_expression_around_it_is_not_counted() -> None:
    phrase = Phrase("places?", "", "", allow=("in places?",))
    assert positions(phrase, "a place,\nin\nplace of\nold_place") == ["place,", "place"]


def test_every_bad_example_has_its_expression_and_no_good_one_has_any() -> None:
    every = (*PHRASES, *WORDS)
    assert [phrase.expression for phrase in every if not [*phrase.matches(phrase.bad)]] == []
    assert [phrase.good for phrase in every if any([*other.matches(phrase.good)] for other in every)] == []


def test_only_an_expression_that_occurs_more_often_is_refused() -> None:
    before = {"those of": {"nmoe": 3, "docs": 2}, "that of": {"nmoe": 1, "docs": 1}}
    now = {"those of": {"nmoe": 2, "docs": 3}, "that of": {"nmoe": 1, "docs": 0}, "told": {"nmoe": 9, "docs": 9}}
    assert risen(before, now) == [("those of", "docs")]


def test_the_added_lines_of_a_patch() -> None:
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,3 @@ f\n@@ -9 +10 @@\n--- a/y.py\n+++ b/y.py\n@@ -4,2 +3,0 @@\n"
    assert added_lines(patch) == {"x.py": {1, 2, 3, 10}, "y.py": set()}
