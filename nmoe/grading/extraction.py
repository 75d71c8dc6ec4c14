r"""Where the answer is in a text: the last `\boxed{}`, the last number, or the text itself.

Two policies, chosen by the environment's format. Neither ever looks at the gold answer. A third, for recorded predictions without
boxes, is in `nmoe.grading.prose`.

`from_response`, for `format = "boxed"`, reads the whole completion:
  1. the content of the last `\boxed{...}` that closes;
  2. without one, the last number, `-?\d[\d,]*(?:\.\d+)?`;
  3. without one, there is no answer.

`from_final`, for `format = "harmony"`, reads the last final message, which *is* the answer:
  1. a task with `bare_final` (the generated skills) takes the message whole, whatever it holds;
  2. other tasks (gsm8k, math) take the last `\boxed{...}` that closes, where there is one;
  3. else, where the message is prose, its last number. Prose is a text with a word of three or more letters outside of
     LaTeX commands and `\text{}`: "She has 18 eggs." gives 18, but "\frac{1}{2}" and "x = 5 or 7" do not give 2 and 7;
  4. else the message whole.

Boxes that a comma, "and" or "or" joins, as in "$x=\boxed{3}$ and $y=\boxed{4}$", are one answer of several: it is written
`\boxed{3}, \boxed{4}`, which a gold with several parts is compared with whole, and a gold with one part with its last box.

In both, `\fbox` counts as `\boxed`, as does the unbraced `\boxed 5` that some MATH solutions have, and U+2212 is a minus
sign; digits are ASCII. Every scan is a single pass: a hundred kilobytes of braces cost milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BOXED, LAST_NUMBER, NOTHING_EXTRACTED = 2, 1, 0

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)
# One token per alternative, in one pass. An escaped brace is content (a set: \{1, 2\}), and so is the line break \\ before
# a brace; a doubled backslash before the word itself is a box all the same, as policies that think in JSON write it.
_BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)"
    r"|\\(?:boxed|fbox)[ \t]+(?P<unbraced>[^\s${}\\]+)"
    r"|(?P<escape>\\[{}]|\\\\(?!boxed|fbox))"
    r"|(?P<open>\{)"
    r"|(?P<close>\})"
)
# What may stand between two boxes, or two formulas, that are one answer: something that joins, perhaps a unit before it, perhaps
# the name of the next value after it.
JOINED = re.compile(
    r"(?:\\text\s*\{\s*|[\s$.~])*(?:[A-Za-z]{1,6}(?:/[A-Za-z]{1,6})?\s)?"
    r"(?:[\s$,;&}]|\\\\|\\[,;:()\[\] ]|\\q?quad|\\text\s*\{|\band\b|\bor\b)*"
    r"(?:[A-Za-z\\_0-9{}()']{1,20}\s*=\s*)?(?:[\s$]|\\[(\[])*"
)
_JOINS = re.compile(r"[,;]|\band\b|\bor\b")
_MAX_GAP = 60
_LATEX_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class Box:
    """The last box of a text: its content, and the characters [start, end) that the whole of it takes up."""

    content: str
    start: int
    end: int


@dataclass(frozen=True)
class Extraction:
    """What was found. `method`: 2 a box, 1 the last number, 0 neither (the text itself is the answer, or there is none).

    `boxed_in_final` says that the last box ends within the last 20% of the text, counted in characters: a policy
    that boxes early and rambles on has not stopped at its answer.
    """

    answer: str | None
    method: int
    has_boxed: bool
    boxed_in_final: bool


def joins(gap: str) -> bool:
    """Whether what stands between two values makes them parts of one answer."""
    return len(gap) <= _MAX_GAP and JOINED.fullmatch(gap) is not None and _JOINS.search(gap) is not None


def last_boxed(text: str) -> Box | None:
    r"""The `\boxed{...}` that starts last among those that close, nested braces matched; None without one."""
    last = max(_closed_boxes(text), key=lambda box: box[0].start(), default=None)
    return None if last is None else _cut(text, last)


def joined_boxes(text: str) -> list[Box]:
    """The last box and, in their order, those before it that are joined to it; empty without a box."""
    closed = sorted(_closed_boxes(text), key=lambda box: box[0].start())
    chain = closed[-1:]
    for box in closed[-2::-1]:
        if box[2] > chain[-1][0].start() or not joins(text[box[2] : chain[-1][0].start()][: _MAX_GAP + 1]):
            break
        chain.append(box)
    return [_cut(text, box) for box in reversed(chain)]


# The token that opens a box, the end of its content, its end.
_Closed = tuple[re.Match[str], int, int]


def _closed_boxes(text: str) -> Iterator[_Closed]:
    open_braces: list[re.Match[str]] = []
    for token in _BRACES.finditer(text):
        if token.lastgroup in ("box", "open"):
            open_braces.append(token)
            continue
        if token.lastgroup == "unbraced":
            opening, content_end = token, token.end()
        elif token.lastgroup == "close" and open_braces:
            opening, content_end = open_braces.pop(), token.start()
        else:
            continue
        if opening.lastgroup != "open":
            yield opening, content_end, token.end()


def _cut(text: str, closed: _Closed) -> Box:
    """To be called on few: of nested boxes, cutting each would cost the square of their depth."""
    opening, content_end, end = closed
    content_start = opening.end() if opening.lastgroup == "box" else opening.start("unbraced")
    return Box(text[content_start:content_end].strip(), opening.start(), end)


def last_number(text: str) -> str | None:
    """The last number-like token, without the comma that may follow it in a sentence; None without one."""
    numbers = NUMBER.findall(text.replace("−", "-"))
    return numbers[-1].rstrip(",") if numbers else None


def from_response(text: str) -> Extraction:
    """The answer in a whole completion: the last box, else the last number."""
    return _boxed(text) or _number(text)


def from_final(text: str, *, bare_final: bool) -> Extraction:
    """The answer in a Harmony final message; see the policy above. A blank message holds no answer."""
    boxed = _boxed(text)
    whole = Extraction(text.strip() or None, NOTHING_EXTRACTED, boxed is not None, bool(boxed and boxed.boxed_in_final))
    if bare_final:
        return whole
    if boxed is not None:
        return boxed
    number = _number(text)
    return number if number.answer is not None and is_prose(text) else whole


def _boxed(text: str) -> Extraction | None:
    boxes = joined_boxes(text)
    if not boxes:
        return None
    # In integers: end > 0.8 * length, without a rounded product.
    return Extraction(content_of(boxes) or None, BOXED, True, 5 * boxes[-1].end > 4 * len(text))


def content_of(boxes: Sequence[Box]) -> str:
    """The answer in boxes that are one answer: the content of a single one, else the boxes in a row."""
    return boxes[0].content if len(boxes) == 1 else ", ".join(rf"\boxed{{{box.content}}}" for box in boxes)


def _number(text: str) -> Extraction:
    number = last_number(text)
    return Extraction(number, NOTHING_EXTRACTED if number is None else LAST_NUMBER, False, False)


def is_prose(text: str) -> bool:
    return _WORD.search(_LATEX_WORDS.sub(" ", text)) is not None
