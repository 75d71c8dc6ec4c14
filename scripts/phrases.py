"""Counts expressions that make text hard to read, and names them where they come back.

    python scripts/phrases.py            # counts; exit code 1 where an expression occurs more often than scripts/phrases.json says
    python scripts/phrases.py --where "those of"
    python scripts/phrases.py --lower    # writes today's counts where they fell

Code and TOML of nmoe/, README.md and the pages of docs/ are searched, across the ends of lines; of private words, names too.
Plain English has the subject first and names things: "the keys of a layer", not "what a layer keeps".
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from commits import ROOT

COUNTS = Path(__file__).with_suffix(".json")


TOTALS = ("phrases in all", "private words in all")


@dataclass(frozen=True)
class Phrase:
    """An expression, with a bad and a good example. A blank stands for any blanks, line ends and comment signs; `allow` has longer
    expressions that may stay."""

    expression: str
    bad: str
    good: str
    allow: tuple[str, ...] = ()

    def matches(self, text: str) -> Iterator[int]:
        """The positions of the expression in a text, but for those inside an allowed one."""
        allowed = [found.span() for each in self.allow for found in _pattern(each).finditer(text)]
        for found in _pattern(self.expression).finditer(text):
            if not any(start <= found.start() and found.end() <= end for start, end in allowed):
                yield found.start()


def _pattern(expression: str) -> re.Pattern[str]:
    words = expression.replace(" ", r"\s+(?:(?:#|//)\s+)?")
    return re.compile(rf"(?<![a-z])(?:{words})(?![a-z])", re.IGNORECASE)


PHRASES = (
    Phrase("those of", "The weights are those of the last step", "The weights come from the last step"),
    Phrase("that of", "Its default is that of the checkpoint", "The checkpoint decides its default"),
    Phrase(
        "what (?:is|was)",
        "What is left of the budget",
        "The rest of the budget",
        allow=("what is so", r"what is \d+ [-+*]", r"`what is [^`|]*\?", "what is the second letter"),
    ),
    Phrase("what it", "What it was sampled from", "The distribution that it was sampled from"),
    Phrase("what of", "Removes what of a group does not run", "Frees the blocks of sequences that are not running"),
    Phrase("of then", "The weights of then", "The weights at that time"),
    Phrase("None where", "Returns the answer, None where there is none", "Returns the answer, if any"),
    Phrase("of (?:its|their|one's|a user's) own", "A process of its own", "A separate process"),
    Phrase("whatever", "Whatever the device", "On any device"),
    Phrase("nobody|no one", "A flag nobody sets", "An unused flag"),
    Phrase("can not", "It can not be read", "It cannot be read"),
    Phrase("kin", "GRPO and its kin", "GRPO and related methods"),
)

WORDS = (
    Phrase("tells?|told|telling", "The engine is told of new weights", "The engine receives new weights"),
    Phrase("seats?", "A sequence's seat", "A sequence's state slot"),
    Phrase(
        "places?",
        "The place of a problem in the pool",
        "The position of a problem in the pool",
        allow=("in places?", "takes? (?:its |the |their )?place"),
    ),
)


def areas() -> Mapping[str, list[Path]]:
    """The files of nmoe/, README.md and docs/."""
    code = [path for kind in ("py", "cpp", "h", "toml") for path in (ROOT / "nmoe").rglob(f"*.{kind}")]
    return {"nmoe": sorted(code), "README": [ROOT / "README.md"], "docs": sorted((ROOT / "docs").rglob("*.md"))}


def prose(file: Path) -> str:
    """The text of a file with blanks for the names of tests, which a page only quotes."""
    return re.sub(r"::\w+", lambda name: " " * len(name[0]), file.read_text())


def found(phrase: Phrase, file: Path) -> Iterator[int]:
    """The numbers of the lines of a file on which the expression begins."""
    text = prose(file)
    yield from dict.fromkeys(text.count("\n", 0, start) + 1 for start in phrase.matches(text))


def counted() -> dict[str, dict[str, int]]:
    """How often each expression occurs, e.g. {"those of": {"nmoe": 145, "README": 0, "docs": 81}}."""
    texts = {area: [prose(file) for file in files] for area, files in areas().items()}
    return {
        phrase.expression: {area: sum(len([*phrase.matches(text)]) for text in each) for area, each in texts.items()}
        for phrase in (*PHRASES, *WORDS)
    }


def added() -> dict[str, set[int]] | None:
    """The lines by file that were added since the counts were last written. None where git does not know."""
    name = str(COUNTS.relative_to(ROOT))
    since = subprocess.run(["git", "log", "-1", "--format=%H", "--", name], cwd=ROOT, capture_output=True, text=True)
    if since.returncode or not since.stdout.strip():
        return None
    command = ["git", "diff", "--unified=0", "--no-color", "--no-renames", since.stdout.strip()]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return added_lines(changed.stdout) if changed.returncode == 0 else None


def added_lines(patch: str) -> dict[str, set[int]]:
    """The numbers of added lines by file in a patch without context."""
    lines: dict[str, set[int]] = {}
    file = ""
    for line in patch.splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, number = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(file, set()).update(range(first, first + number))
    return lines


def risen(before: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """The expressions that occur more often, each with its area. A new one has no count to keep to yet."""
    return [
        (expression, area)
        for expression, counts in now.items()
        for area, count in counts.items()
        if expression in before and count > before[expression][area]
    ]


def _where(phrase: Phrase, area: str, among: Mapping[str, set[int]] | None) -> Iterator[str]:
    for file in areas()[area]:
        name = file.relative_to(ROOT).as_posix()
        lines = file.read_text().splitlines()
        for number in found(phrase, file):
            if among is None or number in among.get(name, ()):
                yield f"  {name}:{number}: {lines[number - 1].strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--where", choices=[phrase.expression for phrase in (*PHRASES, *WORDS)], help="lists the lines with it"
    )
    parser.add_argument("--lower", action="store_true", help="writes the counts that fell")
    arguments = parser.parse_args()
    by_expression = {phrase.expression: phrase for phrase in (*PHRASES, *WORDS)}
    if arguments.where is not None:
        for area in areas():
            print("\n".join(_where(by_expression[arguments.where], area, None)))
        return 0
    now, before = counted(), json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    print(f"{'':<36}" + "".join(f"{area:>8}" for area in areas()))
    for expression, counts in now.items():
        print(f"{expression:<36}" + "".join(f"{count:>8}" for count in counts.values()))
    for title, phrases in zip(TOTALS, (PHRASES, WORDS), strict=True):
        sums = (sum(now[phrase.expression][area] for phrase in phrases) for area in areas())
        print(f"{title:<36}" + "".join(f"{total:>8}" for total in sums))
    worse, since = risen(before, now), added()
    for expression, area in worse:
        phrase = by_expression[expression]
        print(
            f'\n"{expression}" occurs {now[expression][area]} times in {area}; {before[expression][area]} are allowed.'
        )
        print(f'  Instead of "{phrase.bad}", write "{phrase.good}".')
        print("\n".join(_where(phrase, area, since)))
    if arguments.lower:
        lowered = {
            expression: {
                area: min(count, before.get(expression, {}).get(area, count)) for area, count in counts.items()
            }
            for expression, counts in now.items()
        }
        COUNTS.write_text(json.dumps(lowered, indent=1) + "\n")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
