"""`nmoe env` as an author of environments uses it: what a check shows, and what it finds wrong."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FORGETFUL, qwen
from forked import Result

from nmoe.config.packaged import ENVIRONMENTS
from nmoe.envs import tasks
from nmoe.text.harmony import Harmony
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Verdict

Nmoe = Callable[..., Result]

SORT = """
env_id = "digits"
version = "3"
description = "Sorting what the file holds"
system = "Sort."
[task_pool]
type = "jsonl"
path = "data.jsonl"
task_type = "sort"
[rubric]
format = 0.5
correctness = 1.0
[budget]
completion_tokens = 20
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with an environment and its data, in the current directory."""
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "environment.toml").write_text(SORT)
    (directory / "data.jsonl").write_text(json.dumps({"problem": "Sort: 21", "answer": "12"}) + "\n")
    return directory


def rows(out: str) -> tuple[list[str], list[int], list[int]]:
    """The token table of a check: texts, ids and mask."""
    texts, ids, mask = (
        [cell for line in re.findall(rf"^[ \d]{{5}} {label} +(.*)$", out, re.MULTILINE) for cell in line.split()]
        for label in ("text", "id", "mask")
    )
    return texts, [int(id_) for id_ in ids], [int(one) for one in mask]


def test_a_check_shows_prompt_tokens_mask_and_grades(command: Nmoe, own: Path, workshop: Path) -> None:
    result = command("env", "check", "own", "--tokenizer", workshop / "tokenizer")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[:2] == [
        "environment  digits, version 3, from own/environment.toml",
        "             Sorting what the file holds",
    ]
    assert "pool         jsonl own/data.jsonl as sort" in lines
    assert [line.partition(";")[0] for line in lines[-5:]] == [
        "problem digits/0, gold '12'",
        "  right answer '12': correct (exact: the same digits)",
        "  wrong answer '122': incorrect (exact: other digits)",
        "",
        "ok",
    ]
    for line, correctness in zip(lines[-4:-2], ("correctness 1", "correctness 0"), strict=True):
        assert {"format 1", "reasoning 1", correctness} <= set(line.partition("; ")[2].split(", "))
    prompt = "<|start|>system<|message|>Sort.<|end|><|start|>user<|message|>Sort: 21<|end|><|start|>assistant"
    assert f"  | {prompt}" in lines
    harmony = Harmony(Tokenizer.load(workshop / "tokenizer"))
    prompt_ids = harmony.render_prompt([Message("system", "Sort."), Message("user", "Sort: 21")])
    _, ids, mask = rows(result.out)
    assert ids[: len(prompt_ids)] == prompt_ids
    assert mask == [0] * len(prompt_ids) + [1] * (len(ids) - len(prompt_ids))
    sampled = harmony.parse_completion(ids[len(prompt_ids) :])
    assert (sampled.final, sampled.end, sampled.error) == ("12", "return", None)


def test_a_check_needs_no_tokenizer(nmoe: Nmoe, own: Path) -> None:
    result = nmoe("env", "check", own / "environment.toml")
    assert (result.code, result.err) == (0, "")
    (own / "chat.toml").write_text(SORT.replace('version = "3"', 'format = "chat"'))
    chat = nmoe("env", "check", own / "chat.toml")
    assert (chat.code, chat.out) == (2, "")
    assert 'format = "chat" is rendered by the template of a tokenizer: name one with --tokenizer' in chat.err
    texts, ids, _ = rows(result.out)
    assert texts[:8] == ["<|start|>", *"system", "<|message|>"]
    assert "Sort:·21" in "".join(texts)
    assert max(ids) < 264


@pytest.mark.parametrize("path", sorted(ENVIRONMENTS.glob("**/*.toml")), ids=lambda path: path.stem)
def test_what_is_shipped_passes_without_a_network(nmoe: Nmoe, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_code = path.stem in ("humaneval", "mbpp", "mbpp_test", "deepcoder", "code_fix")
    if runs_code and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed (apt-get install bubblewrap): code is not run without it")

    def connect(*address: Any) -> None:
        raise AssertionError(f"a check reached out to {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.delenv("NMOE_DATASETS", raising=False)
    result = nmoe("env", "check", path)
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("\nok\n")
    assert result.out.count("right answer '") == result.out.count(": correct (") >= 1
    if 'type = "hf"' in path.read_text():
        assert "not here and not fetched, so that its records were not checked" in result.out


def test_every_mistake_is_one_line(nmoe: Nmoe, own: Path) -> None:
    def refused(*parts: str) -> list[str]:
        result = nmoe("env", "check", "own")
        assert result.code == 2, result
        assert "Traceback" not in result.err
        for part in parts:
            assert part in result.err
        return result.err.splitlines()

    file = own / "environment.toml"
    file.write_text(SORT.replace("version", "verion").replace("format = 0.5", "format = 'x'"))
    assert refused("error: 2 problems") == [
        "error: 2 problems",
        "own/environment.toml:3: verion = \"3\": unknown key; did you mean 'version'?",
        'own/environment.toml:11: [rubric] format = "x": expected a number, got a string',
    ]
    file.write_text(SORT.replace("data.jsonl", "absent.jsonl"))
    (said,) = refused('error: own/environment.toml:8: [task_pool] path = "own/absent.jsonl": cannot be read')
    assert "cannot be read" not in nmoe("env", "check", "own").out, "the fault is said once"
    assert said.endswith("No such file or directory")
    file.write_text(SORT)
    (own / "data.jsonl").write_text(
        '{"problem": "Sort: 21", "answer": "12"}\n{"problem": "Sort: 31", "answer": "one"}\n'
    )
    refused("own/data.jsonl:2: the gold answer of a sort problem is a row of digits, not 'one'")
    two = SORT[: SORT.index("[task_pool]")] + "".join(
        f'[[task_pool.sources]]\nname = "{name}"\nweight = 1\ntype = "jsonl"\npath = "{name}.jsonl"\ntask_type = "sort"\n'
        for name in ("first", "second")
    ).join(['[task_pool]\ntype = "mixture"\n', ""])
    file.write_text(two)
    lines = refused("error: 2 problems")
    assert [line.split(": ")[1] for line in lines[1:]] == [
        f'[task_pool.sources[{place}]] path = "own/{name}.jsonl"' for place, name in enumerate(("first", "second"))
    ]
    assert nmoe("env", "check", "own", "--tokenizer=nowhere").err.startswith("error: nowhere: neither a tokenizer")


def test_a_grader_that_is_wrong_is_found(nmoe: Nmoe, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def always(outcome: bool, *_: Any) -> Verdict:
        return Verdict.of(outcome, "broken", "always so")

    for outcome, message in [
        (True, "the wrong answer '122' has to be graded incorrect, and is correct (broken: always so)"),
        (False, "its gold answer '12' has to be graded correct, and is incorrect (broken: always so)"),
    ]:
        monkeypatch.setattr(tasks.TASKS["sort"], "verify", lambda *_, outcome=outcome: always(outcome), raising=False)
        result = nmoe("env", "check", "own")
        assert result.code == 2
        assert result.err.startswith("error: own/environment.toml: problem digits/0: " + message)


TOOLS = """
raise SystemExit("imported")

