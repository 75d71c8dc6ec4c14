"""reasoning-gym in worker processes: generates dataset entries, and scores answers with the datasets' own verifiers.

Some verifiers evaluate the answer as Python: `eval(answer)` in string_insertion, and sympy's `parse_expr`, which calls `eval`,
in countdown. Others give full marks to a text that is no answer. So this process replaces two names before the first call:
`eval` by `ast.literal_eval`, and `parse_expr` by a version that accepts only numbers, operators, single letters and function
names. The list of such verifiers was made for the one version below, so no other version is accepted.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nmoe.errors import UserError
from nmoe.extras import how_to_install
from nmoe.grading.gym_forms import has_form

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
    """Imports the package and disables its evaluation of answers."""
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
    """Generates some of a dataset's entries: {"entries": [[QUESTION, ANSWER], ...]}.

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
    """Scores an answer to entry `index` with the dataset's verifier: 1 where it is right, else 0. An answer that makes the
    verifier raise scores 0, as does one that is more than an answer (`nmoe.grading.gym_forms`).

    With `partial`, the verifier's scores between 0 and 1 are kept, but none for the gold inside another text: by default the
    package pays its share of the characters, 0.67 for `130` where 13 is right.

    If the verifier raises on the gold answer too, the verifier or its data is at fault, and the exception propagates.
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
