"""The number of a new timeline, and which agents are asked for it, question by question."""

from __future__ import annotations

import pytest

from ecckpt.client import deadlines
from ecckpt.client.effects import CallAgents
from ecckpt.client.events import GenerationRefused, RestoreDecided, RestorePlanned, TimelineBegun
from ecckpt.client.restore.coordinator import Coordinator
from ecckpt.client.restore.protocol import Outcome, Wanted
from ecckpt.errors import AgentUnreachable, Fenced, NodeCutOff, OlderStart, TooFewAgents, revive
from ecckpt.format.fragment_file import HOME
from ecckpt.format.ids import RunWriter
from ecckpt.policy.rollbacks import RollBack
from ecckpt.policy.survival import UNREAD_DISK
from ecckpt.protocol.messages.restore import Begin
from ecckpt.protocol.verbs import BEGIN, FENCE, INVENTORY
from tests.support.builders import SESSION, generation, header, inventory
from tests.support.commits import cluster_of
from tests.support.performers import Performer

NODES = ["n0", "n1", "n2", "n3", "n4", "n5"]
OK = Outcome("ok", "")


class Lead(Performer):
    """Rank 0 and its coordinator. ``fences`` are what agents have seen, ``held`` what they have."""

    def __init__(self, *, ranks: int = 1, fences: dict[str, int] | None = None, **fields) -> None:
        super().__init__()
        self.fences = dict.fromkeys(NODES, 0) | (fences or {})
        self.held: dict[str, list] = {}
        self.silent: set[str] = set()
        self.read_at_s: dict[str, float] = {}  # when an agent has read its disk
        cluster = cluster_of(0, ranks, nodes=NODES, code=(3, 2), **fields)
        self.coordinator = Coordinator(cluster, patience_s=7.0, disks_s=20.0)
        self.answers[BEGIN] = self._begin
        self.answers[INVENTORY] = self._inventory
        self.answers[FENCE] = self._fence

    def order(self, *, known=(0,), wanted=None, alike=False):
        wanted = wanted or Wanted()
        return self.run(self.coordinator.order(wanted, known=known, alike=alike))

    def judge(self, gen, *outcomes, wanted=None):
        return self.run(self.coordinator.judge(gen, outcomes, wanted or Wanted()))

    def asked(self, verb):
        return [each for each in self.done if isinstance(each, CallAgents) and each.verb is verb]

    def timelines(self):
        return [each.message.writer.timeline for each in self.asked(BEGIN)]

    def _begin(self, effect):
        node, timeline = effect.node, effect.message.writer.timeline
        self._answer_or_not(node)
        if 0 < timeline < self.fences[node]:
            raise Fenced(timeline=timeline, current=self.fences[node])
        if timeline > self.fences[node]:
            self.fences[node] = timeline
        if self.now_s < self.read_at_s.get(node, 0.0):
            return inventory(node, fence=timeline, rejected={UNREAD_DISK: "still being read"})
        return inventory(node, self.held.get(node, []), fence=timeline)

    def _inventory(self, effect):
        self._answer_or_not(effect.node)
        return inventory(
            effect.node, self.held.get(effect.node, []), fence=self.fences[effect.node]
        )

    def _fence(self, effect):
        self._answer_or_not(effect.node)
        if self.fences[effect.node] > effect.message.writer.timeline:
            raise Fenced(timeline=effect.message.writer.timeline, current=self.fences[effect.node])

    def _answer_or_not(self, node):
        if node in self.silent:
            raise AgentUnreachable(node, "no answer")

    def hold(self, step=10, *, nodes=("n0",), timeline=1, **fields):
        gen = generation(timeline, step)
        for node in nodes:
            self.held.setdefault(node, []).append(
                header(HOME, gen=gen, world_size=1, home=node, **fields)
            )
        return gen


# -- the number -----------------------------------------------------------------------------------


