"""Attempts to leave a sandbox by one act each: Python code whose last line is an expression or statement, tried inside and outside.

The code runs after `PRELUDE`. Inside, it must be refused by one of `errors`; outside, by the same interpreter and user but without
a sandbox, it must not be refused in that way: then it is the sandbox that refuses, and not a mistake in the attempt.
`outside` is what happens there: "works", the name of another error (a call that is told nonsense complains of that), or None
where trying would hurt the machine or depends on it; such attempts are held to their errno alone.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, fcntl, os, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result
def call(number, *arguments):
    return checked(libc.syscall(ctypes.c_long(number), *[
        ctypes.c_long(one) if isinstance(one, int) else ctypes.c_char_p(one) for one in arguments
    ]))
def attempt(code):
    try:
        exec(code, globals())
    except OSError as error:
        print(errno.errorcode[error.errno])
    else:
        print("works")
"""


@dataclass(frozen=True)
class Attempt:
    # Whatever is tried outside must be harmless there: nonsense that the kernel refuses after it has checked the right to ask.
    name: str
    code: str
    errors: tuple[str, ...]
    outside: str | None


def _refused(name: str, code: str, outside: str | None = "works", errors: tuple[str, ...] = ("EPERM",)) -> Attempt:
    return Attempt(name, code, errors, outside)


