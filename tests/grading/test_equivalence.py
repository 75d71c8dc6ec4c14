"""Properties of equivalence over generated answers of every form, and hostile ones."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nmoe.grading.math.equivalence import settle
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS
from nmoe.grading.math.question import Policy
from nmoe.grading.math.symbolic import equal

INTEGERS = st.integers(-99, 99).map(str)
NUMBERS = st.one_of(
    INTEGERS,
    st.tuples(st.integers(-99, 99), st.integers(2, 30)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.decimals(-100, 100, places=3).map(lambda value: f"{value:f}"),
)
SURDS = st.builds(
    lambda a, b, c: rf"{a}\sqrt{{{b}}}+{c}", st.integers(2, 9), st.sampled_from([2, 3, 5, 7]), st.integers(1, 9)
)
POLYNOMIALS = st.builds(lambda a, b, c: f"{a}x^2+{b}x+{c}", *[st.integers(2, 9)] * 3)
EXPRESSIONS = st.one_of(SURDS, POLYNOMIALS, st.integers(2, 99).map(lambda a: rf"{a}\pi"))
SCALARS = st.one_of(NUMBERS, EXPRESSIONS)
UNITS = st.sampled_from([r"\text{ cm}", r"\text{ m}^2", r"\%", r"^\circ", r"\text{ apples}"])
TEXTS = st.sampled_from([r"\text{Tuesday}", "east", r"\text{(C)}", "odd", r"\text{no solution}"])


def several(items: st.SearchStrategy[str], left: str, right: str, least: int = 2) -> st.SearchStrategy[str]:
    return st.lists(items, min_size=least, max_size=4).map(lambda parts: left + ", ".join(parts) + right)


def matrix(cells: list[str]) -> str:
    return rf"\begin{{pmatrix}} {cells[0]} & {cells[1]} \\ {cells[2]} & {cells[3]} \end{{pmatrix}}"


ORDERED = st.one_of(several(SCALARS, "(", ")"), several(SCALARS, "[", "]"), several(SCALARS, "", ""))
FORMS = st.one_of(
    SCALARS,
    st.builds(str.__add__, INTEGERS, UNITS),
    TEXTS,
    ORDERED,
    several(SCALARS, r"\{", r"\}"),
    st.builds(
        lambda a, b, ends: f"{ends[0]}{a}, {b}{ends[1]}", SCALARS, SCALARS, st.sampled_from(["()", "[)", "(]", "[]"])
    ),
    st.builds(lambda a, b: rf"(-\infty, {a}) \cup [{b}, \infty)", SCALARS, SCALARS),
    st.lists(SCALARS, min_size=4, max_size=4).map(matrix),
    st.builds(lambda side: f"y = {side}", EXPRESSIONS),
    st.builds(lambda a, sign: f"x {sign} {a}", SCALARS, st.sampled_from(["<", r"\le", ">", r"\geq", "="])),
    st.builds(lambda a, b: rf"{a} \pm {b}", INTEGERS, SURDS),
)


def restyled(text: str, seed: int) -> str:
    """The same answer in other typesetting."""
    rng = random.Random(seed)
    for old, new in [
        (r"\frac", r"\dfrac"),
        ("(", r"\left("),
        (")", r"\right)"),
        (", ", ","),
        ("+", " + "),
        ("=", "= "),
    ]:
        if rng.random() < 0.5:
            text = text.replace(old, new)
    return rng.choice(["{}", "${}$", " {} ", r"\({}\)", "{}.", "$${}$$", r"\[{}\]"]).replace("{}", text)


@given(FORMS)
def test_every_form_equals_itself(gold: str) -> None:
    assert settle(gold, gold).outcome == "correct"


@given(FORMS, st.integers(0, 2**32))
def test_typesetting_changes_nothing(gold: str, seed: int) -> None:
    verdict = settle(gold, restyled(gold, seed))
    assert verdict is not None
    assert verdict.outcome == "correct"


@given(ORDERED, st.randoms(use_true_random=False))
@settings(deadline=None)  # the first call starts a worker, which takes a second on a busy machine
def test_permuted_golds_are_wrong(gold: str, rng: random.Random) -> None:
    left, right = (gold[:1], gold[-1:]) if gold[0] in "([" else ("", "")
    items = gold.removeprefix(left).removesuffix(right).split(", ")
    shuffled = rng.sample(items, len(items))
    assume(shuffled != items)
    # Equal items in another form ("1/2" and "0.500") may change places.
    assume(not all(one == other or equal(one, other) for one, other in zip(items, shuffled, strict=True)))
    answer = left + ", ".join(shuffled) + right
    verdict = settle(gold, answer, Policy(answer_order="as_gold"))
    assert not equal(gold, answer, "as_gold") if verdict is None else verdict.outcome == "incorrect"


@given(several(SCALARS, r"\{", r"\}"), st.randoms(use_true_random=False))
def test_permuted_sets_are_right(gold: str, rng: random.Random) -> None:
    items = gold[2:-2].split(", ")
    verdict = settle(gold, r"\{" + ", ".join(rng.sample(items, len(items))) + r"\}")
    assert verdict is not None
    assert verdict.outcome == "correct"


@given(FORMS, st.integers(1, 9), st.data())
@settings(max_examples=150)
def test_perturbed_golds_are_wrong(gold: str, more: int, data: st.DataObject) -> None:
    """One digit that counts becomes another."""
    places = [i for i, c in enumerate(gold) if c.isdigit() and c != "0" and not gold.startswith(r"\text", i - 6)]
    assume(places)
    place = data.draw(st.sampled_from(places))
    digit = (int(gold[place]) + more) % 10 or 5
    assume(str(digit) != gold[place])
    answer = gold[:place] + str(digit) + gold[place + 1 :]
    assume("frac{0" not in gold)
    verdict = settle(gold, answer)
    assert not equal(gold, answer) if verdict is None else verdict.outcome == "incorrect"


@given(FORMS.filter(lambda text: not any(sign in text for sign in ("=", "text", "%", "circ", "pm"))), FORMS)
def test_symmetric_on_canonical_forms(one: str, other: str) -> None:
    """What may be left out by the answer alone (names, units) is not canonical."""
    assume(not any(sign in other for sign in ("=", "text", "%", "circ", "pm", r"\{")) and r"\{" not in one)
    assume(
        "<" not in one + other and ">" not in one + other and r"\le" not in one + other and r"\ge" not in one + other
    )
    there, back = settle(one, other), settle(other, one)
    assert (there and there.outcome) == (back and back.outcome)


@given(st.text(max_size=60))
def test_settle_is_total(answer: str) -> None:
    for gold in ("42", r"\frac{x}{2}", "(1, 2)", r"\{1, 2\}", r"5\text{ cm}", "x = 3"):
        verdict = settle(gold, answer)
        assert verdict is None or verdict.outcome in ("correct", "incorrect")
        settle(answer, gold)


SYNTAX = [
    *"0123,.-+ $\\{}()[]/*^_=<>xyi%&|;:'\"",
    r"\text{",
    r"\frac",
    r"\pm",
    r"\cup",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
]
SYNTAX += [
    r"\\",
    r"\{",
    r"\}",
    " or ",
    " and ",
    r"\sqrt",
    r"\le",
    r"\infty",
    r"^\circ",
    "\ue000",
    "\ue001",
    "\ue002",
    "\0",
    "\ud800",
]


@given(st.lists(st.sampled_from(SYNTAX), max_size=40).map("".join))
@settings(max_examples=300)
def test_settle_is_total_on_what_looks_like_mathematics(answer: str) -> None:
    for gold in ("42", r"\frac{x}{2}", r"\{1, \pm 2\}", "x = 3"):
        verdict = settle(gold, answer)
        assert verdict is None or verdict.outcome in ("correct", "incorrect")
    settle(answer, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "1" * 100_000,
        "{" * 100_000,
        r"\text{" * 20_000 + "}" * 20_000,
        r"\text{" * 150 + "}" * 100,
        "{" * 500 + "}" * 500,
        "(" * 499 + "1" + ")" * 499,
        r"\{" * 250 + "1" + r"\}" * 250,
        "$" * MAX_ANSWER_CHARS,
        "1," * (MAX_ANSWER_CHARS // 2),
        "1 or " * (MAX_ANSWER_CHARS // 5),
        r"\pm" * 300,
        "=" * MAX_ANSWER_CHARS,
        "9" * MAX_ANSWER_CHARS,
        "9" * 400,
        "0" * MAX_ANSWER_CHARS,
        ". " * (MAX_ANSWER_CHARS // 2),
        "1e" + "9" * 900,
        "9**9**9",
        "9^9^9",
        "inf",
        "nan",
        "-oo",
        "\0",
        "42\0",
        "\ud800",
        "42\ud800",
        "\u202e24",
        "٤٢",
        r"\input{/etc/passwd}",
        r"\def\x{\x\x}\x",
        "__import__('os').system('true')",
        "().__class__.__bases__",
        "lambda: 0",
        "(42",
        "42)",
        r"\boxed{42",
        "42 = 42 or 1",
        "41\n42",
        "",
        " ",
        "$$",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_hostile_answers_are_wrong_at_once(answer: str) -> None:
    start = time.thread_time()
    for gold in ("42", r"\sqrt{2}", "(1, 2)"):
        verdict = settle(gold, answer)
        # What is left to the workers there has a deadline.
        assert verdict is None or verdict.outcome == "incorrect"
    assert settle("42", answer) is not None or answer == "-oo"
    assert time.thread_time() - start < 2


TURNED = {"=": "=", "<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\lt": r"\gt", r"\gt": r"\lt", r"\ne": r"\ne"}
SAME = {r"\lt": "<", r"\gt": ">", r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne"}


@pytest.mark.parametrize("sign", TURNED)
def test_a_relation_says_the_same_from_its_other_side_and_nothing_else(sign: str) -> None:
    gold = f"a+b {sign} 2"

    def outcome(answer: str) -> str | None:
        verdict = settle(gold, answer)
        return verdict and verdict.outcome

    assert outcome(gold) == outcome(f"2 {TURNED[sign]} a+b") == "correct"
    assert outcome(f"a+b {sign} 3") == "incorrect"
    for other in TURNED:
        same = SAME.get(other, other) == SAME.get(sign, sign)
        assert (outcome(f"a+b {other} 2") == "correct") is same, other
        assert (outcome(f"2 {TURNED[other]} a+b") == "correct") is same, other


@pytest.mark.parametrize(("sign", "spellings"), [(r"\ne", ["\\neq", "≠", "!="]), (r"\le", ["\\leq", "≤", "<="])])
def test_spellings_of_a_relation(sign: str, spellings: list[str]) -> None:
    for spelling in spellings:
        verdict = settle(f"x {sign} 2", f"x {spelling} 2")
        assert verdict is not None
        assert verdict.outcome == "correct", spelling
