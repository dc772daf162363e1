"""How a rank joins a session: it finds its agent and learns all nodes and the placement.

``Checkpointer`` calls ``join`` once. Rank 0 checks what all ranks send and answers each with the
roster, so a rank never decides alone that it can take part.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ecckpt.client import deadlines
from ecckpt.client.cluster.connections import Connections
from ecckpt.client.cluster.local_agent import check_reachable, find_or_start, local_client
from ecckpt.client.cluster.members import Cluster
from ecckpt.client.cluster.rendezvous import Meeting
from ecckpt.client.cluster.run_identity import find_run
from ecckpt.client.config import ClusterConfig, NodeConfig
from ecckpt.errors import AgentUnreachable, DuplicateNode, EcckptError, InvalidConfig
from ecckpt.policy.placement import Node, parse_code, plan_placement
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.encoding import pack_message, unpack_message
from ecckpt.protocol.fan_out import call_each
from ecckpt.protocol.messages.node import NodeInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Member:
    """What a rank sends to rank 0. ``info`` is None without an agent; ``problem`` then says why."""

    info: NodeInfo | None
    problem: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class _Roster:
    """What rank 0 answers to a rank.

    ``run`` is the full name of the run. ``homes`` is filled for rank 0 only; ``share`` is as in
    ``Cluster``.
    """

    run: str
    nodes: tuple[NodeInfo, ...]
    local_ranks: int
    homes: tuple[str, ...]
    share: tuple[str, ...]


def join(
    meeting: Meeting,
    config: ClusterConfig,
    node: NodeConfig,
    *,
    agents: Sequence[str],
    memory_bytes: int,
) -> tuple[Cluster, Connections]:
    """Find or start this node's agent, and meet the other ranks.

    ``agents`` are the addresses of agents on nodes without ranks. One that does not answer is a
    node that is missing: the run starts without it.

    Raises the same error on all ranks if configurations differ, if two agents have the same node
    id, if a rank's agent cannot be reached, if an agent runs another version, or if the code needs
    more nodes.
    """
    started_s = time.monotonic()
    token = node.token()
    info, problem = None, ""
    try:
        info = find_or_start(node)
    except EcckptError as error:
        # Sent to rank 0 rather than raised here, or the other ranks would wait for this one.
        problem = str(error)
    member = _Member(info, problem, config.fingerprint())
    missing: dict[str, str] = {}
    roster = _meet(meeting, config, member, agents=agents, token=token, missing=missing)
    assert info is not None, "rank 0 refuses a member without an agent"
    code = parse_code(config.code, len(roster.nodes))
    placement = plan_placement([Node(peer.node, peer.domain) for peer in roster.nodes], code)
    if meeting.rank == 0:
        level = logging.INFO if code.holders else logging.WARNING
        _log.log(
            level, "run %s, %d node(s): %s", roster.run, len(roster.nodes), placement.promise()
        )
    agent = local_client(node.root)
    cluster = Cluster(
        run=roster.run,
        session=meeting.session,
        rank=meeting.rank,
        ranks=meeting.world_size,
        home=info.node,
        local_ranks=roster.local_ranks,
        homes=roster.homes,
        share=roster.share,
        address={peer.node: peer.address for peer in roster.nodes},
        placement=placement,
        memory_bytes=memory_bytes,
        started_s=started_s,
        missing=missing,
    )
    # A restarted agent must be the same node at the same address, or its peers would not find it.
    restart_config = replace(
        node, node=info.node, domain=info.domain, listen=info.address, disk=_disk_of(agent)
    )
    peers = {
        peer.node: AgentClient(peer.address, token, for_node=peer.node) for peer in roster.nodes
    }
    return cluster, Connections(agent, peers, restart_config)


def _disk_of(agent: AgentClient) -> Path | None:
    """The ``--disk`` folder of this agent, which a restarted agent has to be given again."""
    folder = agent.status()["disk"]["folder"]
    return Path(folder).parent if folder else None


def _meet(
    meeting: Meeting,
    config: ClusterConfig,
    member: _Member,
    *,
    agents: Sequence[str],
    token: str,
    missing: dict[str, str],
) -> _Roster:
    """Exchange ``_Member`` for ``_Roster``; rank 0 checks the members and builds the rosters.

    On rank 0, ``missing`` gets the agents that do not answer, with the reason.
    """

    def lead(payloads: list[bytes]) -> Sequence[bytes]:
        members = [unpack_message(_Member, payload) for payload in payloads]
        _check_alike(members)
        homes = [member.info for member in members if member.info is not None]
        without_ranks = _answering(agents, token, missing)
        nodes = _distinct(homes + without_ranks)
        check_reachable(nodes, token)
        # Checked here so that all ranks raise the same error; each rank parses the code again.
        parse_code(config.code, len(nodes))
        clients = [AgentClient(each.address, token, for_node=each.node) for each in nodes]
        run = find_run(config.run, clients)
        names = tuple(home.node for home in homes)
        ranks_at = Counter(names)
        idle = [node.node for node in nodes if node.node not in ranks_at]
        return [
            pack_message(
                _Roster(
                    run=run,
                    nodes=tuple(nodes),
                    local_ranks=ranks_at[name],
                    # Sent to one rank, or the answers together would grow as ranks squared.
                    homes=names if rank == 0 else (),
                    share=tuple(idle[rank :: len(names)]),
                )
            )
            for rank, name in enumerate(names)
        ]

    payload = pack_message(member)
    return unpack_message(
        _Roster, meeting.decide("join", payload, lead, timeout_s=deadlines.JOIN_S)
    )


def _answering(agents: Sequence[str], token: str, missing: dict[str, str]) -> list[NodeInfo]:
    """The agents that answer; the others are noted in ``missing``, and in the log."""

    def ask(address: str) -> NodeInfo | AgentUnreachable:
        try:
            return AgentClient(address, token).node()
        except AgentUnreachable as error:
            return error

    found = []
    for address, answer in zip(agents, call_each(agents, ask), strict=True):
        if isinstance(answer, NodeInfo):
            found.append(answer)
        else:
            missing[address] = answer.reason
            _log.warning("the run starts without a node, which holds nothing for it: %s", answer)
    return found


def _check_alike(members: Sequence[_Member]) -> None:
    """Raise if a rank has no agent or another configuration than rank 0."""
    first = members[0].fingerprint
    for rank, member in enumerate(members):
        if member.info is None:
            raise AgentUnreachable(f"of rank {rank}", member.problem)
        if member.fingerprint != first:
            raise InvalidConfig(
                f"rank {rank} is configured differently: {member.fingerprint}; rank 0 has {first}"
            )


def _distinct(infos: Sequence[NodeInfo]) -> list[NodeInfo]:
    """One entry per agent, by node id.

    Raises ``DuplicateNode`` if two agents have the same node id. An agent of a node with several
    ranks appears once per rank; ``instance`` tells that it is the same one.
    """
    nodes: dict[str, NodeInfo] = {}
    for info in infos:
        known = nodes.setdefault(info.node, info)
        if known.instance != info.instance:
            raise DuplicateNode(info.node, [known.address, info.address])
    return [nodes[name] for name in sorted(nodes)]
