"""SIGKILL, or an error, at every system call and every line of an agent's life.

    python tests/chaos/crashing.py [EVERY [LINES]]

runs every one, or every EVERY-th call and LINES-th line, and counts. A life (agent_life.py) adopts,
fences, stages, protects, holds, gives up, commits and stores. It is run once under strace to see
which system calls it makes, then once for each of them with SIGKILL in its place, once for each
line of the agent's code with SIGKILL before it (which also gets between two writes to mapped
memory), and once for each call that may fail, with that error. After each:

- an agent that starts in the folder adopts everything that was reported committed, protected or
  held and that nothing newer has replaced, byte for byte; on disk is what was reported stored;
- the fence is at least what was reported; every other sealed file is what it says, byte for byte;
- no file is left that nobody knows; strangers' files are as they were;
- the next life goes through from start to end.
"""

from __future__ import annotations

import logging
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from ecckpt.agent.core.run_records import RunRecords
from ecckpt.agent.runtime.disk_store import Disk
from ecckpt.agent.runtime.region_store import RegionStore
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header
from ecckpt.format.ids import Generation
from ecckpt.protocol.encoding import pack_message, unpack_message
from ecckpt.protocol.http import request
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.save import Held
from tests.chaos import agent_life
from tests.chaos.agent_life import HELD, NODE, RUN, coded, header_of, payload_of

# What only waits, asks the time or who one is changes nothing: no need to die there.
HARMLESS = "futex,clock_nanosleep,rt_sigprocmask,rt_sigaction,rt_sigreturn,sched_yield,getpid,"
HARMLESS += "gettid,getuid,geteuid,rseq,set_robust_list,poll,restart_syscall,exit,exit_group"
# What a full disk, a full table or a failing device gives.
ERRORS = {
    "openat": "EMFILE",
    "write": "ENOSPC",
    "fallocate": "ENOSPC",
    "rename": "EIO",
    "unlink": "EIO",
    "fsync": "EIO",
    "ftruncate": "EIO",
    "socket": "EMFILE",
    "connect": "ETIMEDOUT",
    "fstatfs": "EIO",
    "statfs": "EIO",
    "getdents64": "EIO",
}
DEADLINE_S = 15.0
SIDE_BY_SIDE = 2  # a life mostly waits for itself
_CALL = re.compile(r"^\d+ +([a-z0-9_]+)\(")


@dataclass(frozen=True, slots=True)
class Point:
    """Where: the ``number``-th call of ``name`` (or line of code), and what happens there."""

    name: str
    number: int
    what: str = "KILL"

    @property
    def strace(self) -> list[str]:
        if self.name == "line":
            return []
        how = "signal=KILL" if self.what == "KILL" else f"error={self.what}"
        return ["-e", f"trace={self.name}", "-e", f"inject={self.name}:{how}:when={self.number}"]

    @property
    def kind(self) -> str:
        if self.what != "KILL":
            return "an error"
        return "KILL at a line" if self.name == "line" else "KILL at a call"

    def __str__(self) -> str:
        return f"{self.what} at {self.name} {self.number}"


@dataclass(slots=True)
class Account:
    """What an agent told others, until it ended."""

    lines: list[str] = field(default_factory=list)
    status: int = 0

    def last(self, word: str) -> str | None:
        return next((line.split()[1] for line in self.lines[::-1] if line.startswith(word)), None)

    def committed(self) -> Generation:
        return Generation.parse(self.last("committed ") or "")


