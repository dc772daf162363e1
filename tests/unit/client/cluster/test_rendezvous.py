"""Meetings: every rank gets its answer or the same error, and the late ones are named."""

import contextlib
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ecckpt import errors
from ecckpt.client import deadlines
from ecckpt.client.cluster.rendezvous import Alone, StoreMeeting, meet
from ecckpt.errors import EcckptError, InvalidConfig, RankTimeout

SESSION = "0" * 16
TIMEOUT_S = 0.5


def hash_stores(count, folder):
    store = dist.HashStore()
    return [store] * count


def file_stores(count, folder):
    return [dist.FileStore(str(folder / "store"), count) for _ in range(count)]


def tcp_stores(count, folder):
    patience = timedelta(seconds=10)
    first = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    return [first] + [
        dist.TCPStore("127.0.0.1", first.port, None, False, patience) for _ in range(count - 1)
    ]


@pytest.fixture(params=[hash_stores, file_stores, tcp_stores], ids=["hash", "file", "tcp"])
def meet_as(request, tmp_path):
    """Make the meetings of all ranks, or of those present, of one session over one store."""
    made = {}

    def meetings(count, *, session=SESSION):
        stores = made.setdefault("stores", request.param(count, tmp_path))
        return [StoreMeeting(stores[rank], rank, count, session) for rank in range(count)]

    return meetings


def each(meetings, act):
    """What ``act`` gives, or the error it raises, for each meeting at once."""

    def caught(meeting):
        try:
            return act(meeting)
        except EcckptError as error:
            return error

    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(caught, meetings))


def ask(decide, *, tag="vote", timeout_s=10.0):
    def act(meeting):
        return meeting.decide(tag, b"%d" % meeting.rank, decide, timeout_s=timeout_s)

    return act


# -- decisions ------------------------------------------------------------------------------------


def test_every_rank_gets_its_own_answer(meet_as):
    answers = each(meet_as(4), ask(lambda payloads: [each * 2 for each in payloads]))
    assert answers == [b"00", b"11", b"22", b"33"]


def test_only_rank_0_decides(meet_as):
    meetings, asked = meet_as(3), []

    def act(meeting):
        def decide(payloads):
            asked.append(meeting.rank)
            return payloads

        return meeting.decide("vote", b"x", decide, timeout_s=10.0)

    assert each(meetings, act) == [b"x"] * 3
    assert asked == [0]


@pytest.mark.parametrize("size_bytes", [3, 100_000])
def test_an_answer_for_all_is_kept_once_if_it_is_long(meet_as, size_bytes):
    meetings, answer = meet_as(4), b"=" + bytes(size_bytes)
    assert each(meetings, ask(lambda payloads: [answer] * 4)) == [answer] * 4
    kept = [len(meetings[0]._mine.get(f"vote/out/{rank}")) for rank in range(4)]
    assert kept == [1 if size_bytes > 3 else len(answer) + 1] * 4


@pytest.mark.parametrize("payload", [b"", b"\0", b"+", b"-", b"=", bytes(range(256)) * 5000])
def test_payloads_arrive_whole(payload):
    store = dist.HashStore()
    meetings = [StoreMeeting(store, rank, 2, SESSION) for rank in range(2)]
    answers = each(
        meetings, lambda each: each.decide("t", payload, lambda got: got, timeout_s=10.0)
    )
    assert answers == [payload] * 2


def test_many_decisions_follow_each_other(meet_as):
    meetings = meet_as(3)
    for round_ in range(5):
        answers = each(meetings, ask(lambda got: got[::-1], tag=f"round/{round_}"))
        assert answers == [b"2", b"1", b"0"]