def test_it_is_above_all_that_anybody_knows():
    lead = Lead(fences={"n0": 7})
    (order,) = lead.order(known=[4, 0, 7])
    assert (order.timeline, order.header) == (8, None)
    assert lead.timelines() == [8]
    (asked,) = lead.asked(BEGIN)
    assert asked.message == Begin("test", RunWriter(8, SESSION), 0.0)
    assert (list(asked.nodes), asked.patience_s) == (NODES, 7.0)
    assert lead.asked(INVENTORY) == []


def test_a_new_run_begins_at_one():
    lead = Lead()
    assert lead.order()[0].timeline == 1
    assert lead.timelines() == [1]


def test_a_refusal_that_does_not_tell_the_fence_is_tried_above_the_last_number():
    lead = Lead(fences={"n3": 3})
    lead.answers[BEGIN] = lambda effect: (
        revive("Fenced", "newer", {})
        if effect.node == "n3" and effect.message.writer.timeline < 3
        else inventory(effect.node, fence=effect.message.writer.timeline)
    )
    assert lead.order(known=[1])[0].timeline == 3
    assert lead.timelines() == [2, 3]


def test_whoever_has_seen_a_newer_one_is_believed():
    lead = Lead(fences={"n3": 5, "n5": 9, "n4": 9})
    assert lead.order(known=[1])[0].timeline == 10
    assert lead.timelines() == [2, 10]


def test_it_ends_where_others_are_faster():
    lead = Lead()
    begin = lead.answers[BEGIN]

    def faster(effect):
        lead.fences["n2"] = effect.message.writer.timeline + 1
        return begin(effect)

    lead.answers[BEGIN] = faster
    with pytest.raises(Fenced, match="timeline 16 has started"):
        lead.order(known=[0])
    assert len(lead.timelines()) == 8


def test_where_the_homes_are_new_a_few_others_far_apart_are_asked_first():
    lead = Lead(fences={"n1": 4, "n2": 4, "n3": 4, "n4": 4, "n5": 4})
    assert lead.order(known=[0])[0].timeline == 5
    assert lead.timelines() == [5]
    (few,) = lead.asked(INVENTORY)
    assert (list(few.nodes), few.patience_s) == (["n1", "n2", "n3"], deadlines.KNOWN_TIMELINE_S)


def test_nobody_of_those_asked_first_answers():
    lead = Lead(fences={"n4": 4, "n5": 4})
    lead.silent = {"n1", "n2", "n3"}
    assert lead.order(known=[0])[0].timeline == 5
    assert lead.timelines() == [1, 5]


# -- what is chosen, refused and told -------------------------------------------------------------


def test_agents_that_are_silent_are_named_and_asked_once_more_if_something_may_be_theirs():
    lead = Lead(fences={"n0": 1})
    lead.silent = {"n4"}
    gen = lead.hold()
    (order,) = lead.order(known=[1])
    assert (order.header.shard.generation, order.local) == (gen, True)
    assert len(lead.asked(BEGIN)) == 1
    assert "node n4: agent n4: no answer" in lead.log()
    # A newer one that counts as lost may be at the silent node.
    other = Lead(fences={"n0": 1})
    other.silent = {"n4"}
    other.held["n1"] = [header(0, gen=other.hold(12, nodes=()), world_size=1)]
    other.hold()
    assert other.order(known=[1])[0].header.shard.generation == gen
    assert [list(each.nodes) for each in other.asked(BEGIN)] == [NODES, NODES]
    assert len(other.order(known=[1])) == 1
    assert [len(each.nodes) for each in other.asked(BEGIN)] == [6, 6, 5]


def test_with_nothing_left_the_silent_nodes_are_named():
    lead = Lead(fences={"n0": 1})
    lead.silent = {"n4"}
    lead.held["n1"] = [header(0, world_size=1)]
    (order,) = lead.order(known=[1])
    assert order.header is None
    assert order.rejected["node n4"] == "agent n4: no answer"
    assert len(order.rejected) == 2


