"""Effects in the training process: results, errors, the monitor, lanes, tasks, and the end."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ecckpt.client import effects
from ecckpt.client import threads as performing
from ecckpt.client.cluster.rendezvous import Alone
from ecckpt.client.effects import (
    CallAgent,
    CallAgents,
    Effect,
    FinishHandle,
    Join,
    Lane,
    Mark,
    Now,
    PingAgent,
    Queue,
    RankExchange,
    Report,
    ReviveAgent,
    Routine,
    Start,
    StoreAdd,
    StoreAgree,
    StoreDrop,
    StoreGet,
    StorePut,
    StoreSubtract,
    StoreWait,
    TakeSpans,
    TraceSpan,
    perform,
    traced,
    until,
)
from ecckpt.client.events import Message, SaveCommitted, SaveFailure
from ecckpt.client.handles import SaveHandle
from ecckpt.client.slot_mappings import Slots
from ecckpt.client.state_effects import LoadState, SlotExists
from ecckpt.client.state_performer import StatePerformer
from ecckpt.client.threads import ThreadPerformer
from ecckpt.errors import AgentUnreachable, EcckptError, Fenced, SaveFailed
from ecckpt.protocol.messages.save import Slot
from ecckpt.protocol.tracing import Tracer
from ecckpt.protocol.verbs import COMMIT, INVENTORY
from tests.support.builders import generation, header

SHARD = header().shard


@dataclass
class Agent:
    """Answers with what it was asked and how patiently."""

    name: str
    timeout_s: float = 10.0
    act: Callable[[], Any] = lambda: None

    def call(self, verb: Any, message: Any) -> Any:
        self.act()
        return self.name, verb, message, self.timeout_s

    def node(self) -> None:
        self.act()


@dataclass
class Nodes:
    agent: Agent = field(default_factory=lambda: Agent("own"))
    peers: dict[str, Agent] = field(default_factory=dict)
    revived: int = 0

    def revive_agent(self) -> None:
        self.revived += 1


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(peers={name: Agent(name) for name in ("n0", "n1", "n2")})


@pytest.fixture
def performer(nodes: Nodes) -> Iterator[ThreadPerformer]:
    state: dict[type[Effect[Any]], Callable[[Any], Any]] = {LoadState: lambda effect: effect.load()}
    made = ThreadPerformer(nodes, Tracer(), state, meeting=Alone(), lanes=list(Lane))  # type: ignore[arg-type]
    yield made
    made.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("ecckpt")]


def act(function: Callable[[], Any]) -> LoadState:
    """Any effect of a test's own: performed outside of the monitor."""
    return LoadState(function)


def one(effect: Effect[Any]) -> Routine[Any]:
    return (yield from perform(effect))


def raising(error: BaseException) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


# -- effects --------------------------------------------------------------------------------------


def test_results_reach_the_routine(performer, nodes, tmp_path):
    run, slot = (
        performer.run,
        Slot(
            path=str(tmp_path / "slot"),
            region="r",
            use=1,
            file_bytes=1,
            payload_offset=1,
            header=header(),
        ),
    )
    assert run(one(CallAgent(COMMIT, 5, effects.OWN, 3.0))) == ("own", COMMIT, 5, 3.0)
    assert run(one(CallAgent(COMMIT, 5, "n1", 2.0))) == ("n1", COMMIT, 5, 2.0)
    assert run(one(PingAgent(0.1))) is None
    assert run(one(ReviveAgent())) is None
    assert nodes.revived == 1
    assert run(one(SlotExists(slot))) is False
    (tmp_path / "slot").touch()
    assert run(one(SlotExists(slot))) is True
    assert abs(run(one(Now())) - time.monotonic()) < 5
    unix_s, _ = run(one(Mark()))
    assert abs(unix_s - time.time()) < 5