@pytest.mark.parametrize(
    "error",
    [
        errors.TooFewNodes(have=3, need=6, code="RS(3, 2)"),
        errors.DuplicateNode("n1", ["a:1", "b:2"]),
        errors.VersionMismatch("agent n1", found=2, known=1),
        errors.TmpfsFull("/dev/shm", need_bytes=10, free_bytes=2),
        errors.Fenced(timeline=1, current=2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_raised_on_all_ranks_with_its_class_and_numbers(error):
    store = dist.HashStore()
    meetings = [StoreMeeting(store, rank, 3, SESSION) for rank in range(3)]

    def refuse(payloads):
        raise error

    for found in each(meetings, ask(refuse)):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert errors.facts(found) == errors.facts(error)


def test_a_bug_on_rank_0_is_told_to_the_others_by_name():
    store = dist.HashStore()
    meetings = [StoreMeeting(store, rank, 2, SESSION) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(ask(lambda got: 1 / 0), meeting) for meeting in meetings)
        assert isinstance(first.exception(10), ZeroDivisionError)
        assert isinstance(second.exception(10), EcckptError)
        assert "rank 0: ZeroDivisionError" in str(second.exception())


# -- ranks that do not answer ---------------------------------------------------------------------


def test_missing_ranks_are_named_on_all_others(meet_as):
    meetings = [each for each in meet_as(4) if each.rank not in (1, 3)]
    started_s = time.monotonic()
    for error in each(meetings, ask(lambda got: got, timeout_s=TIMEOUT_S)):
        assert isinstance(error, RankTimeout)
        assert "vote: no answer from rank 1, 3 within 0.5 s" in str(error)
    assert time.monotonic() - started_s < 10


def test_a_missing_rank_0_is_named():
    meeting = StoreMeeting(dist.HashStore(), 1, 2, SESSION)
    with pytest.raises(RankTimeout, match="no answer from rank 0") as caught:
        meeting.decide("vote", b"", lambda got: got, timeout_s=0.2)
    assert caught.value.ranks == (0,)


def test_after_a_timeout_the_next_decision_works():
    store = dist.HashStore()
    meetings = [StoreMeeting(store, rank, 2, SESSION) for rank in range(2)]
    with pytest.raises(RankTimeout):
        ask(lambda got: got, timeout_s=0.2)(meetings[0])
    assert each(meetings, ask(lambda got: got, tag="again")) == [b"0", b"1"]


# -- sessions -------------------------------------------------------------------------------------


def test_nothing_of_an_older_session_is_ever_read(meet_as):
    older = meet_as(2, session="a" * 16)
    assert each(older, ask(lambda got: [b"old", b"old"])) == [b"old"] * 2
    older[0].add("count", 7)
    newer = meet_as(2, session="b" * 16)
    with pytest.raises(RankTimeout, match="rank 1"):
        ask(lambda got: got, timeout_s=0.2)(newer[0])
    assert each(newer, ask(lambda got: got, tag="next")) == [b"0", b"1"]
    assert newer[1].add("count", 1) == 1


def test_ranks_of_one_store_agree_on_a_session():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        meetings = list(pool.map(lambda rank: meet(store, rank=rank, world_size=3), range(3)))
    (session,) = {each.session for each in meetings}
    assert len(bytes.fromhex(session)) == 8
    assert [each.rank for each in meetings] == [0, 1, 2]


def test_every_start_has_another_session():
    assert Alone().session != Alone().session
    first, second = (meet(dist.HashStore(), rank=0, world_size=1) for _ in range(2))
    assert first.session != second.session


@pytest.mark.parametrize(
    ("rank", "world_size"), [(None, 2), (0, None), (None, None), (2, 2), (-1, 2)]
)
def test_a_store_needs_a_rank_that_can_be(rank, world_size):
    with pytest.raises(InvalidConfig, match=f"not {rank} of {world_size}"):
        meet(dist.HashStore(), rank=rank, world_size=world_size)


def test_without_a_store_a_process_is_alone():
    meeting = meet()
    assert (meeting.rank, meeting.world_size) == (0, 1)
    assert meeting.decide("vote", b"x", lambda got: [got[0] * 2], timeout_s=1) == b"xx"


# -- counters -------------------------------------------------------------------------------------


def test_counters_count(meet_as):
    first, second = meet_as(2)
    assert [first.add("a", 1), second.add("a", 2), first.add("b", 5), second.add("a", 0)] == [
        *(1, 3, 5, 3)
    ]
    assert first.add("a", -(1 << 40)) == 3 - (1 << 40)


def test_counting_from_many_threads_loses_nothing(meet_as):
    meetings = meet_as(3)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda at: meetings[at % 3].add("a", 1), range(90)))
    assert sorted(found) == list(range(1, 91))


def test_a_counter_at_the_value_is_left_alone(meet_as):
    first, second = meet_as(2)
    first.add("a", 2)
    assert second.subtract_unless("a", 100, value=2) is False
    assert first.add("a", 0) == 2
    assert second.subtract_unless("a", 100, value=3) is True
    assert first.add("a", 0) == -98
    assert second.subtract_unless("new", 5, value=3) is True
    assert first.add("new", 0) == -5


def test_alone_counts_alike():
    meeting = Alone()
    assert [meeting.add("a", 2), meeting.add("b", 1), meeting.add("a", 0)] == [2, 1, 2]
    assert meeting.subtract_unless("a", 5, value=2) is False
    assert meeting.subtract_unless("a", 5, value=3) is True
    assert meeting.add("a", 0) == -3


def test_completing_and_taking_back_exclude_each_other(meet_as):
    """Whoever is first in the store wins, and everybody sees the same winner."""
    meetings = meet_as(3)
    sys.setswitchinterval(1e-4)
    try:
        for at in range(30):
            key = f"count/{at}"
            meetings[0].add(key, 2)
            with ThreadPoolExecutor(3) as pool:
                complete = pool.submit(lambda key=key: meetings[0].add(key, 1) == 3)
                back = [
                    pool.submit(each.subtract_unless, key, 1 << 40, value=3)
                    for each in meetings[1:]
                ]
                outcomes = {complete.result(), *(not each.result() for each in back)}
            assert len(outcomes) == 1
            assert (meetings[0].add(key, 0) == 3) == outcomes.pop()
    finally:
        sys.setswitchinterval(5e-3)


# -- what is left for others ----------------------------------------------------------------------


def test_the_first_text_under_a_key_stands_and_can_be_taken_away(meet_as):
    one, other = meet_as(2)
    assert one.agree("who", "one") == "one"
    assert other.agree("who", "other") == "one"
    assert one.agree("who", "one") == "one"
    one.drop("who")
    assert other.agree("who", "other") == "other"


def test_what_is_left_is_there_until_it_is_dropped(meet_as):
    one, other = meet_as(2)
    assert other.peek("it") is None
    one.put("it", b"\0text")
    assert other.peek("it") == b"\0text"
    other.drop("it")
    other.drop("it")
    assert one.peek("it") is None


def test_alone_leaves_things_alike():
    alone = Alone()
    assert (alone.agree("who", "a"), alone.agree("who", "b")) == ("a", "a")
    alone.put("it", b"x")
    assert alone.peek("it") == b"x"
    alone.drop("it")
    assert alone.peek("it") is None


def test_who_waits_is_woken_by_what_is_left(meet_as):
    one, other = meet_as(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.wait, "it", 30.0)
        one.add("count", 1)  # beside it, on another connection
        other.put("it", b"")
        waiting.result(10)
    one.wait("it", 30.0)


@pytest.mark.parametrize("timeout_s", [0.0, 1e-4, 0.1])
def test_waiting_ends_without_it(meet_as, timeout_s):
    (one,) = meet_as(1)
    one.wait("it", timeout_s)
    assert one.peek("it") is None


def test_waiting_for_a_store_that_is_gone_is_over_at_once():
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10))
    meeting = StoreMeeting(other, 1, 2, SESSION)
    del store
    meeting.wait("it", 30.0)
    with pytest.raises(RuntimeError):
        meeting.add("count", 1)


