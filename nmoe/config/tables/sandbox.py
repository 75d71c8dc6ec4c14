"""The settings of sandboxes: what has to be in force, and what they show of the machine."""

from typing import Literal

from pydantic import Field

from nmoe.config.base import Array, Section


class SandboxSettings(Section):
    """[sandbox]: what has to hold around code that the policy wrote. Where it can not be had, nothing starts."""

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
    warm: int = Field(default=2, ge=0, le=256, description="sandboxes that are kept started ahead of need")
    first_uid: int = Field(
        default=1_900_000_000,
        ge=1000,
        le=2**31 - 2,
        description="as root, each live sandbox has a uid of its own, from this one on; nobody else may have them",
    )
