"""What list, show, compare, diff and the closing summary say, against runs whose numbers are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nmoe.cli import main
from nmoe.errors import UserError
from nmoe.runs.comparison import compare_runs, diff_runs, read_group, results_table
from nmoe.runs.directory import RunDirectory
from nmoe.runs.page import write_page
from nmoe.runs.record import read_run
from nmoe.runs.summary import NEXT, list_runs, result_line, run_summary, show_run
from nmoe.statistics import welch

CONFIG = """[run]
name = "{name}"
seed = {seed}
steps = 3

[model]
path = "base"

[records]
path = "r.jsonl"

[optimizer]
learning_rate = {rate}
max_grad_norm = {clip}
"""


def make_run(
    path: Path, losses: list[float], rate: float = 2e-4, seed: int = 0, clip: float = 1.0, correct: int | None = None
) -> RunDirectory:
    """A run, still open, whose losses are these and whose last evaluation has `correct` of 100 problems."""
    config = CONFIG.format(name=path.name, seed=seed, rate=rate, clip=clip)
    provenance: dict[str, Any] = {"started_utc": "2026-01-02T03:04:05Z", "argv": ["nmoe", "sft", "my.toml"]}
    run = RunDirectory.create(path, config, provenance, resume=False)
    for step, loss in enumerate(losses, start=1):
        run.ledger.metrics(step, {"loss": loss, "learning_rate": rate})
    if correct is not None:
        rate_, half = correct / 100, 0.1
        result = {"mode": "greedy", "dataset": "sort", "problems": 100, "value": rate_}
        bounds = {"low": rate_ - half, "high": rate_ + half / 2}
        run.ledger.evaluation(0, {"results": [result | bounds | {"value": 0.9}]})
        run.ledger.evaluation(1, {"results": [result | bounds | {"value": 0.8}]})
        run.ledger.evaluation(len(losses), {"results": [result | bounds]})
    return run


def words(lines: Any) -> list[list[str]]:
    return [line.split() for line in lines]


def test_the_list_says_how_far_each_run_came_and_which_is_being_written(tmp_path: Path) -> None:
    make_run(tmp_path / "done", [3.0, 2.0, 1.5]).close()
    make_run(tmp_path / "killed", [3.0, 2.5]).close()
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # torn by the kill
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "provenance.json").write_text('{"resumed": []}')
    (tmp_path / "broken" / "config.toml").write_text("[run\n")
    with make_run(tmp_path / "folder" / "now", [3.0]):
        header, done, now, killed, broken = list_runs(tmp_path)
        assert header.split() == ["run", "command", "steps", "started", "last", "status"]
        started = "2026-01-02T03:04:05Z"
        assert done.split()[1:] == ["sft", "3/3", started, "loss", "1.5", "finished"]
        assert now.split()[1:] == ["sft", "1/3", started, "loss", "3", "running"]
        assert killed.split()[1:] == ["sft", "2/3", started, "loss", "2.5", "interrupted"]
        assert broken.startswith(f"unreadable: {tmp_path}/broken/config.toml: not readable as TOML")
    assert [line.split()[-1] for line in list_runs(tmp_path)][2] == "interrupted", "the lock is given back"


def test_a_run_is_shown_with_what_differs_from_the_defaults_its_best_and_last_evaluation_and_alerts(
    tmp_path: Path,
) -> None:
    with make_run(tmp_path / "one", [3.0, 2.0, 1.5], rate=0.5, correct=60) as run:
        for step in range(1, 8):
            run.ledger.alert({"step": step, "message": f"alert {step}"})
    lines = list(show_run(tmp_path / "one"))
    assert lines[0] == (f"{tmp_path}/one: sft, finished, step 3/3, started 2026-01-02T03:04:05Z, loss 1.5")
    assert "  optimizer.learning_rate  0.5" in lines
    assert not any("max_grad_norm" in line or "run.seed" in line for line in lines), "they hold their defaults"
    assert "  best, step 1: greedy on sort: 80.0% [50.0%, 65.0%] of 100" in lines
    assert "  last, step 3: greedy on sort: 60.0% [50.0%, 65.0%] of 100" in lines
    assert [line for line in lines if "alert" in line] == [
        "alerts (7; the last 5)",
        *(f"  step {step}: alert {step}" for step in range(3, 8)),
    ]


def test_diff_names_the_keys_that_differ_but_not_name_and_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [1.0]).close()
    make_run(tmp_path / "b", [1.0], rate=0.01, seed=5).close()
    make_run(tmp_path / "c", [1.0], seed=6).close()
    assert words(diff_runs(f"{tmp_path}/a", f"{tmp_path}/b")) == [["optimizer.learning_rate", "0.0002", "0.01"]]
    assert list(diff_runs(f"{tmp_path}/a", f"{tmp_path}/c")) == ["  the same, but for name, seed, threads and sinks"]


def test_what_no_configuration_shows_is_said(tmp_path: Path) -> None:
    """Code and records that a program passed stand in it by name; where metrics go is no cause of a difference."""
    passed = 'call = "passed:Records"\nown = ["__main__:vowels"]\n'
    for name, sinks in (("a", '["csv"]'), ("b", "[]")):
        make_run(tmp_path / name, [1.0]).close()
        file = tmp_path / name / "config.toml"
        file.write_text(f"{file.read_text()}\n[sinks]\nto = {sinks}\n\n[environment]\n{passed}")
    assert list(diff_runs(f"{tmp_path}/a", f"{tmp_path}/b")) == [
        "  the same, but for name, seed, threads and sinks",
        "  only the names of parts passed in Python are compared, not code and records: __main__:vowels, passed:Records",
    ]


def test_runs_of_different_commands_are_compared_with_a_warning(tmp_path: Path) -> None:
    for name, command in (("a", "sft"), ("b", "dpo")):
        make_run(tmp_path / name, [1.0]).close()
        (tmp_path / name / "provenance.json").write_text(json.dumps({"resumed": [], "argv": ["nmoe", command, "x"]}))
    lines = list(compare_runs(f"{tmp_path}/a", f"{tmp_path}/b"))
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert warning.startswith("warning: these are runs of different commands (dpo, sft)")


def test_runs_that_end_at_different_steps_are_named_in_their_order(tmp_path: Path) -> None:
    make_run(tmp_path / "long", [3.0, 2.0, 1.0]).close()
    make_run(tmp_path / "short", [3.0]).close()
    lines = list(compare_runs(f"{tmp_path}/long", f"{tmp_path}/short"))
    assert "warning: the runs end at different steps (A at 3, B at 1)" in lines


def test_two_runs_are_compared_at_their_last_steps_with_unpaired_intervals(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [3.0, 2.0], correct=50).close()
    make_run(tmp_path / "b", [3.0, 1.5], rate=0.01, correct=80).close()
    lines = list(compare_runs(f"{tmp_path}/a", f"{tmp_path}/b"))
    assert ["loss", "2", "1.5", "-0.5"] in words(lines)
    # 0.5 [0.4, 0.55] and 0.8 [0.7, 0.85]: 0.3 - hypot(0.1, 0.05) and 0.3 + hypot(0.05, 0.1)
    assert ["greedy", "on", "sort", "50.0%", "80.0%", "+30.0%", "[+18.8%,", "+41.2%]", "unpaired"] in words(lines)
    assert not any(line.startswith("warning") for line in lines)


def test_groups_of_seeds_are_compared_by_their_means_and_two_changes_are_warned_of(tmp_path: Path) -> None:
    for seed, (left, right) in enumerate([(2.0, 1.0), (2.2, 1.1), (2.4, 1.5)]):
        make_run(tmp_path / f"a-{seed}", [3.0, left], seed=seed).close()
        make_run(tmp_path / f"b-{seed}", [3.0, right], rate=0.01, clip=0.5, seed=seed + 1).close()
    lines = list(compare_runs(f"{tmp_path}/a-*", f"{tmp_path}/b-0,{tmp_path}/b-1,{tmp_path}/b-2"))
    assert "warning: A and B differ in 2 keys, so that no difference below has one cause" in lines
    # Means 2.2 and 1.2, variances 0.04 and 0.07: error sqrt(0.11 / 3) = 0.19149, 3.7231 degrees of freedom, t = 2.860.
    ((*_, low, high, how),) = [line for line in words(lines) if line[:1] == ["loss"]]
    assert how == "unpaired", "the seeds are not the same"
    assert float(low.strip("[,")) == pytest.approx(-1 - 2.860 * 0.19149, abs=2e-3)
    assert float(high.strip("]")) == pytest.approx(-1 + 2.860 * 0.19149, abs=2e-3)


def test_what_makes_no_group_of_seeds_is_warned_of_and_has_no_interval(tmp_path: Path) -> None:
    for name, loss, rate, seed in (("a", 2.0, 0.01, 0), ("b", 3.0, 0.02, 1), ("c", 1.0, 0.01, 1), ("d", 1.5, 0.01, 1)):
        make_run(tmp_path / name, [loss], rate=rate, seed=seed).close()
    a, b, c, d = (f"{tmp_path}/{name}" for name in "abcd")
    lines = list(compare_runs(f"{a},{b},{a}", f"{a},{b}"))
    assert f"warning: {a}, {b} stands on both sides, so that the difference is drawn to 0" in lines
    mixed = "warning: the runs of {} differ in optimizer.learning_rate, so that they are no seeds of one experiment"
    assert mixed.format("A") in lines
    assert mixed.format("B") in lines
    assert ["loss", "2.5", "2.5", "+0"] in [row[:4] for row in words(lines)], "a run that is named twice counts once"
    assert ["loss", "2.5", "1.25", "-1.25"] in words(compare_runs(f"{a},{b}", f"{c},{d}")), "both of seed 1"


def test_groups_of_the_same_seeds_are_paired_by_seed(tmp_path: Path) -> None:
    for seed, (left, right) in enumerate([(2.0, 1.0), (2.2, 1.1), (2.4, 1.5)]):
        make_run(tmp_path / f"a-{seed}", [left], seed=seed).close()
        make_run(tmp_path / f"b-{2 - seed}", [right], rate=0.01, seed=seed).close()  # in another order
    ((*_, low, high, paired, by, seed_),) = [
        line for line in words(compare_runs(f"{tmp_path}/a-*", f"{tmp_path}/b-*")) if line[:1] == ["loss"]
    ]
    # Differences -1, -1.1, -0.9: deviation 0.1, error 0.1 / sqrt(3), t of 2 degrees of freedom 4.302653.
    assert (paired, by, seed_) == ("paired", "by", "seed")
    assert float(low.strip("[,")) == pytest.approx(-1 - 4.302653 * 0.1 / 3**0.5, abs=1e-3)
    assert float(high.strip("]")) == pytest.approx(-1 + 4.302653 * 0.1 / 3**0.5, abs=1e-3)


@pytest.mark.parametrize(("asked", "how"), [("pqrs", ["paired", "by", "problem"]), ("pqrx", ["unpaired"])])
def test_evaluations_on_the_same_problems_are_paired_by_problem(tmp_path: Path, asked: str, how: list[str]) -> None:
    for name, keys, right in (("a", "pqrs", (0, 0, 1, 0)), ("b", asked, (1, 0, 1, 1))):
        with make_run(tmp_path / name, [1.0]) as run:
            result = {"mode": "greedy", "dataset": "sort", "problems": 4, "value": sum(right) / 4}
            bounds = {"low": 0.1, "high": 0.9, "outcomes": dict(zip(keys, right, strict=True))}
            run.ledger.evaluation(1, {"results": [result | bounds]})
    (line,) = [line for line in words(compare_runs(f"{tmp_path}/a", f"{tmp_path}/b")) if line[0] == "greedy"]
    assert line[3:6] == ["25.0%", "75.0%", "+50.0%"]
    assert line[8:] == how
    if how != ["unpaired"]:
        # Differences 1, 0, 0, 1 and two more problems, 1 and -1: mean 1/3, mean square 2/3; t of 3 degrees of freedom is 3.182446.
        low = 1 / 3 - 3.182446 * ((2 / 3 - 1 / 9) / 6) ** 0.5
        assert line[6:8] == [f"[{low:+.1%},", "+100.0%]"]


def test_seeds_whose_results_are_shares_differ_by_less_than_1(tmp_path: Path) -> None:
    for name, values in (("a", (0.1, 0.9, 0.5)), ("b", (0.99, 0.2, 0.8))):
        for seed, value in enumerate(values):
            with make_run(tmp_path / f"{name}-{seed}", [1.0], seed=seed + 5 * (name == "b")) as run:
                run.ledger.metrics(2, {"correctness": value, "reward_mean": value})
                result = {"mode": "greedy", "dataset": "sort", "problems": 9, "value": value, "low": 0.0, "high": 1.0}
                run.ledger.evaluation(2, {"results": [result]})
    lines = {line[0]: line for line in words(compare_runs(f"{tmp_path}/a-*", f"{tmp_path}/b-*"))}
    interval = welch([0.1, 0.9, 0.5], [0.99, 0.2, 0.8])
    assert interval is not None
    assert -1 < interval.low < 1 < interval.high
    assert lines["correctness"][4:] == [f"[{interval.low:+.4g},", "+1]", "unpaired"]
    assert lines["greedy"][6:] == [f"[{interval.low:+.1%},", "+100.0%]", "unpaired"]
    assert lines["reward_mean"][5] == f"{interval.high:+.4g}]", "rewards have no bounds"


def test_a_loss_on_few_sequences_is_shown_without_an_interval(tmp_path: Path) -> None:
    loss = {"mode": "held_out_loss", "dataset": "d", "problems": 2, "lower_is_better": True}
    for name, value in (("a", 2.0), ("b", 1.5)):
        with make_run(tmp_path / name, [1.0]) as run:
            run.ledger.evaluation(1, {"results": [loss | {"value": value}]})
    assert result_line(loss | {"value": 2.0}) == "held_out_loss on d: 2 of 2"
    (line,) = [line for line in words(compare_runs(f"{tmp_path}/a", f"{tmp_path}/b")) if line[0] == "held_out_loss"]
    assert line == ["held_out_loss", "on", "d", "2", "1.5", "-0.5"]
    assert "| held_out_loss on d | 2 | 2 | 2 |" in results_table([str(tmp_path / "a")])
    assert "2 at step 1" in write_page([tmp_path / "a"], tmp_path / "page.html").read_text()


def test_evaluations_in_different_modes_or_with_other_sampling_are_not_compared(tmp_path: Path) -> None:
    bounds = {"dataset": "sort", "problems": 4, "value": 0.5, "low": 0.1, "high": 0.9}
    results = {
        "a": {"mode": "greedy_pass@1"},
        "b": {"mode": "sampling_pass@8", "sampling": {"temperature": 0.6}},
        "c": {"mode": "sampling_pass@8", "sampling": {"temperature": 1.0}},
    }
    for name, result in results.items():
        with make_run(tmp_path / name, [1.0]) as run:
            run.ledger.evaluation(1, {"results": [bounds | result]})
    (line,) = [line for line in compare_runs(f"{tmp_path}/a", f"{tmp_path}/b") if line.startswith("  sort")]
    assert "not compared: greedy_pass@1 and sampling_pass@8 are different modes" in line
    (line,) = [line for line in compare_runs(f"{tmp_path}/b", f"{tmp_path}/c") if line.startswith("  sampling")]
    assert "not compared: both are sampling_pass@8, but with temperature 0.6 and 1.0" in line


def test_what_is_no_run_is_refused_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: not the directory of a run \(no config.toml\)"):
        read_run(tmp_path / "gone")
    with pytest.raises(UserError, match=r"a-\*: no run matches"):
        read_group(f"{tmp_path}/a-*")
    with pytest.raises(UserError, match="no runs there"):
        list(list_runs(tmp_path))
    run = make_run(tmp_path / "bad", [1.0])
    (run.path / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:1: not a JSON object"):
        read_run(run.path)
    (run.path / "metrics.jsonl").unlink()
    (run.path / "eval" / "step_000001.json").write_text(json.dumps({"step": 1, "results": [{"mode": "m"}]}))
    with pytest.raises(UserError, match=r"step_000001.json: not an evaluation \(KeyError\('dataset'\)\)"):
        read_run(run.path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("alerts.jsonl", '{"step": 1}\n', "alerts.jsonl: an alert without a 'message'"),
        ("config.toml", "run = 3\n", "config.toml: not the configuration of a run: run = 3"),
        (
            "config.toml",
            '[run]\nsteps = "many"\n',
            "config.toml: not the configuration of a run: run = {'steps': 'many'}",
        ),
        (
            "eval/step_000001.json",
            '{"step": 1, "results": [{"mode": "m", "dataset": "d", "problems": 2, "value": "x", "low": 0, "high": 1}]}',
            "step_000001.json: not an evaluation (ValueError",
        ),
        ("metrics.jsonl", None, "metrics.jsonl: cannot be read (Is a directory)"),
        ("log.txt", None, "log.txt: cannot be read (Is a directory)"),
        ("provenance.json", None, "provenance.json: missing or not JSON ([Errno 21] Is a directory"),
    ],
)
def test_one_unreadable_run_does_not_end_the_list(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    """`content` None: a directory lies in the file's place, which not even root can read."""
    make_run(tmp_path / "good", [1.0]).close()
    make_run(tmp_path / "odd", [1.0]).close()
    file = tmp_path / "odd" / name
    if content is None:
        file.unlink(missing_ok=True)
        file.mkdir()
    else:
        file.write_text(content)
    _, good, odd = list_runs(tmp_path)
    assert good.split()[1] == "sft"
    assert odd.startswith(f"unreadable: {tmp_path}/odd/")
    assert said in odd


