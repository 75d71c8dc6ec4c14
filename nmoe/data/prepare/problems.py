r"""A problem as others compare it, an integer answer, and a solution that ends in it."""

from __future__ import annotations

import hashlib
import re

from nmoe.text.question import question_key

INTEGER = r"^\s*\$?\s*(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+))\s*\$?\s*$"
r"""An integer as answers write it: `42`, ` -7 `, `$1,024$`. For Python's `re` and RE2 alike."""

_INTEGER = re.compile(INTEGER, re.ASCII)
_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_END_OF_FORMULA = re.compile(r"(\$\$?)[.\s]*")


def integer(answer: str) -> str | None:
    """The integer that an answer is, without commas and leading zeros: `"$1,024$"` is `"1024"`; None for anything else."""
    match = _INTEGER.match(answer)
    if match is None:
        return None
    digits = match[1].replace(",", "")
    value = digits.lstrip("-").lstrip("0") or "0"
    return f"-{value}" if digits.startswith("-") and value != "0" else value


def digest(problem: str) -> bytes:
    """MD5 of the problem's key (`nmoe.text.question`) without spaces and dollar signs, 16 bytes: what makes two problems the same.
    Collections differ in how they typeset one problem."""
    plain = question_key(problem).replace("$", "").replace(" ", "")
    return hashlib.md5(plain.encode(errors="replace"), usedforsecurity=False).digest()


def ends_in_box(solution: str, label: str) -> str | None:
    r"""The solution with `\boxed{label}` as its end; None if its last box is not the label, or it has none.

    A last formula that is only the box becomes the box, and after any other end the box is repeated on its own line.
    """
    start = solution.rfind("\\boxed")
    match = None if start < 0 else _BOX.match(solution, start)
    if match is None or integer(match[1]) != label:
        return None
    box, before, after = f"\\boxed{{{label}}}", solution[:start], solution[match.end() :]
    if not after.strip(" \n."):
        return before + box
    formula = _END_OF_FORMULA.fullmatch(after)
    if formula is not None and before.endswith(formula[1]) and before.count("$") % 2 == len(formula[1]) % 2:
        return before.removesuffix(formula[1]) + box
    return f"{solution.rstrip()}\n\n{box}"
