r"""Normalisation of answers: removes typesetting and keeps meaning.

- Removed: `$...$`, `$$...$$`, `\(...\)`, `\[...\]` and `**...**` around the whole answer; trailing periods; a dollar sign
before
  a number. U+2212 becomes "-", and other mathematical signs (π × · ≤ ∞ √ ² ...) become their LaTeX.
- Unified: spaces of every kind (thin, non-breaking, zero-width), one-character fractions (½, 2½), ∅ and ℝ, `\lvert`,
`\lbrace`
  and other second names of signs. A dot over repeating decimals, or three dots after them, becomes `\overline`. A plus sign
  before a whole item is removed.
- Removed: `\text \textbf \mathrm \mathbf` and similar (the braces' content stays); `\left`, `\right`, `\displaystyle`, and
the
  spacing commands `\! \, \; \: \quad`, and `~`.
- `\dfrac`, `\tfrac` and `\cfrac` become `\frac`; `<=` becomes `\le`; `\leq` and the like get their shortest name.
- White space collapses to one space, and to none beside punctuation and between a command and a non-letter, except for one
  space after a comma.
- An answer that is one number loses thousands separators, its plus sign and leading zeros. In "(1,234)" and "1, 234" the
comma
  stays: those are two numbers. Spaces separate thousands, too: "12 500".
"""

from __future__ import annotations

import re
from functools import lru_cache

# Longer than any gold of the known datasets; a longer gold is refused when its pool loads. It bounds the work that a hostile
# answer can cause.
MAX_ANSWER_CHARS = 1000

_SIGNS = str.maketrans(
    {
        "−": "-",
        "π": r"\pi ",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "∞": r"\infty ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "±": r"\pm ",
        "∓": r"\mp ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "⁄": "/",
        **dict.fromkeys("\u00a0\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))), " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    }
)
# Characters for fractions, with numerator and denominator.
_VULGAR = {
    "½": (1, 2),
    "⅓": (1, 3),
    "⅔": (2, 3),
    "¼": (1, 4),
    "¾": (3, 4),
    "⅕": (1, 5),
    "⅖": (2, 5),
    "⅗": (3, 5),
    "⅘": (4, 5),
}
_VULGAR |= {"⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8)}
_VULGAR_FRACTION = re.compile(rf"(?<![0-9.,])([0-9]{{0,9}})\s*([{''.join(_VULGAR)}])")
_ROOT_SIGN = re.compile(r"√ ?(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_SPELLINGS = {
    "<=": r"\le ",
    ">=": r"\ge ",
    "!=": r"\ne ",
    "==": "=",
    "{,}": ",",
    r"^{\circ}": r"^\circ ",
    r"\varnothing": r"\emptyset ",
    r"\O": r"\emptyset ",
    r"\log_e": r"\ln ",
    r"\log_{e}": r"\ln ",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\mid": "|",
    r"\lVert": r"\|",
    r"\rVert": r"\|",
    r"\backslash": r"\setminus ",
}
_COMMAND_SPELLINGS = "|".join(re.escape(one) for one in _SPELLINGS if one[1:].isalpha())
_SPELLING = re.compile(
    rf"(?:{_COMMAND_SPELLINGS})(?![A-Za-z])|" + "|".join(re.escape(one) for one in _SPELLINGS if not one[1:].isalpha())
)
_NUMBER_SET = re.compile(r"\\(?:mathbb|mathbf|Bbb)\s*(?:\{\s*([CNQRZ])\s*\}|([CNQRZ])(?![A-Za-z]))")
_REALS_MINUS = re.compile(r"\\mathbb\{R\} ?(?:-|\\smallsetminus ?) ?(?=\\\{)")
_REALS_EXCEPT = re.compile(
    r"(?:all |any )?real(?:s| numbers?)(?: x)?,? (?:except|other than|but|excluding|not equal to)(?: for)? ",
    re.IGNORECASE,
)
_POINT_NAME = re.compile(r"\b[a-z] ?= ?")
_EMPTY_BRACES = re.compile(r"\\\{\s*\\\}")
_REPEATING_DOTS = re.compile(r"(?<=[0-9]\.)([0-9]*)\\dot\{?([0-9])\}?(?:([0-9]*)\\dot\{?([0-9])\}?)?")
# Three dots after a repetition: the same digits three times, or two or more digits twice if they are all of the decimals.
# 2.718281828... does not show that it repeats. The lengths are bounded to bound the time.
_ENDLESS = re.compile(
    r"(?<=[0-9]\.)(?:([0-9]{0,12}?)([0-9]{1,12}?)\2{2,}|([0-9]{2,12}?)\3)(?:\.\.\.|…|\\[lc]?dots(?![A-Za-z]))"
)
_ITEM_PLUS = re.compile(r"(^|[(\[{,;=<>]|\\(?:cup|le|ge|in)(?![A-Za-z]))(?: ?\+)+")
_DROPPED = re.compile(r"\\(?:left|right)\.|\\(?:left|right|thinspace|big|Big|bigg|Bigg)(?![A-Za-z]) ?|\\! ?|\\[,;:]")
_SPACES = re.compile(r"\\(?:displaystyle|quad|qquad|enspace)(?![A-Za-z])|(?<!\\)\\ |~")
_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_RELATION_COMMAND = re.compile(r"\\(le|ge)q(?:slant)?(?![A-Za-z])|\\(ne)q(?![A-Za-z])")
_WRAPPERS = re.compile(
    r"(?P<wrapper>\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox)\s*\{)|\\.|[{}]", re.DOTALL
)
_ENCLOSURES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
_CURRENCY = re.compile(r"^([+-]?)\\?\$ ?(?=[0-9.,]+$)")
_IDLE_SPACE = re.compile(r" (?!\w)|(?<![\w,]) ")
_COMMAND_SPACE = re.compile(r"(\\[A-Za-z]+) (?![A-Za-z])")
_LIST_COMMA = re.compile(r",(?=\S)")
# "0,125" has no thousands separator.
_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?")
_PLAIN = re.compile(r"\+?(-?)(?:0+(?=[0-9]))?([0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


@lru_cache(64)  # one comparison normalises the same texts several times
def normalize(text: str) -> str:
    """Removes an answer's typesetting. Idempotent. For nested typesetting the time is quadratic in the length."""
    previous = None
    while text != previous:  # ends, because no rule adds what another removes
        previous = text
        text = _normalize_once(text)
    return text


def _normalize_once(text: str) -> str:
    if plain := _PLAIN.fullmatch(text):
        return "".join(plain.groups())
    if not text.isascii():
        text = _VULGAR_FRACTION.sub(_as_fraction, text)
        text = _ROOT_SIGN.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or ''}}}", text).translate(_SIGNS)
    text = _NUMBER_SET.sub(lambda match: rf"\mathbb{{{match[1] or match[2]}}}", text)
    text = _REALS_MINUS.sub(r"\\mathbb{R}\\setminus ", text)
    text = _EMPTY_BRACES.sub(r"\\emptyset ", text)
    text = _SPELLING.sub(lambda match: _SPELLINGS[match[0]], text)
    text = _FRACTION_COMMAND.sub(r"\\frac", _SPACES.sub(" ", _DROPPED.sub("", text)))
    text = _RELATION_COMMAND.sub(lambda match: "\\" + (match[1] or match[2]), text)
    if "." in text and ("..." in text or "dots" in text or "…" in text):
        text = _ENDLESS.sub(lambda match: rf"{match[1] or ''}\overline{{{match[2] or match[3]}}}", text)
    text = _strip_enclosure(_unwrap(text).strip().rstrip(". "))
    text = _CURRENCY.sub(r"\1", text)
    if "real" in text and (excluding := _REALS_EXCEPT.match(text)):
        points = _POINT_NAME.sub("", text[excluding.end() :]).replace(" and ", ", ")
        text = rf"\mathbb{{R}}\setminus\{{{points}\}}"
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if plain := _PLAIN.fullmatch(text):
        return "".join(plain.groups())
    text = _COMMAND_SPACE.sub(r"\1", _IDLE_SPACE.sub("", re.sub(r"\s+", " ", text)))
    text = _ITEM_PLUS.sub(r"\1", _REPEATING_DOTS.sub(r"\1\\overline{\2\3\4}", text))
    # A remaining comma separates items. Its space keeps it from becoming a thousands separator: "1, 234" is two numbers.
    return _LIST_COMMA.sub(", ", text)


