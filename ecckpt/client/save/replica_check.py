"""Whether all ranks have what each of them says that all have, found out in the background.

The first rank whose shard is staged leaves the digest of its claim in the run's store, every other
one compares its own: one exchange each, whatever the number of ranks. Only a rank that disagrees
looks at the first one's checksums, to name what differs.
"""

from __future__ import annotations

import logging
import time

from ecckpt.client.cluster.rendezvous import Meeting
from ecckpt.errors import EcckptError, SaveFailed
from ecckpt.format.ids import Generation, ShardId
from ecckpt.state.snapshot.replicas import Claim

_log = logging.getLogger(__name__)

_CLAIM_TIMEOUT_S = 10.0
_POLL_S = 0.05


class Claims:
    """The claims of one rank, one save after another. For one thread."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._left: list[str] = []

    def compare(self, generation: Generation, claim: Claim) -> None:
        """Raise ``SaveFailed``, with the paths and the ranks, if another rank's claim differs."""
        rank = self._meeting.rank
        mine = f"{claim.digest.hex()} {rank}"
        first = self._meeting.agree(_key(generation, "digest"), mine)
        if first == mine:
            self._leave(_key(generation, "digest"))
            self._leave(_key(generation, "sums"))
            self._meeting.put(_key(generation, "sums"), claim.pack())
            return
        digest, other = first.split(" ")
        if digest == claim.digest.hex():
            return
        sums = self._await_sums(generation)
        where = claim.differences(sums) if sums else f"what, rank {other} did not tell"
        text = (
            f"not the same on rank {rank} as on rank {other}, though replicated= says so: {where}"
        )
        self._leave(_key(generation, "verdict"))
        self._meeting.put(_key(generation, "verdict"), text.encode()[:4000])
        raise SaveFailed(text)

    def explain(self, shard: ShardId, failed: EcckptError | None) -> EcckptError | None:
        """How a save ended, once it has: with another rank's words if its claim was the reason.

        After a commit nobody needs what this rank has left in the store any more, and it goes.
        """
        try:
            if failed is None:
                for key in self._left:
                    self._meeting.drop(key)
                self._left.clear()
            elif verdict := self._meeting.look(_key(shard.generation, "verdict")):
                return SaveFailed(f"{shard}: {verdict.decode(errors='replace')}")
        except (RuntimeError, OSError) as error:
            _log.warning("the run's store does not answer: %s", error)
        return failed

    def _leave(self, key: str) -> None:
        self._left.append(key)

    def _await_sums(self, generation: Generation) -> bytes | None:
        deadline_s = time.monotonic() + _CLAIM_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if sums := self._meeting.look(_key(generation, "sums")):
                return sums
            time.sleep(_POLL_S)
        return None


def _key(generation: Generation, what: str) -> str:
    return f"claim/{generation}/{what}"
