"""Prints the numbers of tiny runs of every recipe, and whether another commit computes the same ones.

    python scripts/same_numbers.py --write FILE            # before a change: keeps the figures of the working tree
    python scripts/same_numbers.py --against FILE          # after it
    python scripts/same_numbers.py HEAD --against main     # of two commits

One process imports the commit's code and forks once for each run, so that all runs together take about a minute of one core. Each
line shows how many steps and metrics a run recorded, and digests of two things: all metrics of all steps but the timings, and the
files that it left (samples, evaluations, streams of self-play, weights). With --against, prints the metrics that differ, each with
the first step at which it does, and the files; exit code 1 where any does. Figures are compared on one machine only: another
processor may round otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commits import WORKING_TREE, checked_out, environment, resolved, subject
from scripted_sampling import plays_the_roles, uses_the_tool
from tiny_run import VERBS, make_workshop

FILES = ("samples/*.jsonl", "eval/*.json", "*_train.jsonl", "checkpoints/latest/**/*.safetensors")
"""What is compared of a run's directory beside its metrics."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A configuration of `tiny_runs`, with the overrides of each of its starts: a second start resumes the first. With several
    ranks, every rank is a process."""

    configuration: str
    starts: Sequence[Sequence[str]] = ((),)
    ranks: int = 1


# Exact where tokens reach an engine from several ranks or tools: which requests it has at once is a matter of timing there.
EXACT = "--model.numerics=exact"
SHORT = ("--run.steps=3", "--batch.prompts_per_step=3")
RUNS: Mapping[str, Run] = {
    "grpo": Run("grpo"),
    "dpo": Run("dpo"),
    "sft_lora": Run("sft"),
    "ppo": Run(
        "grpo", [(*SHORT, "--algorithm.advantage=gae", "--critic.learning_rate=1e-3", "--critic.warmup_steps=1")]
    ),
    "ppo_shared": Run(
        "grpo", [(*SHORT, "--algorithm.advantage=gae", "--critic.shared=true", "--algorithm.kl_in=reward")]
    ),
    "lora": Run("grpo", [(*SHORT, "--lora.rank=4", "--lora.alpha=8")]),
    "distillation": Run("grpo", [(*SHORT, "--distillation.teacher=grpo", "--distillation.reward_coef=0.5")]),
    "reward": Run("reward"),
    "verifier": Run("verifier"),
    "verifier_says": Run(
        "verifier", [("--verifier.head=generative", "--verifier.reads=last", "--verifier.language_weight=0")]
    ),
    "selfplay": Run("selfplay"),
    "tools": Run("tools"),
    "resumed": Run("grpo", [("--run.steps=2", "--checkpoint.every_steps=1"), ("--run.steps=4", "--run.resume=true")]),
    "two_ranks": Run("grpo", [("--run.steps=2", EXACT)], ranks=2),
}


def is_timing(name: str) -> bool:
    """Whether a metric may differ from run to run: the group Time of docs/reference/metrics.md."""
    return name.startswith("time_") or name.endswith("per_second")


def timeless(record: Any) -> Any:
    """A record without its times: when a workspace was made, and how long a tool took."""
    if isinstance(record, list):
        return [timeless(one) for one in record]
    if isinstance(record, dict):
        return {key: timeless(value) for key, value in record.items() if key != "made_utc" and not key.endswith("_s")}
    return record


def records_of(path: Path) -> list[Any]:
    """The records of a .json or .jsonl file without their times."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [timeless(json.loads(line)) for line in lines]


@dataclass(frozen=True)
class Figures:
    """What a run computed: the metrics of each step but for timings, and a digest of each file."""

    steps: list[dict[str, Any]]
    files: dict[str, str]

    @classmethod
    def read(cls, run: Path) -> Figures:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found = sorted(path for pattern in FILES for path in run.glob(pattern))
        return cls(
            [{name: value for name, value in row.items() if not is_timing(name)} for row in rows],
            {
                path.relative_to(run).as_posix(): digest(
                    path.read_bytes() if path.suffix == ".safetensors" else records_of(path)
                )
                for path in found
            },
        )

    def line(self, name: str) -> str:
        metrics = {key for row in self.steps for key in row}
        return (
            f"{name:<14} {len(self.steps):>3} steps  {len(metrics):>3} metrics  {digest(self.steps)}"
            f"  {len(self.files):>2} files  {digest(self.files)}"
        )


def digest(value: Any) -> str:
    """Eight hexadecimal digits of the SHA-256 of bytes, or of a value as JSON."""
    content = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:8]


