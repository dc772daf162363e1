"""Memory that is full, files that may not grow, and what dead runs and neighbours have left."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecckpt.errors import NoRoomToRestore
from ecckpt.format.fragment_file import (
    BLOCK_BYTES,
    HOME,
    SUPERBLOCK_BYTES,
    Header,
    fragment_bytes_for,
    parse_superblock,
)
from ecckpt.format.ids import Generation, ShardId
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.messages.save import Reserve, Stage
from ecckpt.protocol.verbs import RESERVE, SLOT, STAGE
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import SESSION
from tests.support.runs import run_status
from tests.support.stored import store
from tests.support.worlds import World, instead_of, same_state, states_for

ELEMENTS = 300_000  # 1.2 MB a rank
ROOM_BYTES = 16 << 30


@pytest.fixture
def small() -> Iterator[LocalCluster]:
    """Six agents, the last with 24 MiB of memory."""
    folder = Path(f"/dev/shm/ecckpt-small-{os.getpid()}")
    (folder / "n5").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "none", str(folder / "n5")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        shutil.rmtree(folder)
        pytest.skip("no right to mount a tmpfs")
    try:
        with LocalCluster(nodes=6, folder=folder) as cluster:
            yield cluster
    finally:
        subprocess.run(["umount", "--lazy", str(folder / "n5")], check=True)
        shutil.rmtree(folder)


def _save_fails_alike(
    cluster: LocalCluster, limit: Callable[[], Any], lift: Callable[[], Any], words: str
) -> None:
    """A save under the limit fails on all ranks, costs nothing, and the one after it does not."""
    with World(cluster, code=(3, 2)) as world:
        world.restore(states_for(6, seed=0))
        older = states_for(6, seed=1, elements=1000)
        assert all(handle.wait(30) for handle in world.save(1, older))
        limit()
        handles = world.save(2, states_for(6, seed=2, elements=ELEMENTS))
        assert all(handle.wait_done(40) for handle in handles)
        assert not any(handle.committed for handle in handles)
        assert words in " ".join(str(handle.error) for handle in handles)
    blank = states_for(6, seed=0, elements=1000)
    with World(cluster, code=(3, 2)) as world:
        found = world.restore(blank)
        assert {each.step for each in found} == {1}
        assert all(map(same_state, blank, older))
        lift()
        newer = states_for(6, seed=3, elements=ELEMENTS)
        assert all(handle.wait(30) for handle in world.save(3, newer))
    with World(cluster, code=(3, 2)) as world:
        blank = states_for(6, seed=0, elements=ELEMENTS)
        assert {each.step for each in world.restore(blank)} == {3}
        assert all(map(same_state, blank, newer))


def test_a_tmpfs_that_somebody_else_has_filled(small: LocalCluster) -> None:
    alien = small.root("n5") / "somebody else's"

    def fill() -> None:
        with alien.open("wb") as file:
            size = os.statvfs(alien)
            os.posix_fallocate(file.fileno(), 0, size.f_bavail * size.f_frsize - (256 << 10))

    _save_fails_alike(small, fill, alien.unlink, "tmpfs")


def test_files_that_may_not_grow(cluster6: LocalCluster) -> None:
    pid = cluster6.client("n4").node().pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 19, hard))

    def lift() -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    _save_fails_alike(cluster6, limit, lift, "File too large")


def _files(cluster: LocalCluster, run: str) -> dict[Path, tuple[str, int]]:
    """Digest and time of the last change of every file of a run."""
    found = {}
    for node in cluster.nodes:
        for path in (cluster.root(node) / "regions").iterdir():
            content = path.read_bytes()
            header = parse_superblock(content[:SUPERBLOCK_BYTES], path.name)
            if header is not None and header.shard.run == run:
                found[path] = hashlib.sha256(content).hexdigest(), path.stat().st_mtime_ns
    return found


def test_an_agent_that_may_map_no_more_memory(cluster6: LocalCluster) -> None:
    # What is there stays there: no thread dies of it, and it is the same process that goes on.
    pid = cluster6.client("n5").node().pid
    free = resource.prlimit(pid, resource.RLIMIT_AS)
    _save_fails_alike(
        cluster6,
        lambda: resource.prlimit(pid, resource.RLIMIT_AS, (_mapped_bytes(pid), free[1])),
        lambda: resource.prlimit(pid, resource.RLIMIT_AS, free),
        "the system does not map",
    )
    assert cluster6.client("n5").node().pid == pid


@pytest.mark.parametrize("before", ["slot", "table"])
def test_a_rank_that_may_map_no_more_memory(
    cluster6: LocalCluster, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    # An older generation was taken instead, which needs as much.
    options: dict[str, Any] = {"ranks": 1, "code": (3, 2), "restore_timeout_s": 8.0}
    states = states_for(1, seed=4, elements=ELEMENTS)
    with World(cluster6, agents=cluster6.addresses(), **options) as world:
        world.restore(states)
        assert world.save(1, states)[0].wait(30)
    free = resource.getrlimit(resource.RLIMIT_AS)

    def limit(_client: AgentClient, _about: Any, ask: Callable[[], Any]) -> Any:
        answer = ask()
        resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes(os.getpid()), free[1]))
        return answer

    blank = states_for(1, seed=0, elements=ELEMENTS)
    with World(cluster6, agents=cluster6.addresses(), **options) as world:
        if before == "table":  # of which it asks peers, to do without its own agent
            os.killpg(cluster6.pid("n0"), signal.SIGKILL)
            cluster6.wait("n0")
        if before == "slot":
            instead_of(monkeypatch, SLOT, limit)
        else:
            table = AgentClient.table
            monkeypatch.setattr(
                AgentClient,
                "table",
                lambda client, header: limit(client, header, lambda: table(client, header)),
            )
        try:
            # Where there is a limit, nothing is mapped while other threads are being started.
            most_bytes = _mapped_bytes(os.getpid()) + ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, free[1]))
            with pytest.raises(NoRoomToRestore, match=r"rank 0: .*does not map [0-9,]+ more bytes"):
                world.restore(blank)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, free)
        monkeypatch.undo()
        assert world.restore(blank)[0].step == 1
    assert all(map(same_state, blank, states))


def _mapped_bytes(pid: int) -> int:
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmSize" in x]
    return int(line.split()[1]) << 10


def test_dead_trainers_and_neighbours_side_by_side(cluster6: LocalCluster) -> None:
    store(cluster6, [bytes([rank]) * 30_000 for rank in range(6)], run="neighbour")
    before = _files(cluster6, "neighbour")
    assert len(before) == 6 * 6
    client = cluster6.client("n0")
    for step in range(1, 21):
        # A trainer that dies in the middle of its snapshot, or right after it, again and again.
        header = _header(step)
        slot = client.call(
            RESERVE,
            Reserve(header=header, memory_bytes=1 << 24, local_ranks=1, holders=5, discard=()),
        )
        with Path(slot.path).open("r+b") as file:
            file.seek(slot.payload_offset)
            file.write(b"half of it")
        if step % 2:
            client.call(STAGE, Stage(header, slot.region))
    left = run_status(client)
    assert left["used_bytes"] < 2 * header.file_bytes
    states = states_for(6, seed=1)
    with World(cluster6, code=(3, 2)) as world:
        assert world.restore(states) == [None] * 6
        assert all(handle.wait(30) for handle in world.save(30, states))
    cluster6.restart(*cluster6.nodes)
    blank = states_for(6, seed=0)
    with World(cluster6, code=(3, 2)) as world:
        assert {each.step for each in world.restore(blank)} == {30}
    assert all(map(same_state, blank, states))
    assert _files(cluster6, "neighbour") == before


def _header(step: int) -> Header:
    shard_bytes = 200_000
    return Header(
        shard=ShardId("test", Generation(1, step, SESSION), 0),
        world_size=6,
        index=HOME,
        k=3,
        m=2,
        shard_bytes=shard_bytes,
        fragment_bytes=fragment_bytes_for(shard_bytes, 3),
        block_bytes=BLOCK_BYTES,
        home="n0",
        parent=None,
        created_unix_s=0,
    )
