"""What a restore proves ahead while rank 0 chooses, with old writers at work meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ecckpt.client import state_performer, threads
from ecckpt.client.effects import PingAgent, RankExchange, Routine, Start, perform, sleep
from ecckpt.client.read import home_copy as proving
from ecckpt.client.read.home_copy import ShardInMemory, prove_home
from ecckpt.client.restore.coordinator import Coordinator
from ecckpt.client.restore.protocol import Order, Wanted, as_told, way_home
from ecckpt.client.restore.restorer import Restorer
from ecckpt.client.restore.shard_source import ShardSource
from ecckpt.client.slot_mappings import Slots
from ecckpt.client.state_effects import LoadState, NotWanted, ProveHome, ReadShard
from ecckpt.errors import AgentUnreachable, CorruptFragment, Fenced, NotHeld, NotMapped
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header, fragment_bytes_for
from ecckpt.format.ids import Generation
from ecckpt.policy.placement import Node, parse_code, plan_placement
from ecckpt.policy.survival import plan_recovery
from ecckpt.protocol.messages.restore import Fetch, Fetched
from ecckpt.protocol.messages.save import Reserve, Slot
from ecckpt.protocol.verbs import ASSIGN, FETCH, INVENTORY, RESERVE, SLOT, TRACE
from ecckpt.state.load import assigning
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import SESSION, generation, header, inventory, writer_of
from tests.support.commits import cluster_of
from tests.support.performers import Performer, drive
from tests.support.stored import shard_bytes, store
from tests.support.worlds import World, same_state, states_for

GONE = AgentUnreachable("here", "gone")
State = dict[str, Any]


def _world(cluster: LocalCluster) -> World:
    """One rank, at home on n0; all other nodes, if there are any, hold a fragment."""
    return World(cluster, 1, agents=cluster.addresses())


def _stored(cluster: LocalCluster) -> State:
    """Step 1, protected and not committed."""
    (state,) = states_for(1, seed=1)
    store(cluster, [shard_bytes(state)], code=(1, 0) if len(cluster.nodes) == 1 else (3, 2))
    return state


def _restored(cluster: LocalCluster, *, assign: bool = False) -> tuple[Any, State]:
    blank = states_for(1, seed=0)
    with _world(cluster) as world:
        (found,) = world.restore(blank, assign=assign)
    assert (found.assigned_bytes > 0) == assign
    return found, blank[0]


class _Proofs:
    """Proofs of slots by ranks of this process, and what came of each."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.ended = threading.Event()

    def await_first(self) -> None:
        assert self.ended.wait(30)


def _between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> _Proofs:
    """Have something done after a proof ahead has ended, before rank 0 fences anybody off."""
    proofs, prove, order = _Proofs(), proving.prove_home, Coordinator.order

    def watched(slot: Slot, *arguments: Any, **options: Any) -> Any:
        proofs.slots.append(slot)
        try:
            return prove(slot, *arguments, **options)
        finally:
            proofs.ended.set()

    def meanwhile() -> int:
        proofs.await_first()
        act()
        return 0

    def late(coordinator: Coordinator, *arguments: Any, **options: Any) -> Routine[Any]:
        # As an effect: while it is performed, other routines of the rank go on.
        yield from perform(LoadState(meanwhile))
        return (yield from order(coordinator, *arguments, **options))

    monkeypatch.setattr(state_performer, "prove_home", watched)
    monkeypatch.setattr(assigning, "_LEAST_BYTES", 1)
    monkeypatch.setattr(Coordinator, "order", late)
    return proofs


def _proofs(cluster: LocalCluster) -> int:
    """How often a rank of n0 has proven a slot."""
    return sum(span.name == "prove" for span in cluster.client("n0").call(TRACE, "test").ranks)


def _home(cluster: LocalCluster) -> Header:
    headers = cluster.client("n0").call(INVENTORY, "test").headers
    homes = [header for header in headers if header.index == HOME]
    return max(homes, key=lambda header: header.shard.generation)


def _slot(cluster: LocalCluster) -> Slot:
    return cluster.client("n0").call(SLOT, _home(cluster).shard)


def _flip_a_bit(slot: Slot) -> None:
    with Path(slot.path).open("r+b") as file:
        file.seek(SUPERBLOCK_BYTES + 5000)
        (byte,) = file.read(1)
        file.seek(SUPERBLOCK_BYTES + 5000)
        file.write(bytes([byte ^ 1]))


