"""Compares the packages of a second machine with the ones here, starts evaluations there, and fetches their results.

An evaluation NAME lies in `evals/NAME` at the target: the script that runs it, its log, the outcome of each problem, and at its end
`result.json` and `exit`. Its code is what `nmoe runs sync` sent.
"""

import json
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from platform import python_version
from typing import Any

from packaging.requirements import Requirement

from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.runs.sync import Target

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_NOT_TO_RUN = ("dev", "docs")
"""Extras that no evaluation uses."""
_ASK = """
import importlib.metadata, importlib.util, json, platform, sys
versions = {"python": platform.python_version()}
for name in json.load(sys.stdin):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = None
print(json.dumps({"python": sys.executable, "nmoe": importlib.util.find_spec("nmoe") is not None, "versions": versions}))
"""
# tmux ends a session that holds its terminal open no longer: hence the third descriptor.
_SCRIPT = """cd "$(dirname "$0")/../.." || exit
exec 3>&1 >evals/{name}/log.txt 2>&1 </dev/null
echo $$ >evals/{name}/pid
PYTHONPATH="$PWD/code${{PYTHONPATH:+:$PYTHONPATH}}" {command}
echo $? >evals/{name}/ended && mv evals/{name}/ended evals/{name}/exit
"""
_START = """(mkdir -p evals/{name} && cat >evals/{name}/run.sh && rm -f evals/{name}/exit evals/{name}/pid || exit
if command -v tmux >/dev/null && tmux new-session -d -s nmoe-{name} sh "$PWD/evals/{name}/run.sh"; then
    echo "in the tmux session nmoe-{name}"
else
    nohup sh "$PWD/evals/{name}/run.sh" >/dev/null 2>&1 </dev/null &
    echo "by nohup, because no tmux runs there"
fi)"""
_STATE = """(cd evals/{name} 2>/dev/null || {{ echo none; exit; }}
if [ -f exit ]; then echo "ended $(cat exit)"
elif [ ! -f pid ] || kill -0 "$(cat pid)" 2>/dev/null; then echo running
else echo killed; fi
[ ! -f log.txt ] || tail -n 5 log.txt)"""


class StillRunningError(UserError):
    """Raised for the result of an evaluation that has not ended. The exit code is 1, because the input is not wrong."""

    exit_code = 1


def compare_packages(target: str, python: str | None = None) -> Iterator[str]:
    """Yields lines on the packages of a second machine: that they have the versions of the ones here, or which differ and the
    command that makes them equal. Nothing for a target that is a directory of this machine."""
    to = Target(target)
    if to.host:
        try:
            yield from _compared(to, python)[1]
        except UserError as error:
            yield f"warning: {error}"


def start_evaluation(target: str, arguments: str, name: str | None, python: str | None = None) -> Iterator[str]:
    """Starts `nmoe eval` with the arguments, as a shell would split them, at the target: in tmux or else by nohup. An evaluation
    that was killed or failed starts again and keeps its finished problems. Yields lines for the user.

    Raises UserError if the evaluation runs or has ended already, and if there is no Python with nmoe and its packages.
    """
    to, name = _host(target), _checked(name)
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UserError(f"--eval {arguments!r}: {error}; quote it as for a shell") from error
    if reserved := [word for word in words if word.split("=")[0] in ("--out", "--results")]:
        raise UserError(f"--eval: {reserved[0]}: the results lie in evals/{name} there; leave it out")
    state = _state(to, name)[0]
    if state == "running":
        raise UserError(f"{to.host}: the evaluation {name} is running; {_later(target, name)}")
    if state == "ended 0":
        raise UserError(f"{to.host}: the evaluation {name} has ended; {_later(target, name)}, or give another --name")
    found, lines = _compared(to, python)
    yield from lines
    options = ["--results", f"evals/{name}/problems", "--out", f"evals/{name}/result.json"]
    script = _SCRIPT.format(name=name, command=shlex.join([found, "-m", "nmoe", "eval", *words, *options]))
    yield f"evaluation {name} started {to.run(_START.format(name=name), script).strip()}"
    yield f"its log: {_log(to, name)}"
    yield _later(target, name)


