"""The launcher: a process that builds a sandbox around itself and becomes its agent.

`server` forks it with the control socket as standard input. It creates a mount namespace, mounts the sized tmpfs there, and
switches to the unprivileged uid if started as root. Then it enters the other namespaces, by bubblewrap or by itself with Landlock.
"""

from __future__ import annotations

import _socket as socket
import marshal
import os
import sys

from nmoe.sandbox.inside import agent, child, files, kernel, landlock, protocol, seccomp, watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any, NoReturn

CONTROL = 3
WORKSPACE, INSIDE_ID = "/workspace", 1000
_SCORE = "/proc/self/oom_score_adj"

# A directory that every Linux has and no sandbox shows. The parts are staged here, invisible outside, because the mount
# namespace is this process's own.
_STAGE = "/sys"
_ROOT = f"{_STAGE}/root"
# (inside, the host's). Mapping /dev/zero gives shared memory that counts in no process's size; /dev/full reads as zeros too, and
# cannot be mapped.
_DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
_DISK_DIRECTORIES = {"workspace": WORKSPACE, "tmp": "/tmp", "shm": "/dev/shm"}
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types", "ssl/certs")
_MADE = {
    "passwd": f"sandbox:x:{INSIDE_ID}:{INSIDE_ID}::{WORKSPACE}:/bin/sh\n",
    "group": f"sandbox:x:{INSIDE_ID}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
# Loaded inside from bytecode, so that this package's files need not be readable there.
_MODULES = (kernel, landlock, watch, protocol, child, files, agent)
_BOOTSTRAP = """
import marshal, os, sys
make = type(sys)
with os.fdopen({code}, "rb") as file:
    names, modules = marshal.load(file)
for name in names:
    sys.modules[name] = package = make(name)
    package.__path__ = []
    if "." in name:
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], package)
for name, code in modules:
    sys.modules[name] = module = make(name)
    exec(code, module.__dict__)
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
sys.path += {site!r}
import _socket
module.Agent(_socket.socket(fileno={control}), {workspace!r}, {readable!r}, 1, os.open({score!r}, os.O_RDWR), False).serve()
"""


def main(plan: dict[str, Any]) -> NoReturn:
    """Builds the sandbox that `plan` describes. Never returns: the process becomes the agent, or exits with code 1 and the reason
    on standard error."""
    os.dup2(0, CONTROL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        if plan["members"] is not None:
            _join(plan["members"])
        _stage(plan)
        _drop_user(plan["uid"])
        if plan["level"] == "bubblewrap":
            _enter_bubblewrap(plan)
        _enter_by_landlock(plan)
    except OSError as error:
        print(error, file=sys.stderr)
        os._exit(1)


def _join(members: str) -> None:
    """Moves this process to the cgroup whose members the file lists; its descendants start there."""
    with open(members, "wb", buffering=0) as file:
        file.write(b"0")


def _stage(plan: dict[str, Any]) -> None:
    """Creates a mount namespace with the sandbox's tmpfs, and mounts the visible files into it, some of which only this user may
    read."""
    uid, gid = os.getuid(), os.getgid()
    if uid:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        _map_ids(uid, uid, gid, gid)
    else:
        kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _STAGE, "tmpfs", kernel.MS_NOSUID, "size=1m,nr_inodes=1k,mode=755")
    owner = uid if plan["uid"] is None else plan["uid"]
    group = gid if plan["uid"] is None else plan["uid"]
    disk = f"{_STAGE}/disk"
    for directory in (disk, f"{_STAGE}/etc", _ROOT):
        os.mkdir(directory)
    size = f"size={plan['disk_mb']}m,nr_inodes={plan['inodes']},mode=700,uid={owner},gid={group}"
    kernel.mount("tmpfs", disk, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    for name in _DISK_DIRECTORIES:
        os.mkdir(f"{disk}/{name}", 0o700)
        os.chown(f"{disk}/{name}", owner, group)
    for name, text in _MADE.items():
        with open(f"{_STAGE}/etc/{name}", "w") as file:
            file.write(text)
    for index, path in enumerate(plan["visible"]):
        target = f"{_STAGE}/visible-{index}"
        _like(path, target)
        kernel.bind(path, target)


def _drop_user(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Changing the uid made /proc/self owned by root, and with it the id maps that must be written.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _shown(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (path now, path inside) of everything that is visible and read-only inside."""
    shown = [("/usr", "/usr")]
    shown += [
        (f"/{name}", f"/{name}") for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32") if _is_directory(name)
    ]
    shown += [(f"/etc/{name}", f"/etc/{name}") for name in _ETC if os.path.exists(f"/etc/{name}")]
    shown += [(f"{_STAGE}/etc/{name}", f"/etc/{name}") for name in _MADE]
    return shown + [(f"{_STAGE}/visible-{index}", path) for index, path in enumerate(plan["visible"])]


def _is_directory(name: str) -> bool:
    return os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")


def _links(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (text, path) of the symbolic links to create: the host's from / to /usr, the usual ones of /dev, and the
    interpreter's."""
    names = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
    found = [(os.readlink(f"/{name}"), f"/{name}") for name in names if os.path.islink(f"/{name}")]
    found += [(f"/proc/self/fd/{number}", f"/dev/{name}") for number, name in enumerate(("stdin", "stdout", "stderr"))]
    return [*found, ("/proc/self/fd", "/dev/fd"), *plan["links"]]


def _readable(plan: dict[str, Any]) -> list[str]:
    return [inside for _, inside in _shown(plan)]


def _enter_bubblewrap(plan: dict[str, Any]) -> NoReturn:
    arguments = [
        plan["bubblewrap"],
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    arguments += ["--unshare-cgroup-try", "--as-pid-1", "--hostname", "sandbox"]
    arguments += ["--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID)]
    for source, inside in _shown(plan):
        arguments += ["--ro-bind", source, inside]
    arguments += ["--proc", "/proc", "--size", str(1 << 20), "--tmpfs", "/dev"]
    for name, source in _DEVICES.items():
        arguments += ["--dev-bind", f"/dev/{source}", f"/dev/{name}"]
    for text, inside in _links(plan):
        arguments += ["--symlink", text, inside]
    for name, inside in _DISK_DIRECTORIES.items():
        arguments += ["--bind", f"{_STAGE}/disk/{name}", inside]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE]
    program = _file_with(seccomp.filter_program())
    code = _file_with(_CODE)
    arguments += ["--seccomp", str(program), plan["python"], "-S", "-s", "-P", "-c"]
    shown = {"workspace": WORKSPACE, "readable": _readable(plan), "site": plan["site"], "score": _SCORE}
    arguments += [_BOOTSTRAP.format(code=code, control=CONTROL, **shown)]
    os.execv(arguments[0], arguments)


def _enter_by_landlock(plan: dict[str, Any]) -> NoReturn:
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(
        kernel.CLONE_NEWUSER
        | kernel.CLONE_NEWNS
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWCGROUP
    )
    _map_ids(INSIDE_ID, uid, INSIDE_ID, gid)
    pid = os.fork()
    if pid:
        # This process stays, as the agent's parent, to report to the host how the agent ended.
        os.closerange(0, 1024)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    try:
        _build_root(plan)
        kernel.drop_capabilities()
        score = os.open(_SCORE, os.O_RDWR)
        rules = landlock.ruleset(agent.default_landlock_rules(_readable(plan)), network=True)
        landlock.restrict(rules)
        os.close(rules)
        kernel.set_seccomp_filter(seccomp.filter_program())
    except OSError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    # The interpreter stays this one, so it must forget the host's directories.
    sys.path[:] = [*sys.path[1:], *plan["site"]]
    sys.argv = [""]
    # The parent is in this user namespace too.
    agent.Agent(socket.socket(fileno=CONTROL), WORKSPACE, _readable(plan), 2, score, True).serve()


def _build_root(plan: dict[str, Any]) -> None:
    """Creates a root file system from only the directories that are visible inside, and switches to it."""
    socket.sethostname("sandbox")
    root = _ROOT
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=4k,mode=755")
    for source, inside in _shown(plan):
        _like(source, root + inside)
        kernel.bind(source, root + inside)
        kernel.restrict_mount(root + inside)
    os.mkdir(f"{root}/proc")
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", f"{root}/proc", "proc", flags)
    os.mkdir(f"{root}/dev")
    for name, source in _DEVICES.items():
        _like(f"/dev/{source}", f"{root}/dev/{name}")
        kernel.bind(f"/dev/{source}", f"{root}/dev/{name}")
    for text, inside in _links(plan):
        os.makedirs(os.path.dirname(root + inside), exist_ok=True)
        os.symlink(text, root + inside)
    for name, inside in _DISK_DIRECTORIES.items():
        os.makedirs(root + inside)
        kernel.bind(f"{_STAGE}/disk/{name}", root + inside)
        kernel.restrict_mount(root + inside, read_only=False)
    # Mounts below keep their own flags.
    kernel.restrict_mount(root, recursive=False)
    kernel.pivot_root(root)
    os.chdir(WORKSPACE)


def _map_ids(inside_uid: int, uid: int, inside_gid: int, gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside_uid} {uid} 1"),
        ("gid_map", f"{inside_gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _like(source: str, target: str) -> None:
    """Creates an empty directory or file at `target`, as a mount point for `source`."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))


def _file_with(data: bytes) -> int:
    """Returns an inheritable descriptor from which `data` can be read."""
    descriptor = os.memfd_create("nmoe-sandbox", 0)
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _compiled(modules: Sequence[ModuleType]) -> bytes:
    """Returns the packages' names and the modules' bytecode, marshalled for `_BOOTSTRAP`."""
    names = sorted({".".join(module.__name__.split(".")[:depth]) for module in modules for depth in range(1, 5)})
    code = [(module.__name__, module.__spec__.loader.get_code(module.__name__)) for module in modules]  # type: ignore
    return marshal.dumps((names, code))


_CODE = _compiled(_MODULES)
