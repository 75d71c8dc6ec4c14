r"""The form of an answer: a scalar, or scalars in a list, brackets, a set, a union, a matrix or a relation.

    "x = 5"                      label "x", scalar "5"
    "5\text{ cm}"                scalar "5" with the unit "cm"
    "(1, 2)", "[0, 1)"           brackets "()" and "[)", whether they are a point or an interval
    "1, 2", "1 and 2"            a list, which has an order
    "\{1, 2\}", "1 or 2", "\pm 2"  a set, which has none
    "(0, 1) \cup [3, \infty)"    a union of brackets
    "1 < x \le 2", "y = 2x + 1"  relations
    "\begin{pmatrix} ...  "      a matrix, by rows

`read_answer` never fails: what it can not take apart is a scalar, which only the same text equals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from nmoe.rl.grading.normalization import normalize
from nmoe.rl.grading.numbers import Number, read_number

_MAX_DEPTH = 30

Kind = Literal["list", "brackets", "set", "union", "matrix", "relation"]


@dataclass(frozen=True)
class Scalar:
    """One value: its text without the unit, and the number that this is, if it is one.

    `unit` is "" without one, and "%" for percent, whose number is the one before the sign. `base` is that of digits with a base
    as subscript, "" without one.
    """

    text: str
    number: Number | None
    unit: str = ""
    base: str = ""


@dataclass(frozen=True)
class Compound:
    """Several forms. `detail` is the brackets ("(]"), the relations ("<,\\le") or the shape of a matrix ("2x3")."""

    kind: Kind
    parts: tuple[Form, ...]
    detail: str = ""


Form = Scalar | Compound


@dataclass(frozen=True)
class Answer:
    """A whole answer. `label` is the name it gives its value ("x", "f(x)"), "" without one, and `relation` then the form with
    the name still in it. `text` is the whole normalised text."""

    text: str
    form: Form
    label: str = ""
    relation: Form | None = None


# Letters in braces whose command says that they are words: the unit of what stands before.
_UNIT_OPEN, _UNIT_CLOSE = "\ue000", "\ue001"
_WORDED = re.compile(r"(?<=[0-9}\])\s%])\\(?:text|textrm|textnormal|textbf|mathrm|mbox)\s*\{\s*([^{}]*?)\s*\}")
_MARKED_UNIT = re.compile(
    rf"(.+?){_UNIT_OPEN}\s*([^{_UNIT_OPEN}{_UNIT_CLOSE}]*?)\s*{_UNIT_CLOSE}(?:\^\{{?([0-9])\}}?)?", re.DOTALL
)
_MARKS = re.compile(f"[{_UNIT_OPEN}{_UNIT_CLOSE}]")
_GROUPED_COUNT = re.compile(r"\s*([0-9]{1,3}(?:,[0-9]{3})+)((?:\.[0-9]+)?(?:\s|\\?%|[\ue000A-Za-z]).*)", re.DOTALL)
_SEPARATING_WORD = re.compile(r"\s*(?:,\s*)?(?:or|and)\s*")

_DEGREE = re.compile(r"(.+?)(?:\^\\circ|\\degree)")
_PERCENT = re.compile(r"(.+?)\\?%")
_BARE_UNIT = re.compile(r"(.*[0-9}\])]|.*\\pi) ?([A-Za-z][A-Za-z ]*(?:/[A-Za-z]+)?)(?:\^\{?([0-9])\}?)?")
_DOLLARS = re.compile(r"\s*[+-]?\\?\$\s?[0-9.,]+\s*")
# An angle may be in degrees, and so may the argument of a function, which is no unit of its value.
_ANGLE = re.compile(r"(?:[^A-Za-z\\]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z])|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]))+")
_FOREIGN_CURRENCY = re.compile(r"([€£¥₹₩₽])(.+)")
_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\}))?'?(?:\([A-Za-z](?:, ?[A-Za-z])*\))?")
_BASE = re.compile(r"([0-9A-Fa-f]+)_(?:\{([0-9]{1,2}|[a-z]+)\}|([0-9]))")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BASES |= {"ten": "10", "twelve": "12", "sixteen": "16"}

_UNITS = {
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "meter": "m metre",
    "in": "inch",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "kg": "kilogram",
    "mg": "milligram",
    "gram": "g",
    "lb": "lbs pound",
    "oz": "ounce",
    "ml": "milliliter millilitre",
    "liter": "l litre",
    "sec": "s second",
    "min": "minute",
    "hr": "h hour",
    "day": "",
    "degree": "deg",
    "%": "percent percentage pct",
    "mph": "milesperhour",
    "dollar": "",
    "cent": "",
    "unit": "",
}
_UNIT_NAMES = {spelling: name for name, spellings in _UNITS.items() for spelling in [name, *spellings.split()]}
_POWER_WORDS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}

_TOKEN = re.compile(r"\\begin\{[a-z]+\*?\}|\\end\{[a-z]+\*?\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING, _CLOSING = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}
_RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\lt", r"\gt", r"\ne"}
_PLAIN_RELATION = {r"\lt": "<", r"\gt": ">"}
_REVERSED = {"=": "=", "<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_MATRIX = re.compile(r"\\begin\{([pbBv]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)


def read_answer(text: str) -> Answer:
    """The form of an answer in raw text."""
    if _DOLLARS.fullmatch(text) and (amount := read_number(normalize(text))) is not None:
        return Answer(normalize(text), Scalar(normalize(text), amount, "dollar"))
    marked = _WORDED.sub(_mark, _MARKS.sub("?", text))
    if grouped := _GROUPED_COUNT.fullmatch(marked):  # "1,234 eggs" is one number
        marked = grouped[1].replace(",", "") + grouped[2]
    normal = normalize(marked)
    plain = normalize(_MARKS.sub(" ", marked))
    tokens = _tokens(normal)
    if tokens is None:
        return Answer(plain, Scalar(plain, None))
    relations = _split(tokens, _RELATIONS | {r"\in"})
    if len(relations) == 2:
        (left, _), (right, relation) = relations
        if relation == "=" and not _NAME.fullmatch(left) and _NAME.fullmatch(right):
            left, right = right, left
        if relation in ("=", r"\in") and _NAME.fullmatch(left):
            form = _read(right, 0)
            return Answer(plain, form, left, Compound("relation", (_scalar(left), form), relation))
    form = _read(normal, 0)
    return _hoist_label(plain, form)


def _mark(worded: re.Match[str]) -> str:
    words = worded[1]
    if _SEPARATING_WORD.fullmatch(words) or not words:
        return f" {words} "
    return f"{_UNIT_OPEN}{words}{_UNIT_CLOSE}"


def _hoist_label(text: str, form: Form) -> Answer:
    """ "x = 1 or x = 2" labels the set of 1 and 2."""
    if isinstance(form, Compound) and form.kind in ("list", "set") and form.parts:
        items = [_assignment(part) for part in form.parts]
        names = {None if item is None else item[0] for item in items}
        if len(names) == 1 and None not in names:
            values = tuple(item[1] for item in items if item is not None)
            return Answer(text, Compound(form.kind, values), str(names.pop()), form)
    return Answer(text, form)


def _assignment(form: Form) -> tuple[str, Form] | None:
    if isinstance(form, Compound) and form.kind == "relation" and form.detail == "=" and len(form.parts) == 2:
        name, value = form.parts
        if isinstance(name, Scalar) and _NAME.fullmatch(name.text):
            return name.text, value
    return None


def _tokens(text: str) -> list[tuple[str, int]] | None:
    """Tokens with the depth of brackets that they stand at; None where the brackets do not match in number, or nest too deep."""
    tokens, depth = [], 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _CLOSING or token.startswith(r"\end{"):
            depth -= 1
        if depth < 0 or depth > _MAX_DEPTH:
            return None
        tokens.append((token, depth))
        if token in _OPENING or token.startswith(r"\begin{"):
            depth += 1
    return tokens if depth == 0 else None


def _split(tokens: Sequence[tuple[str, int]], separators: set[str]) -> list[tuple[str, str]]:
    """The texts between separators that stand outside of all brackets, each with the separator before it ("" for the first)."""
    parts: list[tuple[str, str]] = []
    text, before = "", ""
    for token, depth in tokens:
        if depth == 0 and token in separators:
            parts.append((text.strip(), before))
            text, before = "", token
        else:
            text += token
    return [*parts, (text.strip(), before)]


_WORD_SEPARATORS = re.compile(r"(?<![A-Za-z\\])(?:,\s*)?(or|and)(?![A-Za-z])")


def _read(text: str, level: int) -> Form:
    """The form of a normalised text, marks of units in it."""
    tokens = _tokens(text)
    if tokens is None or level > _MAX_DEPTH or not text:
        return _scalar(text)
    if _WORD_SEPARATORS.search(text):
        # As signs of their own, so that they are separators outside of brackets only.
        words = {"or": "\ue002", "and": ","}
        text = _WORD_SEPARATORS.sub(lambda match: words[match[1]], text)
        tokens = _tokens(text) or []
    for separators, build in _SPLITS:
        parts = _split(tokens, separators)
        if len(parts) > 1:
            if not all(part for part, _ in parts):
                return _scalar(text)
            return build(parts, level + 1)
    if (both := _plus_and_minus(tokens)) is not None:
        return Compound("set", tuple(_read(normalize(one), level + 1) for one in both))
    return _bracketed(text, tokens, level) or _scalar(text)


def _many(kind: Kind) -> Callable[[list[tuple[str, str]], int], Form]:
    return lambda parts, level: Compound(kind, tuple(_read(normalize(part), level) for part, _ in parts))


def _relation(parts: list[tuple[str, str]], level: int) -> Form:
    """Relations read from the smaller side to the greater: "3 > x" is "x < 3"."""
    sides = tuple(_read(normalize(part), level) for part, _ in parts)
    signs = [_PLAIN_RELATION.get(sign, sign) for _, sign in parts[1:]]
    if all(sign in (">", r"\ge") for sign in signs):
        sides, signs = sides[::-1], [_REVERSED[sign] for sign in signs[::-1]]
    return Compound("relation", sides, ",".join(signs))


_SPLITS: list[tuple[set[str], Callable[[list[tuple[str, str]], int], Form]]] = [
    ({"\ue002"}, _many("set")),
    ({",", ";"}, _many("list")),
    (_RELATIONS, _relation),
    ({r"\cup"}, _many("union")),
]


def _plus_and_minus(tokens: Sequence[tuple[str, int]]) -> tuple[str, str] | None:
    """The two readings of a text with one sign "plus or minus" in it."""
    signs = [token for token, _ in tokens if token in (r"\pm", r"\mp")]
    if len(signs) != 1:
        return None
    return tuple(  # type: ignore[return-value]
        "".join(sign if token in (r"\pm", r"\mp") else token for token, _ in tokens).removeprefix("+") for sign in "+-"
    )


def _bracketed(text: str, tokens: Sequence[tuple[str, int]], level: int) -> Form | None:
    """What a pair of brackets around the whole text makes of what is in it."""
    if len(tokens) < 2 or any(depth == 0 for _, depth in tokens[1:-1]):
        return None
    opening, closing = tokens[0][0], tokens[-1][0]
    if opening.startswith(r"\begin{"):
        return _matrix(text, level)
    if opening not in _OPENING or closing not in _CLOSING:
        return None
    inner = [(token, depth - 1) for token, depth in tokens[1:-1]]
    parts = _split(inner, {",", ";"})
    if not all(part for part, _ in parts):
        return None
    if (opening, closing) == (r"\{", r"\}"):
        if any(token in ("|", ":", r"\mid", r"\vert") for token, _ in inner):
            return None  # a set by its property
        return Compound("set", tuple(_read(normalize(part), level + 1) for part, _ in parts))
    if len(parts) == 1:
        return _read(normalize(parts[0][0]), level + 1) if (opening, closing) in (("(", ")"), ("{", "}")) else None
    forms = tuple(_read(normalize(part), level + 1) for part, _ in parts)
    return Compound("brackets", forms, opening + closing)


def _matrix(text: str, level: int) -> Form | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    tokens = _tokens(match[2])
    if tokens is None:
        return None
    rows = [row for row, _ in _split(tokens, {r"\\"})]
    if rows and not rows[-1]:
        rows.pop()  # a line break may end the last row
    cells = [[cell for cell, _ in _split(_tokens(row) or [], {"&"})] for row in rows]
    if not cells or len({len(row) for row in cells}) != 1 or not all(cell for row in cells for cell in row):
        return None
    kind = "determinant" if match[1] == "vmatrix" else "matrix"
    parts = tuple(_read(normalize(cell), level + 1) for row in cells for cell in row)
    return Compound("matrix", parts, f"{kind} {len(cells)}x{len(cells[0])}")


def _scalar(text: str) -> Scalar:
    """A scalar with its unit or base taken off."""
    if match := _MARKED_UNIT.fullmatch(text):
        return _with_unit(match[1], _unit(match[2], match[3] or ""))
    text = normalize(_MARKS.sub(" ", text))
    if number := read_number(text):
        return Scalar(text, number)
    if match := _BASE.fullmatch(text):
        base = match[2] or match[3]
        digits = match[1].lstrip("0").upper() or "0"
        base = _BASES.get(base, base)
        return Scalar(digits, read_number(digits), base=base) if base.isdigit() else Scalar(text, None)
    if match := _PERCENT.fullmatch(text):
        return _with_unit(match[1], "%")
    if match := _DEGREE.fullmatch(text):
        return _with_unit(match[1], "degree")
    if match := _FOREIGN_CURRENCY.fullmatch(text):
        return _with_unit(match[2], match[1])
    if match := _BARE_UNIT.fullmatch(text):
        words, unit = match[2], _unit(match[2], match[3] or "")
        # A single letter may be a variable: 5m. Words that are no known unit are one only after a number: 18 apples.
        known = len(words) > 1 and unit.partition("^")[0] in _UNITS
        counted = any(len(word) >= 3 for word in words.split()) and read_number(normalize(match[1])) is not None
        if known or counted:
            return _with_unit(match[1], unit)
    return Scalar(text, None)


def _with_unit(text: str, unit: str) -> Scalar:
    value = normalize(_MARKS.sub(" ", text))
    if unit == "degree" and not _ANGLE.fullmatch(value):
        return Scalar(rf"{value}^\circ", None)
    return Scalar(value, read_number(value), unit)


def _unit(words: str, power: str) -> str:
    """One spelling of a unit: "square centimetres" and "cm^2" are "cm^2"; what is not known is its words without a plural s."""
    names = words.lower().replace(".", " ").split()
    powers = [_POWER_WORDS[name] for name in names if name in _POWER_WORDS]
    spelled = "".join(name for name in names if name not in _POWER_WORDS)
    singulars = (spelled, spelled.removesuffix("s"), spelled.removesuffix("es"))
    unit = next((_UNIT_NAMES[one] for one in singulars if one in _UNIT_NAMES), spelled.removesuffix("s"))
    power = power or "".join(powers)
    return f"{unit}^{power}" if power and power != "1" else unit


def percent_value(number: Number) -> Number:
    """What a number of percent comes to: 50% is 0.5."""
    return Number(number.value / Fraction(100), number.decimal)