def test_effects_of_the_store(performer):
    run = performer.run
    assert [run(one(StoreAdd("a", 2))), run(one(StoreAdd("a", 3)))] == [2, 5]
    assert [run(one(StoreSubtract("a", 9, 5))), run(one(StoreSubtract("a", 9, 4)))] == [False, True]
    assert run(one(StoreAdd("a", 0))) == -4
    assert [run(one(StoreAgree("b", text))) for text in ("x", "y")] == ["x", "x"]
    assert run(one(StoreGet("c"))) is None
    run(one(StorePut("c", b"1")))
    assert run(one(StoreWait("c", 0.0))) is None
    assert run(one(StoreGet("c"))) == b"1"
    run(one(StoreDrop("c")))
    assert run(one(StoreGet("c"))) is None

    def decide(payloads: list[bytes]) -> Routine[list[bytes]]:
        count = yield from perform(StoreAdd("decisions", 1))
        return [payloads[0] + bytes([count])]

    assert run(one(RankExchange("tag", b"p", decide, 1.0))) == b"p\x01"


def test_every_effect_has_a_performer(performer, nodes):
    table = StatePerformer(nodes, Slots()).table  # type: ignore[arg-type]
    both = {kind.__name__ for kind in performer._perform.keys() | table.keys()}
    assert both == {kind.__name__ for kind in Effect.__subclasses__()}


@pytest.mark.parametrize(
    "error", [Fenced(timeline=1, current=2), OSError("no file"), KeyError("a bug")]
)
def test_errors_reach_the_routine_and_its_caller(performer, error):
    def routine(*, caught: bool) -> Routine[str]:
        try:
            yield from perform(act(raising(error)))
        except type(error) as raised:
            if caught:
                return str(raised)
            raise
        return ""

    assert performer.run(routine(caught=True)) == str(error)
    with pytest.raises(type(error)) as raised:
        performer.run(routine(caught=False))
    assert raised.value is error


@pytest.mark.parametrize("error", [RuntimeError("Broken pipe\nframe #0"), OSError("Broken pipe")])
def test_errors_of_the_store_are_failed_saves(performer, monkeypatch, error):
    monkeypatch.setattr(Alone, "add", lambda *_: raising(error)())
    with pytest.raises(SaveFailed, match=r"^the ranks' store: Broken pipe$"):
        performer.run(one(StoreAdd("a", 1)))
    monkeypatch.setattr(Alone, "add", lambda *_: raising(Fenced(timeline=1, current=2))())
    with pytest.raises(Fenced):
        performer.run(one(StoreAdd("a", 1)))


def test_what_a_routine_raised_does_not_keep_what_it_had(performer):
    class Large:
        pass

    def fail() -> None:
        raise ValueError("no")

    def routine(large: Large) -> Routine[None]:
        yield from perform(act(fail))
        del large

    gc.disable()
    try:
        large = Large()
        gone = weakref.ref(large)
        with pytest.raises(ValueError, match="no"):
            performer.run(routine(large))
        del large
        assert gone() is None
    finally:
        gc.enable()


def test_reports_go_to_the_log(performer, caplog):
    caplog.set_level(logging.INFO)
    for event in (
        Message(logging.WARNING, "look here"),
        SaveFailure(SHARD, SaveFailed("no room")),
        SaveCommitted(SHARD),
    ):
        performer.run(one(Report(event)))
    assert [record.getMessage() for record in caplog.records] == [
        "look here",
        "step 10 was not saved: no room",
    ]


def test_a_handle_is_finished_and_who_waits_for_it_woken(performer):
    handle = SaveHandle(generation(), 10)
    waiting = threading.Thread(target=handle.wait, daemon=True)
    waiting.start()
    performer.run(one(FinishHandle(handle, None)))
    waiting.join(10)
    assert not waiting.is_alive()


def test_spans_are_noted_also_of_what_raises(performer):
    def routine() -> Routine[Any]:
        began = yield from perform(Mark())
        yield from perform(TraceSpan("one", SHARD, began))
        yield from traced("two", SHARD, one(Now()))
        with contextlib.suppress(OSError):
            yield from traced("three", SHARD, one(act(raising(OSError()))))
        return (yield from perform(TakeSpans())), (yield from perform(TakeSpans()))

    first, second = performer.run(routine())
    assert ([span.name for span in first], second) == (["one", "two", "three"], ())


