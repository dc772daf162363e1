"""Reading: the bytes of a shard become tensors that look into them, and a tree of values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from ecckpt.errors import CorruptFragment
from ecckpt.state.dtypes import BYTES_DTYPES, DTYPE_OF
from ecckpt.state.layout import Entry, Header, parse_header
from ecckpt.state.metadata import Notes, parse_notes
from ecckpt.state.paths import VALUES_NAME
from ecckpt.state.reading import MALFORMED, decode
from ecckpt.state.sharding import Sharding
from ecckpt.state.stored import StoredTensor


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

    def tree(self) -> dict[Any, Any]:
        """The state, with a ``StoredTensor`` for each tensor; the containers are new every time."""
        tree = decode(self.packed_tree, self._leaf)
        if not isinstance(tree, dict):
            raise CorruptFragment("the state of a shard is no dict")
        return tree

    def _leaf(self, index: int) -> StoredTensor:
        name = self._names[index]
        return StoredTensor(name, self.tensors[name], self.shardings.get(name))


@dataclass(frozen=True, slots=True)
class Index:
    """The header of a shard, read: its tensors as views, where they lie, and where the values.

    Nothing but the header need be there yet for the views to be made.
    """

    notes: Notes
    tensors: dict[str, torch.Tensor]
    places: Mapping[str, tuple[int, int]]
    values: tuple[int, int]
    blob: Entry


def read_shard(buffer: memoryview) -> Shard:
    """Parse the shard that fills ``buffer``; its tensors are views of it, nothing is copied.

    Raises ``CorruptFragment`` for anything but a shard, ``VersionMismatch`` for one of another
    format. What it allocates is bounded by the length of the buffer.
    """
    return read_values(read_index(buffer), buffer)


def read_index(buffer: memoryview) -> Index:
    """The first half of ``read_shard``: needs the header in ``buffer``, nothing else."""
    buffer = memoryview(buffer).cast("B")
    header = parse_header(buffer)
    notes = parse_notes(header.metadata)
    if not header.entries or header.entries[-1].name != VALUES_NAME:
        raise CorruptFragment("a shard without values at its end")
    *entries, blob = header.entries
    start = header.data_start
    return Index(
        notes,
        _views(buffer, start, entries, notes),
        {entry.name: (start + entry.begin, start + entry.end) for entry in entries},
        (start + blob.begin, start + blob.end),
        blob,
    )


def read_values(index: Index, buffer: memoryview) -> Shard:
    """The second half of ``read_shard``: needs the values in ``buffer``."""
    values = bytes(memoryview(buffer).cast("B")[slice(*index.values)])
    names, tree = _unpack(values, index.blob)
    shard = _shard(dict(index.tensors), index.notes, names, tree)
    shard.tree()  # a malformed tree is found now, not when half of a job has restored
    return shard


def outline(header: Header, notes: Notes, values: bytes) -> Shard:
    """A shard of which only the header and the values were read: its tensors are meta tensors."""
    *entries, blob = header.entries
    names, tree = _unpack(values, blob)
    tensors = {}
    for entry in entries:
        bytes_name = notes.dtypes.get(entry.name)
        dtype = BYTES_DTYPES[bytes_name] if bytes_name else DTYPE_OF[entry.code]
        shape = entry.shape[:-1] if bytes_name else entry.shape
        tensors[entry.name] = meta_tensor(shape, dtype)
    return _shard(tensors, notes, names, tree)


def meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values. By way of bytes: torch warns of some dtypes when it makes them."""
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.empty(size_bytes, dtype=torch.uint8, device="meta").view(dtype).view(shape)


def _unpack(values: bytes, blob: Entry) -> tuple[tuple[str, ...], bytes]:
    try:
        names, tree = msgpack.unpackb(values)
        if blob.code != "U8" or type(tree) is not bytes or type(names) is not list:
            raise TypeError("its parts have other types")
    except (*MALFORMED, msgpack.UnpackException) as error:
        raise CorruptFragment(f"the values of a shard cannot be read: {error}") from error
    return tuple(names), tree


def _views(
    buffer: memoryview, data_start: int, entries: list[Entry], notes: Notes
) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():  # nobody writes through these views, read-only or not
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        data = torch.frombuffer(buffer, dtype=torch.uint8)[data_start:]
    try:
        return {entry.name: _view(data, entry, notes) for entry in entries}
    except MALFORMED as error:
        raise CorruptFragment(f"a tensor of a shard cannot be read: {error}") from error


def _view(data: torch.Tensor, entry: Entry, notes: Notes) -> torch.Tensor:
    dtype, shape = DTYPE_OF[entry.code], entry.shape
    if entry.name in notes.dtypes:
        dtype = BYTES_DTYPES[notes.dtypes[entry.name]]
        if entry.code != "U8" or shape[-1] != dtype.itemsize:
            raise ValueError(f"{entry.name!r:.80} is no {dtype} as bytes")
        shape = shape[:-1]
    if entry.begin == entry.end:
        return torch.empty(shape, dtype=dtype)
    view = data[entry.begin : entry.end].view(dtype).view(shape)
    sharding = notes.shardings.get(entry.name)
    if sharding and sharding.coordinate is not None and len(sharding.shape) != len(shape):
        raise ValueError(f"{entry.name!r:.80} has another rank than the tensor it is a part of")
    return view


def _shard(
    tensors: dict[str, torch.Tensor], notes: Notes, names: tuple[str, ...], tree: bytes
) -> Shard:
    stored = set(tensors)
    if not stored.issuperset(notes.aliases.values()) or stored & notes.aliases.keys():
        raise CorruptFragment("a shard whose aliases do not lead to tensors")
    shardings = dict(notes.shardings)
    for alias, name in notes.aliases.items():
        tensors[alias] = tensors[name]
        if name in shardings:
            shardings[alias] = shardings[name]
    try:
        complete = set(names) == set(tensors) and len(names) == len(tensors)
    except TypeError:
        complete = False
    if not complete or not shardings.keys() <= tensors.keys():
        raise CorruptFragment("a shard whose list of tensors is not that of its header")
    return Shard(tensors, shardings, dict(notes.aliases), names, tree)
