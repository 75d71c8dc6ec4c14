"""How to go on with a run, in the words of the command that runs it: messages end with it."""

from collections.abc import Iterator
from contextlib import contextmanager

_options = ["--run.resume=true"]


def how_to_resume() -> str:
    """What to add to the command that was started, to go on with its run: `--run.resume=true`."""
    return _options[-1]


@contextmanager
def resumed_by(options: str) -> Iterator[None]:
    """In the `with` block, in every thread, runs are resumed by `options`: those of a command that starts runs of its own."""
    _options.append(options)
    try:
        yield
    finally:
        _options.pop()
