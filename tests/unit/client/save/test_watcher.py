"""Saves on their way: all ranks commit or none does, whoever fails, is late or dies."""

import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist
from ecckpt.client.save.commit_notice import Teller
from ecckpt.client.save.watcher import Following, Watcher

from ecckpt.client.cluster.rendezvous import Alone, StoreMeeting
from ecckpt.client.handles import SaveHandle
from ecckpt.client.save import watcher as saving
from ecckpt.errors import AgentUnreachable, Fenced, SaveFailed, SaveTimedOut
from ecckpt.format.ids import ShardId
from ecckpt.protocol.messages.save import Progress
from tests.support.builders import SESSION, generation

GEN = generation()


@dataclass(eq=False)
class Agent:
    """An agent as a watcher sees it, in this process."""

    timeout_s: float = 10.0
    refuse: Exception | None = None
    shared: dict = field(default_factory=dict)
    committed: set = field(default_factory=set)
    news: threading.Condition = field(default_factory=threading.Condition)
    address: str = "in this process"
    waited_s: list = field(default_factory=list)

    def move(self, state, *problems):
        with self.news:
            self.shared.update(state=state, problems=problems)
            self.news.notify_all()

    def progress(self):
        state, problems = self.shared.get("state", "encoding"), self.shared.get("problems", ())
        return Progress(state, 5, problems, 0.5, 0.75)

    def watch(self, message):
        with self.news:
            known = message.known_state
            self.news.wait_for(lambda: self.progress().state != known, message.wait_s)
            return self.progress()

    def commit(self, run, gen):
        self.waited_s.append(self.timeout_s)
        if self.refuse:
            raise self.refuse
        with self.news:
            self.committed.add(gen)
            self.news.notify_all()


class World:
    """A save of a few ranks, each with its watcher, agent and handle."""

    def __init__(self, ranks, *, timeout_s=10.0, present=None, counted=True, idle=()):
        self.store = dist.HashStore()
        self.meetings = [StoreMeeting(self.store, rank, ranks, SESSION) for rank in range(ranks)]
        self.agents = [Agent() for _ in range(ranks)]
        self.handles = [SaveHandle(GEN, GEN.step) for _ in range(ranks)]
        self.watchers = {
            rank: Watcher(self.meetings[rank], self.agents[rank], idle[rank::ranks])
            for rank in (range(ranks) if present is None else present)
        }
        self.timeout_s, self.counted = timeout_s, counted

    def follow(self, rank, *, timeout_s=None, start=lambda: None):
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        shard = ShardId("test", GEN, rank)
        following = Following(self.handles[rank], shard, deadline_s, start, self.counted)
        self.watchers[rank].follow(following)
        return self.handles[rank]

    def abandon(self, rank):
        handle, deadline_s = self.handles[rank], time.monotonic() + self.timeout_s
        handle.finish(SaveFailed("no snapshot"))
        self.watchers[rank].abandon(handle, ShardId("test", GEN, rank), deadline_s)

    def follow_all(self):
        return [self.follow(rank) for rank in self.watchers]

    def count(self):
        return self.meetings[0].add(f"count/{GEN}", 0)

    def await_count(self, value):
        deadline_s = time.monotonic() + 10
        while self.count() != value:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def committed(self):
        return [GEN in agent.committed for agent in self.agents]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for watcher in self.watchers.values():
            assert watcher.close(30)


