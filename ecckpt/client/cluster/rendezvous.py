"""Who is in the cluster, and how its ranks agree: over the store that the launcher already has.

Every exchange has a deadline and names the ranks that did not answer. Rank 0 collects and decides,
so a decision costs each rank one write and one read, whatever the size of the cluster.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import msgpack
import torch
import torch.distributed as dist

from ecckpt.errors import EcckptError, InvalidConfig, RankTimeout, facts, revive

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NONCE_BYTES = 8
_SESSION_TIMEOUT_S = 60.0
_GRACE_S = 5.0
_POLL_S = 0.05
_LONG_BYTES = 1 << 10  # of an answer, that another look at the store is worth
_SEE_ALL = b"="  # in the place of such an answer, if all ranks are given the same
_LEAST_S = 0.002  # torch counts in milliseconds, and takes 0 for ever

Decide = Callable[[list[bytes]], Sequence[bytes]]


class Meeting(Protocol):
    """How the ranks of one session meet. ``session`` is 16 hex digits, new at every start."""

    rank: int
    world_size: int
    session: str

    def decide(self, tag: str, payload: bytes, decide: Decide, *, timeout_s: float) -> bytes:
        """All ranks give a payload; rank 0 turns them into one answer per rank.

        Every rank calls this with the same ``tag``, each tag once. An ``EcckptError`` that
        ``decide`` raises is raised on all ranks. Raises ``RankTimeout`` after ``timeout_s``.
        """

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; returns the new value. Safe from any thread."""

    def subtract_unless(self, key: str, amount: int, *, value: int) -> bool:
        """Subtract from a counter unless it is at ``value``, in one step; False if it is.

        Safe from any thread.
        """

    def agree(self, key: str, text: str) -> str:
        """What the first caller gave under this key. Safe from any thread, as the next three."""

    def put(self, key: str, value: bytes) -> None:
        """Leave something for others."""

    def look(self, key: str) -> bytes | None:
        """What was left under this key, if anything."""

    def drop(self, key: str) -> None:
        """Remove it."""

    def wait(self, key: str, timeout_s: float) -> None:
        """Wait until something is left under this key, at most so long. For one thread."""


