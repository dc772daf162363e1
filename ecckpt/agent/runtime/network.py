"""What an agent does over the network: pull a fragment, gather a shard, post a message."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np

from ecckpt.agent.core.actions import Announce, AskPeer, Gathered, Post
from ecckpt.agent.core.gather_plan import Gathering
from ecckpt.agent.core.tasks import Fetching, Taking
from ecckpt.agent.runtime.rate_limit import pace_of
from ecckpt.agent.runtime.shard_bytes import (
    bad_blocks,
    data_views,
    fragment_view,
    parity_views,
    rebuild,
    sums_of,
)
from ecckpt.errors import EcckptError, InvalidMessage, NotHeld, TooFewFragments, TooSlow
from ecckpt.format.block_ranges import span_of, spans
from ecckpt.protocol.agent_client import peer_client
from ecckpt.protocol.http import patience
from ecckpt.protocol.messages.repair import Presence
from ecckpt.protocol.messages.restore import Fetch
from ecckpt.protocol.messages.save import Held, Hold
from ecckpt.protocol.parallel_ranges import connections_for
from ecckpt.protocol.stragglers import Field
from ecckpt.protocol.tracing import Tracer
from ecckpt.protocol.verbs import HELD, HOLD, PREFETCH, PROBE

_POST_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 2.0
_PARALLEL_PULLS = 8


class PeerNetwork:
    """Requests to other agents, in the thread of whoever calls; ``token`` is their credential.

    With ``pull_bytes_per_s``, fragments of others' saves come no faster than that, all together. A
    shard that somebody waits for comes as fast as it can.
    """

    def __init__(self, token: str, tracer: Tracer, *, pull_bytes_per_s: float = 0.0) -> None:
        self._token = token
        self._pace = pace_of(pull_bytes_per_s) if pull_bytes_per_s else None
        self._tracer = tracer

    def post(self, action: Post) -> None:
        """Send a message; raises what the client raises."""
        client = peer_client(action.address, self._token, timeout_s=_POST_TIMEOUT_S)
        match action.message:
            case Hold() as hold:
                client.call(HOLD, hold)
            case Held() as held:
                client.call(HELD, held)

    def announce(self, action: Announce) -> None:
        """Send that message while there is something in it; raises what the client raises."""
        if action.job.state == "encoding":
            client = peer_client(action.address, self._token, timeout_s=_POST_TIMEOUT_S)
            client.call(PREFETCH, action.message)

    def ask(self, action: AskPeer) -> Presence:
        """What a node has; raises what the client raises."""
        address, message = action.sight.address, action.message
        seen = peer_client(address, self._token, timeout_s=_ASK_TIMEOUT_S).call(PROBE, message)
        if not len(seen.held) == len(seen.coming) == len(message.shards):
            raise InvalidMessage(f"agent {address} answers for other shards than asked")
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
        header = message.header
        table = self._table(message, deadline_s)
        views = data_views(header, region) + parity_views(header, fetching.parity)
        gathering = Gathering.of(message)

        def pull(index: int, field: Field, connections: int) -> None:
            self._pull_next(
                gathering,
                index,
                views[index],
                table,
                field=field,
                deadline_s=deadline_s,
                connections=connections,
            )
            field.ended()

        with ThreadPoolExecutor(_PARALLEL_PULLS, thread_name_prefix="fetch") as pool:
            wanted = gathering.first()
            while True:
                field = Field(len(wanted), gathering.spare(wanted))
                each = connections_for(len(wanted))
                list(pool.map(pull, wanted, repeat(field), repeat(each)))
                if not (wanted := gathering.next()):
                    break
        with self._tracer.span("rebuild", header.shard):
            rebuilt = rebuild(gathering, views, table)
        return Gathered(table, gathering.pulled_bytes, rebuilt, tuple(gathering.problems))

    def _table(self, message: Fetch, deadline_s: float) -> np.ndarray:
        problems: list[str] = []
        addresses = dict.fromkeys(a for sources in message.sources for a in sources.addresses)
        for address in (*addresses, *addresses):  # as every source of a fragment: twice
            # One that hangs may not use up the time in which another could answer.
            timeout_s = patience(max(0.001, deadline_s - time.monotonic()))
            try:
                client = peer_client(address, self._token, timeout_s=timeout_s)
                return client.table(message.header)
            except (EcckptError, OSError) as error:
                problems.append(str(error))
        raise TooFewFragments(
            f"checksums of {message.header.shard}", have=0, need=1, reasons=problems[:8]
        )

    def _pull_next(
        self,
        gathering: Gathering,
        index: int,
        view: memoryview,
        table: np.ndarray,
        *,
        field: Field,
        deadline_s: float,
        connections: int,
    ) -> None:
        """Try one more source of a fragment, for those of its blocks that are not proven yet."""
        header = gathering.header
        address, runs = gathering.take(index)
        spans = [span_of(header, rows) for rows in runs]
        runner = field.start(sum(span.stop - span.start for span in spans))
        client = peer_client(address, self._token)
        try:
            for rows, span in zip(runs, spans, strict=True):
                timeout_s = max(0.001, deadline_s - time.monotonic())
                with self._tracer.span("pull back", header.shard, index):
                    client.pull_fragment(
                        header.shard,
                        index,
                        view[span],
                        offset=span.start,
                        timeout_s=timeout_s,
                        patience_s=patience(timeout_s),
                        wanted=runner.waits,
                        last=gathering.last,
                        connections=connections,
                    )
                gathering.pulled_bytes += span.stop - span.start
                gathering.prove(index, rows, bad_blocks(header, index, view[span], table, rows))
            runner.arrived()
        except TooSlow as error:
            gathering.problems.append(f"fragment {index}: {error}")
            gathering.postpone(index, address)
            return
        except (EcckptError, OSError) as error:
            gathering.problems.append(f"fragment {index}: {error}")
        gathering.judge(index, address)
