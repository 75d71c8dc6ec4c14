"""Which part of a text is taken for the answer, and that no text makes the search slow or raise."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.grading.extraction import Extraction, from_final, from_response, last_boxed, last_number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{5} or rather \boxed{6}", "6"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ {{7}} }", "{{7}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"$\boxed 5$", "5"),
        (r"x = 1 \\\boxed{5}", "5"),
        (r"\\boxed{5}", "5"),
        (r"} } \boxed{5} {", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{x} = \boxed{\sqrt{\{y\}}}", r"\sqrt{\{y\}}"),
    ],
)
def test_the_last_box_that_closes(text: str, content: str) -> None:
    box = last_boxed(text)
    assert box is not None
    assert box.content == content


@pytest.mark.parametrize("text", ["", "5", r"\boxed{5", "boxed{5}", r"\boxedx{5}", r"\boxed\{5\}", "{5}"])
def test_no_box(text: str) -> None:
    assert last_boxed(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 boxes, so 18 eggs.", "18"),
        ("1,234,567.50 in all", "1,234,567.50"),
        ("first 18, then", "18"),
        ("it is -4", "-4"),
        ("it is −4", "-4"),  # U+2212, as models typeset it
        ("42.", "42"),
        ("no number", None),
        ("٣ and ５", None),  # digits, but not ASCII ones
        ("", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 34 " + r"\boxed{5}", Extraction("5", 2, True, True)),
        ("x" * 72 + r"\boxed{5}" + "y" * 19, Extraction("5", 2, True, True)),  # ends with character 81 of 100
        ("x" * 71 + r"\boxed{5}" + "y" * 20, Extraction("5", 2, True, False)),  # with 80
        (r"\boxed{5}", Extraction("5", 2, True, True)),
        ("the answer is 7", Extraction("7", 1, False, False)),
        ("I do not know", Extraction(None, 0, False, False)),
        (r"7 \boxed{}", Extraction(None, 2, True, True)),  # an empty box is an empty answer, not a reason to search on
        ("", Extraction(None, 0, False, False)),
    ],
)
def test_from_response(text: str, expected: Extraction) -> None:
    assert from_response(text) == expected


@pytest.mark.parametrize(
    ("text", "answer", "method"),
    [
        ("18", "18", 0),
        ("  18\n", "18", 0),
        ("She has 18 eggs.", "18", 1),
        ("**Answer:** 18", "18", 1),
        (r"\frac{1}{2}", r"\frac{1}{2}", 0),
        ("x = 5 or 7", "x = 5 or 7", 0),
        ("6 * 3 = 18\n#### 1,800", "1,800", 1),
        ("3 - 4\n  #### −1.\n", "-1", 1),
        ("x = 5\n#### \\frac{1}{2}", "x = 5\n#### \\frac{1}{2}", 0),
        ("#### 18\n6 * 3", "#### 18\n6 * 3", 0),
        (r"\text{five of 7}", r"\text{five of 7}", 0),
        ("Tuesday", "Tuesday", 0),
        (r"Half of 3 is \boxed{\frac{3}{2}}, not 2.", r"\frac{3}{2}", 2),
        (" \n", None, 0),
        ("", None, 0),
    ],
)
def test_from_final(text: str, answer: str | None, method: int) -> None:
    extraction = from_final(text, bare_final=False)
    assert (extraction.answer, extraction.method) == (answer, method)


@pytest.mark.parametrize("text", ["The answer is 18", r"\boxed{18}", "1 8"])
def test_a_bare_final_is_taken_whole(text: str) -> None:
    extraction = from_final(text, bare_final=True)
    assert (extraction.answer, extraction.method) == (text, 0)
    assert extraction.has_boxed == ("boxed" in text)


@given(st.lists(st.sampled_from(["\\boxed", "\\fbox", *"{}\\ 7,-x\0$"])).map("".join))
def test_extraction_is_total_and_finds_only_what_is_there(text: str) -> None:
    for extraction in (
        from_response(text),
        from_final(text, bare_final=False),
        from_final(text, bare_final=True),
    ):
        assert extraction.answer is None or extraction.answer in text
        assert extraction.answer != ""
    box = last_boxed(text)
    if box is not None:
        assert text[box.start] == "\\"
        assert box.content in text[box.start : box.end]


@given(st.recursive(st.text("a7 \\,", max_size=5).map(lambda s: s.replace("\\", "")), lambda s: s.map("{{{}}}".format)))
def test_any_balanced_content_comes_back(content: str) -> None:
    box = last_boxed(f"7 }} \\boxed{{{content}}} {{ 8")
    assert box is not None
    assert box.content == content.strip()


@pytest.mark.parametrize(
    "text",
    [
        "{" * 100_000,
        "}" * 100_000,
        r"\boxed{" * 20_000,
        r"\boxed{" * 20_000 + "}" * 20_000,
        r"\boxed" + " " * 100_000,
        r"\boxed   " * 20_000,
        "\\" * 100_001,
        r"\text{" * 20_000,
        "1," * 50_000,
        "1" * 100_000,
        "-" * 100_000,
        "1." * 50_000,
        "\0" * 100_000,
    ],
    ids=lambda text: text[:8],
)
def test_hostile_texts_take_linear_time(text: str) -> None:
    start = time.thread_time()
    from_response(text)
    from_final(text, bare_final=False)
    assert time.thread_time() - start < 2  # quadratic time would be minutes


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is not 18.", None),
        ("It isn't 18 but 17", "17"),
        ("Anything but 18, say 17", "17"),
        ("18 is wrong. The answer is 17.", "17"),
        ("18 is not the answer so it is 17", "17"),
        ("18 is not a prime so the answer is 17", "17"),
        ("She has 18, and 18 is not a prime", "18"),
        ("18 is not the only number that she names", "18"),
        ("She does not sell 3 eggs, so she has 18.", "18"),
    ],
)
def test_a_number_that_is_ruled_out_is_no_answer(text: str, answer: str | None) -> None:
    assert from_response(text).answer == answer
