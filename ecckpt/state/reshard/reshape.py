"""From the shards of any world to one for this rank: DTensors cut anew, the rest by rule.

On the same world size each rank keeps what it saved beside DTensors. On another one, what was the
same on all ranks goes to all ranks; generators of random numbers are seeded anew; anything else
belongs to a rank that is no more, and is refused by path.
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
from ecckpt.state.reshard.diff import differences, rng_paths
from ecckpt.state.reshard.saved_shard import Form, SavedShard
from ecckpt.state.tensors.boxes import Common, Cut, in_common, whole
from ecckpt.state.tensors.sharding import Sharding, Shardings, is_dtensor


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's place in the world that restores, and how many ranks saved."""

    rank: int
    world_size: int
    saved_by: int

    @property
    def same_size(self) -> bool:
        """Whether as many ranks restore as saved: then each has a shard of its own."""
        return self.world_size == self.saved_by


def is_relaid(state: dict[Any, Any], shard: Shard) -> bool:
    """Whether ``state`` cuts a global tensor in another way than ``shard``, or not at all."""
    known = Shardings()
    return any(sharding.plain for sharding in shard.shardings.values()) or any(
        _wish(like, shard, name, known) not in (None, _Wish(shard.shardings.get(name)))
        for name, like in survey(state, shard).items()
    )


def reshape(
    state: dict[Any, Any], place: Place, saved: Sequence[SavedShard]
) -> tuple[Shard, tuple[str, ...]]:
    """The shard that this rank would have saved, and the paths of generators that it seeds anew.

    ``saved`` are all shards of the saved world, in the order of their ranks; of each only what this
    rank needs is read. Of ``state`` only the structure and the layout of its tensors are looked
    at. What does not fit it is left for ``check`` to find; sharded tensors are then without data.

    Raises ``StateMismatch`` for per-rank data on another world size, and for parts that do not make
    up a whole.
    """
    own = place.rank if place.same_size else 0
    base = saved[own].values()
    problems: list[str] = []
    reseeded: tuple[str, ...] = ()
    if not place.same_size:
        reseeded = tuple(rng_paths(base.tree()))
        base = replace(base, seed=_seed(base, place))
        # All are compared with the first, each by one of the new ranks.
        for rank in range(1 + place.rank, place.saved_by, place.world_size):
            problems += [
                f"{path}: not the same on rank 0 and rank {rank} of the {place.saved_by} that "
                f"saved; {place.world_size} restore, and only what all had can be handed over"
                for path in differences(saved[own], base, saved[rank])
            ]
        if problems:
            raise StateMismatch(problems)
    return _Assembly(base, saved, place, own).run(survey(state, base)), reseeded


def _seed(base: Shard, place: Place) -> bytes:
    """The same for every restore of this state on this world, another one for each rank."""
    seed = hashlib.sha256(base.packed_tree)
    seed.update(f" {place.rank} of {place.world_size} ".encode())
    return seed.digest()


# -- global tensors -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wish:
    """How this rank wants a global tensor: a part of it, or (None) all of it."""

    sharding: Sharding | None


def _wish(like: torch.Tensor | None, saved: Shard, name: str, known: Shardings) -> _Wish | None:
    """None where a tensor of the saved shape cannot be placed as ``like`` is."""
    if like is None:  # handed to an object as it was: a DTensor has no mesh then
        sharding = saved.shardings.get(name)
        return _Wish(None) if sharding and sharding.plain else None
    if not is_dtensor(like):
        return _Wish(None)
    mine = known.of(like)  # type: ignore[arg-type]
    sharding, whole_one = saved.shardings.get(name), saved.tensors[name]
    shape = sharding.shape if sharding else tuple(whole_one.shape)
    if mine.shape == shape:
        return _Wish(mine)
    try:
        replace(mine, shape=shape).cut()
    except ValueError:
        return None
    stride = sharding.stride if sharding else whole_one.stride()
    return _Wish(known.like(like, shape, stride))  # type: ignore[arg-type]


class _Assembly:
    """Makes ``base`` into this rank's shard: global tensors cut anew and filled, the rest read."""

    def __init__(self, base: Shard, saved: Sequence[SavedShard], place: Place, own: int) -> None:
        self._base, self._saved = base, saved
        self._place, self._own = place, own
        self._near = [shard.is_near for shard in saved]
        self._pieces: dict[Any, list[tuple[int, Common]]] = {}
        self._made: dict[Any, torch.Tensor] = {}

    def run(self, likes: Mapping[str, torch.Tensor]) -> Shard:
        """Read everything; ``likes`` say how global tensors are wanted."""
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
                # Nobody may take for data what was never read: nothing can be copied from meta.
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
        self._saved[self._own].bring(kept)
        for rank, shard in enumerate(self._saved):
            shard.copy_planned()
            if rank != self._own:  # of which views are handed out
                shard.release()
        return replace(self._base, tensors=tensors, shardings=shardings)

    def _planned(self, name: str, wish: _Wish) -> torch.Tensor:
        """A tensor that will be filled; ``ValueError`` if there are not the parts to do it."""
        sharding = self._base.shardings.get(name)
        source = self._base.tensors[name]
        cut = whole(sharding.shape if sharding else tuple(source.shape))
        if wish.sharding is not None:
            mine = wish.sharding.cut()
            if mine is None:  # outside of the mesh
                return torch.empty(0, dtype=source.dtype)
            if sharding is None:
                return self._cut_from(
                    name, [(self._own, each) for each in in_common(cut, mine)], mine
                )
            cut = mine
        assert sharding is not None
        forms = tuple(shard.form(name) for shard in self._saved)
        if (forms, cut) not in self._pieces:  # a model has many tensors, but of few forms
            self._pieces[forms, cut] = _pieces(sharding, cut, forms, self._near, self._place)
        return self._cut_from(name, self._pieces[forms, cut], cut)

    def _cut_from(self, name: str, pieces: list[tuple[int, Common]], cut: Cut) -> torch.Tensor:
        dtype = self._base.tensors[name].dtype
        if not pieces:
            return torch.empty(cut.shape, dtype=dtype)
        stored = tuple((rank, self._saved[rank].stored_name(name)) for rank, _ in pieces)
        if (cut, stored) not in self._made:  # tied tensors stay one
            target = self._made[cut, stored] = torch.empty(cut.shape, dtype=dtype)
            for rank, common in pieces:
                self._saved[rank].plan_copy(name, common, target)
        return self._made[cut, stored]


def _pieces(
    sharding: Sharding, cut: Cut, forms: Sequence[Form], near: Sequence[bool], place: Place
) -> list[tuple[int, Common]]:
    """Which boxes to copy from which saved shards; ``ValueError`` if they do not make up ``cut``.

    Of replicas one is taken: this node's own, or else the next in turn.
    """
    holders: dict[Cut, list[int]] = {}
    for rank, (part, shape) in enumerate(forms):
        piece = part.cut() if part else None
        if part is None or piece is None:  # outside of the mesh
            continue
        if part.layout != sharding.layout or piece.shape != shape:
            raise ValueError(f"saved as {sharding} and, by rank {rank}, as {part}: {list(shape)}")
        holders.setdefault(piece, []).append(rank)
    pieces = []
    for piece, ranks in holders.items():
        nearest = min(ranks, key=lambda rank: (not near[rank], (rank - place.rank) % len(forms)))
        pieces += [(nearest, common) for common in in_common(piece, cut)]
    have, want = sum(math.prod(common.shape) for _, common in pieces), math.prod(cut.shape)
    if have != want:
        raise ValueError(f"{have} of {want} elements were saved")
    return pieces
