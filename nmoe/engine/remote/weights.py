"""How a learner's weights reach engine servers: through files that both see, or by a broadcast; whole, or only an adapter's."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from nmoe.engine.remote.server import CONTROL_S, EngineServer, ServerLostError
from nmoe.engine.remote.shared_memory import new_directory
from nmoe.errors import StorageError
from nmoe.model.lora import Lora
from nmoe.model.peft_format import adapter_tensors, save_adapter
from nmoe.model.shards import write_as_they_come
from nmoe.model.transformer import Transformer

Transport = Literal["disk", "group", "adapter", "delta"]
"""The way of a publication: `disk` writes all weights where servers read them, `delta` what changed of them since the last one,
`group` broadcasts them, `adapter` writes an adapter alone."""
Backend = Literal["gloo", "nccl"]
Format = Literal["hf", "nmoe"]
"""The names of tensors: Hugging Face's for vLLM, nmoe's for its own server, which stores every model."""
OnCaller = Callable[[Callable[[], Any]], Awaitable[Any]]
Hold = Callable[[EngineServer], Awaitable[None]]

# Of a file of weights: so much of them is in memory a second time while they are written.
_SHARD_BYTES = 2**30
# Of one exchange. Shorter than the deadline of a call of control, which waits for the group to form.
_GROUP_TIMEOUT = timedelta(seconds=CONTROL_S - 10)


class Source(Protocol):
    """A learner, as its weights are published."""

    model: Transformer
    lora: Lora | None

    def weights(self, format: Format) -> Iterator[tuple[str, Tensor]]: ...


@dataclass
class Update:
    """One version's weights, of `size` bytes. `info` is the body that announces them to a server. They lie in a directory, or the
    source still has them and broadcasts them; `moved` are the bytes that a server reads. `whole` writes all weights where the
    directory has only what changed."""

    version: int
    info: dict[str, Any]
    size: int
    directory: Path | None
    moved: int
    whole: Callable[[], Update] | None = None

    def discard(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass
class _Whole:
    """All weights of one update, which so many servers read or wait for."""

    written: asyncio.Future[Update]
    readers: int = 0


Written = Callable[[Iterator[tuple[str, Tensor]], int], tuple[Path, int]]
"""Writes tensors into a new directory that servers see, given the size of all weights. Returns it and the size of its files."""


def prepared(
    source: Source, format: Format, version: int, *, transport: Transport, shared: Path | None = None
) -> Update:
    """Makes ready what can be before servers pause: writes the files, or computes the digests of what will be broadcast. All ranks
    gather the weights, on the thread that trains. `shared` is the directory that servers see, too; None for this machine's
    memory."""
    names, digests, dtypes, shapes, sizes = [], [], [], [], []
    if transport == "adapter":
        assert source.lora is not None, "a run without [lora] has no adapter"
        tensors: Iterator[tuple[str, Tensor]] = iter(adapter_tensors(source.lora).items())
    else:
        tensors = source.weights(format)

    def described() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            names.append(name)
            digests.append(digest_of(tensor))
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(list(tensor.shape))
            sizes.append(tensor.nbytes)
            yield name, tensor

    info: dict[str, Any] = {"transport": transport, "names": names, "digests": digests}
    if transport == "group":
        deque(described(), maxlen=0)
        return Update(version, info | {"dtypes": dtypes, "shapes": shapes}, sum(sizes), None, sum(sizes))
    whole = sum(tensor.nbytes for tensor in source.model.state_dict().values())
    directory = new_directory(whole, shared)
    try:
        with _room(directory):
            if source.lora is not None and transport == "adapter":
                deque(described(), maxlen=0)
                save_adapter(source.lora, directory)
            else:
                write_as_they_come(directory, described(), _SHARD_BYTES)
    except BaseException:
        deque(tensors, maxlen=0)  # other ranks gather every tensor
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return Update(version, info | {"path": str(directory)}, sum(sizes), directory, sum(sizes))


def written(tensors: Iterator[tuple[str, Tensor]], size: int, shared: Path | None) -> tuple[Path, int]:
    """Writes tensors into a new directory below `shared`, as `Written` says."""
    directory = new_directory(size, shared)
    try:
        with _room(directory):
            write_as_they_come(directory, tensors, _SHARD_BYTES)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory, sum(file.stat().st_size for file in directory.iterdir())


@contextmanager
def _room(directory: Path) -> Iterator[None]:
    """Raises StorageError where weights cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(directory.parent).free
        raise StorageError(
            f"{directory}: the weights for the engines cannot be written: {error} ({free:,} bytes free there). Make room, or name "
            "another engine.shared_directory; a run goes on from its last checkpoint with --run.resume=true"
        ) from error


