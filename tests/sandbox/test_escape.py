"""Attempts to leave a sandbox, or to leave something behind, on both levels: all contained, the host as it was.

Acts that one system call decides are in attempts.py; here are those that take a program.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import ATTEMPTS, PRELUDE, Attempt
from boxes import LIMITS, Box

from nmoe.sandbox.api import Result
from nmoe.sandbox.inside import seccomp
from nmoe.sandbox.sandboxes import Sandboxes

# A time to sleep that no other run of these tests has.
SLEEP = 900_000_000 + os.getpid()
NAMES = tuple(attempt.name for attempt in ATTEMPTS)
only_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the attempts name system calls of x86_64 by number"
)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What the host offers to be reached, as assignments."""
    # Readable by everybody, so that it is not the directory's mode which protects it.
    host = tmp_path_factory.mktemp("host") / "open"
    host.mkdir()
    for path in (host, host.parent, host.parent.parent):
        path.chmod(0o755)
    (host / "secret").write_text("secret")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as stream,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
    ):
        udp.bind(("127.0.0.1", 0))
        name = f"nmoe-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        stream.bind(str(host / "stream"))
        datagram.bind(str(host / "datagram"))
        for one in (abstract, stream):
            one.listen(64)
        yield (
            f"HOST, PORT, UDP = {str(host)!r}, {tcp.getsockname()[1]}, {udp.getsockname()[1]}\n"
            f"ABSTRACT, PID = {name!r}, {os.getpid()}\n"
        )


def program(attempt: Attempt, target: str) -> str:
    return f"{PRELUDE}{target}attempt({attempt.code!r})"


@only_x86
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=NAMES)
def test_refused(shared_box: Box, attempt: Attempt, target: str) -> None:
    result = shared_box(shared_box.sandbox.python(program(attempt, target)))
    assert result.stdout.decode().strip() in attempt.errors, result
    assert (result.failure, result.exit_code) == ("ok", 0)


@only_x86
@pytest.mark.skipif(os.getuid() != 0, reason="not root: some of the attempts are refused outside a sandbox too")
@pytest.mark.parametrize(
    "attempt",
    [one for one in ATTEMPTS if one.outside],
    ids=[one.name for one in ATTEMPTS if one.outside],
)
def test_it_is_the_sandbox_that_refuses(
    attempt: Attempt, target: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program(attempt, target)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        cwd=tmp_path_factory.mktemp("outside"),
    )
    assert found.stdout.strip() == attempt.outside, found.stderr


def test_there_are_enough_of_them() -> None:
    assert len(ATTEMPTS) >= 40
    assert len(set(NAMES)) == len(NAMES)


def python(box: Box, code: str, **limits: float) -> Result:
    return box(box.sandbox.python(code, limits=replace(LIMITS, **limits)))


def alive(box: Box) -> None:
    """The sandbox still answers, nothing but its agent lives in it, and the child asked is the only one."""
    code = "import os; print([name for name in os.listdir('/proc') if name.isdigit() and name not in ('1', str(os.getpid()))])"
    assert box(box.sandbox.python(code)).stdout == b"[]\n"


@only_x86
def test_32_bit_calls_end_the_process(box: Box) -> None:
    """`int 0x80` reaches another table of calls, for which the filter's numbers mean something else."""
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    inside = python(box, code)
    assert (inside.failure, inside.exit_code) == ("sandbox_denied", -signal.SIGSYS)
    if outside.returncode == 0:  # a kernel without 32-bit calls refuses by itself
        assert int(outside.stdout) > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGSEGV])
def test_signals_to_the_agent_are_lost(box: Box, number: int) -> None:
    code = f"import os; os.kill(1, {int(number)}); os.kill(os.getppid(), {int(number)}); print('sent')"
    assert python(box, code).stdout == b"sent\n"
    alive(box)


def test_killing_everything_kills_itself_alone(box: Box) -> None:
    assert python(box, "import os; os.kill(-1, 9); print('left')").failure in ("ok", "nonzero_exit")
    alive(box)


