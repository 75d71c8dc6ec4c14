"""The `nmoe` command: what each verb hands over, how bad input, Ctrl-C and closed pipes end it, and how fast it starts."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main

from nmoe import cli
from nmoe.cli.command import app
from nmoe.config.commands import PretrainConfig, RLConfig
from nmoe.config.modes import mode_of
from nmoe.config.packaged import packaged_configurations, packaged_environments
from nmoe.errors import InfrastructureError, UserError
from nmoe.eval.evaluate import Asked
from nmoe.verifier.scorers import load_scorer

RL = """
[run]
steps = 10
[model]
path = "checkpoint"
[environment]
env_id = "sort"
task_pool = {type = "generated", task_type = "sort"}
"""
PRETRAIN = '[run]\nsteps = 10\n[model]\npath = "checkpoint"\n[data]\ndocuments = "d.jsonl"\n'

MAIN = "from nmoe.cli import main; main()"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """Puts a recorder in the place of `module.function`; returns the list that its calls are added to."""

    def stand_in(module: str, function: str, result: Any = None) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def record(*arguments: Any) -> Any:
            calls.append(arguments)
            if isinstance(result, BaseException):
                raise result
            return result

        # Of the real module, which others import too.
        monkeypatch.setattr(import_module(module), function, record)
        return calls

    return stand_in


@pytest.fixture
def nmoe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | str | None]:
    """Runs `nmoe` with arguments in this process and returns its exit code."""

    def nmoe(*arguments: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["nmoe", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code

    return nmoe


Nmoe = Callable[..., int | str | None]
StandIn = Callable[..., list[tuple[Any, ...]]]


def test_rl_train_loads_its_configuration(tmp_path: Path, nmoe: Nmoe, stand_in: StandIn) -> None:
    calls = stand_in("nmoe.rl.launch", "train", result=tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(RL)
    assert nmoe("rl", "train", "--run.seed=3", str(path), "--batch.group_size", "4", "--run.seed", "4") == 0
    ((config,),) = calls
    assert isinstance(config, RLConfig)
    assert (config.run.name, config.run.seed, config.batch.group_size) == ("tiny", 4, 4)


def test_pretrain_loads_its_configuration(tmp_path: Path, nmoe: Nmoe, stand_in: StandIn) -> None:
    calls = stand_in("nmoe.recipes.pretrain", "pretrain", result=tmp_path)
    path = tmp_path / "base.toml"
    path.write_text(PRETRAIN)
    assert nmoe("pretrain", str(path), "--data.held_out_documents=5") == 0
    ((config,),) = calls
    assert isinstance(config, PretrainConfig)
    assert (config.run.name, config.data.held_out_documents) == ("base", 5)


def test_bad_overrides_are_all_listed_and_nothing_starts(
    tmp_path: Path, nmoe: Nmoe, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = stand_in("nmoe.rl.launch", "train")
    path = tmp_path / "tiny.toml"
    path.write_text(RL)
    assert nmoe("rl", "train", str(path), "--optimizer.learnng_rate", "1", "--run.seed", "-x") == 2
    assert calls == []
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "error: 2 problems",
        "--run.seed=-x: expected an integer, got a string",
        "--optimizer.learnng_rate=1: unknown key; did you mean --optimizer.learning_rate?",
    ]


def test_a_training_verb_without_its_file(nmoe: Nmoe, capsys: pytest.CaptureFixture[str]) -> None:
    assert nmoe("rl", "train", "--run.seed=3") == 2
    assert capsys.readouterr().err.startswith("error: --run.seed=3 without a CONFIG")
    assert nmoe("rl", "train") == 2
    assert nmoe("pretrain", "nowhere.toml") == 2
    assert capsys.readouterr().err.endswith("error: nowhere.toml: no such file\n")


# documented: nmoe eval models/Qwen3-0.6B gsm8k --format-check --max-tokens 1024
def test_the_other_verbs_hand_over_their_arguments(
    nmoe: Nmoe, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = stand_in("nmoe.eval.sweep", "sweep_command")
    assert nmoe("eval", "runs/a", "e.toml") == 0
    several = [
        "--problems",
        "5",
        "--samples=8",
        "--temperature",
        "0.6",
        "--seed",
        "7",
        "--best-of",
        "runs/b",
        "--out=r",
        "--device=cpu",
        "--expert-weights=mxfp4",
        "--precision=bfloat16",
    ]
    assert nmoe("eval", "a", "e", *several) == 0
    eight = Asked(
        mode_of(samples=8, temperature=0.6), 5, 7, None, None, "cpu", "mxfp4", Path("runs/b"), precision="bfloat16"
    )
    evals = Path("evals")
    assert calls == [
        ([Path("runs/a")], [Path("e.toml")], Asked(mode_of(), 200, 0), evals, None, load_scorer, {}),
        ([Path("a")], [Path("e")], eight, evals, Path("r"), load_scorer, {}),
    ]
    calls.clear()
    assert nmoe("eval", "before=runs/a", "after=runs/b", "e") == 0
    ((models, benchmarks, *_, labels),) = calls
    assert (models, benchmarks) == ([Path("runs/a"), Path("runs/b")], [Path("e")])
    assert labels == {Path("runs/a"): "before", Path("runs/b"): "after"}

    calls = stand_in("nmoe.eval.format_check", "format_check", result=["ready"])
    assert nmoe("eval", "runs/a", "--format-check") == 0
    limits = ("--max-tokens=64", "--reasoning-effort=low", "--precision=float32")
    assert nmoe("eval", "a", "e", "--format-check", "--problems=50", "--seed=3", *limits) == 0
    assert calls == [
        (Path("runs/a"), None, 20, 0, "auto", "dequantized", None, None, None),
        (Path("a"), Path("e"), 50, 3, "auto", "dequantized", 64, "low", "float32"),
    ]
    assert capsys.readouterr().out == "ready\nready\n"

    calls = stand_in("nmoe.serve.chat", "chat")
    assert nmoe("chat", "runs/a", "--temperature=0", "--max-new-tokens=9", "--seed=2") == 0
    assert (
        nmoe("chat", "m", "--system=Be brief.", "--format", "chat", "--expert-weights", "mxfp4", "--precision=bfloat16")
        == 0
    )
    assert calls == [
        (Path("runs/a"), 0.0, 9, 2, None, "auto", "auto", "dequantized", None),
        (Path("m"), 0.7, 256, 0, "Be brief.", "chat", "auto", "mxfp4", "bfloat16"),
    ]
    calls = stand_in("nmoe.serve.chat", "chat_with_server")
    assert nmoe("chat", "--url", "http://h:1", "--model=m", "--system=Be brief.") == 0
    assert calls == [("http://h:1", "m", 0.7, 256, 0, "Be brief.")]
    for wrong in ((), ("m", "--url=u"), ("m", "--model=x"), ("--url=u", "--device=cpu")):
        assert nmoe("chat", *wrong) == 2
    assert "name a checkpoint, or a server by --url; one of the two" in capsys.readouterr().err

    calls = stand_in("nmoe.runs.conversions", "export_checkpoint")
    assert nmoe("export", "runs/a", "out") == 0
    assert nmoe("export", "a", "b", "--format=peft", "--dtype", "bfloat16") == 0
    assert calls == [(Path("runs/a"), Path("out"), None, "hf"), (Path("a"), Path("b"), "bfloat16", "peft")]
    assert capsys.readouterr().out == "out\nb\n"

    calls = stand_in("nmoe.speedrun", "speedrun", ("real", Path("runs/real")))
    assert nmoe("speedrun") == 0
    assert nmoe("speedrun", "--real", "--seed", "1", "--out", "x/y") == 0
    assert nmoe("speedrun", "--scratch", "--full", "--resume", "--replace", "--device=cpu") == 0
    assert calls == [
        (None, None, 0, False, False, "auto", False),
        ("real", Path("x/y"), 1, False, False, "auto", False),
        ("scratch", None, 0, True, True, "cpu", True),
    ]
    assert nmoe("speedrun", "--scratch", "--real") == 2
    assert "--real and --scratch name two pipelines; choose one" in capsys.readouterr().err
    calls = stand_in("nmoe.speedrun.speedrun", "run_pipeline")
    assert nmoe("speedrun", "mine.toml", "--seed=2", "--out=x", "--resume", "--replace", "--device=cpu") == 0
    assert calls == [("mine.toml", Path("x"), 2, True, "cpu", True)]
    assert nmoe("speedrun", "mine.toml", "--full") == 2
    assert nmoe("speedrun", "--dry-run") == 2
    assert "--dry-run plans a PIPELINE; name one, such as nanochat_d20" in capsys.readouterr().err

    capsys.readouterr()
    calls = stand_in("nmoe.runs.report", "write_report", result=Path("runs/a/report.md"))
    assert nmoe("report", "runs/a") == 0
    assert calls == [(Path("runs/a"),)]
    assert capsys.readouterr().out == "runs/a/report.md\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "a", "e", "--problems=0"),
        ("eval", "a", "e", "--temperature=-1"),
        ("eval", "a", "e", "--temperature=nan"),
        ("chat", "a", "--temperature=inf"),
        ("chat", "a", "--max-new-tokens=0"),
        ("eval", "a"),
        ("eval", "a", "e", "--format-check", "--samples=2"),
        ("eval", "a", "e", "--format-check", "--temperature=1"),
        ("eval", "a", "e", "--format-check", "--best-of=b"),
        ("export", "a"),
        ("export", "a", "b", "--format=gguf"),
        ("export", "a", "b", "--dtype=int4"),
        ("frobnicate",),
        ("rl", "frobnicate"),
        ("report", "a", "--x"),
    ],
)
def test_wrong_usage_exits_with_2(nmoe: Nmoe, arguments: tuple[str, ...]) -> None:
    assert nmoe(*arguments) == 2


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("x.toml is wrong"), 2), (InfrastructureError("no engine is left"), 1)]
)
def test_user_errors_are_one_message_and_an_exit_code(
    nmoe: Nmoe, stand_in: StandIn, capsys: pytest.CaptureFixture[str], error: UserError, code: int
) -> None:
    stand_in("nmoe.runs.report", "write_report", result=error)
    assert nmoe("report", "runs/a") == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_ctrl_c_exits_with_130(nmoe: Nmoe, stand_in: StandIn) -> None:
    stand_in("nmoe.runs.report", "write_report", result=KeyboardInterrupt())
    assert nmoe("report", "runs/a") == 130


def test_a_warning_is_one_line() -> None:
    script = "import sys, types, warnings\nmodule = types.ModuleType('nmoe.runs.report')\n"
    script += (
        "module.write_report = lambda run: warnings.warn('install g++')\nsys.modules['nmoe.runs.report'] = module\n"
    )
    script += f"sys.argv = ['nmoe', 'report', 'x']\n{MAIN}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "warning: install g++\n")


def test_a_defect_keeps_its_traceback(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("nmoe.runs.report", "write_report", result=ZeroDivisionError("a defect"))
    monkeypatch.setattr(sys, "argv", ["nmoe", "report", "runs/a"])
    with pytest.raises(ZeroDivisionError, match="a defect"):
        cli.main()


def test_version(nmoe: Nmoe, capsys: pytest.CaptureFixture[str]) -> None:
    assert nmoe("--version") == 0
    assert capsys.readouterr().out == f"nmoe {version('nmoe')}\n"


@pytest.mark.parametrize(
    "verb", [("pretrain",), ("rl", "train"), ("rl",), ("eval",), ("chat",), ("report",), ("export",), ("speedrun",), ()]
)
def test_help_holds_an_example(nmoe: Nmoe, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]) -> None:
    assert nmoe(*verb, "--help") == 0
    help_text = capsys.readouterr().out
    example = help_text[help_text.index("Example") :].splitlines()[1]
    assert example.startswith(f"    nmoe {' '.join(verb)}".rstrip())


def test_no_help_shows_python_types(nmoe: Nmoe, capsys: pytest.CaptureFixture[str]) -> None:
    verbs = [("eval",), ("speedrun",), ("chat",), ("data", "show"), ("data", "pairs"), ("env", "check"), ("replay",)]
    for verb in [*verbs, ("selfplay",), ("verifier",), ("sft",), ("rl", "train"), ("export",), ("grade",)]:
        assert nmoe(*verb, "--help") == 0
        listed = capsys.readouterr().out
        assert "Arguments:" in listed or verb == ("speedrun",)
        assert re.findall(r"<(?:int|float|str|path|list)\b.*|\b(?:INTEGER|FLOAT)\b.*", listed) == [], verb


@pytest.mark.parametrize(
    ("verb", "keys"),
    [
        (
            ("rl", "train"),
            ["--run.steps=0\n", "--batch.group_size=8\n", "--environment.path\n", "--optimizer.learning_rate=1e-6\n"],
        ),
        (("sft",), ['--records.path=""\n', '--records.format="auto"\n', "      how records become tokens:"]),
        (("pretrain",), ["--data.tokens_per_step=16384\n", "--optimizer.learning_rate=0.0003\n"]),
        (("selfplay",), ["--selfplay.rounds=1\n"]),
    ],
)
def test_help_of_a_training_verb_lists_its_keys(
    nmoe: Nmoe, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...], keys: list[str]
) -> None:
    assert nmoe(*verb, "-h") == 0
    listed = capsys.readouterr().out.partition("Keys, in the file's tables")[2]
    for key in keys:
        assert key in listed


def test_resuming_what_is_not_there_says_so(
    tmp_path: Path, nmoe: Nmoe, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("nmoe.rl.launch", "train", result=tmp_path)
    (tmp_path / "tiny.toml").write_text(RL)
    command = ("rl", "train", str(tmp_path / "tiny.toml"), f"--run.directory={tmp_path}")
    assert nmoe(*command, "--run.resume=true") == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/tiny: there is no run to resume; leave --run.resume out to start one\n"
    )
    resumed = (*command, "--run.resume=auto")
    assert nmoe(*resumed) == 0
    note = f"{tmp_path}/tiny: no run to resume yet, so it starts from the beginning\n"
    assert capsys.readouterr().out.startswith(note)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.toml").write_text("")
    assert nmoe(*resumed) == 0
    assert "no run to resume" not in capsys.readouterr().out


def test_the_shell_can_complete(nmoe: Nmoe, capsys: pytest.CaptureFixture[str]) -> None:
    assert nmoe("-h") == 0
    assert "--install-completion" in capsys.readouterr().out


def test_a_terminal_is_not_left_blank(
    tmp_path: Path, nmoe: Nmoe, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("nmoe.rl.launch", "train", result=tmp_path)
    (tmp_path / "tiny.toml").write_text(RL)
    assert nmoe("rl", "train", str(tmp_path / "tiny.toml")) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert nmoe("rl", "train", str(tmp_path / "tiny.toml")) == 0
    assert capsys.readouterr().err == f"nmoe {tmp_path}/tiny.toml: loading\n"


@pytest.mark.parametrize("arguments", [["--help"], ["rl", "train", "--help"], ["eval", "--help"], ["--version"]])
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    script = f"import sys; sys.argv = ['nmoe', *{arguments}]\ntry:\n    " + MAIN
    script += (
        "\nfinally:\n    print(sorted({'torch', 'numpy', 'scipy', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_python_m_nmoe_rl_train_is_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(RL)
    commands = [["-c", MAIN, "rl"], ["-m", "nmoe.rl"]]
    results = [
        subprocess.run(
            [sys.executable, *command, "train", "x.toml", "--run.steps=-1", "--seed=1"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        for command in commands
    ]
    assert results[0].stderr == results[1].stderr
    assert results[0].stderr.splitlines() == [
        "error: 2 problems",
        "--run.steps=-1: must be at least 0",
        "--seed=1: unknown key; did you mean --run.seed?",
    ]
    assert [result.returncode for result in results] == [2, 2]


def test_a_closed_pipe_ends_quietly() -> None:
    script = f"import sys; sys.argv = ['nmoe', '--help']; {MAIN}"
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


def test_an_interrupt_signal_ends_a_running_verb_without_a_traceback() -> None:
    # What a shell starts in the background ignores the signal, and so does all that it starts: undone here.
    script = f"""
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)
module = types.ModuleType("nmoe.runs.report")
def write_report(run):
    print("started", flush=True)
    time.sleep(60)
