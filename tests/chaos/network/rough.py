"""A network that delays, reorders and loses packets, between namespaces: a program is the wire.

    python tests/chaos/network/rough.py DEVICE NAMESPACE=ADDRESS...

Each namespace ("": this one, where it is called DEVICE) gets a TUN device; every IP packet that
comes out of one goes to the device with its destination, after a while, or at once and so before
others, or not at all. This is what ``tc netem delay 20ms 10ms reorder 25% loss 2%`` does, which not
every kernel has.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from typing import Any

if __name__ == "__main__":
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.chaos.network.namespaces import Namespaces, run_tool

DELAY_S, JITTER_S = 0.020, 0.010
AHEAD, LOST = 0.25, 0.02
# So that the program, which sees every packet, keeps up.
MTU_BYTES = 9000
DEVICE = "eth0"

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


class RoughNamespaces(Namespaces):
    """Agents and ranks as in ``Namespaces``, but on that wire instead of a bridge."""

    def _lay(self, stack: contextlib.ExitStack, addresses: dict[str, str]) -> None:
        host = f"{self._mark}t"
        for node in addresses:
            self._add_namespace(stack, node)
        ends = [f"{self._mark}{node}={address}" for node, address in addresses.items()]
        wire = subprocess.Popen(
            [sys.executable, __file__, host, f"={self._net}.1", *ends], stdout=subprocess.PIPE
        )
        stack.callback(wire.wait)
        stack.callback(wire.stdout.close)
        stack.callback(wire.kill)
        assert wire.stdout.readline() == b"up\n"
        run_tool("ip", "address", "add", f"{self._net}.1/24", "dev", host)
        run_tool("ip", "link", "set", host, "mtu", str(MTU_BYTES), "up")
        for node, address in addresses.items():
            self._inside(node, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            self._inside(node, "ip", "link", "set", DEVICE, "mtu", str(MTU_BYTES))
            for device in ("lo", DEVICE):
                self._inside(node, "ip", "link", "set", device, "up")


def missing_tun() -> str:
    """Why there are no TUN devices here; empty if there are."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"no TUN devices: {error}"
    return ""


class Wire:
    """Packets on their way, in the order in which they arrive."""

    def __init__(self, ends: dict[bytes, int]) -> None:
        self._ends = ends
        self._chance = random.Random(1)
        self._flying: list[tuple[float, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        poll = select.poll()
        for end in self._ends.values():
            poll.register(end, select.POLLIN)
        while True:
            wait_s = self._flying[0][0] - time.monotonic() if self._flying else 1.0
            for end, _ in poll.poll(max(0.0, 1000 * wait_s)):
                self._take(end)
            while self._flying and self._flying[0][0] <= time.monotonic():
                self._deliver(heapq.heappop(self._flying)[2])

    def _take(self, end: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                packet, drawn = os.read(end, MTU_BYTES + 100), self._chance.random()
                if drawn < LOST:
                    continue
                if drawn < LOST + AHEAD:
                    self._deliver(packet)
                    continue
                at_s = time.monotonic() + DELAY_S + self._chance.uniform(-JITTER_S, JITTER_S)
                self._count += 1
                heapq.heappush(self._flying, (at_s, self._count, packet))

    def _deliver(self, packet: bytes) -> None:
        end = self._ends.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if end is not None:
            with contextlib.suppress(OSError):  # its queue is full, or the device down: lost
                os.write(end, packet)


def _tun(namespace: str, name: str) -> int:
    """A TUN device in that namespace, which lives as long as the descriptor."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    if namespace:
        other = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        assert libc.setns(other, _CLONE_NEWNET) == 0
        os.close(other)
    try:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    finally:
        assert libc.setns(own, _CLONE_NEWNET) == 0
        os.close(own)
    return end


def main(host: str, *pairs: str) -> None:
    ends = {}
    for namespace, address in (pair.split("=") for pair in pairs):
        ends[socket.inet_aton(address)] = _tun(namespace, DEVICE if namespace else host)
    print("up", flush=True)
    Wire(ends).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
