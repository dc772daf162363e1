"""The core's decisions, event by event: no socket, no thread, no clock, no file."""

import pytest

from ecckpt.agent.core import actions as act
from ecckpt.agent.core import hold as holding
from ecckpt.errors import (
    AgentUnreachable,
    CorruptFragment,
    EcckptError,
    Fenced,
    InvalidMessage,
    MemoryBudgetTooSmall,
    NotHeld,
    OlderStart,
    RequestRefused,
)
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import RunWriter
from ecckpt.protocol.messages.node import Done
from ecckpt.protocol.messages.restore import Assign, Begin, Fence, Fetch, Forget
from ecckpt.protocol.messages.save import Held, Hold, Stage
from tests.support.builders import generation, header, table_of, writer_of
from tests.support.hands import (
    BUDGET,
    NEW,
    OLD,
    Hands,
    commit,
    held,
    hold,
    protect,
    reserve,
    scattering,
    stage,
    state,
    take,
)

LATER = generation(1, 11)


@pytest.fixture
def hands():
    return Hands()


# -- slots ----------------------------------------------------------------------------------------


def test_a_slot_is_the_region_that_was_allocated(hands):
    slot = hands.ask(reserve())
    assert (slot.path, slot.header) == ("1", header(gen=NEW))
    assert state(hands).state == "unknown"
    assert hands.ask(Stage(slot.header, slot.region)) == Done()
    assert state(hands).state == "staging"
    assert hands.held() == []


def test_a_slot_reserved_before_its_step_is_known_takes_what_fits(hands):
    slot = hands.ask(reserve(OLD))
    for shard in (header(gen=NEW, shard_bytes=1_000_000), header(gen=NEW, rank=1)):
        with pytest.raises(NotHeld, match=f"no slot {slot.region}"):
            hands.tell(Stage(shard, slot.region))
    with pytest.raises(NotHeld, match="no slot 7"):
        hands.tell(Stage(header(gen=NEW), "7"))
    smaller = header(gen=NEW, shard_bytes=5000)
    assert hands.ask(Stage(smaller, slot.region)) == Done()
    assert state(hands).state == "staging"
    with pytest.raises(NotHeld):
        hands.tell(Stage(smaller, slot.region))  # once only


def test_what_is_assigned_is_given_back_and_not_recycled(hands):
    take(hands, hold(rank=1, gen=LATER))
    shard = scattering(hands)
    slot = hands.ask(Assign(shard))
    assert slot == hands.ask(Assign(shard))
    assert {each.region.name for each in hands.took(act.MarkAssigned)} == {slot.region}
    for index in range(5):
        hands.ask(held(index))
    hands.took(act.Recycle)  # parity
    hands.ask(commit(LATER))
    assert hands.held() == [(LATER, 1, 2)]
    assert [each.region.name for each in hands.took(act.Discard)] == [slot.region]
    assert not hands.took(act.Recycle)


def test_only_a_sealed_home_copy_is_assigned(hands):
    slot = stage(hands)
    with pytest.raises(InvalidMessage, match="still being staged"):
        hands.tell(Assign(slot.header.shard))
    with pytest.raises(NotHeld):
        hands.tell(Assign(header(gen=OLD).shard))


def test_each_rank_has_a_reserved_slot_of_its_own(hands):
    slots = [hands.ask(reserve(rank=rank)) for rank in (0, 1)]
    assert not hands.took(act.Discard)
    for slot in slots:
        assert hands.ask(Stage(slot.header, slot.region)) == Done()


@pytest.mark.parametrize("other", [{"world_size": 9}, {"m": 1}, {"home": "n9"}])
def test_what_is_staged_is_what_the_slot_was_reserved_for(hands, other):
    slot = hands.ask(reserve())
    with pytest.raises(InvalidMessage, match=r"reserved as .*, staged as"):
        hands.tell(Stage(header(**{"gen": NEW} | other), slot.region))
    assert hands.ask(Stage(slot.header, slot.region)) == Done()