def fetch_evaluation(target: str, name: str) -> Iterator[str]:
    """Copies an evaluation at the target to `evals/HOST/NAME` here, and yields the last lines of its log and the result's path.

    Raises StillRunningError while it runs; UserError if there is none of this name, and if it was killed or failed.
    """
    to, name = _host(target), _checked(name)
    state, *lines = _state(to, name)
    if state == "none":
        raise UserError(
            f"{to.host}: no evaluation {name} was started in {to.directory}; start it with --eval and --name"
        )
    said = f": {'; '.join(lines)}" if lines else ""
    if state == "running":
        raise StillRunningError(f"{to.host}: the evaluation {name} has not ended{said}; its log: {_log(to, name)}")
    if state != "ended 0":
        how = state.replace("ended", "ended with exit code")
        again = "start it again with the same --eval and --name, which keeps finished problems"
        raise UserError(f"{to.host}: the evaluation {name} {how}{said}; its log: {_log(to, name)}; {again}")
    copied = Path("evals") / to.host / name
    to.fetch(f"evals/{name}", copied)
    yield from lines
    yield str(copied / "result.json")


def _compared(to: Target, python: str | None) -> tuple[str, list[str]]:
    """Returns the path of the Python there, and lines on its packages. Raises UserError if there is no Python, or one without nmoe
    or its packages, with the command that helps."""
    here = _versions()
    # The environment beside the code, if one was made there.
    tried = shlex.quote(python) if python else "code/.venv/bin/python python3"
    find = f'for p in {tried}; do ! command -v "$p" >/dev/null || break; p=; done'
    ask = f'({find}; [ -z "$p" ] || PYTHONPATH="$PWD/code" "$p" -c {shlex.quote(_ASK)})'
    answer = to.run(ask, json.dumps(list(here)))
    minor = ".".join(python_version().split(".")[:2])
    make = to.shell(f"cd {shlex.quote(to.directory)}/code && python{minor} -m venv .venv && .venv/bin/pip install -e .")
    if not answer.strip():
        raise UserError(f"{to.host}: no {python or 'Python'} there; make one: {make}")
    there: dict[str, Any] = json_of(answer.splitlines()[-1])
    if not there["nmoe"]:
        raise UserError(
            f"{to.host}: {there['python']} has no nmoe, and {to.directory}/code holds none; name one that has it by "
            f"--python, or sync from a checkout of nmoe and run: {make}"
        )
    found: dict[str, str | None] = there["versions"]
    lines = []
    if (other := found.pop("python") or "").split(".")[:2] != python_version().split(".")[:2]:
        lines.append(f"warning: Python {other} there, {python_version()} here; to make them equal: {make}")
    differing = {name: one for name, one in found.items() if one is None or _public(one) != here[name][0]}
    named = ", ".join(f"{name} {one or 'missing'} there, {here[name][0]} here" for name, one in differing.items())
    wanted = " ".join(f"{name}=={here[name][0]}" for name in differing)
    install = to.shell(f"cd {shlex.quote(to.directory)} && {shlex.quote(there['python'])} -m pip install {wanted}")
    if any(one is None and here[name][1] for name, one in differing.items()):
        raise UserError(f"{to.host}: packages are missing: {named}; to make them equal: {install}")
    if differing:
        lines.append(f"warning: other packages: {named}; to make them equal: {install}")
    return there["python"], lines or [f"Python and {len(found)} packages have the same versions there"]


def _versions() -> dict[str, tuple[str, bool]]:
    """Returns the packages of nmoe that are installed here, with their versions and whether every nmoe needs them."""
    try:
        about = metadata("nmoe")
    except PackageNotFoundError:
        return {}
    extras = [extra for extra in about.get_all("Provides-Extra") or () if extra not in _NOT_TO_RUN]
    found: dict[str, tuple[str, bool]] = {}
    for one in map(Requirement, about.get_all("Requires-Dist") or ()):
        every = one.marker is None or one.marker.evaluate({"extra": ""})
        if every or (one.marker and any(one.marker.evaluate({"extra": extra}) for extra in extras)):
            try:
                found[one.name] = _public(version(one.name)), every
            except PackageNotFoundError:
                continue
    return found


def _public(found: str) -> str:
    """Returns a version without its build: torch's for a CPU is 2.13.0+cpu."""
    return found.partition("+")[0]


def _host(target: str) -> Target:
    to = Target(target)
    if not to.host:
        raise UserError(
            f"{target}: is a directory of this machine; evaluations are started on HOST:DIR, such as spare:work"
        )
    return to


def _state(to: Target, name: str) -> list[str]:
    return to.run(_STATE.format(name=name)).splitlines()


def _log(to: Target, name: str) -> str:
    return to.shell(f"tail -f {shlex.quote(f'{to.directory}/evals/{name}/log.txt')}")


def _later(target: str, name: str) -> str:
    return f"fetch its result: {shlex.join(['nmoe', 'runs', 'sync', target, '--fetch', name])}"


def _checked(name: str | None) -> str:
    if name is None or not _NAME.fullmatch(name):
        raise UserError(f"--name {name or ''}: give the evaluation a name of letters, digits, - and _")
    return name