# HOST is a directory of the host with `secret`, sockets `stream` and `datagram`; PORT and UDP are ports of the host, ABSTRACT the
# name of an abstract socket, PID a process: the test puts them in. Numbers of calls are those of x86_64.
ATTEMPTS = (
    # the network
    _refused("tcp to the host's loopback", "socket.create_connection(('127.0.0.1', PORT), 2)"),
    _refused("tcp over ipv6", "socket.socket(socket.AF_INET6)"),
    _refused("udp to the host's loopback", "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))"),
    _refused("listening on a port", "socket.create_server(('127.0.0.1', 0))"),
    _refused("raw packets", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    _refused("icmp", "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)"),
    _refused("netlink", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    _refused("vsock to the hypervisor", "socket.socket(socket.AF_VSOCK)", None),
    _refused("kernel crypto sockets", "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)", None),
    _refused(
        "an abstract socket", "socket.socket(socket.AF_UNIX).connect(chr(0) + ABSTRACT)", "works", ("ECONNREFUSED", "EPERM")
    ),
    _refused("a socket of the host by path", "socket.socket(socket.AF_UNIX).connect(HOST + '/stream')", "works", ("ENOENT",)),
    _refused(
        "a datagram to a socket of the host",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', HOST + '/datagram')",
        "works",
        ("ENOENT",),
    ),
    # files of the host
    _refused("a file by its path", "open(HOST + '/secret')", "works", ("ENOENT", "EACCES")),
    _refused("a file by ..", "open('../' * 20 + HOST[1:] + '/secret')", "works", ("ENOENT", "EACCES")),
    _refused(
        "a file through a symbolic link",
        "os.symlink(HOST + '/secret', 'link'); open('link')",
        "works",
        ("ENOENT", "EACCES"),
    ),
    _refused(
        "a file by a hard link",
        "os.link(HOST + '/secret', 'hard')",
        "works",
        ("ENOENT",),
    ),
    _refused("a hard link to a system file", "os.link('/usr/bin/env', '/tmp/env')", None, ("EXDEV", "EROFS")),
    _refused("a file by /proc/self/root", "open('/proc/self/root' + HOST + '/secret')", "works", ("ENOENT", "EACCES")),
    _refused(
        "a file by /proc/self/cwd",
        "open('/proc/self/cwd/' + '../' * 20 + HOST[1:] + '/secret')",
        "works",
        ("ENOENT", "EACCES"),
    ),
    _refused("the home of root", "open('/root/.profile')", None, ("ENOENT", "EACCES")),
    _refused("the passwords", "open('/etc/shadow')", None, ("ENOENT",)),
    _refused("writing a system file", "open('/usr/bin/env', 'r+')", None, ("EROFS", "EACCES")),
    _refused("making a system file", "open('/usr/lib/escaped', 'x')", None, ("EROFS", "EACCES")),
    _refused("making a file in the root", "open('/escaped', 'x')", None, ("EROFS", "EACCES")),
    _refused("making a file in /etc", "open('/etc/escaped', 'x')", None, ("EROFS", "EACCES")),
    _refused("changing the mode of a system file", "os.chmod('/usr/bin/env', 0o777)", None, ("EROFS", "EPERM")),
    _refused("sys", "os.listdir('/sys/kernel')", "works", ("ENOENT", "EACCES")),
    _refused("cgroups", "open('/sys/fs/cgroup/cgroup.procs', 'w')", None, ("ENOENT", "EACCES")),
    _refused("the log of the kernel", "open('/dev/kmsg')", None, ("ENOENT",)),
    _refused("memory of the machine", "open('/dev/mem')", None, ("ENOENT",)),
    _refused("a terminal", "open('/dev/tty')", None, ("ENOENT",)),
    _refused("a disk", "os.mknod('/tmp/disk', 0o600 | 0o060000, os.makedev(254, 0))", None, ("EPERM", "EACCES")),
    _refused("a character device", "os.mknod('/tmp/mem', 0o600 | 0o020000, os.makedev(1, 1))", None, ("EPERM", "EACCES")),
    _refused("settings of the kernel", "open('/proc/sys/kernel/core_pattern', 'r+')", None, ("EACCES", "EROFS", "EPERM")),
    _refused("the host's name by /proc", "open('/proc/sys/kernel/hostname', 'r+')", None, ("EACCES", "EROFS", "EPERM")),
    _refused("sysrq", "open('/proc/sysrq-trigger', 'w')", None, ("EACCES", "EROFS", "EPERM", "ENOENT")),
    _refused("memory of the kernel", "open('/proc/kcore', 'rb')", None, ("EACCES", "EPERM", "ENOENT")),
    # other processes
    _refused("the environment of pid 1", "open('/proc/1/environ').read()", None, ("EACCES", "EPERM")),
    _refused("the memory of pid 1", "open('/proc/1/mem', 'rb')", None, ("EACCES", "EPERM")),
    _refused("the descriptors of pid 1", "os.listdir('/proc/1/fd')", None, ("EACCES", "EPERM")),
    _refused("the root of pid 1", "os.listdir('/proc/1/root')", None, ("EACCES", "EPERM")),
    _refused("a process of the host in /proc", "open(f'/proc/{PID}/environ')", "works", ("ENOENT",)),
    _refused("a signal to a process of the host", "os.kill(PID, 0)", "works", ("ESRCH",)),
    _refused("a pidfd of a process of the host", "os.pidfd_open(PID)", "works", ("ESRCH",)),
    _refused(
        "ptrace of a child",
        """
pid = os.fork()
if pid == 0:
    os.read(os.pipe()[0], 1)
try:
    call(101, 16, pid, 0, 0)
finally:
    os.kill(pid, 9)
""",
    ),
    _refused("being traced", "call(101, 0, 0, 0, 0)"),
    _refused("reading another's memory", "call(310, os.getpid(), b'', 0, b'', 0, 0)"),
    _refused("writing another's memory", "call(311, os.getpid(), b'', 0, b'', 0, 0)"),
    _refused("taking another's descriptor", "call(438, os.pidfd_open(os.getpid()), 0, 0)"),
    _refused("comparing processes", "call(312, os.getpid(), os.getpid(), 0, 0, 0)"),
    # Neither sets nor asks for anything: outside it must not touch what it names.
    _refused("limits of pid 1", "call(302, 1, 0, 0, 0)"),
    _refused("a better priority", "os.setpriority(os.PRIO_PROCESS, 0, -10)", None, ("EACCES", "EPERM")),
    _refused("real-time scheduling", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", None),
    _refused(
        "hiding from the OOM killer",
        "os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')",
        None,
        ("EACCES", "EPERM"),
    ),
    _refused("raising an own limit", "call(302, 0, 6, struct.pack('QQ', 9999, 9999), 0)", None),
    # namespaces, mounts, identity
    _refused("a user namespace", "call(272, 0x10000000)"),
    _refused("a mount namespace", "call(272, 0x00020000)"),
    _refused("a child in a user namespace", "pid = call(56, 0x10000000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)"),
    _refused("a child by clone3", "call(435, b'', 0)", "EINVAL", ("ENOSYS",)),
    _refused("joining a namespace", "call(308, os.open('/proc/self/ns/net', 0), 0)", "works", ("EPERM", "EACCES")),
    _refused("mount", "call(165, b'none', b'/tmp', b'none-such', 0, 0)", "ENODEV"),
    _refused("bind mount", "call(165, b'/nowhere', b'/tmp', 0, 4096, 0)", "ENOENT"),
    _refused("remount", "call(165, 0, b'/nowhere', 0, 32, 0)", "ENOENT"),
    _refused("umount", "call(166, b'/nowhere', 2)", "ENOENT"),
    _refused("a filesystem by fsopen", "call(430, b'none-such', 0)", "ENODEV"),
    _refused("a mount by open_tree", "call(428, -100, b'/nowhere', 1)", "ENOENT"),
    _refused("a mount by move_mount", "call(429, -1, b'', -1, b'', 0)", "ENOENT"),
    _refused("rights of a mount", "call(442, -100, b'/nowhere', 0, bytes(32), 32)", None),
    _refused("pivot_root", "call(155, b'/nowhere', b'/nowhere')", "ENOENT"),
    _refused("chroot", "os.chroot('/nowhere')", "ENOENT"),
    _refused("becoming root", "os.setresuid(0, 0, 0)", "works", ("EPERM", "EINVAL")),
    _refused("groups", "os.setgroups([0])", "works"),
    _refused("the host's name", "socket.sethostname('x' * 99)", "EINVAL"),
    _refused("file handles", "call(304, -100, bytes(8), 0)", "EINVAL"),
    _refused("file handles by name", "call(303, -100, b'/nowhere', bytes(8), bytes(8), 0)", "ENOENT"),
    # interfaces of the kernel
    _refused("io_uring", "call(425, 1, bytes(120))", None),
    _refused("io_uring_enter", "call(426, -1, 0, 0, 0, 0)", None),
    _refused("bpf", "call(321, 0, bytes(64), 64)", None),
    _refused("perf events", "call(298, bytes(128), 0, -1, -1, 0)", None),
    _refused("keys", "call(250, 0, -3, 0)", None),
    _refused("a key", "call(248, b'user', b'nmoe-test', b'x', 1, -2)", None),
    _refused("userfaultfd", "call(323, 0)", None),
    _refused("fanotify", "call(300, 0, 0)", None),
    _refused("kexec", "call(246, 0, 0, 0, 0)", None),
    _refused("a kernel module", "call(175, 0, 0, b'')", None),
    _refused("a kernel module from a file", "call(313, -1, b'', 0)", None),
    _refused("reboot", "call(169, 0, 0, 0, 0)", "EINVAL"),
    _refused("swap", "call(167, b'/nowhere', 0)", "ENOENT"),
    _refused("accounting", "call(163, b'/nowhere')", None),
    _refused("the clock", "import time; time.clock_settime(time.CLOCK_REALTIME, -1.0)", "EINVAL"),
    _refused("the clock's rate", "call(159, 0)", "EFAULT"),
    _refused("ports", "call(172, 3)", None),
    _refused("segments", "call(154, 9, 0, 0)", None),
    _refused("the kernel's log by a call", "call(103, 10, 0, 0)", None),
    _refused("another personality", "call(135, 0x0040000)", "works"),
    _refused("x32 calls", "call(0x40000000 + 39)", None, ("ENOSYS",)),
    _refused("calls newer than the filter", "call(470)", None, ("ENOSYS",)),
    _refused("typing into a terminal", "fcntl.ioctl(os.pipe()[0], 0x5412, b'x')", "ENOTTY"),
    # a smaller share of the CPU, so as to look starved
    _refused("a worse priority", "os.setpriority(os.PRIO_PROCESS, 0, 5)"),
    _refused("idle scheduling", "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"),
    _refused("one CPU of several", "os.sched_setaffinity(0, os.sched_getaffinity(0))"),
    # memory that shows nowhere
    _refused("a pair of sockets of the network", "socket.socketpair(socket.AF_INET)", "ENOTSUP"),
    _refused("a larger buffer to send from", "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)"),
    _refused("a larger buffer to receive in", "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)"),
    _refused("a buffer beyond the limit", "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, 32, 1 << 20)"),
    _refused("a larger pipe", "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)"),
    _refused("an executable in memory", "os.memfd_create('x')"),
    _refused("secret memory", "call(447, 0)", None),
    _refused("shared memory of System V", "call(31, call(29, 0, 4096, 0o1600), 0, 0)"),
    _refused("a message queue", "call(71, call(68, 0, 0o1600), 0, 0)"),
    _refused("a semaphore", "call(66, call(64, 0, 1, 0o1600), 0, 0, 0)"),
    _refused("shared memory without a file", "import mmap; mmap.mmap(-1, 4096, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)"),
    _refused(
        "shared memory of /dev/zero",
        "import mmap; mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)",
        "works",
        ("ENODEV",),
    ),
    _refused(
        "huge pages",
        "import mmap; mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
        None,
    ),
    _refused("swapping one's memory out", "import mmap; mmap.mmap(-1, 4096, mmap.MAP_PRIVATE).madvise(21)"),
    _refused("giving pages to a pipe", "call(278, os.pipe()[1], 0, 0, 0)"),
    _refused("the machine's contexts of aio", "call(206, 0, bytes(8))", "EINVAL"),
    _refused("the host user's watches of files", "os.close(call(294, 0))"),
    _refused("the weight of its session", "open('/proc/self/autogroup', 'r+')", "works", ("EACCES", "EROFS")),
    _refused("marks of its memory", "open('/proc/self/clear_refs', 'w')", "works", ("EACCES", "EROFS")),
    _refused("a posix message queue", "call(240, b'nmoe-none', 0, 0, 0)", "ENOENT"),
)  # fmt: skip