def _give_up(cluster: LocalCluster, *, shard_bytes: int) -> Slot:
    """An old writer gives step 1 up and asks for the slot of a step of another size."""
    header = _home(cluster)
    wish = replace(
        header,
        shard=replace(header.shard, generation=Generation(1, 2, SESSION)),
        shard_bytes=shard_bytes,
        fragment_bytes=fragment_bytes_for(shard_bytes, header.k),
    )
    discard = (header.shard.generation,)
    return cluster.client("n0").call(
        RESERVE, Reserve(header=wish, memory_bytes=0, local_ranks=1, holders=5, discard=discard)
    )


def _fetch(cluster: LocalCluster, header: Header) -> Slot:
    """The old start brings step 1 to n0 once more."""
    nodes = [Node(node, node) for node in cluster.nodes]
    found = [cluster.client(node).call(INVENTORY, "test") for node in cluster.nodes]
    (shard,) = plan_recovery("test", found).chosen.shards  # type: ignore[union-attr]
    address = {node: cluster.client(node).node().address for node in cluster.nodes}
    placement = plan_placement(nodes, parse_code((3, 2), len(nodes)))
    way = way_home(shard, "n0", placement, address)
    assert way.header == header
    return (
        cluster.client("n0")
        .call(
            FETCH,
            Fetch(
                header=header,
                writer=writer_of(1),
                sources=as_told(way.sources),
                memory_bytes=0,
                timeout_s=30.0,
            ),
        )
        .slot
    )


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_ordered_was_proven_while_rank_0_chose(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch, assign: bool
) -> None:
    state = _stored(cluster1)
    _between(monkeypatch, lambda: None)
    found, restored = _restored(cluster1, assign=assign)
    assert (found.step, found.source, found.pulled_bytes) == (1, "home", 0)
    assert same_state(restored, state)
    assert _proofs(cluster1) == 1


@pytest.mark.parametrize("assign", [False, True])
def test_an_old_writer_that_goes_on_saving_meanwhile(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch, assign: bool
) -> None:
    """Until what was proven is gone, and the newest lies in its place."""
    states = [states_for(1, seed=step)[0] for step in range(12)]
    with _world(cluster1) as old:
        old.restore([states[0]])
        assert old.save(0, [states[0]])[0].wait(30)
        proven, steps = _slot(cluster1), iter(range(1, 12))
        saved = []

        def save_on() -> None:
            for step in steps:
                assert old.save(step, [states[step]])[0].wait(30)
                saved.append(step)
                if _slot(cluster1).region == proven.region:
                    break

        _between(monkeypatch, save_on)
        found, restored = _restored(cluster1, assign=assign)
    assert _slot(cluster1).region == proven.region
    assert (found.step, found.source) == (saved[-1], "home")
    assert same_state(restored, states[saved[-1]])
    assert _proofs(cluster1) == 2


