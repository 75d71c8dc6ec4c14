"""Checks of found faults: intervals, data held out, labelled steps, and mutants that tests let live."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from found import Result, check


@check(19, "coverage of a held-out loss's interval on 2, 10 and 50 sequences", "none on 2, 93% or more on 10 and 50")
def held_out_loss_covers() -> Result:
    from nmoe.recipes.sequence_losses import SequenceLosses, loss_result

    shown, holds = [], True
    for sequences in (2, 10, 50):
        rng, printed, covered = random.Random(0), 0, 0
        for _ in range(2000):
            counts = [rng.randint(20, 60) for _ in range(sequences)]
            losses = SequenceLosses(
                [str(place) for place in range(sequences)],
                [count * rng.gammavariate(8, 2 / 8) for count in counts],
                counts,
            )
            result = loss_result("held out", losses.mean, [(1.0, losses)])
            printed += "low" in result
            covered += "low" in result and result["low"] <= 2 <= result["high"]
        shown.append(f"{covered / printed:.1%} on {sequences}" if printed else f"none on {sequences}")
        holds = holds and (covered / printed >= 0.93 if printed else sequences == 2)
    return ", ".join(shown), holds


@check(19, "ten problems without a change", "they bound it to 20 to 35 points")
def unchanged_problems_bound_a_change() -> Result:
    from nmoe.statistics import paired_difference

    interval = paired_difference([1.0] * 10, [1.0] * 10).interval
    return f"[{interval.low:+.1%}, {interval.high:+.1%}]", interval.low < -0.2 < 0.2 < interval.high < 0.35


@check(19, "p-value of [.1, .2, .3] against [.4, .5, .6]", "0.25")
def signs_do_not_need_equal_floats() -> Result:
    from nmoe.statistics import paired_p_value

    found = paired_p_value([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    return f"{found:.3g}", abs(found - 0.25) < 1e-9


@check(19, "coverage of a verifier's accuracy of 98% on 10, 50 and 400 solutions of 4 steps", "93% or more")
def verifier_rate_covers() -> Result:
    from nmoe.verifier.quality import rate

    shown = {}
    for solutions in (10, 50, 400):
        rng, covered = random.Random(0), 0
        for _ in range(1000):
            share = [rng.betavariate(0.49, 0.01) for _ in range(solutions)]
            hits = [rng.random() < share[one] for one in range(solutions) for _ in range(4)]
            interval = rate(hits, [one for one in range(solutions) for _ in range(4)])[1]
            covered += interval.low <= 0.98 <= interval.high
        shown[solutions] = covered / 1000
    return ", ".join(f"{share:.1%} on {count}" for count, share in shown.items()), min(shown.values()) >= 0.93


@check(19, "`nmoe runs compare` of two seeds each whose correctness is 0.1, 0.9 and 0.7, 0.8", "bounds from -1 to 1")
def difference_of_shares_stays_in_range() -> Result:
    from nmoe.runs.comparison import compare_runs
    from nmoe.runs.directory import RunDirectory

    place = Path(tempfile.mkdtemp())
    for name, values in (("a", (0.1, 0.9)), ("b", (0.7, 0.8))):
        for seed, value in enumerate(values):
            config = f'[run]\nname = "{name}"\nsteps = 1\nseed = {seed + 10 * (name == "b")}\n'
            provenance = {"started_utc": "2026-01-02T03:04:05Z", "argv": ["nmoe", "rl", "train", "my.toml"]}
            with RunDirectory.create(place / f"{name}{seed}", config, provenance, resume=False) as run:
                run.ledger.metrics(1, {"correctness": value})
    (line,) = [one for one in compare_runs(f"{place}/a*", f"{place}/b*") if one.startswith("  correctness")]
    low, high = (float(part.strip("[,]")) for part in line.split()[4:6])
    return f"[{low:+.4g}, {high:+.4g}]", -1 <= low <= high <= 1


@check(20, "200 questions under two system messages: held-out records whose question is trained on", "0 of 40")
def a_system_message_makes_no_other_question() -> Result:
    from nmoe.data.held_out import held_out, prompt_of
    from nmoe.data.records import PromptCompletion
    from nmoe.text.conversation import ChatMessage

    records = [
        PromptCompletion(
            f"{system}{number}",
            (ChatMessage("system", system), ChatMessage("user", f"What is {number} + 1?")),
            (ChatMessage("assistant", str(number + 1)),),
        )
        for system in ("Be brief.", "Think first.")
        for number in range(200)
    ]
    drawn = held_out([prompt_of(record) for record in records], 0.1, 0)
    trained = {one.prompt[1].content for place, one in enumerate(records) if place not in drawn}
    leaked = sum(records[place].prompt[1].content in trained for place in drawn)
    return f"{leaked} of {len(drawn)}", leaked == 0


@check(
    20, "`nmoe rl train` with three training problems among those of an [[eval]]", "refused, with the number and one"
)
def evaluation_on_training_problems_is_refused() -> Result:
    import json

    from nmoe.config.commands import RLConfig
    from nmoe.config.loader import load_run_with
    from nmoe.errors import UserError
    from nmoe.preflight.preflight import refuse_to_start
    from nmoe.text.tokenizer import Tokenizer

    def pool(name: str, numbers: range) -> dict[str, object]:
        rows = [json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in numbers]
        Path(f"{name}.jsonl").write_text("".join(rows))
        source = {"type": "jsonl", "path": f"{name}.jsonl", "task_type": "math"}
        return {"env_id": name, "format": "boxed", "task_pool": source}

    Tokenizer.train((), 264).save(Path("tokenizer"))
    shape = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
    tables = {
        "run": {"steps": 4},
        "model": {"tokenizer": "tokenizer", "shape": shape | {"context_tokens": 4096}},
        "environment": pool("training", range(10)),
        "eval": [{"environment": pool("held_out", range(7, 17))}],
    }
    try:
        refuse_to_start(load_run_with(None, RLConfig, tables, "test", "run"))
    except UserError as error:
        said = str(error)
        return said[:140], "3 of 10 problems" in said and "what is" in said
    return "it begins", False


@check(
    21,
    "a labelled solution whose steps hold line breaks: trained and judged places",
    "the same places, the same tokens",
)
def steps_are_split_in_one_way() -> Result:
    import json

    from nmoe.data.prm import read_labelled, split_steps
    from nmoe.text.tokenizer import Tokenizer
    from nmoe.types import Message
    from nmoe.verifier.form import DiscriminativeForm

    steps = ["4+7=11.\nSo far 11.", "11+2=13.\n\n# Answer\n\n13"]
    Path("step.jsonl").write_text(json.dumps({"prompt": "Sum 4+7+2.", "completions": steps, "labels": [True, True]}))
    one = read_labelled("step.jsonl", "train").solutions[0]
    form = DiscriminativeForm(Tokenizer.train((), 264), "step")
    (shown,) = form.training([Message("user", one.problem)], one.steps, one.labels)
    (asked,) = form.question([Message("user", one.problem)], split_steps("\n".join(steps)), 10**6)
    same = shown.scored == asked.scored and shown.inputs[: len(asked.inputs)] == asked.inputs
    return f"trained at {shown.scored}, judged at {asked.scored}", same


_MUTANTS = (
    (
        "nmoe/engine/native/scheduler.py",
        "new_keys = not sequence.started or sequence.versions[0] == version",
        "new_keys = True",
        "tests/engine/test_llm_engine.py",
    ),
    ("nmoe/grading/math/forms.py", r', r"\ne"}' + "\n", "}\n", "tests/grading/test_equivalence.py"),
    (
        "nmoe/learner/routing.py",
        "max(self.largest_flip_gap, other.largest_flip_gap)",
        "min(self.largest_flip_gap, other.largest_flip_gap)",
        "tests/learner/test_routing.py",
    ),
)


@check(
    22, "three mutants: keys of a preempted sequence, `\\ne` as a relation, the largest flip gap over ranks", "3 killed"
)
def tests_kill_three_mutants() -> Result:
    import shutil
    import subprocess
    import sys

    import nmoe

    tree, killed = Path(nmoe.__file__).parents[1], 0
    for part in ("nmoe", "tests"):
        shutil.copytree(tree / part, part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(tree / "pyproject.toml", ".")
    for file, code, mistake, tests in _MUTANTS:
        text = Path(file).read_text()
        assert code in text, f"{file} has changed"
        Path(file).write_text(text.replace(code, mistake, 1))
        # The copy comes before an installed nmoe.
        run = f"import sys; sys.path.insert(0, '.'); import pytest; sys.exit(pytest.main(['-q', '-x', {tests!r}]))"
        ended = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
        assert ended.returncode in (0, 1), ended.stdout[-200:]
        killed += ended.returncode == 1
        Path(file).write_text(text)
    return f"{killed} killed", killed == len(_MUTANTS)