def test_a_slot_reserved_by_an_older_timeline_is_gone(hands):
    slot = hands.ask(reserve())
    hands.ask(Fence("test", writer_of(2), None, ()))
    assert [each.region.name for each in hands.took(act.Discard)] == [slot.region]
    with pytest.raises(Fenced):
        hands.tell(Stage(slot.header, slot.region))


def test_a_slot_asked_for_twice_at_once_is_kept_once(hands):
    hands.tell(reserve())
    hands.tell(reserve())
    hands.end(act.Allocate)
    hands.end(act.Allocate)
    assert [each.region.name for each in hands.took(act.Discard)] == ["1"]
    assert hands.ask(Stage(header(gen=NEW), "2")) == Done()


def test_reserved_slots_of_any_run_go_where_there_is_no_room(hands):
    full = MemoryBudgetTooSmall("n1", need_bytes=2, have_bytes=1, what="a slot")
    hands.ask(reserve(run="other"))
    hands.tell(reserve())
    hands.end(act.Allocate, error=full)
    assert [(each.run, each.region.name) for each in hands.took(act.Discard)] == [("other", "1")]
    hands.end(act.Allocate)
    assert isinstance(hands.answers.pop(), act.Reply)


def test_a_slot_for_a_fragment_or_beyond_the_budget_is_refused_at_once(hands):
    with pytest.raises(InvalidMessage, match="only home copies"):
        hands.tell(reserve(index=1))
    with pytest.raises(MemoryBudgetTooSmall, match="keeping shards of 900,000,000 bytes"):
        hands.tell(reserve(shard_bytes=900_000_000))
    assert not hands.todo


def test_a_slot_whose_writer_was_fenced_meanwhile_is_not_given(hands):
    hands.tell(reserve())
    hands.ask(Fence("test", writer_of(2), None, ()))
    hands.end(act.Allocate)
    assert isinstance(hands.answers.pop().error, Fenced)
    assert len(hands.took(act.Recycle)) == 1
    assert state(hands).state == "unknown"


def test_the_next_slot_of_a_rank_gives_up_the_one_it_never_sealed(hands):
    stage(hands, OLD)
    hands.ask(reserve(NEW))
    (gone,) = hands.took(act.Discard)
    assert gone.region.name == "1"


def test_room_is_made_of_an_abandoned_timeline_only(hands):
    for gen in (generation(1, 300), generation(1, 5000)):
        take(hands, hold(gen=gen))
    full = MemoryBudgetTooSmall("n1", need_bytes=2, have_bytes=1, what="a slot")
    hands.tell(reserve(generation(2, 301)))
    hands.end(act.Allocate, error=full)
    assert hands.answers.pop().error is full  # where the run went back to is not known
    hands.ask(Fence("test", writer_of(2), generation(1, 300), ()))
    hands.tell(reserve(generation(2, 301)))
    hands.end(act.Allocate, error=full)
    assert len(hands.took(act.Recycle)) == 1
    assert hands.held() == [(generation(1, 300), 0, 2)]
    hands.end(act.Allocate, error=full)
    assert hands.answers.pop().error is full  # there is no third try


# -- protecting -----------------------------------------------------------------------------------


def test_a_shard_is_sealed_before_anybody_is_asked_to_hold_it(hands):
    scattering(hands)
    assert [each.entry.header.index for each in hands.took(act.Seal)] == [HOME]
    posts = [each for each in hands.todo if isinstance(each, act.Post)]
    assert [each.message.header.index for each in posts] == list(range(5))
    assert {each.message.source for each in posts} == {"n1:1"}
    assert hands.held() == [(NEW, 0, HOME)]


def test_it_is_protected_when_every_holder_has_answered(hands):
    scattering(hands)
    for index in range(5):
        assert state(hands).state == "scattering"
        hands.ask(held(index, "full" if index == 4 else ""))
    found = state(hands)
    assert (found.state, found.held) == ("protected", 4)
    assert found.problems == ("fragment 4 at h4: full",)
    assert len(hands.took(act.Recycle)) == 1  # the parity


