"""save() and the session around it: the order of what is done, what is raised, and the end."""

from __future__ import annotations

from typing import Any

import pytest

from ecckpt.client.cluster.requests import Requests
from ecckpt.client.effects import (
    CallAgent,
    Mark,
    Now,
    Queue,
    Report,
    ReviveAgent,
    StoreAdd,
    TraceSpan,
    Until,
)
from ecckpt.client.events import SaveCommitted, SaveFailure
from ecckpt.client.handles import SaveHandle
from ecckpt.client.rank_session import RankSession
from ecckpt.client.state_effects import CopyState, PlanState
from ecckpt.errors import (
    AgentUnreachable,
    Fenced,
    InvalidConfig,
    MemoryBudgetTooSmall,
    NotMapped,
    SaveFailed,
    SaveSkipped,
    SaveTimedOut,
    UnsupportedState,
    WrongOrder,
)
from ecckpt.policy.on_disk import OnDisk
from ecckpt.policy.survival import Inventory
from ecckpt.protocol.messages.save import Progress, Slot, Target
from ecckpt.protocol.verbs import GUARD, INVENTORY, PROTECT, RESERVE, STAGE, STORE, WATCH
from tests.support.builders import SESSION, generation, inventory, writer_of
from tests.support.commits import cluster_of, config_of
from tests.support.performers import Clock, Performer, Store, drive

SETUP = [
    UnsupportedState("a", "set", hint=""),
    InvalidConfig("no"),
    MemoryBudgetTooSmall("n0", need_bytes=2, have_bytes=1, what="a slot"),
    NotMapped("a slot", need_bytes=2, limit_bytes=1),
]
GONE = AgentUnreachable("here", "gone")


class Plan:
    claim = None

    def __init__(self, state: Any = None, previous: Any = None) -> None:
        self.state, self.previous, self.shard_bytes = state, previous, 10_000


class Rank(Performer):
    """One rank of a run, on a timeline, whose agent protects shards at once."""

    def __init__(
        self, rank=0, ranks=1, *, strict=False, store=None, clock=None, begun=True, **config
    ):
        super().__init__(store, clock)
        nodes = [f"n{at}" for at in range(max(ranks, 4))]
        cluster = cluster_of(rank, ranks, nodes=nodes, code=(2, 1), share=())
        requests = Requests(config_of(**{"disk_every": 0} | config), cluster)
        self.session = RankSession(requests, disk_bytes=0, strict=strict)
        self.saver = self.session.saver
        self.state = "protected"
        self.on[PlanState] = lambda effect: Plan(effect.state, effect.previous)
        self.answers[RESERVE] = lambda effect: Slot(
            path="path",
            region=f"region{len(self.calls(RESERVE))}",
            use=1,
            file_bytes=1 << 20,
            payload_offset=4096,
            header=effect.message.header,
        )
        self.gates[WATCH] = lambda effect: self.state != effect.message.known_state
        self.answers[WATCH] = lambda effect: Progress(
            state=self.state, held=3, problems=(), encode_s=0.0, protected_s=0.0
        )
        if begun:
            self.run(self.saver.begin_timeline(5, None))

    def save(self, step: int, state: Any = None, patience_s: float = 0.05):
        return self.run(self.session.save(step, state, patience_s))

    def saved(self, step: int):
        handle = self.save(step)
        drive([self], lambda: handle.left and self.saver.reserver.is_idle)
        assert handle.committed
        return handle

    def steps(self) -> list[str]:
        """What was done, in words, but for looking at the clock."""
        quiet = (Now, Mark, TraceSpan, Until)
        names = []
        for each in self.done:
            match each:
                case CallAgent(verb, _, _, _):
                    names.append(verb.name)
                case Queue(lane, _):
                    names.append(f"queue {lane.name.lower()}")
                case Report(event):
                    names.append(type(event).__name__)
                case _ if not isinstance(each, quiet):
                    names.append(type(each).__name__)
        return names

    def failures(self) -> list[Any]:
        return [event.error for event in self.events if isinstance(event, SaveFailure)]


# -- what is done ---------------------------------------------------------------------------------


