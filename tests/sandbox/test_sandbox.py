"""What a sandbox does for those who use it well: calls, limits and their names, files, the directory that calls share, and ends."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from boxes import LEVELS, LIMITS, Box, sandboxes_of

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.errors import UserError
from nmoe.sandbox import probe
from nmoe.sandbox import sandboxes as factory_module
from nmoe.sandbox.api import Access, SandboxFileError, SandboxSetupError
from nmoe.sandbox.inside import kernel
from nmoe.sandbox.sandboxes import Sandboxes


def test_python_prints(box: Box) -> None:
    result = box(box.sandbox.python("print(1)"))
    assert (result.failure, result.exit_code, result.stdout, result.stderr) == ("ok", 0, b"1\n", b"")
    assert 0 < result.wall_s < 5


def test_each_python_call_finds_a_fresh_interpreter(box: Box) -> None:
    box(box.sandbox.python("import builtins, json; builtins.print = None; json.loads = None; leaked = 1"))
    result = box(box.sandbox.python("import json; print(json.loads('[1]'), 'leaked' in globals(), __name__)"))
    assert result.stdout == b"[1] False __main__\n"


def test_an_exception_shows_its_own_lines_alone(box: Box) -> None:
    result = box(box.sandbox.python("def f():\n    return 1 / 0\nf()\n"))
    assert (result.failure, result.exit_code) == ("nonzero_exit", 1)
    assert result.stderr.decode().splitlines() == [
        "Traceback (most recent call last):",
        '  File "<python>", line 3, in <module>',
        "    f()",
        '  File "<python>", line 2, in f',
        "    return 1 / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(
    ("code", "failure", "exit_code"),
    [
        ("raise SystemExit", "ok", 0),
        ("import sys; sys.exit(3)", "nonzero_exit", 3),
        ("import os; os._exit(4)", "nonzero_exit", 4),
        ("import os; os.kill(os.getpid(), 11)", "nonzero_exit", -11),
        ("syntax error", "nonzero_exit", 1),
        ("while True: pass", "timeout", None),
        ("import time; time.sleep(60)", "timeout", None),
        ("bytearray(10 << 30)", "out_of_memory", 1),
        ("import time\nhoard = [b'x' * (1 << 20) for _ in range(200)]\ntime.sleep(60)", "out_of_memory", None),
        ("while True: print('x' * 1000)", "output_limit", None),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", "disk_full", 1),
        (
            "for n in range(4):\n    f = open(f'big{n}', 'wb')\n    for _ in range(6): f.write(bytes(1 << 20))",
            "disk_full",
            1,
        ),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "sandbox_denied", 1),
        ("open('/usr/x', 'w')", "sandbox_denied", 1),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", "ok", 0),
    ],
)
def test_every_end_has_its_name(box: Box, code: str, failure: str, exit_code: int | None) -> None:
    limits = replace(LIMITS, wall_s=0.5) if failure == "timeout" else None
    result = box(box.sandbox.python(code, limits=limits))
    assert (result.failure, result.exit_code) == (failure, exit_code), result
    assert box(box.sandbox.python("print(2)")).stdout == b"2\n", "the sandbox lives on"


@pytest.mark.parametrize(
    ("script", "failure", "exit_code"),
    [
        ("exit 0", "ok", 0),
        ("exit 5", "nonzero_exit", 5),
        ("kill -9 $$", "nonzero_exit", -9),
        ("sleep 60", "timeout", None),
        ("yes", "output_limit", None),
        ("head -c 100000000 /dev/zero > big", "disk_full", -25),
        ("for n in 1 2 3 4; do head -c 6000000 /dev/zero > big$n || exit 9; done", "disk_full", 9),
    ],
)
def test_ends_of_commands(box: Box, script: str, failure: str, exit_code: int | None) -> None:
    result = box(box.sandbox.run(["sh", "-c", script], limits=replace(LIMITS, wall_s=0.5)))
    if exit_code == -25 and result.exit_code != exit_code:
        exit_code = 128 + 25  # a shell that does not replace itself by the command
    assert (result.failure, result.exit_code) == (failure, exit_code), result


def test_a_command_that_is_not_there(box: Box) -> None:
    result = box(box.sandbox.run(["no-such-command"]))
    assert (result.failure, result.exit_code, result.stderr) == (
        "command_not_found",
        127,
        b"no-such-command: command not found\n",
    )
    box(box.sandbox.write("plain", b"no program"))
    assert box(box.sandbox.run(["./plain"])).exit_code == 126


def test_cpu_time_is_that_of_the_whole_tree(box: Box) -> None:
    began = time.monotonic()
    script = "for n in 1 2 3 4; do (while :; do :; done) & done; wait"
    result = box(box.sandbox.bash(script, limits=replace(LIMITS, cpu_s=0.3)))
    assert result.failure == "timeout"
    assert time.monotonic() - began < 5, "long before the ten seconds of the wall clock"


@pytest.mark.parametrize("level", LEVELS)
def test_cpu_time_counts_as_that_of_the_programs_children(
    level: Literal["bubblewrap", "landlock"], loop: asyncio.Runner
) -> None:
    opened = sandboxes_of(level)
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    async def spin() -> None:
        sandbox = await opened.open()
        code = "import time\nwhile time.process_time() < 1: pass"
        assert (await sandbox.python(code, limits=replace(LIMITS, wall_s=120.0))).failure == "ok"
        await sandbox.close()
        await opened.close()

    loop.run(spin())
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before > 0.95


def test_output_is_kept_up_to_the_limit(box: Box) -> None:
    exact = box(box.sandbox.python(f"import sys; sys.stdout.write('x' * {64 * 1024})"))
    assert (exact.failure, exact.stdout) == ("ok", b"x" * 64 * 1024)
    over = box(box.sandbox.python(f"import sys; sys.stdout.write('x' * {64 * 1024 + 1})"))
    assert (over.failure, over.exit_code, over.stdout) == ("output_limit", None, b"x" * 64 * 1024)
    both = box(box.sandbox.bash("head -c 40000 /dev/zero; head -c 40000 /dev/zero >&2"))
    assert both.failure == "output_limit"
    assert len(both.stdout) + len(both.stderr) == 64 * 1024


def test_bytes_come_and_go_as_they_are(box: Box) -> None:
    data = bytes(range(256)) * 100
    assert box(box.sandbox.run(["cat"], stdin=data)).stdout == data
    assert box(box.sandbox.run(["true"], stdin=bytes(1 << 20))).failure == "ok", "a command need not read its input"


def test_the_directory_is_inherited(box: Box) -> None:
    assert box(box.sandbox.bash("mkdir -p a/b && cd a")).failure == "ok"
    assert box(box.sandbox.run(["pwd"])).stdout == b"/workspace/a\n"
    assert box(box.sandbox.bash("cd b; exit 3")).exit_code == 3
    assert box(box.sandbox.python("import os; print(os.getcwd()); os.chdir('..')")).stdout == b"/workspace/a/b\n"
    assert box(box.sandbox.run(["pwd"], cwd="b")).stdout == b"/workspace/a/b\n"
    assert box(box.sandbox.bash("pwd; cd /workspace; rm -r a; mkdir c; cd c; rmdir ../c")).stdout == b"/workspace/a/b\n"
    assert box(box.sandbox.run(["pwd"])).stdout == b"/workspace\n", "a directory that is gone is left"


def test_scripts_have_the_same_interpreter(box: Box) -> None:
    show = "import sys; print(sys.version, sys.prefix)"
    assert box(box.sandbox.bash(f"python3 -c '{show}'")).stdout == box(box.sandbox.python(show)).stdout


def test_a_python_call_imports_from_its_directory(box: Box) -> None:
    box(box.sandbox.write("helper.py", b"x = 7"))
    assert box(box.sandbox.python("import helper; print(helper.x)")).stdout == b"7\n"


def test_files(box: Box) -> None:
    box(box.sandbox.write("a/b/c.txt", b"one\x00two"))
    assert box(box.sandbox.read("a/b/c.txt")) == b"one\x00two"
    box(box.sandbox.write("/workspace/a/b/c.txt", b"short"))
    assert box(box.sandbox.read("/workspace/a/b/c.txt")) == b"short"
    assert box(box.sandbox.bash("cat a/b/c.txt")).stdout == b"short"


@pytest.mark.parametrize(
    "content", [b"", b"one", b"one\n", b"\n\n", b"one\ntwo\r\n\nfour", b"x\n" * 70_000 + b"y" * 70_000]
)
def test_lines_of_a_file(box: Box, content: bytes) -> None:
    box(box.sandbox.write("a.txt", content))
    lines = content.splitlines(True)

    async def read(first: int, count: int) -> bytes:
        roomy = replace(LIMITS, output_kb=1024)
        try:
            return (await box.sandbox.read_lines("a.txt", first, count, limits=roomy)).stdout
        except SandboxFileError as error:
            return str(error).encode()

    for first in (1, 2, 3, len(lines), len(lines) + 1, 10**30):
        for count in (1, 2, 10**30) if first else ():
            wanted = b"".join(lines[first - 1 :][:count])
            if lines and first > len(lines):
                wanted = f"a.txt has {len(lines)} lines, none from {first} on".encode()
            assert box(read(first, count)) == wanted, (first, count)


def test_reading_lines_is_bounded(box: Box) -> None:
    """Seven megabytes of short lines: neither the sandbox nor who asks holds more of them than the limit of the output."""
    box(box.sandbox.bash("yes | head -c 7000000 > short"))
    result = box(box.sandbox.read_lines("short", 1, 10**9, limits=replace(LIMITS, memory_mb=40)))
    assert (result.failure, len(result.stdout)) == ("output_limit", 64 * 1024)
    assert box(box.sandbox.read_lines("short", 3_499_999, 5)).stdout == b"y\ny\n"


def test_a_piece_of_a_file_is_replaced_where_it_lies(box: Box) -> None:
    box(box.sandbox.write("a.txt", b"one two three two"))
    for old, times in ((b"two", 2), (b"four", 0)):
        with pytest.raises(SandboxFileError, match=f"the text stands {times} times in a.txt, not once"):
            box(box.sandbox.edit("a.txt", old, b"2"))
    for old, new, content in ((b"one", b"first", b"first two three two"), (b" three two", b"", b"first two")):
        box(box.sandbox.edit("a.txt", old, new))
        assert box(box.sandbox.read("a.txt")) == content


def test_a_path_is_not_cut_at_a_null_byte(box: Box) -> None:
    box(box.sandbox.write("a.txt", b"one"))
    for work in (
        lambda: box.sandbox.read("a.txt\0.png"),
        lambda: box.sandbox.read_lines("a.txt\0.png", 1, 1),
        lambda: box.sandbox.edit("a.txt\0.png", b"one", b"two"),
        lambda: box.sandbox.write("a.txt\0.png", b"two"),
        lambda: box.sandbox.write("new\0/b.txt", b"two"),
    ):
        with pytest.raises(SandboxFileError, match="a path has no null byte") as caught:
            box(work())
        assert caught.value.failure == "tool_error"
    assert box(box.sandbox.bash("ls; cat a.txt")).stdout == b"a.txt\none"


LINKS = """
ln -s /etc/passwd link; ln -s / root; ln -s a dir; mkdir a; echo x > a/file; mkfifo fifo
echo o > a/other; ln a/other hard; mkdir -p /tmp/out; echo t > /tmp/out/file
"""


@pytest.mark.parametrize("refusals", [3, 10**9])
def test_a_path_that_the_kernel_could_not_follow_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """openat2 says EAGAIN for a path with `..` while anything on the machine is renamed."""
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_text("x")
    made, left = kernel.syscall, iter(range(refusals))

    def busy(what: str, *arguments: Any) -> int:
        if next(left, None) is not None:
            raise BlockingIOError(errno.EAGAIN, what)
        return made(what, *arguments)

    monkeypatch.setattr(kernel, "syscall", busy)
    directory = os.open(tmp_path, os.O_PATH)
    try:
        if refusals > 3:
            with pytest.raises(OSError, match="renamed all the time") as refused:
                kernel.open_beneath(directory, "dir/../file", os.O_RDONLY)
            assert refused.value.errno == errno.EXDEV
        else:
            descriptor = kernel.open_beneath(directory, "dir/../file", os.O_RDONLY)
            assert os.read(descriptor, 9) == b"x"
            os.close(descriptor)
    finally:
        os.close(directory)


@pytest.mark.parametrize(
    ("path", "read", "write"),
    [
        ("../tmp/out/file", "sandbox_denied", "sandbox_denied"),
        ("a/../../tmp/out/file", "sandbox_denied", "sandbox_denied"),
        ("/etc/passwd", "sandbox_denied", "sandbox_denied"),
        ("/tmp/out/file", "sandbox_denied", "sandbox_denied"),
        ("link", "sandbox_denied", "sandbox_denied"),
        ("root/etc/passwd", "sandbox_denied", "sandbox_denied"),
        ("dir/file", "sandbox_denied", "sandbox_denied"),
        ("fifo", "sandbox_denied", "sandbox_denied"),
        ("a", "sandbox_denied", "sandbox_denied"),
        ("hard", None, "sandbox_denied"),
        ("nothing", "tool_error", None),
        ("a/file", None, None),
    ],
)
def test_paths_stay_beneath_the_workspace(box: Box, path: str, read: str | None, write: str | None) -> None:
    assert box(box.sandbox.bash(LINKS)).failure == "ok"

    async def failure(work: object) -> str | None:
        try:
            await work  # type: ignore[misc]
        except SandboxFileError as error:
            return error.failure
        return None

    assert box(failure(box.sandbox.read(path))) == read
    assert box(failure(box.sandbox.read_lines(path, 1, 1))) == read
    assert box(failure(box.sandbox.edit(path, b"o\n", b"o\n"))) == (
        "tool_error" if path in ("a/file", "nothing") else write
    )
    assert box(failure(box.sandbox.write(path, b"y"))) == write
    assert box(box.sandbox.bash("cat /tmp/out/file")).stdout == b"t\n"


def test_a_file_that_does_not_fit(box: Box) -> None:
    with pytest.raises(SandboxFileError) as caught:
        box(box.sandbox.write("big", bytes(9 << 20)))
    assert caught.value.failure == "disk_full"
    box(box.sandbox.bash("head -c 6000000 /dev/zero > x; cp x y"))
    with pytest.raises(SandboxFileError) as caught:
        box(box.sandbox.write("more", bytes(6 << 20)))
    assert caught.value.failure == "disk_full"


def test_access_is_held_for_every_call(sandboxes: Sandboxes, loop: asyncio.Runner, tmp_path: Path) -> None:
    for name in ("src/main.py", "notes.txt", "secret/key", "data/table"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    async def check() -> None:
        access = Access(read=("data", "notes.txt"), write=("src", "out"))
        async with await sandboxes.open(tmp_path, access) as sandbox:
            for path in ("src/main.py", "notes.txt", "data/table"):
                assert await sandbox.read(path) == path.encode()
            for path in ("src/new.py", "src/main.py", "out/result"):
                await sandbox.write(path, b"new")
            for path in ("notes.txt", "data/table", "top", "secret/key"):
                with pytest.raises(SandboxFileError) as caught:
                    await sandbox.write(path, b"new")
                assert caught.value.failure == "sandbox_denied"
            with pytest.raises(SandboxFileError) as caught:
                await sandbox.read("secret/key")
            assert caught.value.failure == "sandbox_denied"
            tricks = (
                "cat secret/key; cat < secret/../secret/key; echo x > notes.txt; echo x >> data/table; mv data/table src/; "
                "ln data/table src/table && echo x > src/table; ln secret/key src/key && cat src/key; rm notes.txt; "
                "ln -s ../secret/key src/link; cat src/link; cp secret/key /tmp/; mv secret src/; mv src /tmp"
            )
            result = await sandbox.bash(tricks)
            assert b"secret/key" not in result.stdout
            assert await sandbox.read("data/table") == b"data/table"
            assert await sandbox.read("notes.txt") == b"notes.txt"
            assert (await sandbox.python("print(open('secret/key').read())")).failure == "sandbox_denied"
            assert (await sandbox.bash("echo y > src/main.py; cat src/main.py; echo z > /tmp/z")).stdout == b"y\n"

    loop.run(check())


def test_a_workspace_is_a_copy(sandboxes: Sandboxes, loop: asyncio.Runner, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to("/etc/shadow")
    (tmp_path / "bytes").write_bytes(bytes(range(256)))

    async def check() -> None:
        async with await sandboxes.open(tmp_path) as sandbox:
            assert (await sandbox.run(["./run.sh"])).stdout == b"ran\n"
            assert await sandbox.read("bytes") == bytes(range(256))
            listed = await sandbox.bash("ls -A; readlink out; cat out; rm -r run.sh empty; echo new > bytes")
            assert listed.stdout == b"bytes\nempty\nout\nrun.sh\n/etc/shadow\n"

    loop.run(check())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "empty", "out", "run.sh"]
    assert (tmp_path / "bytes").read_bytes() == bytes(range(256))


def test_workspaces_that_can_not_be_copied(sandboxes: Sandboxes, loop: asyncio.Runner, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        loop.run(sandboxes.open(tmp_path / "nowhere"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="fifo is not a file, directory or link"):
        loop.run(sandboxes.open(tmp_path))
    (tmp_path / "fifo").unlink()
    with (tmp_path / "big").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(UserError, match="more than 16 MB"):
        loop.run(sandboxes.open(tmp_path))


def test_a_channel_reaches_the_code(box: Box) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"ping")
        code = "import os; os.write(3, b'pong' + os.read(3, 4)); print(sorted(os.listdir('/proc/self/fd')))"
        result = box(box.sandbox.python(code, channel=theirs))
        assert (result.failure, ours.recv(100)) == ("ok", b"pongping")


def test_sandboxes_share_nothing(sandboxes: Sandboxes, loop: asyncio.Runner) -> None:
    async def check() -> None:
        opened = await asyncio.gather(*(sandboxes.open() for _ in range(6)))
        await asyncio.gather(*(box.write("mine", str(index).encode()) for index, box in enumerate(opened)))
        code = "import os; print(open('mine').read(), os.listdir('/tmp'), os.listdir('/workspace'))"
        results = await asyncio.gather(*(box.python(code) for box in opened))
        assert [result.stdout.decode() for result in results] == [f"{index} [] ['mine']\n" for index in range(6)]
        await asyncio.gather(*(box.close() for box in opened))

    loop.run(check())


def test_calls_of_one_sandbox_wait_for_each_other(box: Box) -> None:
    async def both() -> tuple[bytes, bytes]:
        first, second = await asyncio.gather(
            box.sandbox.bash("echo 1 > turn; sleep 0.2; cat turn"), box.sandbox.bash("echo 2 > turn; cat turn")
        )
        return first.stdout, second.stdout

    assert box(both()) == (b"1\n", b"2\n")


def test_calls_of_different_sandboxes_do_not(sandboxes: Sandboxes, loop: asyncio.Runner) -> None:
    async def check() -> float:
        opened = await asyncio.gather(*(sandboxes.open() for _ in range(4)))
        began = time.monotonic()
        await asyncio.gather(*(box.run(["sleep", "0.5"]) for box in opened))
        took = time.monotonic() - began
        await asyncio.gather(*(box.close() for box in opened))
        return took

    assert loop.run(check()) < 1.5


def test_a_cancelled_call_ends_the_sandbox(sandboxes: Sandboxes, loop: asyncio.Runner) -> None:
    async def check() -> None:
        sandbox = await sandboxes.open()
        call = asyncio.create_task(sandbox.run(["sleep", "1234"]))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await sandbox.python("print(1)")).failure == "internal_error"
        await sandbox.close()

    loop.run(check())
    assert "sleep\x001234" not in commands()


def commands() -> str:
    """The command lines of all processes on the machine."""
    return "\n".join(_command_lines())


def _command_lines() -> Iterator[str]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield Path(f"/proc/{name}/cmdline").read_text(errors="replace")
            except OSError:
                continue


def test_the_warm_ones_are_ready_and_end_with_their_factory(sandboxes: Sandboxes) -> None:
    factory = Sandboxes(sandboxes.settings.model_copy(update={"warm": 3}), LIMITS)

    async def check() -> None:
        first = await factory.open()
        await asyncio.to_thread(factory.warm.wait)
        assert len(factory.warm) == 3
        second = await factory.open()
        assert (await second.python("print(5)")).stdout == b"5\n"
        await first.close()
        await second.close()

    asyncio.run(check())
    # As runs do: another event loop closes what the first one's trajectories opened, with sandboxes on their way.
    asyncio.run(factory.close())
    assert len(factory.warm) == 0
    with pytest.raises(RuntimeError):
        asyncio.run(factory.open())


def test_closing_ends_a_call_under_way(sandboxes: Sandboxes, loop: asyncio.Runner) -> None:
    async def check() -> None:
        sandbox = await sandboxes.open()
        call = asyncio.create_task(sandbox.run(["sleep", "1235"]))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await sandbox.close()
        assert (await call).failure == "internal_error"
        assert time.monotonic() - began < 1

    loop.run(check())


def test_what_is_in_force_is_said(sandboxes: Sandboxes) -> None:
    said = sandboxes.describe()
    assert ("bubblewrap 0." in said) == (sandboxes.settings.level == "bubblewrap")
    assert "seccomp" in said
    assert "16 MB" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SandboxSettings(level="landlock", python="/no/python"), "sandbox.python: /no/python"),
        (SandboxSettings(level="landlock", visible=("/no/where",)), "sandbox.visible: /no/where"),
    ],
)
def test_settings_that_can_not_be_had(settings: SandboxSettings, message: str) -> None:
    with pytest.raises(SandboxSetupError, match=message):
        Sandboxes(settings, LIMITS)


def test_a_sandbox_that_does_not_hold_is_refused(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check of the probe, made to find that something got through."""

    def refusal() -> str:
        with pytest.raises(SandboxSetupError) as caught:
            Sandboxes(sandboxes.settings, LIMITS)
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(probe, "_ATTEMPTS", _every_attempt_succeeds())
        said = refusal()
        assert said.startswith("sandbox_setup_failed: ")
        for name in ("reading a file of the host", "that the filter refuses", "filling more than its disk", "TCP port"):
            assert name in said
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_HOARD", "pass")
        assert refusal().endswith("what got through: using more memory than allowed (ok)")


