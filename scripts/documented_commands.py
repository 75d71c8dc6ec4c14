"""Lists the commands of README.md and docs/, each with what executes it: python scripts/documented_commands.py

A command is executed by a line of .ci/run or .ci/long, or by a test that says so in a comment (`# documented: nmoe env list`): one
that has its verb, its packaged names and files of this repository, and all of its options, and that takes no input from elsewhere
which the command has from its file. `OWED` are those that nothing can execute here. Exit code 1 where one is neither.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CI = (".ci/run", ".ci/long")

OWED = frozenset({"scripts/gpu_check.sh", "scripts/cgroup_check.sh"})
"""Commands that no machine of continuous integration can run: they need a GPU, or the package user-mode-linux."""

_START = re.compile(
    r"(?:nmoe|\./speedrun\.sh|python -m nmoe[\w.]*|torchrun|(?:python )?(?:benchmarks|scripts|examples)/[\w.]+)(?= |$)"
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = ("", "bash", "sh")
_INLINE = re.compile(r"`([^`]+)`")
_SCRIPT = re.compile(r"python \w+/\w+\.py|[./\w]+\.sh")
_MARK = re.compile(r"^ *# documented: (.+)$", re.MULTILINE)
_OURS = re.compile(r"(?:\./)?(?:benchmarks|scripts|examples)/[\w.]+|\./speedrun\.sh")
# Not those whose data set has to be downloaded: of their commands another environment shows that the form is right.
_PACKAGED = {
    path.parent.name if path.stem == "environment" else path.stem
    for path in (ROOT / "nmoe/packaged").rglob("*.toml")
    if 'type = "hf"' not in path.read_text()
}
_OPTION = re.compile(r"--[\w.-]+")
_GROUPS = ("rl", "data", "env", "config")
# With one of these a command runs on other data than its configuration names.
_INPUTS = {"--model.path", "--model.tokenizer", "--records.path", "--problem_source", "--prm_source", "--verifier.path"}


@dataclass(frozen=True)
class Command:
    """`nmoe rl train sort_grpo --run.steps=20` of README.md: verb "rl train", files {"sort_grpo"}, options {"--run.steps"}."""

    text: str
    page: str
    verb: str
    files: frozenset[str]
    options: frozenset[str]

    def runs(self, other: Command) -> bool:
        """Whether whoever executes this one executes the other, too."""
        further = self.options - other.options
        from_elsewhere = bool(other.files) and not further.isdisjoint(_INPUTS)
        return (
            self.verb == other.verb
            and self.files >= other.files
            and self.options >= other.options
            and not from_elsewhere
        )


def command(text: str, page: str) -> Command:
    """The command that a line is, without what it is piped into and its comment."""
    text = re.split(r" (?:\||>|&&|\|\|) ?| +#", " ".join(text.split()))[0].strip()
    words = text.split()
    if words[0] == "torchrun":
        words = ["python", *words[words.index("-m") :]]
    if words[:2] == ["python", "-m"]:
        words = ["nmoe", *{"nmoe": [], "nmoe.rl": ["rl"]}.get(words[2], [words[2]]), *words[3:]]
    if words[0] == "python":
        words = words[1:]
    if words[0] == "./speedrun.sh":
        words = ["nmoe", "speedrun", *words[1:]]
    verb = words[0]
    files = {word.removeprefix("./") for word in words if _OURS.fullmatch(word)}
    if verb == "nmoe":
        after = 3 if words[1:2] and words[1] in _GROUPS else 2
        verb = " ".join(words[1:after])
        files |= _PACKAGED.intersection(words[after:])
    # The same command by two names.
    verb = {"rl selfplay": "selfplay", "rl verifier": "verifier"}.get(verb, verb)
    return Command(text, page, verb, frozenset(files), frozenset(_OPTION.findall(" ".join(words))))


def documented() -> list[Command]:
    """The commands of all pages. A verb alone, `nmoe sft`, is a name; a placeholder as in `nmoe export RUN DIRECTORY` is read as a
    file."""
    found: dict[str, Command] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        blocks = [block for language, block in _BLOCK.findall(text) if language in _SHELL]
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += [
            line for line in _INLINE.findall(_BLOCK.sub("", text)) if len(line.split()) > 2 or _SCRIPT.match(line)
        ]
        for line in lines:
            if _START.match(line := line.strip()) and "..." not in line:
                one = command(line, page.name)
                found.setdefault(one.text, one)
    return list(found.values())


def executed() -> Iterator[Command]:
    """What continuous integration and the tests run."""
    for name in CI:
        if (file := ROOT / name).exists():
            for line in file.read_text().replace("\\\n", " ").splitlines():
                line = re.sub(r"^.*?\| (?=\.venv/bin/)|^timeout \S+ \S+ ", "", line.strip()).replace(".venv/bin/", "")
                if _START.match(line):
                    yield command(line, name)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for line in _MARK.findall(file.read_text()):
            yield command(line, str(file.relative_to(ROOT)))


def main() -> int:
    done, missing = list(executed()), 0
    for one in documented():
        by = next((other.page for other in done if other.runs(one)), None)
        by = by or ("owed" if one.text in OWED else "NOTHING")
        missing += by == "NOTHING"
        print(f"{by:<50} {one.page:<20} {one.text}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
