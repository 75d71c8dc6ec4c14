"""[engine] and [sampling], and an environment's [tools], [budget], [workspace] and [sandbox]: how rollouts are sampled and
executed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from nmoe.config.base import VARIABLE, Array, Conflict, DataPath, Section, duplicates
from nmoe.config.registry import ENGINES, TOOLS
from nmoe.errors import UserError

_SERVERS = ("server", "vllm", "sglang")
_KINDS = ("native", *_SERVERS)


class EngineSection(Section):
    """[engine]: how rollouts are generated."""

    max_sequences: int = Field(default=256, gt=0)
    """maximum number of sequences generated at once"""
    cache_mb: int = Field(default=0, ge=0)
    """megabytes of the key-value cache; 0: enough for max_sequences, at most 4096 MB on a CPU, and on a GPU at most 0.4 of the
    free memory beside training, or 0.85 without training"""
    expert_parallel: bool = False
    """on several ranks with parallel.ep > 1, sample with the experts divided over the ranks of an expert group as in training,
    instead of all of them on each rank"""


def fault_of_urls(urls: Sequence[str]) -> str | None:
    """Returns the message for texts that are no addresses of servers, or that repeat; None for addresses."""
    for url in urls:
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
        except ValueError:
            is_address = False
        if not is_address:
            return f"{url!r} is no URL of a server, such as http://127.0.0.1:8000"
    repeats = [url for index, url in enumerate(urls) if url.rstrip("/") in [one.rstrip("/") for one in urls[:index]]]
    return f"{repeats[0]} names a server twice" if repeats else None


class RolloutEngineSection(EngineSection):
    """[engine]: how rollouts are generated, in this process or in others."""

    kind: str = "native"
    """`native` samples in this process; `server` is nmoe's engine, `vllm` is vLLM and `sglang` is SGLang (unproven), in other
    processes; or an engine of your own as `package.module:Name`"""
    servers: int = Field(default=1, gt=0)
    """number of engine servers that the run starts on this machine"""
    urls: Array[str] = ()
    """running engine servers to use, such as `http://127.0.0.1:8000`, with the run's model; their key is $NMOE_ENGINE_KEY"""
    weights: Literal["auto", "disk", "delta", "group", "adapter"] = "auto"
    """way of a publication: `disk` writes all weights where servers read them, `delta` what changed since the last publication,
    `group` broadcasts them, `adapter` sends the adapter of [lora] alone; `auto`: `adapter` if there is one and kind is `server`,
    else `disk`"""
    shared_directory: Annotated[str | None, DataPath()] = None
    """directory that servers on other machines see under the same path, for the files of a publication; default: this machine's
    memory"""
    publish_every: int = Field(default=1, gt=0)
    """steps from one publication to the next; with more than 1 the samples between come from weights that are older by up to
    publish_every - 1 steps, which algorithm.correction has to correct. A step that is evaluated or saved publishes, too"""
    group_backend: Literal["gloo", "nccl"] = "gloo"
    """what broadcasts with weights = `group`: `nccl` between GPUs"""
    token_s: float = Field(default=1.0, gt=0)
    """seconds that a server may take for each token of a request before it counts as lost"""
    wait_s: float = Field(default=0.0, ge=0)
    """seconds that a server of `urls` is waited for which does not answer, while whoever started it starts it again"""
    python: str | None = None
    """Python interpreter of an environment with vllm and nmoe's plugin for it, or with sglang; default: nmoe's own environment"""
    tensor_parallel: int = Field(default=1, gt=0)
    """GPUs that each vllm or sglang server splits the model over"""
    memory_share: float = Field(default=0.85, gt=0, le=1)
    """share of a GPU's memory that a vllm or sglang server takes"""
    args: Array[str] = ()
    """more arguments of the server's command line, such as `--enable-expert-parallel`"""

    @property
    def on_servers(self) -> bool:
        """Whether engine servers sample. An engine named by its import path counts as one of this process."""
        return self.kind in _SERVERS

    def shared(self) -> Path | None:
        """Returns the shared directory, if one is named. Raises UserError if it is not there."""
        if self.shared_directory is None:
            return None
        if not (directory := Path(self.shared_directory)).is_dir():
            raise UserError(f"engine.shared_directory={directory}: no such directory; make it, or leave it out")
        return directory

    def transport(self, adapts: bool) -> Literal["disk", "delta", "group", "adapter"]:
        """Returns the way of a publication. `adapts` says whether the run trains an adapter."""
        if self.weights == "auto":
            return "adapter" if adapts and self.kind == "server" else "disk"
        return self.weights

    def conflicts(self) -> Iterator[Conflict]:
        if self.kind not in _KINDS:
            try:
                ENGINES.get(self.kind)
            except UserError as error:
                known = self.kind in ENGINES
                yield Conflict("kind", str(error) if known else ENGINES.refusal(self.kind, [*_KINDS, *ENGINES.names()]))
        for names, kinds in (
            (
                (
                    "servers",
                    "urls",
                    "weights",
                    "shared_directory",
                    "publish_every",
                    "group_backend",
                    "token_s",
                    "wait_s",
                    "args",
                ),
                _SERVERS,
            ),
            (("python", "tensor_parallel", "memory_share"), ("vllm", "sglang")),
            (("expert_parallel",), ("native",)),
        ):
            for name in names:
                if (
                    self.kind in _KINDS
                    and self.kind not in kinds
                    and getattr(self, name) != type(self).model_fields[name].default
                ):
                    yield Conflict(
                        name, f'needs engine.kind = {" or ".join(map(repr, kinds))}, and it is "{self.kind}"'
                    )
        if self.kind == "sglang" and self.weights not in ("auto", "disk"):
            yield Conflict("weights", 'to SGLang go by "disk" alone: it was never run, and the others need more of it')
        if self.weights == "delta" and self.kind == "vllm":
            yield Conflict(
                "weights",
                '"delta" needs the weights that a server has, and vLLM keeps them merged and packed; use "disk" or "group"',
            )
        if self.shared_directory is not None and self.weights == "group":
            yield Conflict("shared_directory", 'is for files, and "group" writes none')
        if self.weights == "group" and self.publish_every > 1:
            yield Conflict(
                "weights",
                '"group" cannot send the last publication once more to a server that failed, which engine.publish_every > 1 needs; '
                'use "disk"',
            )
        if (problem := fault_of_urls(self.urls)) is not None:
            yield Conflict("urls", problem)
        if self.urls and self.servers != 1:
            yield Conflict("servers", "is for servers that the run starts, and engine.urls names running ones")


