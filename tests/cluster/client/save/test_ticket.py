"""Tickets: a program other than the Checkpointer saves through the agents."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import ecckpt
from ecckpt.client import deadlines
from ecckpt.client.cluster.requests import Requests
from ecckpt.client.effects import CallAgents, TakeSpans
from ecckpt.client.save.ticket import Ticket
from ecckpt.client.state_effects import CopyState
from ecckpt.errors import AgentUnreachable, Fenced, SaveFailed, SaveTimedOut
from ecckpt.protocol.messages.save import Commit, Progress, Slot
from ecckpt.protocol.messages.trace import Span
from ecckpt.protocol.verbs import COMMIT, INVENTORY, PROTECT, RESERVE, SPANS, STAGE, WATCH
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.testing.local_cluster import LocalCluster
from tests.support.builders import SESSION, generation, header, inventory
from tests.support.commits import cluster_of, config_of
from tests.support.performers import Performer

NODES = ["n0", "n1", "n2", "n3"]
GONE = AgentUnreachable("here", "gone")
GEN = generation(3, 7)


class Plan:
    shard_bytes = 50_000


def ticket_of() -> Ticket:
    requests = Requests(config_of(), cluster_of(0, 1, nodes=NODES, code=(2, 1)))
    shard = requests.shard(GEN)
    return Ticket(
        header=requests.header(shard, 0, None, created_unix_s=0),
        protection=requests.protection(shard, [generation(3, 6)]),
        nodes=tuple(NODES),
        local_ranks=1,
        timeout_s=20.0,
    )


class Holder(Performer):
    def __init__(self) -> None:
        super().__init__()
        self.ticket = ticket_of()
        self.answers[RESERVE] = lambda effect: Slot(
            path="path",
            region="region",
            use=1,
            file_bytes=1 << 20,
            payload_offset=4096,
            header=effect.message.header,
        )

    def verbs(self) -> list[str]:
        return [each.verb.name for each in self.done if hasattr(each, "verb")]


def test_staging_reserves_copies_and_tells_the_agent():
    holder = Holder()
    holder.run(holder.ticket.stage(Plan()))
    (reserved,), (staged,) = holder.calls(RESERVE), holder.calls(STAGE)
    (copied,) = [each for each in holder.done if isinstance(each, CopyState)]
    head = reserved.message.header
    assert (head.shard_bytes, head.shard) == (50_000, holder.ticket.shard)
    assert head.created_unix_s == int(holder.now_s)
    assert (reserved.message.holders, reserved.message.discard) == (3, (generation(3, 6),))
    assert copied.header == staged.message.header == head
    assert (copied.slot.region, staged.message.region) == ("region", "region")
    assert holder.verbs() == ["reserve", "stage"]


@pytest.mark.parametrize("verb", [RESERVE, STAGE])
def test_staging_raises_what_the_agent_answers(verb):
    holder = Holder()
    holder.answers[verb] = Fenced(timeline=1, current=2)
    with pytest.raises(Fenced):
        holder.run(holder.ticket.stage(Plan()))


def test_protecting_waits_for_the_redundancy_and_leaves_its_spans():
    holder = Holder()
    states = iter(["scattering", "protected"])
    holder.answers[WATCH] = lambda effect: Progress(
        state=next(states), held=3, problems=(), encode_s=0.1, protected_s=0.2
    )
    span = Span(name="copy", shard=holder.ticket.shard, index=-1, began_unix_s=0.0, seconds=1.0)
    holder.on[TakeSpans] = lambda effect: (span,)
    assert holder.run(holder.ticket.protect()).held == 3
    assert [each.message.known_state for each in holder.calls(WATCH)] == ["encoding", "scattering"]
    assert holder.verbs() == ["protect", "watch", "watch", "spans"]
    assert holder.calls(SPANS)[0].message.spans == (span,)
    holder.answers[SPANS] = GONE  # the save does not need the copies' spans
    states = iter(["protected"])
    assert holder.run(holder.ticket.protect()).held == 3


def test_what_cannot_be_protected_is_a_failed_save_and_what_takes_too_long_a_late_one():
    holder = Holder()
    holder.answers[WATCH] = Progress(
        state="failed", held=0, problems=("n1: no room",), encode_s=0.0, protected_s=0.0
    )
    with pytest.raises(SaveFailed, match="not protected: n1: no room"):
        holder.run(holder.ticket.protect())
    holder.gates[WATCH] = lambda effect: False
    holder.answers[WATCH] = Progress(
        state="encoding", held=0, problems=(), encode_s=0.0, protected_s=0.0
    )
    began_s = holder.now_s
    with pytest.raises(SaveTimedOut, match="still encoding at its deadline"):
        holder.run(holder.ticket.protect())
    assert holder.now_s - began_s == pytest.approx(20.0)


def test_a_commit_is_told_to_all_agents_at_once_and_first_to_its_own():
    holder = Holder()
    holder.run(holder.ticket.commit())
    (own,) = holder.calls(COMMIT)
    (all_,) = [each for each in holder.done if isinstance(each, CallAgents)]
    assert own.message == all_.message == Commit("test", GEN)
    assert (list(all_.nodes), all_.patience_s) == (NODES, deadlines.COMMIT_S)


def test_a_commit_is_none_unless_its_own_agent_has_taken_it():
    holder = Holder()
    holder.answers[COMMIT] = lambda effect: GONE if not effect.node else None
    with pytest.raises(AgentUnreachable):
        holder.run(holder.ticket.commit())
    assert not [each for each in holder.done if isinstance(each, CallAgents)]
    holder.answers[COMMIT] = lambda effect: GONE if effect.node == "n2" else None
    holder.run(holder.ticket.commit())
    (line,) = holder.log()
    assert line.startswith("could not tell n2 that")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, False),
        ({"": GEN}, True),
        ({"n2": GEN}, True),
        ({"n2": generation(3, 8)}, True),
        ({"": generation(3, 6), "n1": generation(3, 6)}, False),
        ({"": GONE, "n1": GONE, "n2": GEN}, True),
        ({"": GONE, "n0": GONE, "n1": GONE, "n3": GONE}, False),
    ],
)
def test_a_save_is_committed_if_any_agent_knows_it_or_a_newer_one(known, expected):
    holder = Holder()

    def answer(effect: Any) -> Any:
        committed = known.get(effect.node)
        if isinstance(committed, Exception):
            return committed
        return inventory(effect.node, committed=committed)

    holder.answers[INVENTORY] = answer
    assert holder.run(holder.ticket.is_committed()) is expected


def test_a_save_may_be_committed_if_no_agent_answers():
    holder = Holder()
    holder.answers[INVENTORY] = GONE
    with pytest.raises(SaveFailed, match="no agent tells whether it is committed"):
        holder.run(holder.ticket.is_committed())


def test_a_ticket_goes_to_another_process():
    ticket = ticket_of()
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    assert ticket.header.shard.generation.session == SESSION
    assert ticket.header == header(
        gen=GEN,
        world_size=1,
        k=2,
        m=1,
        shard_bytes=0,
        block_bytes=ticket.header.block_bytes,
        created_unix_s=0,
    )
    assert ticket.protection.shard == ticket.shard
    assert [each.node for each in ticket.protection.targets] == ["n1", "n2", "n3"]
    assert PROTECT.request is type(ticket.protection)


def test_agents_take_a_ticket_for_a_save():
    state = {"w": torch.arange(100.0)}
    with (
        LocalCluster(nodes=4) as cluster,
        ecckpt.Checkpointer(
            "test", code=(2, 1), root=cluster.root("n0"), agents=cluster.addresses()
        ) as ckpt,
    ):
        ckpt.restore(state)
        ticket = pickle.loads(pickle.dumps(ckpt.ticket(3)))
        ckpt.stage(ticket, plan_shard(state))
        assert ticket.protect().held == 3
        ticket.commit()
        told = [cluster.client(node).call(INVENTORY, "test").committed for node in cluster.nodes]
        assert told == [ticket.shard.generation] * 4
        blank = {"w": torch.zeros(100)}
        assert ckpt.restore(blank).step == 3
        assert torch.equal(blank["w"], state["w"])
