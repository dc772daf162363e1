"""A rank that knows docs/PROTOCOL.md and docs/FORMAT.md and nothing of ecckpt: no import of it.

It saves bytes and gets them back. Comments give the sections of PROTOCOL.md.
"""

import hashlib
import http.client
import math
import mmap
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path

import msgpack

TIMEOUT_S = 30.0
POISON = 1 << 40
CRC_TABLE = []
for start in range(256):
    value = start
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    CRC_TABLE.append(value)


def crc32c(data):
    register = 0xFFFFFFFF
    for byte in data:
        register = register >> 8 ^ CRC_TABLE[(register ^ byte) & 255]
    return register ^ 0xFFFFFFFF


class Unix(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


class Refused(Exception):
    """A Refusal of an agent."""


class RankError(Exception):
    """An error that rank 0 has answered to all ranks."""


class ForeignRank:
    """Rank ``rank`` of ``ranks``, with the agent whose folder is ``root``."""

    def __init__(self, store, *, run, rank, ranks, root, fingerprint):
        self.run, self.rank, self.ranks = run, rank, ranks
        self._store, self._socket, self._fingerprint = store, str(root / "agent.sock"), fingerprint
        self._restores, self._given_up, self.parent = 0, [], None
        store.wait(["ecckpt/session"], timedelta(seconds=60))  # 6
        self.session = store.get("ecckpt/session").decode()

    # -- the agent --------------------------------------------------------------------------------

    def ask(self, method, path, body=None):
        connection = Unix(self._socket)
        try:
            connection.request(method, path, body=body)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise Refused(msgpack.unpackb(data))
        return data

    def post(self, verb, **message):
        body = self.ask("POST", f"/v1/runs/{self.run}/{verb}", msgpack.packb(message))
        return msgpack.unpackb(body, strict_map_key=False)

    # -- the ranks (6) ----------------------------------------------------------------------------

    def key(self, name):
        return f"ecckpt/{self.session}/{name}"

    def await_key(self, name, timeout_s=TIMEOUT_S):
        self._store.wait([self.key(name)], timedelta(seconds=timeout_s))
        return self._store.get(self.key(name))

    def exchange(self, tag, payload):
        self._store.set(self.key(f"{tag}/in/{self.rank}"), b"." + payload)
        answer = self.await_key(f"{tag}/out/{self.rank}", TIMEOUT_S + 5)
        if answer == b"=":
            answer = self.await_key(f"{tag}/out/all")
        if answer[:1] == b"-":
            raise RankError(*msgpack.unpackb(answer[1:]))
        assert answer[:1] == b"+"
        return answer[1:]

    def join(self):
        self.node = msgpack.unpackb(self.ask("GET", "/v1/node"))
        assert (self.node["protocol_version"], self.node["format_version"]) == (9, 1)
        member = {"info": self.node, "problem": "", "fingerprint": self._fingerprint}
        roster = msgpack.unpackb(self.exchange("join", msgpack.packb(member)))
        self.roster, self.run = roster, roster["run"]
        self.local_ranks, self.share = roster["local_ranks"], roster["share"]
        self.address = {node["node"]: node["address"] for node in roster["nodes"]}
        self._place([(node["domain"], node["node"]) for node in roster["nodes"]])

    def _place(self, nodes):
        """Group, ring and holders of this rank's home (5), for code="auto"."""
        count = len(nodes)
        self.m = min(2, (count - 1) // 2)
        self.k = min(8, count - 1 - self.m)
        nodes = sorted(nodes)
        groups = count // (self.k + self.m + 1)
        home = next(at for at, (_, node) in enumerate(nodes) if node == self.node["node"])
        dealt = nodes[home % groups :: groups]
        seen, turns = {}, []
        for at, (domain, node) in enumerate(dealt):
            turns.append((seen.get(domain, 0), at, domain, node))
            seen[domain] = seen.get(domain, 0) + 1
        ring = [(domain, node) for _, _, domain, node in sorted(turns)]
        at = [node for _, node in ring].index(self.node["node"])
        self.ring = ring[at + 1 :] + ring[:at]
        self.holders = [node for _, node in self.ring][: self.k + self.m]

    @property
    def writer(self):
        return f"{self.timeline}.{self.session}"

    # -- a restore (9) ----------------------------------------------------------------------------

    def restore(self):
        """Return the bytes saved last, or None if there are none, and the order."""
        self._restores += 1
        for attempt in range(4):
            tag = f"restore/{self._restores}/{attempt}"
            inventory = msgpack.unpackb(self.ask("GET", f"/v1/runs/{self.run}/inventory"))
            known = inventory["fence"] if not attempt else 0
            answer = self.exchange(f"{tag}/order", str(known).encode())
            order = msgpack.unpackb(answer, strict_map_key=False)
            self.timeline, header = order["timeline"], order["header"]
            if header is None:
                assert not order["rejected"]
                return None, order
            data = self._bring(order)
            kind = "bad" if data is None else "ok"
            text, lacks = ("", -1) if data else (f"rank {self.rank}", self.rank)
            outcome = msgpack.packb({"kind": kind, "text": text, "lacks": lacks, "witnessed": -1})
            if self.exchange(f"{tag}/verdict", outcome) == b"go":
                break
        else:
            raise AssertionError("no attempt succeeded")
        self.parent = header["generation"]
        self._guard()
        if order["repair"]:
            shard = {name: header[name] for name in ("run", "generation", "rank")}
            self._protect(shard, order["repair"], least=0)
        return data, order

    def _bring(self, order):
        header = order["header"]
        shard = {name: header[name] for name in ("run", "generation", "rank")}
        if order["local"] and (data := self._proven(self.post("slot", **shard))) is not None:
            return data
        fetched = self.post(
            "fetch",
            header=header,
            writer=self.writer,
            sources=[
                {"index": index, "addresses": addresses}
                for index, addresses in order["sources"].items()
            ],
            memory_bytes=0,
            timeout_s=0.8 * TIMEOUT_S,
        )
        return self._proven(fetched["slot"])

    def _proven(self, slot):
        """Return the shard in a slot, every block checked; None if one is bad."""
        header = slot["header"]
        name = f"/v1/runs/{self.run}/shards/{header['generation']}/{header['rank']}/table"
        size, block = header["fragment_bytes"], header["block_bytes"]
        rows, n = math.ceil(size / block), header["k"] + header["m"]
        table = self.ask("GET", name)
        assert len(table) == 4 * n * rows + 12
        sums = struct.unpack(f"<{n * rows}I", table[:-12])
        with Path(slot["path"]).open("rb") as file:
            file.seek(slot["payload_offset"])
            payload = file.read(size * header["k"])
        for index in range(header["k"]):
            for row in range(rows):
                piece = payload[index * size :][:size][row * block :][:block]
                if crc32c(piece) != sums[index * rows + row]:
                    return None
        return payload[: header["shard_bytes"]]

    def _guard(self):
        self.post(
            "guard",
            run=self.run,
            writer=self.writer,
            members=[
                {"node": node, "domain": domain, "address": self.address[node]}
                for domain, node in self.ring
            ],
            holders=self.k + self.m,
            local_ranks=self.local_ranks,
            memory_bytes=0,
            timeout_s=TIMEOUT_S / 2,
        )

    # -- a save (7) -------------------------------------------------------------------------------

    def save(self, step, data, claim=()):
        """Save these bytes; return whether the generation was committed.

        ``claim`` lists the replicated tensors: name, dtype, shape and bytes.
        """
        generation = f"{self.timeline}.{step}.{self.session}"
        least = math.ceil(len(data) / self.k)
        fragment_bytes = least + (832 - least) % 4096
        header = {
            "run": self.run,
            "generation": generation,
            "rank": self.rank,
            "world_size": self.ranks,
            "index": -1,
            "k": self.k,
            "m": self.m,
            "shard_bytes": len(data),
            "fragment_bytes": fragment_bytes,
            "block_bytes": 65536,
            "home": self.node["node"],
            "parent": self.parent,
            "created_unix_s": int(time.time()),
        }
        slot = self.post(
            "reserve",
            header=header,
            memory_bytes=0,
            local_ranks=self.local_ranks,
            holders=self.k + self.m,
            discard=self._given_up,
        )
        with Path(slot["path"]).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            start = slot["payload_offset"]
            payload = data.ljust(self.k * fragment_bytes, b"\0")
            memory[start : start + len(payload)] = payload
        if claim and not self._claims(generation, claim):
            self.give_up(step)
            return False
        self.post("stage", header=header, region=slot["region"])
        shard = {name: header[name] for name in ("run", "generation", "rank")}
        targets = [
            {"index": index, "node": node, "address": self.address[node]}
            for index, node in enumerate(self.holders)
        ]
        self._protect(shard, targets, least=self.k)
        state = "encoding"
        while state != "protected":
            progress = self.post("watch", shard=shard, known_state=state, wait_s=1.0)
            state = progress["state"]
            assert state not in ("failed", "unknown"), progress
            if self._add(f"count/{generation}", 0) < 0:
                break
        count = self._add(f"count/{generation}", 1)
        if count == self.ranks:
            self._store.set(self.key(f"count/{generation}/wake"), b"")
        while 0 <= count < self.ranks:
            self.await_key(f"count/{generation}/wake")
            count = self._add(f"count/{generation}", 0)
        if count == self.ranks:
            self.post("commit", run=self.run, generation=generation)
            self._given_up = []
            self._guard()
        else:
            self._given_up.append(generation)
        self._leave(generation)
        return count == self.ranks

    def give_up(self, step):
        """Have the save of this step fail on all ranks."""
        generation = f"{self.timeline}.{step}.{self.session}"
        self._given_up.append(generation)
        key = self.key(f"count/{generation}")
        while (count := self._store.add(key, 0)) != self.ranks:
            left = str(count - POISON)
            if self._store.compare_set(key, str(count), left) == left.encode():
                self._store.set(f"{key}/wake", b"")
                break
        self._leave(generation)

    def _claims(self, generation, claim):
        """Return whether the first rank's claim is this one."""
        key = self.key(f"claim/{generation}")
        form = repr([(name, dtype, shape) for name, dtype, shape, _ in claim]).encode()
        form = hashlib.sha256(form).digest()[:16]
        sums = b"".join(crc32c(raw).to_bytes(4, "little") for *_, raw in claim)
        digest = hashlib.sha256(form + sums).digest()[:16].hex()
        mine = f"{digest} {self.rank}"
        first = self._store.compare_set(f"{key}/digest", "", mine).decode()
        if first == mine:
            self._store.set(f"{key}/sums", form + sums)
            return True
        if first.split(" ")[0] == digest:
            return True
        theirs = self.await_key(f"claim/{generation}/sums", 10)
        assert theirs[:16] == form
        names = [
            name
            for at, (name, *_) in enumerate(claim)
            if theirs[16 + 4 * at :][:4] != sums[4 * at :][:4]
        ]
        text = f"not the same on rank {self.rank} as on the first: {', '.join(names)}"
        self._store.set(f"{key}/verdict", text.encode()[:4000])
        return False

    def _protect(self, shard, targets, least):
        self.post(
            "protect",
            shard=shard,
            writer=self.writer,
            targets=targets,
            min_fragments=least,
            every_living=least > 0,
            memory_bytes=0,
            timeout_s=TIMEOUT_S / 2,
            discard=self._given_up,
        )

    def _add(self, name, amount):
        return self._store.add(self.key(name), amount)

    def _leave(self, generation):
        if self._add(f"left/{generation}", 1) == self.ranks:
            self._store.set(self.key(f"left/{generation}/wake"), b"")
        self.await_key(f"left/{generation}/wake")
