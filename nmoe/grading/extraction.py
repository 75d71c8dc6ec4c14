r"""Answer extraction: the last `\boxed{}`, the last number, or the text itself.

The environment's format chooses one of two policies. Neither looks at the gold answer. A third, for recorded predictions
without boxes, is in `nmoe.grading.prose`.

`from_response`, for `format = "boxed"`, reads the whole completion:
  1. the content of the last `\boxed{...}` that closes;
  2. without one, the last number, `-?\d[\d,]*(?:\.\d+)?`;
  3. without one, there is no answer.

`from_final`, for `format = "harmony"`, reads the last final message, which *is* the answer:
  1. for a task whose answer is the whole message (the generated skills), that message;
  2. for other tasks (gsm8k, math), the last `\boxed{...}` that closes, if there is one;
  3. else, if the message is prose, its last number. Prose has a word of three or more letters outside LaTeX commands and
     `\text{}`: "She has 18 eggs." gives 18, but "\frac{1}{2}" and "x = 5 or 7" do not give 2 and 7. A message whose last line
     is GSM8K's mark of an answer is prose, too: "6 * 3 = 18\n#### 18" gives 18;
  4. else the whole message.

Boxes joined by a comma, "and" or "or", as in "$x=\boxed{3}$ and $y=\boxed{4}$", or by nothing, are one answer with several
parts, written `\boxed{3}, \boxed{4}`. To a gold with one part it is no answer.

A number that the text only rules out is not read: "not 18", "anything but 18", "18 is wrong" (`nmoe.grading.denial`).

Both policies read `\fbox` as `\boxed`, accept the unbraced `\boxed 5` of some MATH solutions, and read U+2212 as a minus
sign. Digits are ASCII. Every scan is a single pass: a hundred kilobytes of braces cost milliseconds.

`extract_gold` takes the gold answer out of a dataset's answer field, as `gold_extractor` says:

    none          the field is the answer
    gsm8k_hash    "... so 6 * 3 = <<6*3=18>>18\n#### 18"              -> "18"
    boxed         "... hence the area is $\boxed{\frac{1}{2}}$."       -> "\frac{1}{2}"
    last_number   "She has 18 eggs."                                   -> "18"

A missing gold answer is an error in the data, unlike a missing answer of a policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nmoe.errors import UserError
from nmoe.grading.denial import without_denied
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS, normalize

BOXED, LAST_NUMBER, NOTHING_EXTRACTED = 2, 1, 0

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)
# One token per alternative, in one pass. An escaped brace is content (a set: \{1, 2\}), and so is a line break \\ before a
# brace. A doubled backslash before "boxed" still starts a box: policies that write JSON escape it so.
_BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)"
    r"|\\(?:boxed|fbox)[ \t]+(?P<unbraced>[^\s${}\\]+)"
    r"|(?P<escape>\\[{}]|\\\\(?!boxed|fbox))"
    r"|(?P<open>\{)"
    r"|(?P<close>\})"
)
# The text between two boxes, or two formulas, that are one answer: a separator, with an optional unit before it and an optional
# name of the next value after it.
JOINED = re.compile(
    r"(?:\\text\s*\{\s*|[\s$.~])*(?:[A-Za-z]{1,6}(?:/[A-Za-z]{1,6})?\s)?"
    r"(?:[\s$,;&}]|\\\\|\\[,;:()\[\] ]|\\q?quad|\\text\s*\{|\band\b|\bor\b)*"
    r"(?:[A-Za-z\\_0-9{}()']{1,20}\s*=\s*)?(?:[\s$]|\\[(\[])*"
)
_JOINS = re.compile(r"[,;]|\band\b|\bor\b")
_TOUCHING = re.compile(r"(?:[\s$~]|\\[,;:()\[\] ]|\\q?quad)*")
_MAX_GAP = 60
_HASH_LINE = re.compile(rf"####\s*\$?{NUMBER.pattern}[$.\s]*", re.ASCII)
_LATEX_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class Box:
    """A `\boxed{...}` in a text: its content, and its character range [start, end) including the command and braces."""

    content: str
    start: int
    end: int


@dataclass(frozen=True)
class Extraction:
    """An extracted answer. `method`: 2 from a box, 1 the last number, 0 neither (the text itself is the answer, or there is
    none).

    `boxed_in_final` says that the last box ends within the last 20% of the text's characters. It is False for a policy that
    boxes an answer early and then goes on writing.
    """

    answer: str | None
    method: int
    has_boxed: bool
    boxed_in_final: bool


def joins(gap: str) -> bool:
    """Returns whether the text between two values makes them parts of one answer: a separator such as a comma, "and" or "or"."""
    return len(gap) <= _MAX_GAP and JOINED.fullmatch(gap) is not None and _JOINS.search(gap) is not None


def last_boxed(text: str) -> Box | None:
    r"""Returns the closed `\boxed{...}` that starts last in the text, with nested braces matched; None if there is none."""
    last = max(_closed_boxes(text), key=lambda box: box[0].start(), default=None)
    return None if last is None else _cut(text, last)


def joined_boxes(text: str) -> list[Box]:
    """Returns the last box and the boxes before it that form one answer with it, in the text's order; empty if there is no box."""
    closed = sorted(_closed_boxes(text), key=lambda box: box[0].start())
    chain = closed[-1:]
    for box in closed[-2::-1]:
        if box[2] > chain[-1][0].start():
            break
        gap = text[box[2] : chain[-1][0].start()][: _MAX_GAP + 1]
        if not joins(gap) and not (len(gap) <= _MAX_GAP and _TOUCHING.fullmatch(gap)):
            break
        chain.append(box)
    return [_cut(text, box) for box in reversed(chain)]


