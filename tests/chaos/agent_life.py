"""The life of one agent, without its server, as a process to be killed: ``python agent_life.py``.

It forks a life for every line ``ROOT SOURCE TIMELINE LINES`` on its input, so that none has to
import anything first, answers ``pid N``, and lets it begin at the next line. A life adopts what it
finds, then stages, protects, holds, gives up, commits and stores shards, and says on its output
what it has reported to others. ``LINES`` > 0 kills it at that many lines of the agent's code, which
also gets between two writes to mapped memory; with 0 nothing is counted, with -1 all are.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from ecckpt.agent.runtime.service import AgentService
from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import EcckptError
from ecckpt.format.fragment_file import HOME, Header, fragment_bytes_for, pack_table
from ecckpt.format.ids import Generation, RunWriter, ShardId
from ecckpt.policy.sizing import steady_bytes
from ecckpt.protocol.messages.disk import Retain, Store
from ecckpt.protocol.messages.restore import Fence
from ecckpt.protocol.messages.save import Commit, Hold, Prefetch, Protect, Reserve, Stage, Watch

K, M, BLOCK_BYTES, SHARD_BYTES = 3, 2, 4096, 14_000
RUN, NODE, SESSION = "test", "n0", "0123456789abcdef"
# This node is home of rank 0 and holds this fragment of rank 1's shards.
HELD = 2
WAIT_S = 20.0
STEPS_A_LIFE = 4


def generation(timeline: int, step: int) -> Generation:
    return Generation(timeline, step, SESSION)


def header_of(which: Generation, rank: int, index: int = HOME) -> Header:
    return Header(
        shard=ShardId(RUN, which, rank),
        world_size=2,
        index=index,
        k=K,
        m=M,
        shard_bytes=SHARD_BYTES,
        fragment_bytes=fragment_bytes_for(SHARD_BYTES, K),
        block_bytes=BLOCK_BYTES,
        home=f"n{rank}",
        parent=None,
        created_unix_s=0,
    )


def payload_of(which: Generation, rank: int) -> bytes:
    """The k data fragments of a shard: what its home keeps."""
    head = header_of(which, rank)
    noise = hashlib.shake_128(f"{which} {rank}".encode()).digest(SHARD_BYTES)
    return noise.ljust(head.payload_bytes, b"\0")


def coded(which: Generation, rank: int) -> tuple[list[bytes], np.ndarray]:
    """All n fragments of a shard, and their checksum table."""
    head, payload = header_of(which, rank), payload_of(which, rank)
    size_bytes = head.fragment_bytes
    data = [payload[at * size_bytes : (at + 1) * size_bytes] for at in range(K)]
    parity = [bytearray(size_bytes) for _ in range(M)]
    table = Codec(K, M).encode([memoryview(each) for each in data], parity, BLOCK_BYTES)
    return [*data, *map(bytes, parity)], table


class Life:
    """What an agent of one node does from its start on, in the order in which ranks ask for it."""

    def __init__(self, root: Path, source: str, timeline: int) -> None:
        self._root = root
        self._source = source
        self._timeline = timeline
        # Exactly what the saves of one life after another need.
        steady = header_of(generation(1, 1), 0)
        self._budget_bytes = steady_bytes(steady, local_ranks=1, holders=1)

    def live(self) -> None:
        self._agent = AgentService(
            self._root,
            node=NODE,
            domain=NODE,
            address="127.0.0.1:1",
            token="",
            disk=self._root.parent / "disk",
        )
        base = self._agent.inventory(RUN).committed
        if self._try(
            lambda: self._agent.fence(Fence(RUN, RunWriter(self._timeline, SESSION), base, ()))
        ):
            _say(f"fenced {self._timeline}")
        first = (base.step if base else 0) + 1
        given_up: list[Generation] = []
        for step in range(first, first + STEPS_A_LIFE):
            which = generation(self._timeline, step)
            if step == first + 1:
                # Its trainer fails in the middle of its snapshot, and the next save says so.
                self._try(lambda which=which: self._stage(which, tuple(given_up)))
                given_up.append(which)
                continue
            if self._try(lambda which=which: self._save(which, tuple(given_up))):
                given_up.clear()
            else:
                given_up.append(which)

    def leave(self) -> None:
        """One more generation held in full and not committed, and a slot nobody will seal."""
        step = self._agent.inventory(RUN).committed.step + 1
        which = generation(self._timeline, step)
        self._stage(which, ())
        self._protect(which, ())
        self._hold(which, ())
        self._budget_bytes *= 2
        self._stage(generation(self._timeline, step + 1), ())

    def _try(self, act: Any) -> bool:
        try:
            act()
        except (EcckptError, OSError) as error:
            _say(f"failed {type(error).__name__}: {error}")
            return False
        return True

    def _save(self, which: Generation, given_up: tuple[Generation, ...]) -> None:
        self._stage(which, given_up)
        self._protect(which, given_up)
        self._hold(which, given_up)
        _say(f"committing {which}")
        self._agent.commit(Commit(RUN, which))
        _say(f"committed {which}")
        self._store(which)

    def _store(self, which: Generation) -> None:
        """To disk, and let older ones go from there."""
        message = Store(RUN, which, 0, ())
        deadline_s = time.monotonic() + WAIT_S
        while (answer := self._agent.store(message)).waiting_bytes:
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.002)
        if answer.problems or len(answer.pieces) != 2:
            raise EcckptError(f"not stored: {answer}")
        _say(f"stored {which}")
        self._agent.retain(Retain(RUN, RunWriter(self._timeline, SESSION), (which,)))

    def _stage(self, which: Generation, given_up: tuple[Generation, ...]) -> None:
        head = header_of(which, 0)
        slot = self._agent.reserve(
            Reserve(
                header=head,
                memory_bytes=self._budget_bytes,
                local_ranks=1,
                holders=1,
                discard=given_up,
            )
        )
        with Path(slot.path).open("r+b") as file:
            file.seek(slot.payload_offset)
            file.write(payload_of(which, 0))
        self._agent.stage(Stage(head, slot.region))

    def _protect(self, which: Generation, given_up: tuple[Generation, ...]) -> None:
        head = header_of(which, 0)
        self._agent.protect(
            Protect(
                shard=head.shard,
                writer=RunWriter(self._timeline, SESSION),
                targets=(),
                min_fragments=0,
                every_living=False,
                memory_bytes=self._budget_bytes,
                timeout_s=WAIT_S,
                discard=given_up,
            )
        )
        deadline_s, state = time.monotonic() + WAIT_S, "encoding"
        while state not in ("protected", "failed") and time.monotonic() < deadline_s:
            state = self._agent.watch(Watch(head.shard, state, 1.0)).state
        if state != "protected":
            problems = self._agent.watch(Watch(head.shard, "", 0.0)).problems
            raise EcckptError(f"{state}: {problems}")
        _say(f"protected {which}")

    def _hold(self, which: Generation, given_up: tuple[Generation, ...]) -> None:
        head = header_of(which, 1, HELD)
        table = pack_table(coded(which, 1)[1])
        source, budget_bytes = self._source, self._budget_bytes
        # Once there is memory to spare, it is pulled before it is asked for.
        self._agent.prefetch(
            Prefetch(
                header=head,
                writer=RunWriter(self._timeline, SESSION),
                source=source,
                timeout_s=5.0,
                discard=given_up,
            )
        )
        self._agent.hold(
            Hold(
                header=head,
                writer=RunWriter(self._timeline, SESSION),
                table=table,
                source=source,
                memory_bytes=budget_bytes,
                timeout_s=5.0,
                discard=given_up,
                repair=False,
            )
        )
        deadline_s = time.monotonic() + WAIT_S
        core = self._agent.core
        while core._holder.coming(head.shard) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        core.records.find(head.shard, HELD)  # or NotHeld


def _say(text: str) -> None:
    os.writev(1, [f"{text}\n".encode()])  # another call than those that are made to fail


class _Lines:
    """Counts the lines of the agent's code that all threads run; dies at one of them."""

    _FOLDER = f"{os.sep}ecckpt{os.sep}agent{os.sep}"

    def __init__(self, last: int) -> None:
        self.count = 0
        self._last = last

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        del arg
        if self._FOLDER not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def _child(go: int, root: str, source: str, timeline: int, last_line: int) -> None:
    os.read(go, 1)
    lines = _Lines(last_line)
    if last_line:
        threading.settrace(lines)
        sys.settrace(lines)
    status = 1
    try:
        life = Life(Path(root), source, timeline)
        life.live()
        if timeline == 1:
            life.leave()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.settrace(None)
    if last_line < 0:
        _say(f"lines {lines.count}")
    os._exit(status)


def main() -> None:
    for line in sys.stdin:
        root, source, timeline, last_line = line.split()
        go, start = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(go, root, source, int(timeline), int(last_line))
        _say(f"pid {pid}")
        sys.stdin.readline()
        os.write(start, b"x")
        _, status = os.waitpid(pid, 0)
        os.close(go)
        os.close(start)
        _say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
