"""How the ranks of a session come to know the cluster: agents, nodes, placement."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ecckpt.client.cluster.connections import Connections
from ecckpt.client.cluster.local_agent import check_reachable, find_or_start, local_client
from ecckpt.client.cluster.members import Cluster
from ecckpt.client.cluster.rendezvous import Meeting
from ecckpt.client.config import ClusterConfig, NodeConfig
from ecckpt.errors import AgentUnreachable, DuplicateNode, EcckptError, InvalidConfig
from ecckpt.policy.placement import Node, parse_code, plan_placement
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.encoding import pack_message, unpack_message
from ecckpt.protocol.messages.node import NodeInfo

_log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class _Member:
    """What a rank tells the others: its agent, or why it has none, and its configuration."""

    info: NodeInfo | None
    problem: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class _Roster:
    """What every rank gets back. ``homes`` is filled for rank 0 only, ``share`` see Cluster."""

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
    """Find or start this node's agent and meet the other ranks. Raises on all ranks alike
    for differing configurations, duplicate node ids, agents that cannot be reached or are of
    another version, and for a code that needs more nodes.
    """
    token = node.token()
    info, problem = None, ""
    try:
        info = find_or_start(node)
    except EcckptError as error:
        problem = str(error)  # the others must hear of it rather than wait
    member = _Member(info, problem, config.fingerprint())
    roster = _meet(meeting, config, member, agents=agents, token=token)
    assert info is not None, "a rank without an agent has failed the meeting"
    code = parse_code(config.code, len(roster.nodes))
    placement = plan_placement([Node(each.node, each.domain) for each in roster.nodes], code)
    if meeting.rank == 0:
        level = logging.INFO if code.holders else logging.WARNING
        _log.log(
            level, "run %s, %d node(s): %s", config.run, len(roster.nodes), placement.promise()
        )
    agent = local_client(node.root)
    cluster = Cluster(
        run=config.run,
        session=meeting.session,
        rank=meeting.rank,
        ranks=meeting.world_size,
        home=info.node,
        local_ranks=roster.local_ranks,
        homes=roster.homes,
        share=roster.share,
        address={each.node: each.address for each in roster.nodes},
        placement=placement,
        memory_bytes=memory_bytes,
    )
    as_it_was = replace(
        node, node=info.node, domain=info.domain, listen=info.address, disk=_disk_of(agent)
    )
    peers = {each.node: AgentClient(each.address, token) for each in roster.nodes}
    return cluster, Connections(agent, peers, as_it_was)


def _disk_of(agent: AgentClient) -> Path | None:
    """The folder that a new agent of this node would have to be given."""
    folder = agent.status()["disk"]["folder"]
    return Path(folder).parent if folder else None


def _meet(
    meeting: Meeting,
    config: ClusterConfig,
    member: _Member,
    *,
    agents: Sequence[str],
    token: str,
) -> _Roster:
    def lead(payloads: list[bytes]) -> Sequence[bytes]:
        members = [unpack_message(_Member, payload) for payload in payloads]
        _check_alike(members)
        homes = [member.info for member in members if member.info is not None]
        extra = [AgentClient(address, token).node() for address in agents]
        nodes = _distinct(homes + extra)
        check_reachable(nodes, token)
        # Fails here, on all ranks with the same words, rather than on each by itself.
        parse_code(config.code, len(nodes))
        names = tuple(home.node for home in homes)
        ranks = Counter(names)
        idle = [node.node for node in nodes if node.node not in ranks]
        return [
            pack_message(
                _Roster(
                    tuple(nodes),
                    ranks[name],
                    names if rank == 0 else (),
                    tuple(idle[rank :: len(names)]),
                )
            )
            for rank, name in enumerate(names)
        ]

    payload = pack_message(member)
    return unpack_message(_Roster, meeting.decide("join", payload, lead, timeout_s=_JOIN_TIMEOUT_S))


def _check_alike(members: Sequence[_Member]) -> None:
    first = members[0].fingerprint
    for rank, member in enumerate(members):
        if member.info is None:
            raise AgentUnreachable(f"of rank {rank}", member.problem)
        if member.fingerprint != first:
            raise InvalidConfig(
                f"rank {rank} is configured differently: {member.fingerprint}, rank 0: {first}"
            )


def _distinct(infos: Sequence[NodeInfo]) -> list[NodeInfo]:
    """One entry per agent; ``DuplicateNode`` if two agents share a node id."""
    nodes: dict[str, NodeInfo] = {}
    for info in infos:
        known = nodes.setdefault(info.node, info)
        if known.instance != info.instance:
            raise DuplicateNode(info.node, [known.address, info.address])
    return [nodes[name] for name in sorted(nodes)]