# -- all agents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_all_agents_are_asked_at_once_and_errors_are_answers(performer, nodes, kept):
    together, gone = threading.Barrier(2), AgentUnreachable("n1", "gone")
    nodes.peers["n0"].act = nodes.peers["n2"].act = lambda: together.wait(10)
    nodes.peers["n1"].act = raising(gone)
    ask = one(CallAgents(COMMIT, 7, ["n2", "n1", "n0"], 4.0))
    if kept:
        with performer.calls_in_parallel():
            answers = performer.run(ask)
    else:
        answers = performer.run(ask)
    assert list(answers) == ["n2", "n1", "n0"]
    assert answers["n1"] is gone
    assert answers["n2"] == ("n2", COMMIT, 7, 4.0)
    assert performer.run(one(CallAgents(COMMIT, 7, [], 4.0))) == {}


def test_a_bug_in_asking_is_no_answer(performer, nodes):
    nodes.peers["n0"].act = raising(KeyError("a bug"))
    with pytest.raises(KeyError):
        performer.run(one(CallAgents(COMMIT, 7, ["n0"], 4.0)))


def test_a_program_that_ends_asks_agents_one_after_another(performer, monkeypatch):
    def no_threads(_: Any) -> Any:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_threads)
    answers = performer.run(one(CallAgents(INVENTORY, 7, ["n0", "n1"], 4.0)))
    assert list(answers) == ["n0", "n1"]


def test_a_lane_that_asks_all_agents_does_not_depend_on_the_callers_threads(performer, nodes):
    """A restore ends while its roll-back is told: that used the threads of the restore."""
    asked, may_answer, answers = threading.Event(), threading.Event(), []

    def slow() -> None:
        asked.set()
        assert may_answer.wait(10)

    def tell() -> Routine[None]:
        nodes.peers["n0"].act = slow
        answers.append((yield from perform(CallAgents(COMMIT, 7, ["n0", "n1"], 4.0))))

    with performer.calls_in_parallel():
        performer.run(one(CallAgents(INVENTORY, 7, ["n0", "n1"], 4.0)))
        performer.run(one(Queue(Lane.FOLLOW, tell())))
        assert asked.wait(10)
    # The caller has gone on, though not all agents have answered.
    assert answers == []
    may_answer.set()
    assert performer.run(until(lambda: bool(answers), 10))
    assert answers[0]["n1"] == ("n1", COMMIT, 7, 4.0)


# -- the monitor ----------------------------------------------------------------------------------


def test_code_between_two_effects_is_atomic(performer):
    shared = {"count": 0}

    def routine() -> Routine[None]:
        for _ in range(100):
            yield from perform(act(lambda: None))
            count = shared["count"]
            time.sleep(1e-5)  # all others that are not in an effect wait for this one
            shared["count"] = count + 1

    def all_of_them() -> Routine[None]:
        one_of_them = yield from perform(Start(routine()))
        other = yield from perform(Start(routine()))
        yield from routine()
        yield from perform(Join(one_of_them, math.inf))
        yield from perform(Join(other, math.inf))

    performer.run(all_of_them())
    assert shared["count"] == 300


def test_the_monitor_is_free_while_an_effect_is_performed(performer):
    meet = threading.Barrier(2)

    def both() -> Routine[None]:
        task = yield from perform(Start(one(act(lambda: meet.wait(10)))))
        yield from perform(act(lambda: meet.wait(10)))
        yield from perform(Join(task, 10))

    performer.run(both())


def test_a_condition_wakes_who_waits_for_it_when_another_routine_has_run(performer):
    shared: list[int] = []

    def set_it() -> Routine[None]:
        yield from perform(act(lambda: time.sleep(0.05)))
        shared.append(1)

    def wait() -> Routine[bool]:
        yield from perform(Queue(Lane.FOLLOW, set_it()))
        return (yield from until(lambda: bool(shared), math.inf))

    assert performer.run(wait()) is True
    assert performer.run(until(lambda: False, 0.01)) is False
    assert performer.run(until(lambda: True, 0.0)) is True


