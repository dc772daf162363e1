"""Rank 0 and the disks: what is stored, what is given up, and that nobody waits for it."""

import logging
import threading
import time
from dataclasses import dataclass, field

import pytest
from ecckpt.client.save.archive_thread import Storer

from ecckpt.client.save import archive_protocol as archiving
from ecckpt.client.save import archive_thread as storing
from ecckpt.client.save.archive_protocol import Disks
from ecckpt.errors import AgentUnreachable, Fenced
from ecckpt.format.fragment_file import HOME
from ecckpt.policy.retention import Keep
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import OnDisk
from ecckpt.protocol.messages.disk import Piece, Store, Stored
from tests.support.builders import generation

GEN = generation()


@dataclass(eq=False)
class Agent:
    """An agent as the storer sees it. ``pieces`` come one at a time, with each question."""

    pieces: tuple = ()
    disk: bool = True
    stuck: bool = False
    problems: tuple = ()
    refuse: Exception | None = None
    timeout_s: float = 2.0
    asked: list = field(default_factory=list)
    retained: list = field(default_factory=list)

    def store(self, message):
        self.asked.append(message)
        if self.refuse is not None:
            raise self.refuse
        count = sum(each.generation == message.generation for each in self.asked)
        there = () if self.stuck else tuple(Piece(*each) for each in self.pieces[:count])
        left = len(self.pieces) - len(there)
        return Stored(self.disk, there, left * 100, self.problems)

    def retain(self, message):
        self.retained.append(message)