class SamplingSection(Section):
    """[sampling]: the distribution that completions are drawn from."""

    max_new_tokens: int = Field(default=256, gt=0)
    """maximum tokens per completion"""
    temperature: float = Field(default=1.0, ge=0)
    """sampling temperature; 0: greedy"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """sample from the smallest set of tokens with this much probability; 1: off"""
    top_k: int = Field(default=0, ge=0)
    """sample from this number of most likely tokens; 0: off"""


class SandboxSettings(Section):
    """[sandbox]: isolation of code that the policy wrote. A run is refused if the machine cannot provide the isolation."""

    level: Literal["bubblewrap", "landlock"] = "bubblewrap"
    """`bubblewrap` needs the program bwrap; `landlock` uses the kernel's Landlock and namespaces instead; both use seccomp"""
    python: str | None = None
    """Python interpreter inside the sandbox, 3.11 or newer; default: the base interpreter of nmoe's environment"""
    visible: Array[str] = ()
    """additional files and directories visible inside the sandbox, read-only, such as libraries"""
    warm: int = Field(default=2, ge=0, le=256)
    """number of sandboxes that are started in advance"""
    first_uid: int = Field(default=1_900_000_000, ge=1000, le=2**31 - 2)
    """first user id of a range for sandboxes started as root, one for each; no other user may have ids in this range"""
    cgroup: Literal["auto", "required", "off"] = "auto"
    """`required` refuses to start without cgroup v2 limits; `auto` uses them if the host delegates a cgroup"""
    cgroup_directory: str | None = None
    """a delegated cgroup v2 directory, in which the sandboxes' cgroups are created; default: the cgroup of this process"""
    cpus: float | None = Field(default=None, gt=0)
    """maximum CPUs that one sandbox may use at a time, such as 1.5; needs a cgroup"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.cgroup == "off":
            for name in ("cgroup_directory", "cpus"):
                if getattr(self, name) is not None:
                    yield Conflict(name, 'needs cgroups, which cgroup = "off" does without')


class OfferedTool(Section):
    """A tool as its server described it."""

    name: str
    """name that the server gives to it"""
    description: str
    """what the policy reads about it"""
    parameters: str
    """JSON schema of its arguments, as JSON text"""


class ToolServerSettings(Section):
    """[[tools.servers]]: a server whose tools the policy may call, by the Model Context Protocol (MCP)."""

    name: str = Field(min_length=1)
    """name of the server in messages, unique among the servers"""
    command: Array[str] = ()
    """program and arguments that talk MCP over standard input and output; the alternative is `url`"""
    url: str | None = None
    """address that talks MCP over streamable HTTP, such as http://127.0.0.1:8000/mcp"""
    use: Array[str] = ()
    """the server's tools that the policy may call; default: all"""
    rename: dict[str, str] = Field(default={})
    """other names for tools, such as `{ "get-weather" = "get_weather" }`"""
    scope: Literal["episode", "run"] = "episode"
    """how long a process or session of the server lasts; `run`: all episodes share one, which must not keep anything between
    calls"""
    env: Array[str] = ()
    """environment variables that the program gets besides HOME, LOGNAME, PATH, SHELL, TERM and USER"""
    token_env: str | None = None
    """environment variable with the bearer token for `url`; the token itself is never stored"""
    start_s: float = Field(default=60.0, gt=0)
    """maximum seconds until the server has started"""
    offers: Array[OfferedTool] | None = None
    """the tools as the server listed them when the run began, which nmoe writes into the run's config.toml; a server that lists
    others is refused"""

    def conflicts(self) -> Iterator[Conflict]:
        if (self.url is None) == (not self.command):
            yield Conflict("command", "give either the `command` that starts a server, or the `url` of one")
        if self.url is not None:
            if (fault := fault_of_urls([self.url])) is not None:
                yield Conflict("url", fault)
            elif "@" in urlsplit(self.url).netloc:
                yield Conflict("url", "contains a user or password, which records would show; use token_env")
            elif urlsplit(self.url).query:
                yield Conflict("url", "contains a query, which records would show; use token_env")
            if self.env:
                yield Conflict("env", "is for a program; the token of an address is named by token_env")
        elif self.token_env is not None:
            yield Conflict("token_env", "is for a `url`; name the variables that a program reads in `env`")
        for key, names in (("env", self.env), ("token_env", [self.token_env] if self.token_env else [])):
            for name in names:
                if not VARIABLE.fullmatch(name):
                    yield Conflict(key, "must be the name of an environment variable, not its value")
                elif name.startswith("NMOE_"):
                    yield Conflict(key, f"{name} is nmoe's own, and no server gets it")
        for name in self.rename if self.use else ():
            if name not in self.use:
                yield Conflict("rename", f"{name!r} is not among the tools of `use`")


