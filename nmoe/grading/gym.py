"""reasoning-gym in worker processes: generates dataset entries, and scores answers with the datasets' own verifiers.

Some verifiers evaluate the answer as Python: `eval(answer)` in string_insertion, and sympy's `parse_expr`, which calls `eval`,
in countdown. Others give full marks to a text that is no answer. So this process replaces two names before the first call:
`eval` by `ast.literal_eval`, and `parse_expr` by a version that accepts only numbers, operators, single letters and function
names. The list of such verifiers was made for the one version below, so no other version is accepted.

Other verifiers read a part of the answer and ignore the rest: `quantum_lock` takes every A, B and C out of any text,
`gsm_symbolic` the first number, `time_intervals` the first word, and `word_sorting` the first words. Some datasets have several
right answers, so that the gold cannot be asked for. `has_form` therefore describes a whole answer of each of these datasets.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nmoe.errors import UserError
from nmoe.extras import how_to_install

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?"
_CLAIM = r"\w+ is an? \w+"
_MOVE = r"Move disk \d+ from Peg \d+ to Peg \d+"

_FORMS = {
    "advanced_geometry": rf"\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)|{_NUMBER}\s*°?",
    # No letter has two digits.
    "cryptarithm": r"(?!.*([A-Z])\s*=.*\1\s*=)[A-Z]\s*=\s*\d(?:\s*,\s*[A-Z]\s*=\s*\d)*",
    "fraction_simplification": r"(\$?)\s*(?:\d+\s*/\s*\d+|\\d?frac\{\d+\}\{\d+\})\s*\1",
    "gsm_symbolic": r"[-+]?[\d,]*(?:\d|\.\d+)",
    "kakurasu": r"[01\s,]+",
    # Each person is one thing.
    "knights_knaves": rf"(?!.*\b(\w+) is .*\b\1 is ){_CLAIM}(?:,? and {_CLAIM}|, {_CLAIM})*\.?",
    "polynomial_equations": rf"(?:{_NUMBER}(?:\s*,\s*{_NUMBER})*)?",
    "quantum_lock": r"[A-Ca-c](?:\s*(?:(?:→|->|,)\s*)?[A-Ca-c])*",
    "rush_hour": r"[A-Z][+-]\d+(?:[\s,]+[A-Z][+-]\d+)*",
    "sokoban": r"[UDLRudlr\s]+",
    "survo": r"[\d\s,]+",
    "time_intervals": rf"\d+(?: days?)?|{_TIME}|\d+ days?, {_TIME}",
    "tower_of_hanoi": rf"{_MOVE}(?:[^\S\n]*\n\s*{_MOVE})*",
}
_WHOLE = {name: re.compile(form) for name, form in _FORMS.items()}

# Their only right answer is the gold; case is theirs to choose in the first two.
_WORDS_IN_ANY_CASE = {"spell_backward", "letter_jumble"}
_WORDS = {"word_sorting"}
_NUMBERS = {"gsm_symbolic": Fraction(0), "coin_flip": Fraction(1, 10**4)}
"""The largest permitted difference from the gold, by dataset, for datasets whose answer is a number."""

_SEVERAL = (
    "countdown cryptarithm graph_color intermediate_integration jugs kakurasu knight_swap n_queens palindrome_generation "
    "polynomial_equations prime_factorization propositional_logic puzzle24 quantum_lock rubiks_cube rush_hour simple_integration "
    "sokoban tower_of_hanoi word_ladder"
)
SEVERAL_ANSWERS = frozenset(_SEVERAL.split())
"""Datasets whose problems may have right answers beside the gold."""


def has_form(name: str, answer: str, gold: str) -> bool:
    """Returns whether the whole text has the form of an answer to this dataset and, for datasets with one right word or number,
    whether it is the gold; True if the dataset's verifier itself reads the whole text."""
    answer = answer.strip()
    if name in _WHOLE and not _WHOLE[name].fullmatch(answer):
        return False
    if name in _WORDS or name in _WORDS_IN_ANY_CASE:
        said, right = (re.sub(r"\s*,\s*", ", ", " ".join(text.split())) for text in (answer, gold))
        return said == right if name in _WORDS else said.casefold() == right.casefold()
    if name in _NUMBERS:
        try:
            return abs(Fraction(answer.replace(",", "")) - Fraction(gold.replace(",", ""))) <= _NUMBERS[name]
        except (ValueError, ZeroDivisionError):
            return False
    # Its verifier accepts other numbers near the gold's, such as 27.1 for 27.71.
    if name == "number_sorting":
        return [*map(float, re.findall(_NUMBER, answer))] == [*map(float, re.findall(_NUMBER, gold))]
    # Its verifier compares `bool(answer) == bool(gold)` on two texts.
    if name == "game_of_life_halting":
        return answer.casefold() == gold.casefold()
    # There is no distance between nan and any number.
    return name != "complex_arithmetic" or not re.search("nan|inf", answer, re.IGNORECASE)