def test_stopping_oneself_ends_at_the_deadline(box: Box) -> None:
    began = time.monotonic()
    assert python(box, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", wall_s=0.3).failure == "timeout"
    assert time.monotonic() - began < 2
    alive(box)


def test_signals_ignored_do_not_help(box: Box) -> None:
    code = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
"""
    assert python(box, code + "while True: pass", wall_s=0.3).failure == "timeout"
    assert python(box, code + "while True: pass", cpu_s=0.3).failure == "timeout"
    alive(box)


def test_fork_bomb(box: Box) -> None:
    result = python(box, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", wall_s=0.5)
    assert result.failure in ("timeout", "out_of_memory")
    alive(box)
    assert box(box.sandbox.bash("f() { f | f & }; f; sleep 5", limits=replace(LIMITS, wall_s=0.5))).failure in (
        "timeout",
        "ok",
    )
    alive(box)


@pytest.mark.parametrize(
    "start",
    [
        "if os.fork() == 0: time.sleep(60)",
        "import threading; threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
    ],
)
def test_processes_and_threads_are_counted(box: Box, start: str) -> None:
    code = f"""
import os, time
started = 0
try:
    while True:
        {start}
        started += 1
except (OSError, RuntimeError):
    print(started, flush=True)
    os._exit(0)
"""
    assert int(python(box, code, processes=10).stdout) == 9, "the first is the one that asked"
    alive(box)


def test_daemons_die_with_their_call(box: Box) -> None:
    code = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    for number in range(3):
        os.close(number)
    while True:
        with open("/workspace/beat", "w") as file:
            file.write(str(time.monotonic()))
        time.sleep(0.01)
time.sleep(0.1)
"""
    began = time.monotonic()
    assert python(box, code).failure == "ok"
    assert time.monotonic() - began < 2, "it was not waited for"
    first = box(box.sandbox.read("beat"))
    time.sleep(0.1)
    assert box(box.sandbox.read("beat")) == first
    alive(box)
    box(box.sandbox.bash("setsid nohup sleep 4321 > /dev/null 2>&1 & disown; (sleep 4321 &)"))
    alive(box)


FILL = """
import os, socket, time
def fill(one):
    one.setblocking(False)
    try:
        while True: one.send(bytes(1 << 16))
    except BlockingIOError: pass
"""
SOCKETS = f"""{FILL}
for _ in range(20):
    if os.fork() == 0: break
keep = []
try:
    while True:
        keep.append(socket.socketpair())
        for one in keep[-1]: fill(one)
except OSError: time.sleep(60)
"""
# Nobody accepts, and whoever wrote is gone: the descriptors of one process hold them all.
BACKLOG = f"""{FILL}
server = socket.socket(socket.AF_UNIX)
server.bind("/tmp/server")
server.listen(4096)
while True:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(1)
        one.connect("/tmp/server")
        fill(one)
"""


@pytest.mark.parametrize(
    "hoard",
    [
        "keep = [bytearray(b'x') * (8 << 20) for _ in range(1 << 20)]",
        "import mmap\nkeep = []\nwhile True:\n    keep.append(mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE))\n"
        "    keep[-1].write(b'x' * (8 << 20))",
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0: keep = b'x' * (40 << 20); time.sleep(60)\ntime.sleep(60)",
        SOCKETS,
        BACKLOG,
    ],
    ids=["heap", "maps", "many processes", "sockets", "backlog"],
)
def test_memory_is_that_of_the_tree(box: Box, hoard: str) -> None:
    before = available_mb()
    lowest = before

    async def watched() -> Result:
        nonlocal lowest
        call = asyncio.create_task(box.sandbox.python(hoard, limits=replace(LIMITS, wall_s=20.0)))
        while not call.done():
            await asyncio.sleep(0.01)
            lowest = min(lowest, available_mb())
        return await call

    assert box(watched()).failure in ("out_of_memory", "timeout")
    assert before - lowest < 128 + 1500, "of gigabytes asked for, no more was had than the limit and what 20 ms can add"
    alive(box)


def test_a_hundred_sockets_are_no_hoard(box: Box) -> None:
    assert (
        python(box, "import socket\nkeep = [socket.socketpair() for _ in range(50)]\nprint(len(keep))").stdout
        == b"50\n"
    )


def test_sharing_is_not_counted_twice(box: Box) -> None:
    """Eight processes that share 60 MB use 60 MB, and the limit is 128."""
    code = """
import os, time
keep = b"x" * (60 << 20)
for _ in range(8):
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
time.sleep(0.3)
print("done")
"""
    assert python(box, code).stdout == b"done\n"


def available_mb() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) // 1024


