"""Checks of found faults: the library, its messages, and what takes long or is silent meanwhile."""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from found import Result, check

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64}
SHORT: dict[str, Any] = {
    "run.steps": 1,
    "batch.prompts_per_step": 1,
    "batch.group_size": 4,
    "sampling.max_new_tokens": 8,
}


@check(30, "what a policy wrote, on the console of a run of one step", "prompt, completion and reward")
def a_sample_is_shown() -> Result:
    import nmoe

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        nmoe.train_rl(TINY, env="sort", config=SHORT | {"run.directory": tempfile.mkdtemp()})
    wanted = ("prompt:", "Sort: ", "completion:", "reward 0 ")
    shown = [one for one in wanted if one in said.getvalue()]
    return f"{len(shown)} of {len(wanted)} parts shown", len(shown) == len(wanted)


RUN = """
[run]
steps = 1
[model]
tokenizer = "bytes"
shape = {hidden_size = 32, layers = 1, heads = 2, kv_heads = 2, head_dim = 16, intermediate_size = 64, context_tokens = 1024}
[environment]
env_id = "qa"
format = "boxed"
task_pool = {type = "jsonl", path = "qa.jsonl", task_type = "math"}
"""


def said(*arguments: str) -> tuple[int | str | None, str]:
    """The exit code of a command and the last line that it prints on stderr."""
    from nmoe.cli import main

    printed, argv = io.StringIO(), sys.argv
    sys.argv = ["nmoe", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            main()
    except SystemExit as ended:
        return ended.code, (printed.getvalue().splitlines() or [""])[-1]
    finally:
        sys.argv = argv
    return 0, ""


MESSAGES = (
    ("rl train qa.jsonl", "is data"),
    ("rl train rl.toml --algorithm.kl_beta=0.1", "did you mean --algorithm.kl_coef?"),
    ("rl train rl.toml --lr=1e-5", "did you mean --optimizer.learning_rate?"),
    ("rl train rl.toml --batch.num_generations=8", "did you mean --batch.group_size?"),
    ("train rl.toml", "Did you mean `nmoe rl train rl.toml`?"),
    ("grpo rl.toml", "Did you mean `nmoe rl train rl.toml`?"),
    ("rl train rl.toml --algorithm.advantage=GRPO", "did you mean 'grpo'?"),
    ("rl train rl.toml --sinks.to=tensorboard", """write --sinks.to='["tensorboard"]'"""),
    ("rl train rl.toml --environment.task_pool.path=qa.jsonl[:10]", "write qa.jsonl@[:10]"),
    ("rl train rl.toml --run.directory=~/runs", "write /"),
    ("rl train lost.toml", "lost.toml:10: [environment.task_pool] path"),
    ("rl train null.toml", "is null; fill it in or remove the record"),
    ("rl train down.toml", "connection refused"),
)


@check(
    28, "messages to what a newcomer writes", f"{len(MESSAGES)} of {len(MESSAGES)} name the thing meant, exit code 2"
)
def messages_name_the_thing_meant() -> Result:
    Path("qa.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    Path("null.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n{"question": "3+3?", "answer": null}\n')
    Path("rl.toml").write_text(RUN)
    Path("lost.toml").write_text(RUN.replace("qa.jsonl", "lost.jsonl"))
    Path("null.toml").write_text(RUN.replace("qa.jsonl", "null.jsonl"))
    service = '[[environment.rewards]]\ntype = "http"\nname = "x"\nurl = "http://127.0.0.1:9/"\nretries = 0\n'
    Path("down.toml").write_text(RUN + service)
    found = {command: said(*command.split()) for command, _ in MESSAGES}
    missing = [command for command, part in MESSAGES if found[command][0] != 2 or part not in found[command][1]]
    right = len(MESSAGES) - len(missing)
    return f"{right} of {len(MESSAGES)}" + (f", not {missing[0]!r}" if missing else ""), not missing


@check(26, "rewards= beside records with a right answer", "the answer is graded, and the reward is added")
def rewards_leave_the_gold_graded() -> Result:
    import json

    import nmoe

    def one(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    with contextlib.redirect_stdout(io.StringIO()):
        run = nmoe.train_rl(TINY, env=[{"prompt": "2+2=", "answer": "4"}], rewards=[one], config=SHORT)
    sample = json.loads((run.path / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    graded = "correctness" in sample["components"]
    return f"task {sample['task_type']}, gold {sample['gold']!r}, graded: {graded}", graded and sample["gold"] == "4"


@check(26, "contradictions and foreign objects in a call of train_rl", "9 of 9 refused with the way that works")
def contradictions_are_refused() -> Result:
    import torch

    import nmoe
    from nmoe.errors import UserError

    cases: dict[str, dict[str, Any]] = {
        "model.path": {"model": "a", "config": {"model.path": "b"}},
        "shape": {"config": {"model.shape.layers": 3}},
        "environment.path": {
            "env": [{"prompt": "1+1=", "answer": "2"}],
            "config": SHORT | {"environment.path": "sort"},
        },
        "run.steps": {"config": SHORT | {"run": {"steps": 2}}},
        "module": {"model": torch.nn.Linear(2, 2)},
        "optimizer": {"optimizer": 1},
        "lr": {"lr": 1e-5},
        "agent": {"generate_fn": lambda prompt: "x"},
        "tools": {"tools": torch.nn.Linear},
    }
    ignored = []
    for name, arguments in cases.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                nmoe.train_rl(**({"model": TINY, "env": "sort", "config": SHORT} | arguments))
            ignored.append(name)
        except UserError as error:
            if name == "model.path" and "drop one" not in str(error):
                ignored.append(name)
        except Exception:
            ignored.append(name)
    refused = len(cases) - len(ignored)
    return f"{refused} of {len(cases)} refused" + (f", not {', '.join(ignored)}" if ignored else ""), not ignored


@check(26, "records as a datasets.Dataset, and a lambda as a reward", "both train")
def datasets_and_lambdas_train() -> Result:
    import datasets

    import nmoe

    def trains(**arguments: Any) -> bool:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                nmoe.train_rl(TINY, config=SHORT, **arguments)
        except Exception:
            return False
        return True

    records = [{"prompt": "2+2=", "answer": "4"}]
    dataset = trains(env=datasets.Dataset.from_list(records))
    reward = trains(env=[{"prompt": "a"}], rewards=[lambda completions, **columns: [1.0] * len(completions)])
    return f"Dataset {dataset}, lambda {reward}", dataset and reward


@check(27, "env check of a task with turns and tools of one's own under a chat template", "exit code 2, as rl train")
def env_check_refuses_what_a_run_refuses() -> Result:
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parents[1] / "tests"))
    from chat_templates import qwen

    qwen(Path("qwen"))
    Path("lone.py").write_text('def add(x: int) -> int:\n    "Adds."\n    return x\n')
    Path("own.toml").write_text('env_id = "own"\nformat = "chat"\ntask = "guess"\n[tools]\nuse = ["lone:add"]\n')
    code, line = said("env", "check", "own.toml", "--tokenizer=qwen")
    return f"exit code {code}: {line[:60]}", code == 2 and "a task that converses has no [tools]" in line


@check(27, "--format-check --max-tokens=5 of a model that does not end", "at most 5 tokens in the mean")
def format_check_heeds_its_limits() -> Result:
    import nmoe

    with contextlib.redirect_stdout(io.StringIO()):
        run = nmoe.train_rl({**TINY, "context_tokens": 256}, env="sort", config=SHORT)
    from nmoe.cli import main

    printed, argv = io.StringIO(), sys.argv
    sys.argv = ["nmoe", "eval", str(run.path), "--format-check", "--problems=2", "--max-tokens=5"]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = argv
    mean = next(float(line.split()[0]) for line in printed.getvalue().splitlines() if "tokens in the mean" in line)
    return f"{mean:.0f} tokens in the mean", mean <= 5


@check(
    29, "PRM800K from copies of the GitHub repository and of the mirror, by the name prm800k", "4 solutions from both"
)
def prm800k_is_read_where_it_lies() -> Result:
    import json
    import os

    from nmoe.config.tables.recipes import VerifierSection
    from nmoe.data.prm import read_source
    from nmoe.errors import UserError

    step = {"completions": [{"text": "So 4.", "rating": 1, "flagged": False}], "human_completion": None}
    label = {"steps": [{**step, "chosen_completion": 0}], "total_time": 1, "finish_reason": "solution"}
    os.environ.update(NMOE_DATASETS="kept", HF_HUB_OFFLINE="1")
    read = []
    for layout in ("openai/prm800k/prm800k/data", "tasksource/PRM800K"):
        for phase in (1, 2):
            problems = (f"{phase} + {n}?" for n in (1, 2))
            lines = [json.dumps({"question": {"problem": one}, "label": label}) for one in problems]
            file = Path("kept", layout, f"phase{phase}_train.jsonl")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(lines) + "\n")
        section = VerifierSection(prm_source="prm800k")
        try:
            found = read_source(section.prm_source, "train", section.prm800k, section.math_shepherd, "+")
            read.append(len(found.solutions))
        except UserError:
            read.append(0)
        Path("kept").rename(f"kept_{len(read)}")
    return f"{read[0]} solutions from GitHub's files, {read[1]} from the mirror's", read == [4, 4]


_STEPS = """
import json, sys, time
from rl_step import steps
print(json.dumps([one["sampling"] + one["learning"] for one in steps(3, time.perf_counter)]))
"""


@check(
    4,
    "a step of reinforcement learning beside two busy processes, on two threads and on one",
    "two threads take at most twice as long as one",
)
def two_threads_beside_others() -> Result:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    try:
        for threads in (1, 2, 2, 1):
            benchmarks = str(Path(__file__).parents[1])
            environment = os.environ | {
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], benchmarks]),
            }
            done = subprocess.run(
                [sys.executable, "-c", _STEPS], env=environment, check=True, capture_output=True, text=True
            )
            seconds[threads] += json.loads(done.stdout.splitlines()[-1])
    finally:
        for process in busy:
            process.kill()
            process.wait()
    one, two = (statistics.median(seconds[threads]) for threads in (1, 2))
    return f"{two / one:.1f} times as long", two <= 2 * one


