"""What is found on this machine, held against what the machine says of itself; and on machines that are played."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from nmoe.model import idle_threads
from nmoe.model.idle_threads import Libgomp
from nmoe.model.ops.cpu import library
from nmoe.preflight import doctor
from nmoe.preflight.doctor import Advice, Finding, as_json, as_lines, usable
from nmoe.sandbox.api import SandboxSetupError


def test_findings_as_lines_and_json() -> None:
    safer, needed = Advice("safer", "lock it", "lock"), Advice("needed", "get it", "pip install it")
    found = [Finding("one", "first\nsecond", {"a": 1}, (safer,)), Finding("longer", "only", {}, (needed,))]
    assert list(as_lines(found)) == [
        "one     first", "        second", "longer  only",
        "", "needed: get it", "          pip install it",
        "", "safer:  lock it", "          lock",
    ]  # fmt: skip
    assert as_json(found) == {
        "usable": False,
        "findings": {"one": {"a": 1}, "longer": {}},
        "advice": [
            {"topic": "one", "kind": "safer", "text": "lock it", "command": "lock"},
            {"topic": "longer", "kind": "needed", "text": "get it", "command": "pip install it"},
        ],
    }
    assert usable(found[:1])


def test_packages_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.packages()
    assert found.facts["python"] == platform.python_version()
    assert found.facts["torch"] == torch.__version__
    assert found.facts["directory"] == str(Path(doctor.__file__).parents[1])
    assert (found.advice, doctor.extras().advice) == ((), ()), "what the tests run with is complete"
    versions, real = {"torch": "2.5.1", "matplotlib": None}, importlib.metadata.version

    def version(name: str) -> str:
        said = versions[name] if name in versions else real(name)
        if said is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return said

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doctor.packages().advice == (
        Advice("needed", "nmoe needs torch>=2.11; installed is 2.5.1", "pip install 'torch>=2.11'"),
    )
    assert doctor.extras().facts["report"] == ["matplotlib"]
    (advice,) = doctor.extras().advice
    assert (advice.kind, advice.command) == ("more", "pip install 'matplotlib>=3.9'")
    versions["torch"] = None
    assert doctor.packages().advice[0].text == "nmoe needs torch>=2.11; installed is none"


def test_sources_that_were_never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    for function in ("version", "requires", "metadata"):
        monkeypatch.setattr(importlib.metadata, function, nothing)
    assert (doctor.packages().facts["nmoe"], doctor.packages().advice) == (None, ())
    assert doctor.extras().text.startswith("unknown")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux says what its processor is")
def test_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, text = doctor.processor().facts, Path("/proc/cpuinfo").read_text()
    assert facts["model"] in text
    assert set(facts["instructions"]) == set(doctor._INSTRUCTIONS) & set(text.split())
    assert facts["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < facts["free_memory_bytes"] < facts["memory_bytes"]
    monkeypatch.setattr(doctor, "cpu_features", set)
    assert f"({platform.machine()})" in doctor.processor().text


@pytest.mark.parametrize(
    ("cores", "quota", "free", "said", "busy"),
    [
        (8, float("inf"), 8, "8 cores; ", None),
        (8, float("inf"), 3, "8 cores; ", "5 of 8"),
        (8, 2.5, 2, "8 cores, of which its control group allows 2.5; ", None),
        (8, 2.5, 1, "8 cores, of which its control group allows 2.5; ", "1 of 2"),
        (1, 0.5, 1, "1 core, of which its control group allows 0.5; ", None),
    ],
)
def test_cores(
    cores: int, quota: float, free: int, said: str, busy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.threads().facts["cores"] == len(os.sched_getaffinity(0))
    monkeypatch.setattr(doctor, "usable_cores", lambda: cores)
    monkeypatch.setattr(doctor, "cpu_quota", lambda: quota)
    monkeypatch.setattr(doctor, "free_cores", lambda: free)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = doctor.threads()
    assert found.text == f"{said}a run that starts now computes with 3 threads, as OMP_NUM_THREADS=3 says"
    assert (found.facts["free_cores"], found.facts["threads"]) == (free, 3)
    assert [advice.text.partition(" cores")[0] for advice in found.advice] == (
        [] if busy is None else [f"other programs keep {busy}"]
    )


def test_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    libgomp, own = Libgomp(lambda threads, flags: None), {"GOMP_SPINCOUNT": "1000"}
    monkeypatch.setattr(idle_threads, "IDLE", idle_threads.IdleThreads(libgomp, environment={}))
    found = doctor.idle_threads()
    assert found.text == "spin while the cores are free, and sleep while other processes need them (libgomp)"
    assert found.facts == {"runtime": "libgomp", "own_setting": None}
    monkeypatch.setattr(idle_threads, "IDLE", idle_threads.IdleThreads(libgomp, environment=own))
    found = doctor.idle_threads()
    assert found.text == "wait as GOMP_SPINCOUNT=1000 says"
    assert found.facts == {"runtime": None, "own_setting": "GOMP_SPINCOUNT=1000"}


def test_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    if path := shutil.which("g++"):
        monkeypatch.delenv("CXX", raising=False)
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        assert doctor.compiler().facts == {"command": "g++", "path": path, "version": said.splitlines()[0]}
    for absent in ("/nonexistent/c++", "'", " "):
        monkeypatch.setenv("CXX", absent)
        assert (doctor.compiler().facts["path"], doctor.compiler().text) == (None, f"{absent} is not there")


def test_gpus_and_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: ((70 + device.index) << 30, 80 << 30))
    monkeypatch.setattr(cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = doctor.gpu()
    assert found.text.splitlines() == [
        "cuda:0 (card 0, CUDA 13.0), 80.0 GiB, 70.0 GiB free",
        "cuda:1 (card 1, CUDA 13.0), 80.0 GiB, 71.0 GiB free",
        "operations by Triton: TritonOps, with exact numerics OrderFreeTritonOps",
    ]
    assert found.facts["devices"][1] == {
        "name": "cuda:1 (card 1, CUDA 13.0)",
        "memory_bytes": 80 << 30,
        "free_memory_bytes": 71 << 30,
    }
    assert (found.facts["auto"], found.advice) == ("cuda:0", ())
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert [advice.command for advice in doctor.gpu().advice] == ["pip install triton"]

    monkeypatch.setattr(cuda, "is_available", lambda: False)
    for built_for, driver, command in [
        (None, "/usr/bin/nvidia-smi", "pip install --force-reinstall torch"),
        ("13.0", "/usr/bin/nvidia-smi", "nvidia-smi"),
        (None, None, None),
        ("13.0", None, None),
    ]:
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(shutil, "which", lambda name, driver=driver: driver)
        found = doctor.gpu()
        assert found.text.startswith("none")
        assert [advice.command for advice in found.advice] == ([] if command is None else [command])


needs_kernels = pytest.mark.skipif(library.library() is None, reason="the kernels need Linux and a C++ compiler")


@needs_kernels
def test_kernels_that_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    found = doctor.kernels()
    assert found.facts == {
        "sampling": "KernelOps",
        "training": "CpuOps",
        "exact": "ExactOps",
        "compiled": True,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "exact_numerics": "exact",
    }
    assert found.advice == ()


@pytest.mark.parametrize("named", ["", "/nonexistent/c++"])
def test_kernels_that_cannot_be_compiled(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("PATH", "")
    library.library.cache_clear()
    try:
        found = doctor.kernels()
    finally:
        library.library.cache_clear()
    assert (found.facts["sampling"], found.facts["training"], found.facts["exact"]) == (
        "CpuOps",
        "CpuOps",
        "OrderFreeOps",
    )
    assert found.facts["compiled"] is False
    assert found.text.startswith("the C++ kernels are off: [Errno 2] No such file or directory: ")
    remedy = "unset CXX, or name a C++ compiler in it" if named else "apt-get install g++"
    # On a processor that is held to older instructions there is advice on those, too.
    assert [advice.command for advice in found.advice].count(remedy) == 1


@pytest.mark.parametrize(
    ("features", "best"),
    [
        ({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}, "AVX512"),
        ({"avx2", "fma", "avx512f"}, "AVX2"),
        ({"avx2"}, None),
        (set(), None),
    ],
)
def test_instructions_that_a_variable_keeps_torch_from(
    features: set[str], best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "cpu_features", lambda: features)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(library, "library", lambda: None)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    advice = [(one.text, one.command) for one in doctor.kernels().advice]
    expected = (f"ATEN_CPU_CAPABILITY=default keeps torch from {best}", "unset ATEN_CPU_CAPABILITY")
    assert advice == ([expected] if best else [])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    assert doctor.kernels().advice == (), "a processor that has no more"


class PlayedSandboxes:
    """Sandboxes of a machine on which only some levels start."""

    starting: tuple[str, ...] = ()
    limits = "no cgroup limits (none delegated)"

    def __init__(self, settings: doctor.SandboxSettings) -> None:
        if settings.level not in self.starting:
            raise SandboxSetupError(f"sandbox_setup_failed: no {settings.level}")

    def describe(self) -> str:
        return f"namespaces, {self.limits}"

    async def close(self) -> None:
        pass


def test_sandboxes_by_what_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Sandboxes", PlayedSandboxes)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = doctor.sandbox()
    assert (found.facts["level"], found.facts["refused"]) == (
        None,
        {"bubblewrap": "no bubblewrap", "landlock": "no landlock"},
    )
    assert [one.command for one in found.advice] == [
        "apt-get install bubblewrap, and sysctl -w user.max_user_namespaces=15000"
    ]
    monkeypatch.setattr(PlayedSandboxes, "starting", ("landlock",))
    found = doctor.sandbox()
    assert found.text == "level 'landlock' withstood its test: namespaces, no cgroup limits (none delegated)"
    assert [one.command for one in found.advice] == [
        "apt-get install bubblewrap, or set --sandbox.level=landlock",
        'systemd-run --user --scope -p "Delegate=yes" nmoe ...',
    ]
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/bwrap")
    assert doctor.sandbox().advice[0].command == "set --sandbox.level=landlock", "it is installed, but does not start"
    monkeypatch.setattr(PlayedSandboxes, "starting", ("bubblewrap", "landlock"))
    monkeypatch.setattr(PlayedSandboxes, "limits", "cgroup limits of memory and processes")
    found = doctor.sandbox()
    assert (found.facts["level"], found.facts["cgroup_limits"], found.advice) == ("bubblewrap", True, ())


def test_caches_lie_where_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NMOE_DATASETS", str(tmp_path / "datasets"))
    monkeypatch.setenv("NMOE_WORKSPACES", "/dev/null/workspaces")
    monkeypatch.delenv("NMOE_GOLDS", raising=False)
    kernels = tmp_path / "cache/nmoe/kernels"
    (kernels / "below").mkdir(parents=True)
    (kernels / "one.so").write_bytes(b"x" * 1000)
    (kernels / "below/two.so").write_bytes(b"x" * 24)
    found = doctor.caches()
    assert found.facts["compiled kernels"] == {"path": str(kernels), "bytes": 1024}
    assert found.facts["golds that passed"] == {"path": str(tmp_path / "cache/nmoe/golds"), "bytes": 0}
    assert found.facts["your datasets"] == {"path": str(tmp_path / "datasets"), "bytes": 0}
    (advice,) = found.advice
    assert advice.text.startswith("/dev/null/workspaces cannot be written")


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Sandboxes", PlayedSandboxes)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    found = doctor.examine()
    assert not usable(found)
    assert [one.topic for one in found] == [
        "packages",
        "extras",
        "processor",
        "threads",
        "compiler",
        "torch",
        "sandbox",
    ]