@pytest.fixture(autouse=True)
def _quick_and_quiet(caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    for name in ("_WATCH_S", "_SLICE_S", "_GRACE_S"):
        monkeypatch.setattr(saving, name, 0.05)


def outcome(handle):
    """The error with which a save ended; None where it was committed."""
    assert handle.wait_done(10)
    return type(handle.error) if handle.error else None


# -- one save -------------------------------------------------------------------------------------


def test_protected_everywhere_is_committed_everywhere():
    with World(3) as world:
        handles = world.follow_all()
        for agent in world.agents[:2]:
            agent.move("protected")
        world.await_count(2)
        assert not any(handle.committed for handle in handles)
        assert world.committed() == [False] * 3
        world.agents[2].move("protected")
        assert all(handle.wait(10) for handle in handles)
        assert world.committed() == [True] * 3
        assert all(handle.protected and handle.done for handle in handles)
        assert (handles[0].held, handles[0].encode_s, handles[0].protected_s) == (5, 0.5, 0.75)


def test_one_rank_that_fails_fails_all_and_commits_nothing():
    with World(3) as world:
        handles = world.follow_all()
        for agent in world.agents[:2]:
            agent.move("protected")
        world.agents[2].move("failed", "fragment 1 at n4: no room")
        assert [outcome(handle) for handle in handles] == [SaveFailed] * 3
        assert "fragment 1 at n4: no room" in str(handles[2].error)
        assert "another rank could not protect its shard" in str(handles[0].error)
        assert world.committed() == [False] * 3
        with pytest.raises(SaveFailed, match="rank 0"):
            handles[0].wait(1)


def test_an_agent_that_forgot_the_shard_fails_the_save():
    with World(1) as world:
        handle = world.follow(0)
        world.agents[0].move("unknown")
        assert outcome(handle) is SaveFailed
        assert "the agent was restarted meanwhile" in str(handle.error)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (AgentUnreachable("here", "gone"), AgentUnreachable),
        (Fenced(timeline=1, current=2), Fenced),
        (KeyError("a bug"), SaveFailed),
    ],
)
def test_a_save_that_cannot_start_fails_all(raised, kind):
    def start():
        raise raised

    with World(2) as world:
        first, second = world.follow(0, start=start), world.follow(1)
        world.agents[1].move("protected")
        assert outcome(first) is kind
        assert outcome(second) is SaveFailed
        assert world.committed() == [False, False]


def test_an_abandoned_shard_fails_the_others():
    with World(2) as world:
        handle = world.follow(0)
        world.abandon(1)
        world.agents[0].move("protected")
        assert outcome(handle) is SaveFailed


def test_a_save_that_does_not_count_is_done_when_protected():
    with World(2, counted=False) as world:
        handle = world.follow(0)
        world.agents[0].move("protected")
        assert outcome(handle) is None
        assert world.count() == 0
        assert world.committed() == [False, False]


def test_a_single_process_commits_by_itself():
    agent = Agent()
    watcher = Watcher(Alone(), agent, [agent])
    handle = SaveHandle(GEN, GEN.step)
    shard = ShardId("test", GEN, 0)
    watcher.follow(Following(handle, shard, time.monotonic() + 10, lambda: None, True))
    agent.move("protected")
    assert outcome(handle) is None
    assert agent.committed == {GEN}
    assert watcher.close(30)


# -- ranks and agents that die --------------------------------------------------------------------


def test_whoever_completes_the_count_may_die_before_waking_the_others():
    with World(3, present=[0, 1]) as world:
        handles = world.follow_all()
        for agent in world.agents[:2]:
            agent.move("protected")
        world.await_count(2)
        world.meetings[2].add(f"count/{GEN}", 1)  # and that was the last of rank 2
        assert [outcome(handle) for handle in handles] == [None, None]
        assert world.committed() == [True, True, False]


def test_agents_without_ranks_are_told_in_equal_shares():
    idle = [Agent(address=f"idle {at}") for at in range(5)]
    with World(2, idle=idle) as world:
        handles = world.follow_all()
        for agent in world.agents:
            agent.move("protected")
        assert [outcome(handle) for handle in handles] == [None, None]
        assert all(handle.wait_left(10) for handle in handles)
        assert [len(agent.waited_s) for agent in (*world.agents, *idle)] == [1] * 7


def test_an_idle_agent_that_cannot_be_told_stops_nobody_and_is_given_a_moment_the_next_time():
    silent, other = Agent(refuse=AgentUnreachable("n9", "gone")), Agent(address="other")
    teller, shard = Teller([silent, other]), ShardId("test", GEN, 0)
    teller.tell(shard)
    teller.tell(shard)
    assert (silent.waited_s, silent.committed) == ([2.0, 0.1], set())
    silent.refuse = None
    teller.tell(shard)
    teller.tell(shard)
    assert silent.waited_s == [2.0, 0.1, 0.1, 2.0]
    assert other.waited_s == [2.0] * 4
    assert silent.committed == other.committed == {GEN}


