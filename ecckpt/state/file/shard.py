"""Reading: the bytes of a shard become tensors that look into them, and a tree of values."""

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
from ecckpt.state.tensors.sharding import Sharding
from ecckpt.state.tree.decoding import MALFORMED, decode
from ecckpt.state.tree.nodes import StoredTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard, read. Its tensors are views: the buffer must outlive them and stay unchanged.

    ``tensors`` has every name, tied ones included (they are one tensor); ``shardings`` says of the
    names that are parts of global tensors which part they are. With a ``seed``, generators of
    random numbers are seeded from it instead of restored.
    """

    tensors: Mapping[str, torch.Tensor]
    shardings: Mapping[str, Sharding]
    aliases: Mapping[str, str]
    _names: tuple[str, ...]
    packed_tree: bytes
    seed: bytes = b""
    # Made once, as far as they are made; not taken over by `replace`, which may change the tensors.
    _stored: list[StoredTensor] = field(default_factory=list, init=False)
    _tree: list[dict[Any, Any]] = field(default_factory=list, init=False)

    def tree(self) -> dict[Any, Any]:
        """The state, with a ``StoredTensor`` for each tensor; the containers are new every time."""
        return self._tree.pop() if self._tree else self._decoded()

    def check(self) -> None:
        """Raise ``CorruptFragment`` for a malformed tree, which ``tree`` would do."""
        self._tree[:] = [self._decoded()]  # not made twice, for the first who wants it

    def _decoded(self) -> dict[Any, Any]:
        if not self._stored:
            self._stored.extend(_stored(self.tensors, self._names, self.shardings))
        tree = decode(self.packed_tree, self._stored.__getitem__)
        if not isinstance(tree, dict):
            raise CorruptFragment("the state of a shard is no dict")
        return tree


@dataclass(frozen=True, slots=True)
class Index:
    """The header of a shard, read: its tensors as views, and where the values lie.

    Nothing but the header need be there yet for the views to be made.
    """

    notes: ShardNotes
    tensors: Views
    values: tuple[int, int]
    blob: TensorEntry


def read_shard(buffer: memoryview) -> Shard:
    """Parse the shard that fills ``buffer``; its tensors are views of it, nothing is copied.

    Raises ``CorruptFragment`` for anything but a shard, ``VersionMismatch`` for one of another
    format. What it allocates is bounded by the length of the buffer.
    """
    return read_values(read_index(buffer), buffer)


def read_index(buffer: memoryview) -> Index:
    """The first half of ``read_shard``: needs the header in ``buffer``, nothing else."""
    buffer = memoryview(buffer).cast("B")
    with collector_paused():
        header = parse_header(buffer)
        notes = parse_notes(header.metadata)
        blob, start = header.values, header.data_start
        views = Views.of(buffer, header, notes)
    return Index(notes, views, (start + blob.begin, start + blob.end), blob)


def read_values(index: Index, buffer: memoryview) -> Shard:
    """The second half of ``read_shard``: needs the values in ``buffer``."""
    values = bytes(memoryview(buffer).cast("B")[slice(*index.values)])
    with collector_paused():
        names, tree = _unpack(values, index.blob)
        aliases = _checked_aliases(index.tensors, index.notes)
        shard = _shard(index.tensors.with_aliases(aliases), index.notes, names, tree)
        shard.check()  # a malformed tree is found now, not when half of a job has restored
    return shard


def outline(header: ShardHeader, notes: ShardNotes, values: bytes) -> Shard:
    """A shard of which only the header and the values were read: its tensors are meta tensors."""
    names, tree = _unpack(values, header.values)
    forms = zip(header.names[:-1], tensor_forms(header, notes), strict=True)
    tensors = {name: meta_tensor(tuple(form.shape), form.dtype) for name, form in forms}
    for alias, name in _checked_aliases(tensors, notes).items():
        tensors[alias] = tensors[name]
    return _shard(tensors, notes, names, tree)


def meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values. By way of bytes: torch warns of some dtypes when it makes them."""
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.empty(size_bytes, dtype=torch.uint8, device="meta").view(dtype).view(shape)


def _unpack(values: bytes, blob: TensorEntry) -> tuple[tuple[str, ...], bytes]:
    try:
        names, tree = msgpack.unpackb(values)
        if blob.code != "U8" or type(tree) is not bytes or type(names) is not list:
            raise TypeError("its parts have other types")
    except (*MALFORMED, msgpack.UnpackException) as error:
        raise CorruptFragment(f"the values of a shard cannot be read: {error}") from error
    return tuple(names), tree


def _stored(
    tensors: Mapping[str, torch.Tensor], names: tuple[str, ...], shardings: Mapping[str, Sharding]
) -> list[StoredTensor]:
    if isinstance(tensors, Views):
        return tensors.stored(names, shardings)
    return [StoredTensor.of(name, tensors, shardings.get(name)) for name in names]


def _checked_aliases(stored: Collection[str], notes: ShardNotes) -> Mapping[str, str]:
    if not (
        all(name in stored for name in notes.aliases.values())
        and not any(alias in stored for alias in notes.aliases)
    ):
        raise CorruptFragment("a shard whose aliases do not lead to tensors")
    return notes.aliases


def _shard(
    tensors: Mapping[str, torch.Tensor], notes: ShardNotes, names: tuple[str, ...], tree: bytes
) -> Shard:
    shardings = dict(notes.shardings)
    for alias, name in notes.aliases.items():
        if name in shardings:
            shardings[alias] = shardings[name]
    known = set(tensors)
    try:
        complete = set(names) == known and len(names) == len(known)
    except TypeError:
        complete = False
    if not complete or not shardings.keys() <= known:
        raise CorruptFragment("a shard whose list of tensors is not that of its header")
    return Shard(tensors, shardings, dict(notes.aliases), names, tree)
