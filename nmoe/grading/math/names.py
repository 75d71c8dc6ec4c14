r"""The names that answers give their values: "x", "f(x)", "a_{n}", "PQ", "\angle BAC", "V_{A}:V", "(a, b)".

A name is a letter, a row of capital letters, a word or a Greek letter, with optional subscript, primes and arguments, under
optional bars or an angle sign. Ratios of names and names in brackets are names too. A product or sum never is: "2x = 4" is an
equation.
"""

from __future__ import annotations

import re

_GREEK = "alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|varphi|omega|Delta|Omega|ell|eta|xi|psi"
_FIGURE = r"\\(?:angle|measuredangle|triangle|odot|square|sin|cos|tan|cot|log|ln|max|min)"
_SUBSCRIPT = rf"_(?:[0-9A-Za-z]|\\(?:{_GREEK})|\{{(?:{_FIGURE} ?)?[0-9A-Za-z ,+-]{{1,12}}\}})"
_LETTERS = rf"(?:[A-Z]{{1,6}}|[A-Za-z]|[A-Za-z][a-z]{{2,11}}|\\(?:{_GREEK}))"
_ARGUMENTS = r"\((?:[A-Za-z]|[0-9]{1,4})(?:, ?(?:[A-Za-z]|[0-9]{1,4}))*\)"
_PLAIN = rf"(?:(?:m ?)?{_FIGURE} ?)?{_LETTERS}(?:{_SUBSCRIPT})?'*(?:(?:\^\{{-1\}})?{_ARGUMENTS})?"
_ONE = rf"(?:{_PLAIN}|\|{_PLAIN}\||\\(?:overline|overrightarrow|vec|widehat|hat|bar|operatorname)\{{{_PLAIN}\}})"
_NAME = re.compile(rf"{_ONE}|\\frac\{{{_ONE}\}}\{{{_ONE}\}}|{_ONE}(?:[:/]{_ONE}){{1,5}}")
_TUPLE = re.compile(rf"\(({_ONE}(?:, ?{_ONE}){{1,9}})\)")
_FUNCTION = re.compile(r"([A-Za-z]|\\[a-z]+)\(([A-Za-z](?:, ?[A-Za-z])*)\)")
_ONE_IN_BRACES = re.compile(r"(?<=_)\{([0-9A-Za-z])\}")
_TERM = re.compile(r"[A-Za-z]_[a-z]")
_LETTER = re.compile(
    r"\\[A-Za-z]+|(?<![A-Za-z])(?:arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|sin|cos|tan|cot|sec|csc|log|exp|ln|pi)(?![A-Za-z])|[A-Za-z]"
)


def name_of(text: str) -> str | None:
    """Returns a normalised text that is a name, or a tuple of names, in a uniform spelling; None for any other text."""
    if _NAME.fullmatch(text) or _TUPLE.fullmatch(text):
        return _ONE_IN_BRACES.sub(r"\1", text)
    return None


def names_in(name: str) -> tuple[str, ...]:
    """Returns the names in a tuple of names such as "(x, y)"; empty for a single name."""
    inner = _TUPLE.fullmatch(name)
    return tuple(one.strip() for one in inner[1].split(",")) if inner and "(" not in inner[1] else ()


def names_a_term(name: str) -> bool:
    """Returns whether a name is the general term of a sequence: a_n."""
    return _TERM.fullmatch(name) is not None


def renamed_arguments(gold: str, answer: str) -> dict[str, str] | None:
    """Returns the letters to replace so that the answer's f(t) becomes the gold's f(x): {"t": "x"}; None if the functions
    differ.
    """
    functions = _FUNCTION.fullmatch(gold), _FUNCTION.fullmatch(answer)
    if functions[0] is None or functions[1] is None or functions[0][1] != functions[1][1]:
        return None
    wanted, written = ([one.strip() for one in function[2].split(",")] for function in functions if function)
    if len(wanted) != len(written) or len(set(wanted)) != len(wanted) or len(set(written)) != len(written):
        return None
    return dict(zip(written, wanted, strict=True))


def rename(text: str, letters: dict[str, str]) -> str | None:
    """Replaces letters in a text, all at once; None if a new letter is already in use."""
    found = {match[0] for match in _LETTER.finditer(text)}
    if (set(letters.values()) - letters.keys()) & found:
        return None
    return _LETTER.sub(lambda match: letters.get(match[0], match[0]), text)
