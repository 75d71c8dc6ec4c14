"""Chooses the records to hold out for evaluation. Records with the same question stay together, so that no evaluated question is
trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from nmoe.data.records import Conversation, Preference, Prompt, PromptCompletion, Record, Stepwise, Text
from nmoe.errors import UserError
from nmoe.text.conversation import conversation_key, question_key


def prompt_of(record: Record) -> str:
    """Returns the question of a record in normalised form (`nmoe.text.conversation`): the user's turns of its prompt, or of a
    conversation before its first answer. Of a text record it is the whole text."""
    match record:
        case Text():
            return question_key(record.text)
        case Conversation():
            said = record.messages
            asked = next((index for index, message in enumerate(said) if message.role == "user"), len(said))
            answered = (index for index in range(asked, len(said)) if said[index].role == "assistant")
            return conversation_key(said[: next(answered, len(said))])
        case Prompt() | PromptCompletion() | Preference() | Stepwise():
            return conversation_key(record.prompt)


def held_out(prompts: Sequence[str], share: float, seed: int) -> set[int]:
    """Draws about a `share` of the records (at least one; from 1 on, that number) and returns their indices; `prompts` has the
    question of each. Records of one prompt are drawn together, in the order of the prompt's hash with the seed, so that adding or
    removing a record changes little. Empty if all records have one prompt and outnumber the wanted ones."""
    indices: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        indices.setdefault(prompt, []).append(index)
    order = sorted(
        indices, key=lambda prompt: hashlib.sha256(f"held out/{seed}/{prompt}".encode(errors="replace")).digest()
    )
    wanted = max(1, round(share * len(prompts)) if share < 1 else round(share))
    drawn: set[int] = set()
    for prompt in order:
        if len(drawn) + len(indices[prompt]) <= wanted:
            drawn.update(indices[prompt])
    if not drawn and len(indices) > 1:
        smallest: list[int] = min(indices.values(), key=len)
        drawn.update(smallest)
    return drawn


def refuse_empty(kind: str, count: int, drawn: int, share: float) -> None:
    """Raises UserError if the split leaves no record to train on, or none to evaluate on."""
    if drawn == count:
        held = f"a share of {share:g}" if share < 1 else f"{share:g}"
        raise UserError(f"of {count} {kind} {held} held out leaves none to train on")
    if drawn == 0:
        raise UserError(
            f"all {count} {kind} have one prompt, which is trained on or evaluated on and not both; name other data to "
            "evaluate on in records.held_out_path"
        )
