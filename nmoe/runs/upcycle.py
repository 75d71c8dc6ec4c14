"""Makes a mixture of experts of a dense checkpoint: `nmoe model upcycle MODEL --experts 4 --top-k 2`."""

from __future__ import annotations

from pathlib import Path

from nmoe.errors import UserError
from nmoe.model.peft_format import is_adapter
from nmoe.model.upcycle import Upcycling, mixture_of, write_mixture
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.storage import bytes_free
from nmoe.runs.whole import whole_directory
from nmoe.text.tokenizer import Tokenizer


def upcycle(model: Path, settings: Upcycling, out: Path | None = None) -> str:
    """Writes the mixture with its tokenizer to `out`, by default models/NAME-moe4 for four experts; returns a line that says what
    was written.

    `out` appears under its name only when it is whole. Raises UserError for settings that make no mixture, a model that cannot be
    upcycled, an `out` that exists, and a disk without room; StorageError for one that fails.
    """
    settings.check()
    source = resolve_checkpoint(model)
    if is_adapter(source):
        raise UserError(f"{source}: an adapter; make a whole model of it first: nmoe export {model} DIRECTORY")
    name = model.resolve().name.removesuffix(".gguf")
    out = Path("models") / f"{name}-moe{settings.experts}" if out is None else out
    if out.exists():
        raise UserError(f"{out}: exists; name another directory with --out")
    mixture = mixture_of(source, settings)
    tokenizer, size = Tokenizer.load(source), mixture.parameters * mixture.dtype.itemsize
    if size > (free := bytes_free(out)):
        there = f"takes {size:,} bytes, and {free:,} are free there"
        raise UserError(f"{out}: {there}; make room, or name a directory of another disk with --out")
    with whole_directory(out, "name another directory with --out") as partial:
        write_mixture(mixture, settings, partial)
        tokenizer.save(partial)
    chosen = f"{settings.top_k} of {settings.experts} experts" + (" and a shared one" if settings.shared_expert else "")
    return f"written to {out}: {mixture.parameters:,} weights as {mixture.family.MODEL_TYPE}, {chosen} for each token"