def test_ten_gigabytes_at_once(box: Box) -> None:
    assert python(box, "bytearray(10 << 30)").failure == "out_of_memory"
    assert python(box, "import mmap; mmap.mmap(-1, 10 << 30, mmap.MAP_PRIVATE)").failure != "ok"


def test_memory_that_was_unmapped_is_not_kept(box: Box) -> None:
    """Pages of shared memory without a file stay when nothing maps them, so that no process's size shows them."""
    code = """
import ctypes, mmap
shared = mmap.mmap(-1, 1 << 20)
libc = ctypes.CDLL(None)
libc.madvise(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(shared))), 1 << 20, mmap.MADV_DONTNEED)
"""
    assert python(box, code).failure == "sandbox_denied"
    zeros = python(box, "print(open('/dev/zero', 'rb').read(5)); open('/dev/zero', 'wb').close()")
    assert zeros.stdout == b"b'" + rb"\x00" * 5 + b"'\n"


SPINNING = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.{disposition})
for _ in range({children}):
    if os.fork() == 0:
        while time.process_time() < {seconds}: pass
        os._exit(0)
    try:
        while True: os.wait()
    except OSError: pass
"""


# What is seen of ignored children depends on how often the agent gets to look; test_load.py has it on written figures.
@pytest.mark.parametrize("disposition", [pytest.param("SIG_IGN", marks=pytest.mark.long), "SIG_DFL"])
@pytest.mark.parametrize(("children", "seconds"), [(5, 0.05), (30, 0.008)])
def test_cpu_time_of_children_counts_whoever_waits(box: Box, disposition: str, children: int, seconds: float) -> None:
    """The times of a child that its parent ignores are in no process's times."""
    result = python(box, SPINNING.format(disposition=disposition, children=children, seconds=seconds))
    assert result.failure == "ok"
    used = children * seconds
    least = 0.9 if disposition == "SIG_DFL" else 0.4
    assert least * used < result.cpu_s < 1.5 * used + 0.2


def test_cpu_time_of_ignored_children_is_limited(box: Box) -> None:
    result = python(box, SPINNING.format(disposition="SIG_IGN", children=99, seconds=0.05), cpu_s=0.3)
    assert result.failure == "timeout"
    assert result.cpu_s < 0.5


def test_cpu_time_of_one_process_ends_as_timeout(box: Box) -> None:
    """Its own limit, in whole seconds, is later than the watch: the kernel would kill it without a word."""
    result = python(box, "while True: pass", cpu_s=0.3)
    assert (result.failure, result.exit_code) == ("timeout", None)
    assert 0.3 <= result.cpu_s < 0.6
    for cpu_s, own in ((0.5, (2, 3)), (2.0, (3, 4)), (10.0, (11, 12)), (10.5, (12, 13))):
        limits = python(box, "import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", cpu_s=cpu_s)
        assert limits.stdout.decode() == f"{own}\n"


@pytest.mark.parametrize("directory", ["/workspace", "/tmp", "/dev/shm"])
def test_one_disk_for_all_that_is_writable(box: Box, directory: str) -> None:
    code = f"""
import os
written = 0
try:
    for number in range(100):
        with open(f"{directory}/fill{{number}}", "wb", buffering=0) as file:
            for _ in range(6):
                written += file.write(bytes(1 << 20))
except OSError as error:
    print(written, error.errno)
"""
    written, number = python(box, code).stdout.split()
    assert 15 << 20 < int(written) <= 16 << 20
    assert int(number) == 28
    full = python(box, "open('/workspace/more', 'wb').write(bytes(1 << 16))")
    assert full.failure == "disk_full"