def test_a_save_with_a_slot_reserved_ahead_asks_nobody_before_it_returns():
    rank = Rank()
    rank.saved(1)
    rank.settle()
    rank.done.clear()
    running = rank.begin(rank.session.save(2, "state", 0.05))
    while not running.ended:
        running.step()
    head = ["PlanState", "SlotExists", "CopyState", "queue follow"]
    assert rank.steps() == head
    handle = running.result()
    assert (handle.staged, handle.done, handle.shard_bytes) == (True, False, 10_000)
    drive([rank], lambda: handle.left and rank.saver.reserver.is_idle)
    beside = ("TakeSpans", "guard", "StoreDrop")
    assert [each for each in rank.steps()[len(head) :] if each not in beside] == [
        *("stage", "protect", "watch", "StoreAdd", "StorePut", "commit"),
        # The next slot is asked for before the handle lets a save go on that would wait for it.
        *("SaveCommitted", "queue follow", "queue follow", "queue reserve", "FinishHandle"),
        *("StoreAdd", "StorePut", "reserve", "MapSlot"),
    ]


def test_the_plan_before_is_used_again():
    rank = Rank()
    rank.saved(1)
    rank.saved(2)
    first, second = (each for each in rank.done if isinstance(each, PlanState))
    assert first.previous is None
    assert isinstance(second.previous, Plan)


def test_headers_name_the_generation_the_timeline_goes_on_from():
    rank = Rank(begun=False)
    rank.run(rank.saver.begin_timeline(6, generation(5, 4)))
    handle = rank.saved(5)
    assert str(handle.generation) == f"6.5.{SESSION}"
    (staged,) = rank.calls(STAGE)
    assert staged.message.header.parent == generation(5, 4)
    assert staged.message.header.created_unix_s == int(rank.now_s)


def test_how_long_the_caller_was_kept_is_told():
    rank = Rank()

    def slow(effect: Any) -> None:
        rank.clock.now_s += 3.0

    rank.on[CopyState] = slow
    handle = rank.save(1)
    assert handle.stall_s == pytest.approx(3.0)
    assert handle.began_s == pytest.approx(rank.now_s - 3.0, abs=1e-3)


def test_generations_that_were_given_up_are_discarded_until_one_is_committed():
    rank = Rank()
    rank.saved(1)
    rank.state = "failed"
    handle = rank.save(2)
    drive([rank], lambda: handle.left and rank.saver.reserver.is_idle)
    rank.state = "protected"
    assert rank.calls(RESERVE)[-1].message.discard == (handle.generation,)
    assert rank.saved(3).committed
    assert rank.calls(PROTECT)[-1].message.discard == (handle.generation,)
    assert rank.calls(RESERVE)[-1].message.discard == ()


def test_the_agent_is_asked_to_guard_what_it_has_after_each_commit_and_it_is_no_error_if_not():
    rank = Rank()
    rank.answers[GUARD] = GONE
    rank.saved(1)
    drive([rank], lambda: len(rank.calls(GUARD)) == 2)
    assert {each.message.writer for each in rank.calls(GUARD)} == {writer_of(5)}
    assert "no agent watches the holders until the next save" in rank.log()[0]


# -- order ----------------------------------------------------------------------------------------


def test_saves_come_after_a_restore_and_one_after_another():
    with pytest.raises(WrongOrder, match="before restore"):
        Rank(begun=False).save(1)
    rank = Rank()
    rank.saved(2)
    for step in (1, 2):
        with pytest.raises(WrongOrder, match="not after step 2"):
            rank.save(step)
    for patience_s in (-1.0, float("nan")):
        with pytest.raises(InvalidConfig, match="patience_s="):
            rank.save(3, patience_s=patience_s)
    assert rank.saved(3)


def test_a_save_that_must_wait_for_the_one_before_is_skipped_and_the_others_hear_of_it():
    rank = Rank()
    rank.saved(1)
    rank.state = "encoding"
    first = rank.save(2)
    began_s = rank.now_s
    late = rank.save(3)
    assert rank.now_s - began_s == pytest.approx(0.05, abs=1e-3)
    assert isinstance(late.error, SaveSkipped)
    assert late.error.unfinished == 2
    assert "waiting for this rank's shard to be protected" in str(late.error)
    assert (rank.saver.skipped, late.skipped, late.staged) == (1, True, False)
    rank.state = "protected"
    drive([rank], lambda: first.left and late.left)
    assert rank.store.counters[f"count/{late.generation}"] < 0
    assert rank.saved(4)