module.write_report = write_report
sys.modules["nmoe.runs.report"] = module
sys.argv = ["nmoe", "report", "x"]
{MAIN}
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"")
    assert time.monotonic() - begun < 10


def test_what_the_examples_of_help_name_is_packaged() -> None:
    text = "\n".join(path.read_text() for path in (Path(__file__).parents[2] / "nmoe/cli").glob("*.py"))
    configurations = re.findall(r" nmoe (?:rl train|pretrain|sft|dpo|reward|verifier|selfplay) (\w+)", text)
    assert {"sort_grpo", "verifier"} <= set(configurations)
    assert set(configurations) <= {one.name for one in packaged_configurations()} | {"mine"}
    environments = re.findall(r" nmoe (?:env check|eval \S+|data pairs \S+) (\w+)\b(?![/=])", text)
    assert {"skills", "sort"} <= set(environments)
    # `core` is a benchmark that has no environment.
    assert set(environments) <= {one.name for one in packaged_environments()} | {"my_environment", "mine", "core"}


HELP = [sys.executable, "-m", "nmoe", "--help"]


def test_help_takes_under_half_a_second_of_cpu() -> None:
    """The quickest of three: the first may have to compile and to read from disk."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run(HELP, capture_output=True, text=True, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "speedrun" in shown
    assert 0 < min(seconds) < 0.5


def test_every_parameter_of_every_command_is_described() -> None:
    def undescribed(name: str, command: Any) -> Iterator[str]:
        yield from (f"{name}: {one.name}" for one in command.params if not one.help)
        for below, inner in getattr(command, "commands", {}).items():
            yield from undescribed(f"{name} {below}", inner)

    assert list(undescribed("nmoe", typer.main.get_command(app))) == []
