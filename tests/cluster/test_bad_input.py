"""What bad input gets: a named error that says what, where and what to do, within a deadline."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ecckpt
from ecckpt import errors
from ecckpt.client.cluster.local_agent import await_agent, local_client, start
from ecckpt.client.cluster.rendezvous import StoreMeeting
from ecckpt.client.config import NodeConfig
from ecckpt.client.effects import Routine
from ecckpt.client.restore.coordinator import Coordinator
from ecckpt.format.fragment_file import FORMAT_VERSION, HOME, SUPERBLOCK_BYTES, parse_superblock
from ecckpt.format.ids import RunWriter
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.encoding import PROTOCOL_VERSION, pack_message
from ecckpt.protocol.messages.node import NodeInfo
from ecckpt.protocol.messages.restore import Begin, Fetch
from ecckpt.protocol.verbs import BEGIN, FETCH, INVENTORY
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.runs import run_status
from tests.support.worlds import World, instead_of, same_state, states_for


def _regions(cluster: LocalCluster, node: str, *, home: bool) -> list[Path]:
    """Region files of a node that hold a home copy, or a fragment."""
    found = []
    for path in sorted((cluster.root(node) / "regions").iterdir()):
        with path.open("rb") as file:
            header = parse_superblock(file.read(SUPERBLOCK_BYTES), path.name)
        if header is not None and (header.index == HOME) == home:
            found.append(path)
    return found


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _saved(cluster: LocalCluster, *, step: int, seed: int) -> list[dict[str, Any]]:
    states = states_for(6, seed=seed)
    with World(cluster, code=(3, 2)) as world:
        world.restore(states_for(6, seed=0))
        assert all(handle.wait(30) for handle in world.save(step, states))
    return states


# -- codes and nodes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("8:2", errors.InvalidCode, "not understood"),
        ("gold", errors.InvalidCode, "not understood"),
        ((200, 57), errors.InvalidCode, "k \\+ m <= 256"),
        ((0, 2), errors.InvalidCode, "k=0"),
        ((3, 2), errors.TooFewNodes, "needs 6 nodes .* there are 1"),
    ],
)
def test_codes_that_cannot_be(
    cluster1: LocalCluster, code: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        World(cluster1, code=code)


def test_two_agents_with_one_node_id(tmp_path: Path) -> None:
    with LocalCluster(nodes=2) as cluster:
        twin = NodeConfig(
            root=cluster.root("n0").parent / "twin",
            node="n0",
            domain="twin",
            listen="127.0.0.1:0",
            token_file=None,
        )
        process = start(twin)
        try:
            other = await_agent(local_client(twin.root), twin.root / "agent.log")
            with pytest.raises(errors.DuplicateNode, match="n0"):
                World(cluster, agents=[other.address])
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_ranks_that_are_configured_differently(cluster6: LocalCluster) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    caught: list[Exception] = []

    def build(rank: int) -> None:
        try:
            ecckpt.Checkpointer(
                "test",
                code=(3, 2) if rank else (2, 2),
                root=cluster6.root(f"n{rank}"),
                store=store,
                rank=rank,
                world_size=6,
            )
        except errors.InvalidConfig as error:
            caught.append(error)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caught) == 6
    assert "rank 1 is configured differently" in str(caught[0])


# -- agents that are not what they should be ------------------------------------------------------


@pytest.fixture
def impostor() -> Iterator[Callable[[bytes], str]]:
    """A server that gives the same answer to everybody, or none at all."""
    listener = socket.create_server(("127.0.0.1", 0))
    answers: list[bytes] = []
    connections: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            if answers[0]:
                connection.recv(65536)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answers[0])}\r\n\r\n"
                connection.sendall(head.encode() + answers[0])

    thread = threading.Thread(target=serve)

    def begin(answer: bytes) -> str:
        answers.append(answer)
        thread.start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield begin
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    ("protocol", "form", "words"),
    [(99, FORMAT_VERSION, "protocol.*version 99"), (PROTOCOL_VERSION, 7, "version 7")],
)
def test_an_agent_of_another_version(
    cluster1: LocalCluster,
    impostor: Callable[[bytes], str],
    protocol: int,
    form: int,
    words: str,
) -> None:
    info = NodeInfo(
        node="old",
        instance="0" * 16,
        domain="old",
        address="127.0.0.1:1",
        root="/x",
        protocol_version=protocol,
        format_version=form,
        pid=1,
    )
    address = impostor(pack_message(info))
    with pytest.raises(errors.VersionMismatch, match=words):
        World(cluster1, agents=[address])


def test_something_that_is_no_agent(
    cluster1: LocalCluster, impostor: Callable[[bytes], str]
) -> None:
    with pytest.raises(errors.InvalidMessage):
        World(cluster1, agents=[impostor(b"<html>It works!</html>")])


@pytest.mark.long
def test_an_agent_that_hangs_is_missing_and_named_after_its_deadline(
    cluster1: LocalCluster,
    impostor: Callable[[bytes], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = impostor(b"")
    with World(cluster1, agents=[address, "127.0.0.1:9"]) as world:
        assert set(world.checkpointers[0]._cluster.missing) == {address, "127.0.0.1:9"}
    lines = " ".join(record.message for record in caplog.records)
    assert re.search(rf"starts without a node.*{address}.*within 10 s", lines)


def test_a_fragment_of_another_format_version_is_left_alone_and_named(
    cluster1: LocalCluster,
) -> None:
    (state,) = states_for(1, seed=1)
    with World(cluster1) as world:
        world.restore([state])
        assert world.save(1, [state])[0].wait(30)
    (path,) = _regions(cluster1, "n0", home=True)
    with path.open("r+b") as file:
        file.seek(8)
        file.write((FORMAT_VERSION + 1).to_bytes(4, "little"))
    cluster1.restart("n0")
    assert path.exists()
    (why,) = cluster1.client("n0").call(INVENTORY, "test").rejected.values()
    assert "format version 2, this ecckpt knows 1" in why
    # Something was there: this is no first start, and nobody trains from scratch by accident.
    with World(cluster1) as world, pytest.raises(errors.NothingToRestore, match="version 2"):
        world.restore([state])


def test_a_folder_that_others_can_reach_into(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(errors.AgentUnreachable, match=r"not private.*mode 755.*chmod 700"):
        ecckpt.Checkpointer("test", root=tmp_path)
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    with pytest.raises(errors.AgentUnreachable, match="not private"):
        ecckpt.Checkpointer("test", root=link)


# -- damaged bytes --------------------------------------------------------------------------------


def test_a_damaged_home_copy_is_replaced_by_its_peers(cluster6: LocalCluster) -> None:
    states = _saved(cluster6, step=1, seed=1)
    (path,) = _regions(cluster6, "n2", home=True)
    _flip(path, SUPERBLOCK_BYTES + 1000)
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        found = world.restore(blank)
    assert [each.source for each in found] == ["home", "home", "peers", "home", "home", "home"]
    assert all(map(same_state, blank, states))


def test_damaged_fragments_are_erasures(cluster6: LocalCluster) -> None:
    states = _saved(cluster6, step=1, seed=2)
    cluster6.kill("n0")
    cluster6.replace("n0")
    for node in ("n1", "n2"):  # of rank 0's five fragments, two
        _damage(cluster6, node, step=1, rank=0)
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        found = world.restore(blank)
    assert found[0].source == "peers"
    assert all(map(same_state, blank, states))


def test_a_generation_that_cannot_be_proven_is_refused_by_all_for_an_older_one(
    cluster6: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_protected = threading.Barrier(6)

    def given_up(meeting: StoreMeeting, key: str, amount: int) -> int:
        if key.startswith("count/") and amount:
            all_protected.wait(30)
            raise RuntimeError("given up")
        return add(meeting, key, amount)

    older, newer = states_for(6, seed=3), states_for(6, seed=4)
    with World(cluster6, code=(3, 2)) as world:
        world.restore(older)
        assert all(handle.wait(30) for handle in world.save(1, older))
        # All shards of step 2 get protected, but it is given up: step 1 has to stay.
        add = StoreMeeting.add
        monkeypatch.setattr(StoreMeeting, "add", given_up)
        handles = world.save(2, newer)
        for handle in handles:
            with pytest.raises(errors.SaveFailed, match="the ranks' store: given up"):
                handle.wait(30)
            assert handle.protected
        monkeypatch.undo()
    for node in cluster6.nodes:
        _damage(cluster6, node, step=2, rank=2)
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        found = world.restore(blank)
    assert {each.step for each in found} == {1}
    (why,) = found[5].rejected.values()
    assert "rank 2" in why
    assert "good fragments, 3 needed" in why
    assert all(map(same_state, blank, older))


def _damage(cluster: LocalCluster, node: str, *, step: int, rank: int) -> None:
    """Flip a bit in the first block of every piece that a node has of a shard."""
    for path in sorted((cluster.root(node) / "regions").iterdir()):
        with path.open("rb") as file:
            header = parse_superblock(file.read(SUPERBLOCK_BYTES), path.name)
        if header is None or header.shard.generation.step != step or header.shard.rank != rank:
            continue
        fragments = header.k if header.index == HOME else 1
        for index in range(fragments):
            _flip(path, SUPERBLOCK_BYTES + index * header.fragment_bytes + 77)


def test_a_restart_that_was_overtaken_hears_of_it(
    cluster1: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = states_for(1, seed=1)
    with World(cluster1) as world:
        world.restore(state)
        assert all(handle.wait(30) for handle in world.save(1, state))
    judge = Coordinator.judge

    def overtaken(coordinator: Coordinator, *arguments: Any) -> Routine[bool]:
        cluster1.client("n0").call(
            BEGIN, Begin(coordinator._cluster.run, RunWriter(9, "f" * 16), 0.0)
        )
        return (yield from judge(coordinator, *arguments))

    monkeypatch.setattr(Coordinator, "judge", overtaken)
    # Who goes back by name tells the agents before anything is loaded.
    with World(cluster1) as world, pytest.raises(errors.Fenced, match="timeline 9 has started"):
        world.restore(state, step=1)


def test_a_restart_goes_above_what_its_own_agent_did_not_know(
    cluster6: LocalCluster,
) -> None:
    run = f"test~{'0' * 16}"
    cluster6.client("n4").call(BEGIN, Begin(run, RunWriter(9, "f" * 16), 0.0))
    with World(cluster6, code=(3, 2), run=run) as world:
        world.restore(states_for(6, seed=1))
        assert {each.timeline for each in world.checkpointers} == {10}
    fences = {cluster6.client(node).call(INVENTORY, "test").fence for node in cluster6.nodes}
    assert fences == {10}


def test_two_sessions_never_have_the_same_timeline(cluster1: LocalCluster) -> None:
    client = cluster1.client("n0")
    assert client.call(BEGIN, Begin("test", RunWriter(3, "a" * 16), 0.0)).fence == 3
    assert client.call(BEGIN, Begin("test", RunWriter(3, "a" * 16), 0.0)).fence == 3  # asked again
    with pytest.raises(errors.Fenced):
        client.call(BEGIN, Begin("test", RunWriter(3, "b" * 16), 0.0))
    with pytest.raises(errors.InvalidMessage):
        client.call(BEGIN, Begin("test", RunWriter(4, "../../etc"), 0.0))
    cluster1.restart("n0")
    with pytest.raises(errors.Fenced):
        cluster1.client("n0").call(BEGIN, Begin("test", RunWriter(3, "b" * 16), 0.0))


def test_no_room_for_a_shard_is_no_reason_to_go_back(
    cluster6: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = _saved(cluster6, step=1, seed=8)
    cluster6.kill("n0")
    cluster6.replace("n0")

    def full(client: AgentClient, message: Fetch, real: Callable[[], Any]) -> Any:
        raise errors.TmpfsFull("/dev/shm", need_bytes=2, free_bytes=1)

    instead_of(monkeypatch, FETCH, full)
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        with pytest.raises(errors.NoRoomToRestore, match=r"rank 0: .*/dev/shm"):
            world.restore(blank)
        monkeypatch.undo()
        assert world.restore(blank)[0].source == "peers"
    assert all(map(same_state, blank, states))


def test_truncated_files_are_named_and_the_rest_is_adopted(cluster6: LocalCluster) -> None:
    states = _saved(cluster6, step=1, seed=5)
    (home,) = _regions(cluster6, "n4", home=True)
    os.truncate(home, home.stat().st_size // 2)
    fragment = _regions(cluster6, "n4", home=False)[0]
    os.truncate(fragment, SUPERBLOCK_BYTES + 100)
    cluster6.restart("n4")
    assert len(cluster6.client("n4").call(INVENTORY, "test").rejected) == 2
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        found = world.restore(blank)
    assert found[4].source == "peers"
    assert all(map(same_state, blank, states))


# -- peers that stop ------------------------------------------------------------------------------


def test_a_holder_that_hangs_costs_margin_not_the_save(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=6)
    with World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        group = cluster6.pid("n5")
        os.killpg(group, signal.SIGSTOP)
        try:
            handle = world.checkpointers[0].save(1, states[0])
            deadline_s = time.monotonic() + 20
            while not handle.protected and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert handle.protected
            assert handle.held == 4
        finally:
            os.killpg(group, signal.SIGCONT)
        rest = [world.checkpointers[rank].save(1, states[rank]) for rank in range(1, 6)]
        assert all(each.wait(30) for each in [handle, *rest])


@pytest.mark.long
def test_a_peer_that_hangs_during_a_restore(cluster6: LocalCluster) -> None:
    states = _saved(cluster6, step=1, seed=7)
    cluster6.kill("n0")
    cluster6.replace("n0")
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2), restore_timeout_s=8.0) as world:
        group = cluster6.pid("n3")
        # Rank 3 has its home there: it does without its own agent.
        os.killpg(group, signal.SIGSTOP)
        try:
            found = world.restore(blank)
            assert {each.step for each in found} == {1}
            assert [each.source for each in found] == [
                "peers",
                *["home", "home", "peers", "home", "home"],
            ]
            assert all(map(same_state, blank, states))
        finally:
            os.killpg(group, signal.SIGCONT)
        found = world.restore(blank)
        assert {each.step for each in found} == {1}
    assert all(map(same_state, blank, states))


def test_an_agent_killed_during_training_is_back_for_the_next_save(
    cluster6: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    states = states_for(6, seed=8)
    with caplog.at_level(logging.CRITICAL), World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(1, states))
        cluster6.restart("n2")  # SIGKILL; the memory stays, and is adopted
        assert all(handle.wait(30) for handle in world.save(2, states))
        assert run_status(cluster6.client("n2"))["fragments"] == 5


def test_an_agent_that_is_gone_is_started_again_as_the_node_it_was(
    cluster6: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    states = states_for(6, seed=9)
    with caplog.at_level(logging.CRITICAL), World(cluster6, code=(3, 2)) as world:
        world.restore(states)
        assert all(handle.wait(30) for handle in world.save(1, states))
        before = cluster6.client("n2").node()
        world.await_slots()  # a rank that is asking for one starts the agent at once
        os.killpg(cluster6.pid("n2"), signal.SIGKILL)
        cluster6.wait("n2")
        handles = world.save(2, states)
        for handle in handles:
            with pytest.raises(errors.EcckptError):
                handle.wait(30)
        # The library starts it; nobody else does. Until then saves fail, at once.
        after = await_agent(cluster6.client("n2"), cluster6.root("n2") / "agent.log")
        assert all(handle.wait(30) for handle in world.save(3, states))
        assert (after.node, after.address, after.instance) == (
            before.node,
            before.address,
            before.instance,
        )


# -- memory ---------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_is_refused_at_the_first_save(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=9, elements=1_000_000)
    with World(cluster1, memory_bytes=5_000_000) as world:
        world.restore([state])
        with pytest.raises(errors.MemoryBudgetTooSmall, match="5,000,000") as caught:
            world.save(1, [state])
    assert caught.value.have_bytes == 5_000_000
    assert caught.value.need_bytes > 8_000_000


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_tmpfs_that_is_too_small(tmp_path: Path) -> None:
    """Reserved, not touched: no SIGBUS, a named error with both figures, older data untouched."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=True)
    try:
        with LocalCluster(nodes=1, folder=mount / "cluster") as cluster:
            (state,) = states_for(1, seed=10, elements=1_000_000)
            with World(cluster, memory_bytes=1 << 40) as world:
                world.restore([state])
                assert world.save(1, [state])[0].wait(30)
                state["more"] = torch.zeros(8_000_000)
                (handle,) = world.save(2, [state])
                assert isinstance(handle.error, errors.TmpfsFull)
                assert handle.error.free_bytes < handle.error.need_bytes
                del state["more"]
                assert world.save(3, [state])[0].wait(30)
            with World(cluster) as world:
                assert world.restore([state])[0].step == 3
    finally:
        # Lazily: a mapping that waits for the garbage collector keeps it busy.
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


