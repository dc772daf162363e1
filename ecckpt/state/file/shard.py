"""The reader of a shard: from its bytes to tensors (views of them) and the tree of the state.

``load`` fills a state from a ``Shard``. A restore reads in two steps, so that it can start before
all bytes have arrived: ``read_index`` needs the header, ``read_values`` the values blob.
``outline`` reads shards of other ranks without the bytes of their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from ecckpt.errors import CorruptFragment
from ecckpt.memory.gc_pause import collector_paused
from ecckpt.state.file.header import ShardHeader, parse_header
from ecckpt.state.file.layout import TensorEntry
from ecckpt.state.file.metadata import ShardNotes, parse_notes
from ecckpt.state.file.views import Views, tensor_forms
from ecckpt.state.paths import Path
from ecckpt.state.tensors.sharding import Sharding
from ecckpt.state.tree.decoding import MALFORMED, decode
from ecckpt.state.tree.nodes import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A parsed shard.

    Its tensors are views of the caller's buffer, which must stay alive and unchanged as long as any
    of them is used.

    Attributes:
        tensors: every name, aliases included; an alias has the same tensor as its other name.
        shardings: for names whose tensor is a part of a global tensor, which part it is.
        aliases: another name of a tied tensor -> the name that it is stored under.
        layouts: for names of tensors whose memory was not in C order, its order.
        packed_tree: the state without its tensors, encoded (``state/tree``).
        seed: if not empty, a load seeds random number generators from it and ignores their saved
            states (a restore on another number of ranks).
        seeded: of which ``RngState``, by path, which parts; all of one that is not named.
    """

    tensors: Mapping[str, torch.Tensor]
    shardings: Mapping[str, Sharding]
    aliases: Mapping[str, str]
    layouts: Mapping[str, tuple[int, ...]]
    _names: tuple[str, ...]
    packed_tree: bytes
    seed: bytes = b""
    seeded: Mapping[Path, frozenset[str]] = field(default_factory=dict)
    # Caches, filled at first use. `init=False`: `dataclasses.replace` must not copy them, because
    # it may exchange the tensors.
    _stored: list[StoredTensor] = field(default_factory=list, init=False)
    _tree: list[dict[Any, Any]] = field(default_factory=list, init=False)

    def tree(self) -> dict[Any, Any]:
        """Decode the state, with a ``StoredTensor`` in place of each tensor.

        Each call returns new containers, which the caller owns. Raises ``CorruptFragment`` if the
        tree is malformed.
        """
        return self._tree.pop() if self._tree else self._decoded()

    def check(self) -> None:
        """Decode the tree now; raises ``CorruptFragment`` if it is malformed."""
        self._tree[:] = [self._decoded()]  # the next call of `tree` returns this one

    def _decoded(self) -> dict[Any, Any]:
        if not self._stored:
            stored = _stored(self.tensors, self._names, self.shardings)
            for each in stored if self.layouts else ():
                each.order = self.layouts.get(each.name)
            self._stored.extend(stored)
        tree = decode(self.packed_tree, self._stored.__getitem__)
        if not isinstance(tree, dict):
            raise CorruptFragment("the state in a shard is not a dict")
        return tree


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A parsed header with views of the tensors.

    Only the header has to be in the buffer; the bytes of tensors and values may still be missing.

    Attributes:
        notes: the parsed metadata.
        tensors: views of the buffer by name, without aliases.
        values: begin and end of the values blob, in bytes from the start of the shard.
        blob: the header's entry of the values blob.
    """

    notes: ShardNotes
    tensors: Views
    values: tuple[int, int]
    blob: TensorEntry


def read_shard(buffer: memoryview) -> Shard:
    """Parse the shard that fills ``buffer``; its tensors are views of the buffer.

    The caller owns the buffer, and keeps it unchanged while it uses the shard. The memory that this
    allocates is bounded by the length of the buffer.

    Raises:
        CorruptFragment: the bytes are not a shard.
        VersionMismatch: a shard of another format version.
    """
    return read_values(read_index(buffer), buffer)


def read_index(buffer: memoryview) -> ShardIndex:
    """Do the first half of ``read_shard``, which needs only the header in ``buffer``."""
    buffer = memoryview(buffer).cast("B")
    with collector_paused():
        header = parse_header(buffer)
        notes = parse_notes(header.metadata)
        blob, start = header.values, header.data_start
        views = Views.of_shard(buffer, header, notes)
    return ShardIndex(notes, views, (start + blob.begin, start + blob.end), blob)


def read_values(index: ShardIndex, buffer: memoryview) -> Shard:
    """Do the second half of ``read_shard``, which needs the values blob in ``buffer``."""
    values = bytes(memoryview(buffer).cast("B")[slice(*index.values)])
    with collector_paused():
        names, tree = _unpack(values, index.blob)
        aliases = _checked_aliases(index.tensors, index.notes)
        shard = _shard(index.tensors.with_aliases(aliases), index.notes, names, tree)
        # Decode now: a malformed tree must fail before any rank has changed its state.
        shard.check()
    return shard


def outline(header: ShardHeader, notes: ShardNotes, values: bytes) -> Shard:
    """Make a shard from its header and values blob alone; its tensors are meta tensors.

    Raises ``CorruptFragment`` if header, notes and values do not belong together.
    """
    names, tree = _unpack(values, header.values)
    forms = zip(header.names[:-1], tensor_forms(header, notes), strict=True)
    tensors = {name: meta_tensor(tuple(form.shape), form.dtype) for name, form in forms}
    for alias, name in _checked_aliases(tensors, notes).items():
        tensors[alias] = tensors[name]
    return _shard(tensors, notes, names, tree)


def meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor, which has no memory.

    It is made as bytes and viewed as ``dtype``, because torch warns about some dtypes when it
    creates tensors of them.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.empty(size_bytes, dtype=torch.uint8, device="meta").view(dtype).view(shape)


def _unpack(values: bytes, blob: TensorEntry) -> tuple[tuple[str, ...], bytes]:
    try:
        names, tree = msgpack.unpackb(values)
        if blob.code != "U8" or type(tree) is not bytes or type(names) is not list:
            raise TypeError("unexpected types")
    except (*MALFORMED, msgpack.UnpackException) as error:
        raise CorruptFragment(f"the values of a shard cannot be read: {error}") from error
    return tuple(names), tree


def _stored(
    tensors: Mapping[str, torch.Tensor], names: tuple[str, ...], shardings: Mapping[str, Sharding]
) -> list[StoredTensor]:
    if isinstance(tensors, Views):
        return tensors.stored(names, shardings)
    return [StoredTensor.of_tensor(name, tensors, shardings.get(name)) for name in names]


def _checked_aliases(stored: Collection[str], notes: ShardNotes) -> Mapping[str, str]:
    if not (
        all(name in stored for name in notes.aliases.values())
        and not any(alias in stored for alias in notes.aliases)
    ):
        raise CorruptFragment("the aliases in a shard do not match its tensors")
    return notes.aliases


def _shard(
    tensors: Mapping[str, torch.Tensor], notes: ShardNotes, names: tuple[str, ...], tree: bytes
) -> Shard:
    shardings, layouts = dict(notes.shardings), dict(notes.layouts)
    for alias, name in notes.aliases.items():
        if name in shardings:
            shardings[alias] = shardings[name]
        if name in layouts:
            layouts[alias] = layouts[name]
    known = set(tensors)
    try:
        complete = set(names) == known and len(names) == len(known)
    except TypeError:
        complete = False
    if not complete or not (shardings.keys() | layouts.keys()) <= known:
        raise CorruptFragment("the tensors in a shard's values differ from those in its header")
    for name, order in layouts.items():
        if len(order) != tensors[name].dim():
            raise CorruptFragment(f"{name!r:.80} has another number of dimensions than its layout")
    return Shard(
        tensors=tensors,
        shardings=shardings,
        aliases=dict(notes.aliases),
        layouts=layouts,
        _names=names,
        packed_tree=tree,
    )