# A closed box: the token that opens it, the end of its content, its end.
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
    """Returns a box with its content. Call it on few boxes: cutting every nested one takes time quadratic in the depth."""
    opening, content_end, end = closed
    content_start = opening.end() if opening.lastgroup == "box" else opening.start("unbraced")
    return Box(text[content_start:content_end].strip(), opening.start(), end)


def last_number(text: str) -> str | None:
    """Returns the last number in a text, without a trailing comma; None if there is none."""
    numbers = NUMBER.findall(text.replace("−", "-"))
    return numbers[-1].rstrip(",") if numbers else None


def from_response(text: str) -> Extraction:
    """Extracts the answer from a whole completion: the last box, else the last number."""
    return _boxed(text) or _number(text)


def from_final(text: str, *, bare_final: bool) -> Extraction:
    """Extracts the answer from a Harmony final message by the rules at the top of this module. A blank message has no answer."""
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
    # In integers, because 0.8 * length would be rounded.
    return Extraction(content_of(boxes) or None, BOXED, True, 5 * boxes[-1].end > 4 * len(text))


def content_of(boxes: Sequence[Box]) -> str:
    """Returns the answer in boxes that form one answer: the content of a single box, else the boxes separated by commas."""
    return boxes[0].content if len(boxes) == 1 else ", ".join(rf"\boxed{{{box.content}}}" for box in boxes)


def _number(text: str) -> Extraction:
    number = last_number(without_denied(text))
    return Extraction(number, NOTHING_EXTRACTED if number is None else LAST_NUMBER, False, False)


def is_prose(text: str) -> bool:
    last_line = text.rstrip().rpartition("\n")[2].lstrip()
    marked = _HASH_LINE.fullmatch(last_line.replace("−", "-")) is not None
    return marked or _WORD.search(_LATEX_WORDS.sub(" ", text)) is not None


# A gold with a box and more words than these is a solution: "The answer is $\\boxed{7}$." is none.
_MAX_WORDS = 8
_GOLD_WORD = re.compile(r"[^\W\d_]{2,}")
_LATEX = re.compile(r"\\[A-Za-z]+")


def _whole(field: str) -> str | None:
    return field


def _after_hash(field: str) -> str | None:
    return field.rpartition("####")[2] if "####" in field else None


def _in_box(field: str) -> str | None:
    box = last_boxed(field)
    return None if box is None else box.content


GOLD_EXTRACTORS: dict[str, tuple[Callable[[str], str | None], str]] = {
    "none": (_whole, "text"),
    "gsm8k_hash": (_after_hash, "'#### ANSWER'"),
    "boxed": (_in_box, r"\boxed{ANSWER} that closes"),
    "last_number": (last_number, "number"),
}


def extract_gold(extractor: str, field: str) -> str:
    """Extracts the gold answer from a dataset's answer field by the named extractor, and strips it. Raises UserError if the
    extractor finds no answer.
    """
    extract, looked_for = GOLD_EXTRACTORS[extractor]
    gold = (extract(field) or "").strip()
    if not gold:
        shown = field if len(field) <= 80 else "..." + field[-77:]
        raise UserError(
            f"gold_extractor = {extractor!r} finds no {looked_for} in {shown!r}; mend the record or choose another "
            f"gold_extractor ({', '.join(GOLD_EXTRACTORS)})"
        )
    return gold


def unreadable(gold: str) -> str | None:
    """Returns why no answer can be compared with this gold answer; None if it is readable."""
    if len(gold.strip()) > MAX_ANSWER_CHARS:
        return f"the gold answer has {len(gold)} characters, more than {MAX_ANSWER_CHARS}: is it a whole solution?"
    if "####" in gold or (last_boxed(gold) is not None and len(_GOLD_WORD.findall(_LATEX.sub(" ", gold))) > _MAX_WORDS):
        return f"the gold answer {gold!r:.80} is a solution"
    if not normalize(gold):
        return f"nothing is left of the gold answer {gold!r} without its typesetting"
    return None
