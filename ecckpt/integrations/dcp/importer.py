"""Imports a folder of DCP as a run: ``ecckpt import RUN DIR``.

The folder's ``.metadata`` and the head of each entry in its files are pickles. Nothing is
unpickled: ``pickle_opcodes.py`` interprets the opcodes as data. The run gets the checkpoint that
``Writer`` would have saved from one rank; ``dcp.load`` with a ``Reader`` loads it on any number of
ranks.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ecckpt.client.checkpointer import Checkpointer
from ecckpt.client.config import NodeConfig
from ecckpt.client.slot_mappings import Slots
from ecckpt.errors import EcckptError, InvalidFolder
from ecckpt.format.ids import check_run
from ecckpt.integrations.dcp.pickle_opcodes import (
    MALFORMED,
    Name,
    Pairs,
    PickledCall,
    read_opcodes,
)
from ecckpt.integrations.dcp.plan_shard import NOTES, DcpNotes, uncovered
from ecckpt.integrations.dcp.torch_archive import read_archive
from ecckpt.integrations.safetensors.importer import SAVE_TIMEOUT_S, Imported, require_new
from ecckpt.state.snapshot.plan import plan_shard

_METADATA_BYTES_MAX = 1 << 30  # bounds the memory that a damaged folder can take


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One name of the checkpoint. ``shape`` is that of a tensor; None for a value."""

    shape: tuple[int, ...] | None
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the ``torch.save`` archive of a box or value lies: file, offset and length in bytes."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Listing:
    """The parsed metadata of a folder.

    The key of a place is (name, offset of the box); the offset of a value is None.
    """

    entries: dict[str, _Entry]
    places: dict[tuple[str, tuple[int, ...] | None], _Place]
    paths: dict[str, tuple[str | int, ...]]


def import_dcp(
    run: str,
    folder: Path,
    *,
    root: Path | None = None,
    agents: Sequence[str] = (),
    step: int = 0,
) -> Imported:
    """Save the content of ``folder`` as the first generation of a new run with one rank.

    Args:
        run: name of the run; the agents must not know it yet.
        folder: a checkpoint of DCP. Tensors that consist of several boxes are joined in memory.
        root: folder of this node's agent, which is started if it does not run.
        agents: addresses of further agents, which hold fragments.
        step: the training step of the generation.

    Raises:
        InvalidFolder: the folder is not DCP's, incomplete or damaged.
        UnsupportedState: a value that only unpickling could make; the message has its name.
        InvalidConfig: an agent knows the run already.
    """
    check_run(run)
    state, notes = read_folder(folder)
    require_new(run, NodeConfig.from_environment(root), agents)
    with Checkpointer(
        run,
        root=root,
        agents=agents,
        save_timeout_s=SAVE_TIMEOUT_S,
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    ) as checkpointer:
        checkpointer.find()
        ticket = checkpointer.ticket(step)
        slots = Slots()
        try:
            ticket.stage(plan_shard({**state, NOTES: notes.render()}), slots)
        finally:
            slots.close()
        ticket.protect()
        ticket.commit()
        tensors = [state[name] for name in state.keys() - set(notes.values)]
        return Imported(
            run=run,
            generation=str(ticket.shard.generation),
            tensors=len(tensors),
            total_bytes=sum(tensor.nbytes for tensor in tensors),
            promise=checkpointer.promise,
        )


def read_folder(folder: Path) -> tuple[dict[str, Any], DcpNotes]:
    """Return the tensors and values of a folder by DCP's names, and their notes for a shard.

    Tensors may be views of the mapped files: do not write to them. Raises as ``import_dcp`` does.
    """
    listing = _read_listing(folder)
    files = _Files(folder)
    state: dict[str, Any] = {}
    values = []
    for name, entry in listing.entries.items():
        if entry.shape is None:
            values.append(name)
            state[name] = files.read(listing.places, name, None)
        else:
            state[name] = _tensor(name, entry, listing, files)
    return state, DcpNotes(tuple(values), listing.paths)


def _tensor(name: str, entry: _Entry, listing: _Listing, files: _Files) -> torch.Tensor:
    whole: torch.Tensor | None = None
    assert entry.shape is not None
    for chunk in entry.chunks:
        part = files.read(listing.places, name, chunk.offset)
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != chunk.shape:
            raise InvalidFolder(f"{name}: a box is not a tensor of shape {list(chunk.shape)}")
        if chunk.shape == entry.shape:
            return part
        if whole is None:
            size_bytes = math.prod(entry.shape) * part.dtype.itemsize
            whole = torch.empty(size_bytes, dtype=torch.uint8).view(part.dtype).view(entry.shape)
        if part.dtype != whole.dtype:
            raise InvalidFolder(f"{name}: {part.dtype} in one box, {whole.dtype} in another")
        box = whole
        for dim, (start, length) in enumerate(zip(chunk.offset, chunk.shape, strict=True)):
            box = box.narrow(dim, start, length)
        box.copy_(part)
    assert whole is not None, "_entry has checked that the boxes fill the tensor"
    return whole


