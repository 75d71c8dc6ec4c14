"""The CSV sink: metrics.csv in the run's directory, with a row for each step and a column for each metric."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from nmoe.runs.sinks.sinks import Attempt, scalars_of
from nmoe.runs.storage import append_whole, write_atomically


class CsvSink:
    """Appends a row for each step. A cell is empty if the step lacks the metric; every other cell reads back as exactly its number.

    A metric that first appears in a later step adds a column, for which the file is written anew. Alerts are only in alerts.jsonl.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._path = attempt.directory / "metrics.csv"
        rows = [{"step": row["step"]} | scalars_of(row) for row in attempt.rows]
        self._columns = list(dict.fromkeys(name for row in ({"step": 0}, *rows) for name in row))
        write_atomically(self._path, _lines(self._columns, rows, header=True))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {"step": step, **scalars}
        new = [name for name in row if name not in self._columns]
        if not new:
            append_whole(self._path, _lines(self._columns, [row]))
            return
        with self._path.open(newline="", encoding="utf-8") as file:
            earlier = list(csv.DictReader(file))
        columns = [*self._columns, *new]
        write_atomically(self._path, _lines(columns, [*earlier, row], header=True))
        self._columns = columns

    def alert(self, step: int, message: str) -> None:
        pass

    def close(self) -> None:
        pass


def _lines(columns: Sequence[str], rows: Iterable[Mapping[str, object]], header: bool = False) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode(errors="backslashreplace")