def _nmoe(*arguments: str, **variables: str) -> tuple[str, float]:
    """What `nmoe` prints on both streams, and its CPU seconds."""
    before = os.times()
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | variables
    environment["PYTHONUNBUFFERED"] = "1"
    command = [sys.executable, "-m", "nmoe", *arguments]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout, used


@check(
    5,
    "the first run on a machine: what it says before it compiles, and when",
    "a line says so before step 1, whose time has no compiling",
)
def first_run_compiles() -> Result:
    Path("problems.toml").write_text(
        '[run]\nsteps = 2\n[model]\ntokenizer = "bytes"\n[model.shape]\nhidden_size = 32\nlayers = 1\nheads = 2\nkv_heads = 2\n'
        'head_dim = 16\nintermediate_size = 64\ncontext_tokens = 64\n[environment]\npath = "sort"\nformat = "boxed"\n'
        "[sampling]\nmax_new_tokens = 8\n[batch]\nprompts_per_step = 2\ngroup_size = 2\n"
    )
    said, _ = _nmoe("rl", "train", "problems.toml", XDG_CACHE_HOME=os.getcwd())
    lines = said.splitlines()
    announced = next((at for at, line in enumerate(lines) if line.startswith("compiling the C++ kernels")), None)
    first = next((at for at, line in enumerate(lines) if " 1/2 " in line), None)
    if first is None:
        return f"no step: {lines[-1]}", False
    rows = [json.loads(line) for line in next(Path("runs").glob("*/metrics.jsonl")).read_text().splitlines()]
    step = rows[0]["time_step_s"]
    when = "no line" if announced is None else f"a line {'before' if announced < first else 'after'} step 1"
    return (
        f"{when}, which takes {'less' if step < 5 else 'more'} than 5 s",
        announced is not None and announced < first and step < 5,
    )