def test_files_deleted_and_still_open_count(box: Box) -> None:
    code = """
import os
keep = []
try:
    for number in range(100):
        keep.append(open("/tmp/x", "wb", buffering=0))
        os.unlink("/tmp/x")
        for _ in range(6):
            keep[-1].write(bytes(1 << 20))
except OSError as error:
    print(len(keep), error.errno)
"""
    assert python(box, code).stdout == b"3 28\n"
    assert python(box, "open('/workspace/more', 'wb').write(bytes(1 << 23))").failure == "ok", "freed with the call"


def test_a_sparse_file_is_not_larger_than_a_file_may_be(box: Box) -> None:
    assert python(box, "open('/tmp/x', 'wb').truncate(1 << 40)").failure == "disk_full"


def test_files_are_counted(box: Box) -> None:
    code = """
made = 0
try:
    while True:
        open(f"/tmp/{made}", "x").close()
        made += 1
except OSError as error:
    print(made, error.errno)
"""
    made, number = python(box, code).stdout.split()
    assert int(number) == 28
    assert int(made) <= 16 * 256


@pytest.mark.parametrize("stream", [1, 2])
def test_a_gigabyte_of_output(box: Box, stream: int) -> None:
    began, before = time.monotonic(), resident_mb()
    result = python(box, f"import os\nfor _ in range(1 << 14): os.write({stream}, bytes(1 << 16))")
    assert result.failure == "output_limit"
    assert len(result.stdout) + len(result.stderr) == 64 * 1024
    assert time.monotonic() - began < 2
    assert resident_mb() - before < 8


def resident_mb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_output_of_orphans_does_not_hold_the_call(box: Box) -> None:
    began = time.monotonic()
    assert box(box.sandbox.bash("(while :; do sleep 0.01; done) & echo done")).stdout == b"done\n"
    assert time.monotonic() - began < 2


def test_descriptors_are_its_own(sandboxes: Sandboxes, loop: asyncio.Runner, tmp_path: Path) -> None:
    """Those of the host that are open when a sandbox starts, even inheritable ones, are not inside, and the agent's are not
    the child's: only its three streams, and the pipe by which it says how it ended."""
    with (tmp_path / "secret").open("w+") as secret:
        os.set_inheritable(secret.fileno(), True)

        async def check() -> Result:
            async with await sandboxes.open() as sandbox:
                return await sandbox.python(
                    "import os\n"
                    "for n in range(1024):\n"
                    "    try: os.fstat(n)\n"
                    "    except OSError: continue\n"
                    "    print(n, os.readlink(f'/proc/self/fd/{n}').partition(':')[0])"
                )

        assert loop.run(check()).stdout.decode().splitlines() == ["0 /dev/null", "1 pipe", "2 pipe", "4 pipe"]


def test_commands_have_three_descriptors(box: Box) -> None:
    assert box(box.sandbox.run(["ls", "/proc/self/fd"])).stdout == b"0\n1\n2\n3\n", "3 is ls's own, for the directory"


def test_a_lie_about_the_end_names_it_and_nothing_more(box: Box) -> None:
    lie = python(
        box, "import os; os.write(4, b'out_of_memory\\n/etc/../etc\\nengine_error\\n' + b'x' * 9000); os._exit(0)"
    )
    assert (lie.failure, lie.exit_code) == ("out_of_memory", 0)
    endless = python(box, "import os\nwhile True: os.write(4, b'x' * 4096)", wall_s=0.3)
    assert endless.failure == "timeout"
    alive(box)


SECRETS = {
    "NMOE_TEST_TOKEN": "hunter2",
    "LD_PRELOAD": "/nowhere/evil.so",
    "PYTHONPATH": "/nowhere",
    "PYTHONSTARTUP": "/nowhere",
}


def test_nothing_of_the_environment(
    sandboxes: Sandboxes, loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)

    async def check() -> tuple[Result, Result]:
        async with await sandboxes.open() as sandbox:
            by_python = await sandbox.python("import os, sys; print(sorted(os.environ), sys.path)")
            return by_python, await sandbox.bash("env; cat /proc/self/environ")

    by_python, by_bash = loop.run(check())
    assert (
        b"['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'PATH', 'PYTHONDONTWRITEBYTECODE', 'PYTHONHASHSEED', 'TMPDIR'"
        in by_python.stdout
    )
    for result in (by_python, by_bash):
        assert result.failure == "ok"
        for text in (*SECRETS, *SECRETS.values()):
            assert text.encode() not in result.stdout


