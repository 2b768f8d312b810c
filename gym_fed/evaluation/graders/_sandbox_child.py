"""Sandbox script, standard library only: drops privileges, then runs the program.

It reads one line of JSON from its standard input; the rest is the program's input. With ``namespaces`` it enters its
own user, mount, network, process and IPC namespaces and a root folder with Python, shared libraries and an empty
``/tmp``; root becomes nobody. Failures are written to the verdict's pipe, and nothing is run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x00020000 | 0x20000000 | 0x08000000  # user, net, mount, pid, ipc
MS_RDONLY_ATTR, MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 1, 4096, 16384, 1 << 18, 2, 4
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = -100, 0x8000, 442  # the same number on every architecture
KEYCTL_JOIN_SESSION_KEYRING = 1
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "loongarch64": 219, "ppc64le": 271, "s390x": 280}
NO_KEYRINGS = (errno.ENOSYS, errno.EPERM)  # not built in, or refused by a container's filter
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NOBODY = 65534
NEEDED = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/nix/store")

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the settings, drop privileges and run; the verdict is written to the pipe, not the exit status."""
    import resource  # absent on Windows, which is refused before; imported before the root folder changes

    settings = json.loads(read_line(0))
    verdict = int(settings["verdict"])
    try:
        leave_keyring()
        if settings["isolation"] == "namespaces":
            enter_namespaces(settings)
            wait_for_init(float(settings["timeout_seconds"]))
        set_limits(resource, settings)
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        os.set_inheritable(verdict, True)
        python = settings["python"]
        os.execve(python, [python, "-I", "-S", "-c", settings["driver"]], settings["environment"])
    except BaseException:  # noqa: BLE001 - reported to the parent, whatever it is
        reason = traceback.format_exc(limit=1).strip().splitlines()[-1]
        os.write(verdict, f"{settings['failed']}{reason[:500]}".encode())
        os._exit(1)


def read_line(descriptor: int) -> bytes:
    """Read up to the first newline and no further, since the program reads the remaining input."""
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(descriptor, 1) or b"\n"
    return bytes(line)


def check(result: int, call: str) -> None:
    """Raise the C library's error if a call failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def leave_keyring() -> None:
    """Join a new session keyring, since kernel keys (of file systems, of Kerberos) are inherited and have no namespace.

    A kernel without keyrings has nothing to leave.
    """
    number = SYS_KEYCTL.get(os.uname().machine)
    if number is None:
        raise OSError(f"no sandbox for {os.uname().machine}: the number of keyctl is not known")
    if libc.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None) < 0 and ctypes.get_errno() not in NO_KEYRINGS:
        check(1, "keyctl")


def enter_namespaces(settings: dict[str, Any]) -> None:
    """Enter new namespaces with a root folder that contains only what Python needs."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        os.setgroups([])
        with from_outside(f"0 0 1\n{NOBODY} {NOBODY} 1"):
            check(libc.unshare(NEW_NAMESPACES), "unshare")
    else:
        check(libc.unshare(NEW_NAMESPACES), "unshare")
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")

    root = settings["folder"]
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in dict.fromkeys([*NEEDED, *settings["prefixes"]]):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path) and not os.path.exists(root + path):
            os.makedirs(root + path)
            mount(path, root + path, flags=MS_BIND | MS_REC)
            make_read_only(root + path)
    os.makedirs(root + "/dev")
    for device in ("/dev/null", "/dev/urandom"):
        write(root + device, "")
        mount(device, root + device, flags=MS_BIND)
    os.makedirs(root + "/tmp")
    size = f"size={settings['max_file_bytes']},nr_inodes=4096,mode=1777"
    mount("tmpfs", root + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chroot(root)
    os.chdir("/tmp")
    if uid == 0:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


@contextlib.contextmanager
def from_outside(ids: str) -> Iterator[None]:
    """Map several users into the namespace that the block enters; only a process outside the namespace may do so."""
    parent = os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        if os.read(reader, 1):
            for kind in ("uid", "gid"):
                write(f"/proc/{parent}/{kind}_map", ids)
        os._exit(0)
    os.close(reader)
    try:
        yield
        os.write(writer, b"!")
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def wait_for_init(timeout_seconds: float) -> None:
    """Fork the first process of the process namespace and continue as it; the parent waits, then ends the namespace."""
    child = os.fork()
    if child == 0:
        check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
        return
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
    os.waitpid(child, 0)
    os._exit(0)


def set_limits(resource: ModuleType, settings: dict[str, Any]) -> None:
    """Set soft and hard limits, so that the program cannot raise them."""
    for name, value in settings["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (limit, limit))


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Call ``mount(2)``."""
    words = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def make_read_only(path: str) -> None:
    """Call ``mount_setattr(2)`` (Linux 5.12) on a mount and all mounts below it."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY_ATTR, 0, 0, 0)
    number = ctypes.c_long(SYS_MOUNT_SETATTR)
    result = libc.syscall(number, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    check(result, f"read-only {path}")


def write(path: str, text: str) -> None:
    """Write a small file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
