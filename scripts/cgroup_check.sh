#!/usr/bin/env bash
# The tests marked cgroup, and the attacks on sandboxes under cgroup limits, in a kernel that has cgroup v2 to give away: User-mode Linux
# (the package user-mode-linux), which needs neither root nor a virtual machine and sees this machine's files read-only. Ten minutes.
# Landlock is not in that kernel: the bubblewrap level is what is tested. $PYTHON: an interpreter with nmoe's packages. $UML: linux.uml.
set -uo pipefail
if [ -z "${INSIDE:-}" ]; then
    root="$(cd "$(dirname "$0")/.." && pwd)"
    uml="${UML:-$(command -v linux.uml)}" || { echo "linux.uml is not installed (apt-get install user-mode-linux)" >&2; exit 2; }
    python="$(command -v "${PYTHON:-python}")"
    log="$(mktemp)"
    trap 'rm -f "$log"' EXIT
    "$uml" mem=4000M rootfstype=hostfs rootflags=/ root=/dev/root ro con=null con0=fd:0,fd:1 \
        init="$root/scripts/cgroup_check.sh" INSIDE="$root" PYTHON="$python" </dev/null 2>&1 | tee "$log" | sed -n '/^check:/,$p'
    grep -q "^check: passed" "$log"
    exit
fi
# From here on this is the first process of that kernel.
mount -t proc none /proc && mount -t sysfs none /sys && mount -t tmpfs none /tmp && mount -t tmpfs none /run
mount -t cgroup2 none /sys/fs/cgroup
cd "$INSIDE"
export HOME=/tmp PATH="/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin" PYTHONPATH="$INSIDE" PYTHONDONTWRITEBYTECODE=1
"$PYTHON" -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1 | 64))'  # up
echo "check: $(uname -sr), controllers $(cat /sys/fs/cgroup/cgroup.controllers)"
"$PYTHON" -m pytest -q --color=no --tb=short -rfEs -p no:cacheprovider -o timeout=1200 -m cgroup tests/sandbox/test_cgroups_in_force.py 2>&1
limits=$?
"$PYTHON" -m pytest -q --color=no --tb=short -rfE -p no:cacheprovider -o timeout=1200 -k bubblewrap tests/sandbox/test_escape.py 2>&1
attacks=$?
[ "$limits" = 0 ] && [ "$attacks" = 0 ] && echo "check: passed" || echo "check: failed"
"$PYTHON" -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'