def test_an_old_writer_that_gives_up_what_was_proven_and_writes_over_it(
    cluster6: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, proven = _stored(cluster6), _slot(cluster6)

    def write_over() -> None:
        slot = _give_up(cluster6, shard_bytes=_home(cluster6).shard_bytes)
        assert slot.region == proven.region
        Path(slot.path).write_bytes(bytes(slot.file_bytes))

    _between(monkeypatch, write_over)
    found, restored = _restored(cluster6)
    assert (found.step, found.source) == (1, "peers")
    assert same_state(restored, state)


def test_the_same_shard_brought_to_the_same_place_again_is_proven_again(
    cluster6: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, proven = _stored(cluster6), _slot(cluster6)

    def bring_again() -> None:
        header = _home(cluster6)
        _give_up(cluster6, shard_bytes=10 * header.shard_bytes)
        again = _fetch(cluster6, header)
        assert replace(again, use=proven.use) == proven
        assert again.use != proven.use
        _flip_a_bit(again)

    proofs = _between(monkeypatch, bring_again)
    found, restored = _restored(cluster6)
    assert proofs.slots[0] == proven
    assert (found.step, found.source) == (1, "peers")
    assert same_state(restored, state)


def test_an_agent_that_is_started_again_meanwhile(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _stored(cluster1)
    _between(monkeypatch, lambda: cluster1.restart("n0"))
    found, restored = _restored(cluster1, assign=True)
    assert (found.step, found.source, same_state(restored, state)) == (1, "home", True)


def test_what_has_rotted_is_reported_as_ever_and_had_from_peers(
    cluster6: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    state = _stored(cluster6)
    _flip_a_bit(_slot(cluster6))
    found, restored = _restored(cluster6)
    assert (found.step, found.source) == (1, "peers")
    assert same_state(restored, state)
    assert "home copy refused, asking peers" in caplog.text
    assert _proofs(cluster6) == 3  # ahead, when it was ordered, and what was fetched


def test_a_restore_that_ends_early_leaves_no_thread(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stored(cluster1)

    def overtaken() -> None:
        raise Fenced(timeline=2, current=3)

    proofs = _between(monkeypatch, overtaken)
    with _world(cluster1) as world:
        with pytest.raises(Fenced):
            world.restore(states_for(1, seed=0))
        assert len(proofs.slots) == 1
        assert not [each for each in threading.enumerate() if each.name == "ecckpt-task"]


def test_no_thread_to_prove_ahead_is_no_error(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _stored(cluster1)

    monkeypatch.setattr(threads, "address_space_is_limited", lambda: True)
    found, restored = _restored(cluster1)
    assert (found.source, same_state(restored, state)) == ("home", True)
    assert _proofs(cluster1) == 1


def test_another_order_ends_a_proof_at_its_next_piece(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stored(cluster1)
    agent, slot, slots = cluster1.client("n0"), _slot(cluster1), Slots()
    monkeypatch.setattr(proving, "_PIECE_BYTES", 1)

    def prove(pieces: int) -> ShardInMemory:
        wanted = iter([True] * pieces)
        return prove_home(slot, agent, slots, assign=False, wanted=lambda: next(wanted, False))

    assert prove(1000).shard.tensors
    with pytest.raises(NotWanted):
        prove(1)
    with pytest.raises(NotWanted):
        prove(0)
    _flip_a_bit(slot)
    with pytest.raises(CorruptFragment, match=r"1 of .* in fragment 0, block 1$"):
        prove(1000)
    slots.close()


# -- the routines alone ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    slot: Slot
    pulled_bytes: int = 0
    rebuilt_fragments: int = 0
    reseeded: tuple[str, ...] = ()
    own: bool = False


class Bringing(Performer):
    """A rank whose node has one home copy; ``use`` is what the agent says of its slot."""

    def __init__(self, *, assign: bool = False) -> None:
        super().__init__()
        self.source = ShardSource(cluster_of(), timeout_s=20.0, assign=assign)
        self.home = header(gen=generation(1, 5), world_size=1)
        self.use = 1
        self.proofs = 0
        self.answers[INVENTORY] = inventory("n0", [self.home], fence=4)
        self.answers[SLOT] = self.answers[ASSIGN] = lambda effect: self.slot()
        self.answers[FETCH] = lambda effect: Fetched(self.slot(), 700, 2, ())
        self.on[ProveHome] = self._prove
        self.on[ReadShard] = lambda effect: Bytes(self.slot(), 900, 3, own=True)

    def slot(self) -> Slot:
        return Slot(
            path="path",
            region="region",
            use=self.use,
            file_bytes=1 << 20,
            payload_offset=4096,
            header=self.home,
        )

    def _prove(self, effect: ProveHome) -> Bytes:
        if not effect.wanted():
            raise NotWanted
        self.proofs += 1
        return Bytes(effect.slot)

    def order(self, *, local: bool = True) -> Order:
        return Order(
            timeline=5,
            header=self.home,
            local=local,
            sources={},
            repair=(),
            margin=1,
            rejected={},
            shards=(),
            witnesses={},
        )

    def bring(self, **options: Any) -> Any:
        return self.run(self.source.bring(self.order(**options), None))

    def known(self) -> int:
        return self.run(self.source.known_timeline(Wanted()))


def test_what_was_proven_ahead_is_taken_if_the_agent_names_the_same_slot() -> None:
    rank = Bringing()
    assert rank.known() == 4
    assert rank.bring().source == "home"
    assert rank.proofs == 1
    rank = Bringing()
    rank.known()
    drive([rank], lambda: rank.proofs == 1)
    rank.use = 2
    assert rank.bring().brought.slot.use == 2
    assert rank.proofs == 2


def test_an_agent_that_did_not_answer_at_once_costs_no_proof_and_no_error() -> None:
    rank = Bringing()
    rank.answers[INVENTORY] = GONE
    assert rank.known() == 0
    assert rank.running == []
    assert rank.bring().source == "home"


@pytest.mark.parametrize("error", [GONE, CorruptFragment("bad"), ValueError("a bug")])
def test_an_error_ahead_is_met_again_when_the_shard_is_ordered(error: Exception) -> None:
    rank = Bringing()
    rank.on[ProveHome] = [error, lambda effect: Bytes(effect.slot)]
    rank.known()
    assert rank.bring().source == "home"
    assert "is not proven ahead" in rank.log()[0]


def test_an_error_of_starting_is_no_error() -> None:
    rank = Bringing()
    rank.on[Start] = OSError("no thread")
    assert rank.known() == 4
    assert rank.bring().source == "home"
    assert "is not proven ahead: no thread" in rank.log()[0]


def test_a_proof_that_is_not_wanted_any_more_ends_and_is_waited_for() -> None:
    rank, may_go_on = Bringing(), []
    rank.gates[ProveHome] = lambda effect: bool(may_go_on)
    rank.known()
    ending = rank.begin(rank.source.end())
    assert not ending.ended
    may_go_on.append(True)
    drive([rank], lambda: ending.ended)
    assert (rank.proofs, rank.running, ending.error) == (0, [], None)


def test_a_home_copy_that_is_bad_comes_from_peers_through_the_agent() -> None:
    rank = Bringing()
    rank.on[ProveHome] = [CorruptFragment("bad"), lambda effect: Bytes(effect.slot)]
    delivery = rank.bring()
    assert (delivery.source, delivery.pulled_bytes, delivery.rebuilt_fragments) == ("peers", 700, 2)
    assert "home copy refused, asking peers: bad" in rank.log()[0]


def test_one_that_is_on_disk_only_is_fetched_without_a_word() -> None:
    rank = Bringing()
    rank.answers[SLOT] = NotHeld("on disk only")
    assert rank.bring().source == "peers"
    assert rank.log() == []


def test_no_room_for_a_mapping_is_no_reason_to_ask_peers() -> None:
    rank = Bringing()
    rank.on[ProveHome] = NotMapped("a slot", need_bytes=2, limit_bytes=1)
    with pytest.raises(NotMapped):
        rank.bring()
    assert rank.calls(FETCH) == []


def test_to_assign_it_the_agent_is_told_that_it_is_kept() -> None:
    rank = Bringing(assign=True)
    assert rank.bring().source == "home"
    assert (len(rank.calls(ASSIGN)), len(rank.calls(SLOT))) == (1, 0)
    assert rank.bring(local=False).source == "peers"
    assert len(rank.calls(ASSIGN)) == 2


def test_without_its_agent_a_rank_reads_from_the_others_in_what_time_is_left() -> None:
    rank = Bringing()
    rank.answers[FETCH] = rank.answers[SLOT] = GONE
    delivery = rank.bring()
    assert (delivery.source, delivery.pulled_bytes) == ("peers", 900)
    assert [each for each in rank.log() if "restores without its node's agent" in each]
    rank.gates[PingAgent] = lambda effect: False
    began_s = rank.now_s
    assert rank.bring().pulled_bytes == 900
    (read,) = [each for each in rank.done if isinstance(each, ReadShard)][1:]
    assert read.patience_s == 5.0
    assert read.timeout_s == pytest.approx(0.8 * 20 - (rank.now_s - began_s))


@pytest.mark.parametrize("error", [Fenced(timeline=1, current=2), KeyboardInterrupt()])
def test_a_restore_that_ends_early_waits_for_its_proof(error: BaseException) -> None:
    rank = Bringing()
    restorer = Restorer(cluster_of(), number=1, after=0, timeout_s=20.0)
    rank.on[RankExchange] = error
    rank.gates[ProveHome] = lambda effect: rank.now_s > 1003
    rank.begin(sleep(5.0))
    with pytest.raises(type(error)):
        rank.run(restorer.run(None, Wanted(), required=False))
    assert (rank.proofs, rank.running) == (0, [])
