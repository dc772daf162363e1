"""What an agent's core decides about its disk: no disk, no thread, no clock."""

from pathlib import Path

import pytest

from ecckpt.agent.core import actions as act
from ecckpt.agent.core.core import Core
from ecckpt.agent.core.tasks import TAKEN_BACK
from ecckpt.agent.records.entry import Entry
from ecckpt.agent.storage.disk import DiskFile
from ecckpt.errors import DiskFull, Fenced, InvalidMessage, MemoryBudgetTooSmall
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import RunWriter
from ecckpt.policy.rollbacks import RollBack
from ecckpt.protocol.messages.disk import Piece, Retain, Store, Stored
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.restore import Begin, Fence, Forget
from ecckpt.protocol.messages.save import Commit
from tests.support.builders import generation, header, table_of, writer_of
from tests.support.hands import BUDGET, NEW, OLD, Hands, commit, hold, reserve, take

NEWER = generation(1, 11)
FULL = MemoryBudgetTooSmall("n1", need_bytes=2, have_bytes=1, what="x")


class DiskHands(Hands):
    """With a disk; what is recorded there is written at once, like the notes."""

    def __init__(self, problem=""):
        super().__init__()
        self.core = Core(
            node="n1", address="n1:1", budget_bytes=BUDGET, disk=True, disk_problem=problem
        )

    def tell(self, event):
        super().tell(event)
        while self.writes and any(isinstance(each, act.Record) for each in self.todo):
            record = self.next(act.Record)
            notes = self.core.records.get_or_create(record.run).noted.lasting
            super().tell(act.Finished(record, notes))


@pytest.fixture
def hands():
    return DiskHands()


def file_of(write):
    shard = write.entry.header
    return DiskFile(Path(f"{shard.shard}.{shard.index}"), shard, write.entry.table)


def written(hands, *, error=None):
    """The write that is under way ends."""
    write = hands.next(act.Write)
    hands.tell(act.Failed(write, error) if error else act.Finished(write, file_of(write)))
    return write.entry


def store(hands, gen=NEW, *, discard=()):
    hands.tell(Store("test", gen, 0, discard))
    answer = hands.answers.pop()
    return answer.message if isinstance(answer, act.Reply) else answer.error


def retain(hands, *gens, writer=1):
    hands.tell(Retain("test", writer_of(writer), gens))
    return hands.answers.pop().message


def hold_two(hands, gen=NEW):
    for index in (2, 3):
        assert take(hands, hold(index, gen=gen, writer=gen.timeline)) == ""


def put_on_disk(hands, *gens):
    for gen in gens:
        hold_two(hands, gen)
        store(hands, gen)
        written(hands)
        written(hands)


def on_disk(hands):
    disk = hands.core.records.get("test").inventory("n1").disk
    return sorted((each.shard.generation, each.index) for each in disk)


def removed(hands):
    found = [each for each in hands.todo if isinstance(each, act.Remove)]
    hands.todo = [each for each in hands.todo if not isinstance(each, act.Remove)]
    return sorted({file.header.shard.generation for each in found for file in each.files})


# -- storing --------------------------------------------------------------------------------------


def test_one_file_after_another_and_told_on_asking_again(hands):
    hold_two(hands)
    size_bytes = header(2).file_bytes
    assert store(hands) == Stored(True, (), 2 * size_bytes, ())
    assert store(hands).waiting_bytes == 2 * size_bytes
    assert [type(each) for each in hands.todo] == [act.Write]
    written(hands)
    assert store(hands) == Stored(True, (Piece(0, 2),), size_bytes, ())
    written(hands)
    assert store(hands) == Stored(True, (Piece(0, 2), Piece(0, 3)), 0, ())
    assert on_disk(hands) == [(NEW, 2), (NEW, 3)]
    assert hands.todo == []


def test_fragments_come_before_home_copies(hands):
    home = header(HOME, gen=NEW, rank=3)
    hands.core.records.enter(
        Entry(header=home, region=hands.region(home.file_bytes), table=table_of(home))
    )
    hold_two(hands)
    store(hands)
    assert [written(hands).header.index for _ in range(3)] == [2, 3, HOME]


def test_without_a_disk_nothing_is_written_and_that_is_said():
    hands = Hands()
    hold_two(hands)
    assert store(hands) == Stored(False, (), 0, ())
    assert hands.todo == []


def test_a_disk_that_cannot_be_used_says_why():
    hands = DiskHands("not mounted")
    hold_two(hands)
    assert store(hands) == Stored(True, (), 0, ("not mounted",))
    assert hands.todo == []


def test_a_write_that_fails_costs_that_file_alone(hands):
    hold_two(hands)
    store(hands)
    written(hands, error=OSError(5, "Input/output error"))
    written(hands)
    answer = store(hands)
    assert answer.pieces == (Piece(0, 3),)
    assert "Input/output error" in answer.problems[0]
    assert len(hands.took(act.Warn)) == 1


def test_what_is_staged_and_not_sealed_is_not_stored(hands):
    hands.ask(reserve())
    assert store(hands) == Stored(True, (), 0, ())