def test_a_generation_that_fails_twice_is_refused_and_the_older_one_taken():
    lead = Lead(fences={"n0": 1})
    older, newer = lead.hold(10), lead.hold(11)
    for times in (1, 2):
        (order,) = lead.order(known=[1])
        assert order.header.shard.generation == newer
        assert lead.judge(newer, OK, Outcome("bad", "rank 1: damaged")) is False
        refused = [each for each in lead.events if isinstance(each, GenerationRefused)]
        assert len(refused) == times - 1
    (order,) = lead.order(known=[1])
    assert order.header.shard.generation == older
    assert order.rejected == {str(newer): "rank 1: damaged"}
    assert lead.judge(older, OK) is True
    assert [each.is_first for each in lead.events if isinstance(each, RestorePlanned)] == [
        True,
        True,
        False,
    ]
    assert lead.log() == [
        f"generation {newer} is tried again: rank 1: damaged",
        f"generation {newer} is refused: rank 1: damaged",
    ]


def test_a_rank_on_another_node_gathers_what_a_rank_could_not():
    lead = Lead(ranks=3, fences={"n0": 1})
    gen = generation(1, 11)
    for rank, node in enumerate(NODES[:3]):
        lead.held[node] = [header(HOME, rank=rank, gen=gen, world_size=3, home=node)]
    lead.order(known=[1])
    bad = Outcome("bad", "rank 1: no bytes came", lacks=1)
    assert lead.judge(gen, OK, bad, OK) is False
    orders = lead.order(known=[1])
    ((witness, sources),) = [pair for order in orders for pair in order.witnesses.items()]
    assert (witness, sources.header.shard.rank, sources.homes) == (2, 1, ("n1",))
    with pytest.raises(NodeCutOff, match="node n1 cannot gather rank 1"):
        lead.judge(gen, OK, bad, Outcome("ok", "", witnessed=1))


def test_where_dtensors_are_cut_anew_the_same_generation_is_ordered_whole():
    lead = Lead(fences={"n0": 1})
    gen = lead.hold()
    assert lead.order(known=[1])[0].shards == ()
    assert lead.judge(gen, Outcome("relaid", "")) is False
    (order,) = lead.order(known=[1])
    assert (order.header.shard.generation, len(order.shards)) == (gen, 1)
    assert lead.judge(gen, OK)


def test_a_start_that_begins_late_asks_first_whether_it_may():
    lead = Lead(fences={"n0": 3, "n2": 6})
    lead.clock.now_s += 30.0
    assert lead.order(known=[3])[0].timeline == 7
    assert lead.timelines() == [0, 7]
    late = Lead(fences={"n2": 6})
    late.clock.now_s += 30.0
    late.answers[BEGIN] = lambda effect: revive("OlderStart", "a younger one", {"current": 6})
    with pytest.raises(OlderStart, match="a younger one"):
        late.order(known=[3])
    assert late.timelines() == [0]  # no agent has heard of a timeline of it


def test_a_start_that_may_not_go_on_fences_nobody():
    gone = {f"10.0.0.{at}:1": "refused" for at in range(8)}
    few = Lead(missing=gone)
    with pytest.raises(TooFewAgents, match="agents answered, a start needs"):
        few.order(known=[3])
    assert few.timelines() == []
    late = Lead(missing=dict(list(gone.items())[:2]))
    late.clock.now_s += 30.0
    late.silent |= set(NODES[1:])
    with pytest.raises(TooFewAgents):
        late.order(known=[3])
    assert set(late.timelines()) == {0}


def test_agents_are_told_once_and_behind_the_restore():
    lead = Lead(fences={"n0": 1})
    gen = lead.hold()
    lead.order(known=[1])
    assert lead.judge(gen, OK)
    assert lead.asked(FENCE) == []
    assert lead.events[-2:] == [RestoreDecided(2, gen, False), TimelineBegun(2, gen, False)]
    for _ in range(2):
        lead.run(lead.coordinator.tell())
    (told,) = lead.asked(FENCE)
    assert (told.message.writer, told.message.restored) == (RunWriter(2, SESSION), gen)


