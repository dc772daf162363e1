"""Having this node's agent watch over who holds what its ranks save."""

from __future__ import annotations

import logging
from dataclasses import replace

from ecckpt.cluster import Cluster
from ecckpt.errors import EcckptError
from ecckpt.ordering import guard_of

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0


def guard(cluster: Cluster, timeline: int, *, local_ranks: int, timeout_s: float) -> None:
    """Ask the agent to watch, and to repair in the background, each shard within ``timeout_s``.

    Without much patience: it is asked again after the next save.
    """
    message = guard_of(
        cluster.run,
        cluster.home.node,
        cluster.placement,
        {node: peer.address for node, peer in cluster.peers.items()},
        writer=timeline,
        local_ranks=local_ranks,
        memory_bytes=cluster.memory_bytes,
        timeout_s=timeout_s,
    )
    try:
        replace(cluster.agent, timeout_s=_TIMEOUT_S).guard(message)
    except (EcckptError, OSError) as error:
        _log.warning("nobody watches over the holders until the next save: %s", error)
