"""Addresses in requests are checked before any work begins."""

import pytest

from ecckpt.errors import InvalidMessage
from ecckpt.protocol.addresses import check_addresses
from ecckpt.protocol.messages.repair import Guard, Member, Repair
from ecckpt.protocol.messages.restore import Fetch, Sources
from ecckpt.protocol.messages.save import Hold, Prefetch, Protect, Target
from tests.support.builders import header, writer_of

WORK = {"header": header(0), "writer": writer_of(1), "timeout_s": 1.0}
PROTECT = {
    "shard": header().shard,
    "writer": writer_of(1),
    "min_fragments": 0,
    "every_living": False,
    "memory_bytes": 0,
    "timeout_s": 1.0,
    "discard": (),
}
GUARD = {"run": "test", "writer": writer_of(1), "holders": 0, "local_ranks": 1, "memory_bytes": 0}


def messages(address):
    targets, sources = (Target(0, "n1", address),), (Sources(0, ("n1:1", address)),)
    hold = {"table": b"", "memory_bytes": 0, "discard": (), "repair": False}
    return [
        Hold(source=address, **hold, **WORK),
        Prefetch(source=address, discard=(), **WORK),
        Protect(targets=targets, **PROTECT),
        Fetch(sources=sources, memory_bytes=0, **WORK),
        Repair(sources=(), targets=targets, memory_bytes=0, **WORK),
        Repair(sources=sources, targets=(), memory_bytes=0, **WORK),
        Guard(members=(Member("n1", "n1", address),), timeout_s=1.0, **GUARD),
    ]


@pytest.mark.parametrize("address", ["http://n1:1", "n1", "unix:/run/agent.sock", "", "n1:99999"])
def test_what_is_no_address_is_refused_with_the_request(address):
    for message in messages(address):
        with pytest.raises(InvalidMessage, match=f"{type(message).__name__}: .*is no address"):
            check_addresses(message)


def test_addresses_pass():
    for address in ("n1:1", "10.0.0.7:7420", "[::1]:80"):
        for message in messages(address):
            check_addresses(message)
