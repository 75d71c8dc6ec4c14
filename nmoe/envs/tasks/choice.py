r"""Multiple choice: the answer is the letter of an option (MMLU, ARC and similar datasets).

A record has its options in the field `choices` or `options`: a list of texts, a dict of labels and texts, or ARC's dict of
the lists `label` and `text`. The gold is a letter, a label, an option's index counted from 0, or an option's text.

Accepted answers, by themselves, after words like "The answer is" or in a `\boxed{}`: a letter ("B", "b", "(B)", "B.", "[B]"),
a letter with its own option's text ("B. Paris"), or the text of one option ("Paris"). Two letters, a letter with another
option's text, and a letter in any other sentence are incorrect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask, group_metadata
from nmoe.errors import UserError
from nmoe.grading.extraction import last_boxed
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS, normalize
from nmoe.types import Metadata, Problem, Verdict

_LEAD = re.compile(
    r"(?:so,?\s+|therefore,?\s+)?(?:the\s+)?(?:(?:final|correct|right|best)\s+)*(?:answer|option|choice)(?:\s+is)?\s*[:=]?\s*"
    r"(?:(?:option|choice)\s+)?(?=\S)",
    re.IGNORECASE,
)
_LETTER = re.compile(r"(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])(?![A-Za-z]))\s*[.:)\-]?\s*", re.DOTALL)


class MultipleChoiceTask(QuestionTask):
    answer_form: AnswerForm = "final"
    record_fields = ("choices", "options", "subject", "level")
    gold_types = (str, int)

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        """Returns the question with its lettered options below it, the letter of the right option, and metadata."""
        labels, texts = _options(record)
        letters = ascii_uppercase[: len(texts)]
        lines = [f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True)]
        metadata = group_metadata(record) | {"options": json.dumps(texts)}
        return "\n".join([question, "", *lines]), letters[_index_of_gold(gold, labels, texts)], metadata

    def check_gold(self, problem: Problem) -> None:
        if "options" not in problem.metadata:
            raise UserError("a problem of type multiple_choice has options: give each record a field 'choices'")
        if problem.gold not in ascii_uppercase[: len(_texts(problem))]:
            raise UserError(f"the gold answer {problem.gold!r} is not the letter of an option")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, "A" if problem.gold != "A" else "B"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        letter = read_letter(attempt.answer, _texts(problem))
        if letter is None:
            return Verdict.of(False, "choice", "names no single option")
        return Verdict.of(letter == problem.gold, "choice", f"chose {letter}")

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        letters = [read_letter(answer, _texts(problem)) for answer in (one, other)]
        return letters[0] == letters[1] if letters[0] is not None else one.strip() == other.strip()


def read_letter(answer: str, texts: list[str]) -> str | None:
    """Returns the letter of the option that an answer names; None if the answer names no option, or several."""
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    box = last_boxed(answer)
    text = normalize(answer if box is None else box.content)
    if (lead := _LEAD.match(text)) is not None:
        text = text[lead.end() :].strip()
    letters, known = ascii_uppercase[: len(texts)], [_plain(one) for one in texts]
    match = _LETTER.match(text)
    letter = None if match is None else next(group for group in match.groups() if group).upper()
    rest = _plain(text if match is None else text[match.end() :])
    if letter is not None and letter in letters and not rest:
        return letter
    if known.count(_plain(text)) == 1:
        return letters[known.index(_plain(text))]
    if letter is not None and letter in letters and rest == known[letters.index(letter)]:
        return letter
    return None


def _plain(text: str) -> str:
    return normalize(text).casefold()


def _texts(problem: Problem) -> list[str]:
    texts = json.loads(str(problem.metadata["options"]))
    assert isinstance(texts, list)
    return texts


def _options(record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns labels and texts of the options, in order."""
    options = record.get("choices", record.get("options"))
    if isinstance(options, Mapping) and {"label", "text"} <= options.keys():
        labels, texts = list(options["label"]), list(options["text"])
    elif isinstance(options, Mapping):
        # In a table from Parquet, each row has the keys of all rows.
        given = {label: text for label, text in options.items() if text is not None}
        labels, texts = list(given), list(given.values())
    elif isinstance(options, list | tuple):
        labels, texts = list(ascii_uppercase[: len(options)]), list(options)
    else:
        raise UserError("no options: a multiple-choice record has a list or a table of them in 'choices' or 'options'")
    if not 2 <= len(texts) <= len(ascii_uppercase) or len(labels) != len(texts):
        raise UserError(f"{len(texts)} options with {len(labels)} labels; there must be 2 to 26, each with one")
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"every option is a text that is not empty, not {json.dumps(texts)[:80]}")
    return [str(label) for label in labels], texts


def _index_of_gold(gold: str, labels: list[str], texts: list[str]) -> int:
    wanted = gold.strip()
    for known in ([label.upper() for label in labels], list(ascii_uppercase[: len(texts)])):
        bare = wanted.strip("().").upper()
        if bare in known:
            return known.index(bare)
    if wanted.isdecimal() and int(wanted) < len(texts):
        return int(wanted)
    plain = [_plain(text) for text in texts]
    if plain.count(_plain(wanted)) == 1:
        return plain.index(_plain(wanted))
    raise UserError(f"the gold answer {gold[:80]!r} is neither a letter, a label, a number nor the text of one option")