def test_an_older_timeline_is_fenced_off(hands):
    hands.ask(Fence("test", writer_of(2), None, ()))
    with pytest.raises(Fenced):
        store(hands, NEW)
    with pytest.raises(Fenced):
        retain(hands, NEW, writer=1)
    for gens in ((), (NEW, OLD), (NEW, NEW)):
        with pytest.raises(InvalidMessage):
            retain(hands, *gens, writer=2)


def test_the_next_generation_takes_the_place_of_what_has_not_begun(hands):
    hold_two(hands, OLD)
    store(hands, OLD)
    hold_two(hands)
    hands.ask(commit(NEW))
    assert hands.took(act.Recycle) == []  # lent
    store(hands)
    assert len(hands.took(act.Recycle)) == 1  # what waited; what is being written stays lent
    assert len(hands.todo) == 1  # a disk that hangs is not given more and more to do
    assert written(hands).header.shard.generation == OLD
    assert len(hands.took(act.Recycle)) == 1
    written(hands)
    written(hands)
    assert on_disk(hands) == [(OLD, 2), (NEW, 2), (NEW, 3)]


# -- memory comes first ---------------------------------------------------------------------------


def test_what_a_newer_commit_lets_go_stays_until_it_is_on_disk(hands):
    hold_two(hands, OLD)
    store(hands, OLD)
    hold_two(hands)
    hands.ask(commit(NEW))
    assert hands.held() == [(NEW, 0, 2), (NEW, 0, 3)]
    for _ in range(2):
        assert hands.took(act.Recycle) == []
        written(hands)
        assert len(hands.took(act.Recycle)) == 1


def test_memory_that_a_save_needs_is_taken_back_from_the_disk(hands):
    hold_two(hands, OLD)
    store(hands, OLD)
    hold_two(hands)
    hands.ask(commit(NEW))
    hands.tell(reserve(NEWER))
    hands.end(act.Allocate, error=FULL)
    assert len(hands.took(act.Recycle)) == 2
    lent = hands.next(act.Write).entry
    assert not lent.lent  # its thread sees that, and writes no more of it
    hands.end(act.Allocate)
    assert isinstance(hands.answers.pop(), act.Reply)


def test_no_more_than_is_needed_and_what_would_come_last(hands):
    hold_two(hands, OLD)
    store(hands, OLD)
    hold_two(hands)
    hands.ask(commit(NEW))
    hands.tell(hold(4, gen=NEWER))
    hands.answers.pop()
    hands.end(act.Allocate, error=FULL)
    (gone,) = hands.took(act.Recycle)
    writing = hands.next(act.Write).entry
    assert writing.lent
    assert gone.region is not writing.region
    hands.end(act.Allocate)


def test_what_is_not_written_for_that_reason_is_said(hands):
    hold_two(hands, OLD)
    store(hands, OLD)
    hold_two(hands)
    hands.ask(commit(NEW))
    hands.tell(reserve(NEWER))
    hands.end(act.Allocate, error=FULL)
    write = hands.next(act.Write)
    hands.tell(act.Failed(write, OSError("taken back")))
    answer = store(hands, OLD)
    assert answer.problems == ("taken back", TAKEN_BACK)
    assert (answer.pieces, answer.waiting_bytes) == ((), 0)
    assert len(hands.took(act.Recycle)) == 2  # each only once


def test_without_anything_to_take_back_a_save_fails_as_before(hands):
    hold_two(hands)
    store(hands)
    hands.tell(reserve(NEWER))
    hands.end(act.Allocate, error=FULL)
    assert isinstance(hands.answers.pop().error, MemoryBudgetTooSmall)
    assert hands.held() == [(NEW, 0, 2), (NEW, 0, 3)]


# -- what goes from disk --------------------------------------------------------------------------


def test_a_commit_in_memory_lets_nothing_go_from_disk(hands):
    put_on_disk(hands, OLD)
    hold_two(hands)
    hands.ask(commit(NEW))
    assert hands.held() == [(NEW, 0, 2), (NEW, 0, 3)]
    assert on_disk(hands) == [(OLD, 2), (OLD, 3)]
    assert removed(hands) == []
    shard = header(gen=OLD).shard
    assert hands.core.records.locate(shard, 2)[0].header.index == 2
    assert hands.core.records.table(shard)


def test_what_is_older_goes_when_something_newer_is_on_disk_everywhere(hands):
    put_on_disk(hands, OLD, NEW)
    assert removed(hands) == []
    retain(hands, NEW)
    assert removed(hands) == [OLD]
    assert on_disk(hands) == [(NEW, 2), (NEW, 3)]
    assert hands.core.records.get("test").stored == (NEW,)


def test_it_goes_after_that_is_noted(hands):
    put_on_disk(hands, OLD, NEW)
    hands.writes = False
    hands.tell(Retain("test", writer_of(1), (NEW,)))
    assert removed(hands) == []
    hands.end(act.Remember)
    assert [type(each) for each in hands.todo] == [act.Record, act.Remove]
    assert removed(hands) == [OLD]