class ToolsSettings(Section):
    """[tools]: the tools that the policy may call between its turns."""

    use: Array[str] = Field(
        default=(),
        description=f"the tools: {', '.join(TOOLS.builtin)}, or a function of your own as `package.module:function`",
    )
    servers: Array[ToolServerSettings] = ()
    """servers that have tools, as [[tools.servers]]; docs/guides/tools.md"""
    read: Array[str] | None = None
    """paths in the workspace that calls may read, `.` for all; writable paths are readable too. Default: all"""
    write: Array[str] | None = None
    """paths in the workspace that calls may write. Default: all"""

    def conflicts(self) -> Iterator[Conflict]:
        if not self.use and not self.servers:
            yield Conflict("use", "names no tool; leave [tools] out if there are none")
        yield from duplicates("servers", (server.name for server in self.servers))
        for index, name in enumerate(self.use):
            if name not in TOOLS:
                yield Conflict(f"use.{index}", TOOLS.refusal(name))
        for key, paths in (("read", self.read), ("write", self.write)):
            for index, path in enumerate(paths or ()):
                if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
                    yield Conflict(f"{key}.{index}", "must be a relative path within the workspace")
        seen: set[str] = set()
        for index, name in enumerate(name.rpartition(":")[2] for name in self.use):
            if name in seen:
                yield Conflict(f"use.{index}", f"is the second tool named {name!r}; names must be unique")
            seen.add(name)


