"""Tickets: what a save by somebody else than the Checkpointer does at the agents."""

import threading
from dataclasses import replace

import torch

import ecckpt
from ecckpt.client.save import ticket as staging
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.state.snapshot.plan import plan_shard
from ecckpt.testing.local_cluster import LocalCluster


def test_a_commit_is_told_to_all_agents_at_once(monkeypatch):
    tell, together = staging.tell_committed, threading.Barrier(3)

    def met(agent, shard):
        together.wait(30)  # all of the others are being told as well
        return tell(agent, shard)

    monkeypatch.setattr(staging, "tell_committed", met)
    state = {"w": torch.arange(100.0)}
    with (
        LocalCluster(nodes=4) as cluster,
        ecckpt.Checkpointer(
            "test", code=(2, 1), root=cluster.root("n0"), agents=cluster.addresses()
        ) as ckpt,
    ):
        ckpt.restore(state)
        ticket = ckpt.ticket(3)
        ckpt.stage(ticket, plan_shard(state))
        ticket.protect()
        others = [each for each in ticket.peers if each.address != ticket.agent.address][:3]
        replace(ticket, peers=tuple(others)).commit()
        told = [peer.call(INVENTORY, "test").committed for peer in (ticket.agent, *others)]
    assert told == [ticket.shard.generation] * 4