def test_it_is_nobody(box: Box) -> None:
    code = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(os.getresuid(), [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")])
print(int(status["NoNewPrivs"]), int(status["Seccomp"]), len(open("/proc/self/mountinfo").readlines()) < 40)
print(sorted({bool(os.statvfs(path).f_flag & os.ST_NOSUID) for path in ("/", "/usr", "/tmp", "/workspace", "/dev/shm", "/proc")}))
print([bool(os.statvfs(path).f_flag & os.ST_RDONLY) for path in ("/", "/usr", "/etc", "/dev")])
"""
    assert python(box, code).stdout.decode().splitlines() == [
        "(1000, 1000, 1000) [0, 0, 0, 0, 0]",
        "1 2 True",
        "[True]",
        "[True, True, True, True]",
    ]


def test_programs_that_would_change_the_user(box: Box) -> None:
    """A copy of a shell with the set-user-id bit, and those of the system."""
    script = "cp /bin/bash own; chmod 4755 own; ./own -p -c 'id -u'; for p in su mount passwd; do command -v $p; done"
    assert box(box.sandbox.bash(script)).stdout.decode().splitlines()[0] == "1000"
    assert box(box.sandbox.run(["su", "-c", "id -u"])).exit_code != 0


def test_nothing_of_the_host_in_proc(box: Box) -> None:
    code = "import glob\nfor path in glob.glob('/proc/[0-9]*/cmdline'): print(open(path).read())"
    shown = python(box, code).stdout
    assert b"pytest" not in shown
    assert python(box, "import os; print(os.getpid() < 1000)").stdout == b"True\n"


@pytest.mark.parametrize("stop", ["os.abort()", "os.kill(os.getpid(), 11)", "ctypes.string_at(0)"])
def test_no_core_dumps(box: Box, stop: str) -> None:
    code = f"""
import ctypes, os, resource
try:
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))
except ValueError:
    {stop}
"""
    assert python(box, code).exit_code in (-6, -11)
    assert box(box.sandbox.bash("ls -A /workspace /tmp")).stdout == b"/tmp:\n\n/workspace:\n"


def test_changing_the_zygote_is_changing_a_copy(box: Box) -> None:
    code = """
import gc, sys
for one in gc.get_objects():
    if isinstance(one, dict) and "Agent" in one:
        one.clear()
for module in list(sys.modules.values()):
    vars(module).pop("python", None)
"""
    python(box, code)
    assert python(box, "print('still')").stdout == b"still\n"


def test_what_the_agent_holds_is_no_secret(sandboxes: Sandboxes, loop: asyncio.Runner) -> None:
    """A child is a copy of the agent: of earlier calls it may find what they said, of other sandboxes and the host nothing."""
    marker = "".join(["mar", "ker-of-", "another"])

    async def check() -> Result:
        async with await sandboxes.open() as other, await sandboxes.open() as sandbox:
            await other.python(f"print({marker!r})")
            await other.write("file", marker.encode())
            code = """
def found():
    with open("/proc/self/mem", "rb", 0) as memory:
        for line in open("/proc/self/maps"):
            first, last = (int(one, 16) for one in line.split()[0].split("-"))
            if "r" in line.split()[1] and "[v" not in line:
                memory.seek(first)
                data = memory.read(last - first)
                # In two halves: the whole would be found where it is looked for.
                at = data.find(b"mar")
                while at >= 0:
                    if data[at + 3 : at + 17] == b"ker-of-another":
                        return True
                    at = data.find(b"mar", at + 1)
    return False
print(found())
kept = "".join(["mar", "ker-of-", "another"])
print(found())
"""
            return await sandbox.python(code, limits=replace(LIMITS, memory_mb=512))

    assert loop.run(check()).stdout == b"False\nTrue\n"


def test_a_directory_deeper_than_paths_can_say(box: Box) -> None:
    code = """
import os
for _ in range(600):
    os.mkdir("a" * 50)
    os.chdir("a" * 50)
