"""Runs a session of each unmodified SDK of Tinker against `nmoe serve --tinker`: python .ci/tinker_sdk.py CLIENT_PYTHON...

Each CLIENT_PYTHON is an interpreter with another version of tinker. Exit code 1 where a check of .ci/tinker_session.py fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from served import ROOT, draw, serving

KEY = "tml-check"


def main(interpreters: list[str]) -> int:
    """Returns the exit code."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = draw(Path(scratch) / "drawn")
        arguments = ("--tinker", "--numerics", "exact", "--saved", f"{scratch}/saved")
        with serving(checkpoint, *arguments, key=KEY) as server:
            # Nothing else may be needed.
            environment = os.environ | {"TINKER_BASE_URL": str(server.http.base_url), "TINKER_API_KEY": KEY}
            for interpreter in interpreters:
                command = [interpreter, "-W", "ignore", str(ROOT / ".ci/tinker_session.py")]
                failed |= subprocess.run(command, env=environment | {"HF_HUB_OFFLINE": "1"}, timeout=600).returncode
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
