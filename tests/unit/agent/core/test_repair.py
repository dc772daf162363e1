"""Watching over holders and repairing, decided by the core: the clock is passed in."""

import pytest

from ecckpt.agent.core import actions as act
from ecckpt.agent.core.health import MISSES
from ecckpt.agent.deadlines import HEALTH_ROUND_S
from ecckpt.agent.runtime.run_state_file import pack_notes, unpack_notes
from ecckpt.errors import AgentUnreachable, Fenced, InvalidMessage, MemoryBudgetTooSmall
from ecckpt.format.fragment_file import HOME
from ecckpt.policy.sizing import parity_region_bytes, steady_bytes
from ecckpt.protocol.messages.repair import Guard, Member, Presence, Probe
from ecckpt.protocol.messages.restore import Fence, Fetch
from ecckpt.protocol.messages.save import Held, Protect
from tests.support.builders import generation, header, table_of, writer_of
from tests.support.hands import BUDGET, NEW, Hands, commit, held, hold, protect, scattering, stage

SHARD = header(gen=NEW).shard
DEAD = None


def guard(spares=0, *, writer=1, memory_bytes=BUDGET, holders=5):
    names = [f"h{at}" for at in range(5)] + [f"s{at}" for at in range(spares)]
    members = tuple(Member(name, name, f"{name}:1") for name in names)
    return Guard(
        run="test",
        writer=writer_of(writer),
        members=members,
        holders=holders,
        local_ranks=1,
        memory_bytes=memory_bytes,
        timeout_s=60.0,
    )


class Group:
    """A home whose shard is committed and held, and what the other nodes have of it."""

    def __init__(self, *, spares=0, memory_bytes=BUDGET):
        self.hands = Hands()
        scattering(self.hands)
        for index in range(5):
            self.hands.ask(held(index))
        self.hands.ask(commit(NEW))
        self.hands.todo.clear()  # what was posted
        self.has = {f"h{at}": {at} for at in range(5)} | {f"s{at}": set() for at in range(spares)}
        self.coming = {}
        self.names = {}
        self.committed = NEW
        self.asked = []
        self.hands.ask(guard(spares, memory_bytes=memory_bytes))
        self.hands.took(act.Seal)
        self.hands.took(act.Recycle)
        (wake,) = [each for each in self.hands.took(act.Wake) if not isinstance(each.task, act.Job)]
        self.wake_s, self.vigil = wake.at_s, wake.task

    def round(self, times=1):
        """The time of the next round comes, and every node that lives answers."""
        for _ in range(times):
            self.hands.now_s = max(self.hands.now_s, self.wake_s)
            self.hands.tell(act.Due(self.vigil))
            (wake,) = [
                each for each in self.hands.took(act.Wake) if not isinstance(each.task, act.Job)
            ]
            self.wake_s = wake.at_s
            self.asked = []
            self.hands.now_s += 0.1
            while any(isinstance(each, act.AskPeer) for each in self.hands.todo):
                self._answer()

    def _answer(self):
        ask = self.hands.next(act.AskPeer)
        name = ask.sight.address.removesuffix(":1")
        self.asked.append(name)
        if self.has[name] is DEAD:
            self.hands.tell(act.Failed(ask, AgentUnreachable(name, "dead")))
            return
        seen = Presence(
            self.names.get(name, name),
            self.committed,
            tuple(tuple(self.has[name]) for _ in ask.message.shards),
            tuple(tuple(self.coming.get(name, ())) for _ in ask.message.shards),
        )
        self.hands.tell(act.Finished(ask, seen))

    def posts(self):
        """Who was asked to hold what."""
        posts = [each for each in self.hands.todo if isinstance(each, act.Post)]
        assert all(each.message.repair for each in posts)
        for each in posts:
            self.hands.todo.remove(each)
        return {each.message.header.index: each.address.removesuffix(":1") for each in posts}

    def hold(self, posts):
        """They do."""
        for index, name in posts.items():
            self.has[name].add(index)
            self.hands.ask(held(index))

    @property
    def now(self):
        return self.hands.core.repairer.guard_status("test")


# -- looking --------------------------------------------------------------------------------------


def test_nothing_is_done_while_all_is_well():
    group = Group(spares=2)
    assert group.now.margin is None
    group.round()
    assert len(group.asked) == 7
    group.round(3)
    assert sorted(group.asked) == ["h0", "h1", "h2", "h3", "h4"]
    now = group.now
    assert (now.generation, now.margin, now.missing, now.lost) == (NEW, 3, 0, ())
    assert not group.hands.todo
    assert not group.hands.took(act.Warn)


