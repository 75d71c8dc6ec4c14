"""Shows the progress of a run (one live line on a terminal, plain lines elsewhere and in log.txt), and of other long commands."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as LiveProgress
from rich.table import Column
from rich.text import Text

from nmoe.runs.storage import append_whole

_PLAIN_INTERVAL_S = 10.0
_COUNTING_INTERVAL_S = 30.0
_FORMATS = {
    "reward": ".3f",
    "correctness": ".1%",
    "format": ".1%",
    "length": ".0f",
    "tokens/s": ",.0f",
    "mismatch": ".1e",
}
# The time left follows the pace of this many last steps: responses grow longer as a run goes on.
_PACE_STEPS = 20
# A terminal narrower than this has no room for a bar: the step says the same.
_BAR_COLUMNS = 110


class _Numbers(ProgressColumn):
    """The column with a step's numbers, the only one that is cut off where the terminal is narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")


def _fixed(text: str) -> TextColumn:
    return TextColumn(text, markup=False, table_column=Column(no_wrap=True))


class Progress:
    """Shows the steps of one run.

        with Progress(total=200, log=run.log, label="grpo", done=run.start_step) as progress:
            progress.step(1, {"reward": 0.31, "correctness": 0.12, "tokens/s": 5200.0})
            progress.note("checkpoint at step 1")

    The lines read `grpo 1/200  reward 0.310  correctness 12.0%  tokens/s 5,200  left 0:53:20`. A plain line is printed for the
    first step, the last, and at most every 10 s between them; on a terminal these lines go only to the log, and the live line shows
    the time left before the numbers.

    total: the last step of the run. done: the step it starts from. Raises StorageError if the log cannot be written.
    """

    def __init__(
        self,
        total: int,
        log: Path,
        label: str,
        done: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._log = log
        self._label = label
        # Not the stream that `logged` replaces it by, since the lines that belong in the log are appended here.
        self._console = console or Console(file=sys.stdout)
        self._clock = clock
        self._paces: deque[tuple[float, int]] = deque([(clock(), done)], maxlen=_PACE_STEPS + 1)
        self._last_line: float | None = None
        self._live = LiveProgress(
            _fixed("{task.description}"),
            *([BarColumn(bar_width=20)] if self._console.width >= _BAR_COLUMNS else []),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _fixed("{task.fields[left]}"),
            _Numbers(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task(label, total=total, completed=done, left="", numbers="")

    def __enter__(self) -> "Progress":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, done: int) -> None:
        """Starts the clock for the steps after `done`, so that the time left does not count earlier work."""
        self._paces.clear()
        self._paces.append((self._clock(), done))

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Shows that `step` is done, with its main numbers: reward, correctness, format, length, tokens/s and mismatch have their
        own formats, other names are shown with four digits."""
        now = self._clock()
        self._paces.append((now, step))
        shown = "  ".join(f"{name} {value:{_FORMATS.get(name, '.4g')}}" for name, value in numbers.items())
        left = f"left {self._left(step)}"
        self._live.update(self._task, completed=step, left=left, numbers=shown)
        due = self._last_line is None or now - self._last_line >= _PLAIN_INTERVAL_S
        if due or step == self._total:
            self._last_line = now
            line = f"{self._label} {step}/{self._total}  {shown}  {left}"
            if not self._console.is_terminal:
                self._print(line)
            self._append(line)

    def note(self, text: str) -> None:
        """Prints a line above the live line, and logs it."""
        self._print(text)
        self._append(text)

    def _print(self, line: str) -> None:
        # Soft wrapping keeps long lines whole in a pipe. Brackets in a text are not markup.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _append(self, line: str) -> None:
        append_whole(self._log, f"{line}\n".encode(errors="backslashreplace"))

    def _left(self, step: int) -> str:
        """Returns the estimated time to the last step, at the pace of the latest steps, as h:mm:ss."""
        (earlier, first), (now, _) = self._paces[0], self._paces[-1]
        return _duration((self._total - step) * (now - earlier) / max(1, step - first))


def _duration(seconds: float) -> str:
    """Formats a time in seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@contextmanager
def counting(
    label: str, total: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how many of `total` are done; the yielded function updates the number. On a terminal it is a live line,
    elsewhere a line every 30 s with the pace and the time left, so that a short command prints nothing."""
    console = console or Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    live = LiveProgress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task = live.add_task(label, total=total)
    last_line = clock()
    first: tuple[float, int] | None = None  # work of an interrupted command does not count for the pace

    def count(done: int) -> None:
        nonlocal last_line, first
        first = first or (clock(), done)
        live.update(task, completed=done)
        if not console.is_terminal and clock() - last_line >= _COUNTING_INTERVAL_S:
            last_line = clock()
            line = f"{label} {done:,}/{total:,}"
            if done > first[1]:
                pace = (done - first[1]) / (last_line - first[0])
                line += f"  {pace:.2g} a second  left {_duration((total - done) / pace)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with live:
        yield count
