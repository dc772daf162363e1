"""How the ranks of a session agree: over the ``torch.distributed`` store of their launcher.

client/cluster/join.py exchanges configurations over a ``Meeting``, and client/threads.py performs
the store effects of saves and restores with it.

Every exchange has a deadline and names the ranks that did not answer. Rank 0 collects all payloads
and decides, so each rank writes one key and reads one or two, whatever the size of the cluster.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgpack
import torch
import torch.distributed as dist

from ecckpt.client import deadlines
from ecckpt.errors import EcckptError, InvalidConfig, RankTimeout, facts, revive

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NONCE_BYTES = 8
# A shared answer at least this long is stored once, at the price of a second read per rank.
_LONG_BYTES = 1 << 10
_SEE_ALL = b"="  # stands where a rank's answer would be: the answer is under .../out/all

_T = TypeVar("_T")

Decide = Callable[[list[bytes]], Sequence[bytes]]


class Meeting(Protocol):
    """How the ranks of one session meet.

    ``session`` is 16 hex digits, new at every start of the run.
    """

    rank: int
    world_size: int
    session: str

    def decide(self, tag: str, payload: bytes, decide: Decide, *, timeout_s: float) -> bytes:
        """Send a payload to rank 0, which turns all payloads into one answer per rank.

        Every rank calls this with the same ``tag``, and uses each tag once. An ``EcckptError`` that
        ``decide`` raises on rank 0 is raised on all ranks. Raises ``RankTimeout`` after
        ``timeout_s``.
        """

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; return the new value. Safe from any thread."""

    def subtract_unless(self, key: str, amount: int, *, value: int) -> bool:
        """Subtract from a counter unless it is at ``value``; return False if it is.

        Comparison and subtraction are one atomic step. Safe from any thread.
        """

    def agree(self, key: str, text: str) -> str:
        """Set a text unless the key has one; return the text that the first caller set.

        Safe from any thread.
        """

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key. Safe from any thread."""

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key, None if it has none. Does not wait. Safe from any thread."""

    def drop(self, key: str) -> None:
        """Remove a key or a counter. Safe from any thread."""

    def wait(self, key: str, timeout_s: float) -> None:
        """Block until the key has a value, at most ``timeout_s``; return either way.

        Only one thread may wait at a time.
        """


