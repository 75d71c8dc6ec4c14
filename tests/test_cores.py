"""Cores and threads: the arithmetic on written /proc and /sys files, and a core made busy for real."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nmoe.cores as cores_module
from nmoe.cores import (
    CoreTimes,
    _quota_and_use,
    busy_seconds,
    choose_threads,
    count_of_torch,
    cpu_quota,
    free_cores,
    threads_for,
)


@pytest.mark.parametrize(
    ("cores", "used", "quota", "expected"),
    [
        (8, 0.0, math.inf, 8),
        (8, 0.2, math.inf, 8),  # an idle machine's background
        (8, 0.3, math.inf, 7),
        (8, 3.0, math.inf, 5),
        (2, 2.0, math.inf, 1),
        (2, 9.0, math.inf, 1),
        (8, 0.0, 2.5, 2),
        (8, 7.0, 2.5, 1),
        (8, 0.0, 0.5, 1),
    ],
)
def test_threads_for(cores: int, used: float, quota: float, expected: int) -> None:
    assert threads_for(cores, used, quota) == expected


def test_busy_seconds_counts_work_on_the_named_cores_alone() -> None:
    stat = (
        "cpu  999 999 999 999 999 999 999 999 999 999\n"
        "cpu0 100 20 30 5000 600 7 8 9 50 1\n"
        "cpu1 1000 0 0 5000 0 0 0 0 0 0\n"
        "cpu10 4 0 0 5000 0 0 0 0 0 0\n"
        "intr 1 2 3\n"
    )
    assert busy_seconds(stat, {0, 10}, ticks_per_second=100) == pytest.approx((100 + 20 + 30 + 7 + 8 + 9 + 4) / 100)


def make_root(root: Path, membership: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": membership, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, math.inf),
        (
            "0::/a/b\n",
            {"sys/fs/cgroup/a/b/cpu.max": "400000 100000\n", "sys/fs/cgroup/a/cpu.max": "150000 50000\n"},
            3.0,
        ),
        (
            "3:memory:/m\n2:cpu,cpuacct:/job\n",
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
    ],
)
def test_cpu_quota(tmp_path: Path, membership: str, files: dict[str, str], expected: float) -> None:
    assert cpu_quota(make_root(tmp_path, membership, files)) == expected


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.stat": "usage_usec 7000000\n"}, (math.inf, None)),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/cpu.stat": "nr_periods 3\nusage_usec 7500000\nuser_usec 1\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/b/cpu.stat": "usage_usec 1000000\n",
            },
            (2.0, 7.5),
        ),
        (
            "2:cpu,cpuacct:/job\n",
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/job/cpu.stat": "nr_periods 3\nnr_throttled 1\n",
                "sys/fs/cgroup/cpu/job/cpuacct.usage": "2250000000\n",
            },
            (1.5, 2.25),
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, (1.0, None)),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "\n"}, (math.inf, None)),  # read as its group ends
    ],
)
def test_the_group_that_sets_the_quota_says_what_was_used_of_it(
    tmp_path: Path, membership: str, files: dict[str, str], expected: tuple[float, float | None]
) -> None:
    root = make_root(tmp_path, membership, files)
    assert _quota_and_use(root) == expected
    assert cpu_quota(root) == expected[0]


def test_the_work_of_others_in_the_quota() -> None:
    before, after = CoreTimes(10.0, 0.0, 5.0, 2.0, 100.0), CoreTimes(12.0, 80.0, 7.0, 2.0, 105.0)
    assert after.used_of_quota_since(before) == pytest.approx(1.5)  # 3 seconds of 2
    assert threads_for(64, 39.0, 2.0, 1.5) == 1
    assert [threads_for(64, 39.0, 4.0, used) for used in (0.0, 0.25, 0.26, 1.2)] == [4, 4, 3, 3]
    assert threads_for(64, 39.0, 1.9, 0.1) == 1
    assert CoreTimes(12.0, 80.0, 7.0).used_of_quota_since(before) == 0.0


def test_cpu_quota_is_infinite_where_nothing_says(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf


def test_a_requested_count_is_used_and_a_negative_one_refused() -> None:
    assert choose_threads(5, 2, {"OMP_NUM_THREADS": "3"}) == 5
    with pytest.raises(ValueError, match="got -1"):
        choose_threads(-1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 7),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "4,2"}, 4),  # the second is of nested teams
        ({"OMP_NUM_THREADS": "many"}, 7),
        ({"OMP_NUM_THREADS": "0"}, 7),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 7),  # torchrun's own
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, 2),
    ],
)
def test_the_count_is_the_users_or_that_of_the_cores(
    environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 8)
    monkeypatch.setattr(cores_module, "cpu_quota", lambda: 7.5)
    assert choose_threads(0, environment=environment) == expected
    assert choose_threads(0, 2, environment) == (3 if expected == 7 else expected)  # the user's is that of each process
    assert choose_threads(0, 16, {}) == 1


@pytest.mark.parametrize(
    ("said", "expected"), [("print(5)", 5), ("print('a warning')", None), ("raise SystemExit(1)", None), ("", None)]
)
def test_the_count_that_torch_chooses_itself_is_that_of_a_fresh_process(
    said: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, python = subprocess.run, sys.executable if said else ""  # "" in a program that has Python inside

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command == [python, "-c", "import torch; print(torch.get_num_threads())"]
        return original([python, "-c", said], **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "executable", python)
    count_of_torch.cache_clear()
    assert count_of_torch() == expected
    count_of_torch.cache_clear()


def test_the_work_of_others_is_what_this_process_did_not_do() -> None:
    before, after = CoreTimes(10.0, 100.0, 5.0), CoreTimes(12.0, 103.5, 6.0)
    assert after.used_by_others_since(before) == pytest.approx(1.25)  # 2.5 seconds of 2
    assert (
        CoreTimes(12.0, 101.0, 7.0).used_by_others_since(before) == 0.0
    )  # ticks are coarser than a process's own time


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the test holds processes to cores")
def test_cores_that_others_use_are_not_free_and_change_no_run() -> None:
    cores = os.sched_getaffinity(0)
    assert 1 <= free_cores() <= len(cores)
    spin = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint('on', flush=True)\nwhile True: pass"
    spinners = [
        subprocess.Popen([sys.executable, "-c", spin, str(core)], stdout=subprocess.PIPE) for core in sorted(cores)
    ]
    try:
        for spinner in spinners:
            assert spinner.stdout is not None
            assert spinner.stdout.readline() == b"on\n"
        assert free_cores() == 1
        assert choose_threads(0, environment={}) == threads_for(len(cores), 0.0, cpu_quota())
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.communicate()


def test_more_threads_than_a_machine_can_mean_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 6)
    monkeypatch.setattr(cores_module, "cpu_quota", lambda: math.inf)
    assert choose_threads(0, 2, {"OMP_NUM_THREADS": "1024"}) == 1024
    assert choose_threads(0, 2, {"OMP_NUM_THREADS": "1025"}) == 3, "the cores, as where the variable is no number"
