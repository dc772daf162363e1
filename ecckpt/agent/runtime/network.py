"""What an agent does over the network: pull a fragment, gather a shard, post a message."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from ecckpt.agent import deadlines
from ecckpt.agent.core.actions import Announce, AskPeer, Gathered, Post
from ecckpt.agent.core.tasks import Fetching, Taking
from ecckpt.agent.runtime.rate_limit import pace_of
from ecckpt.agent.runtime.shard_bytes import data_views, fragment_view, parity_views, sums_of
from ecckpt.errors import InvalidMessage, NotHeld
from ecckpt.format.block_ranges import span_of, spans
from ecckpt.format.fragment_file import Header
from ecckpt.policy.gather_plan import BlockPull, GatherPlan, whole_shard
from ecckpt.protocol.agent_client import AgentClient, peer_client
from ecckpt.protocol.gather import Gatherer, find_table, rebuild
from ecckpt.protocol.http import patience
from ecckpt.protocol.messages.repair import Presence
from ecckpt.protocol.messages.save import Held, Hold
from ecckpt.protocol.parallel_ranges import connections_for
from ecckpt.protocol.tracing import Tracer
from ecckpt.protocol.verbs import HELD, HOLD, PREFETCH, PROBE


class PeerNetwork:
    """Requests to other agents, in the thread of the caller; ``token`` is their credential.

    With ``pull_bytes_per_s``, fragments of others' saves come no faster than that, all together. A
    shard that a restore waits for comes as fast as it can.
    """

    def __init__(self, token: str, tracer: Tracer, *, pull_bytes_per_s: float = 0.0) -> None:
        self._token = token
        self._pace = pace_of(pull_bytes_per_s) if pull_bytes_per_s else None
        self._tracer = tracer

    def post(self, action: Post) -> None:
        """Send a message; raises what the client raises."""
        client = self._client(action)
        match action.message:
            case Hold() as hold:
                client.call(HOLD, hold)
            case Held() as held:
                client.call(HELD, held)

    def announce(self, action: Announce) -> None:
        """Send that message while there is something in it; raises what the client raises."""
        if action.job.state == "encoding":
            client = peer_client(
                action.address,
                self._token,
                for_node=action.node,
                timeout_s=deadlines.POST_TIMEOUT_S,
            )
            client.call(PREFETCH, action.message)

    def _client(self, action: Post | Announce) -> AgentClient:
        return peer_client(
            action.address, self._token, for_node=action.node, timeout_s=deadlines.POST_TIMEOUT_S
        )

    def ask(self, action: AskPeer) -> Presence:
        """What a node has; raises what the client raises."""
        peer, message = action.sight, action.message
        client = peer_client(
            peer.address, self._token, for_node=peer.node, timeout_s=deadlines.PROBE_TIMEOUT_S
        )
        seen = client.call(PROBE, message)
        if not len(seen.held) == len(seen.coming) == len(message.shards):
            raise InvalidMessage(f"agent {peer.address} answers for other shards than asked")
        return seen

    def pull(self, taking: Taking) -> np.ndarray:
        """Pull what a fragment lacks into its region; returns the checksums of all its blocks.

        Raises ``NotHeld`` if it has no region, ``TooSlow`` once it is dropped.
        """
        message, header, region = taking.message, taking.message.header, taking.region
        shard, index = header.shard, header.index
        if region is None:
            raise NotHeld(f"no memory for fragment {index} of {shard} yet")
        view = fragment_view(header, region)
        client = peer_client(message.source, self._token)
        sums = np.zeros(header.rows, np.uint32) if taking.sums is None else taking.sums.copy()
        for rows in spans(taking.lacking()):
            span = span_of(header, rows)
            with self._tracer.span("prefetch" if taking.early else "pull", shard, index):
                client.pull_fragment(
                    shard,
                    index,
                    view[span],
                    offset=span.start,
                    timeout_s=message.timeout_s,
                    pace=self._pace,
                    wanted=lambda: not taking.dropped,
                    early=taking.early,
                    connections=connections_for(header.n),  # holders pull from one home at once
                )
            with self._tracer.span("verify", shard, index):
                sums[rows] = sums_of(header, view[span])
        return sums

    def gather(self, fetching: Fetching) -> Gathered:
        """Pull what is left of a shard straight into place, rebuild the rest there, prove all.

        Raises ``TooFewFragments`` when what can be reached does not suffice.
        """
        message, region = fetching.message, fetching.region
        assert region is not None
        deadline_s = time.monotonic() + message.timeout_s
        header, places = message.header, message.places
        views = data_views(header, region) + parity_views(header, fetching.parity)
        silent: set[str] = set()
        plan = GatherPlan(header, whole_shard(header), places, silent=silent)
        ask = partial(self._table, header, deadline_s)
        table = find_table(header, places, ask, silent=silent, problems=plan.problems)

        def pull_back(
            pull: BlockPull, span: slice, connections: int, goes_on: Callable[[], bool]
        ) -> None:
            timeout_s = max(0.001, deadline_s - time.monotonic())
            with self._tracer.span("pull back", header.shard, pull.index):
                peer_client(pull.source, self._token).pull_fragment(
                    header.shard,
                    pull.index,
                    views[pull.index][span],
                    offset=span.start,
                    timeout_s=timeout_s,
                    patience_s=patience(timeout_s),
                    wanted=goes_on,
                    last=pull.again,
                    connections=connections,
                )

        Gatherer(plan, table, views.__getitem__, pull_back).pull_blocks()
        with self._tracer.span("rebuild", header.shard):
            rebuild(plan, table, views.__getitem__)
        return Gathered(table, plan.pulled_bytes, len(plan.computed), tuple(plan.problems))

    def _table(self, header: Header, deadline_s: float, address: str) -> np.ndarray:
        # One that hangs may not use up the time in which another could answer.
        timeout_s = patience(max(0.001, deadline_s - time.monotonic()))
        return peer_client(address, self._token, timeout_s=timeout_s).table(header)
