"""``ecckpt.open``: reads tensors and values of a checkpoint without restoring it.

    opened = ecckpt.open("llama-70b", agents=["10.0.0.7:7420", "10.0.0.8:7420"])
    opened["model.layers.0.weight"]  # the whole tensor, joined from all ranks' parts
    opened.slice("model.layers.0.weight")[10:20]  # reads the blocks of these rows only

Opening neither fences the run nor pins the generation. If the run goes on saving, agents drop the
open generation after a newer one is committed, and later reads raise ``TooFewFragments``: open
again. The exports (``ecckpt.integrations``) read through it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ecckpt.client.config import token_from_environment
from ecckpt.client.read.shard_reader import Peers, ShardReader
from ecckpt.errors import (
    AgentUnreachable,
    EcckptError,
    InvalidConfig,
    NothingToRestore,
    StateMismatch,
)
from ecckpt.format.ids import Generation, check_run
from ecckpt.policy.survival import GenerationReport, Inventory, plan_recovery, sources_of
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.fan_out import call_each
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.state.file.catalog import CatalogPiece, CatalogTensor, build_catalog
from ecckpt.state.file.header import ShardHeader, header_bytes, parse_header
from ecckpt.state.file.metadata import ShardNotes, parse_notes
from ecckpt.state.file.shard import outline
from ecckpt.state.tree.nodes import CONTAINERS, StoredObject, StoredTensor, dict_like, items_like
from ecckpt.state.tree.resolving import resolve

_log = logging.getLogger(__name__)


class Opened(Mapping[str, torch.Tensor]):
    """A generation as a mapping from names to tensors; a tensor is read when it is accessed.

    The parts of a sharded tensor are joined to the global tensor. If several ranks have a tensor
    that is not sharded, reading compares their copies. Copies that differ raise ``StateMismatch``;
    ``as_rank(r)`` reads those of rank r instead.

    The CRC32C of each block is checked before its bytes are returned. The caller owns the returned
    tensors, which are in CPU memory. One thread at a time may use the object.

    Attributes:
        run, generation: of the open checkpoint.
        world_size: number of ranks that saved it.
        preferred: the rank that ``as_rank`` chose; None without it.
    """

    def __init__(self, run: str, report: GenerationReport, peers: Peers) -> None:
        self.run = run
        self.generation: Generation = report.generation
        self.world_size = report.world_size
        self.preferred: int | None = None
        self._readers = [ShardReader(sources, peers) for sources in sources_of(report)]
        self._shards = {rank: _header(reader) for rank, reader in enumerate(self._readers)}
        self._catalog = build_catalog(self._shards)

    def __repr__(self) -> str:
        return f"Opened({self.run!r}, generation {self.generation}, {len(self)} tensors)"

    def as_rank(self, rank: int) -> Opened:
        """Return the same checkpoint, with that rank's copy of tensors that are not sharded.

        Tensors that this rank does not have are read as before. Raises ``InvalidConfig`` if no such
        rank saved.
        """
        self._check_rank(rank)
        other = object.__new__(Opened)
        vars(other).update(vars(self))
        other.preferred = rank
        other._catalog = build_catalog(self._shards, prefer=rank)
        return other

    @property
    def pulled_bytes(self) -> int:
        """Bytes of blocks that were read over the network so far."""
        return sum(reader.pulled_bytes for reader in self._readers)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors: alias -> name that the tensor is stored under."""
        return self._catalog.aliases

    def __iter__(self) -> Iterator[str]:
        yield from self._catalog.tensors
        yield from self._catalog.aliases

    def __len__(self) -> int:
        return len(self._catalog.tensors) + len(self._catalog.aliases)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.tensors or name in self._catalog.aliases

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read the whole tensor. Raises ``StateMismatch`` if the ranks' parts do not make it up."""
        entry = self._entry(name)
        entry.require()
        return self._read(entry, 0, entry.shape[0] if entry.shape else 1)

    def slice(self, name: str) -> Rows:
        """Return an object that reads rows of the tensor: ``opened.slice(name)[start:stop]``."""
        entry = self._entry(name)
        entry.require()
        if not entry.shape:
            raise InvalidConfig(f"{name!r} has no dimension to slice")
        return Rows(entry.shape, lambda start, stop: self._read(entry, start, stop))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the global tensor, without reading it."""
        entry = self._entry(name)
        entry.require()
        return entry.shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the tensor, without reading it."""
        return self._entry(name).dtype

    def values_of(self, rank: int) -> dict[Any, Any]:
        """Read the state that a rank saved, with meta tensors in place of its tensors.

        For an object there is what its ``state_dict()`` returned, and for an instance of a class
        that is not registered here a ``StoredValue``.
        """
        return self._tree(rank, lambda stored: stored.data)

    def tree_of(self, rank: int, replacement: Callable[[str], Any]) -> dict[Any, Any]:
        """Read what ``values_of`` reads, with ``replacement(name)`` in place of each tensor."""
        return self._tree(rank, lambda stored: replacement(stored.name))

    def _tree(self, rank: int, replacement: Callable[[StoredTensor], Any]) -> dict[Any, Any]:
        self._check_rank(rank)
        header, notes = self._shards[rank]
        blob = header.values
        values = bytearray(blob.end - blob.begin)
        self._readers[rank].read(header.data_start + blob.begin, memoryview(values))
        saved = resolve(outline(header, notes, bytes(values)).tree(), lambda path, text: None)
        tree: dict[Any, Any] = _plain(saved, replacement)
        return tree

    def _entry(self, name: str) -> CatalogTensor:
        return self._catalog.tensors[self._catalog.aliases.get(name, name)]

    def _check_rank(self, rank: int) -> None:
        if rank not in self._shards:
            raise InvalidConfig(f"there is no rank {rank}: {self.world_size} ranks saved")

    def _read(self, entry: CatalogTensor, start: int, stop: int) -> torch.Tensor:
        """Read rows ``start`` to ``stop`` of a tensor; a scalar has one row."""
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        data = torch.empty(math.prod(shape) * entry.dtype.itemsize, dtype=torch.uint8)
        # With the bytes of an element as last dimension: torch cannot copy boxes of all dtypes.
        sizes = (*shape, entry.dtype.itemsize) if shape else (1, entry.dtype.itemsize)
        target = data.view(sizes)
        for piece in entry.pieces:
            offset = piece.offset or (0,)
            lengths = piece.shape or (1,)
            first, last = max(start, offset[0]), min(stop, offset[0] + lengths[0])
            if first >= last:
                continue
            box = target[first - start : last - start]
            for dim in range(1, len(lengths)):
                box = box.narrow(dim, offset[dim], lengths[dim])
            self._read_box(entry, piece, first - offset[0], box)
        return (
            data.view(entry.dtype).view(shape)
            if data.numel()
            else torch.empty(shape, dtype=entry.dtype)
        )

    def _read_box(
        self, entry: CatalogTensor, piece: CatalogPiece, first: int, box: torch.Tensor
    ) -> None:
        """Fill ``box`` (bytes) with rows of a piece, from row ``first``, and compare its copies."""
        direct = box if box.is_contiguous() else torch.empty(box.shape, dtype=torch.uint8)
        self._read_rows(piece, first, direct)
        for copy in piece.copies:
            other = torch.empty(box.shape, dtype=torch.uint8)
            self._read_rows(copy, first, other)
            if not torch.equal(direct, other):
                raise StateMismatch(
                    [
                        f"{entry.name}: rank {copy.rank} has other values than rank {piece.rank}; "
                        "choose a rank with as_rank()"
                    ]
                )
        if direct is not box:
            box.copy_(direct)

    def _read_rows(self, piece: CatalogPiece, first: int, target: torch.Tensor) -> None:
        row_bytes = math.prod(target.shape[1:])
        view: Any = target.view(-1).numpy()
        self._readers[piece.rank].read(piece.begin + first * row_bytes, memoryview(view))


