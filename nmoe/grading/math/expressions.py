r"""Converts scalar texts to LaTeX for math-verify's parser, or finds that they are not expressions.

The parser reads generously: it takes "3 4" for 3 + 4, "5 east" for a product of letters, x' for x, `\sin 30^\circ` for the
sine of 30 radians and 1/2x for 1/(2x). So it is given only texts with a single reading: numbers, letters, known functions,
brackets and operators. Any other text equals only the same text.
"""

from __future__ import annotations

import re
from functools import lru_cache

FUNCTIONS = (
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "ln",
    "log",
    "exp",
)
GREEK = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "theta",
    "lambda",
    "mu",
    "nu",
    "rho",
    "sigma",
    "tau",
    "phi",
    "omega",
)
_OTHER = ["sqrt", "frac", "pi", "cdot", "times", "div", "infty", "binom", "lfloor", "rfloor", "lceil", "rceil"]
_COMMANDS = frozenset([*FUNCTIONS, *GREEK, *_OTHER])

_CLOSED_BY = {"(": ")", "[": "]", "{": "}"}
# Bounded because the parser and sympy recurse.
_MAX_DEPTH = 30

_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|\\(?P<command>[A-Za-z]+)|(?P<letters>[A-Za-z]+)"
    r"|(?P<sign>[-+*/^_(){}\[\]|!])|(?P<space> )"
)
_WORDS = re.compile(r"(?<![A-Za-z\\])(pi|" + "|".join(FUNCTIONS) + r")(?![A-Za-z])")
_ROOT_OR_BRACKET = re.compile(r"(?<![A-Za-z])\\?sqrt ?\(|[()]|[^()s\\]+|.", re.DOTALL)
_SUBSCRIPT = re.compile(r"_([0-9])(?![0-9]) ?")
_POWER = re.compile(r"\^(-[0-9]+|[0-9]{2,}|\\frac\{[0-9]+\}\{[0-9]+\})")
_TOWER = re.compile(r"\^(?:\{[^{}]*\}|[0-9A-Za-z])\^")
_DIVISION = re.compile(r"/ ?(?:[0-9]+|[A-Za-z]) ?(?:[A-Za-z(\\{])")
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
_REPEATING = re.compile(r"([0-9]{1,20})\.([0-9]{0,20})\\overline\{([0-9]{1,20})\}")
_PRODUCT = re.compile(r"[A-Za-z](?: ?(?:\\cdot|\\times|\*) ?[A-Za-z])+|[a-z](?: [a-z])+")


def both_latex(gold: str, answer: str) -> tuple[str, str] | None:
    r"""Converts two texts to LaTeX for math-verify's parser; None if either is not an expression.

    Letters alone, "xy", count as a product only if the other text shows one: "x\cdot y".
    """
    sources = latex(gold), latex(answer)
    if sources[0] is None or sources[1] is None:
        product = any(_PRODUCT.fullmatch(text) for text in (gold, answer))
        sources = latex(gold, product), latex(answer, product)
    return (sources[0], sources[1]) if sources[0] is not None and sources[1] is not None else None


@lru_cache(4096)
def latex(text: str, product: bool = False) -> str | None:
    """Converts a normalised scalar text to LaTeX for the parser, with decimals as exact fractions; None if it is not an expression.

    With `product`, up to four letters alone are a product of variables.
    """
    source = _WORDS.sub(r"\\\1 ", _with_roots(_REPEATING.sub(_as_ratio, text.replace("**", "^"))))
    source = _SUBSCRIPT.sub(r"_{\1}", source)
    tokens = list(_TOKEN.finditer(source))
    if not tokens or sum(len(token.group()) for token in tokens) != len(source) or not _is_balanced(source):
        return None
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.lastgroup == "command" and token["command"] not in _COMMANDS:
            return None
        if token.lastgroup == "number" and before is not None and before.group() == " ":
            return None  # two numbers side by side, or a word and a number
        alone = token.lastgroup == "letters" and not _are_variables(token.group(), tokens)
        if alone and (not product or len(token.group()) > 4):
            return None
    if _TOWER.search(source) or _DIVISION.search(source) or re.search(r"[0-9]\.?[eE][0-9]", source):
        return None
    return _POWER.sub(r"^{\1}", _DECIMAL.sub(_as_fraction, source))


def _with_roots(text: str) -> str:
    r"""Rewrites "sqrt(x)" as "\sqrt{x}", matching brackets in one pass."""
    if "sqrt" not in text:
        return text
    parts: list[str] = []
    open_: list[int | None] = []  # for each open bracket the index of its root in `parts`
    for token in _ROOT_OR_BRACKET.finditer(text):
        sign = token.group()
        if sign == ")":
            root = open_.pop() if open_ else None
            if root is not None:
                parts[root], sign = r"\sqrt{", "}"
        elif sign.endswith("("):
            open_.append(len(parts) if len(sign) > 1 else None)
        parts.append(sign)
    return "".join(parts)


def _is_balanced(source: str) -> bool:
    open_ = []
    for sign in re.findall(r"[(){}\[\]]", source):
        if sign in _CLOSED_BY:
            open_.append(_CLOSED_BY[sign])
        elif not open_ or open_.pop() != sign:
            return False
        if len(open_) > _MAX_DEPTH:
            return False
    return not open_


def _are_variables(letters: str, tokens: list[re.Match[str]]) -> bool:
    """Returns whether adjacent letters are a product of variables: a single letter is; two to four letters are if the text also
    has a number, sign or command."""
    if len(letters) == 1:
        return True
    return len(letters) <= 4 and any(token.lastgroup in ("number", "sign", "command") for token in tokens)


def _as_fraction(decimal: re.Match[str]) -> str:
    whole, digits = decimal.groups()
    return rf"\frac{{{int(whole + digits)}}}{{{10 ** len(digits)}}}"


def letters(text: str) -> set[str]:
    """Returns the letters of a text outside LaTeX commands."""
    return set("".join(re.findall(r"(?<!\\)(?<![\\A-Za-z])[A-Za-z]+|(?<=_)[A-Za-z]", _without_commands(text))))


def _without_commands(text: str) -> str:
    return re.sub(r"\\[A-Za-z]+", " ", text)


def comparable(gold: str, answer: str) -> bool:
    """Returns whether two texts do not use both i and I, which the parser reads as the imaginary unit although I may be another
    quantity.
    """
    both = letters(gold) | letters(answer)
    return not {"i", "I"} <= both


def _as_ratio(repeating: re.Match[str]) -> str:
    whole, fixed, cycle = repeating.groups()
    numerator = int(whole + fixed + cycle) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(cycle) - 1)}}}"