def test_a_node_that_misses_twice_is_not_lost():
    group = Group(spares=2)
    group.round()
    group.has["h1"], memory = DEAD, group.has["h1"]
    group.round(MISSES - 1)
    assert (group.now.margin, group.now.lost) == (3, ())
    group.has["h1"] = memory
    group.round(5)
    assert (group.now.margin, group.now.repaired, group.posts()) == (3, 0, {})


def test_a_lost_node_costs_margin_within_seconds_and_is_told_once():
    group = Group()
    group.round()
    started_s = group.hands.now_s
    group.has["h1"] = DEAD
    group.round(MISSES)
    assert group.hands.now_s - started_s < 4 * HEALTH_ROUND_S
    now = group.now
    assert (now.margin, now.missing, now.lost) == (2, 1, ("h1",))
    assert group.posts() == {}  # nobody is there who could take it
    group.round(3)
    (warned,) = group.hands.took(act.Warn)
    assert "node h1 at h1:1 counts as lost" in warned.text


def test_a_lost_node_is_asked_less_often():
    group = Group()
    group.has["h1"] = DEAD
    group.round(MISSES)
    asked = []
    for _ in range(7):
        group.round()
        asked.append("h1" in group.asked)
    assert asked == [False, False, True, False, False, True, False]


def test_one_that_is_back_with_its_memory_needs_nothing():
    group = Group()
    group.has["h1"] = DEAD
    group.round(MISSES)
    group.has["h1"] = {1}
    group.round(4)
    assert (group.now.margin, group.now.lost, group.posts()) == (3, (), {})
    assert "answers again" in group.hands.took(act.Warn)[-1].text


def test_a_node_is_not_asked_again_before_it_has_answered():
    group = Group()
    group.hands.tell(act.Due(group.vigil))
    group.hands.now_s += HEALTH_ROUND_S
    group.hands.tell(act.Due(group.vigil))
    assert len(group.hands.todo) == 5


# -- repairing ------------------------------------------------------------------------------------


def test_an_empty_node_gets_data_again_without_any_encoding():
    group = Group()
    group.round()
    group.has["h1"] = set()
    group.round()
    posts = group.posts()
    assert posts == {1: "h1"}
    assert not group.hands.todo
    assert group.now.repairing == SHARD
    group.hold(posts)
    assert (group.now.repairing, group.now.repaired) == (None, 1)
    assert group.now.margin == 2  # until it says so itself
    group.round(2)
    assert (group.now.margin, group.now.missing, group.posts()) == (3, 0, {})


def test_parity_is_encoded_again():
    group = Group()
    group.has["h3"], group.has["h4"] = set(), set()
    group.round()
    assert group.posts() == {}
    group.hands.end(act.Allocate)
    group.hands.end(act.Encode, table_of(header()))
    posts = group.posts()
    assert posts == {3: "h3", 4: "h4"}
    group.hold(posts)
    assert len(group.hands.took(act.Recycle)) == 1  # the parity
    group.round()
    assert group.now.margin == 3


def test_a_home_copy_that_has_changed_repairs_nothing():
    group = Group()
    group.has["h3"] = set()
    group.round()
    group.hands.end(act.Allocate)
    group.hands.end(act.Encode, table_of(header(), seed=2))
    assert group.posts() == {}
    assert "no longer matches its checksums" in group.now.problem


def test_a_spare_node_takes_what_a_lost_one_had_and_keeps_it():
    group = Group(spares=2)
    group.round()
    group.has["h1"] = DEAD
    group.round(MISSES)
    posts = group.posts()
    assert posts == {1: "s0"}
    group.hold(posts)
    group.round(3)
    now = group.now
    assert (now.margin, now.missing, now.lost, now.repaired) == (3, 0, ("h1",), 1)
    group.has["h1"] = set()
    group.round(5)
    assert (group.now.lost, group.posts()) == ((), {})
    group.has["s0"] = DEAD  # it is watched like a holder as long as it is one
    group.round(MISSES)
    assert group.posts() == {1: "h1"}


def test_what_is_on_its_way_is_not_sent_again():
    group = Group()
    group.has["h1"], group.coming["h1"] = set(), {1}
    group.round(3)
    assert (group.posts(), group.now.missing, group.now.margin) == ({}, 1, 2)
    group.coming["h1"] = set()
    group.round()
    assert group.posts() == {1: "h1"}


def test_what_failed_is_tried_again_ever_more_seldom():
    group = Group()
    group.has["h1"] = set()
    pauses = []
    for _ in range(7):
        before_s = group.hands.now_s
        for _ in range(100):
            group.round()
            if group.posts():
                break
        pauses.append(group.hands.now_s - before_s)
        group.hands.ask(held(1, "no memory"))
    assert pauses == sorted(pauses)
    assert 4.0 <= pauses[1] < 8.0
    assert 64.0 <= pauses[-1] < 70.0
    assert group.now.problem == "fragment 1 at h1: no memory"


