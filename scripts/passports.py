"""Writes docs/reference/passports.md, the passports of the packaged environments and of foreign ones: python scripts/passports.py

Takes about 20 minutes on two busy cores, most of them in sandboxes. The hub's records lie in ../shared/eval_data beside the
repository; foreign environments need the extras `environments` and `skyrl-gym`. benchmarks/results/passports.json has the passports
in full; `--only NAME...` measures some again, and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmoe.config.packaged import packaged_environments
from nmoe.envs.certify import certify
from nmoe.envs.passport import Example

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from real_benchmarks import DATA, REAL  # noqa: E402

PAGE = ROOT / "docs/reference/passports.md"
KEPT = ROOT / "benchmarks/results/passports.json"
REASONING_GYM = (
    *(
        "basic_arithmetic",
        "base_conversion",
        "caesar_cipher",
        "chain_sum",
        "countdown",
        "gcd",
        "leg_counting",
        "letter_counting",
    ),
    *("mini_sudoku", "n_queens", "number_sorting", "prime_factorization", "propositional_logic", "simple_equations"),
    *("spell_backward", "tower_of_hanoi", "word_sorting"),
)
SKYRL_GYM = ("gsm8k", "gsm8k_multi_turn", "aime")
ROWS = ("golds", "attacks", "repeatable", "prompt", "sandbox", "latency")
HEAD = """# Passports

What `nmoe env certify` found in the packaged environments and in foreign ones: whether golds are paid, whether 300 answers that
solve nothing are not, whether problems and verdicts are the same twice, whether the prompt or the policy's sandbox has the answer,
and how long a verdict takes ([the guide](../guides/environments.md#passports)). `python scripts/passports.py` writes this page.
"""


def foreign(directory: Path) -> Iterator[Path]:
    """Writes the environments of other packages, and yields their files."""
    for name in REASONING_GYM:
        path = directory / f"reasoning_gym_{name}.toml"
        path.write_text(f'env_id = "{path.stem}"\n[task_pool]\ntype = "reasoning_gym"\ndataset = "{name}"\n')
        yield path
    lines = (DATA / "gsm8k_train.jsonl").read_text().splitlines()[:64]
    for name in SKYRL_GYM:
        records = []
        for line in lines:
            one = json.loads(line)
            rule = {"method": "rule", "ground_truth": one["answer"].rpartition("####")[2].strip()}
            prompt = [{"role": "user", "content": one["question"]}]
            records.append({"prompt": prompt, "env_class": name, "reward_spec": rule, "reward_model": rule})
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        path = directory / f"skyrl_gym_{name}.toml"
        path.write_text(
            f'env_id = "{path.stem}"\ntask = "skyrl_gym"\n[task_pool]\ntype = "jsonl"\npath = "{name}.jsonl"\n'
        )
        yield path


def page(passports: list[dict[str, Any]]) -> str:
    """Returns the page: a table, then every failure with the answer that shows it, then what was not here."""
    here = [one for one in passports if not one["missing"]]
    lines = [HEAD, "| environment | " + " | ".join(ROWS) + " |", "|---" * (1 + len(ROWS)) + "|"]
    for one in here:
        rows = [one["rows"][name] for name in ROWS]
        cells = [
            {"fail": "**fail**: ", "not tried": "not tried: "}.get(row["status"], "") + row["said"] for row in rows
        ]
        lines.append(f"| `{one['environment']}` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    failing = [one for one in here if one["result"] == "fail"]
    lines += ["", "## Failures", ""] if failing else []
    for one in failing:
        lines += [f"### {one['environment']}", ""]
        for name, row in one["rows"].items():
            if row["status"] == "fail":
                shown = [line for example in row["examples"] for line in Example(**example).lines()]
                lines += [f"{name}: {row['said']}. Remedy: {row['remedy']}.", "", "```text", *shown, "```", ""]
    absent = ", ".join(f"`{one['environment']}`" for one in passports if one["missing"])
    return "\n".join(
        [
            *lines,
            *([""] if not failing else []),
            "## No data here",
            "",
            f"{absent}. Fetch their data, and run `nmoe env certify NAME`.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    only = parser.parse_args().only
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["NMOE_DATASETS"] = directory
        for benchmark in REAL.values():
            benchmark.keep(Path(directory), None)
        packaged = (Path(one.name) for one in packaged_environments() if one.package == "nmoe")
        named = {path.stem: path for path in [*packaged, *foreign(Path(directory))]}
        for name, path in named.items():
            if only and name not in only:
                continue
            began = time.process_time()
            passport = certify(path, None)
            kept[name] = json.loads(json.dumps(passport.record()).replace(f"{directory}/", ""))
            for line in passport.lines():
                print(line, file=sys.stderr)
            print(f"{time.process_time() - began:.0f} CPU s\n", file=sys.stderr, flush=True)
            KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page([kept[name] for name in named if name in kept]))


if __name__ == "__main__":
    main()
