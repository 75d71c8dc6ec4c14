r"""Gold extractors: functions that take the gold answer out of a dataset's answer field, chosen by `gold_extractor`.

    none          the field is the answer
    gsm8k_hash    "... so 6 * 3 = <<6*3=18>>18\n#### 18"              -> "18"
    boxed         "... hence the area is $\boxed{\frac{1}{2}}$."       -> "\frac{1}{2}"
    last_number   "She has 18 eggs."                                   -> "18"

A missing gold answer is an error in the data, unlike a missing answer of a policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from nmoe.errors import UserError
from nmoe.grading.extraction import last_boxed, last_number
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS, normalize

# A gold with a box and more words than these is a solution: "The answer is $\\boxed{7}$." is none.
_MAX_WORDS = 8
_WORD = re.compile(r"[^\W\d_]{2,}")
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
    """Extracts the gold answer from `field` and strips it. Raises UserError if the extractor finds none."""
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
    """The reason why nothing can be compared with a gold answer; None if it is readable."""
    if len(gold.strip()) > MAX_ANSWER_CHARS:
        return f"the gold answer has {len(gold)} characters, more than {MAX_ANSWER_CHARS}: is it a whole solution?"
    if "####" in gold or (last_boxed(gold) is not None and len(_WORD.findall(_LATEX.sub(" ", gold))) > _MAX_WORDS):
        return f"the gold answer {gold!r:.80} is a solution"
    if not normalize(gold):
        return f"nothing is left of the gold answer {gold!r} without its typesetting"
    return None