def test_it_fails_when_too_few_hold(hands):
    scattering(hands)
    for index in range(5):
        hands.ask(held(index, "full" if index > 1 else ""))
    found = state(hands)
    assert (found.state, found.held) == ("failed", 2)
    assert "2 fragments held, at least 3 needed" in found.problems


def test_who_cannot_be_asked_has_answered(hands):
    scattering(hands)
    for _ in range(5):
        hands.end(act.Post, error=EcckptError("nobody there"))
    assert state(hands).state == "failed"
    assert "fragment 0 at h0: nobody there" in state(hands).problems


def test_once_enough_hold_the_others_get_a_few_times_as_long(hands):
    scattering(hands)
    (wake,) = hands.took(act.Wake)
    assert wake.at_s == 160.0
    hands.now_s = 102.0
    for index in range(3):
        hands.ask(held(index))
    (sooner,) = hands.took(act.Wake)
    assert sooner.at_s == 102.0 + 3 * 2.0
    hands.now_s = 107.0
    hands.tell(act.Due(sooner.task))
    assert state(hands).state == "scattering"
    hands.now_s = 108.0
    hands.tell(act.Due(sooner.task))
    found = state(hands)
    assert (found.state, found.protected_s) == ("protected", 8.0)
    assert found.problems == ("fragment 3: no answer", "fragment 4: no answer")
    hands.now_s = 160.0
    hands.tell(act.Due(wake.task))
    assert state(hands) == found


def test_nobody_answers_by_the_deadline(hands):
    scattering(hands, timeout_s=5.0)
    (wake,) = hands.took(act.Wake)
    hands.now_s = wake.at_s
    hands.tell(act.Due(wake.task))
    assert state(hands).state == "failed"


def test_answers_that_nobody_waits_for_are_ignored(hands):
    hands.ask(held(1))
    scattering(hands)
    for index in (0, 1, 2, 3, 4, 4):
        hands.ask(held(index))
    assert state(hands).held == 5


def test_no_room_for_parity_fails_the_job_alone(hands):
    stage(hands)
    hands.ask(protect())
    full = MemoryBudgetTooSmall("n1", need_bytes=2, have_bytes=1, what="the parity")
    hands.end(act.Allocate, error=full)
    assert state(hands).state == "failed"
    assert not hands.took(act.Discard)  # the slot stays: it can be protected again


def test_a_home_copy_that_changed_is_not_passed_on(hands):
    scattering(hands, targets=())
    assert state(hands).state == "failed"  # 0 of 3
    hands.ask(protect())
    hands.end(act.Allocate)
    hands.end(act.Encode, table_of(header(), seed=2))
    assert "no longer matches its checksums" in state(hands).problems[0]
    assert not any(isinstance(each, act.Post) for each in hands.todo)


def test_data_fragments_of_a_sealed_home_copy_need_no_encoding(hands):
    scattering(hands, targets=(), least=0)
    hands.took(act.Recycle)
    hands.ask(protect(targets=(0, 2), least=0))
    assert [each.message.header.index for each in hands.todo] == [0, 2]


def test_a_home_copy_in_use_goes_when_its_job_is_done(hands):
    take(hands, hold(rank=1, gen=LATER))
    scattering(hands)
    hands.ask(commit(LATER))
    assert hands.held() == [(LATER, 1, 2)]
    assert not hands.took(act.Recycle)
    for index in range(5):
        hands.ask(held(index))
    assert len(hands.took(act.Recycle)) == 2  # parity and home copy


def test_protecting_again_ends_the_older_job(hands):
    scattering(hands)
    hands.ask(protect())
    assert state(hands).state == "encoding"
    assert len(hands.took(act.Recycle)) == 1  # the parity of the first
    hands.ask(held(0))  # of the first
    hands.end(act.Allocate)
    hands.end(act.Encode, table_of(header()))
    assert state(hands).held == 0