def test_without_a_slot_by_its_patience_a_save_is_skipped_and_the_next_has_one():
    rank = Rank()
    rank.saved(1)
    rank.gates[RESERVE] = lambda effect: False
    first = rank.save(2, patience_s=10.0)
    drive([rank], lambda: first.left)
    late = rank.save(3)
    assert isinstance(late.error, SaveSkipped)
    assert late.error.unfinished is None
    assert "its slot is not ready" in str(late.error)
    del rank.gates[RESERVE]
    drive([rank], lambda: late.left and rank.saver.reserver.is_idle)
    assert rank.saved(4)


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", SETUP, ids=lambda error: type(error).__name__)
def test_mistakes_of_the_set_up_are_raised_at_the_first_save_and_only_told_later(error):
    rank = Rank()
    rank.on[PlanState] = error
    with pytest.raises(type(error)):
        rank.save(1)
    drive([rank], lambda: rank.saver.latest.left)
    handle = rank.save(2)
    assert handle.error is error
    assert rank.failures() == [error, error]


@pytest.mark.parametrize("error", [GONE, Fenced(timeline=1, current=6)])
def test_what_else_goes_wrong_is_in_the_handle(error):
    rank = Rank()
    rank.answers[RESERVE] = error
    rank.gates[ReviveAgent] = lambda effect: False
    handle = rank.save(1)
    assert handle.error is error
    drive([rank], lambda: handle.left)
    assert rank.store.counters[f"count/{handle.generation}"] < 0


def test_a_file_that_is_gone_is_in_the_handle_too():
    rank = Rank()
    rank.on[CopyState] = FileNotFoundError("gone")
    assert "gone" in str(rank.save(1).error)


@pytest.mark.parametrize("what", [GONE, "skipped"])
def test_a_strict_checkpointer_raises_it(what):
    rank = Rank(strict=True)
    rank.saved(1)
    if what == "skipped":
        rank.state = "encoding"
        rank.save(2)
    else:
        rank.on[PlanState] = what
    with pytest.raises(SaveSkipped if what == "skipped" else AgentUnreachable):
        rank.save(3)
    assert rank.saver.latest.step == 3
    assert rank.saver.skipped == (what == "skipped")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("in state_dict()")])
@pytest.mark.parametrize("where", [PlanState, CopyState])
def test_what_the_states_own_code_raises_is_raised_and_the_other_ranks_hear_at_once(error, where):
    store, clock = Store(), Clock()
    ranks = [Rank(at, 2, store=store, clock=clock, strict=at == 0) for at in (0, 1)]
    ranks[0].on[where] = error
    with pytest.raises(type(error)):
        ranks[0].save(1)
    handle, other = ranks[0].saver.latest, ranks[1].save(1)
    began_s = clock.now_s
    drive(ranks, lambda: handle.left and other.left)
    assert clock.now_s - began_s < 1
    assert "the snapshot raised" in str(handle.error)
    assert "another rank could not protect its shard" in str(other.error)
    ranks[0].on[where] = Plan() if where is PlanState else None
    both = [rank.begin(rank.session.save(2, None, 1.0)) for rank in ranks]
    drive(ranks, lambda: all(each.ended and each.result().left for each in both))
    assert all(each.result().committed for each in both)


def test_a_process_that_is_taken_down_in_a_save_does_nothing_more():
    rank = Rank()
    running = rank.begin(rank.session.save(1, None, 1.0))
    drive([rank], lambda: isinstance(running.effect, CopyState))
    count = len(rank.done)
    running.routine.close()
    assert len(rank.done) == count
    assert rank.saver.latest is None


def test_an_error_of_an_older_timeline_reserves_no_slot_on_this_one():
    rank = Rank()
    rank.saved(1)
    rank.state = "encoding"
    handle = rank.save(2)
    rank.run(rank.saver.begin_timeline(6, None))
    rank.done.clear()
    rank.state = "failed"
    drive([rank], lambda: handle.left)
    assert rank.calls(RESERVE) == []


# -- re-protection --------------------------------------------------------------------------------