class Alone:
    """The meeting of a single process, which needs no store."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.session = secrets.token_hex(_NONCE_BYTES)
        self._counters: dict[str, int] = {}
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._value_set = threading.Condition()

    def decide(self, tag: str, payload: bytes, decide: Decide, *, timeout_s: float) -> bytes:
        """See ``Meeting.decide``; the only rank decides."""
        del tag, timeout_s
        return decide([payload])[0]

    def add(self, key: str, amount: int) -> int:
        """See ``Meeting.add``."""
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]

    def subtract_unless(self, key: str, amount: int, *, value: int) -> bool:
        """See ``Meeting.subtract_unless``."""
        with self._lock:
            count = self._counters.get(key, 0)
            if count != value:
                self._counters[key] = count - amount
            return count != value

    def agree(self, key: str, text: str) -> str:
        """See ``Meeting.agree``."""
        return self._values.setdefault(key, text.encode()).decode()

    def put(self, key: str, value: bytes) -> None:
        """See ``Meeting.put``."""
        with self._value_set:
            self._values[key] = value
            self._value_set.notify_all()

    def peek(self, key: str) -> bytes | None:
        """See ``Meeting.look``."""
        return self._values.get(key)

    def drop(self, key: str) -> None:
        """See ``Meeting.drop``."""
        self._values.pop(key, None)

    def wait(self, key: str, timeout_s: float) -> None:
        """See ``Meeting.wait``; another thread of this process sets the value."""
        with self._value_set:
            self._value_set.wait_for(lambda: key in self._values, timeout_s)


@dataclass
class StoreMeeting:
    """A meeting over a ``torch.distributed`` store.

    All keys contain the session. A store that survives restarts may still have keys of an earlier
    session, and those are never read.

    A store serialises the calls on one connection, and a blocking ``wait`` occupies it. So
    ``decide``, the background threads' calls and ``wait`` each use a connection of their own, where
    the store can be cloned. A connection that broke is made again for the call after the one that
    noticed.
    """

    store: Store
    rank: int
    world_size: int
    session: str

    def __post_init__(self) -> None:
        # Stores have clone() since torch 2.7. An older one is shared, and serialises the calls.
        self._can_clone = hasattr(self.store, "clone")
        self._counting = self._connected() if self._can_clone else self._own(self.store)
        self._waiting = self._connected() if self._can_clone else None
        self._mine = self._own(self.store)
        self._lock = threading.Lock()

    def _own(self, store: Store) -> Store:
        return dist.PrefixStore(f"ecckpt/{self.session}", store)  # type: ignore[attr-defined]

    def _connected(self) -> Store:
        return self._own(self.store.clone())  # type: ignore[attr-defined]

    def _again(self) -> Store | None:
        """A new connection, if the store answers at once.

        torch itself would try to reach a store that is gone for as long as the store's timeout.
        """
        root: Any = self.store
        while hasattr(root, "underlying_store"):
            root = root.underlying_store
        if not (self._can_clone and hasattr(root, "host") and hasattr(root, "port")):
            return None
        try:
            address = root.host, root.port
            socket.create_connection(address, deadlines.STORE_CONNECT_S).close()
            return self._connected()
        except (OSError, RuntimeError):
            return None

    def _count(self, act: Callable[[Store], _T]) -> _T:
        """Call the store; after an error the next call has a connection of its own again."""
        with self._lock:
            try:
                return act(self._counting)
            except RuntimeError:
                self._counting = self._again() or self._counting
                raise

    def decide(self, tag: str, payload: bytes, decide: Decide, *, timeout_s: float) -> bytes:
        """See ``Meeting.decide``."""
        deadline_s = time.monotonic() + timeout_s
        # The prefix keeps the value non-empty for every payload.
        self._mine.set(f"{tag}/in/{self.rank}", b"." + payload)  # type: ignore[arg-type]
        if self.rank == 0:
            self._lead(tag, decide, deadline_s, timeout_s)
        # Rank 0 gives up at the deadline and then writes which ranks were late. The others wait a
        # little longer than rank 0, so that they raise its error rather than one of their own.
        deadline_s += min(deadlines.LATE_RANKS_S, 4 * timeout_s)
        answer = self._read(tag, [f"{tag}/out/{self.rank}"], deadline_s, timeout_s, ranks=[0])[0]
        if answer == _SEE_ALL:
            answer = self._read(tag, [f"{tag}/out/all"], deadline_s, timeout_s, ranks=[0])[0]
        return _open_answer(answer)

    def add(self, key: str, amount: int) -> int:
        """See ``Meeting.add``."""
        return int(self._count(lambda store: store.add(key, amount)))

    def subtract_unless(self, key: str, amount: int, *, value: int) -> bool:
        """See ``Meeting.subtract_unless``."""

        def subtract(store: Store) -> bool:
            while (count := int(store.add(key, 0))) != value:
                reduced = str(count - amount)
                # compare_set returns the value that the key has afterwards.
                if store.compare_set(key, str(count), reduced) == reduced.encode():
                    return True
            return False

        return self._count(subtract)

    def agree(self, key: str, text: str) -> str:
        """See ``Meeting.agree``."""
        return self._count(lambda store: store.compare_set(key, "", text)).decode()

    def put(self, key: str, value: bytes) -> None:
        """See ``Meeting.put``."""

        def put(store: Store) -> None:
            store.set(key, value)  # type: ignore[arg-type]
            # A set is not answered: over a broken connection it would be lost without an error.
            store.check([key])

        self._count(put)

    def peek(self, key: str) -> bytes | None:
        """See ``Meeting.look``."""
        return self._count(lambda store: store.get(key) if store.check([key]) else None)

    def drop(self, key: str) -> None:
        """See ``Meeting.drop``."""
        self._count(lambda store: store.delete_key(key))

    def wait(self, key: str, timeout_s: float) -> None:
        """See ``Meeting.wait``.

        An unreachable store is not reported here; the caller's next call to the store raises.
        """
        if self._waiting is not None:
            limit_s = max(deadlines.STORE_WAIT_LEAST_S, timeout_s)
            began_s = time.monotonic()
            try:
                self._waiting.wait([key], timedelta(seconds=limit_s))
            except RuntimeError:
                # An error before its time: the connection broke. A wait that fails at once would
                # have its caller look again and again without a pause.
                if time.monotonic() - began_s < 0.5 * limit_s:
                    time.sleep(min(deadlines.STORE_LOOK_S, limit_s))
                    self._waiting = self._again() or self._waiting
            return
        deadline_s = time.monotonic() + timeout_s
        while self.peek(key) is None and time.monotonic() < deadline_s:
            time.sleep(deadlines.STORE_LOOK_S)

    def _lead(self, tag: str, decide: Decide, deadline_s: float, timeout_s: float) -> None:
        """Rank 0's part of ``decide``: read all payloads, decide, write all answers."""
        ranks = range(self.world_size)
        keys = [f"{tag}/in/{rank}" for rank in ranks]
        answers: list[bytes] = []
        try:
            payloads = self._read(tag, keys, deadline_s, timeout_s, ranks=list(ranks))
            answers = _signed(decide([payload[1:] for payload in payloads]))
        except Exception as error:
            numbers = facts(error) if isinstance(error, EcckptError) else {}
            fields = [type(error).__name__, f"{error}", numbers]
            answers = [b"-" + msgpack.packb(fields)] * self.world_size
            if not isinstance(error, EcckptError):
                raise  # a bug: rank 0 shows the traceback, the other ranks raise its name
        finally:
            if _is_one_for_all(answers):
                self._mine.set(f"{tag}/out/all", answers[0])  # type: ignore[arg-type]
                answers = [_SEE_ALL] * len(answers)
            for rank, answer in enumerate(answers):
                self._mine.set(f"{tag}/out/{rank}", answer)  # type: ignore[arg-type]

    def _read(
        self, tag: str, keys: list[str], deadline_s: float, timeout_s: float, *, ranks: list[int]
    ) -> list[bytes]:
        """Wait for keys and read them; key number i is the one that ``ranks[i]`` has to write.

        Raises ``RankTimeout`` with the ranks that have not written theirs.
        """
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            self._mine.wait(keys, timedelta(seconds=left_s))
        except RuntimeError as error:
            late = [rank for rank, key in zip(ranks, keys, strict=True) if not self._has(key)]
            raise RankTimeout(tag, late or ranks, timeout_s=timeout_s) from error
        return [self._mine.get(key) for key in keys]

    def _has(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self._mine.check([key]))
        return False