def test_what_is_kept_stays(hands):
    put_on_disk(hands, OLD, NEW, NEWER)
    retain(hands, OLD, NEWER)
    assert removed(hands) == [NEW]
    retain(hands, OLD)  # said late: nothing newer goes, and nothing is forgotten
    assert hands.core.records.get("test").stored == (OLD, NEWER)
    assert removed(hands) == []


def test_what_was_given_up_goes_but_never_what_is_stored(hands):
    put_on_disk(hands, OLD, NEW)
    retain(hands, OLD)
    store(hands, NEWER, discard=(OLD, NEW))
    assert removed(hands) == [NEW]


def test_what_the_run_went_back_to_stays_until_something_newer_is_stored(hands):
    put_on_disk(hands, OLD, NEW)
    retain(hands, OLD, NEW)
    hands.ask(Fence("test", writer_of(2), OLD, (RollBack(2, OLD),)))
    retain(hands, NEW, writer=2)
    assert removed(hands) == []
    back = generation(2, 10)
    put_on_disk(hands, back)
    retain(hands, back, writer=2)
    assert removed(hands) == [OLD, NEW]


def test_in_memory_too(hands):
    hold_two(hands, NEW)
    hands.ask(commit(NEW))
    hands.ask(Fence("test", writer_of(2), OLD, (RollBack(2, OLD),)))
    assert take(hands, hold(2, gen=OLD, writer=2)) == ""
    hands.ask(Fence("test", writer_of(2), None, (RollBack(3, OLD),)))  # something to note
    assert (OLD, 0, 2) in hands.held()
    assert take(hands, hold(3, gen=generation(2, 10), writer=2)) == ""
    hands.ask(commit(generation(2, 10)))
    assert hands.held() == [(generation(2, 10), 0, 3)]


def test_where_there_is_no_room_attempts_of_older_timelines_go_first(hands):
    put_on_disk(hands, OLD, NEW)
    retain(hands, OLD)
    full = DiskFull("/disk", need_bytes=2, free_bytes=1)
    hands.ask(Fence("test", writer_of(2), None, ()))
    hold_two(hands, generation(2, 11))
    store(hands, generation(2, 11))
    written(hands, error=full)  # before it is known what the timeline continues
    assert removed(hands) == []
    hands.ask(Fence("test", writer_of(2), OLD, ()))
    written(hands, error=full)
    assert removed(hands) == [NEW]
    write = hands.next(act.Write)
    assert write.again
    hands.tell(act.Finished(write, file_of(write)))
    assert on_disk(hands) == [(OLD, 2), (OLD, 3), (generation(2, 11), 3)]


def test_and_what_somebody_left_on_purpose(hands):
    put_on_disk(hands, OLD, NEW)
    retain(hands, OLD, NEW)
    full = DiskFull("/disk", need_bytes=2, free_bytes=1)
    for number, (roll_backs, gone) in enumerate((((), []), ((RollBack(2, OLD),), [NEW]))):
        hands.ask(Fence("test", writer_of(2), OLD, roll_backs))
        gen = generation(2, 20 + number)
        assert take(hands, hold(2, gen=gen, writer=2)) == ""
        store(hands, gen)
        written(hands, error=full)
        assert removed(hands) == gone
    assert on_disk(hands) == [(OLD, 2), (OLD, 3)]


def test_the_home_copy_on_disk_serves_its_data_fragments(hands):
    entry = header(HOME, gen=NEW)
    hands.core.records.keep_file(DiskFile(Path("home"), entry, table_of(entry)))
    size_bytes = entry.fragment_bytes
    where, offset, length = hands.core.records.locate(entry.shard, 1)
    assert (where.path, offset, length) == (Path("home"), 4096 + size_bytes, size_bytes)
    assert hands.core.records.locate_shard(entry.shard)[1:] == (4096, entry.shard_bytes)


# -- forgetting a run -----------------------------------------------------------------------------


def test_what_is_being_written_when_a_run_is_forgotten_goes_when_it_is_there(hands):
    put_on_disk(hands, OLD)
    hold_two(hands)
    hands.ask(Commit("test", NEW))
    store(hands)
    assert hands.ask(Forget("test", RunWriter(2, "1" * 16))) == Done()
    assert removed(hands) == [OLD]
    written(hands)
    assert removed(hands) == [NEW]
    assert [each for each in hands.todo if isinstance(each, act.Write)] == []
    found = hands.core.records.get("test").inventory("n1")
    counts = (len(found.headers), len(found.disk))
    assert (counts, found.committed, found.fence) == ((0, 0), None, 2)
    assert len([each for each in hands.settled if isinstance(each, act.Release)]) == 1


def test_what_a_new_run_of_the_name_stores_stays(hands):
    hands.ask(Forget("test", RunWriter(2, "1" * 16)))
    hands.ask(Begin("test", writer_of(3), 0.0))
    put_on_disk(hands, generation(3, 1))
    assert on_disk(hands) == [(generation(3, 1), 2), (generation(3, 1), 3)]
    assert removed(hands) == []