class BudgetSettings(Section):
    """[budget]: limits on the tokens, time and memory of one trajectory."""

    completion_tokens: int | None = Field(default=None, ge=1)
    """maximum tokens sampled over all turns; default: sampling.max_new_tokens is the only limit"""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """maximum tokens of a prompt; problems with longer ones are left out and counted; default: the model's context"""
    turns: int = Field(default=16, ge=1)
    """maximum turns of the policy"""
    tool_calls: int = Field(default=16, ge=1)
    """maximum tool calls"""
    wall_s: float = Field(default=600.0, gt=0)
    """maximum seconds of the tool calls and of the simulated user's answers together; sampling does not count. Each call of a live
    environment may take as long"""
    tool_s: float = Field(default=10.0, gt=0)
    """maximum seconds of wall time per tool call, and also of CPU time"""
    tool_output_chars: int = Field(default=8192, ge=256)
    """maximum characters of a tool's output that the policy sees"""
    memory_mb: int = Field(default=512, ge=16)
    """maximum memory in MB of all processes of a tool call together"""
    processes: int = Field(default=64, ge=1)
    """maximum processes and threads of a tool call"""
    disk_mb: int = Field(default=64, ge=1)
    """maximum size in MB of the workspace and all temporary files together"""


class WorkspaceSettings(Section):
    """[workspace]: the files that each trajectory starts with, from a directory or a git commit, and whether they are kept."""

    directory: Annotated[str | None, DataPath()] = Field(default=None, min_length=1)
    """directory whose files are copied; the alternative is `repository`"""
    repository: Annotated[str | None, DataPath()] = Field(default=None, min_length=1)
    """git clone on this machine that holds the commits"""
    base_commit: str | None = Field(default=None, min_length=1)
    """commit to start from; default: base_commit of each problem's record"""
    target_commit: str | None = Field(default=None, min_length=1)
    """commit with the requested change; recorded, but not used"""
    bootstrap: Literal["none", "pip", "uv", "requirements"] = "none"
    """install into .packages beforehand: pip, uv: the project; requirements: requirements.txt"""
    bootstrap_wall_s: float = Field(default=600.0, gt=0)
    """seconds that the bootstrap may take"""
    keep: Literal["never", "failed", "always"] = "never"
    """trajectories whose files are saved at the end: never: none; failed: unsolved ones; always: all"""
    max_age_days: float = Field(default=14.0, gt=0)
    """days without use after which `nmoe env gc` removes a workspace"""
    max_disk_mb: int = Field(default=10240, gt=0)
    """disk usage above which `nmoe env gc` removes this environment's least recently used workspaces"""

    def conflicts(self) -> Iterator[Conflict]:
        if (self.directory is None) == (self.repository is None):
            yield Conflict("", "needs either directory or repository")
        for key in ("base_commit", "target_commit"):
            if self.directory is not None and getattr(self, key) is not None:
                yield Conflict(key, "a directory has no commits; name a repository instead")