@pytest.mark.parametrize("failed", [False, True])
def test_protecting_again_lets_the_older_encoding_end(hands, failed):
    stage(hands)
    hands.ask(protect())
    hands.end(act.Allocate)
    hands.ask(protect())
    assert not hands.took(act.Recycle)  # the parity is being written
    first = hands.next(act.Encode)
    ended = (
        act.Failed(first, EcckptError("x")) if failed else act.Finished(first, table_of(header()))
    )
    hands.tell(ended)
    assert len(hands.took(act.Recycle)) == 1
    assert state(hands).state == "encoding"
    hands.end(act.Allocate)
    hands.end(act.Encode, table_of(header()))
    assert state(hands).state == "scattering"


def test_what_is_not_here_cannot_be_protected(hands):
    with pytest.raises(NotHeld):
        hands.tell(protect())


# -- holding --------------------------------------------------------------------------------------


def test_a_fragment_is_pulled_sealed_and_answered(hands):
    assert take(hands, hold()) == ""
    assert hands.held() == [(NEW, 0, 2)]
    assert len(hands.took(act.Seal)) == 1


def test_a_fragment_that_is_here_is_answered_at_once(hands):
    take(hands, hold())
    hands.ask(hold())
    assert hands.end(act.Post).message == Held(header(gen=NEW).shard, 2, "n1", "")
    assert not hands.todo


def test_bad_blocks_are_pulled_twice_then_reported(hands):
    hands.ask(hold())
    hands.end(act.Allocate)
    hands.end(act.Pull, 1)
    hands.end(act.Pull, 1)
    assert "1 of 1 blocks fail" in hands.end(act.Post).message.problem
    assert len(hands.took(act.Recycle)) == 1
    assert hands.held() == []


def test_a_second_pull_may_be_right(hands):
    hands.ask(hold())
    hands.end(act.Allocate)
    hands.end(act.Pull, 1)
    hands.end(act.Pull, 0)
    assert hands.end(act.Post).message.problem == ""


def test_a_fragment_of_a_writer_fenced_meanwhile_is_not_kept(hands):
    hands.ask(hold())
    hands.end(act.Allocate)
    hands.ask(Fence("test", writer_of(2), None, ()))
    hands.end(act.Pull, 0)
    assert "fenced off" in hands.end(act.Post).message.problem
    assert not hands.took(act.Seal)
    assert hands.held() == []


def test_four_pulls_at_a_time(hands):
    for rank in range(6):
        hands.ask(hold(rank=rank))
    assert sum(isinstance(each, act.Allocate) for each in hands.todo) == 4
    hands.end(act.Allocate, error=MemoryBudgetTooSmall("n1", need_bytes=2, have_bytes=1, what="x"))
    assert sum(isinstance(each, act.Allocate) for each in hands.todo) == 4
    hands.end(act.Allocate)
    hands.end(act.Pull, error=EcckptError("gone"))
    assert sum(isinstance(each, act.Allocate) for each in hands.todo) == 4


def test_a_full_queue_refuses(hands, monkeypatch):
    monkeypatch.setattr("ecckpt.agent.core.hold._QUEUE_LIMIT", 2)
    for rank in range(2):
        hands.ask(hold(rank=rank))
    with pytest.raises(RequestRefused, match="2 fragments are queued"):
        hands.tell(hold(rank=2))


def test_what_makes_no_sense_is_not_held(hands):
    with pytest.raises(InvalidMessage, match="fetched, not held"):
        hands.tell(hold(HOME))
    message = hold()
    with pytest.raises(CorruptFragment):
        hands.tell(
            Hold(
                header=message.header,
                writer=writer_of(1),
                table=message.table[:-1],
                source="n0:1",
                memory_bytes=0,
                timeout_s=1.0,
                discard=(),
                repair=False,
            )
        )
    assert not hands.todo


