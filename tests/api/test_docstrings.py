"""The example in the docstring of every public name, executed as it is printed."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import nmoe


class Values(doctest.OutputChecker):
    """Compares what an expression gives. A statement may print the progress of a run; an exception fails all the same."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model over bytes, after one step."""
    directory = tmp_path_factory.mktemp("checkpoint")
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 512}
    config = {"run.directory": str(directory)}
    return nmoe.train_sft(shape, data=[{"prompt": "2 + 2 =", "completion": " 4"}], config=config).checkpoint


@pytest.mark.parametrize("name", nmoe.__all__)
def test_the_example_of_a_public_name_runs(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Names that the example of a decorator registers are free again for another test.
    registry = importlib.import_module("nmoe.config.registry")
    for table in (registry.REWARDS, registry.TOOLS):
        monkeypatch.setattr(table, "_registered", dict(table._registered))
    text = getattr(nmoe, name).__doc__
    example = doctest.DocTestParser().get_doctest(text, {"checkpoint": checkpoint}, name, None, None)
    assert len(example.examples) >= 2, f"{name} has no example"
    runner = doctest.DocTestRunner(checker=Values())
    said: list[str] = []
    runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)