def test_a_change_from_outside_wakes_who_waits(performer):
    shared: list[int] = []
    timer = threading.Timer(0.05, lambda: performer.change(lambda: shared.append(1)))
    timer.start()
    assert performer.run(until(lambda: bool(shared), 10)) is True
    timer.join()


# -- lanes and tasks ------------------------------------------------------------------------------


def test_routines_of_a_lane_run_in_order_and_survive_errors(performer, caplog):
    done: list[object] = []

    def routine(at: int, error: Exception | None) -> Routine[None]:
        yield from perform(act(lambda: time.sleep(0.001)))
        done.append(at)
        if error:
            raise error

    errors = [None, Fenced(timeline=1, current=2), ValueError("a bug"), OSError("a file"), None]
    for at, error in enumerate(errors):
        performer.run(one(Queue(Lane.FOLLOW, routine(at, error))))
    assert performer.close_lane(Lane.FOLLOW, 10)
    assert done == [0, 1, 2, 3, 4]
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in texts] == [
        "behind the training",
        "background work failed",
        "behind the training",
    ]


def test_lanes_do_not_wait_for_each_other(performer):
    meet = threading.Barrier(len(Lane))
    for lane in Lane:
        performer.run(one(Queue(lane, one(act(lambda: meet.wait(10))))))
    assert all(performer.close_lane(lane, 10) for lane in Lane)
    assert not meet.broken


def test_closing_a_lane_that_hangs_takes_only_so_long(performer):
    may_end = threading.Event()
    performer.run(one(Queue(Lane.FOLLOW, one(act(lambda: may_end.wait(20))))))
    assert performer.close_lane(Lane.FOLLOW, 0.05) is False
    may_end.set()
    (thread,) = [each for each in threading.enumerate() if each.name == Lane.FOLLOW.value]
    thread.join(10)


def test_a_started_routine_gives_its_result_or_its_error_or_takes_too_long(performer):
    may_end = threading.Event()

    def routine(effect: Effect[Any], timeout_s: float) -> Routine[Any]:
        task = yield from perform(Start(one(effect)))
        return (yield from perform(Join(task, timeout_s)))

    assert performer.run(routine(act(lambda: 5), 10)) == 5
    with pytest.raises(EcckptError, match="fenced off"):
        performer.run(routine(act(raising(Fenced(timeline=1, current=2))), math.inf))
    with pytest.raises(TimeoutError):
        performer.run(routine(act(lambda: may_end.wait(20)), 0.01))
    may_end.set()


def test_where_no_thread_can_be_started_it_is_an_error_of_the_system(performer, monkeypatch):
    monkeypatch.setattr(performing, "address_space_is_limited", lambda: True)
    with pytest.raises(OSError, match="address space is limited"):
        performer.run(one(Start(one(Now()))))
    monkeypatch.undo()

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="no thread can be started: can't start"):
        performer.run(one(Start(one(Now()))))


def test_the_end_waits_for_what_is_being_performed(nodes):
    made = ThreadPerformer(
        nodes, Tracer(), {LoadState: lambda effect: effect.load()}, lanes=[Lane.ARCHIVE]
    )  # type: ignore[arg-type]
    done: list[int] = []

    def slow(at: int) -> Callable[[], None]:
        return lambda: (time.sleep(0.05), done.append(at))[1]

    made.run(one(Queue(Lane.ARCHIVE, one(act(slow(1))))))
    made.run(one(Start(one(act(slow(2))))))
    made.close()
    assert sorted(done) == [1, 2]


def test_what_interrupts_an_effect_reaches_the_routine(performer):
    def routine() -> Routine[str]:
        try:
            yield from perform(act(raising(KeyboardInterrupt())))
        except KeyboardInterrupt:
            yield from perform(StorePut("told", b""))
            raise
        return ""

    with pytest.raises(KeyboardInterrupt):
        performer.run(routine())
    assert performer.run(one(StoreGet("told"))) == b""