def test_an_agent_that_was_away_is_told_before_the_next_save_may_begin():
    with World(2) as world:
        handles = world.follow_all()
        world.agents[0].refuse = AgentUnreachable("here", "gone")
        for agent in world.agents:
            agent.move("protected")
        assert [outcome(handle) for handle in handles] == [None, None]
        assert not any(handle.wait_left(0.3) for handle in handles)
        world.agents[0].refuse = None
        assert all(handle.wait_left(10) for handle in handles)
        assert world.committed() == [True, True]


def test_a_completed_count_stays_complete_whatever_the_completer_meets():
    with World(3) as world:
        for agent in world.agents:
            agent.refuse = AgentUnreachable("here", "gone")
        handles = world.follow_all()
        for agent in world.agents:
            agent.move("protected")
        assert [outcome(handle) for handle in handles] == [None] * 3
        assert world.count() == 3


def test_ranks_that_are_late_together_do_not_undo_a_complete_count():
    with World(4, present=[0, 1, 2], timeout_s=0.4) as world:
        for agent in world.agents:
            agent.refuse = AgentUnreachable("here", "gone")
            agent.move("protected")
        handles = world.follow_all()
        world.await_count(3)
        world.meetings[3].add(f"count/{GEN}", 1)
        assert [outcome(handle) for handle in handles] == [None] * 3


# -- deadlines ------------------------------------------------------------------------------------


def test_a_late_save_times_out_and_can_no_longer_be_committed():
    with World(2) as world:
        late = world.follow(0, timeout_s=0.1)
        assert outcome(late) is SaveTimedOut
        assert "still encoding at its deadline" in str(late.error)
        other = world.follow(1)
        for agent in world.agents:
            agent.move("protected")
        assert outcome(other) is SaveFailed
        assert world.count() < 0
        assert world.committed() == [False, False]


def test_a_protected_rank_whose_peers_are_late_takes_its_part_back():
    with World(2) as world:
        world.agents[0].move("protected")
        early = world.follow(0, timeout_s=0.2)
        assert outcome(early) is SaveTimedOut
        assert "still protected at its deadline" in str(early.error)
        world.agents[1].move("protected")
        assert outcome(world.follow(1)) is SaveFailed
        assert world.committed() == [False, False]


@pytest.mark.parametrize("seed", range(40))
def test_a_generation_is_committed_or_given_up_never_both(seed):
    chance = random.Random(seed)
    with World(4) as world, ThreadPoolExecutor(4) as pool:
        moment = threading.Barrier(4)

        def live(rank, protect_s, timeout_s):
            moment.wait(10)
            world.follow(rank, timeout_s=timeout_s)
            time.sleep(protect_s)
            world.agents[rank].move("protected")

        deal = [(rank, chance.uniform(0, 4e-3), chance.uniform(1e-3, 8e-3)) for rank in range(4)]
        list(pool.map(lambda each: live(*each), deal))
        outcomes = {outcome(handle) for handle in world.handles}
        assert outcomes == {None} or None not in outcomes
        assert (world.count() == 4) == (outcomes == {None})
        if None not in outcomes:
            assert not any(world.committed())


# -- handle and thread ----------------------------------------------------------------------------


def test_a_handle_tells_how_far_it_is():
    handle = SaveHandle(GEN, 10)
    assert repr(handle) == "<SaveHandle step 10: staging>"
    assert not any((handle.staged, handle.protected, handle.committed, handle.done))
    assert handle.wait(0.01) is False
    handle.mark_staged()
    assert (handle.staged, repr(handle)) == (True, "<SaveHandle step 10: staged>")
    handle.finish(SaveFailed("no room"))
    assert (handle.done, handle.committed) == (True, False)
    assert repr(handle) == "<SaveHandle step 10: failed: no room>"
    with pytest.raises(SaveFailed, match="no room"):
        handle.wait()


def test_work_that_raises_does_not_end_the_watcher():
    done = threading.Event()
    watcher = Watcher(Alone(), Agent(), [])
    watcher.call(lambda: 1 / 0)
    watcher.call(done.set)
    assert done.wait(10)
    assert watcher.close(30)


def test_closing_a_watcher_finishes_what_is_queued():
    done = []
    watcher = Watcher(Alone(), Agent(), [])
    for at in range(5):
        watcher.call(lambda at=at: done.append(at))
    assert watcher.close(30)
    assert done == [0, 1, 2, 3, 4]