# -- state ----------------------------------------------------------------------------------------


def test_a_state_that_cannot_be_stored_is_raised_at_the_first_save(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=11)
    state["progress"]["socket"] = object()
    with World(cluster1) as world:
        world.restore(states_for(1, seed=11))
        with pytest.raises(errors.UnsupportedState, match=r"progress.*socket.*object"):
            world.save(1, [state])


def test_and_reported_at_a_later_one_without_losing_the_older_generation(
    cluster1: LocalCluster,
) -> None:
    (state,) = states_for(1, seed=12)
    with World(cluster1) as world:
        world.restore([state])
        assert world.save(1, [state])[0].wait(30)
        state["progress"]["socket"] = object()
        (handle,) = world.save(2, [state])
        assert isinstance(handle.error, errors.UnsupportedState)
        with pytest.raises(errors.UnsupportedState):
            handle.wait(1)
    del state["progress"]["socket"]
    with World(cluster1) as world:
        assert world.restore([state])[0].step == 1


def test_strict_raises_what_is_otherwise_reported(cluster1: LocalCluster) -> None:
    (state,) = states_for(1, seed=13)
    with World(cluster1, strict=True) as world:
        world.restore([state])
        assert world.save(1, [state])[0].wait(30)
        state["progress"]["socket"] = object()
        with pytest.raises(errors.UnsupportedState):
            world.save(2, [state])
        world.checkpointers[0]._strict = False  # so that closing does not raise it again


# -- writers that were replaced -------------------------------------------------------------------


def test_a_writer_of_an_older_timeline_is_fenced_off(cluster6: LocalCluster) -> None:
    states = states_for(6, seed=14)
    with World(cluster6, code=(3, 2)) as zombie:
        zombie.restore(states)
        assert all(handle.wait(30) for handle in zombie.save(1, states))
        with World(cluster6, code=(3, 2)) as world:
            world.restore(states)
            handles = zombie.save(2, states_for(6, seed=15))
            assert all(isinstance(each.error, errors.Fenced) for each in handles)
            assert all(handle.wait(30) for handle in world.save(2, states))
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        assert {each.generation.timeline for each in world.restore(blank)} == {2}
    assert all(map(same_state, blank, states))
