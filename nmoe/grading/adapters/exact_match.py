r"""The exact-match reward on texts: 1 if the response's answer equals the gold answer by docs/guides/grading.md, else 0.

The answer is read as with `format = "boxed"`: the last `\boxed{}`, else the last number, ignoring control tokens such as
<|im_end|>. A response with Harmony channels must be well formed; its last final message holds the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nmoe.errors import InfrastructureError, UserError
from nmoe.grading.extraction import Extraction, from_final, from_response
from nmoe.grading.math.answers import grade_answers
from nmoe.grading.math.normalization import MAX_ANSWER_CHARS, normalize
from nmoe.grading.math.question import Policy
from nmoe.text.harmony import read_completion

_CONTROL = re.compile(r"<\|[^|<>]*\|>")
# The question is unknown, but its answer has to be worked out.
_POLICY = Policy(question="")
_NO_ANSWER = Extraction(None, 0, False, False)
# Characters of a long response: some 1,000 tokens.
_LONG = 4000


def exact_match(responses: Sequence[str], golds: Sequence[object]) -> tuple[list[float], list[Extraction]]:
    """Returns the reward of each response, 0 or 1, and the answer extracted from it.

    Raises UserError for an unusable gold answer, and InfrastructureError if a comparison was lost and so has no verdict.
    """
    texts = [_gold(gold, index) for index, gold in enumerate(golds)]
    read = [read_response(response) for response in responses]
    answered = [(gold, one.answer) for gold, one in zip(texts, read, strict=True) if one.answer is not None]
    verdicts = grade_answers(answered, _POLICY)
    rewards = []
    for one in read:
        verdict = None if one.answer is None else next(verdicts)
        if verdict is not None and verdict.outcome == "error":
            raise InfrastructureError(f"an answer could not be compared: {verdict.reason}")
        rewards.append(0.0 if verdict is None else verdict.score)
    return rewards, read


def read_response(response: str) -> Extraction:
    """Extracts the answer from a response, in plain text or in Harmony channels; no answer if the channels are malformed, or if the
    last one is not a final message that ends in <|return|>."""
    if "<|channel|>" not in response:
        return from_response(_CONTROL.sub(" ", response))
    completion = read_completion(response)
    if completion.error is not None or completion.end != "return" or completion.final is None:
        return _NO_ANSWER
    return from_final(completion.final, bare_final=False)


def appears_cut(response: str) -> bool:
    """Guesses from its text whether a response was cut at the token limit: it does not end in a control token, and ends in
    mid-sentence or is long without a box (training guidelines, section 10)."""
    text = response.rstrip()
    if not text or text.endswith("|>"):
        return False
    in_sentence = text[-1].isalpha() or text[-1] in ",;:([{+-*/=<^\\"
    return in_sentence or (len(text) > _LONG and not read_response(text).has_boxed)


def _gold(gold: object, index: int) -> str:
    text = str(gold) if isinstance(gold, str | int | float) and not isinstance(gold, bool) else ""
    if not normalize(text) or len(text.strip()) > MAX_ANSWER_CHARS:
        raise UserError(f"label {index} is {gold!r:.80}, and has to be an answer: a number or a text that is not empty")
    return text
