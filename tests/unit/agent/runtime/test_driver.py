"""What drives an agent's core, where the system has no memory for one more thread."""

import logging
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecckpt.agent.core.actions import Due, Scrubbing
from ecckpt.agent.runtime.driver import _Alarm
from ecckpt.format.fragment_file import pack_table
from ecckpt.protocol.messages.save import Hold
from tests.support.builders import header, table_of, writer_of
from tests.unit.agent.runtime.services import start


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def test_an_alarm_that_could_not_begin_is_told_with_the_next(monkeypatch):
    told = queue.SimpleQueue()
    alarm, first, second = _Alarm(told.put), Due(Scrubbing()), Due(Scrubbing())
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", no_thread)
        alarm.set(0.0, first)
    alarm.set(0.0, second)
    assert [told.get(timeout=10) for _ in range(2)] == [first, second]


def test_what_needs_a_thread_is_done_by_one_that_is_there(tmp_path, monkeypatch):
    agent = start(tmp_path / "memory", tmp_path / "disk")
    monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", no_thread)
    head = header(index=2)
    table = pack_table(table_of(head))
    agent.hold(
        Hold(
            header=head,
            writer=writer_of(1),
            table=table,
            source="127.0.0.1:1",
            memory_bytes=0,
            timeout_s=5.0,
            discard=(),
            repair=False,
        )
    )
    with agent._driver.changed:  # a region, a pull from nobody, and an answer to nobody
        assert agent._driver.changed.wait_for(
            lambda: not agent.core._holder.coming(head.shard), timeout=10
        )