def digest_of(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes, in hexadecimal."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


async def _as_it_is(server: EngineServer) -> None:
    """Holds nothing back."""


def _discard(written: asyncio.Future[Update]) -> None:
    if not written.cancelled() and written.exception() is None:
        written.result().discard()


class Publisher:
    """Sends an update to servers, and knows which of them form its process group."""

    def __init__(
        self,
        source: Source,
        format: Format,
        backend: Backend,
        on_caller: OnCaller,
        *,
        workers: int = 1,
        keeps_cache: bool = False,
    ) -> None:
        """`on_caller` calls a function on the thread that trains, where collectives run. Each server has so many `workers`, the
        ranks of a group that broadcasts. With `keeps_cache`, running requests go on with the keys and values of the old weights."""
        self._source, self._format, self._backend, self._on_caller = source, format, backend, on_caller
        self._workers, self._keeps_cache = workers, keeps_cache
        self._members: list[EngineServer] = []
        self._group: Any = None
        self._ready: set[EngineServer] = set()  # servers that were prepared for updates
        self._holds: dict[EngineServer, list[str]] = {}  # the digests of the weights that each has
        self.wholes = 0  # times that a server was sent all weights
        self._whole: dict[int, _Whole] = {}  # by version: sent where a difference does not fit
        self._sending = asyncio.Lock()  # two heals would share the group

    async def send(
        self, update: Update, servers: Sequence[EngineServer], hold: Hold = _as_it_is
    ) -> dict[EngineServer, ServerLostError]:
        """Has servers take the weights of an update. Returns those that did not, with the reason. The others answer, so that their
        samples can be compared with the learner's. `hold` is awaited for each server before its weights are replaced: nmoe's
        servers sample until all tensors have come, and on; vLLM is paused from the beginning, since an update without a pause ends
        its engine."""
        failed: dict[EngineServer, ServerLostError] = {}

        async def each(act: Callable[[EngineServer], Awaitable[None]]) -> None:
            left = [server for server in servers if server not in failed]
            for server, outcome in zip(
                left, await asyncio.gather(*map(act, left), return_exceptions=True), strict=True
            ):
                if isinstance(outcome, ServerLostError):
                    failed[server] = outcome
                elif isinstance(outcome, BaseException):
                    raise outcome

        async def alone(server: EngineServer) -> None:
            await self._begin(server, hold)
            await self._point(server, update)
            await self._finish(server, update, hold)

        if update.info["transport"] != "group":
            await each(alone)
            return failed
        async with self._sending:
            await each(lambda server: self._begin(server, hold))
            await self._broadcast(update, [server for server in servers if server not in failed], failed)
            await each(lambda server: self._finish(server, update, hold))
        return failed

    async def _begin(self, server: EngineServer, hold: Hold) -> None:
        if self._format == "hf":
            await server.refuse_sleep()
            await hold(server)
            await server.control("/pause", params={"mode": "keep", "clear_cache": str(not self._keeps_cache).lower()})
        if server not in self._ready:
            await server.control("/init_weight_transfer_engine", {"init_info": {}})
            self._ready.add(server)
        await server.control("/start_weight_update")

    async def _point(self, server: EngineServer, update: Update) -> None:
        """Has a server read files: all weights, where it has others than a difference is from."""
        if update.whole is None or self._holds.pop(server, None) == update.info["bases"]:
            self.wholes += update.whole is None
            await server.control("/update_weights", {"update_info": update.info}, size=update.size)
            return
        if update.version not in self._whole:
            self._whole[update.version] = _Whole(asyncio.ensure_future(asyncio.to_thread(update.whole)))
        whole = self._whole[update.version]
        whole.readers += 1
        try:
            sent = await asyncio.shield(whole.written)
            self.wholes += 1
            await server.control("/update_weights", {"update_info": sent.info}, size=sent.size)
        finally:
            whole.readers -= 1
            if not whole.readers:
                del self._whole[update.version]
                whole.written.add_done_callback(_discard)  # written to its end, or its files would stay

    async def _finish(self, server: EngineServer, update: Update, hold: Hold) -> None:
        await hold(server)
        finish: dict[str, Any] = {"weight_version": str(update.version)}
        if self._keeps_cache and self._format == "nmoe":
            finish["keep_cache"] = True
        await server.control("/finish_weight_update", finish)
        if update.directory is not None:
            self._holds[server] = update.info["digests"]
        # nmoe's servers too: one that somebody has paused would leave its canary without an answer.
        await server.control("/resume")

    async def _broadcast(
        self, update: Update, servers: list[EngineServer], failed: dict[EngineServer, ServerLostError]
    ) -> None:
        if not servers:
            return
        try:
            if self._members != servers:
                await self._join(servers)
            posts = [
                server.control("/update_weights", {"update_info": update.info}, size=update.size) for server in servers
            ]
            outcomes = await asyncio.gather(self._on_caller(self._send_all), *posts, return_exceptions=True)
        except (RuntimeError, ServerLostError) as error:
            outcomes = [None, *(ServerLostError(f"no process group with the engines: {error}") for _ in servers)]
        sent, *answers = outcomes
        if isinstance(sent, BaseException) and not isinstance(sent, RuntimeError):
            raise sent
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, ServerLostError):
                failed[server] = answer
            elif isinstance(answer, BaseException):
                raise answer
        if failed or isinstance(sent, RuntimeError):
            self._members, self._group = [], None  # a group that lost a member hangs

    def _send_all(self) -> None:
        for _, tensor in self._source.weights(self._format):
            self._group.broadcast(tensor.detach().contiguous().to(device_of(self._backend)), 0).wait()

    async def _join(self, servers: list[EngineServer]) -> None:
        """Forms a process group of the learner, rank 0, and these servers."""
        host = _address_towards(servers[0].url)
        size = 1 + self._workers * len(servers)
        store = dist.TCPStore(host, 0, size, True, _GROUP_TIMEOUT, wait_for_workers=False)
        posts = [
            server.control(
                "/init_weight_transfer_engine",
                {
                    "init_info": {
                        "host": host,
                        "port": store.port,
                        "rank": 1 + self._workers * index,
                        "world_size": size,
                        "backend": self._backend,
                        "timeout_s": _GROUP_TIMEOUT.total_seconds(),
                    }
                },
            )
            for index, server in enumerate(servers)
        ]
        self._group, *_ = await asyncio.gather(
            self._on_caller(lambda: group_of(store, 0, size, self._backend, _GROUP_TIMEOUT)), *posts
        )
        self._members = servers


def group_of(store: dist.TCPStore, rank: int, size: int, backend: Backend, timeout: timedelta) -> Any:
    """Returns a new process group, after all of its ranks have broadcast one number. NCCL makes its communicator at the first
    collective, and hangs where kernels of another stream are under way meanwhile: later broadcasts may come beside them."""
    prefixed = dist.PrefixStore("nmoe", store)
    if backend == "gloo":
        group: Any = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        torch.cuda.synchronize()
    group.broadcast(torch.zeros(1, device=device_of(backend)), 0).wait()
    if backend == "nccl":
        torch.cuda.synchronize()
    return group


def device_of(backend: Backend) -> torch.device:
    """Returns the device of tensors that a group broadcasts."""
    return torch.device("cuda" if backend == "nccl" else "cpu")


def _address_towards(url: str) -> str:
    """Returns this machine's address on the way to a server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        address: str = probe.getsockname()[0]
        return address