VERSION = "0.1.25"

# Modules whose verifier calls eval on the answer, and modules that imported sympy's parse_expr by name.
_EVALUATING = [
    "algorithmic.string_insertion",
    "algorithmic.spiral_matrix",
    "algorithmic.binary_matrix",
    "games.n_queens",
]
_PARSING = ["games.countdown", "games.puzzle24"]
_NAMES = "sin cos tan sec csc cot asin acos atan arcsin arccos arctan sinh cosh tanh exp log ln sqrt pi Abs"
_EXPRESSION = re.compile(rf"(?:[0-9.+\-*/^()\s]|(?<![A-Za-z_])(?:{_NAMES.replace(' ', '|')}|[A-Za-z])(?![A-Za-z_]))*")


def check_installed() -> None:
    """Raises UserError if the package is absent or has another version."""
    try:
        found = version("reasoning_gym")
    except PackageNotFoundError:
        raise UserError(
            f'type = "reasoning_gym" needs the package reasoning-gym: {how_to_install("environments")}'
        ) from None
    if found != VERSION:
        raise UserError(
            f"reasoning-gym {found} is installed, and nmoe knows how to keep the verifiers of {VERSION} from running answers as "
            f"code: pip install reasoning-gym=={VERSION}"
        )


def warm_up() -> None:
    """Imports reasoning-gym and replaces the functions by which its verifiers would run an answer as code."""
    check_installed()
    import reasoning_gym  # noqa: F401
    import sympy
    from sympy.parsing.sympy_parser import parse_expr

    def guarded(text: str, *arguments: Any, **options: Any) -> Any:
        if not isinstance(text, str) or not _EXPRESSION.fullmatch(text):
            raise ValueError("not an expression of numbers, letters and functions")
        return parse_expr(text, *arguments, **options)

    sympy.parse_expr = guarded
    for name in _PARSING:
        importlib.import_module(f"reasoning_gym.{name}").parse_expr = guarded  # type: ignore[attr-defined]
    for name in _EVALUATING:
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval  # type: ignore[attr-defined]


def entries(name: str, config: str, seed: int, size: int, start: int, count: int) -> dict[str, Any]:
    """Generates `count` of a dataset's entries, from index `start` on: {"entries": [[QUESTION, ANSWER], ...]}.

    Returns {"error": WHY} if there is no such dataset or `config` does not fit it. Call it in a worker: some datasets iterate
    over sets, and only workers share one hash seed and so one order.
    """
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        return {"error": f"reasoning-gym has no dataset {name!r}; it has {', '.join(sorted(DATASETS))}"}
    try:
        made = _dataset(name, config, seed, size)
        found = [made[index] for index in range(start, start + count)]
    except (TypeError, ValueError, AssertionError, AttributeError, KeyError) as error:
        return {"error": f"reasoning-gym's {name} refuses config: {error}"}
    return {"entries": [[entry["question"], entry["answer"] or ""] for entry in found]}


def score(name: str, config: str, seed: int, size: int, index: int, answer: str, partial: bool = False) -> float:
    """Scores an answer to entry `index` with the dataset's verifier: 1 if it is right, else 0. The score is also 0 if the verifier
    raises on the answer, or if the text holds more than an answer (`has_form`).

    With `partial`, the verifier's scores between 0 and 1 are kept, but none for the gold inside another text: by default the
    package pays its share of the characters, 0.67 for `130` where 13 is right.

    If the verifier raises on the gold answer too, the verifier or its data is at fault, and the exception propagates; so do
    MemoryError and RecursionError.
    """
    made = _dataset(name, config, seed, size)
    entry = made[index]
    verifier: Callable[[str, Any], Any] = made.score_answer
    try:
        given = float(verifier(answer, entry))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # some verifiers raise on some answers
        if entry["answer"] is not None:
            verifier(entry["answer"], entry)
        return 0.0
    gold, source = str(entry["answer"]), entry.get("metadata", {}).get("source_dataset", name)
    if not math.isfinite(given) or not has_form(source, answer, gold):
        return 0.0
    if given < 1.0 and (not partial or gold in answer):
        return 0.0
    return min(1.0, max(0.0, given))


@lru_cache(64)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(config), seed=seed, size=size)
