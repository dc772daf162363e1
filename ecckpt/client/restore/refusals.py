"""When a restore passes over a generation, because a shard of it cannot be had or proven. Pure.

One failure is not enough: an agent that is just being restarted or one late message would otherwise
cost all steps since the generation before. Neither are two failures of one node: its network may
pass small messages and no bulk data. So at the second try a rank on another node, a *witness*,
gathers the same shard.

    ordered --a rank fails--> suspected --the witness fails too, or there is none--> refused
                                  |
                                  +-- the witness can gather it --> ``NodeCutOff``
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ecckpt.client.restore.protocol import Outcome
from ecckpt.errors import NodeCutOff
from ecckpt.format.ids import Generation

# As many shards are gathered by witnesses. If a node cannot gather, a few tell.
_MOST_WITNESSES = 16
# Ranks that fail one after another, each at another shard, end here.
_MOST_TRIES = 4


class Refusals:
    """Generations that a restore no longer tries, with the reason. ``homes``: node of each rank."""

    def __init__(self, homes: Sequence[str]) -> None:
        self.refused: dict[Generation, str] = {}
        self._homes = homes
        self._tries: Counter[Generation] = Counter()
        # Generation -> saved shard, by its rank -> nodes whose ranks could not bring it.
        self._nodes: dict[Generation, dict[int, set[str]]] = {}

    def witnesses(self, generation: Generation) -> dict[int, int]:
        """Rank -> the saved shard, by its rank, that it is to gather beside its own."""
        suspected = sorted(self._nodes.get(generation, {}).items())
        chosen = {}
        for shard, nodes in suspected[:_MOST_WITNESSES]:
            able = [
                rank
                for rank, node in enumerate(self._homes)
                if node not in nodes and rank not in chosen
            ]
            if able:
                chosen[able[shard % len(able)]] = shard
        return chosen

    def fail(self, generation: Generation, outcomes: Sequence[Outcome], why: str) -> bool:
        """Note that some rank could not bring or prove its shard.

        Returns True if the generation is refused from now on. Raises ``NodeCutOff`` if a rank on
        another node could gather what a rank could not.
        """
        bad = [(rank, each) for rank, each in enumerate(outcomes) if each.kind == "bad"]
        proven = {each.witnessed: rank for rank, each in enumerate(outcomes) if each.witnessed >= 0}
        for rank, outcome in bad:
            witness = proven.get(outcome.lacks)
            if witness is not None and self._homes[witness] != self._homes[rank]:
                raise NodeCutOff(
                    self._homes[rank],
                    f"rank {outcome.lacks} of generation {generation}",
                    other=self._homes[witness],
                    why=outcome.text,
                )
        nodes = self._nodes.setdefault(generation, defaultdict(set))
        before = set(self.witnesses(generation).values())
        for rank, outcome in bad:
            if outcome.lacks >= 0:
                nodes[outcome.lacks].add(self._homes[rank])
        self._tries[generation] += 1
        unheard = set(self.witnesses(generation).values()) - before
        tries = self._tries[generation]
        if tries >= _MOST_TRIES or (tries > 1 and not unheard):
            self.refused[generation] = why
        return generation in self.refused
