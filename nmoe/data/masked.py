"""Write records as the tokens and labels that SFT trains on, for other trainers and for a look by hand.

{"input_ids": [5, 6, 7, 2], "labels": [-100, -100, 7, 2], "loss_mask": [0, 0, 1, 1]}

A label is the token to predict at its own place, as transformers has it: the model shifts. The first is never predicted, so it is
never a label.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path

from nmoe.config.tables.recipes import DatasetSettings
from nmoe.data.examples import Example, Examples, read_examples
from nmoe.data.rows import is_pattern
from nmoe.errors import StorageError, UserError
from nmoe.text.renderers import IGNORED, RenderFormat, make_renderer
from nmoe.text.tokenizer import SMALLEST_VOCABULARY, Tokenizer

_SLICE = re.compile(r"@\[[^]]*\]$")


def export_masked(
    settings: DatasetSettings, out: Path, directory: Path | None, form: RenderFormat, context_tokens: int | None
) -> Iterator[str]:
    """Writes a line for every sequence to `out`, with the tokenizer in `directory`; None: a byte tokenizer. Yields lines that say
    what was read and what was left out: as in training, sequences longer than `context_tokens`, where that is given.

    Raises UserError, with file and line, for a bad record, or for an `out` that is among what is read, and StorageError. `out` is
    written whole or not at all.
    """
    read = _SLICE.sub("", settings.path)
    if _is_read(out, read):
        raise UserError(f"{out}: is among what is read, {read}; name another file to write")
    tokenizer = Tokenizer.train((), SMALLEST_VOCABULARY) if directory is None else Tokenizer.load(directory)
    renderer = make_renderer(tokenizer, form)
    examples = read_examples(settings, renderer, tokenizer, context_tokens or sys.maxsize)
    _write(out, examples)
    yield from examples.notes()
    yield f"{out}: {len(examples):,} sequences"


def _is_read(out: Path, read: str) -> bool:
    """Whether a path is, or would be once it is written, among the files that a name or pattern stands for."""
    target = out.resolve()
    if not is_pattern(read):
        return out.exists() and (target == Path(read).resolve() or Path(read).resolve() in target.parents)
    pattern = Path.cwd() / read
    if "**" in pattern.parts:
        # `**/` stands for no directory, too.
        return any(fnmatch(str(target), sign) for sign in (str(pattern), str(pattern).replace("**/", "")))
    parts = zip(target.parts, pattern.parts, strict=False)
    return len(target.parts) == len(pattern.parts) and all(fnmatchcase(part, sign) for part, sign in parts)


def masked(example: Example) -> dict[str, list[int]]:
    """The line of a sequence: `input_ids`, `labels` and `loss_mask`, each of its length."""
    labels = [IGNORED, *example.labels[1:].tolist()]
    return {
        "input_ids": example.ids.tolist(),
        "labels": labels,
        "loss_mask": [int(label != IGNORED) for label in labels],
    }


def _write(out: Path, examples: Examples) -> None:
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as file:
            for index in range(len(examples)):
                file.write(json.dumps(masked(examples[index])) + "\n")
        os.replace(partial, out)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written: {error.strerror or error}") from error