def _as_fraction(vulgar: re.Match[str]) -> str:
    """Writes a mixed number as a fraction: 2½ is five halves."""
    numerator, denominator = _VULGAR[vulgar[2]]
    return rf"\frac{{{int(vulgar[1] or 0) * denominator + numerator}}}{{{denominator}}}"


def _unwrap(text: str) -> str:
    """Removes the text commands, each with its closing brace."""
    is_wrapper: list[bool] = []

    def replacement(token: re.Match[str]) -> str:
        if token["wrapper"] or token.group() == "{":
            is_wrapper.append(token["wrapper"] is not None)
            return "" if token["wrapper"] else "{"
        if token.group() == "}" and is_wrapper and is_wrapper.pop():
            return ""
        return token.group()

    return _WRAPPERS.sub(replacement, text)


def _strip_enclosure(text: str) -> str:
    for left, right in _ENCLOSURES:
        inner = text[len(left) : -len(right)]
        encloses = len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right)
        plain = inner.replace(r"\$", "") if left == "$" else inner
        if encloses and left not in plain and right not in plain:  # "$1$ and $2$" is not enclosed, "$\$5$" is
            return inner
    return text


_WORD = re.compile(r"[^\W\d_]{3,}|\bNo\b")
_CASELESS = re.compile(r"[A-Z][a-z]{2,}|[a-z]{5,}|(?i:yes|no|true|false)")


def sentence_case(text: str) -> str:
    """Lowers the first letter of words of three letters or more, and of "No": "East" becomes "east", but a point A stays A. A text
    with LaTeX commands stays unchanged."""
    return _WORD.sub(lambda word: word[0][0].lower() + word[0][1:], text) if "\\" not in text else text


def same_words(gold: str, answer: str) -> bool:
    """Returns whether two texts of ordinary words are equal but for upper and lower case, as "Paris" and "paris" are. Returns False
    for golds such as "ABC", "abc" or "x", which may be names of variables or points, where case has a meaning."""
    words = gold.split(" ")
    return gold.casefold() == answer.casefold() and all(map(_CASELESS.fullmatch, words))