def whole(ranks=2, indices=(0, 1, 2)):
    """Three agents, each with one fragment of each rank."""
    return {f"n{at}": Agent(tuple((rank, at) for rank in range(ranks))) for at in indices}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(storing, "replace", lambda peer, **_: peer)
    monkeypatch.setattr(archiving, "_ROUND_LEAST_S", 0.001)
    monkeypatch.setattr(archiving, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(archiving, "_GRACE_LEAST_S", 0.05)


def run(peers, *gens, every=1, keep=None, stored=(), seen=None, roll_backs=(), least=3, ranks=2):
    """Commit these generations, waiting for each; returns the storer, closed."""
    storer = Watched("test", peers, Disks(every, keep or Keep(), 7, ranks, least))
    storer.begin(3, OnDisk(stored, stored if seen is None else seen), roll_backs)
    for gen in gens:
        storer.committed(gen)
        _idle(storer)
    storer.close(10)
    return storer


class Watched(Storer):
    """Knows whether its thread waits for something to do."""

    free = False

    def _next(self):
        with self._changed:
            self.free = True
            generation = super()._next()
            self.free = generation is None
            return generation

    def is_idle(self):
        with self._changed:
            return self._thread is None or (self.free and self._archivist.due is None)


def _idle(storer):
    """Wait until it has done what it was given."""
    deadline_s = time.monotonic() + 10
    while not storer.is_idle():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def told(peers):
    """What every agent was told is on disk, the same for all."""
    (generations,) = {tuple(each.generations for each in peer.retained) for peer in peers.values()}
    return list(generations)


def test_when_every_shard_is_on_enough_disks_all_are_told():
    peers = whole()
    run(peers, GEN)
    assert told(peers) == [(GEN,)]
    assert {each.retained[0].writer for each in peers.values()} == {3}
    assert {each.asked[0] for each in peers.values()} == {Store("test", GEN, 7, ())}


def test_a_shard_that_lacks_one_fragment_is_not_stored_and_is_discarded_later(caplog):
    peers = whole()
    peers["n1"].pieces = ((0, 1),)
    peers["n1"].problems = ("no room for rank 1",)
    run(peers, GEN, generation(1, 11))
    assert told(peers) == []
    assert "rank 1 is not on enough disks: n1: no room for rank 1" in caplog.text
    assert peers["n0"].asked[-1].discard == (GEN,)


def test_home_copies_count_where_there_are_no_holders():
    peers = {"n0": Agent(((0, HOME),))}
    run(peers, GEN, ranks=1, least=0)
    assert told(peers) == [(GEN,)]


def test_a_disk_that_is_stuck_is_not_waited_for_when_the_others_suffice(caplog):
    peers = whole(indices=(0, 1, 2, 3))
    peers["n3"].stuck = True
    run(peers, GEN)
    assert told(peers) == [(GEN,)]
    assert "stored with less than all: n3: not finished" in caplog.text


def test_a_disk_that_is_stuck_and_needed_is_given_up(caplog):
    peers = whole()
    peers["n2"].stuck = True
    run(peers, GEN)
    assert told(peers) == []
    assert "n2: not finished" in caplog.text


def test_an_agent_that_does_not_answer_is_not_asked_for_ever(caplog):
    peers = whole(indices=(0, 1, 2, 3))
    peers["n3"].refuse = AgentUnreachable("n3:1", "silent")
    run(peers, GEN)
    assert len(peers["n3"].asked) == 3
    assert told(peers) == [(GEN,)]
    assert "n3: agent n3:1: silent" in caplog.text


def test_a_replaced_run_stops(caplog):
    peers = whole()
    peers["n0"].refuse = Fenced(timeline=1, current=2)
    run(peers, GEN)
    assert told(peers) == []
    assert "fenced off" in caplog.text


def test_without_any_disk_nobody_is_asked_twice(caplog):
    caplog.set_level(logging.INFO)
    peers = whole()
    for peer in peers.values():
        peer.disk, peer.pieces = False, ()
    run(peers, GEN, generation(1, 11))
    assert [len(peer.asked) for peer in peers.values()] == [1, 1, 1]
    assert caplog.text.count("no agent has a disk") == 1


def test_without_any_disk_an_agent_that_is_silent_is_no_news(caplog):
    peers = whole()
    for peer in peers.values():
        peer.disk, peer.pieces = False, ()
    peers["n1"].refuse = AgentUnreachable("n1:1", "silent")
    run(peers, GEN, generation(1, 11))
    assert caplog.text == ""
    assert len(peers["n0"].asked) == 2


def test_every_nth_save_and_the_first():
    peers = whole()
    gens = [generation(1, step) for step in range(1, 8)]
    run(peers, *gens, every=3)
    assert told(peers) == [(gens[0],), (gens[3],), (gens[6],)]
    peers = whole()
    run(peers, *gens, every=0)
    assert [peer.asked for peer in peers.values()] == [[], [], []]


def test_what_is_kept_and_what_was_there_before():
    peers = whole()
    before = generation(1, 5), generation(1, 300), generation(1, 5000)
    gens = [generation(3, step) for step in (301, 302)]
    run(peers, *gens, keep=Keep(2), stored=before, roll_backs=(RollBack(3, before[1]),))
    assert told(peers) == [before, (before[1], gens[0]), tuple(gens)]


def test_what_cannot_be_had_now_neither_takes_a_place_nor_is_dropped():
    peers = whole()
    lasting, good, lost = (generation(1, step) for step in (100, 101, 102))
    gens = [generation(3, step) for step in (103, 104)]
    run(peers, *gens, keep=Keep(2, 100), stored=(lasting, good, lost), seen=(good,))
    assert told(peers) == [
        (lasting, good, lost),
        (lasting, good, lost, gens[0]),
        (lasting, *gens),
    ]


def test_saves_are_passed_over_while_the_disks_are_busy_and_the_newest_is_next(caplog):
    peers = whole()
    going, first = threading.Event(), threading.Event()
    real = Agent.store

    def hold_up(message):
        first.set()
        assert going.wait(10)
        return real(peers["n0"], message)

    peers["n0"].store = hold_up
    storer = Storer("test", peers, Disks(1, Keep(), 7, 2, 3))
    storer.begin(1, OnDisk(), ())
    gens = [generation(1, step) for step in (1, 2, 3, 4)]
    storer.committed(gens[0])
    assert first.wait(10)
    for gen in gens[1:]:
        storer.committed(gen)  # returns at once
    going.set()
    storer.close(10)
    assert told(peers) == [(gens[0],), (gens[3],)]
    assert "2 generations were not stored" in caplog.text


def test_closing_waits_no_longer_than_it_is_told():
    peers = whole()
    peers["n1"].stuck = True
    storer = Storer("test", peers, Disks(1, Keep(), 7, 2, 3))
    storer.begin(1, OnDisk(), ())
    storer.committed(GEN)
    storer.close(0.01)
    assert told(peers) == []
    assert not storer._thread.is_alive()