def _every_attempt_succeeds() -> str:
    """The probe's own list of attempts, with acts that do nothing."""
    names = [line.split('"')[1] for line in probe._ATTEMPTS.splitlines() if line.startswith("attempt(")]
    assert len(names) > 8
    return "\n".join(f"print({name!r})" for name in names)


def test_no_bubblewrap_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxSetupError, match=r"sandbox_setup_failed.*apt-get install bubblewrap"):
        Sandboxes(SandboxSettings(level="bubblewrap"), LIMITS)


def test_uids_are_those_that_the_user_namespace_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"uid": "0 0 4294967295", "gid": "0 0 4294967295"}
    monkeypatch.setattr(
        factory_module, "open", lambda path: io.StringIO(known[path[len("/proc/self/") : -len("_map")]]), raising=False
    )
    monkeypatch.setattr(factory_module.os, "getuid", lambda: 0)
    assert factory_module.has_uids(1_900_000_000)
    # A container to whose root few ids were given.
    known.update(uid="0 1000 1\n1 100000 65536", gid="0 1000 1\n1 100000 65536")
    with pytest.raises(SandboxSetupError, match=r"knows uids 1 to 65536 and gids 1 to 65536 alone.* first_uid = 32769"):
        factory_module.has_uids(1_900_000_000)
    assert factory_module.has_uids(32769)
    uid, lock = factory_module.free_uid(32769)
    lock.close()
    assert 32769 <= uid <= 65536
    # `unshare -Ur`
    known.update(uid="0 1000 1", gid="0 1000 1")
    with pytest.raises(
        SandboxSetupError, match=r"knows uids 0 to 0 .* as an ordinary user instead, without `unshare -r`"
    ):
        factory_module.has_uids(1_900_000_000)
    monkeypatch.setattr(factory_module.os, "getuid", lambda: 1000)
    assert not factory_module.has_uids(1_900_000_000)
