"""The rubric of reasoning: texts that only look like it, and real reasoning."""

from __future__ import annotations

import random

import pytest

from nmoe.grading.reasoning import ReasoningFault, reasoning_fault

EGGS = "Ann has 3 boxes of 16 eggs each. She drops 9 eggs. How many eggs are whole?"
EGGS_WORKED = "3 boxes of 16 eggs are 3*16=48 eggs. Less the 9 that fell, 48-9=39 are whole."


@pytest.mark.parametrize(
    "reasoning",
    [
        EGGS_WORKED,
        "Three boxes hold 3 x 16, nine of them fell.",
        "eggs: 3*16=48\nwhole ones: 48-9=39",
        "The question: how many eggs are whole? She has 3 boxes of 16 eggs each, 3*16=48, and 9 fell, which leaves 39.",
        # 2,000 words, each sentence new.
        " ".join(f"If it were {n} eggs, {n} less 9 would be {n - 9}." for n in range(48, 248)),
    ],
)
def test_reasoning_about_the_problem(reasoning: str) -> None:
    assert reasoning_fault(EGGS, reasoning, "39") is None


@pytest.mark.parametrize(
    ("question", "reasoning", "answer"),
    [
        ("Add: 47 + 85", "7+5=12 4+8+1=13", "132"),
        ("Add: 4821 + 3377", "let me see 4821 + 3377", "8198"),
        ("Add: 47 + 85", "Add: 47 + 85 = 132", "132"),  # a step that holds, in the question's words
        ("What is 6 * 7?", "6 * 7 = 42", "42"),
        ("Reverse: 53914", "from the back 4 1 9 3 5", "41935"),
        ("Compute 7/3 to two places.", "7 / 3 = 2.33, the third place is 3", "2.33"),
        ("Which number is larger, 843 or 181?", "Both have hundreds: 843 has 8, 181 has 1.", "843"),
        ("Prove that every triangle has an angle of at most 60 degrees.", "The angles of a triangle sum to 180.", None),
        ("How many integers n satisfy n^2 < 50?", "n runs from -7 to 7, since 49 < 50 < 64: these are integers.", "15"),
        ("一个盒子有3个苹果，5个盒子有多少个苹果？", "每个盒子3个，5个盒子就是3*5=15个苹果。", "15"),
        ("", "It asks for nothing.", None),
    ],
)
def test_short_reasoning(question: str, reasoning: str, answer: str | None) -> None:
    assert reasoning_fault(question, reasoning, answer) is None


@pytest.mark.parametrize(
    ("reasoning", "fault"),
    [
        ("", "nothing"),
        (" \n\t", "nothing"),
        ("...", "nothing"),
        ("… — ?! \u200b", "nothing"),
        ("39", "the answer alone"),
        ("The answer is 39.", "the answer alone"),
        ("So the final answer is that it equals 39, 39!", "the answer alone"),
        ("The answer follows.", "the answer alone"),
        ("eggs eggs eggs eggs", "a loop"),
        ("think " * 200, "a loop"),
        ("3 boxes of 16 eggs, 9 fall. " * 6, "a loop"),
        (EGGS_WORKED + " wait, let me check" * 40, "a loop"),
        (EGGS, "the question again"),
        (EGGS.upper().replace(".", ";"), "the question again"),
        (EGGS + " " + EGGS, "the question again"),
        (EGGS + " The answer is 39.", "the question again"),
        (" ".join(sorted(EGGS.split())), "the question again"),
        ("3 16 9 48 39 12", "numbers alone"),
        ("3 + 16 = 20, 9 - 3 = 7", "numbers alone"),  # no step holds
        ("purple quickly banana under seventeen sky", "off the problem"),
        (EGGS + " purple quickly banana", "off the problem"),
        ("well let me see now", "off the problem"),
        ("hm", "off the problem"),
        ("1+1=2 2+2=4 4+4=8", "off the problem"),
        ("I will think step by step and check each step with care before I answer.", "off the problem"),
    ],
)
def test_what_only_looks_like_reasoning(reasoning: str, fault: ReasoningFault) -> None:
    assert reasoning_fault(EGGS, reasoning, "39") == fault


def test_random_words_of_a_language_are_not_reasoning() -> None:
    text = "river stone walked green seven maybe under lamp twelve carries because window silver often"
    words = text.split()
    rng = random.Random(0)
    said = [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(200)]
    assert not [text for text in said if reasoning_fault(EGGS, text, "39") is None]


@pytest.mark.parametrize("text", ["1+" * 50_000, "3 boxes 16 " * 50_000, "9" * 300_000, "a1" * 100_000, "=" * 300_000])
def test_long_texts_are_judged(text: str) -> None:
    assert reasoning_fault(EGGS, text, "39") is not None


def test_a_step_divided_by_zero_does_not_hold() -> None:
    assert reasoning_fault(EGGS, "16/0=3", "39") == "numbers alone"
