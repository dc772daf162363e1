"""What a restore proves ahead while rank 0 chooses, with old writers at work meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecckpt.client.read.home_copy import ProofAhead, Prover
from ecckpt.client.restore import home_copy as proving
from ecckpt.client.restore import shard_source as bringing
from ecckpt.client.restore.coordinator import Leader
from ecckpt.client.restore.protocol import as_told, way_home
from ecckpt.client.slot_mappings import Slots
from ecckpt.errors import CorruptFragment, Fenced
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES, Header, fragment_bytes_for
from ecckpt.format.ids import Generation
from ecckpt.policy.placement import Node, parse_code, plan_placement
from ecckpt.policy.survival import plan_recovery
from ecckpt.protocol.messages.restore import Fetch
from ecckpt.protocol.messages.save import Reserve, Slot
from ecckpt.protocol.tracing import Tracer
from ecckpt.protocol.verbs import FETCH, INVENTORY, RESERVE, SLOT, TRACE
from ecckpt.state.load import assigning
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import SESSION
from tests.support.stored import shard_bytes, store
from tests.support.worlds import World, same_state, states_for

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


def _between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[ProofAhead]:
    """Have something done after a proof ahead has ended, before rank 0 fences anybody off."""
    begun: list[ProofAhead] = []

    class Watched(ProofAhead):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            begun.append(self)

    order = Leader.order

    def late(leader: Leader, *arguments: Any, **options: Any) -> Any:
        wait([begun[-1]._proof], 30)
        act()
        return order(leader, *arguments, **options)

    monkeypatch.setattr(bringing, "ProofAhead", Watched)
    monkeypatch.setattr(assigning, "_LEAST_BYTES", 1)
    monkeypatch.setattr(Leader, "order", late)
    return begun


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
                writer=1,
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

    (begun,) = [_between(monkeypatch, bring_again)]
    found, restored = _restored(cluster6)
    assert begun[0]._proof.result()[0] == proven
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

    begun = _between(monkeypatch, overtaken)
    with _world(cluster1) as world, pytest.raises(Fenced):
        world.restore(states_for(1, seed=0))
    assert len(begun) == 1
    assert not [each for each in threading.enumerate() if each.name.startswith("ecckpt-prove")]


def test_no_thread_to_prove_ahead_is_no_error(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _stored(cluster1)

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(bringing, "ProofAhead", no_thread)
    found, restored = _restored(cluster1)
    assert (found.source, same_state(restored, state)) == ("home", True)


def test_another_order_ends_a_proof_at_its_next_piece(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stored(cluster1)
    agent, slot, slots = cluster1.client("n0"), _slot(cluster1), Slots()
    monkeypatch.setattr(proving, "_PIECE_BYTES", 1)
    prover = Prover(slots, Tracer())
    unwanted = threading.Event()
    assert len(prover.prove(slot, agent, unwanted=unwanted)) == slot.header.payload_bytes
    unwanted.set()
    with pytest.raises(proving._Unwanted):
        prover.prove(slot, agent, unwanted=unwanted)
    _flip_a_bit(slot)
    with pytest.raises(CorruptFragment, match=r"1 of .* in fragment 0, block 1$"):
        prover.prove(slot, agent)
    slots.close()
