"""Two machines on one: network namespaces with a line between them that is slow and loses packets.

Kernels of containers often come without netem. So the line is a thread of the test: it carries IP packets between a TUN
device in each namespace, each after a delay, and drops some. What runs in the namespaces sees an ordinary network.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType

_TUN = "/dev/net/tun"
_SET_INTERFACE = 0x400454CA  # TUNSETIFF of linux/if_tun.h
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_PACKET = 65536
_HOSTS = Path("/etc/netns")
"""Of each namespace, what `ip netns exec` mounts over files of /etc."""


def why_no_network() -> str:
    """Why this machine has no such line; empty where it has."""
    if shutil.which("ip") is None:
        return "needs `ip` of iproute2"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"needs {_TUN}"
    tried = subprocess.run(["ip", "netns", "list"], capture_output=True)
    return "" if tried.returncode == 0 else "needs a kernel with network namespaces"


class Line(AbstractContextManager["Line"]):
    """A line between two namespaces while the block runs.

    Args:
        seconds: How long a packet takes, either way.
        loss: The share of packets that never arrive.
        names: Host names that stand for the first end, at both ends.
    """

    def __init__(self, seconds: float, loss: float, names: tuple[str, ...] = ()) -> None:
        self._seconds, self._loss = seconds, loss
        self._hosts = "127.0.0.1 localhost\n" + "".join(f"10.77.0.1 {name}\n" for name in names)
        self._random = random.Random(0)
        self._cleanup = ExitStack()
        self._ended = threading.Event()
        self.is_cut = False
        """While it is set nothing arrives."""
        self.carried = self.dropped = 0
        self.ends = (f"gym-{os.getpid()}-a", f"gym-{os.getpid()}-b")

    def __enter__(self) -> Line:
        try:
            files = [self._end(number, name) for number, name in enumerate(self.ends, start=1)]
        except BaseException:
            self._cleanup.close()
            raise
        self._thread = threading.Thread(target=self._carry, args=tuple(files), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._cleanup.close()

    def inside(self, end: int, command: str) -> list[str]:
        """The arguments that run a shell's command at one end, 0 or 1."""
        return ["ip", "netns", "exec", self.ends[end], "bash", "-c", command]

    def _end(self, number: int, name: str) -> int:
        """Make a namespace with a device that this process holds; returns the device's file."""
        hosts = _HOSTS / name / "hosts"
        hosts.parent.mkdir(parents=True)
        self._cleanup.callback(shutil.rmtree, hosts.parent)
        hosts.write_text(self._hosts)
        _ip("netns", "add", name)
        self._cleanup.callback(_ip, "netns", "delete", name)
        file = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        self._cleanup.callback(os.close, file)
        device = f"gym{os.getpid()}-{number}"
        _set_interface(file, device)
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return file

    def _carry(self, one: int, other: int) -> None:
        """Every packet to the other end, in its time."""
        to = {one: other, other: one}
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._ended.is_set():
            wait = under_way[0][0] - time.monotonic() if under_way else 0.2
            for file in select.select([one, other], [], [], min(0.2, max(0.0, wait)))[0]:
                packet = os.read(file, _PACKET)
                if self.is_cut or self._random.random() < self._loss:
                    self.dropped += 1
                    continue
                self.carried += 1
                heapq.heappush(under_way, (time.monotonic() + self._seconds, self.carried, to[file], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, file, packet = heapq.heappop(under_way)
                os.write(file, packet)


def _set_interface(file: int, device: str) -> None:
    import fcntl

    fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEADER))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