"""
    assert python(box, code).failure in ("ok", "nonzero_exit")
    alive(box)
    assert box(box.sandbox.bash("pwd | wc -c")).failure == "ok"


def test_names_that_are_no_text(box: Box) -> None:
    assert box(box.sandbox.bash(r"mkdir $'bad\xff\nname'; cd $'bad\xff\nname'; touch $'\n/etc'; pwd")).failure == "ok"
    assert box(box.sandbox.run(["pwd"])).failure == "ok"
    alive(box)


def test_a_time_bomb_does_not_go_off(box: Box) -> None:
    code = """
import os, signal, time
signal.alarm(1)
if os.fork() == 0:
    os.setsid()
    time.sleep(0.3)
    open("/workspace/bomb", "w")
"""
    assert python(box, code).failure == "ok"
    time.sleep(0.5)
    assert box(box.sandbox.bash("ls -A")).stdout == b""


def test_the_filter_says_what_the_kernel_headers_say() -> None:
    """The numbers, against the headers of both machines where they are installed."""
    for column, header in enumerate(("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")):
        path = Path("/usr/include", header)
        if not path.exists():
            continue
        known = {}
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 3 and words[0] == "#define" and words[2].isdigit():
                for prefix in ("__NR_", "__NR3264_"):
                    if words[1].startswith(prefix):
                        known[words[1].removeprefix(prefix)] = int(words[2])
        assert len(known) > 200
        for name, numbers in seccomp.DENIED.items():
            if name in known:
                assert numbers[column] == known[name], name


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def test_nothing_is_left(sandboxes: Sandboxes) -> None:
    """After sandboxes that were left in every way: no process, no mount, no file, no uid, no descriptor, no shared memory."""

    locks: list[bytes] = []

    def host() -> tuple[object, ...]:
        return mounts(), len(os.listdir("/proc/self/fd")), os.uname().nodename

    def shared() -> set[str]:
        """Files and segments, also of tests that run beside this one."""
        temporary = {name for name in os.listdir("/tmp") if name.startswith("nmoe-probe")}
        return temporary | {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}

    async def leave() -> None:
        opened = [await sandboxes.open() for _ in range(4)]
        locks.extend(one._uid_lock.getsockname() for one in opened if one._uid_lock is not None)
        await opened[0].bash("setsid sleep 999 & cat /dev/zero | head -c 9000000 > /tmp/x")
        running = asyncio.create_task(opened[1].bash("sleep 999"))
        await asyncio.sleep(0.05)
        running.cancel()
        await opened[2].python("import os; os.kill(-1, 9)")
        await asyncio.gather(running, return_exceptions=True)
        for one in opened:
            await one.close()
            await one.close()

    before, shared_before = host(), shared()
    asyncio.run(leave())
    assert host() == before
    end = time.monotonic() + 10  # in which others' end
    while (left := shared() - shared_before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
    assert len(set(locks)) == (4 if os.getuid() == 0 else 0)
    for lock in locks:
        uid = int(lock.rpartition(b"-")[2])
        assert uid not in {status.st_uid for status in map(_status, os.listdir("/proc")) if status is not None}
        with socket.socket(socket.AF_UNIX) as again:
            again.bind(lock)


def _status(name: str) -> os.stat_result | None:
    try:
        return os.stat(f"/proc/{name}") if name.isdigit() else None
    except OSError:
        return None


def test_a_host_that_is_killed_leaves_nothing(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """`kill -9` of the process that holds sandboxes, in the middle of calls: within a second nothing of them runs."""
    code = f"""
import asyncio, sys
from nmoe.config.tables.rollout import SandboxSettings
from nmoe.sandbox.sandboxes import Sandboxes
async def main():
    factory = Sandboxes(SandboxSettings(level={sandboxes.settings.level!r}, warm=1))
    opened = [await factory.open() for _ in range(2)]
    print("open", flush=True)
    await asyncio.gather(*(one.bash("setsid sleep {SLEEP} & sleep {SLEEP}") for one in opened))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"open\n"
        deadline = time.monotonic() + 5
        while len(sleepers()) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(sleepers()) == 4
        host.kill()
    deadline = time.monotonic() + 5
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sleepers() == []


def sleepers() -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if line == f"sleep\0{SLEEP}\0".encode():
                found.append(name)
    return found
