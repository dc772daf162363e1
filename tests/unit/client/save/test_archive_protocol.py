"""Rank 0 stores generations on the nodes' disks, gives some up, and delays no save by it."""

import logging
from dataclasses import dataclass, field

from ecckpt.client import deadlines
from ecckpt.client.effects import CallAgent, Compute, Until
from ecckpt.client.save.archive_protocol import Archivist, Disks
from ecckpt.errors import AgentUnreachable, Fenced
from ecckpt.format.fragment_file import HOME
from ecckpt.policy.on_disk import OnDisk
from ecckpt.policy.retention import Keep
from ecckpt.policy.rollbacks import RollBack
from ecckpt.protocol.messages.disk import Piece, Store, Stored
from ecckpt.protocol.verbs import RETAIN, STORE
from tests.support.builders import generation, writer_of
from tests.support.commits import cluster_of
from tests.support.performers import Performer, drive

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


class Client(Performer):
    """Rank 0, whose agents are ``peers``."""

    def __init__(self, peers, disks, *, stored=(), seen=None, roll_backs=(), timeline=3):
        super().__init__()
        self.peers, self.archivist = peers, Archivist(cluster_of(nodes=tuple(peers)), disks)
        self.answers[STORE] = lambda effect: peers[effect.node].store(effect.message)
        self.answers[RETAIN] = lambda effect: peers[effect.node].retain(effect.message)
        there = OnDisk(stored, stored if seen is None else seen)
        self.archivist.begin_timeline(timeline, there, roll_backs)
        self.began_s = self.now_s
        self.running_archive = self.begin(self.archivist.run())

    def commit(self, gen):
        self.archivist.note_commit(gen)

    def settle(self):
        """Until everything that is due has been done."""

        def is_idle():
            effect = self.running_archive.effect
            return isinstance(effect, Until) and not effect.condition() and effect.timeout_s > 1e9

        drive([self], is_idle)

    def close(self, timeout_s=10.0):
        self.archivist.deadline_s = self.now_s + timeout_s
        drive([self], lambda: self.running_archive.ended)
        assert self.archivist.is_done
        self.running_archive.result()

    def warnings(self):
        return [each.text for each in self.events if each.level >= logging.WARNING]


def run(peers, *gens, every=1, keep=None, least=3, ranks=2, **options):
    """Commit these generations, waiting for each; returns the client, closed."""
    client = Client(
        peers,
        Disks(every=every, keep=keep or Keep(), budget_bytes=7, ranks=ranks, least=least),
        **options,
    )
    for gen in gens:
        client.commit(gen)
        client.settle()
    client.close()
    return client


def told(peers):
    """What every agent was told is on disk, the same for all."""
    (generations,) = {tuple(each.generations for each in peer.retained) for peer in peers.values()}
    return list(generations)


def test_when_every_shard_is_on_enough_disks_all_are_told():
    peers = whole()
    run(peers, GEN)
    assert told(peers) == [(GEN,)]
    assert {each.retained[0].writer for each in peers.values()} == {writer_of(3)}
    assert {each.asked[0] for each in peers.values()} == {Store("test", GEN, 7, ())}


def test_the_fragments_of_all_ranks_are_counted_outside_the_clients_lock():
    client = run(whole(), GEN)
    assert any(isinstance(each, Compute) for each in client.done)


def test_a_shard_that_lacks_one_fragment_is_not_stored_and_is_discarded_later():
    peers = whole()
    peers["n1"].pieces = ((0, 1),)
    peers["n1"].problems = ("no room for rank 1",)
    client = run(peers, GEN, generation(1, 11))
    assert told(peers) == []
    assert "rank 1 is not on enough disks: n1: no room for rank 1" in " ".join(client.warnings())
    assert peers["n0"].asked[-1].discard == (GEN,)


def test_home_copies_count_where_there_are_no_holders():
    peers = {"n0": Agent(((0, HOME),))}
    run(peers, GEN, ranks=1, least=0)
    assert told(peers) == [(GEN,)]


def test_a_disk_that_is_stuck_is_not_waited_for_when_the_others_suffice():
    peers = whole(indices=(0, 1, 2, 3))
    peers["n3"].stuck = True
    client = run(peers, GEN)
    assert told(peers) == [(GEN,)]
    assert "stored with less than all: n3: not finished" in " ".join(client.warnings())


def test_a_disk_that_is_stuck_and_needed_is_given_up():
    peers = whole()
    peers["n2"].stuck = True
    client = run(peers, GEN)
    assert told(peers) == []
    assert "n2: not finished" in " ".join(client.warnings())


