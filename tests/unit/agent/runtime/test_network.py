"""What an agent does over the network, between real sockets: the other end is made up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import TooFewFragments
from ecckpt.format.fragment_file import Header, pack_table
from ecckpt.protocol.agent_client import AgentClient, shard_path
from ecckpt.protocol.encoding import pack_message, unpack_message
from ecckpt.protocol.gather import find_table
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.save import (
    Commit,
    Held,
    Hold,
    Prefetch,
    Protect,
    Reserve,
    Stage,
    Watch,
)
from ecckpt.protocol.verbs import COMMIT, HOLD, INVENTORY, PREFETCH, PROTECT, RESERVE, STAGE, WATCH
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import generation, header, table_of, writer_of

INDEX, BLOCK = 1, 4096


class Home:
    """A home with three data fragments of each shard: ``gets`` are what was asked of it."""

    def __init__(self) -> None:
        self.gets: list[tuple[str, int]] = []
        self.held: queue.SimpleQueue[Held] = queue.SimpleQueue()
        self.rotten: set[str] = set()  # queries that are answered with a block that is wrong
        self.refusals = 0

    def shard(self, step: int) -> tuple[Header, bytes, bytes]:
        """A fragment's header, its bytes and the packed table."""
        head = header(
            INDEX,
            run="network",
            gen=generation(1, step),
            shard_bytes=100_000,
            block_bytes=BLOCK,
        )
        noise = np.random.default_rng(step)
        data = [bytearray(noise.bytes(head.fragment_bytes)) for _ in range(head.k)]
        parity = [bytearray(head.fragment_bytes) for _ in range(head.m)]
        table = Codec(head.k, head.m).encode(data, parity, BLOCK)
        return head, bytes(data[INDEX]), pack_table(table)

    def answer(self, path: str, span: str | None) -> tuple[int, bytes]:
        """Status and body of a GET."""
        where, _, query = path.partition("?")
        if self.refusals:
            self.refusals -= 1
            return 503, b""
        step = int(where.split("/")[5].split(".")[1])
        _, data, table = self.shard(step)
        if where.endswith("/table"):
            return 200, table
        assert span is not None
        first, last = span.removeprefix("bytes=").split("-")
        self.gets.append((query, int(last) + 1 - int(first)))
        if query in self.rotten:
            data = bytes([data[0] ^ 1]) + data[1:]
        return 206, data[int(first) : int(last) + 1]


@contextmanager
def serving(home: Home) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*home.answer(self.path, self.headers["Range"]))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            home.held.put(unpack_message(Held, body))
            self.reply(200, pack_message(Done()))

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()


class Holding:
    """A real agent that holds for that home."""

    def __init__(self, client: AgentClient, home: Home, address: str) -> None:
        self.client, self._home, self._address = client, home, address

    def prefetch(self, step: int) -> None:
        head, *_ = self._home.shard(step)
        self.client.call(
            PREFETCH,
            Prefetch(
                header=head, writer=writer_of(1), source=self._address, timeout_s=30.0, discard=()
            ),
        )

    def hold(self, step: int) -> None:
        """Have it hold a fragment; its bytes are what they should be."""
        head, data, table = self._home.shard(step)
        self.client.call(
            HOLD,
            Hold(
                header=head,
                writer=writer_of(1),
                table=table,
                source=self._address,
                memory_bytes=0,
                timeout_s=30.0,
                discard=(),
                repair=False,
            ),
        )
        assert self._home.held.get(timeout=20).problem == ""
        found = bytearray(len(data))
        self.client.pull_fragment(head.shard, INDEX, memoryview(found), timeout_s=10)
        assert found == data

    def commit(self, step: int) -> None:
        self.client.call(COMMIT, Commit("network", generation(1, step)))

    def used_bytes(self) -> int:
        return int(self.client.status()["runs"]["network"]["used_bytes"])


def test_what_is_fetched_early_is_held_without_another_pull(cluster1: LocalCluster) -> None:
    home = Home()
    with serving(home) as address:
        holding = Holding(cluster1.client("n0"), home, address)
        size_bytes = home.shard(1)[0].fragment_bytes
        for step in (1, 2):
            holding.hold(step)
        holding.prefetch(3)  # there is no memory that nobody needs
        holding.hold(3)
        assert home.gets == [("", size_bytes)] * 3
        holding.commit(3)  # two regions are spare now
        used_bytes = holding.used_bytes()
        home.gets.clear()
        holding.prefetch(4)
        holding.hold(4)
        assert home.gets == [("early", size_bytes)]
        home.gets.clear()
        home.rotten.add("early")  # changed since: the table decides
        holding.prefetch(5)
        holding.hold(5)
        assert home.gets == [("early", size_bytes), ("", BLOCK)]
        holding.prefetch(6)  # nobody asks for it
        holding.commit(7)
        held = holding.client.call(INVENTORY, "network").headers
        assert not [each for each in held if each.shard.generation.step == 6]
        assert holding.used_bytes() == used_bytes


def test_a_home_gives_nothing_early_that_is_not_being_encoded(cluster1: LocalCluster) -> None:
    client = cluster1.client("n0")
    head = header(run="early", gen=generation(1, 1), k=1, m=0)
    slot = client.call(
        RESERVE, Reserve(header=head, memory_bytes=0, local_ranks=1, holders=0, discard=())
    )
    client.call(STAGE, Stage(slot.header, slot.region))
    path = f"{shard_path(head.shard)}/fragments/0"
    for query in ("", "?early", "?last"):
        status, _ = client._exchange("GET", path + query)
        assert status == 404
    client.call(
        PROTECT,
        Protect(
            shard=head.shard,
            writer=writer_of(1),
            targets=(),
            min_fragments=0,
            every_living=False,
            memory_bytes=0,
            timeout_s=30.0,
            discard=(),
        ),
    )
    state = "encoding"
    while state not in ("protected", "failed"):
        state = client.call(WATCH, Watch(head.shard, state, 5.0)).state
    assert client._exchange("GET", path + "?early")[0] == 200


@pytest.mark.parametrize("refusals", [1, 2])
def test_checksums_are_asked_for_twice(refusals: int) -> None:
    home = Home()
    home.refusals = refusals
    head = home.shard(1)[0].at(-1)
    with serving(home) as address:
        client = AgentClient(address)

        def ask() -> np.ndarray:
            return find_table(
                head, {0: (address,)}, lambda _: client.table(head), silent=set(), problems=[]
            )

        if refusals > 1:
            with pytest.raises(TooFewFragments, match="checksums of"):
                ask()
        else:
            assert ask().shape == table_of(head).shape
