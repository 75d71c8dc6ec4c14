"""Examines the machine for `nmoe doctor`: packages, processor, GPUs, kernels, sandboxes and caches, with advice for each."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.cores import choose_threads, cpu_quota, free_cores, usable_cores
from nmoe.extras import how_to_install, requirements
from nmoe.model.ops.cpu.library import cpu_features, cpu_model
from nmoe.sandbox.api import SandboxSetupError
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.sandbox.workspaces.store import workspaces_root


@dataclass(frozen=True)
class Advice:
    """A recommended improvement of the machine, with the command or setting that makes it.

    `kind` is "needed" (nmoe cannot be used without it), "faster", "safer", or "more" (optional features).
    """

    kind: Literal["needed", "faster", "safer", "more"]
    text: str
    command: str


@dataclass(frozen=True)
class Finding:
    """The result of examining one topic: `Finding("threads", "2 cores: ...", {"cores": 2, "free_cores": 1, "quota": None})`.

    `text` is for people, `facts` for programs (JSON), and `advice` lists possible improvements.
    """

    topic: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()


def usable(findings: Sequence[Finding]) -> bool:
    """Returns whether the machine has everything that nmoe requires."""
    return all(advice.kind != "needed" for finding in findings for advice in finding.advice)


def as_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields the lines to print: a paragraph for each topic, then all advice, the most urgent first."""
    width = max(len(finding.topic) for finding in findings) + 2
    for finding in findings:
        first, *others = finding.text.splitlines()
        yield f"{finding.topic:<{width}}{first}"
        yield from (" " * width + line for line in others)
    for kind in ("needed", "faster", "safer", "more"):
        for finding in findings:
            for advice in finding.advice:
                if advice.kind == kind:
                    yield ""
                    yield f"{kind + ':':<{width}}{advice.text}"
                    yield f"{'':<{width}}  {advice.command}"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the findings as JSON: `{"usable": true, "findings": {"threads": {"cores": 2, ...}, ...}, "advice": [{...}]}`."""
    return {
        "usable": usable(findings),
        "findings": {finding.topic: finding.facts for finding in findings},
        "advice": [{"topic": finding.topic, **asdict(advice)} for finding in findings for advice in finding.advice],
    }


_SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy", "triton")
_EXTRAS = {"report": "the speedrun, and figures in reports", "environments": "problems of the package reasoning-gym"}
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def examine() -> list[Finding]:
    """Examines all topics. If torch cannot be imported, only the topics that do not need it."""
    found = [packages(), extras(), processor(), threads(), compiler()]
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # an OSError where one of its libraries cannot be loaded
        broken = Advice("needed", "torch cannot be imported", "pip install --force-reinstall torch")
        return [*found, Finding("torch", f"cannot be imported: {error}", {}, (broken,)), sandbox()]
    return [*found, idle_threads(), gpu(), kernels(), sandbox(), caches()]


def packages() -> Finding:
    """Examines the versions of Python, nmoe and its required packages; advises to install missing and outdated ones."""
    versions = {"python": platform.python_version(), "nmoe": _version("nmoe")}
    versions |= {name: _version(name) for name in _SHOWN}
    lacking = [one for one in requirements() if not _is_met(one)]
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items() if name != "triton")
    where = Path(__file__).parents[1]
    advice = tuple(
        Advice(
            "needed",
            f"nmoe needs {one.name}{one.specifier}; installed is {_version(one.name) or 'none'}",
            f"pip install {shlex.quote(f'{one.name}{one.specifier}')}",
        )
        for one in lacking
    )
    return Finding("packages", f"{text}\nnmoe lies in {where}", {**versions, "directory": str(where)}, advice)


def extras() -> Finding:
    """Examines nmoe's optional dependencies; names the missing packages of each extra."""
    missing = {
        name: [one.name for one in requirements(name) if not _is_met(one)]
        for name in _known_extras()
        if name in _EXTRAS
    }
    text = ", ".join(
        f"{name}: {f'without {chr(44).join(lacks)}' if lacks else 'there'}" for name, lacks in missing.items()
    )
    advice = tuple(
        Advice("more", f"{_EXTRAS[name]}: the extra {name!r} has {', '.join(lacks)}", how_to_install(name))
        for name, lacks in missing.items()
        if lacks
    )
    return Finding(
        "extras", text or "unknown: nmoe runs from its sources, without having been installed", missing, advice
    )


def processor() -> Finding:
    """Examines the processor: its model, its memory, and the vector instructions that kernels could use."""
    features = cpu_features()
    instructions = [name for name in _INSTRUCTIONS if name in features]
    memory = machine_memory()
    facts: dict[str, Any] = {"model": cpu_model(), "instructions": instructions, **memory}
    text = f"{facts['model']} ({', '.join(instructions) or platform.machine()})"
    if memory:
        text += f", {_gib(memory['memory_bytes'])} of memory, {_gib(memory['free_memory_bytes'])} free"
    return Finding("processor", text, facts)


