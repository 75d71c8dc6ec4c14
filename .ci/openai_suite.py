"""Runs the tests that the package openai brings for chat completions, completions and models against `nmoe serve`:

    python .ci/openai_suite.py CLIENTS_PYTHON [CHECKPOINT]

They come with the package's source, in the oldest version that clients pin and in the newest of .venv-clients. Exactly the listed
ones may fail: what needs completions that the server has stored or models that a client may delete, and completions that echo a
prompt, whose first token has no log-probability where the package's types want a number. Every reply has to be what OpenAI's
description of its API says, if ../shared has it. Without a checkpoint, drawn weights are served.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

from served import ROOT, draw, recording, serving

VERSIONS = ("2.54.0", "3.57.0")
FILES = tuple(f"tests/api_resources/{name}.py" for name in ("test_models", "test_completions", "chat/test_completions"))
OPENAPI = ROOT.parent / "shared/openai/openapi.json"
FORMS = ("retrieve", "update", "list", "delete")


def may_fail(test: str, version: str) -> bool:
    """Says whether a test, as `Class::name[client]` in a file, needs what this server does not have."""
    file, _, name = test.partition("::")
    form = re.search(
        r"test_(?:method|raw_response|streaming_response)_(\w+?)(?:_overload_\d|_with_all_params|\[|$)", name
    )
    if form is None:  # tests of paths are answered by the package itself
        return False
    if file == FILES[0]:
        return form[1] == "delete"
    if file == FILES[1]:
        # The older version's loose clients take a missing log-probability.
        return "with_all_params_overload_1" in name and not (version == VERSIONS[0] and "[loose]" in name)
    return form[1] in FORMS


def outcomes(python: str, source: Path, url: str, report: Path) -> Iterator[tuple[str, bool]]:
    """Yields each test of the suite and whether it passed."""
    command = [python, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-o", "asyncio_mode=auto"]
    command += ["-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}", *FILES]
    environment = os.environ | {"TEST_API_BASE_URL": f"{url}/v1", "PYTHONPATH": str(source / "src")}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    report.with_suffix(".txt").write_text(done.stdout + done.stderr)
    if done.returncode not in (0, 1):
        sys.exit(f"the tests did not run:\n{(done.stdout + done.stderr)[-4000:]}")
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            module, _, group = case.get("classname", "").rpartition(".")
            test = f"{module.replace('.', '/')}.py::{group}::{case.get('name')}"
            yield test, case.find("failure") is None and case.find("error") is None


def suite(python: str, version: str, checkpoint: Path, place: Path) -> bool:
    """Runs one version's tests; returns whether all is as it has to be."""
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai", "-d", str(place)]
    subprocess.run([*fetch, f"openai=={version}"], check=True)
    with tarfile.open(place / f"openai-{version}.tar.gz") as packed:
        packed.extractall(place, filter="data")
    source, records = place / f"openai-{version}", place / f"{version}.jsonl"
    texts = [(source / file).read_text() for file in FILES]
    names = {name for text in texts for name in re.findall(r'(?:model=|models.*retrieve\(\s*)"([^"]+)"', text)}
    named = [argument for name in sorted(names) for argument in ("--served-model-name", name)]
    with serving(checkpoint, *named) as client, recording(str(client.http.base_url), records) as url:
        found = dict(outcomes(python, source, url, place / f"{version}.xml"))
    failed = {test for test, passed in found.items() if not passed}
    wanted = {test for test in found if may_fail(test, version)}
    for test in sorted(failed - wanted):
        print(f"FAIL {version} {test}")
    for test in sorted(wanted - failed):
        print(f"PASSED, but listed as one that fails: {version} {test}")
    if failed != wanted:
        print(place.joinpath(f"{version}.txt").read_text()[-6000:])
    print(
        f"openai {version}: {len(found) - len(failed)} passed, {len(failed)} failed, of which {len(wanted)} are listed"
    )
    described = True
    if OPENAPI.exists():
        described = not subprocess.run(
            [python, str(ROOT / ".ci/openai_schema.py"), str(OPENAPI), str(records)]
        ).returncode
    return failed == wanted and described


def main(python: str, checkpoint: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        served = Path(checkpoint) if checkpoint else draw(place / "drawn", context_tokens=512)
        results = [suite(str(Path(python).absolute()), version, served.absolute(), place) for version in VERSIONS]
    sys.exit(not all(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