class Rows:
    """The rows (first dimension) of an unread tensor: ``rows[start:stop]`` reads some of them."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[int, int], torch.Tensor]) -> None:
        self.shape = shape
        self._read = read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Read rows as a tensor. Raises ``InvalidConfig`` for an index or a step other than 1."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise InvalidConfig(f"{rows!r}: rows are read by [start:stop] only")
        start, stop, _ = rows.indices(self.shape[0])
        return self._read(start, max(start, stop))


def open(  # noqa: A001  (its public name is ecckpt.open)
    run: str,
    agents: Sequence[str],
    *,
    step: int | None = None,
    generation: Generation | str | None = None,
    token: str | None = None,
    timeout_s: float = 10.0,
) -> Opened:
    """Open the newest generation of ``run`` that survives.

    Args:
        run: name of the run.
        agents: addresses (``host:port``) of the agents of all its nodes. Fragments that none of
            these has count as lost. Agents that do not answer are skipped.
        step: open this step (its newest timeline) instead of the newest.
        generation: open this generation instead of the newest.
        token: the agents' credential, empty if they have none. Without it, the one in the file that
            ``ECCKPT_TOKEN_FILE`` names, as on the command line.
        timeout_s: limit of each request. A node that exceeds it once gets no further requests.

    Raises:
        NothingToRestore: no generation can be read completely.
        AgentUnreachable: no agent answers.
        CorruptFragment, TooFewFragments: the checksums of a shard fail, and not enough good
            fragments are left. Older generations may be opened by their step.
    """
    check_run(run)
    addresses = [agents] if isinstance(agents, str) else list(agents)
    if not addresses:
        raise InvalidConfig("no agents given", hint="give host:port of at least one")
    if token is None:
        token = token_from_environment()
    clients = [AgentClient(address, token, timeout_s) for address in dict.fromkeys(addresses)]
    found, silent = _inventories(run, clients)
    if isinstance(generation, str):
        generation = Generation.parse(generation)
    inventories = [inventory for inventory, _ in found.values()]
    plan = plan_recovery(run, inventories, step=step, generation=generation)
    if plan.chosen is None:
        missing = {f"agent {address}": why for address, why in silent.items()}
        raise NothingToRestore(run, plan.rejected() | dict(plan.ruins) | missing)
    peers = Peers(
        clients={node: client for node, (_, client) in found.items()}, request_s=timeout_s
    )
    return Opened(run, plan.chosen, peers)


def _inventories(
    run: str, clients: Sequence[AgentClient]
) -> tuple[dict[str, tuple[Inventory, AgentClient]], dict[str, str]]:
    """Return what each node holds, and why other agents did not answer, by address."""

    def ask(client: AgentClient) -> Inventory | EcckptError:
        try:
            client.node()  # raises VersionMismatch for an agent of another release
            return client.call(INVENTORY, run)
        except AgentUnreachable as error:
            return error

    answers = call_each(clients, ask)
    found, silent = {}, {}
    for client, answer in zip(clients, answers, strict=True):
        if isinstance(answer, Inventory):
            found[answer.node] = (answer, client)
        else:
            silent[client.address] = str(answer)
            _log.warning("skipped from now on: %s", answer)
    errors = [answer for answer in answers if isinstance(answer, EcckptError)]
    if not found:
        raise errors[0]
    return found, silent


def _header(reader: ShardReader) -> tuple[ShardHeader, ShardNotes]:
    """Read header and notes of a shard, from its first blocks."""
    prefix = bytearray(min(8, len(reader.data)))
    reader.read(0, memoryview(prefix))
    buffer = bytearray(header_bytes(memoryview(prefix), len(reader.data)))
    reader.read(0, memoryview(buffer))
    header = parse_header(memoryview(buffer), len(reader.data))
    header.require_values()
    return header, parse_notes(header.metadata)


def _plain(node: Any, replacement: Callable[[StoredTensor], Any]) -> Any:
    """Copy a saved tree with plain contents for objects, and ``replacement(node)`` for tensors."""
    if isinstance(node, StoredObject):
        return _plain(node.state, replacement)
    if isinstance(node, StoredTensor):
        return replacement(node)
    if type(node) not in CONTAINERS:
        return node
    if isinstance(node, dict):
        return dict_like(node, ((key, _plain(child, replacement)) for key, child in node.items()))
    return items_like(node, (_plain(child, replacement) for child in node))
