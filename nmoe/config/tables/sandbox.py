"""The settings of sandboxes: what has to be in force, and what they show of the machine."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nmoe.config.base import Array, Conflict, Section


class SandboxSettings(Section):
    """[sandbox]: the isolation of code that the policy wrote. If the machine cannot provide it, nothing starts."""

    level: Literal["bubblewrap", "landlock"] = Field(
        default="bubblewrap",
        description="`bubblewrap` needs bwrap; `landlock` does without it, by Landlock and namespaces; both use seccomp",
    )
    python: str | None = Field(
        default=None,
        description="the interpreter inside, 3.11 or newer; without it, the one that nmoe's environment was made from",
    )
    visible: Array[str] = Field(
        default=(), description="more files and directories to show inside, read-only, such as libraries"
    )
    warm: int = Field(default=2, ge=0, le=256, description="number of sandboxes that are started in advance")
    first_uid: int = Field(
        default=1_900_000_000,
        ge=1000,
        le=2**31 - 2,
        description="as root, each live sandbox has a uid of its own, from this one on; nobody else may have them",
    )
    cgroup: Literal["auto", "required", "off"] = Field(
        default="auto",
        description="`required` refuses to start without cgroup v2 limits; `auto` uses them where the host delegates a cgroup",
    )
    cgroup_directory: str | None = Field(
        default=None,
        description="a delegated cgroup v2 directory to make the sandboxes' cgroups in; without it, that of this process's own",
    )
    cpus: float | None = Field(
        default=None,
        gt=0,
        description="the CPUs that one sandbox may use at a time, such as 1.5, by its cgroup; needs one",
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.cgroup == "off":
            for name in ("cgroup_directory", "cpus"):
                if getattr(self, name) is not None:
                    yield Conflict(name, 'needs cgroups, which cgroup = "off" does without')