def test_a_fragment_may_take_the_place_of_what_its_rank_gave_up(hands):
    take(hands, hold(gen=OLD))
    take(hands, hold(gen=OLD, rank=1))
    assert take(hands, hold(discard=(OLD,))) == ""
    assert hands.held() == [(OLD, 1, 2), (NEW, 0, 2)]


# -- fetching -------------------------------------------------------------------------------------


def fetch(writer=1):
    return Fetch(
        header=header(gen=NEW),
        writer=writer_of(writer),
        sources=(),
        memory_bytes=BUDGET,
        timeout_s=30.0,
    )


def test_a_fetched_shard_is_a_sealed_home_copy(hands):
    hands.tell(fetch())
    hands.end(act.Allocate)
    hands.end(act.Allocate)
    hands.end(act.Gather, act.Gathered(table_of(header()), 7, 1, ("late",)))
    answer = hands.answers.pop().message
    assert (answer.pulled_bytes, answer.rebuilt_fragments, answer.problems) == (7, 1, ("late",))
    assert answer.slot.path == "1"
    assert hands.held() == [(NEW, 0, HOME)]
    assert [each.region.name for each in hands.took(act.Recycle)] == ["2"]


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_fetch_that_fails_leaves_nothing(hands, ended):
    hands.tell(fetch())
    for _ in range(ended):
        hands.end()
    hands.end(error=EcckptError("no"))
    assert str(hands.answers.pop().error) == "no"
    assert len(hands.took(act.Recycle)) == ended
    assert hands.held() == []


def test_a_fetch_whose_writer_was_fenced_meanwhile_is_not_kept(hands):
    hands.tell(fetch())
    hands.end(act.Allocate)
    hands.end(act.Allocate)
    hands.ask(Fence("test", writer_of(2), None, ()))
    hands.end(act.Gather, act.Gathered(table_of(header()), 7, 1, ()))
    assert isinstance(hands.answers.pop().error, Fenced)
    assert len(hands.took(act.Recycle)) == 2
    assert hands.held() == []


def test_so_many_fetches_at_a_time(hands):
    for _ in range(32):
        hands.tell(fetch())
    with pytest.raises(RequestRefused, match="32 shards are being fetched"):
        hands.tell(fetch())
    hands.end(act.Allocate, error=EcckptError("no"))
    hands.tell(fetch())


# -- fencing and commit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "late", [hold(writer=1), protect(writer=1), fetch(1), reserve(), commit(NEW)]
)
def test_no_request_of_an_older_timeline_changes_anything(hands, late):
    hands.ask(Fence("test", writer_of(2), None, ()))
    with pytest.raises(Fenced):
        hands.tell(late)
    assert not hands.todo
    assert not hands.settled


def test_a_commit_is_answered_when_it_is_written_down_and_lets_go_afterwards(hands):
    take(hands, hold(gen=OLD))
    take(hands, hold(gen=NEW))
    hands.took(act.Recycle)
    hands.writes = False
    hands.tell(commit(NEW))
    assert not hands.answers
    assert not hands.took(act.Recycle)
    hands.end(act.Remember)
    assert len(hands.took(act.Recycle)) == 1
    assert hands.answers
    assert hands.core.records.get("test").noted.committed == NEW


def test_a_commit_of_what_this_node_has_nothing_of_drops_nothing(hands):
    take(hands, hold(gen=OLD))
    hands.ask(commit(LATER))
    assert hands.held() == [(OLD, 0, 2)]
    take(hands, hold(gen=NEW))
    hands.ask(Fence("test", writer_of(1), None, ()))  # something else happens
    assert hands.held() == [(OLD, 0, 2), (NEW, 0, 2)]


def test_a_commit_that_is_known_is_answered_at_once(hands):
    hands.ask(commit(NEW))
    hands.tell(commit(OLD))
    assert not hands.todo
    assert isinstance(hands.answers.pop(), act.Reply)


def test_a_newer_timeline_lets_slots_go_that_nobody_sealed(hands):
    hands.ask(reserve())
    hands.ask(Fence("test", writer_of(2), None, ()))
    assert len(hands.took(act.Discard)) == 1