def meet(
    store: Store | None = None, *, rank: int | None = None, world_size: int | None = None
) -> Meeting:
    """Find the other ranks, in one of three ways.

    With ``store``, ``rank`` and ``world_size``: over that store, which must be new for every start.
    Otherwise with an initialised default process group: over its store. The session is then
    broadcast through the group, the only collective that ecckpt uses, so all ranks must construct
    their ``Checkpointer``. Otherwise this process is alone.
    """
    if store is not None:
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise InvalidConfig(f"store= needs rank= and world_size=, not {rank} of {world_size}")
        return StoreMeeting(store, rank, world_size, _session_over(store, rank))
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    default = dist.distributed_c10d._get_default_store()
    return StoreMeeting(default, dist.get_rank(), dist.get_world_size(), _broadcast_session())


def _session_over(store: Store, rank: int) -> str:
    """Rank 0 draws a session and sets it in the store; the other ranks read it."""
    if rank == 0:
        store.set("ecckpt/session", secrets.token_hex(_NONCE_BYTES))
    try:
        store.wait(["ecckpt/session"], timedelta(seconds=deadlines.SESSION_S))
    except RuntimeError as error:
        raise RankTimeout("the session", [0], timeout_s=deadlines.SESSION_S) from error
    return store.get("ecckpt/session").decode()


def _broadcast_session() -> str:
    """Rank 0 draws a session and broadcasts it.

    Not over the store: the default group's store may be that of an earlier start and still have a
    session.
    """
    backend = dist.get_backend_config()
    device = "cpu" if "cpu" in str(backend) else f"cuda:{torch.cuda.current_device()}"
    nonce = torch.tensor(list(secrets.token_bytes(_NONCE_BYTES)), dtype=torch.uint8, device=device)
    dist.broadcast(nonce, src=0)
    return bytes(nonce.cpu().tolist()).hex()


def _signed(answers: Sequence[bytes]) -> list[bytes]:
    """Mark answers as successful.

    Answers that were one object remain one object, which ``_is_one_for_all`` looks for.
    """
    signed = {id(answer): b"+" + answer for answer in answers}
    return [signed[id(answer)] for answer in answers]


def _is_one_for_all(answers: Sequence[bytes]) -> bool:
    """Whether all ranks get the same long answer, which the store should keep once.

    In thousands of copies it could take all memory of the store's host.
    """
    if not answers or len(answers[0]) < _LONG_BYTES:
        return False
    return all(answer is answers[0] for answer in answers)


def _open_answer(answer: bytes) -> bytes:
    """The payload of an answer; raises the error that it carries instead."""
    if answer[:1] == b"+":
        return answer[1:]
    name, message, numbers = msgpack.unpackb(answer[1:])
    raise revive(name, message, numbers) or EcckptError(f"rank 0: {name}: {message}")