def threads() -> Finding:
    """Examines the cores that this process may use and that are free now, and the number of threads that a run would use."""
    cores, quota = usable_cores(), cpu_quota() if platform.system() == "Linux" else math.inf
    free, chosen = free_cores(), choose_threads(0)
    allowed = "" if math.isinf(quota) else f", of which its control group allows {quota:g}"
    count = "1 thread" if chosen == 1 else f"{chosen} threads"
    asked = f", as OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} says" if "OMP_NUM_THREADS" in os.environ else ""
    text = f"{cores} core{'s' * (cores > 1)}{allowed}; a run that starts now computes with {count}{asked}"
    facts = {"cores": cores, "free_cores": free, "quota": None if math.isinf(quota) else quota, "threads": chosen}
    own = cores if math.isinf(quota) else max(1, min(cores, math.floor(quota)))
    advice: tuple[Advice, ...] = ()
    if free < own:
        advice = (
            Advice("faster", f"other programs keep {own - free} of {own} cores busy; end them, or start later", "top"),
        )
    return Finding("threads", text, facts, advice)


def idle_threads() -> Finding:
    """Examines how idle threads of the OpenMP runtime wait for work: by sleeping or by spinning."""
    from nmoe.model.idle_threads import IDLE

    runtime = None if IDLE.runtime is None else IDLE.runtime.name
    return Finding("idle threads", IDLE.describe(), {"runtime": runtime, "own_setting": IDLE.own})


def compiler() -> Finding:
    """Examines the C++ compiler that would compile the CPU kernels: $CXX or g++."""
    command = os.environ.get("CXX") or "g++"
    try:
        found = shutil.which(shlex.split(command)[0])
    except (ValueError, IndexError):  # quotes that are not closed, or blanks alone
        found = None
    if found is None:
        return Finding("compiler", f"{command} is not there", {"command": command, "path": None, "version": None})
    said = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=False).stdout
    version = said.splitlines()[0] if said else None
    return Finding(
        "compiler", f"{version or command} ({found})", {"command": command, "path": found, "version": version}
    )


def gpu() -> Finding:
    """Examines the CUDA devices and their memory; without any, explains why."""
    import torch

    from nmoe.model.device import KINDS, choose_device
    from nmoe.model.ops.triton.ops import OrderFreeTritonOps, TritonOps

    cuda = KINDS["cuda"]
    devices, lines = [], []
    for device in map(cuda.at, range(cuda.count())):
        free, total = torch.cuda.mem_get_info(device)
        devices.append({"name": cuda.describe(device), "memory_bytes": total, "free_memory_bytes": free})
        lines.append(f"{cuda.describe(device)}, {_gib(total)}, {_gib(free)} free")
    facts = {"devices": devices, "cuda": torch.version.cuda, "auto": str(choose_device())}
    if devices:
        lines.append(f"operations by Triton: {TritonOps.__name__}, with exact numerics {OrderFreeTritonOps.__name__}")
        advice = () if _version("triton") else (Advice("needed", "kernels on CUDA need Triton", "pip install triton"),)
        return Finding("gpu", "\n".join(lines), facts, advice)
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia/version").exists():
        return Finding("gpu", "none: there is no NVIDIA driver", facts)
    command = "pip install --force-reinstall torch" if torch.version.cuda is None else "nvidia-smi"
    text = f"there is an NVIDIA driver, but {cuda.missing()}"
    return Finding("gpu", "none that torch can use", facts, (Advice("faster", text, command),))