class Lives:
    """Lives of agents, one at a time, in one folder; use as a context manager."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix=f"ecckpt-crash-{os.getpid()}-", dir="/dev/shm"))
        self.root = self.base / "live" / NODE
        self.root.mkdir(mode=0o700, parents=True)
        self._prepared = self.base / "prepared"
        self._held: list[Held] = []
        self._server = _source(self._held)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Lives:
        self._thread.start()
        with (self.base / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, agent_life.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        try:
            self._base_account = self.live(timeline=1)
            assert self._base_account.status == 0, self._base_account
            _make_strangers(self.root)
            shutil.copytree(self.root.parent, self._prepared)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        shutil.rmtree(self.base)

    def reset(self) -> None:
        """The folder as the first life left it."""
        shutil.rmtree(self.root.parent)
        shutil.copytree(self._prepared, self.root.parent)

    def live(self, *, timeline: int, strace: list[str] = (), last_line: int = 0) -> Account:
        """One life, possibly cut short."""
        account = Account()
        address = "{}:{}".format(*self._server.server_address)
        self._tell(f"{self.root} {address} {timeline} {last_line}")
        pid = self._line().split()[1]
        with _traced(pid, list(strace)):
            self._tell("go")
            while not (line := self._line()).startswith("ended "):
                account.lines.append(line)
        account.status = int(line.split()[1])
        # The source answers one after another: now it has seen all that this life said.
        request(address, "GET", "/idle", timeout_s=DEADLINE_S, limit_bytes=0)
        return account

    # -- points -----------------------------------------------------------------------------------

    def calls(self) -> Counter[str]:
        """How often a life makes each system call, in whichever thread makes it most often."""
        self.reset()
        log = self.base / "trace"
        account = self.live(timeline=2, strace=["-e", f"trace=!{HARMLESS}", "-o", str(log)])
        assert account.status == 0, account
        counts: Counter[tuple[str, str]] = Counter()
        for line in log.read_text().splitlines():
            if match := _CALL.match(line):
                counts[line.split()[0], match[1]] += 1
        most: Counter[str] = Counter()
        for (_, name), count in counts.items():
            most[name] = max(most[name], count)
        return most

    def lines(self) -> int:
        """How many lines of the agent's code a life runs."""
        self.reset()
        return int(self.live(timeline=2, last_line=-1).last("lines ") or 0)

    def points(self, every: int = 1, lines: int = 1, first: int = 0) -> list[Point]:
        """All points, or every so-manieth call from the ``first`` on, and line."""
        calls = [
            Point(name, number)
            for name, count in sorted(self.calls().items())
            for number in range(1, count + 1)
        ]
        failing = [replace(at, what=ERRORS[at.name]) for at in calls if at.name in ERRORS]
        return [
            *calls[first::every],
            *failing[first::every],
            *(Point("line", number) for number in range(1, self.lines() + 1, lines)),
        ]

    def crash(self, point: Point) -> bool:
        """Live up to that point, and look; False if it was never reached."""
        self.reset()
        self._held.clear()
        last_line = point.number if point.name == "line" else 0
        account = self.live(timeline=2, strace=point.strace, last_line=last_line)
        if point.what == "KILL":
            assert account.status in (0, -9), account
            reached = account.status == -9
        else:
            assert account.status in (0, 1), account
            reached = True
        self.check(account)
        after = self.live(timeline=3)
        assert after.status == 0, after
        assert not after.last("failed"), after
        self.check(after)
        return reached

    # -- what must be true ------------------------------------------------------------------------

    def check(self, account: Account) -> None:
        shelf, records = RegionStore(self.root, node=NODE), RunRecords(NODE)
        shelf.adopt(records)
        ledger = records.get(RUN)
        committed = account.last("committed ") or self._base_account.last("committed ")
        least = Generation.parse(committed)
        assert ledger.committed is not None
        assert ledger.committed >= least
        assert ledger.fence >= int(account.last("fenced ") or 1)
        must = {(ledger.committed, 0, HOME), (ledger.committed, 1, HELD)}
        protected = account.last("protected ")
        if (
            protected
            and not account.last("failed ")
            and Generation.parse(protected) >= ledger.committed
        ):
            must.add((Generation.parse(protected), 0, HOME))
        must |= {
            (held.shard.generation, held.shard.rank, held.index)
            for held in self._held
            if not held.problem and held.shard.generation >= ledger.committed
        }
        have = {}
        for (shard, index), entry in ledger.entries.items():
            have[shard.generation, shard.rank, index] = entry
            start, end = SUPERBLOCK_BYTES, entry.header.trailer_offset
            _check_piece(entry.header, bytes(entry.region.view[start:end]), entry.table)
        assert must <= have.keys(), f"missing {must - have.keys()} after {account}"
        spares = shelf.tier._accounts._spare[RUN]
        paths = {each.path for each in (*spares, *(e.region for e in ledger.entries.values()))}
        _check_strangers(self.root, paths)
        self._check_disk(account)
        assert set(ledger.rejected) == {"0000000000000000.region"}

    def _check_disk(self, account: Account) -> None:
        """What a loss of power leaves: at least what was reported stored, or something newer."""
        found = Disk(self.root.parent / "disk", node=NODE).adopt()
        assert not found.rejected
        pieces: dict[Generation, set[tuple[int, int]]] = defaultdict(set)
        for file in found.files:
            header = file.header
            which, rank = header.shard.generation, header.shard.rank
            content = file.path.read_bytes()[SUPERBLOCK_BYTES:][: header.payload_bytes]
            _check_piece(header, content, file.table)
            pieces[which].add((rank, header.index))
        stored = account.last("stored ") or self._base_account.last("stored ")
        whole = [which for which, each in pieces.items() if each == {(0, HOME), (1, HELD)}]
        assert max(whole) >= Generation.parse(stored), f"{pieces} after {account}"

    def _tell(self, text: str) -> None:
        self._process.stdin.write(f"{text}\n".encode())

    def _line(self) -> str:
        raw = b""
        while not raw.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
            assert ready, f"nothing within {DEADLINE_S} s, after {raw!r}"
            byte = self._process.stdout.read(1)
            assert byte, "the lives have ended"
            raw += byte
        return raw.decode().strip()


