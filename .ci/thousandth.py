"""Runs a thousandth of nanochat's budget run through all its stages, kills it once at a random moment, and resumes it:
python .ci/thousandth.py [SEED]

Data of the real layouts is generated, under the names by which the presets read it. Exit code 1 if a step is missing or was taken
twice, or a stage or its part of the report is missing.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet

HERE = Path(__file__).parent
DATA, OUT = Path("runs/thousandth_data"), Path("runs/thousandth")
STEPS = {"base": 21, "midtraining": 4, "sft": 3, "rl": 2}
EVALUATED = 3 * 20
WORDS = [
    "the",
    "a",
    "of",
    "and",
    "apples",
    "boys",
    "has",
    "gives",
    "finds",
    "three",
    "four",
    "many",
    "left",
    "more",
    "each",
]


def sum_of(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return (
        f"Ann has {a} apples and finds {b} more. How many has she?",
        f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}",
    )


def generate(seed: int) -> None:
    """Writes documents, conversations, problems and a set of CORE."""
    rng = random.Random(seed)
    shutil.rmtree(DATA, ignore_errors=True)
    (DATA / "fineweb").mkdir(parents=True)
    for number in range(4):
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(40, 200))) for _ in range(1200)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), DATA / f"fineweb/shard_{number:05d}.parquet")

    def lines(path: str, rows: list[dict[str, object]]) -> None:
        (DATA / path).parent.mkdir(parents=True, exist_ok=True)
        (DATA / path).write_text("".join(json.dumps(row) + "\n" for row in rows))

    talk = [
        [
            {"role": "user", "content": " ".join(rng.choices(WORDS, k=8))},
            {"role": "assistant", "content": " ".join(rng.choices(WORDS, k=12))},
        ]
        for _ in range(600)
    ]
    lines("HuggingFaceTB/smol-smoltalk/train.jsonl", [{"messages": one} for one in talk])
    choices = [rng.sample(range(100), 4) for _ in range(200)]
    questions = [
        {
            "question": "Which is largest?",
            "subject": "",
            "choices": list(map(str, four)),
            "answer": four.index(max(four)),
        }
        for four in choices
    ]
    lines("cais/mmlu/all/auxiliary_train.jsonl", questions)
    splits = "configs:\n- config_name: all\n  data_files:\n  - split: auxiliary_train\n    path: all/auxiliary_train*\n"
    (DATA / "cais/mmlu/README.md").write_text(f"---\n{splits}---\n")
    sums = list(dict(sum_of(rng) for _ in range(400)).items())
    for split, part in (("train", sums[:64]), ("test", sums[64:104])):
        lines(
            f"openai/gsm8k/main/{split}.jsonl", [{"question": question, "answer": answer} for question, answer in part]
        )
    lines("core/lambada_openai.jsonl", [{"context": one[0]["content"], "continuation": "the"} for one in talk[:40]])


def progress() -> int:
    """Counts the steps taken and the problems evaluated."""
    files = [OUT / name / "metrics.jsonl" for name in STEPS] + list((OUT / "evaluation").glob("*.jsonl"))
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


def main(seed: int) -> None:
    generate(seed)
    shutil.rmtree(OUT, ignore_errors=True)
    environment = os.environ | {
        "NMOE_DATASETS": str(DATA.absolute()),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(DATA.absolute() / "cache"),
    }
    command = [
        sys.executable,
        "-m",
        "nmoe",
        "speedrun",
        str(HERE / "thousandth.toml"),
        "--out",
        str(OUT),
        "--device",
        "cpu",
    ]
    planned = subprocess.run(
        [*command, "--dry-run"], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert "missing" not in planned, planned
    kill_after = random.Random(f"kill {seed}").randint(1, sum(STEPS.values()) + EVALUATED)
    with subprocess.Popen(command, env=environment, start_new_session=True) as first:
        while first.poll() is None and progress() < kill_after:
            time.sleep(0.1)
        killed = first.poll() is None
        if killed:
            os.killpg(first.pid, signal.SIGKILL)
    print(
        f"killed at {progress()} of {sum(STEPS.values()) + EVALUATED} steps and answers"
        if killed
        else f"ended with {first.returncode}"
    )
    subprocess.run([*command, "--resume"], env=environment, check=True)
    faults = []
    for name, steps in STEPS.items():
        found = [json.loads(line)["step"] for line in (OUT / name / "metrics.jsonl").read_text().splitlines()]
        if found != list(range(1, steps + 1)):
            faults.append(f"{name}: steps {found}, not 1 to {steps}")
    done = [one["name"] for one in json.loads((OUT / "stages.json").read_text())["done"]]
    report = (OUT / "report.md").read_text()
    faults += [
        f"{name}: not in {where}"
        for name in ("tokenizer", *STEPS, "core", "evaluation")
        for where, text in (("stages.json", done), ("report.md", report))
        if name not in text
    ]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} CPU s, of the planning, the killed process and the resumed one")
    if not killed:
        faults.append("it ended before it was killed")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(1000))
