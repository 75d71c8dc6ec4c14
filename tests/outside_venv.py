"""A virtual environment whose interpreter is this one, and whose version of verifiers and adapter are made up."""

from __future__ import annotations

import sys
from pathlib import Path

# Asks with the standard library alone. PLAY is the body of `episode`, which returns the reward or raises.
ADAPTER = """
import asyncio, contextlib, json, os, sys, time, urllib.error, urllib.request

class Adapter:
    LOST = ()

    def __init__(self, settings):
        self.given = settings["environment"]
        if self.given.get("id") != "sums":
            raise KeyError(self.given.get("id"))
        print("words on standard output")

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def tasks(self, most):
        made = [{"key": self.key(n), "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n} + 1?"}]}
                for n in range(self.given.get("tasks", 2))]
        return made[:most], len(made) > most

    def key(self, index):
        return f"{self.given.get('salt', '')}{index}"

    async def play(self, index, url, session):
        said = []
        def ask(*messages):
            asked = urllib.request.Request(
                url + "/chat/completions",
                json.dumps({"messages": [{"role": "user", "content": one} for one in messages]}).encode(),
                {"Content-Type": "application/json", "X-Session-ID": session},
            )
            try:
                reply = urllib.request.urlopen(asked)
            except urllib.error.HTTPError as error:  # as the exceptions of OpenAI's client read
                raise urllib.error.URLError(f"Error code: {error.code} - {json.load(error)}")
            content = json.load(reply)["choices"][0]["message"]["content"]
            said.append(content)
            return content
        def episode():
PLAY
        found = await asyncio.to_thread(episode)
        if isinstance(found, dict):
            return found
        return {"reward": found, "rewards": {"sum": found}, "metrics": {"turns": len(said)}, "said": said}
"""


def venv(directory: Path, play: str, version: str | None = "0.4.0") -> Path:
    """Makes a virtual environment whose interpreter is this one, and that has verifiers of this version with this adapter."""
    fake = directory / "fake"
    (fake / "bin").mkdir(parents=True)
    if version is not None:
        (fake / f"verifiers-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n"
        (fake / f"verifiers-{version}.dist-info" / "METADATA").write_text(metadata)
    body = "\n".join(f"            {line}" for line in play.strip().splitlines())
    (fake / "verifiers_v1.py").write_text(ADAPTER.replace("PLAY", body))
    python = fake / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{fake}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return fake