def test_a_store_that_cannot_be_cloned_is_looked_at_again_and_again():
    meeting = StoreMeeting(dist.HashStore(), 0, 1, SESSION)
    meeting._waiting = None  # as with torch 2.6
    meeting.wait("it", 0.1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meeting.wait, "it", 30.0)
        meeting.put("it", b"")
        waiting.result(10)


def test_alone_waits_for_its_own_threads():
    alone = Alone()
    alone.wait("it", 0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(alone.wait, "it", 30.0)
        alone.put("it", b"x")
        waiting.result(10)


# -- connections that break -----------------------------------------------------------------------


class Wire:
    """Forwards connections to a port; ``cut`` breaks all that there are."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def cut(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def close(self) -> None:
        self._listening.close()
        self.cut()


@pytest.fixture
def wire():
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    made = Wire(server.port)
    yield made
    made.close()


@pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="stores have no clone()")
def test_a_connection_that_broke_is_made_again(wire):
    store = dist.TCPStore(
        "127.0.0.1", wire.port, None, False, timeout=timedelta(seconds=5), wait_for_workers=False
    )
    meeting = StoreMeeting(store, 0, 2, SESSION)
    assert meeting.add("count", 1) == 1
    for call in (
        lambda: meeting.add("count", 1),
        lambda: meeting.peek("key"),
        lambda: meeting.put("key", b"x"),
        lambda: meeting.subtract_unless("count", 1, value=100),
    ):
        wire.cut()
        with pytest.raises(RuntimeError):  # one call is lost; where the store is slow, one more
            call()
        with contextlib.suppress(RuntimeError):
            call()
        call()
    assert meeting.peek("key") == b"x"
    wire.cut()
    began_s = time.monotonic()
    meeting.wait("other", 30.0)  # comes back early, and not at once
    assert time.monotonic() - began_s >= deadlines.STORE_LOOK_S
    for _ in range(2):  # the first is lost
        with contextlib.suppress(RuntimeError):
            meeting.put("other", b"")
    meeting.wait("other", 30.0)
    assert meeting.peek("other") == b""