class Alone:
    """The meeting of a single process."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.session = secrets.token_hex(_NONCE_BYTES)
        self._counters: dict[str, int] = {}
        self._left: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._news = threading.Condition()

    def decide(self, tag: str, payload: bytes, decide: Decide, *, timeout_s: float) -> bytes:
        """The only rank decides."""
        del tag, timeout_s
        return decide([payload])[0]

    def add(self, key: str, amount: int) -> int:
        """Count locally."""
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]

    def subtract_unless(self, key: str, amount: int, *, value: int) -> bool:
        """Count locally."""
        with self._lock:
            count = self._counters.get(key, 0)
            if count != value:
                self._counters[key] = count - amount
            return count != value

    def agree(self, key: str, text: str) -> str:
        """With oneself."""
        return self._left.setdefault(key, text.encode()).decode()

    def put(self, key: str, value: bytes) -> None:
        """Keep it."""
        with self._news:
            self._left[key] = value
            self._news.notify_all()

    def look(self, key: str) -> bytes | None:
        """What was kept."""
        return self._left.get(key)

    def drop(self, key: str) -> None:
        """Forget it."""
        self._left.pop(key, None)

    def wait(self, key: str, timeout_s: float) -> None:
        """For what another thread leaves."""
        with self._news:
            self._news.wait_for(lambda: key in self._left, timeout_s)


@dataclass
class StoreMeeting:
    """A meeting over a ``torch.distributed`` store.

    All keys carry the session, so what an earlier incarnation left in a store that survives
    restarts is never read. Background threads use connections of their own, so that whoever waits
    keeps nobody else waiting.
    """

    store: Store
    rank: int
    world_size: int
    session: str

    def __post_init__(self) -> None:
        root = self.store
        clone = getattr(root, "clone", None)  # torch >= 2.7; older stores serialise calls inside
        self._counting = self._own(clone() if clone else root)
        self._waiting = self._own(clone()) if clone else None
        self._mine = self._own(root)
        self._lock = threading.Lock()

    def _own(self, store: Store) -> Store:
        return dist.PrefixStore(f"ecckpt/{self.session}", store)  # type: ignore[attr-defined]

    def decide(self, tag: str, payload: bytes, decide: Decide, *, timeout_s: float) -> bytes:
        """See ``Meeting.decide``."""
        deadline_s = time.monotonic() + timeout_s
        self._mine.set(f"{tag}/in/{self.rank}", b"." + payload)  # type: ignore[arg-type]
        if self.rank == 0:
            self._lead(tag, decide, deadline_s, timeout_s)
        # Rank 0 gives up at its deadline, and then needs a moment to say who was late.
        deadline_s += min(_GRACE_S, 4 * timeout_s)
        answer = self._read(tag, [f"{tag}/out/{self.rank}"], deadline_s, timeout_s, ranks=[0])[0]
        if answer == _SEE_ALL:
            answer = self._read(tag, [f"{tag}/out/all"], deadline_s, timeout_s, ranks=[0])[0]
        return _open_answer(answer)

    def add(self, key: str, amount: int) -> int:
        """See ``Meeting.add``."""
        with self._lock:
            return int(self._counting.add(key, amount))

    def subtract_unless(self, key: str, amount: int, *, value: int) -> bool:
        """See ``Meeting.subtract_unless``."""
        with self._lock:
            while (count := int(self._counting.add(key, 0))) != value:
                left = str(count - amount)
                if self._counting.compare_set(key, str(count), left) == left.encode():
                    return True
        return False

    def agree(self, key: str, text: str) -> str:
        """See ``Meeting.agree``."""
        with self._lock:
            return self._counting.compare_set(key, "", text).decode()

    def put(self, key: str, value: bytes) -> None:
        """See ``Meeting.put``."""
        with self._lock:
            self._counting.set(key, value)  # type: ignore[arg-type]

    def look(self, key: str) -> bytes | None:
        """See ``Meeting.look``."""
        with self._lock:
            return self._counting.get(key) if self._counting.check([key]) else None

    def drop(self, key: str) -> None:
        """See ``Meeting.drop``."""
        with self._lock:
            self._counting.delete_key(key)

    def wait(self, key: str, timeout_s: float) -> None:
        """See ``Meeting.wait``. That the store cannot be reached the next call will tell."""
        if self._waiting is not None:
            limit = timedelta(seconds=max(_LEAST_S, timeout_s))
            with contextlib.suppress(RuntimeError):
                self._waiting.wait([key], limit)
            return
        deadline_s = time.monotonic() + timeout_s
        while self.look(key) is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _lead(self, tag: str, decide: Decide, deadline_s: float, timeout_s: float) -> None:
        ranks = range(self.world_size)
        keys = [f"{tag}/in/{rank}" for rank in ranks]
        answers: list[bytes] = []
        try:
            payloads = self._read(tag, keys, deadline_s, timeout_s, ranks=list(ranks))
            answers = _signed(decide([each[1:] for each in payloads]))
        except Exception as error:
            numbers = facts(error) if isinstance(error, EcckptError) else {}
            fields = [type(error).__name__, f"{error}", numbers]
            answers = [b"-" + msgpack.packb(fields)] * self.world_size
            if not isinstance(error, EcckptError):
                raise  # here with its traceback; the others learn its name
        finally:
            if _is_one_for_all(answers):
                self._mine.set(f"{tag}/out/all", answers[0])  # type: ignore[arg-type]
                answers = [_SEE_ALL] * len(answers)
            for rank, answer in enumerate(answers):
                self._mine.set(f"{tag}/out/{rank}", answer)  # type: ignore[arg-type]

    def _read(
        self, tag: str, keys: list[str], deadline_s: float, timeout_s: float, *, ranks: list[int]
    ) -> list[bytes]:
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
    """Find the other ranks.

    With the default process group initialised, its store is used and the session is broadcast
    through it (the one collective of ecckpt: all ranks construct their ``Checkpointer``). With
    ``store``, ``rank`` and ``world_size``, that store, which must be new for every start. Else
    this process is alone.
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
    if rank == 0:
        store.set("ecckpt/session", secrets.token_hex(_NONCE_BYTES))
    try:
        store.wait(["ecckpt/session"], timedelta(seconds=_SESSION_TIMEOUT_S))
    except RuntimeError as error:
        raise RankTimeout("the session", [0], timeout_s=_SESSION_TIMEOUT_S) from error
    return store.get("ecckpt/session").decode()


def _broadcast_session() -> str:
    backend = dist.get_backend_config()
    device = "cpu" if "cpu" in str(backend) else f"cuda:{torch.cuda.current_device()}"
    nonce = torch.tensor(list(secrets.token_bytes(_NONCE_BYTES)), dtype=torch.uint8, device=device)
    dist.broadcast(nonce, src=0)
    return bytes(nonce.cpu().tolist()).hex()


def _signed(answers: Sequence[bytes]) -> list[bytes]:
    """Marked as no errors; those that were one object still are."""
    signed = {id(answer): b"+" + answer for answer in answers}
    return [signed[id(answer)] for answer in answers]


def _is_one_for_all(answers: Sequence[bytes]) -> bool:
    """Whether the store should keep it once: in thousands of copies it could take all memory."""
    if not answers or len(answers[0]) < _LONG_BYTES:
        return False
    return all(answer is answers[0] for answer in answers)


def _open_answer(answer: bytes) -> bytes:
    if answer[:1] == b"+":
        return answer[1:]
    name, message, numbers = msgpack.unpackb(answer[1:])
    raise revive(name, message, numbers) or EcckptError(f"rank 0: {name}: {message}")