def test_one_shard_after_another():
    group = Group()
    hands = group.hands
    stage(hands, rank=1)
    shard = header(gen=NEW, rank=1).shard
    hands.tell(
        Protect(
            shard=shard,
            writer=writer_of(1),
            targets=protect().targets,
            min_fragments=3,
            every_living=False,
            memory_bytes=BUDGET,
            timeout_s=60.0,
            discard=(),
        )
    )
    hands.answers.clear()
    hands.end(act.Allocate)
    hands.end(act.Encode, table_of(header()))
    hands.todo.clear()
    for index in range(5):
        hands.ask(Held(shard, index, f"h{index}", ""))
    group.round()
    group.has["h2"] = set()
    group.round()
    assert group.posts() == {2: "h2"}
    assert group.now.repairing == SHARD
    hands.ask(held(2))
    assert group.posts() == {2: "h2"}
    assert group.now.repairing == shard


# -- giving way -----------------------------------------------------------------------------------


def test_a_save_ends_a_repair():
    group = Group()
    group.has["h1"], group.has["h3"] = set(), set()
    group.round()
    group.hands.end(act.Allocate)
    group.hands.end(act.Encode, table_of(header()))
    assert group.posts() == {1: "h1", 3: "h3"}
    stage(group.hands, generation(1, 11))
    group.hands.took(act.Recycle)
    group.hands.ask(protect(generation(1, 11)))
    assert len(group.hands.took(act.Recycle)) == 1
    assert "a save goes first" in group.now.problem
    group.round(5)
    assert group.posts() == {}


def test_a_save_takes_over_while_a_repair_is_still_being_encoded():
    group = Group()
    group.has["h3"] = set()
    group.round()
    group.hands.end(act.Allocate)
    encode = group.hands.next(act.Encode)
    stage(group.hands, generation(1, 11))
    group.hands.ask(protect(generation(1, 11)))
    assert not group.hands.took(act.Recycle)  # somebody still writes to it
    group.hands.tell(act.Finished(encode, table_of(header())))
    assert len(group.hands.took(act.Recycle)) == 1
    assert group.posts() == {}


def test_nothing_of_an_older_generation_is_repaired_after_a_commit():
    group = Group()
    group.has["h1"] = set()
    newer = generation(1, 11)
    stage(group.hands, newer)
    group.hands.ask(protect(newer))
    group.hands.end(act.Allocate)
    group.hands.end(act.Encode, table_of(header()))
    group.hands.todo.clear()
    for index in range(5):
        group.hands.ask(held(index, gen=newer))
    group.hands.ask(commit(newer))
    group.has["h1"] = {1}
    group.round(2)
    assert (group.now.generation, group.now.margin, group.posts()) == (newer, 3, {})


def test_a_home_that_has_not_heard_of_a_commit_takes_nothing_for_missing():
    group = Group()
    group.round()
    newer = generation(1, 11)
    group.has, group.committed = {name: set() for name in group.has}, newer  # they have heard
    group.round(2)
    assert (group.now.margin, group.posts()) == (None, {})
    group.hands.ask(commit(newer))
    group.round(2)
    assert group.posts() == {}
    assert group.now is None  # nothing of the newer generation is here


def test_nothing_that_a_newer_commit_has_let_go_is_held_for_a_repair():
    hands = Hands()
    hands.ask(commit(NEW))
    hands.ask(hold(2, repair=True, gen=generation(1, 9)))
    assert hands.end(act.Post).message.problem == f"{NEW} is committed"
    assert not hands.todo


def test_parity_is_not_made_again_where_saves_need_the_memory():
    need = steady_bytes(header(), local_ranks=1, holders=5)
    group = Group(memory_bytes=need + parity_region_bytes(header()) - 1)
    group.has["h1"], group.has["h4"] = set(), set()
    group.round()
    posts = group.posts()
    assert posts == {1: "h1"}
    assert "by 1 bytes (memory_bytes)" in group.now.problem
    group.hold(posts)
    group.round(2)
    assert (group.now.missing, group.posts()) == (1, {})


def test_nothing_is_dropped_for_a_repair():
    full = MemoryBudgetTooSmall("n1", need_bytes=2, have_bytes=1, what="parity")
    group = Group()
    stage(group.hands, generation(1, 11))  # somebody's slot
    group.hands.took(act.Discard)
    group.has["h4"] = set()
    group.round()
    group.hands.end(act.Allocate, error=full)
    assert not group.hands.took(act.Discard)
    group.hands.ask(hold(2, repair=True, gen=generation(1, 11)))
    group.hands.end(act.Allocate, error=full)
    assert "parity" in group.hands.end(act.Post).message.problem
    assert not group.hands.took(act.Discard)


