"""A round as text, as one HTML page, and as a baseline of known faults; and the reproduction of a finding as a script."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from nmoe.errors import UserError
from nmoe.referee.court import Finding
from nmoe.referee.faults import FAULTS
from nmoe.referee.rounds import Outcome, Round

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } td, th { border: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top; }
pre { background: #f6f6f6; padding: .6em; overflow-x: auto; }
.fault, .late { color: #b00020; font-weight: bold; } .skipped { color: #777; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def line_of(outcome: Outcome) -> str:
    """Returns the line of a check in the table."""
    about = outcome.why
    if outcome.findings:
        about = "; ".join(dict.fromkeys(FAULTS[one.fault].title for one in outcome.findings))
    return f"{outcome.state:<8} {outcome.check.name:<20} {about or outcome.check.asserts}"


def details_of(outcome: Outcome) -> list[str]:
    """Returns the lines that say what a check found."""
    lines = []
    for finding in outcome.findings:
        lines += [
            f"    {FAULTS[finding.fault].title}",
            f"      seen:  {finding.seen}",
            f"      right: {finding.right}",
            f"      it may also mean: {FAULTS[finding.fault].also}",
        ]
    return lines


def summary_of(round_: Round) -> list[str]:
    """Returns the lines below the table."""
    counts = {
        state: sum(one.state == state for one in round_.outcomes)
        for state in ("ok", "fault", "known", "late", "skipped")
    }
    lines = [
        f"{round_.url}, seed {round_.seed}: {counts['ok']} ok, {counts['fault']} with a fault, "
        f"{counts['known']} with a known fault, {counts['late']} late, {counts['skipped']} skipped"
    ]
    for number, (fault, names) in enumerate(round_.faults()):
        of = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"{'most likely' if not number else 'also'}: {FAULTS[fault].title} ({of})")
    if round_.left:
        lines.append(f"the server may not be as it was: {round_.left}")
    return lines


def apply_baseline(round_: Round, file: Path) -> str:
    """Marks faults that the baseline has as known, and returns a line about it. Writes the baseline if there is no such file. A
    known fault hides no new one: each pair of check and fault counts by itself. Raises UserError for a file that is no baseline."""
    found = sorted({(one.check.name, finding.fault) for one in round_.outcomes for finding in one.findings})
    if not file.exists():
        if not file.parent.is_dir():
            raise UserError(f"{file.parent}: no such directory; --baseline names a file to write or read")
        file.write_text(json.dumps([{"check": check, "fault": fault} for check, fault in found], indent=1) + "\n")
        known = set(found)
        said = f"{file}: written, with {len(found)} known faults; without it the exit code is 1"
    else:
        known = read_baseline(file)
        gone = known - set(found)
        said = f"{file}: {len(known)} known faults" + (f", of which {len(gone)} were not found now" if gone else "")
    for outcome in round_.outcomes:
        if outcome.findings and all((outcome.check.name, one.fault) in known for one in outcome.findings):
            outcome.state = "known"
    return said


def read_baseline(file: Path) -> set[tuple[str, str]]:
    """Returns pairs of check and fault. Raises UserError for a file that is no baseline."""
    try:
        return {(str(one["check"]), str(one["fault"])) for one in json.loads(file.read_text())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file}: not a baseline of the referee ({type(error).__name__}: {error}); delete it to have it written anew"
        ) from None


def script_of(finding: Finding, url: str) -> str:
    """Returns a program for Python without nmoe that shows a finding: it makes the same calls, and prints the replies beside the
    right values. What the server said is in it as literals and comments of ASCII alone: none of it can become code."""
    steps: list[tuple[str, str, Any]] = [(one.method, one.path, one.body) for one in finding.exchanges]
    head = [
        f"# {FAULTS[finding.fault].title}",
        f"# seen:  {finding.seen!a}",
        f"# right: {finding.right!a}",
        "",
        "import json",
        "import os",
        "import sys",
        "import urllib.error",
        "import urllib.request",
        "",
        "",
        "class Stay(urllib.request.HTTPRedirectHandler):",
        "    # A redirection would take the key to another server.",
        "    def redirect_request(self, *of):",
        "        return None",
        "",
        "",
        f"url = sys.argv[1] if len(sys.argv) > 1 else {url!a}",
        "key = os.environ.get('NMOE_ENGINE_KEY', '')",
        "opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Stay)",
        f"right = json.loads({json.dumps([round(one, 6) for one in finding.expected])!r})",
        "steps = [",
        *(f"    {step!a}," for step in steps),
        "]",
        "for method, path, body in steps:",
        "    data = None if body is None else json.dumps(body).encode()",
        "    headers = {'Content-Type': 'application/json', 'Authorization': f'Bearer {key}'}",
        "    request = urllib.request.Request(url + path, data, headers, method=method)",
        "    try:",
        "        with opener.open(request, timeout=60) as reply:",
        "            status, text = reply.status, reply.read().decode('utf-8', 'replace')",
        "    except urllib.error.HTTPError as error:",
        "        status, text = error.code, error.read().decode('utf-8', 'replace')",
        "    print(method, path, status)",
        "    # What a server says is printed in ASCII: it may not move a terminal's cursor.",
        "    try:",
        "        for choice in json.loads(text)['choices']:",
        "            content = choice['logprobs']['content']",
        "            print(' sample', *(ascii(choice[name]) for name in ('index', 'finish_reason', 'token_ids')))",
        "            print('  versions', ascii(choice.get('weight_versions')))",
        "            print('  log-probabilities', [round(one['logprob'], 6) for one in content])",
        "    except (ValueError, LookupError, TypeError, AttributeError):",
        "        print(' ', ascii(text[:300]))",
        "if right:",
        "    print('right, for the sample that differed most:', right)",
    ]
    return "\n".join(head) + "\n"


def write_scripts(round_: Round, directory: Path) -> list[Path]:
    """Writes the reproduction of each finding, and returns the files."""
    written = []
    for outcome in round_.outcomes:
        for number, finding in enumerate(outcome.findings):
            if not finding.exchanges:
                continue
            file = directory / f"{outcome.check.name}_{finding.fault}_{number}.py"
            file.write_text(script_of(finding, round_.url))
            written.append(file)
    return written


def write_page(round_: Round, file: Path) -> None:
    """Writes the round as one HTML page. Raises UserError for a file that cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(
            f"{file}: {'is a directory' if file.is_dir() else 'no such directory'}; --html names a file to write"
        )
    rows, sections = [], []
    for outcome in round_.outcomes:
        about = "; ".join(dict.fromkeys(FAULTS[one.fault].title for one in outcome.findings)) or outcome.why
        name = escape(outcome.check.name)
        rows.append(
            f'<tr><td class="{outcome.state}">{outcome.state}</td><td>{name}</td><td>{escape(outcome.check.asserts)}</td>'
            f"<td>{escape(about)}</td><td>{outcome.seconds:.2f} s</td></tr>"
        )
        for finding in outcome.findings:
            kind = FAULTS[finding.fault]
            sections.append(
                f"<h3>{name}: {escape(kind.title)}</h3><p>Seen: {escape(finding.seen)}</p><p>Right: {escape(finding.right)}</p>"
                f"<p>It may also mean: {escape(kind.also)}.</p><pre>{escape(script_of(finding, round_.url))}</pre>"
            )
    said = "".join(f"<p>{escape(line)}</p>" for line in summary_of(round_))
    file.write_text(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<title>Referee: {escape(round_.url)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>Referee</h1>\n{said}\n<table>\n"
        f"<tr><th></th><th>check</th><th>asserts</th><th>found</th><th>time</th></tr>\n{''.join(rows)}\n</table>\n"
        f"{''.join(sections)}\n</body>\n</html>\n"
    )
