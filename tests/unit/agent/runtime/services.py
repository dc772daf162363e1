"""An agent's service in this process, without its server, and files put into it."""

import time
from pathlib import Path

from ecckpt.agent.core.actions import Allocate, Failed, Seal
from ecckpt.agent.records.entry import Entry
from ecckpt.agent.runtime.service import AgentService
from ecckpt.coding.reed_solomon import Codec
from ecckpt.errors import MemoryBudgetTooSmall
from ecckpt.format.fragment_file import HOME, SUPERBLOCK_BYTES
from ecckpt.protocol.messages.disk import Store
from ecckpt.protocol.messages.restore import Fence
from ecckpt.protocol.messages.save import Commit, Reserve
from tests.support.builders import generation, header, table_of, writer_of

BUDGET = 64 << 20
OLD, NEW = generation(1, 9), generation(1, 10)


def start(root, disk):
    root.mkdir(exist_ok=True)
    return AgentService(root, node="n1", domain="n1", address="127.0.0.1:1", token="", disk=disk)


def again(agent):
    """The agent as it is after its process was killed and started anew."""
    return AgentService(
        Path(agent.info.root), node="n1", domain="n1", address="127.0.0.1:1", token=""
    )


def ledger(agent, run="test"):
    return agent.core.records.get_or_create(run)


def settle(agent, actions):
    for action in actions:
        agent._driver._settle(action)


def commit(agent, gen, run="test"):
    agent.commit(Commit(run, gen))


def fence(agent, timeline, restored=None, *, run="test", roll_backs=()):
    agent.fence(Fence(run, writer_of(timeline), restored, tuple(roll_backs)))


def room(agent, run, size_bytes, *, budget_bytes=BUDGET, task=None):
    """A region, as the core gets it, with what it does if there is none."""
    action = Allocate(
        run=run, size_bytes=size_bytes, budget_bytes=budget_bytes, what="a slot", task=task
    )
    try:
        return agent.region_store.allocate(action)
    except MemoryBudgetTooSmall as error:
        for each in agent._driver._decide(Failed(action, error)):
            if isinstance(each, Allocate):
                return agent.region_store.allocate(each)
        raise


def stage(agent, index=HOME, *, budget_bytes=BUDGET, **fields):
    shard = header(index, **{"gen": NEW} | fields)
    task = Reserve(header=shard, memory_bytes=budget_bytes, local_ranks=1, holders=0, discard=())
    region = room(agent, shard.shard.run, shard.file_bytes, budget_bytes=budget_bytes, task=task)
    entry = Entry(header=shard, region=region, table=None)
    settle(agent, agent.core.records.enter(entry))
    return entry


def seal(agent, entry, table):
    entry.table = table
    settle(agent, [Seal(entry)])


def keep(agent, index=HOME, **fields):
    """A sealed file with some bytes in it; of its table, what is said of them is right."""
    entry = stage(agent, index, **fields)
    shard = entry.header
    noise = bytes((7 * at + index + shard.shard.rank) % 251 for at in range(shard.payload_bytes))
    entry.region.view[SUPERBLOCK_BYTES : shard.trailer_offset] = noise
    table, size_bytes = table_of(shard, shard.shard.rank), shard.fragment_bytes
    for at in range(shard.k if index == HOME else 1):
        piece = memoryview(noise)[at * size_bytes : (at + 1) * size_bytes]
        table[max(index, at)] = Codec(1, 0).encode([piece], [], shard.block_bytes)[0]
    seal(agent, entry, table)
    return entry


def content(entry):
    return entry.region.path.read_bytes()[: entry.header.file_bytes]


def held(agent, run="test"):
    """(generation, rank, index) of everything sealed."""
    headers = agent.inventory(run).headers
    return sorted((each.shard.generation, each.shard.rank, each.index) for each in headers)


def store(agent, gen=NEW, *, wait=True):
    """Ask until nothing waits any more."""
    message = Store("test", gen, 1 << 40, ())
    deadline_s = time.monotonic() + 10
    while True:
        answer = agent.store(message)
        if not (wait and answer.waiting_bytes):
            return answer
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def on_disk(agent):
    disk = agent.inventory("test").disk
    return sorted((each.shard.generation, each.shard.rank, each.index) for each in disk)
