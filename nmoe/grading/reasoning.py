"""Judges whether the text before an answer reasons about the problem, by a rubric on its surface.

A text fails at the first of these, by the words and numbers in it; signs and case do not count:

  nothing            it has none;
  the answer alone   all it has is the answer, and words such as "the answer is";
  a loop             three of five of its runs of three words are repetitions, or more;
  the question again beside passages of the question, of three words and more, it has words of the question and the answer at most;
  numbers alone      it has no word, and no step of arithmetic that holds ("7+5=12");
  off the problem    it names fewer than two of the question's quantities, as numbers or digit by digit, and longer words; or none,
                     if there is one quantity. Passages of the question count only where there is a step of arithmetic that holds.

What passes may still be wrong, or nonsense around the right numbers. So the rubric measures, and nothing is paid for it: a policy
that is paid for the look of reasoning learns the look.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, get_args

ReasoningFault = Literal[
    "nothing", "the answer alone", "a loop", "the question again", "numbers alone", "off the problem"
]
REASONING_FAULTS: tuple[ReasoningFault, ...] = get_args(ReasoningFault)

# A number, a character of a script without spaces between words, or a word.
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_]+")
# Words that say nothing of a problem, or only lead to an answer.
_FILLER = """
    the a an answer answers final result solution is are be it this that so thus therefore hence then follows equals equal
    we i get have and or of to in for with what which how many much find compute
"""
_STOCK = frozenset(_FILLER.split())
_RUN = 3
_LOOP = 0.4  # of the runs are different ones in a loop, at most
_NAMED = 2  # quantities and words of the question, or all where it has fewer
_STEM = 5  # letters that a word and its plural share
_LONG = 4  # letters of a word that shows the subject of a question
_SIGNS = "+-*/×÷·−"
_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,6})?"
_STEP = re.compile(rf"({_NUMBER}(?:\s*[{re.escape(_SIGNS)}]\s*{_NUMBER}){{1,8}})\s*=\s*(-?{_NUMBER})(?![\d.]*\d)")


def reasoning_fault(question: str, reasoning: str, answer: str | None) -> ReasoningFault | None:
    """Returns what keeps a text from being reasoning about a question before the answer, or None if nothing does.

    `reasoning_fault("Add: 47 + 85", "7+5=12 4+8+1=13", "132")` is None. The text may be of any kind; time is linear in it.
    """
    said, asked = _tokens(reasoning), _tokens(question)
    if not said:
        return "nothing"
    known = _STOCK.union(_tokens(answer or ""))
    if known.issuperset(said):
        return "the answer alone"
    if _repeats(said):
        return "a loop"
    own, steps = _outside(said, set(_runs(asked))), _holding_steps(reasoning)
    if known.union(asked).issuperset(own) and not (own and steps):
        return "the question again"
    if not steps and all(token[0].isdigit() for token in said):
        return "numbers alone"
    return None if _mentions(said if steps else own, asked) else "off the problem"


def _tokens(text: str) -> list[str]:
    return [token.replace(",", "") if token[0].isdigit() else token for token in _TOKEN.findall(text.casefold())]


def _runs(tokens: Sequence[str]) -> list[tuple[str, ...]]:
    size = min(_RUN, len(tokens))
    return [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]


def _repeats(tokens: Sequence[str]) -> bool:
    runs = _runs(tokens)
    return len(tokens) > 1 and (len(set(tokens)) == 1 or len(set(runs)) <= _LOOP * len(runs))


def _outside(tokens: Sequence[str], passages: set[tuple[str, ...]]) -> list[str]:
    """Returns the tokens that no run among `passages` covers."""
    covered = [False] * len(tokens)
    for start, run in enumerate(_runs(tokens)):
        if run in passages:
            covered[start : start + len(run)] = [True] * len(run)
    return [token for token, hidden in zip(tokens, covered, strict=True) if not hidden]


def _holding_steps(text: str) -> list[str]:
    """Returns the steps of arithmetic in a text whose result is right, rounded as it is written."""
    return [step[0] for step in _STEP.finditer(text) if _holds(step[1], step[2])]


def _holds(expression: str, written: str) -> bool:
    first, *rest = re.findall(rf"([{re.escape(_SIGNS)}]?)\s*({_NUMBER})", expression)
    total, term = Fraction(0), Fraction(first[1])
    for sign, digits in rest:
        value = Fraction(digits)
        if sign in "*×·":
            term *= value
        elif sign in "/÷":
            if not value:
                return False
            term /= value
        else:
            total, term = total + term, value if sign == "+" else -value
    decimals = len(written.partition(".")[2])
    return abs(total + term - Fraction(written)) * 2 * 10**decimals <= 1


def _mentions(said: Sequence[str], asked: Sequence[str]) -> bool:
    """Returns whether tokens name two of the question's quantities and longer words."""
    quantities = {token for token in asked if token[0].isdigit()}
    words = {token for token in asked if token not in _STOCK and not token[0].isdigit()}
    words = {token for token in words if len(token) >= _LONG or not token.isascii()}
    digits = Counter(token for token in said if len(token) == 1)
    spelled = {one for one in quantities if len(one) > 1 and Counter(one.replace(".", "")) <= digits}
    about = quantities | {word[:_STEM] for word in words}
    named = about & {*spelled, *(token if token[0].isdigit() else token[:_STEM] for token in said)}
    return len(named) >= min(_NAMED, len(quantities) or len(about))
