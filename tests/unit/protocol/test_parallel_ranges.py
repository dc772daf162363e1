"""Large pulls over several connections, between real sockets."""

import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from ecckpt.errors import AgentUnreachable, CorruptFragment, RequestRefused, TooSlow
from ecckpt.protocol import parallel_ranges as ranges
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.parallel_ranges import connections_for, pull_ranges, ranges_of
from tests.support.builders import header

MIB = 1 << 20
SHARD = header().shard
CONTENT = bytes(range(256)) * (9 * MIB // 256) + b"the end"


@contextmanager
def source(*, answer=None, together=0):
    """A peer that serves CONTENT; yields its client and the ranges that it was asked for.

    ``answer(handler, start, stop)`` may answer instead, and says whether it did. Nothing is
    answered before so many requests are there ``together``.
    """
    asked = []
    meeting = threading.Barrier(together) if together else None

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            start, stop = int(first), int(last) + 1
            asked.append((start, stop))
            if meeting:
                meeting.wait(10)
            if answer is None or not answer(self, start, stop):
                self.reply(206, CONTENT[start:stop])

        def reply(self, status, body, length=None):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # the other end has gone
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield AgentClient("{}:{}".format(*server.server_address)), asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(ranges, "RANGE_BYTES", 2 * MIB)


def pull(client, *, offset=0, connections=4, **options):
    target = bytearray(len(CONTENT) - offset)
    view = memoryview(target)
    client.pull_fragment(
        SHARD, 1, view, offset=offset, timeout_s=10.0, connections=connections, **options
    )
    return bytes(target)


def test_ranges_are_whole_blocks_and_cover_all():
    assert ranges_of(2 * MIB - 1, 4) == [slice(0, 2 * MIB - 1)]
    assert ranges_of(0, 4) == [slice(0, 0)]
    assert ranges_of(5 * MIB + 1, 4) == [slice(0, 3 * MIB), slice(3 * MIB, 5 * MIB + 1)]
    for size_bytes in (4 * MIB, 7 * MIB + 5, 100 * MIB + 1):
        for connections in (1, 2, 3, 4):
            found = ranges_of(size_bytes, connections)
            assert len(found) <= connections
            assert [found[0].start, found[-1].stop] == [0, size_bytes]
            assert all(a.stop == b.start for a, b in pairwise(found))
            assert all(each.start % MIB == 0 and each.stop > each.start for each in found)


def test_what_many_pull_at_once_has_connections_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    assert [connections_for(pulls) for pulls in (1, 3, 8)] == [2, 2, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert [connections_for(pulls) for pulls in (0, 1, 2, 3, 4, 8, 10)] == [4, 4, 4, 2, 2, 1, 1]


def test_all_ranges_are_pulled_at_once():
    with source(together=4) as (client, asked):
        assert pull(client) == CONTENT
    assert len(asked) == 4
    with source(together=1) as (client, asked):
        assert pull(client, connections=1) == CONTENT
    assert asked == [(0, len(CONTENT))]
    with source() as (client, asked):
        assert pull(client, offset=5 * MIB + 3) == CONTENT[5 * MIB + 3 :]
    assert sorted(asked)[0][0] == 5 * MIB + 3


def test_the_pace_counts_all_of_them():
    told = []
    with source() as (client, _):
        assert pull(client, pace=told.append) == CONTENT
    assert sum(told) == len(CONTENT)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (lambda handler: handler.reply(404, b""), RequestRefused),
        (
            lambda handler: handler.reply(206, b"too short", 3 * MIB),
            (CorruptFragment, RequestRefused),
        ),
        (lambda handler: handler.connection.close(), AgentUnreachable),
    ],
    ids=["refused", "cut off", "closed"],
)
@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_a_range_that_fails_fails_the_whole(how, error, at):
    start = ranges_of(len(CONTENT), 4)[at].start

    def answer(handler, begin, _):
        if begin == start:
            how(handler)
        return begin == start

    with source(answer=answer) as (client, _), pytest.raises(error):
        pull(client)
    assert not [each for each in threading.enumerate() if each.name == "range"]


def test_what_is_no_longer_wanted_ends_everywhere():
    with source(together=4) as (client, asked), pytest.raises(TooSlow):
        pull(client, wanted=lambda: False)
    assert len(asked) == 4


def test_others_stop_when_one_fails():
    failed = threading.Event()

    def pull_one(span, goes_on):
        if span.start:
            failed.set()
            raise AgentUnreachable("there", "gone")
        assert failed.wait(10)
        while goes_on():
            pass
        raise TooSlow("there", done_bytes=0, size_bytes=1)

    with pytest.raises(AgentUnreachable):
        pull_ranges(pull_one, [slice(0, 1), slice(1, 2)])


def test_without_memory_for_threads_one_pulls_all(monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    pulled = []
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    pull_ranges(lambda span, _: pulled.append(span), [slice(0, 1), slice(1, 2)])
    assert pulled == [slice(0, 1), slice(1, 2)]
