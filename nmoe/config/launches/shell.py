"""Divides a shell script, or one command, into statements of words: quotes, comments, line continuations, variables, arrays and
here-documents, as far as launch scripts use them. Nothing is executed: `$(...)` and unknown variables stay as they are written.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nmoe.errors import UserError

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REDIRECTION = re.compile(r"\d*(>>?|<)(&\d+)?")
_SPACES = " \t"
# Variables that a launch may name without setting them. Others may hold keys, and are not read.
_OF_THE_MACHINE = ("HOME", "USER", "PWD")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Word:
    """One word of a command, with the line that it begins in."""

    text: str
    line: int


@dataclass
class Statement:
    """One command: the variables set in front of it, and its words."""

    words: list[Word] = field(default_factory=list)
    environment: list[tuple[str, str, int]] = field(default_factory=list)


def statements(text: str, source: str, positional: Sequence[str] = ()) -> list[Statement]:
    """Returns the commands of a script in order, with its variables put in. `positional` has the values of `$1`, `$2`, ...; `"$@"`
    is left out.

    Raises UserError, with `source` and the line, for a quote or bracket that is not closed.
    """
    reader = _Reader(text, source)
    reader.variables = {str(number): [value] for number, value in enumerate(positional, 1)}
    return list(reader.statements())


class _Reader:
    def __init__(self, text: str, source: str) -> None:
        self._text, self._source, self._at, self._line = text, source, 0, 1
        self.variables: dict[str, list[str]] = {}

    def statements(self) -> Iterator[Statement]:
        words: list[Word] = []
        while True:
            word = self._word()
            if isinstance(word, list):
                words += word
                continue
            if words and (statement := self._statement(words)) is not None:
                yield statement
            words = []
            if word is None:
                return

    def _statement(self, words: list[Word]) -> Statement | None:
        """Returns the command of these words; None if they only set variables, which are kept."""
        found = Statement()
        rest = [one for one in words if one.text]
        if rest and rest[0].text in ("export", "declare", "local"):
            rest = rest[1:]
        while rest and (match := _ASSIGNMENT.fullmatch(rest[0].text)) and not found.words:
            found.environment.append((match[1], match[3], rest[0].line))
            rest = rest[1:]
        found.words = rest
        if not rest:
            for name, value, _ in found.environment:
                self.variables[name] = [value]
            return None
        return found

    def _word(self) -> list[Word] | str | None:
        """Returns the next word (several where a variable holds several), "" at a command's end, None at the end of the text."""
        self._skip_spaces()
        text, at = self._text, self._at
        if at >= len(text):
            return None
        if text[at] == "\n" or text[at] in ";|&":
            self._line += text[at] == "\n"
            self._at += 1
            return ""
        if text[at] in "()":
            self._at += 1
            return ""
        if (redirection := _REDIRECTION.match(text, at)) and not text.startswith("<<", at):
            self._at = redirection.end()
            if redirection[2] is None:
                self._word()  # the file
            return [Word("", self._line)]
        if text.startswith("<<", at):
            return self._here_document()
        if (array := re.compile(r"([A-Za-z_]\w*)(\+?)=\(").match(text, at)) is not None:
            return self._array(array)
        return self._plain_word()

    def _skip_spaces(self) -> None:
        text = self._text
        while self._at < len(text):
            if text[self._at] in _SPACES + "\r":
                self._at += 1
            elif (joined := re.compile(r"\\[ \t\r]*(#[^\n]*)?(\n|\Z)").match(text, self._at)) is not None:
                # A comment behind the backslash is no valid script, but how commands are explained in texts.
                self._at, self._line = joined.end(), self._line + joined[0].count("\n")
            elif text[self._at] == "#":
                self._at = _end(text, "\n", self._at)
            else:
                return

    def _plain_word(self) -> list[Word]:
        """Reads one word. An unquoted variable is divided at white space, as the shell does."""
        text, line, done, now = self._text, self._line, [], ""
        is_word = False
        while self._at < len(text):
            char = text[self._at]
            if char in _SPACES + "\n;|&()" or (char == "<" and text.startswith("<<", self._at)):
                break
            is_word = True
            if char == "'" or text.startswith("$'", self._at):
                start = self._at + 1 + (char == "$")
                end = _end(text, "'", start)
                self._refuse_open(end, "'")
                now += text[start:end]
                self._line += text.count("\n", start, end)
                self._at = end + 1
            elif char == '"':
                values = self._double_quoted()
                done += [*([now + values[0]] if len(values) > 1 else []), *values[1:-1]]
                now = values[-1] if len(values) > 1 else now + values[0]
            elif char == "\\":
                if text.startswith("\\\n", self._at):
                    self._line += 1
                else:
                    now += text[self._at + 1 : self._at + 2]
                self._at += 2
            elif char == "$" or char == "`":
                parts = " ".join(self._expansion()).split()
                if _ASSIGNMENT.match(now) and parts:  # an assignment is not divided
                    parts = [" ".join(parts)]
                if len(parts) > 1:
                    done += [now + parts[0], *parts[1:-1]]
                    now = parts[-1]
                else:
                    now += "".join(parts)
            else:
                now += char
                self._at += 1
        if is_word and (now or not done):
            done.append(now)
        return [Word(one, line) for one in done]

    def _double_quoted(self) -> list[str]:
        text, start_line, now = self._text, self._line, ""
        done: list[str] = []
        self._at += 1
        while True:
            if self._at >= len(text):
                raise UserError(f'{self._source}:{start_line}: the quote " is not closed')
            char = text[self._at]
            if char == '"':
                self._at += 1
                return [*done, now]
            if char == "\\" and text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                now += "" if text[self._at + 1] == "\n" else text[self._at + 1]
                self._line += text[self._at + 1] == "\n"
                self._at += 2
            elif char == "$":
                is_all = re.compile(r"\$(@|\{[A-Za-z_]\w*\[@\]\})").match(text, self._at) is not None
                values = self._expansion()
                if is_all and len(values) > 1:
                    done += [now + values[0], *values[1:-1]]
                    now = values[-1]
                else:
                    now += " ".join(values)
            else:
                self._line += char == "\n"
                now += char
                self._at += 1

    def _expansion(self) -> list[str]:
        """Reads a `$` or a backtick, and returns the values that it stands for; its text where they are not known."""
        text, at = self._text, self._at
        if text.startswith("$((", at):
            end = text.find("))", at)
            self._refuse_open(end, "$((")
            self._at = end + 2
            return [self._sum(text[at + 3 : end], text[at : end + 2])]
        if text.startswith("$(", at) or text[at] == "`":
            end = _closing(text, at + 1) if text[at] == "$" else _end(text, "`", at + 1)
            self._refuse_open(end, text[at : at + 2])
            self._at = end + 1
            inner = text[at + 1 + (text[at] == "$") : end].strip()
            # A comment between the lines of a command is often written so.
            return [os.getcwd() if inner == "pwd" else "" if inner.startswith("#") else text[at : end + 1]]
        if text.startswith("${", at):
            end = _closing_brace(text, at + 1)
            self._refuse_open(end, "${")
            self._at = end + 1
            return self._parameter(text[at + 2 : end], text[at : end + 1])
        if (name := _NAME.match(text, at + 1)) is not None:
            self._at = name.end()
            return self._value(name[0], text[at : name.end()])
        if text[at + 1 : at + 2] in ("@", "*"):
            self._at += 2
            return []
        self._at += 2 if (digit := text[at + 1 : at + 2]).isdigit() else 1
        return self.variables.get(digit, [text[at : self._at]]) if digit.isdigit() else [text[at : self._at]]

    def _parameter(self, inner: str, written: str) -> list[str]:
        """Returns the values of `${...}`."""
        if (match := re.fullmatch(r"(\w+)(\[[@*]\])?(?::?([-=])(.*))?", inner, re.DOTALL)) is None:
            return [written]
        name, _, mark, default = match.groups()
        known = self.variables.get(name)
        if mark is None:
            return self._value(name, written)
        if known is not None and known != [""]:
            return known
        quoted = len(default) > 1 and default[0] == default[-1] == '"'
        value = self._inner(default[1:-1] if quoted else default)
        if mark == "=":
            self.variables[name] = [value]
        return [value]

    def _inner(self, text: str) -> str:
        """Returns a text inside `${...}` with its own variables put in."""
        inner = _Reader('"' + text.replace('"', '\\"') + '"', self._source)
        inner.variables = self.variables
        found = inner._word()
        return found[0].text if isinstance(found, list) and found else ""

    def _value(self, name: str, written: str) -> list[str]:
        if name in self.variables:
            return self.variables[name]
        if name in _OF_THE_MACHINE and name in os.environ:
            return [os.environ[name]]
        return [written]

    def _sum(self, expression: str, written: str) -> str:
        """Returns the value of an arithmetic expression of whole numbers and variables; `written` for any other."""
        named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self._value(name[1], name[1])[0], expression)
        try:
            return str(_computed(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return written

    def _array(self, match: re.Match[str]) -> list[Word]:
        self._at = match.end()
        line, values = self._line, list[str]()
        while True:
            self._skip_spaces()
            if self._at >= len(self._text):
                raise UserError(f"{self._source}:{line}: the bracket of {match[1]}=( is not closed")
            if self._text[self._at] == ")":
                self._at += 1
                break
            if self._text[self._at] == "\n":
                self._at, self._line = self._at + 1, self._line + 1
                continue
            values += [one.text for one in self._plain_word()]
        self.variables[match[1]] = [*(self.variables.get(match[1], []) if match[2] else []), *values]
        return [Word("", line)]

    def _here_document(self) -> list[Word]:
        """Reads a here-document into the variable that `read` names in front of it."""
        text, line = self._text, self._line
        mark = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n").match(text, self._at)
        if mark is None:
            self._at += 2
            return [Word("", line)]
        end = re.compile(rf"^\s*{mark[2]}\s*$", re.MULTILINE).search(text, mark.end())
        if end is None:
            raise UserError(f"{self._source}:{line}: the here-document has no line {mark[2]}")
        body = text[mark.end() : end.start()]
        before = text[: self._at].rpartition("\n")[2].split()
        if before[:1] == ["read"]:
            self.variables[before[-1]] = [re.sub(r"\\\n", " ", body).replace("\n", " ").strip()]
        self._at, self._line = end.end(), line + text.count("\n", self._at, end.end())
        return [Word("", line)]

    def _refuse_open(self, end: int, opened: str) -> None:
        if end < 0 or end >= len(self._text):
            what = "quote" if opened in ("'", "`") else "bracket"
            raise UserError(f"{self._source}:{self._line}: the {what} {opened} is not closed")


def _end(text: str, mark: str, start: int) -> int:
    """Returns where `mark` comes next; the end of the text if it does not."""
    return end if (end := text.find(mark, start)) >= 0 else len(text)


def _closing(text: str, opened: int) -> int:
    """Returns where the round bracket at `opened` is closed, -1 if it is not."""
    depth = 0
    for at in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return -1


def _closing_brace(text: str, opened: int) -> int:
    depth = 0
    for at in range(opened, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return -1


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError("not a sum of whole numbers")
