"""``reshape``: makes this rank's shard from shards of another number of ranks or another mesh.

``client/restore`` uses it if ``is_relaid`` or if the number of ranks has changed.

Global tensors (DTensors, and plain tensors declared equal on all ranks) are cut as the live state
wants them. For everything else:

- same number of ranks: each rank keeps what it saved;
- another number: what was equal on all ranks goes to all new ranks. Random number generators that
  differed are seeded anew (rng_parts.py); anything else that differed is an error with its path,
  because no new rank is the one that saved it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ecckpt.errors import StateMismatch
from ecckpt.state.file.shard import Shard
from ecckpt.state.load.load import survey
from ecckpt.state.paths import describe
from ecckpt.state.reshard.diff import differences
from ecckpt.state.reshard.rng_parts import parts_to_seed
from ecckpt.state.reshard.saved_shard import Form, SavedShard
from ecckpt.state.tensors.boxes import Common, Cut, in_common, whole
from ecckpt.state.tensors.sharding import Sharding, Shardings, is_dtensor


@dataclass(frozen=True, slots=True)
class Place:
    """This rank, the number of ranks that restore, and the number of ranks that saved."""

    rank: int
    world_size: int
    saved_by: int

    @property
    def same_size(self) -> bool:
        """Whether as many ranks restore as saved, so that each has a shard of its own."""
        return self.world_size == self.saved_by


def is_relaid(state: dict[Any, Any], shard: Shard) -> bool:
    """Return whether ``state`` wants any global tensor cut differently from ``shard``, or whole."""
    known = Shardings()
    return any(sharding.plain for sharding in shard.shardings.values()) or any(
        _wish(like, shard, name, known) not in (None, _Wish(shard.shardings.get(name)))
        for name, like in survey(state, shard).items()
    )


def reshape(
    state: dict[Any, Any], place: Place, saved: Sequence[SavedShard]
) -> tuple[Shard, tuple[str, ...]]:
    """Make the shard that this rank would have saved.

    Args:
        state: the live state; only its structure and the layouts of its tensors are used.
        place: this rank among the ranks that restore.
        saved: all saved shards in the order of their ranks. Of each, only the bytes that this rank
            needs are read.

    Returns:
        The shard, and the random number generators that a load will seed anew, each as
        ``path: part``. Tensors that do not fit ``state`` have no data; ``check`` reports them.

    Raises:
        StateMismatch: data that differ between the saved ranks, on another number of ranks; or
            parts that do not make up a global tensor.
    """
    own = place.rank if place.same_size else 0
    base = saved[own].values()
    problems: list[str] = []
    reseeded: tuple[str, ...] = ()
    if not place.same_size:
        anew = parts_to_seed(saved, base)
        reseeded = tuple(
            f"{describe(path)}: {part}" for path, parts in anew.items() for part in sorted(parts)
        )
        base = replace(base, seed=_seed(base, place), seeded=anew)
        # Every saved shard is compared with that of rank 0. The new ranks share the comparisons.
        for rank in range(1 + place.rank, place.saved_by, place.world_size):
            problems += [
                f"{path}: differs between rank 0 and rank {rank} of the {place.saved_by} that "
                f"saved; {place.world_size} ranks restore, which can only get what all saved "
                "ranks had in common"
                for path in differences(saved[own], base, saved[rank])
            ]
        if problems:
            raise StateMismatch(problems)
    return _Assembly(base, saved, place, own).assemble(survey(state, base)), reseeded


def _seed(base: Shard, place: Place) -> bytes:
    """Return a seed: equal for each restore of this state on this world, different by rank."""
    seed = hashlib.sha256(base.packed_tree)
    seed.update(f" {place.rank} of {place.world_size} ".encode())
    return seed.digest()


# -- global tensors -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wish:
    """What this rank wants of a global tensor: a part of it, or all of it (None)."""

    sharding: Sharding | None


def _wish(like: torch.Tensor | None, saved: Shard, name: str, known: Shardings) -> _Wish | None:
    """Return what the live state wants of a tensor; None if nothing can satisfy it."""
    # No live tensor: an object gets it from load_state_dict. A DTensor would need a mesh; a tensor
    # that was declared equal on all ranks is given whole.
    if like is None:
        sharding = saved.shardings.get(name)
        return _Wish(None) if sharding and sharding.plain else None
    if not is_dtensor(like):
        return _Wish(None)
    mine = known.sharding_of(like)  # type: ignore[arg-type]
    sharding, whole_one = saved.shardings.get(name), saved.tensors[name]
    shape = sharding.shape if sharding else tuple(whole_one.shape)
    if mine.shape == shape:
        return _Wish(mine)
    # `like` is the parameter of an optimizer's tensor, whose shape may be another one.
    try:
        replace(mine, shape=shape).cut()
    except ValueError:
        return None
    stride = sharding.stride if sharding else whole_one.stride()
    return _Wish(known.sharding_like(like, shape, stride))  # type: ignore[arg-type]


class _Assembly:
    """Turns ``base``, one saved shard, into this rank's: global tensors are cut anew and filled.

    All copies are planned first and then executed shard by shard, so that each saved shard is read
    once, in few requests, and its memory is released before the next one.
    """

    def __init__(self, base: Shard, saved: Sequence[SavedShard], place: Place, own: int) -> None:
        self._base, self._saved = base, saved
        self._place, self._own = place, own
        self._near = [shard.is_near for shard in saved]
        self._pieces: dict[Any, list[tuple[int, Common]]] = {}
        self._targets: dict[Any, torch.Tensor] = {}

    def assemble(self, likes: Mapping[str, torch.Tensor]) -> Shard:
        """Read everything; ``likes`` are the live tensors that show how global ones are wanted."""
        tensors = dict(self._base.tensors)
        shardings: dict[str, Sharding] = {}
        known = Shardings()
        kept: list[str] = []
        problems: list[str] = []
        for name, sharding in ((name, self._base.shardings.get(name)) for name in tensors):
            like = likes.get(name)
            if sharding is None and not is_dtensor(like):
                kept.append(name)
                continue
            wish = _wish(like, self._base, name, known)
            if wish is None:
                # A meta tensor: no code can copy from it, so bytes that were never read cannot get
                # into the state. `check` reports the mismatch.
                tensors[name] = tensors[name].to("meta")
                if sharding is not None:
                    shardings[name] = sharding
                continue
            if wish.sharding is not None:
                shardings[name] = wish.sharding
            try:
                tensors[name] = self._planned(name, wish)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise StateMismatch(problems)
        self._saved[self._own].read_tensors(kept)
        for rank, shard in enumerate(self._saved):
            shard.copy_planned()
            if rank != self._own:  # the result has views of this rank's own shard
                shard.release()
        return replace(self._base, tensors=tensors, shardings=shardings)

    def _planned(self, name: str, wish: _Wish) -> torch.Tensor:
        """Plan the copies of a global tensor; return the tensor that they will fill.

        Raises ``ValueError`` if the saved parts do not make it up.
        """
        sharding = self._base.shardings.get(name)
        source = self._base.tensors[name]
        cut = whole(sharding.shape if sharding else tuple(source.shape))
        if wish.sharding is not None:
            mine = wish.sharding.cut()
            if mine is None:  # this rank is outside the mesh
                return torch.empty(0, dtype=source.dtype)
            if sharding is None:
                return self._cut_from(
                    name, [(self._own, common) for common in in_common(cut, mine)], mine
                )
            cut = mine
        assert sharding is not None
        forms = tuple(shard.form(name) for shard in self._saved)
        if (forms, cut) not in self._pieces:  # a model has many tensors, but few distinct forms
            self._pieces[forms, cut] = _pieces(sharding, cut, forms, self._near, self._place)
        return self._cut_from(name, self._pieces[forms, cut], cut)

    def _cut_from(self, name: str, pieces: list[tuple[int, Common]], cut: Cut) -> torch.Tensor:
        dtype = self._base.tensors[name].dtype
        if not pieces:
            return torch.empty(cut.shape, dtype=dtype)
        stored = tuple((rank, self._saved[rank].stored_name(name)) for rank, _ in pieces)
        if (cut, stored) not in self._targets:  # tied tensors share one target
            target = self._targets[cut, stored] = torch.empty(cut.shape, dtype=dtype)
            for rank, common in pieces:
                self._saved[rank].plan_copy(name, common, target)
        return self._targets[cut, stored]


def _pieces(
    sharding: Sharding, cut: Cut, forms: Sequence[Form], near: Sequence[bool], place: Place
) -> list[tuple[int, Common]]:
    """Return the boxes to copy as (rank of the saved shard, box).

    Of several replicas of a part, the one on this node is read; without one, the first at or after
    this rank's number, so that the reads of all ranks spread over the replicas.

    Raises ``ValueError`` if the saved parts do not make up ``cut``.
    """
    holders: dict[Cut, list[int]] = {}
    for rank, (part, shape) in enumerate(forms):
        piece = part.cut() if part else None
        if part is None or piece is None:  # that rank is outside the mesh
            continue
        if part.layout != sharding.layout or piece.shape != shape:
            raise ValueError(
                f"saved as {sharding}, but by rank {rank} as {part} with shape {list(shape)}"
            )
        holders.setdefault(piece, []).append(rank)
    pieces = []
    for piece, ranks in holders.items():
        nearest = min(ranks, key=lambda rank: (not near[rank], (rank - place.rank) % len(forms)))
        pieces += [(nearest, common) for common in in_common(piece, cut)]
    have, want = sum(math.prod(common.shape) for _, common in pieces), math.prod(cut.shape)
    if have != want:
        raise ValueError(f"{have} of {want} elements were saved")
    return pieces
