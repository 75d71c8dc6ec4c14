"""Writes generated problems in the schema of NuminaMath-1.5, with its shares of what a preparation leaves out:

    python scripts/numina_like.py DIRECTORY [--rows 896215] [--files 3] [--seed 0]

Of 896,215 rows about 631,000 are word problems, 286,000 of those have an integer answer, a thousand are AMC's or AIME's, and one in
thirteen of the rest repeats an earlier problem, some with other white space or case. Lengths are about those of the original.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 896_215
_BATCH = 4096

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("problem", "solution", "answer", "problem_type", "question_type")),
        *((name, pa.string()) for name in ("problem_is_valid", "solution_is_valid", "source")),
        ("synthetic", pa.bool_()),
    ]
)
_WORDS = """
the a of and in is to find number positive integer triangle circle point line such that angle sum product real
values equation function area side length ratio prime digits sequence polynomial roots probability balls students
days hours speed distance perimeter square rectangle radius chord tangent median altitude vertices plane cube sphere
volume base height remainder divided consecutive multiple factor greatest least common maximum minimum possible
total cost price apples books each every how many if then when let be where given determine calculate what compute
show segment parallel perpendicular intersect respectively denote
""".split()  # noqa: SIM905
_SOURCES = (
    "olympiads",
    "cn_k12",
    "orca_math",
    "synthetic_math",
    "cn_contest",
    "aops_forum",
    "metamath",
    "number_theory",
)
_TYPES = ("Algebra", "Geometry", "Number Theory", "Combinatorics", "Calculus", "Logic and Puzzles", "Other")
_ANSWERS = (r"\frac{3}{7}", r"2\sqrt{5}", "notfound", "proof", "x = 4", "(1, 2)", "3.5", r"\pi", "")


def rows(count: int, seed: int) -> Iterator[dict[str, object]]:
    """The rows one by one, a pure function of the seed."""
    draw = random.Random(seed)
    earlier: list[str] = []
    for number in range(count):
        chance = draw.random()
        kind = "math-word-problem" if chance < 0.704 else "proof" if chance < 0.88 else "MCQ"
        integer = draw.random() < 0.453
        value = str(draw.randrange(-50, 5000))
        answer = value if integer else draw.choice(_ANSWERS)
        if earlier and integer and kind == "math-word-problem" and draw.random() < 0.078:
            problem = draw.choice(earlier)
            problem = draw.choice((problem, problem.replace(" ", "  "), problem.upper(), f"{problem}\n"))
        else:
            words = draw.choices(_WORDS, k=min(300, int(draw.lognormvariate(3.5, 0.55)) + 4))
            words.insert(draw.randrange(len(words)), f"${number} + x^2 = {draw.randrange(1000)}$")
            problem = " ".join(words).capitalize() + "."
            if integer and kind == "math-word-problem" and len(earlier) < 100_000:
                earlier.append(problem)
        solution = " ".join(draw.choices(_WORDS, k=min(900, int(draw.lognormvariate(4.6, 0.6)) + 1)))
        end = draw.random()
        if end < 0.65:
            solution += f". Hence the answer is $\\boxed{{{answer}}}$."
        yield {
            "problem": problem,
            "solution": solution if end < 0.998 else "",
            "answer": answer,
            "problem_type": draw.choice(_TYPES),
            "question_type": kind,
            "problem_is_valid": "Yes" if draw.random() < 0.999 else "Incomplete",
            "solution_is_valid": "Yes" if draw.random() < 0.999 else "No",
            "source": "amc_aime" if draw.random() < 0.005 else draw.choice(_SOURCES),
            "synthetic": draw.random() < 0.2,
        }


def write(directory: Path, count: int, files: int, seed: int) -> list[Path]:
    """Writes the rows into so many files, `train-00000-of-00003.parquet`, and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    made = rows(count, seed)
    paths = [directory / f"train-{index:05}-of-{files:05}.parquet" for index in range(files)]
    for index, path in enumerate(paths):
        left = count * (index + 1) // files - count * index // files
        with pq.ParquetWriter(path, SCHEMA) as writer:
            while left:
                batch = [next(made) for _ in range(min(left, _BATCH))]
                writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
                left -= len(batch)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for path in write(options.directory, options.rows, options.files, options.seed):
        print(path)


if __name__ == "__main__":
    main()