class _Files:
    """The files of a folder; a file is mapped at its first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[str, memoryview] = {}

    def read(
        self,
        places: dict[tuple[str, tuple[int, ...] | None], _Place],
        name: str,
        offset: tuple[int, ...] | None,
    ) -> Any:
        """Read a box of a tensor, or a value."""
        place = places.get((name, offset))
        if place is None:
            raise InvalidFolder(f"{name}: the metadata has no place for it")
        data = self._map(place.file)[place.offset : place.offset + place.length]
        if len(data) != place.length:
            raise InvalidFolder(f"{self._folder / place.file} is cut off: {name} lies beyond")
        return read_archive(data, (name,))

    def _map(self, file: str) -> memoryview:
        if file not in self._mapped:
            path = self._folder / file
            try:
                with path.open("rb") as opened:
                    mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise InvalidFolder(f"{path} cannot be read: {error}") from error
            self._mapped[file] = memoryview(mapped)
        return self._mapped[file]


# -- the metadata ---------------------------------------------------------------------------------


def _read_listing(folder: Path) -> _Listing:
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            data = file.read(_METADATA_BYTES_MAX + 1)
        if len(data) > _METADATA_BYTES_MAX:
            raise ValueError(f"more than {_METADATA_BYTES_MAX:,} bytes")
        return _listing(_fields(read_opcodes(data), "Metadata"))
    except (*MALFORMED, OSError, RuntimeError) as error:
        if isinstance(error, EcckptError):
            raise
        raise InvalidFolder(f"{path} cannot be read: {error!r:.200}") from error


def _listing(fields: dict[str, Any]) -> _Listing:
    entries = {
        _text(name): _entry(_text(name), node)
        for name, node in _pairs(fields["state_dict_metadata"])
    }
    places = {}
    for index, node in _pairs(fields["storage_data"]):
        at = _fields(index, "MetadataIndex")
        name = _text(at["fqn"])
        offset = at.get("offset")
        places[name, None if offset is None else _sizes(offset)] = _place(name, node)
    planned = fields.get("planner_data")
    paths = DcpNotes.checked_paths(_pairs(planned)) if isinstance(planned, Pairs) else {}
    return _Listing(entries, places, {name: paths[name] for name in entries if name in paths})


def _entry(name: str, node: Any) -> _Entry:
    if _kind(node) == "BytesStorageMetadata":
        return _Entry(None, ())
    fields = _fields(node, "TensorStorageMetadata")
    shape = _sizes(fields["size"])
    chunks = []
    for node_of_chunk in fields["chunks"]:
        box = _fields(node_of_chunk, "ChunkStorageMetadata")
        chunk = _Chunk(_sizes(box["offsets"]), _sizes(box["sizes"]))
        if not len(chunk.offset) == len(chunk.shape) == len(shape) or any(
            start + length > size
            for start, length, size in zip(chunk.offset, chunk.shape, shape, strict=True)
        ):
            raise InvalidFolder(f"{name}: a box beyond its tensor of shape {list(shape)}")
        chunks.append(chunk)
    problem = uncovered(shape, [(chunk.offset, chunk.shape) for chunk in chunks])
    if problem:
        raise InvalidFolder(f"{name}: {problem}")
    return _Entry(shape, tuple(chunks))


def _place(name: str, node: Any) -> _Place:
    fields = _fields(node, "_StorageInfo")
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if _text(file) in ("", ".", "..") or "/" in file or "\0" in file:
        raise InvalidFolder(f"{name}: lies in {file!r:.80}, which is not a file of this folder")
    if fields.get("transform_descriptors"):
        raise InvalidFolder(f"{name}: is stored transformed (compressed or encrypted)")
    return _Place(file, *_sizes((offset, length)))


def _kind(node: Any) -> str:
    """Return the class name of a pickled instance; versions of torch use different modules."""
    return node.call.name if isinstance(node, PickledCall) and isinstance(node.call, Name) else ""


def _fields(node: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of a pickled instance; ``ValueError`` if its class is not ``kind``."""
    if _kind(node) != kind:
        raise ValueError(f"{_kind(node) or type(node).__name__!r:.40} where {kind} should be")
    return {_text(name): value for name, value in _pairs(node.state)}


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    if not isinstance(node, Pairs):
        raise TypeError("not a dict")
    return node.pairs


def _sizes(node: Any) -> tuple[int, ...]:
    if _kind(node) == "Size":
        (node,) = node.args
    if type(node) is not tuple or not all(type(n) is int and 0 <= n < 2**63 for n in node):
        raise TypeError("not a tuple of sizes")
    return node


def _text(node: Any) -> str:
    if type(node) is not str:
        raise TypeError("not a text")
    return node
