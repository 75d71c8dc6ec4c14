"""Protected files of code_edit: the tests see them as they were, whatever the policy puts beside them or does at run time."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest
from boxes import sandboxes_of

from nmoe.envs.tasks import TASKS, Attempt
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.types import Problem, Verdict

RECORD = {
    "problem": "Make `most` in stats.py say the limit of conf.py.",
    "files": {
        "stats.py": "def most():\n    return -1\n",
        "conf.py": "LIMIT = 5\n\ndef twice(number):\n    return 2 * number\n",
        "checks/limits.py": (
            "import json\nfrom stats import most\n\ndef holds():\n"
            "    return most() == json.load(open('data/limits.json'))['most']\n"
        ),
        "checks/other.py": "NAME = 'other'\n",
        "data/limits.json": '{"most": 5}',
    },
    "tests": {
        "test_hidden.py": (
            "import conf, checks.limits\nfrom checks import other\nfrom stats import most\n\n"
            "def test_most():\n    assert most() == conf.LIMIT\n    assert conf.twice(most()) == 10\n\n"
            "def test_holds():\n    assert checks.limits.holds() is True\n    assert other.NAME == 'other'\n"
        )
    },
    "solution": {"stats.py": "from conf import LIMIT\n\ndef most():\n    return LIMIT\n"},
    "protected": ["conf.py", "checks/limits.py", "data/limits.json"],
}
SOLUTION = RECORD["solution"]["stats.py"]  # type: ignore[index]
LIMITS_0 = "echo 'LIMIT = 0\ntwice = lambda number: 10'"
HOLDS = "def holds():\n    return True\n"


@pytest.fixture(scope="module")
def graders() -> Iterator[Sandboxes]:
    opened = sandboxes_of("bubblewrap" if shutil.which("bwrap") else "landlock", warm=2)
    yield opened
    asyncio.run(opened.close())


def verdict_on(graders: Sandboxes, loop: asyncio.Runner, script: str) -> Verdict:
    """The verdict on the workspace after a policy's script."""
    task = TASKS["code_edit"]
    read = task.read_record(RECORD)
    assert read is not None
    question, gold, metadata = read
    problem = Problem("demo/0", "code_edit", question, gold, "demo", metadata)
    task.check_gold(problem)

    async def worked() -> Verdict:
        async with await graders.open() as sandbox:
            for path, content in task.files(problem).items():
                await sandbox.write(path, content)
            result = await sandbox.bash(script)
            assert result.failure == "ok", result
            return await task.verify(problem, Attempt("done", sandbox, (), graders))

    return loop.run(worked())


def wrote(text: str, path: str = "stats.py") -> str:
    return f"cat > {path} << 'END'\n{text}END\n"


def test_a_right_solution_that_uses_them(graders: Sandboxes, loop: asyncio.Runner) -> None:
    verdict = verdict_on(graders, loop, wrote(SOLUTION))
    assert verdict.outcome == "correct", verdict


@pytest.mark.parametrize(
    "script",
    [
        f"mkdir conf; {LIMITS_0} > conf/__init__.py; sed -i s/-1/0/ stats.py",
        wrote("import conf\nconf.LIMIT = 0\nconf.twice = lambda n: 10\ndef most():\n    return 0\n"),
        wrote("import sys, types\nsys.modules['conf'] = types.SimpleNamespace(LIMIT=0)\ndef most():\n    return 0\n"),
        f"mkdir checks/limits; {wrote(HOLDS, 'checks/limits/__init__.py')} {wrote(HOLDS, 'checks/limits.py')}",
        "echo 'import checks.limits\nchecks.limits.holds = lambda: True' > checks/__init__.py",
    ],
    ids=["a package in the way", "changed when it runs", "replaced", "another check", "a package that replaces"],
)
def test_what_the_policy_makes_of_them_decides_nothing(graders: Sandboxes, loop: asyncio.Runner, script: str) -> None:
    verdict = verdict_on(graders, loop, script)
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0), verdict