@check(
    6,
    "nmoe preflight of a model and a data set of the hub without a network",
    "no line of the hub's client; data or hub, model, memory and device looked at, in 10 s",
)
def preflight_without_a_network() -> Result:
    began = time.monotonic()
    said, _ = _nmoe("preflight", "qwen3_0.6b", HF_HOME=os.getcwd(), HF_ENDPOINT="http://127.0.0.1:9")
    seconds = time.monotonic() - began
    raw = said.count("thrown while requesting") + said.count("Retrying in")
    seen = {line.split()[1] for line in said.splitlines() if line.startswith(("ok ", "warn", "fail"))}
    looked = seen & {"hub", "model", "memory", "device"}
    line = f"{raw} lines of the client, {len(looked)} of 4 looked at, {'less' if seconds < 10 else 'more'} than 10 s"
    return line, raw == 0 and len(looked) == 4 and seconds < 10


@check(6, "nmoe report of a run of 200 steps", "at most 5 CPU seconds")
def report_of_200_steps() -> Result:
    run = Path("run")
    run.mkdir()
    (run / "config.toml").write_text('[run]\nname = "run"\n')
    (run / "provenance.json").write_text(json.dumps({"threads": 2, "resumed": []}))
    names = "reward_mean correctness format_ok loss response_length_mean entropy_mean entropy_p10 mismatch_abs_mean grad_norm"
    rows = [{"step": step, **dict.fromkeys(names.split(), (step * 7919 % 1000 + 1) / 1000)} for step in range(1, 201)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, seconds = _nmoe("report", "run", MPLCONFIGDIR=os.getcwd())
    return ("at most 5" if seconds <= 5 else f"{seconds:.0f}") + " CPU seconds", "report.md" in said and seconds <= 5
