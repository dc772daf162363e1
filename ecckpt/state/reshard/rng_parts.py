"""Which random number generators were equal on all ranks that saved.

On another number of ranks, ``reshape.py`` has these go on from their saved state on all new ranks
(a sampler that every rank shuffles alike stays so), and the others seeded anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ecckpt.state.file.shard import Shard
from ecckpt.state.paths import Path
from ecckpt.state.reshard.diff import TreeComparison, rng_nodes
from ecckpt.state.reshard.saved_shard import SavedShard


def parts_to_seed(saved: Sequence[SavedShard], base: Shard) -> Mapping[Path, frozenset[str]]:
    """Return, by the path of each ``RngState``, the parts that differed between saved ranks.

    A single rank does not show what would have been equal on others: the program's own generators
    go on, and the global ones are seeded anew, so that ranks do not draw the same.

    Args:
        saved: all saved shards; values are read from rank 1 on until every part has differed.
        base: the values of ``saved[0]``.
    """
    mine = {path: dict(_parts(node)) for path, node in rng_nodes(base.tree())}
    anew: dict[Path, set[str]] = {path: set() for path in mine}
    if len(saved) == 1:
        for path, parts in mine.items():
            anew[path] = {part for part in parts if not part.startswith("generator ")}
    for other in saved[1:]:
        if all(anew[path] >= parts.keys() for path, parts in mine.items()):
            break
        theirs = {path: dict(_parts(node)) for path, node in rng_nodes(other.values().tree())}
        for path, parts in mine.items():
            anew[path] |= _differing(saved[0], other, parts, theirs.get(path, {}))
    return {path: frozenset(parts) for path, parts in anew.items()}


def _parts(node: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a saved ``RngState`` by the names that ``RngState.reseed`` has for them."""
    state = node.state
    for part in ("python", "numpy", "torch"):
        if part in state:
            yield part, state[part]
    for index, device in enumerate(state.get("cuda", ())):
        yield f"cuda {index}", device
    for name, generator in state.get("generators", {}).items():
        yield f"generator {name}", generator


def _differing(
    one: SavedShard, other: SavedShard, mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> set[str]:
    differing = set(mine.keys() - theirs.keys())
    of_tensor: dict[str, str] = {}
    for part in mine.keys() & theirs.keys():
        comparison = TreeComparison()
        comparison.node(mine[part], theirs[part], (part,))
        if comparison.different:
            differing.add(part)
        of_tensor |= dict.fromkeys(comparison.tensors, part)
    return differing | {of_tensor[name] for name in one.differing(other, of_tensor)}