def test_an_agent_that_does_not_answer_is_not_asked_for_ever():
    peers = whole(indices=(0, 1, 2, 3))
    peers["n3"].refuse = AgentUnreachable("n3:1", "silent")
    client = run(peers, GEN)
    assert len(peers["n3"].asked) == 3
    assert told(peers) == [(GEN,)]
    assert "n3: agent n3:1: silent" in " ".join(client.warnings())


def test_a_replaced_run_stops():
    peers = whole()
    peers["n0"].refuse = Fenced(timeline=1, current=2)
    client = run(peers, GEN)
    assert told(peers) == []
    assert "fenced off" in " ".join(client.warnings())


def test_without_any_disk_nobody_is_asked_twice():
    peers = whole()
    for peer in peers.values():
        peer.disk, peer.pieces = False, ()
    client = run(peers, GEN, generation(1, 11))
    assert [len(peer.asked) for peer in peers.values()] == [1, 1, 1]
    assert " ".join(client.log()).count("no agent has a disk") == 1


def test_without_any_disk_an_agent_that_is_silent_is_no_news():
    peers = whole()
    for peer in peers.values():
        peer.disk, peer.pieces = False, ()
    peers["n1"].refuse = AgentUnreachable("n1:1", "silent")
    client = run(peers, GEN, generation(1, 11))
    assert client.warnings() == []
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


def test_saves_are_passed_over_while_the_disks_are_busy_and_the_newest_is_next():
    client = Client(
        whole(), Disks(every=1, keep=Keep(), budget_bytes=7, ranks=2, least=3), timeline=1
    )
    busy = [True]
    client.gates[STORE] = lambda effect: not busy
    gens = [generation(1, step) for step in (1, 2, 3, 4)]
    client.commit(gens[0])
    drive([client], lambda: client.running_archive.effect.__class__ is CallAgent)
    for gen in gens[1:]:
        client.commit(gen)
    busy.clear()
    client.close()
    assert told(client.peers) == [(gens[0],), (gens[3],)]
    assert "2 generations were not stored" in client.log()[0]


def test_closing_waits_no_longer_than_it_is_told():
    client = Client(
        whole(), Disks(every=1, keep=Keep(), budget_bytes=7, ranks=2, least=3), timeline=1
    )
    client.peers["n1"].stuck = True
    client.commit(GEN)
    began_s = client.now_s
    client.close(0.01)
    assert told(client.peers) == []
    assert client.now_s - began_s < 3 * deadlines.ROUND_CLOSING_S


def test_agents_are_asked_more_often_once_the_client_closes():
    def rounds(*, closing):
        client = Client(whole(), Disks(every=1, keep=Keep(), budget_bytes=7, ranks=2, least=3))
        client.peers["n1"].stuck = True
        client.commit(GEN)
        drive([client], lambda: client.now_s > client.began_s + 20)
        if closing:
            client.archivist.deadline_s = client.now_s + 100
        before = len(client.peers["n1"].asked)
        drive([client], lambda: client.now_s > client.began_s + 30)
        return len(client.peers["n1"].asked) - before

    assert rounds(closing=False) <= 11
    assert rounds(closing=True) > 100


def test_a_disk_that_is_needed_is_given_up_when_nothing_new_came_for_so_long():
    peers = whole()
    peers["n2"].stuck = True
    client = Client(peers, Disks(every=1, keep=Keep(), budget_bytes=7, ranks=2, least=3))
    client.commit(GEN)
    client.settle()
    took_s = client.now_s - client.began_s
    assert deadlines.DISK_PATIENCE_S < took_s < deadlines.DISK_PATIENCE_S + 3
    client.close()


def test_a_bug_in_storing_one_generation_costs_no_other():
    peers = whole()
    peers["n0"].refuse = KeyError("a bug")
    client = Client(peers, Disks(every=1, keep=Keep(), budget_bytes=7, ranks=2, least=3))
    client.commit(GEN)
    client.settle()
    peers["n0"].refuse = None
    client.commit(generation(1, 11))
    client.settle()
    client.close()
    assert told(peers) == [(generation(1, 11),)]
    assert "is not stored: 'a bug'" in client.log()[0]


def test_an_agent_that_cannot_be_told_what_is_stored_is_named():
    peers = whole()
    client = Client(peers, Disks(every=1, keep=Keep(), budget_bytes=7, ranks=2, least=3))
    gone = AgentUnreachable("n1:1", "silent")
    client.answers[RETAIN] = lambda effect: gone if effect.node == "n1" else None
    client.commit(GEN)
    client.settle()
    client.close()
    assert client.log() == ["could not tell n1 what is stored: agent n1:1: silent"]


def test_one_that_never_began_is_done():
    archivist = Archivist(
        cluster_of(nodes=("n0",)), Disks(every=1, keep=Keep(), budget_bytes=7, ranks=2, least=3)
    )
    assert archivist.is_done
    assert not archivist.is_begun