def test_a_roll_back_by_name_is_told_before_anything_is_loaded():
    lead = Lead(fences={"n0": 1})
    old = lead.hold(10)
    lead.hold(11)
    wanted = Wanted(step=10)
    (order,) = lead.order(known=[1], wanted=wanted)
    assert order.header.shard.generation == old
    assert lead.judge(old, OK, wanted=wanted)
    (told,) = lead.asked(FENCE)
    assert told.message.roll_backs == (RollBack(2, old),)
    assert lead.coordinator.roll_backs == (RollBack(2, old),)
    lead.run(lead.coordinator.tell())
    assert len(lead.asked(FENCE)) == 1


@pytest.mark.parametrize("when", ["looks", "tells"])
def test_a_newer_start_ends_this_one(when):
    lead = Lead(fences={"n0": 1})
    gen = lead.hold()
    lead.order(known=[1])
    lead.fences["n3"] = 9
    if when == "looks":
        lead.judge(gen, Outcome("bad", "late"))
        with pytest.raises(Fenced, match="timeline 9 has started"):
            lead.order(known=[1])
        return
    assert lead.judge(gen, OK)
    with pytest.raises(Fenced, match="timeline 9 has started"):
        lead.run(lead.coordinator.tell())


# -- disks that are still being read --------------------------------------------------------------


def test_an_agent_that_still_reads_its_disk_is_waited_for():
    lead, gen = Lead(), generation(1, 10)
    lead.hold(10, nodes=("n3",))
    lead.read_at_s = {"n3": lead.now_s + 5.0}
    (order,) = lead.order()
    assert order.header.shard.generation == gen
    assert lead.now_s == pytest.approx(lead.read_at_s["n3"], abs=1.0)
    (line,) = lead.log()
    assert line == "waiting up to 20 s for disks that are being read: n3"
    planned = [each for each in lead.events if isinstance(each, RestorePlanned)]
    assert planned[0].answering == tuple(NODES)


def test_a_disk_that_takes_too_long_is_named_and_proves_nothing():
    lead = Lead()
    lead.hold(10, nodes=("n0",))
    lead.held["n3"] = [header(2, gen=generation(1, 20), world_size=1, home="n9", k=3, m=2)]
    lead.read_at_s = {"n4": lead.now_s + 60.0}
    began_s = lead.now_s
    (order,) = lead.order()
    assert lead.now_s - began_s == pytest.approx(20.0)
    assert order.header.shard.generation == generation(1, 10)
    assert order.rejected["node n4"] == "it still reads its disk"
    planned = [each for each in lead.events if isinstance(each, RestorePlanned)]
    assert "n4" not in planned[0].answering
    lead.order()  # the time for disks is used up
    assert lead.now_s - began_s == pytest.approx(20.0)


def test_nothing_is_begun_from_scratch_while_a_disk_is_unread():
    lead = Lead()
    lead.read_at_s = {"n4": lead.now_s + 60.0}
    (order,) = lead.order()
    assert order.header is None
    assert "node n4" in order.rejected


def test_an_agent_whose_memory_tells_what_its_disk_has_is_not_waited_for():
    lead = Lead()
    gen = lead.hold(10, nodes=("n0",))
    began_s = lead.now_s
    lead.answers[BEGIN] = lambda effect: inventory(
        effect.node,
        lead.held.get("n0", []) if effect.node == "n0" else [],
        fence=effect.message.writer.timeline,
        rejected={UNREAD_DISK: "still being read"} if effect.node == "n0" else {},
    )
    assert lead.order()[0].header.shard.generation == gen
    assert lead.now_s == began_s