def test_lost_fragments_of_what_was_restored_are_made_again_and_no_rank_is_counted():
    rank = Rank()
    shard = rank.saved(1).generation
    head = rank.calls(STAGE)[0].message.header
    handle = SaveHandle(shard, 1, began_s=rank.now_s)
    rank.done.clear()
    rank.run(rank.saver.protect_again(head, (), handle))
    assert (handle.committed, handle.committed_s) == (True, 0.0)
    handle = SaveHandle(shard, 1, began_s=rank.now_s)
    rank.run(rank.saver.protect_again(head, (Target(1, "n2", "n2:1"),), handle))
    drive([rank], lambda: handle.left)
    (protect,) = rank.calls(PROTECT)
    assert (protect.message.writer, protect.message.min_fragments) == (writer_of(5), 0)
    assert handle.committed
    assert not [each for each in rank.steps() if each.startswith("Store")]
    assert len(rank.calls(RESERVE)) == 0


# -- tickets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_what_came_of_a_ticket_is_asked_of_the_agents_before_the_next_save(committed):
    rank = Rank(disk_every=1)
    ticket = rank.run(rank.session.ticket(1))
    gen = ticket.shard.generation
    rank.answers[INVENTORY] = lambda effect: _inventory(gen if committed else None)
    assert rank.calls(INVENTORY) == []
    rank.run(rank.session.ticket(2))
    assert len(rank.calls(INVENTORY)) == 1
    handle = rank.save(3)
    assert handle.staged
    # Of the second, no agent knows either.
    discard = (generation(5, 2),) if committed else (gen, generation(5, 2))
    assert rank.calls(RESERVE)[-1].message.discard == discard


def test_a_ticket_waits_for_saves_and_drops_the_slot_reserved_ahead():
    rank = Rank()
    handle = rank.save(1)
    rank.run(rank.session.ticket(2))
    assert handle.left
    rank.answers[INVENTORY] = _inventory(generation(5, 2))
    before = len(rank.calls(RESERVE))
    rank.save(3)
    assert len(rank.calls(RESERVE)) == before + 1


def test_a_ticket_is_not_waited_for_longer_than_a_save_may_take():
    rank = Rank()
    rank.gates[StoreAdd] = lambda effect: False  # the store hangs
    rank.save(1)
    with pytest.raises(SaveTimedOut, match="the save of step 1 is still not finished"):
        rank.run(rank.session.ticket(2))


def _inventory(committed: Any) -> Inventory:
    return inventory("n0", committed=committed)


# -- the end --------------------------------------------------------------------------------------


def test_closing_waits_for_others_no_longer_than_a_second_and_names_what_is_unfinished():
    store, clock = Store(), Clock()
    rank = Rank(0, 2, store=store, clock=clock)
    handle = rank.save(1)
    assert rank.saver.unfinished() == [handle]
    drive([rank], lambda: store.counters.get(f"count/{handle.generation}") == 1)
    store.add(f"count/{handle.generation}", 1)
    drive([rank], lambda: handle.done)
    began_s = clock.now_s
    rank.saver.begin_close()
    drive([rank], lambda: handle.left)
    assert clock.now_s - began_s < 2
    assert rank.saver.unfinished() == []


def test_closing_notes_the_last_ticket_for_the_disks_on_rank_0_only():
    for at, settled, asked in ((0, True, 1), (0, False, 0), (1, True, 0)):
        rank = Rank(at, 2)
        gen = rank.run(rank.session.ticket(1)).shard.generation
        rank.answers[INVENTORY] = _inventory(gen)
        rank.run(rank.session.close(settled=settled))
        assert len(rank.calls(INVENTORY)) == asked


def test_closing_waits_for_the_disks_only_so_long():
    rank = Rank(disk_every=1, begun=False)
    archivist = rank.session._archivist
    archivist.begin_timeline(5, OnDisk(), ())
    rank.run(rank.saver.begin_timeline(5, None))
    archive = rank.begin(archivist.run())
    rank.gates[STORE] = lambda effect: False
    rank.saved(1)
    began_s = rank.now_s
    rank.run(rank.session.close(settled=True))
    assert 20.0 <= rank.now_s - began_s <= 41.0
    assert archive.ended or not archivist.is_done


def test_events_of_a_save_are_reported_once():
    rank = Rank()
    rank.saved(1)
    events = [type(event) for event in rank.events]
    assert events == [SaveCommitted]
    rank.on[CopyState] = SaveFailed("no")
    rank.save(2)
    assert [type(event) for event in rank.events][1:] == [SaveFailure]
