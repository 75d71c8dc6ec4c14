r"""Parses the form of an answer: a single value (scalar), or values in a list, brackets, a set, a union, a matrix or a relation.

    "x = 5"                      label "x", scalar "5"
    "5\text{ cm}"                scalar "5" with the unit "cm"
    "(1, 2)", "[0, 1)"           brackets "()" and "[)", for a point or an interval
    "1, 2", "1 and 2"            a list, which is ordered
    "\{1, 2\}", "1 or 2", "\pm 2"     a set, which is unordered
    "x = 3, y = 4"               a record: named values in any order
    "(x, y) = (3, 4)"            the same record
    "(0, 1) \cup [3, \infty)"    a union of brackets
    "1 < x \le 2", "y = 2x + 1"  relations
    "\{x \mid x > 2\}"           the relation "x > 2"
    "n \equiv 1 \pmod{3}"        a congruence
    "\begin{pmatrix} ... "       a matrix, by rows

`read_answer` never fails: a text that it cannot take apart is a scalar, which equals only the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nmoe.grading.math.names import name_of, names_in
from nmoe.grading.math.normalization import normalize
from nmoe.grading.math.units import MARKS, REALS, UNIT_CLOSE, UNIT_OPEN, Scalar, dollars, read_scalar

_MAX_DEPTH = 30

Kind = Literal["list", "record", "brackets", "set", "union", "difference", "matrix", "relation", "congruence"]


@dataclass(frozen=True)
class Compound:
    r"""A form with parts: a list, set, interval, matrix, relation or record.

    `detail` is the brackets ("(]"), the relations ("<,\le"), the shape of a matrix ("2x3"), a record's names (one per line),
    a congruence's modulus, or "pm" for the set of a value with both signs.
    """

    kind: Kind
    parts: tuple[Form, ...]
    detail: str = ""


Form = Scalar | Compound


@dataclass(frozen=True)
class Answer:
    r"""A parsed answer: its text, form, label and condition.

    `label` is the name that it gives its value ("x", "f(x)"), or "". `relation` is then the form that still has the name.
    `condition` is a condition on an index at its end, "k\in\mathbb{Z}". `text` is the whole normalised text.
    """

    text: str
    form: Form
    label: str = ""
    relation: Form | None = None
    condition: str = ""


_WORDED = re.compile(r"(?<=[0-9}\])\s%])\\(?:text|textrm|textnormal|textbf|mathrm|mbox)\s*\{\s*([^{}]*?)\s*\}")
_GROUPED_COUNT = re.compile(r"\s*([0-9]{1,3}(?:,[0-9]{3})+)((?:\.[0-9]+)?(?:\s|\\?%|[\ue000A-Za-z]).*)", re.DOTALL)
_GROUPS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_SEPARATING_WORD = re.compile(r"\s*(?:,\s*)?(?:or|and)\s*")

_FIRST_NUMBER = re.compile(r"\s*\(1\)(?:\s|\\[ ,;:]|~)*[^)\s]")
_PART_NUMBER = re.compile(r"(?:^|(?<=[\s;,.]))\(([1-9])\)(?=[\s\\~])")
_SEPARATORS = re.compile(r"^(?:[\s~]|\\[ ,;:]|\\q?quad)+|(?:[\s~;,.]|\\[ ,;:]|\\q?quad)+$")

# The condition on the index of a general solution.
_CONDITION = re.compile(
    # The index comes after a comma or a bracket: the i of \pi in "k\pi, k\in Z" belongs to the expression.
    r"(.+?)(?:, ?| )?\(?((?:(?<=[,(])[a-z], ?|(?<=, )[a-z], ?)?[a-z]\\in ?"
    r"(?:\\mathbb\{[NQRZ]\}|[NQRZ])(?:[_^](?:[*+]|\{[*+]\}))?)\)?",
    re.DOTALL,
)
_LINE_NAME = re.compile(r"(?:line ?)?[A-Za-z](?:_(?:[0-9]|\{[0-9]\}))?: ?(?=[^:]*[xy][^:]*$)")
_TOKEN = re.compile(r"\\begin\{[a-z]+\*?\}|\\end\{[a-z]+\*?\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING, _CLOSING = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}
_RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\lt", r"\gt", r"\ne"}
_PLAIN_RELATION = {r"\lt": "<", r"\gt": ">"}
_REVERSED = {"=": "=", "<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_MATRIX = re.compile(r"\\begin\{([pbBv]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)


def read_answer(text: str) -> Answer:
    """Reads the form of an answer from its raw text."""
    if (amount := dollars(text)) is not None:
        return Answer(f"${normalize(text)}", Scalar(normalize(text), amount, "$"))
    if (numbered := _numbered(text)) is not None:
        parts = tuple(_read(normalize(part), 0) for part in numbered)
        return Answer(normalize(text), Compound("record", parts, "\n".join(map(str, range(1, len(parts) + 1)))))
    marked = _WORDED.sub(_mark, MARKS.sub("?", text))
    if grouped := _GROUPED_COUNT.fullmatch(marked):  # "1,234 eggs" is one number
        marked = grouped[1].replace(",", "") + grouped[2]
    normal = _LINE_NAME.sub("", normalize(marked), 1) if "=" in marked and ":" in marked else normalize(marked)
    condition = ""
    if r"\in" in normal and (conditioned := _CONDITION.fullmatch(normal)):
        normal, condition = conditioned.groups()
    return replace(_read_unconditioned(normal, normalize(MARKS.sub(" ", marked))), condition=condition)


def _numbered(text: str) -> list[str] | None:
    r"""Splits "(1) 3; (2) 5", the answer to a question in parts, into its values; None for any other raw text."""
    if not _FIRST_NUMBER.match(text):
        return None
    _, *pieces = _PART_NUMBER.split(text)
    numbers, values = pieces[::2], [_SEPARATORS.sub("", value) for value in pieces[1::2]]
    return values if len(values) > 1 and numbers == [*map(str, range(1, len(values) + 1))] and all(values) else None


def _read_unconditioned(normal: str, plain: str) -> Answer:
    tokens = _tokens(normal)
    if tokens is None:
        return Answer(plain, Scalar(plain, None))
    relations = _split(tokens, _RELATIONS | {r"\in"})
    if len(relations) == 2:
        (left, _), (right, relation) = relations
        if relation == "=" and not name_of(left) and name_of(right):
            left, right = right, left
        if relation in ("=", r"\in") and (name := name_of(left)):
            form = _read(right, 0)
            if names := names_in(name):
                return Answer(plain, _record(names, form) or form)
            return Answer(plain, form, name, Compound("relation", (read_scalar(left), form), relation))
    form = _read(normal, 0)
    return _hoist_label(plain, form)


def _mark(worded: re.Match[str]) -> str:
    words = worded[1]
    if _SEPARATING_WORD.fullmatch(words) or not words:
        return f" {words} "
    return f"{UNIT_OPEN}{words}{UNIT_CLOSE}"


def _hoist_label(text: str, form: Form) -> Answer:
    """Turns "x = 1 or x = 2" into the set of 1 and 2 with the label "x"."""
    if isinstance(form, Compound) and form.kind in ("list", "set") and (items := _assignments(form.parts)):
        names = {name for name, _ in items}
        if len(names) == 1:
            name, values = names.pop(), tuple(value for _, value in items)
            if inner := names_in(name):
                records = [_record(inner, value) for value in values]
                found = tuple(one for one in records if one is not None)
                return Answer(text, Compound(form.kind, found) if len(found) == len(values) else form)
            return Answer(text, Compound(form.kind, values), name, form)
    return Answer(text, form)


def _record(names: Sequence[str], form: Form) -> Form | None:
    """Pairs names such as "x, y" with the values in brackets "(3, 4)", in each item if there are several; None if they do not
    fit.
    """
    if isinstance(form, Scalar):
        return None
    if form.kind in ("list", "set"):
        records = [_record(names, part) for part in form.parts]
        found = tuple(one for one in records if one is not None)
        return Compound(form.kind, found) if len(found) == len(form.parts) else None
    if form.kind != "brackets" or form.detail != "()" or len(form.parts) != len(names):
        return None
    return Compound("record", form.parts, "\n".join(names))


def _assignments(forms: Sequence[Form]) -> list[tuple[str, Form]] | None:
    """Returns names and values if each form is an equation of a name and a value, like "x = 3"; None otherwise."""
    items = [_assignment(form) for form in forms]
    found = [item for item in items if item is not None]
    return found if found and len(found) == len(items) else None


def _assignment(form: Form) -> tuple[str, Form] | None:
    if isinstance(form, Compound) and form.kind == "relation" and form.detail == "=" and len(form.parts) == 2:
        name, value = form.parts
        # A tuple on the left was read as brackets, but its text is still a name.
        text = name.text if isinstance(name, Scalar) else _tuple_text(name)
        if (known := name_of(text)) is not None:
            return known, value
    return None


def _tuple_text(form: Compound) -> str:
    if form.kind != "brackets" or form.detail != "()":
        return ""
    return f"({', '.join(part.text if isinstance(part, Scalar) else '' for part in form.parts)})"


def _tokens(text: str) -> list[tuple[str, int]] | None:
    """Splits a text into tokens, each with its bracket depth; None if brackets are unbalanced or nested too deep."""
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
    """Splits tokens at separators outside all brackets; returns each text with the separator before it ("" for the first)."""
    parts: list[tuple[str, str]] = []
    text, before = "", ""
    for token, depth in tokens:
        if depth == 0 and token in separators:
            parts.append((text.strip(), before))
            text, before = "", token
        else:
            text += token
    return [*parts, (text.strip(), before)]


_DOMAIN = re.compile(r"([A-Za-z])(?:\\in ?(?:\\mathbb\{R\}|R))?")
_SAME_DOMAIN = re.compile(r"[A-Za-z]\\in ?(?:\\mathbb\{R\}|R), ?|, ?[A-Za-z]\\in ?(?:\\mathbb\{R\}|R)$")
_CONGRUENCE = re.compile(
    r"(?:([^=]+?)\\equiv ?)?([^=]+?)[ (]*(?:\\[bp]?mod|(?<![A-Za-z])mod) ?(?:\{([0-9a-z]+)\}|([0-9a-z]+))\)?"
)
_WORD_SEPARATORS = re.compile(r"(?<![A-Za-z\\])(?:,\s*)?(or|and)(?![A-Za-z])")


def _read(text: str, level: int) -> Form:
    """Parses a normalised text, which may still contain unit marks, to its form."""
    tokens = _tokens(text)
    if tokens is None or level > _MAX_DEPTH or not text:
        return read_scalar(text)
    if _WORD_SEPARATORS.search(text):
        # Replaced by single signs, so that they separate only outside brackets.
        words = {"or": "\ue002", "and": ","}
        text = _WORD_SEPARATORS.sub(lambda match: words[match[1]], text)
        tokens = _tokens(text) or []
    for separators, build in _SPLITS:
        parts = _split(tokens, separators)
        if len(parts) > 1:
            if not all(part for part, _ in parts):
                return read_scalar(text)
            return build(parts, level + 1)
    if (congruence := _CONGRUENCE.fullmatch(text)) is not None:
        name, residue, *moduli = congruence.groups()
        sides = [side for side in (name, residue) if side]
        modulus = next(one for one in moduli if one)
        return Compound("congruence", tuple(_read(normalize(side), level + 1) for side in sides), modulus)
    if (both := _plus_and_minus(tokens)) is not None:
        return Compound("set", tuple(_read(normalize(one), level + 1) for one in both), "pm")
    return _bracketed(text, tokens, level) or read_scalar(text)


def _many(kind: Kind) -> Callable[[list[tuple[str, str]], int], Form]:
    return lambda parts, level: Compound(kind, tuple(_read(normalize(part), level) for part, _ in parts))


def _alternatives(parts: list[tuple[str, str]], level: int) -> Form:
    """Returns the set of alternatives joined by "or". In "1, 2 or 3" the items of the list before "or" belong to the set."""
    first, *rest = (_read(normalize(part), level) for part, _ in parts)
    several = [isinstance(one, Compound) and one.kind in ("list", "record", "set") for one in rest]
    if isinstance(first, Compound) and first.kind == "list" and several == [False]:
        return Compound("set", (*first.parts, *rest))
    return Compound("set", (first, *rest))


def _list(parts: list[tuple[str, str]], level: int) -> Form:
    r"""Returns the parsed form of items that separators divide: a record if each item assigns to another name, as in "x=1, y=2";
    a set if an item has a plus-minus sign, as in "0, \pm 1" (three items), else a list in order.

    `parts` are pairs of an item's text and the separator before it; `level` is the depth of nesting, which is limited.
    """
    forms: list[Form] = []
    kind: Kind = "list"
    for part, _ in parts:
        form = _read(normalize(part), level)
        if isinstance(form, Compound) and (form.kind == "list" or form.detail == "pm"):
            forms += form.parts
            kind = "set" if form.detail == "pm" else kind
        else:
            forms.append(form)
    items = _assignments(forms)
    if items and len({name for name, _ in items}) == len(items) > 1:
        return Compound("record", tuple(value for _, value in items), "\n".join(name for name, _ in items))
    return Compound(kind, tuple(forms))


def _difference(parts: list[tuple[str, str]], level: int) -> Form:
    """Returns the form of a set difference: the real numbers without some points become a union of intervals."""
    forms = tuple(_read(normalize(part), level) for part, _ in parts)
    whole, *less = forms
    without = less[0] if len(less) == 1 and isinstance(less[0], Compound) and less[0].kind == "set" else None
    if whole != Scalar(REALS, None) or without is None:
        return Compound("difference", forms)
    return without_points(without)


def without_points(points: Compound) -> Form:
    """Returns the real numbers without the points of a set: a union of intervals if the points are numbers, else a set
    difference.
    """
    numbers = {
        part.number.value: part for part in points.parts if isinstance(part, Scalar) and part.number and not part.unit
    }
    if len(numbers) != len(points.parts):
        return Compound("difference", (Scalar(REALS, None), points))
    ordered = [numbers[value] for value in sorted(numbers)]
    ends = [Scalar(r"-\infty", None), *ordered, Scalar(r"\infty", None)]
    return Compound(
        "union", tuple(Compound("brackets", tuple(ends[index : index + 2]), "()") for index in range(len(ends) - 1))
    )


def _relation(parts: list[tuple[str, str]], level: int) -> Form:
    """Returns a relation, written from the smaller side to the greater: "3 > x" becomes "x < 3"."""
    sides = tuple(_read(normalize(part), level) for part, _ in parts)
    signs = [_PLAIN_RELATION.get(sign, sign) for _, sign in parts[1:]]
    if all(sign in (">", r"\ge") for sign in signs):
        sides, signs = sides[::-1], [_REVERSED[sign] for sign in signs[::-1]]
    return Compound("relation", sides, ",".join(signs))


_SPLITS: list[tuple[set[str], Callable[[list[tuple[str, str]], int], Form]]] = [
    ({"\ue002"}, _alternatives),
    ({";"}, _list),
    ({","}, _list),
    (_RELATIONS, _relation),
    ({r"\cup"}, _many("union")),
    ({r"\setminus"}, _difference),
]


def _plus_and_minus(tokens: Sequence[tuple[str, int]]) -> tuple[str, str] | None:
    """Returns a text with one plus-minus sign in both readings, plus and minus; None for other texts."""
    signs = [token for token, _ in tokens if token in (r"\pm", r"\mp")]
    if len(signs) != 1:
        return None
    return tuple(  # type: ignore[return-value]
        "".join(sign if token in (r"\pm", r"\mp") else token for token, _ in tokens).removeprefix("+") for sign in "+-"
    )


def _bracketed(text: str, tokens: Sequence[tuple[str, int]], level: int) -> Form | None:
    """Returns the form of a text that one pair of brackets encloses; None for other texts."""
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
    plain = (
        (opening, closing) == ("{", "}")
        and len(parts) > 1
        and not _GROUPS.fullmatch(",".join(part for part, _ in parts))
    )
    if (opening, closing) == (r"\{", r"\}") or plain:
        if any(token in ("|", ":") for token, _ in inner):
            return _by_property(inner, level)
        return Compound("set", tuple(_read(normalize(part), level + 1) for part, _ in parts))
    if len(parts) == 1:
        return _read(normalize(parts[0][0]), level + 1) if (opening, closing) in (("(", ")"), ("{", "}")) else None
    forms = tuple(_read(normalize(part), level + 1) for part, _ in parts)
    return Compound("brackets", forms, opening + closing)


def _by_property(inner: Sequence[tuple[str, int]], level: int) -> Form | None:
    r"""Returns the inequalities that define a set of real numbers, as in "x \mid x > 2"; None for any other set."""
    (before, _), *after = _split(inner, {"|", ":"})
    condition = "|".join(text for text, _ in after)
    domain = _DOMAIN.fullmatch(before)
    if domain is None:
        return None
    variable = domain[1]
    form = _read(normalize(_SAME_DOMAIN.sub("", condition)), level + 1)
    relations = form.parts if isinstance(form, Compound) and form.kind in ("list", "set") else (form,)
    bounds = all(
        isinstance(one, Compound)
        and one.kind == "relation"
        and "=" not in one.detail
        and Scalar(variable, None) in one.parts
        for one in relations
    )
    return form if bounds else None


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