# -- all holders that live ------------------------------------------------------------------------


def living(hands, **fields):
    """A job that needs all fragments whose holders can be reached."""
    shard = stage(hands).header.shard
    hands.ask(protect(every_living=True, **fields))
    hands.end(act.Allocate)
    hands.end(act.Encode, table_of(header()))
    return shard


def unsent(hands, index):
    """The ``Hold`` of a fragment cannot be sent."""
    post = next(each for each in hands.todo if isinstance(each, act.Post) and at(each) == index)
    hands.todo.remove(post)
    hands.tell(act.Failed(post, AgentUnreachable("n:1", "refused")))


def at(post):
    return post.message.header.index


def test_with_fewer_than_all_that_live_it_is_not_protected(hands):
    living(hands)
    for index in range(4):
        hands.ask(held(index))
    hands.ask(held(4, "no room"))
    assert (state(hands).state, state(hands).held) == ("failed", 4)
    assert "4 fragments held, at least 5 needed: all whose" in state(hands).problems[-1]


def test_a_holder_that_cannot_be_reached_twice_is_dead_and_not_waited_for(hands):
    living(hands)
    for index in range(4):
        hands.ask(held(index))
    unsent(hands, 4)
    assert state(hands).state == "scattering"
    unsent(hands, 4)
    assert (state(hands).state, state(hands).held) == ("protected", 4)
    assert "protected with 4 of 5 fragments" in hands.took(act.Warn)[0].text


def test_a_holder_that_does_not_answer_is_asked_again_until_the_end(hands):
    living(hands, timeout_s=30.0)
    hands.todo.clear()
    for index in range(4):
        hands.ask(held(index))
    started_s = hands.now_s
    for _ in range(9):
        (job,) = {each.task for each in hands.took(act.Wake)}
        hands.now_s = job.deadline_s
        hands.tell(act.Due(job))
        if state(hands).state != "scattering":
            break
        assert [at(post) for post in hands.todo] == [4]
        hands.todo.clear()
    assert (state(hands).state, hands.now_s - started_s) == ("failed", 30.0)


def test_a_few_holders_are_never_enough_whoever_is_dead(hands):
    living(hands)
    hands.ask(held(0))
    hands.ask(held(1))
    for index in (2, 3, 4):
        unsent(hands, index)
        unsent(hands, index)
    assert (state(hands).state, state(hands).held) == ("failed", 2)


def test_a_holder_that_serves_a_newer_timeline_fences_this_nodes_writers_too(hands):
    living(hands)
    post = hands.next(act.Post)
    hands.tell(act.Failed(post, Fenced(timeline=1, current=4)))
    with pytest.raises(Fenced, match="timeline 4 has started"):
        hands.tell(reserve())


# -- a start that only asks -----------------------------------------------------------------------


def test_a_start_may_ask_whether_it_may_begin(hands):
    hands.ask(Begin("test", RunWriter(3, "a" * 16), 5.0))
    young, old = RunWriter(0, "b" * 16), RunWriter(0, "c" * 16)
    assert hands.ask(Begin("test", young, 1.0)).fence == 3
    with pytest.raises(OlderStart, match="began timeline 3"):
        hands.tell(Begin("test", old, 6.0))
    assert hands.ask(Begin("test", RunWriter(3, "a" * 16), 5.0)).fence == 3  # nothing has changed


def test_a_forget_of_no_timeline_is_no_question(hands):
    take(hands, hold(gen=OLD))
    with pytest.raises(Fenced):
        hands.tell(Forget("test", RunWriter(0, "a" * 16)))


def test_a_fragment_that_is_asked_for_again_takes_no_second_place(hands, monkeypatch):
    hands.ask(hold())
    monkeypatch.setattr(holding, "_QUEUE_LIMIT", 1)
    assert hands.ask(hold()) == Done()
    with pytest.raises(RequestRefused, match="1 fragments are queued"):
        hands.tell(hold(3))