def _check_piece(header: Header, content: bytes, table: Any) -> None:
    which, rank = header.shard.generation, header.shard.rank
    assert header == header_of(which, rank, header.index)
    fragments, right = coded(which, rank)
    assert content == (payload_of(which, rank) if header.index == HOME else fragments[header.index])
    assert (table == right).all()


STRANGER = b"a neighbour's bytes, none of our business"


def _strangers(root: Path) -> list[Path]:
    return [
        root / "regions" / "0000000000000000.region",
        root / "regions" / "notes.txt",
        root / "runs" / "notes.txt",
        root.parent / "n1" / "regions" / "0000000000000001.region",
        root.parent / "disk" / "files" / "notes.txt",
        root.parent / "disk" / "runs" / "notes.txt",
    ]


def _make_strangers(root: Path) -> None:
    for path in _strangers(root):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(STRANGER)


def _check_strangers(root: Path, ours: set[Path]) -> None:
    for path in _strangers(root):
        assert path.read_bytes() == STRANGER, path
    left = set((root / "regions").iterdir()) - ours - set(_strangers(root))
    assert not left, f"files that nobody knows: {left}"


@contextmanager
def _traced(pid: str, arguments: list[str]) -> Iterator[None]:
    if not arguments:
        yield
        return
    output = [] if "-o" in arguments else ["-o", "/dev/null"]
    command = ["strace", "-f", "-p", pid, *output, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as tracer:
        said = tracer.stderr.readline()
        assert b"attached" in said, said
        yield
        tracer.wait(DEADLINE_S)


def _source(held: list[Held]) -> HTTPServer:
    """Rank 1's home: gives fragments, and takes note of what is held."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/idle":
                return self._answer(b"")
            *_, generation, rank, _, index = self.path.partition("?")[0].split("/")
            fragments, _ = coded(Generation.parse(generation), int(rank))
            return self._answer(fragments[int(index)])

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            if len(body) < length:
                return  # it died while telling
            held.append(unpack_message(Held, body))
            self._answer(pack_message(Done()))

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    class Server(HTTPServer):
        def handle_error(self, *_: object) -> None: ...  # the other end was killed

    return Server(("127.0.0.1", 0), Handler)


def run(
    every: int = 1,
    lines: int = 1,
    first: int = 0,
    *,
    share: int = 0,
    shares: int = 1,
    say: Any = print,
) -> Counter[str]:
    """Crash at every so-manieth point; returns how many of each kind were reached.

    With ``shares``, only at every ``shares``-th of these points, from number ``share`` on.
    """
    logging.disable(logging.CRITICAL)
    try:
        with Lives() as lives:
            points = lives.points(every, lines, first)[share::shares]
        say(f"{len(points)} points")
        parts = [points[part::SIDE_BY_SIDE] for part in range(SIDE_BY_SIDE)]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            return sum(pool.map(_crash_at, parts, [say] * SIDE_BY_SIDE), Counter())
    finally:
        logging.disable(logging.NOTSET)


def _crash_at(points: list[Point], say: Any) -> Counter[str]:
    reached: Counter[str] = Counter()
    with Lives() as lives:
        for number, point in enumerate(points):
            try:
                reached[point.kind] += lives.crash(point)
            except AssertionError as error:
                raise AssertionError(f"{point}: {error}") from error
            if number % 500 == 0:
                say(f"{number} of {len(points)}: {point}")
    return reached


if __name__ == "__main__":
    print(dict(run(*map(int, sys.argv[1:]))))