def kernels() -> Finding:
    """Returns which CPU kernels sampling, training and numerics = "exact" would use, and whether the C++ ones could be compiled."""
    import torch

    from nmoe.model.exactness import numerics_here
    from nmoe.model.ops.cpu import library
    from nmoe.model.ops.cpu.packing import kernels_in_use
    from nmoe.model.ops.table import ops_for

    x = torch.zeros(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = library.library() is not None
    with torch.no_grad(), kernels_in_use():
        sampling = type(ops_for(x)).__name__
    training, exact = type(ops_for(x)).__name__, type(ops_for(x, exact=True)).__name__
    capability, numerics = torch.backends.cpu.get_cpu_capability(), numerics_here("exact")
    facts = {
        "sampling": sampling,
        "training": training,
        "exact": exact,
        "compiled": compiled,
        "instructions": capability,
        "exact_numerics": numerics,
    }
    advice = []
    if compiled:
        lines = [
            f"C++ kernels for {capability}: sampling ({sampling}), exact numerics ({exact})",
            f"torch: training ({training})",
        ]
    else:
        # Of the warning, what stands in its parentheses.
        reason = str(said[0].message).partition("(")[2].rpartition(")")[0] if said else f"none for {platform.system()}"
        lines = [
            f"the C++ kernels are off: {reason}",
            f"torch instead: sampling ({sampling}), training ({training}), exact numerics ({exact})",
        ]
        if said:
            remedy = "unset CXX, or name a C++ compiler in it" if os.environ.get("CXX") else "apt-get install g++"
            advice.append(Advice("faster", "with the C++ kernels sampling takes a fifth of the time", remedy))
    lowered = os.environ.get("ATEN_CPU_CAPABILITY")
    if lowered and (best := _best_instructions()) and capability != best:
        advice.append(
            Advice("faster", f"ATEN_CPU_CAPABILITY={lowered} keeps torch from {best}", "unset ATEN_CPU_CAPABILITY")
        )
    lines.append(f'numerics = "exact" is {numerics} here')
    return Finding("kernels", "\n".join(lines), facts, tuple(advice))


def sandbox() -> Finding:
    """Finds the strongest sandbox level that withstands attacks from inside on this machine, and its weaknesses."""
    refused = {}
    for level in ("bubblewrap", "landlock"):
        try:
            sandboxes = Sandboxes(SandboxSettings(level=level, warm=0))
        except SandboxSetupError as error:
            refused[level] = re.sub(r"^sandbox_setup_failed: ", "", str(error))
            continue
        description = sandboxes.describe()
        asyncio.run(sandboxes.close())
        limited = "no cgroup limits" not in description
        advice = []
        if "bubblewrap" in refused:
            text = f'runs with tools or code ask for level "bubblewrap", which does not start ({refused["bubblewrap"]})'
            advice.append(Advice("safer", text, _for_bubblewrap("or set --sandbox.level=landlock")))
        if not limited:
            text = "the kernel limits memory and processes of a sandbox in a delegated cgroup; now they are watched every 20 ms"
            advice.append(Advice("safer", text, 'systemd-run --user --scope -p "Delegate=yes" nmoe ...'))
        facts: dict[str, Any] = {
            "level": level,
            "cgroup_limits": limited,
            "protections": description,
            "refused": refused,
        }
        return Finding("sandbox", f"level {level!r} withstood its test: {description}", facts, tuple(advice))
    remedy = _for_bubblewrap("and sysctl -w user.max_user_namespaces=15000")
    reasons = "; ".join(refused.values())
    facts = {"level": None, "cgroup_limits": False, "protections": "", "refused": refused}
    text = "none: environments with tools or code refuse to start"
    return Finding("sandbox", text, facts, (Advice("safer", f"no level of sandboxes starts ({reasons})", remedy),))


def _for_bubblewrap(further: str) -> str:
    return further.partition(" ")[2] if shutil.which("bwrap") else f"apt-get install bubblewrap, {further}"


def caches() -> Finding:
    """Examines the directories that are kept between runs, such as downloaded models, with their sizes."""
    import datasets.config
    from huggingface_hub import constants

    from nmoe.data.hub import kept_datasets
    from nmoe.envs.golds import golds_directory
    from nmoe.model.ops.cpu import library

    folders = {
        "compiled kernels": library.cache_directory(),
        "golds that passed": golds_directory(),
        "workspaces": workspaces_root(),
        "models of the hub": Path(constants.HF_HUB_CACHE),
        "datasets of the hub": Path(datasets.config.HF_DATASETS_CACHE),
        "your datasets": kept_datasets(),
    }
    width = max(map(len, folders)) + 2
    lines, facts, advice = [], {}, []
    for name, path in folders.items():
        size = _size(path)
        facts[name] = {"path": str(path), "bytes": size}
        lines.append(f"{name:<{width}}{path} ({_mib(size)})")
        if not _can_be_written(path):
            text = f"{path} cannot be written, so its contents ({name}) are made again each time"
            advice.append(Advice("faster", text, "export XDG_CACHE_HOME=DIRECTORY"))
    return Finding("caches", "\n".join(lines), facts, tuple(advice))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _known_extras() -> list[str]:
    try:
        return importlib.metadata.metadata("nmoe").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _is_met(one: Requirement) -> bool:
    version = _version(one.name)
    return version is not None and one.specifier.contains(version, prereleases=True)


def machine_memory() -> dict[str, int]:
    """Returns the total and free memory in bytes as `memory_bytes` and `free_memory_bytes`; an empty dictionary except
    on Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return {"memory_bytes": kib["MemTotal"] << 10, "free_memory_bytes": kib["MemAvailable"] << 10}


def _best_instructions() -> str | None:
    """Returns torch's name for the best vector instructions of an x86 processor, "AVX512" or "AVX2"; None if it has neither."""
    features = cpu_features()
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"} <= features:
        return "AVX512"
    return "AVX2" if {"avx2", "fma"} <= features else None


def _can_be_written(path: Path) -> bool:
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return os.access(existing, os.W_OK | os.X_OK)


def _size(directory: Path) -> int:
    """Returns the total size in bytes of all files below a directory."""
    size = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):  # another process may have removed it
                size += Path(folder, name).lstat().st_size
    return size


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