def test_a_torn_last_line_is_left_out_of_a_comparison(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, [3.0, 2.0]).close()
        with (tmp_path / name / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "loss": 1.')
    lines = list(compare_runs(f"{tmp_path}/a", f"{tmp_path}/b"))
    assert ["loss", "2", "2", "+0"] in words(lines)


def test_what_is_no_number_is_no_metric(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [3.0, 2.0]).close()
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": "high"}\n')
    assert read_run(tmp_path / "a").last("loss") == 2.0


def test_a_run_that_counts_epochs_or_ends_early_is_finished_by_what_its_log_says(tmp_path: Path) -> None:
    with make_run(tmp_path / "early", [3.0, 2.0]) as run:
        run.log.write_text("early 1/3  loss 3\nstep 2: ends here, since it is good enough\n")
    assert read_run(run.path).status == "finished"
    with make_run(tmp_path / "epochs", [3.0, 2.0]) as run:
        config = (run.path / "config.toml").read_text()
        (run.path / "config.toml").write_text(config.replace("steps = 3", "steps = 0"))
        run.log.write_text("epochs 1/2  loss 3\nepochs 2/2  loss 2\n")
    record = read_run(run.path)
    assert (record.steps, record.status) == (2, "finished")


# documented: nmoe runs list runs/speedrun
# documented: nmoe runs list
# documented: nmoe runs show runs/speedrun/sort_grpo
# documented: nmoe runs show
# documented: nmoe runs diff runs/base runs/wide
# documented: nmoe runs diff
# documented: nmoe runs compare runs/base runs/wide
# documented: nmoe runs compare "runs/base-*" "runs/wide-*"
# documented: nmoe runs compare
@pytest.mark.parametrize(
    ("verb", "arguments", "code", "said"),
    [
        ("list", ["runs"], 0, "finished"),
        ("show", ["runs/base"], 0, "optimizer.learning_rate  0.01"),
        ("diff", ["runs/base", "runs/wide*"], 0, "optimizer.learning_rate  0.01  0.02"),
        ("compare", ["runs/base", "runs/wide*"], 0, "loss    2  1.5  -0.5"),
        ("compare", ["runs/base", "runs/gone"], 2, "runs/gone: not the directory of a run"),
    ],
)
def test_the_verbs_print_it(
    verb: str,
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path / "runs" / "base", [3.0, 2.5, 2.0], rate=0.01).close()
    make_run(tmp_path / "runs" / "wide", [3.0, 2.0, 1.5], rate=0.02).close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nmoe", "runs", verb, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code
    said_to = capfd.readouterr()
    assert said in (said_to.err if code else said_to.out)


def evaluation(run: Path, step: int, value: float, **more: Any) -> None:
    result = {"mode": "greedy_pass@1", "dataset": "sort", "problems": 200, "value": value, "low": 0.0, "high": 1.0}
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "results": [result | more]}))


