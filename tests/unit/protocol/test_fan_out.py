"""One call for each of several agents, at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from ecckpt.protocol.fan_out import call_each


def test_results_come_in_the_order_of_the_targets() -> None:
    barrier = threading.Barrier(3)

    def call(target: int) -> int:
        barrier.wait(10)  # all of them run at once
        return target * target

    assert call_each([3, 1, 2], call) == [9, 1, 4]
    assert call_each([], call) == []


def test_no_more_calls_run_than_are_allowed() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def call(target: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)
        with lock:
            running -= 1

    call_each(range(20), call, parallel=2)
    assert most <= 2


def test_the_first_failed_call_is_raised() -> None:
    def call(target: int) -> int:
        if target:
            raise ValueError(target)
        return target

    with pytest.raises(ValueError, match="1"):
        call_each([0, 1, 2], call)


def test_a_program_that_ends_calls_each_all_the_same():
    code = """
import atexit, concurrent.futures
from ecckpt.protocol.fan_out import call_each
atexit.register(lambda: print(call_each([1, 2, 3], lambda number: 2 * number)))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("[2, 4, 6]\n", "")


def test_where_no_thread_can_be_started_the_caller_calls(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    here = threading.get_ident()
    assert call_each(range(5), lambda _: threading.get_ident()) == [here] * 5