def test_holders_keep_what_their_next_save_takes():
    group = Group(memory_bytes=1 << 20)
    group.has["h1"] = set()
    group.round()
    (post,) = [each for each in group.hands.todo if isinstance(each, act.Post)]
    reserved = parity_region_bytes(header()) + 5 * header(0).file_bytes
    assert post.message.memory_bytes == (1 << 20) - reserved


# -- restarts -------------------------------------------------------------------------------------


def test_while_a_restart_is_under_way_nothing_is_asked_or_repaired():
    group = Group()
    group.has["h1"] = set()
    group.hands.ask(Fence("test", writer_of(2), None, ()))
    group.round(3)
    assert group.asked == []
    group.hands.ask(guard(writer=2))
    group.round()
    assert group.posts() == {1: "h1"}
    with pytest.raises(Fenced):
        group.hands.tell(guard(writer=1))


def test_what_the_run_went_back_to_is_guarded_too():
    group = Group()
    older = generation(1, 5)
    group.hands.ask(Fence("test", writer_of(2), older, ()))
    group.hands.tell(
        Fetch(
            header=header(gen=older),
            writer=writer_of(2),
            sources=(),
            memory_bytes=BUDGET,
            timeout_s=60.0,
        )
    )
    group.hands.end(act.Allocate)
    group.hands.end(act.Allocate)
    group.hands.end(act.Gather, act.Gathered(table_of(header()), 0, 0, ()))
    group.hands.answers.clear()
    group.hands.ask(guard(writer=2))
    group.round()
    guarded = group.hands.core.records.get_or_create("test").guarded()
    assert [entry.header.shard.generation for entry in guarded] == [NEW, older]


def test_a_started_agent_goes_on_watching():
    old, new = Group().hands.core.records.get_or_create("test"), Hands()
    new.core.records.get_or_create("test").believe(unpack_notes(pack_notes(old.notes), "notes"))
    assert new.core.records.get_or_create("test").guard == guard()
    new.tell(act.Begun())
    (wake,) = new.took(act.Wake)
    new.tell(act.Due(wake.task))
    assert not new.todo  # there is nothing here to guard
    assert new.core.repairer.guard_status("test") is None
    new.ask(guard(spares=1))
    assert not [each for each in new.took(act.Wake) if each.task is not wake.task]


def test_a_node_in_the_place_of_another_takes_its_part():
    group = Group()
    group.round()
    group.has["h1"], group.names["h1"] = set(), "fresh"
    group.round()
    assert "node fresh is where node h1 was" in group.hands.took(act.Warn)[0].text
    posts = group.posts()
    assert posts == {1: "h1"}
    group.hold(posts)
    group.round()
    assert group.now.margin == 3


def test_an_address_that_is_now_another_members_counts_as_lost():
    group = Group(spares=2)
    group.round()
    group.names["h1"] = "h2"
    group.round(MISSES)
    assert group.now.lost == ("h1",)
    assert group.posts() == {1: "s0"}


# -- requests -------------------------------------------------------------------------------------


def test_more_holders_than_members_are_refused():
    with pytest.raises(InvalidMessage, match="6 holders of 5 members"):
        Hands().tell(guard(holders=6))
    with pytest.raises(InvalidMessage, match="5 holders of 513 members"):
        Hands().tell(guard(spares=508))


def test_a_single_node_has_nothing_to_watch():
    group = Group()
    group.hands.ask(
        Guard(
            run="test",
            writer=writer_of(1),
            members=(),
            holders=0,
            local_ranks=1,
            memory_bytes=BUDGET,
            timeout_s=60.0,
        )
    )
    group.round(2)
    assert (group.asked, group.now.margin, group.now.missing) == ([], 0, 0)


def test_presence_is_what_is_complete_and_what_is_coming():
    hands = Hands()
    hands.ask(hold(2))
    probe = Probe("test", (SHARD, header(gen=NEW, rank=1).shard))
    assert hands.core.presence(probe) == Presence("n1", None, ((), ()), ((2,), ()))
    hands.end(act.Allocate)
    hands.end(act.Pull, 0)
    assert hands.core.presence(probe) == Presence("n1", None, ((2,), ()), ((), ()))
    here = Group().hands.core.presence(probe)
    assert (here.committed, here.held) == (NEW, ((HOME,), ()))
    assert Hands().core.presence(probe).held == ((), ())