def metrics(run: Path, **values: float) -> None:
    rows = [{"step": step, "time_step_s": 6.0, "tokens_in_batch": 1000.0} | values for step in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_changed_what_it_took_where_it_lies_and_what_is_next(tmp_path: Path) -> None:
    metrics(tmp_path)
    for step, value in ((0, 0.12), (20, 0.5), (40, 0.95)):
        evaluation(tmp_path, step, value)
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    assert list(run_summary(tmp_path, "rl")) == [
        "greedy_pass@1 on sort: 12.0% -> 95.0% of 200",
        "40 steps in 4.0 minutes, 40,000 tokens",
        f"run: {tmp_path}; best checkpoint: {tmp_path}/checkpoints/best",
        f"next: nmoe chat {tmp_path}  or  nmoe export {tmp_path} DIRECTORY  or  nmoe report {tmp_path}",
    ]


def test_losses_are_no_percentages_and_one_evaluation_has_no_before(tmp_path: Path) -> None:
    evaluation(tmp_path, 5, 0.4321, mode="held_out_loss", lower_is_better=True)
    assert next(iter(run_summary(tmp_path, "sft"))) == "held_out_loss on sort: 0.4321 of 200"


def test_without_evaluations_the_metrics_speak(tmp_path: Path) -> None:
    rows = [{"step": step, "time_step_s": 1.0, "loss": float(21 - step)} for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(run_summary(tmp_path, "pretrain"))[:2] == [
        "loss: 18 -> 3 (first and last 5 steps)",
        "20 steps in 20 s",
    ]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (12, "loss: 11 -> 2 (first and last 3 steps)"),  # 12, 11 and 10, and 3, 2 and 1
        (60, "loss: 55.5 -> 5.5 (first and last 10 steps)"),
        (3, "loss: 3 -> 1 (first and last step)"),
        (1, "loss: 1 -> 1 (first and last step)"),
    ],
)
def test_the_ends_of_a_short_run_have_no_step_in_common(tmp_path: Path, steps: int, said: str) -> None:
    """The loss falls by one a step, to 1."""
    rows = [{"step": step, "time_step_s": 1.0, "loss": float(steps + 1 - step)} for step in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert next(run_summary(tmp_path, "sft")) == said


def test_every_verb_leads_somewhere(tmp_path: Path) -> None:
    for verb in NEXT:
        *_, last = run_summary(tmp_path, verb)
        assert last.startswith("next: nmoe ")
        assert last.endswith(f"nmoe report {tmp_path}")
