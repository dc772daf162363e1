"""Holding fragments of other nodes' shards: pull, verify every block, seal, answer."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ecckpt import wire
from ecckpt.agent.ledger import Entry
from ecckpt.agent.shelf import Shelf
from ecckpt.client import peer_client
from ecckpt.codec import Codec
from ecckpt.errors import CorruptFragment, EcckptError, InvalidMessage, RequestRefused
from ecckpt.fragment import HOME, SUPERBLOCK_BYTES, Header, parse_table
from ecckpt.tiers.memory import Region

_log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0
_QUEUE_LIMIT = 4096


class Holder:
    """Pulls what this node was asked to hold.

    Pulls run in threads of their own, never in the server's: agents that pull from each other
    cannot use up the threads that answer.
    """

    def __init__(self, shelf: Shelf, *, token: str) -> None:
        self._shelf = shelf
        self._token = token
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="hold")
        self._queued = 0

    def start(self, message: wire.Hold) -> None:
        """Queue the work; ``Held`` goes to the source when it is done."""
        header = message.header
        if header.index == HOME:
            raise InvalidMessage("a home copy is fetched, not held")
        self._shelf.admit(header.shard.run, message.writer)
        table = parse_table(message.table, header, f"table of {header.shard}")
        with self._shelf.changed:
            if self._queued >= _QUEUE_LIMIT:
                raise RequestRefused(self._shelf.node, 503, f"{self._queued} fragments are queued")
            self._queued += 1
        self._pool.submit(self._run, message, table)

    def _run(self, message: wire.Hold, table: np.ndarray) -> None:
        shard, index = message.header.shard, message.header.index
        problem = ""
        try:
            self._take(message, table)
        except (EcckptError, OSError) as error:
            problem = str(error)
        except BaseException as error:
            problem = f"unexpected {type(error).__name__}, see the log of {self._shelf.node}"
            _log.exception("holding fragment %d of %s failed", index, shard)
        with self._shelf.changed:
            self._queued -= 1
        answer = wire.Held(shard, index, self._shelf.node, problem)
        try:
            peer_client(message.source, self._token, timeout_s=_ANSWER_TIMEOUT_S).held(answer)
        except (EcckptError, OSError) as error:
            _log.warning("could not tell %s that fragment %d is held: %s", shard, index, error)

    def _take(self, message: wire.Hold, table: np.ndarray) -> None:
        header = message.header
        run = header.shard.run
        self._shelf.discard(run, header.shard.rank, message.discard)
        with self._shelf.changed:
            present = self._shelf.ledger(run).find(header.shard, header.index)
        if present is not None and present.header.same_shard(header):
            return
        region = self._shelf.allocate(
            run,
            header.file_bytes,
            budget_bytes=message.memory_bytes,
            what=f"fragment {header.index} of {header.shard}",
        )
        try:
            self._pull(message, header, region, table)
            self._shelf.admit(run, message.writer)
        except BaseException:
            self._shelf.tier.recycle(run, region)
            raise
        entry = Entry(header, region, None)
        self._shelf.seal(entry, table)
        self._shelf.put(entry)

    def _pull(self, message: wire.Hold, header: Header, region: Region, table: np.ndarray) -> None:
        view = region.view[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + header.fragment_bytes]
        client = peer_client(message.source, self._token)
        codec = Codec(header.k, header.m)
        bad: list[tuple[int, int]] = []
        for _ in range(2):  # a flipped bit on the way deserves a second try, not a third
            client.pull_fragment(header.shard, header.index, view, timeout_s=message.timeout_s)
            bad = codec.verify({header.index: view}, table, header.block_bytes)
            if not bad:
                return
        raise CorruptFragment(
            f"fragment {header.index} of {header.shard} from {message.source}: "
            f"{len(bad)} of {header.rows} blocks fail their CRC32C"
        )