def add(x: int, y: int = 1) -> int:
    "Adds."
    return x + y

async def look(word: str, *, senses: int = 1) -> str:
    "Looks a word up."

def silent(x: int) -> int: ...

def untyped(x, y: int):
    "Has a hint too few."

def variadic(*words: str) -> str:
    "Takes any number."

from elsewhere import borrowed
assigned = add
"""


def test_tools_of_the_users_own_are_read_and_not_imported(nmoe: Nmoe, own: Path, tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "tools.py").write_text(TOOLS)
    (tmp_path / "lone.py").write_text(TOOLS)

    def check(*names: str) -> Result:
        (own / "environment.toml").write_text(SORT + f"[tools]\nuse = {json.dumps(names)}\n")
        return nmoe("env", "check", "own")

    good = check("python", "mine.tools:add", "mine.tools:look", "lone:borrowed", "lone:assigned")
    assert (good.code, good.err) == (0, "")
    assert "tool         python\n" in good.out
    assert f"tool         mine.tools:look, defined in {package}/tools.py, not imported\n" in good.out
    assert "the prompt below declares the tools of nmoe alone" in good.out
    assert "Runs a Python program" in good.out  # in the prompt
    assert "Adds." not in good.out
    bad = {
        "mine.tools:subtract": f"{package}/tools.py has no function 'subtract'; "
        "its functions are add, look, silent, untyped, variadic",
        "mine.nowhere:add": "there is no source of the module 'mine.nowhere'",
        "nowhere:f": "there is no module 'nowhere', in the working directory or installed",
        "lone:silent": "has no docstring; the policy reads it to know what the tool does",
        "lone:untyped": "parameter 'x' has no type hint",
        "lone:variadic": "takes *args, **kwargs or positional-only arguments, which have no JSON form",
    }
    found = check(*bad)
    assert found.code == 2
    assert found.err.startswith("error: 6 problems\n")
    for line, (name, message) in zip(found.err.splitlines()[1:], bad.items(), strict=True):
        place = list(bad).index(name)
        named = f'16: [tools] use[{place}] = "{name}": ' if place < 3 else f" tool {name} ("
        assert line.startswith(f"own/environment.toml:{named}")
        assert line.endswith(message)


def test_a_workspace_is_looked_at_and_not_made(
    nmoe: Nmoe, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMOE_WORKSPACES", str(tmp_path / "workspaces"))
    file = own / "environment.toml"
    file.write_text(SORT + '[workspace]\ndirectory = "files"\nbootstrap = "requirements"\n')
    absent = nmoe("env", "check", "own")
    assert absent.code == 2
    assert absent.err.startswith("error: own/environment.toml: [workspace] own/files: no such directory")
    (own / "files").mkdir()
    result = nmoe("env", "check", "own")
    assert (result.code, result.err) == (0, "")
    assert "workspace    own/files; bootstrap requirements, not run by a check; keep never\n" in result.out
    assert not (tmp_path / "workspaces").exists()


def test_the_collection_of_workspaces(nmoe: Nmoe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMOE_WORKSPACES", str(tmp_path / "workspaces"))
    result = nmoe("env", "gc")
    assert (result.code, result.out, result.err) == (0, f"{tmp_path}/workspaces: freed 0.0 MB, 0.0 MB stay\n", "")
    (tmp_path / "workspaces/mine").mkdir(parents=True)
    policy = {"keep": "never", "max_age_days": 1, "max_disk_mb": 1}
    half = tmp_path / "workspaces/.making-x"
    half.mkdir()
    (half / "nmoe-workspace.json").write_text(json.dumps({"nmoe_workspace": 1, "env_id": "e", "policy": policy}))
    assert nmoe("env", "gc", "--dry-run").out.splitlines()[0] == "would remove  .making-x: 0.0 MB, never finished"
    assert half.exists()
    assert nmoe("env", "gc").out.splitlines()[:2] == [
        "removed       .making-x: 0.0 MB, never finished",
        "left alone    mine: no nmoe-workspace.json in it, so nmoe did not make it",
    ]
    assert [path.name for path in (tmp_path / "workspaces").iterdir()] == ["mine"]


# documented: nmoe env list
def test_list(nmoe: Nmoe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "mine/environments/countdown").mkdir(parents=True)
    (site / "mine/__init__.py").write_text("raise SystemExit('imported')")
    (site / "mine/environments/countdown/environment.toml").write_text(SORT)
    (site / "mine/broken.toml").write_text("env_id = 1\nversion = 2\n")
    (site / "mine/environments/countdown/data.jsonl").write_text('{"problem": "Sort: 21", "answer": "12"}\n')
    info = site / "mine-0.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.4\n")
    (info / "entry_points.txt").write_text(
        "[nmoe.environments]\ncountdown = mine.environments.countdown\nlost = mine.environments.lost\n"
        "broken = mine:broken.toml\n"
    )
    monkeypatch.syspath_prepend(str(site))
    result = nmoe("env", "list")
    assert (result.code, result.err) == (0, "")
    cells = {re.split(r" {2,}", line)[0]: re.split(r" {2,}", line)[1:] for line in result.out.splitlines()}
    assert cells["NAME"] == ["VERSION", "FORMAT", "POOL", "FROM", "DESCRIPTION"]
    assert cells["skills"][:4] == ["1", "harmony", "mixture", "nmoe"]
    assert cells["countdown"] == ["3", "auto", "jsonl", "mine 0.4", "Sorting what the file holds"]
    assert cells["lost"][3] == "mine 0.4"
    assert cells["lost"][4].startswith(
        "cannot be used: the entry point 'mine.environments.lost' leads to no environment"
    )
    assert re.match(r"cannot be used: 3 problems; \S+/mine/broken\.toml: ", cells["broken"][4])
    checked = nmoe("env", "check", "countdown")
    assert (checked.code, checked.err) == (0, "")
    assert "gold '12'" in checked.out


def test_code_runs_in_sandboxes(nmoe: Nmoe, own: Path) -> None:
    """A solution that would leave a trace on this machine, were it run here."""
    trace = own / "trace"
    leave = f"import pathlib\ntry:\n    pathlib.Path({str(trace)!r}).touch()\nexcept OSError:\n    pass\n"
    code = leave + "def add(a, b):\n    return a + b"
    record = {"text": "Add.", "code": code, "test_list": ["assert add(1, 2) == 3"]}
    (own / "data.jsonl").write_text(json.dumps(record) + "\n")
    (own / "environment.toml").write_text(SORT.replace('task_type = "sort"', 'task_type = "mbpp"'))
    result = nmoe("env", "check", "own")
    if shutil.which("bwrap") is None:
        assert result.code == 2
        assert "needs bwrap, which is not installed" in result.err
        return
    assert (result.code, result.err) == (0, "")
    assert ": correct (tests: all tests pass)" in result.out
    assert ": incorrect (tests: " in result.out
    assert not trace.exists()


@pytest.mark.parametrize("format", ["chat", "auto"])
def test_what_a_run_refuses_of_tools_of_ones_own_is_refused_by_the_check(
    nmoe: Nmoe, own: Path, tmp_path: Path, format: str
) -> None:
    (tmp_path / "lone.py").write_text(TOOLS)
    qwen(tmp_path / "qwen")
    qwen(tmp_path / "forgetful", FORGETFUL)

    def check(task: str, tokenizer: str) -> Result:
        (own / "environment.toml").write_text(
            f'env_id = "own"\nformat = "{format}"\ntask = "{task}"\n[tools]\nuse = ["lone:add"]\n'
        )
        return nmoe("env", "check", "own", f"--tokenizer={tokenizer}")

    assert (check("sort", "qwen").code, check("sort", "qwen").err) == (0, "")
    turns = check("guess", "qwen")
    assert turns.code == 2
    assert "a task that converses has no [tools] under a chat template; use harmony" in turns.err
    forgetful = check("sort", "forgetful")
    assert forgetful.code == 2
    assert "own/environment.toml: [tools] the chat template writes earlier messages in another way" in forgetful.err


# documented: nmoe env records word_problems train.jsonl --count 10000
def test_records_for_other_trainers(nmoe: Nmoe, own: Path) -> None:
    result = nmoe("env", "records", "own", "records.jsonl")
    assert (result.code, result.out) == (0, "records.jsonl: 1 records\n")
    record = json.loads(Path("records.jsonl").read_text())
    label = record.pop("label")
    assert re.fullmatch(r"train/0/[0-9a-f]{8}", label)
    assert record == {
        "prompt": [{"role": "system", "content": "Sort."}, {"role": "user", "content": "Sort: 21"}],
        "data_source": "digits",
        "env_class": "nmoe",
        "environment": str(own),
        "reward_spec": {"method": "rule", "ground_truth": label},
    }
    result = nmoe("env", "records", "word_problems", "records.jsonl")
    assert result.code == 2
    assert "environment 'word_problems' has endless problems: say how many" in result.err
    assert nmoe("env", "records", "word_problems", "records.jsonl", "--count", "2", "--split", "eval").code == 0
    assert [json.loads(line)["label"][:6] for line in Path("records.jsonl").read_text().splitlines()] == [
        "eval/0",
        "eval/1",
    ]