def differences(before: Sequence[Row], after: Sequence[Row]) -> Iterator[str]:
    """One line for each metric that differs, with its values at the first step where it does."""
    if len(before) != len(after):
        yield f"{len(before)} steps before, {len(after)} after"
    seen: set[str] = set()
    for old, new in zip(before, after, strict=False):
        for name in sorted(old.keys() | new.keys()):
            was, now = old.get(name, "absent"), new.get(name, "absent")
            if was != now and name not in seen and not is_timing(name):
                seen.add(name)
                yield f"{name}: {was} before, {now} after, at step {old.get('step')}"


def figures_of(commit: str, names: Sequence[str]) -> dict[str, Figures]:
    """Trains the base and the named runs from it by the code of a commit. Raises CalledProcessError where a run fails, with its
    output on the standard error."""
    with checked_out(commit) as tree, tempfile.TemporaryDirectory() as directory:
        workshop = Path(directory)
        make_workshop(tree, workshop)
        command = [sys.executable, __file__, "--child", *names]
        subprocess.run(command, cwd=workshop, env=environment(tree), check=True)
        return {name: Figures.read(workshop / name) for name in ("base", *names)}


def child(names: Sequence[str]) -> int:
    """Runs in the working directory by the `nmoe` of the path, each in a fork of this process."""
    importlib.import_module("nmoe.rl.train")  # with torch, once for all
    for name in names:
        run = RUNS[name]
        for overrides in run.starts:
            if code := _forked(name, run, overrides):
                return code
    return 0


def _forked(name: str, run: Run, overrides: Sequence[str]) -> int:
    """The first exit code of a rank that is not 0, after what it said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {}
    for rank in range(run.ranks):
        if not (process := os.fork()):
            if run.ranks > 1:
                os.environ |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(run.ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            with Path(f"{name}.{rank}.txt").open("w") as said, redirect_stdout(said), redirect_stderr(said):
                code = _run(name, run.configuration, [f"--run.name={name}", *overrides])
            os._exit(code)
        ranks[process] = rank
    failed = 0
    for process, rank in ranks.items():
        if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
            failed = failed or code
            print(f"{name}, rank {rank}:\n{Path(f'{name}.{rank}.txt').read_text()}", file=sys.stderr)
    return failed


def _run(name: str, configuration: str, overrides: Sequence[str]) -> int:
    """One run in this process: by the command line, but for a `generate_fn`, which only the library takes."""
    import traceback

    import nmoe
    from nmoe.cli import main

    os.environ["NMOE_WORKSPACES"] = str(Path("workspaces").absolute())
    try:
        if configuration == "tools":
            Path("files").mkdir(exist_ok=True)
            nmoe.train_rl(config="tools.toml", generate_fn=uses_the_tool(Path("tokenizer")))
            return 0
        if configuration == "selfplay":
            nmoe.NativeEngine.samples = plays_the_roles(Path("tokenizer"))  # type: ignore[method-assign, assignment]
        sys.argv = ["nmoe", *VERBS[configuration], f"{configuration}.toml", *overrides]
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def read(file: Path) -> dict[str, Figures]:
    """Figures that --write kept."""
    return {name: Figures(**figures) for name, figures in json.loads(file.read_text()).items()}


def compared(before: Mapping[str, Figures], after: Mapping[str, Figures]) -> Iterator[str]:
    """What differs, of all runs that both have."""
    for name in after:
        if name not in before:
            continue
        was, now = before[name], after[name]
        yield from (f"{name}: {line}" for line in differences(was.steps, now.steps))
        for file in sorted(was.files.keys() | now.files.keys()):
            if was.files.get(file) != now.files.get(file):
                yield f"{name}: {file} is another"


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("commit", nargs="?", default=WORKING_TREE, help="default: the working tree")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keeps the figures")
    parser.add_argument(
        "--against", metavar="FILE|COMMIT", help="figures that --write kept, or a commit to compute them of"
    )
    parser.add_argument("--only", nargs="+", choices=RUNS, default=[*RUNS], metavar="RUN", help=", ".join(RUNS))
    arguments = parser.parse_args()
    before: Mapping[str, Figures] = {}
    if arguments.against is not None:
        kept = Path(arguments.against)
        before = read(kept) if kept.is_file() else figures_of(resolved(arguments.against), arguments.only)
    commit = resolved(arguments.commit)
    after = figures_of(commit, arguments.only)
    print(subject(commit))
    print("\n".join(figures.line(name) for name, figures in after.items()))
    if arguments.write is not None:
        arguments.write.write_text(json.dumps({name: asdict(figures) for name, figures in after.items()}) + "\n")
    found = list(compared(before, after))
    if before:
        print("\n".join(found) if found else f"the same as {arguments.against}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
