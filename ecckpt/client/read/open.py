"""Looking into a checkpoint without restoring it: ``ecckpt.open``.

    opened = ecckpt.open("llama-70b", agents=["10.0.0.7:7420", "10.0.0.8:7420"])
    opened["model.layers.0.weight"]  # the whole tensor, whoever has parts of it
    opened.slice("model.layers.0.weight")[10:20]  # only the holders of these rows are asked

Nothing is fenced, changed or held: a run that goes on saving lets old generations go, and then a
tensor that is read later is not there any more (``TooFewFragments``; open again).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ecckpt.client.read.shard_reader import Peers, ShardReader
from ecckpt.errors import (
    AgentUnreachable,
    EcckptError,
    InvalidConfig,
    NothingToRestore,
    StateMismatch,
)
from ecckpt.format.ids import Generation, check_name
from ecckpt.policy.survival import GenerationReport, Inventory, plan_recovery, sources_of
from ecckpt.protocol.agent_client import AgentClient
from ecckpt.protocol.verbs import INVENTORY
from ecckpt.state.file.catalog import CatalogPiece, CatalogTensor, build_catalog
from ecckpt.state.file.header import ShardHeader, header_bytes, parse_header
from ecckpt.state.file.metadata import ShardNotes, parse_notes
from ecckpt.state.file.shard import outline
from ecckpt.state.tree.nodes import CONTAINERS, StoredObject, StoredTensor, dict_like, items_like
from ecckpt.state.tree.resolving import resolve

_log = logging.getLogger(__name__)


class Opened(Mapping[str, torch.Tensor]):
    """A generation, as a mapping from names to tensors that are read when they are asked for.

    Parts of sharded tensors are joined to the global tensor. A tensor that is not sharded and that
    several ranks have is one tensor if all copies are equal, which reading checks; if they differ
    (``StateMismatch``), ``as_rank(r)`` reads those of rank r. Every byte given out is proven by its
    block's checksum. What is read belongs to the caller. For one thread at a time.

    Attributes:
        run, generation: what is open.
        world_size: how many ranks saved it.
        preferred: the rank that ``as_rank`` chose, else None.
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
        """The same, with tensors that are not sharded as that rank has them, if it has them."""
        self._check_rank(rank)
        other = object.__new__(Opened)
        vars(other).update(vars(self))
        other.preferred = rank
        other._catalog = build_catalog(self._shards, prefer=rank)
        return other

    @property
    def pulled_bytes(self) -> int:
        """Bytes of blocks that came over the network so far."""
        return sum(reader.pulled_bytes for reader in self._readers)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied tensors: further names, and the name under which each is stored."""
        return self._catalog.aliases

    def __iter__(self) -> Iterator[str]:
        yield from self._catalog.tensors
        yield from self._catalog.aliases

    def __len__(self) -> int:
        return len(self._catalog.tensors) + len(self._catalog.aliases)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.tensors or name in self._catalog.aliases

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, in CPU memory."""
        whole = self._whole(name)
        whole.require()
        return self._read(whole, 0, whole.shape[0] if whole.shape else 1)

    def slice(self, name: str) -> Rows:
        """Index what this returns by ``[start:stop]`` to read a part of the first dimension."""
        whole = self._whole(name)
        whole.require()
        if not whole.shape:
            raise InvalidConfig(f"{name!r} has no dimension to slice")
        return Rows(whole.shape, lambda start, stop: self._read(whole, start, stop))

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape; nothing is read."""
        whole = self._whole(name)
        whole.require()
        return whole.shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype; nothing is read."""
        return self._whole(name).dtype

    def values_of(self, rank: int) -> dict[Any, Any]:
        """What that rank saved, as a tree: values as they were, and meta tensors for its tensors.

        An object comes as what its ``state_dict()`` returned, an instance of a class that is not
        registered here as a ``StoredValue``.
        """
        return self._tree(rank, lambda stored: stored.data)

    def tree_of(self, rank: int, place: Callable[[str], Any]) -> dict[Any, Any]:
        """``values_of``, with ``place(name)`` for the tensors."""
        return self._tree(rank, lambda stored: place(stored.name))

    def _tree(self, rank: int, place: Callable[[StoredTensor], Any]) -> dict[Any, Any]:
        self._check_rank(rank)
        header, notes = self._shards[rank]
        blob = header.values
        values = bytearray(blob.end - blob.begin)
        self._readers[rank].read(header.data_start + blob.begin, memoryview(values))
        saved = resolve(outline(header, notes, bytes(values)).tree(), lambda path, text: None)
        tree: dict[Any, Any] = _plain(saved, place)
        return tree

    def _whole(self, name: str) -> CatalogTensor:
        return self._catalog.tensors[self._catalog.aliases.get(name, name)]

    def _check_rank(self, rank: int) -> None:
        if rank not in self._shards:
            raise InvalidConfig(f"rank {rank} of {self.world_size} ranks that saved")

    def _read(self, whole: CatalogTensor, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a tensor; one without dimensions has one row."""
        shape = (stop - start, *whole.shape[1:]) if whole.shape else ()
        data = torch.empty(math.prod(shape) * whole.dtype.itemsize, dtype=torch.uint8)
        # As rows of bytes: whatever the dtype, copying a box is copying bytes.
        sizes = (*shape, whole.dtype.itemsize) if shape else (1, whole.dtype.itemsize)
        target = data.view(sizes)
        for piece in whole.pieces:
            offset = piece.offset or (0,)
            lengths = piece.shape or (1,)
            first, last = max(start, offset[0]), min(stop, offset[0] + lengths[0])
            if first >= last:
                continue
            box = target[first - start : last - start]
            for dim in range(1, len(lengths)):
                box = box.narrow(dim, offset[dim], lengths[dim])
            self._read_box(whole, piece, first - offset[0], box)
        return (
            data.view(whole.dtype).view(shape)
            if data.numel()
            else torch.empty(shape, dtype=whole.dtype)
        )

    def _read_box(
        self, whole: CatalogTensor, piece: CatalogPiece, first: int, box: torch.Tensor
    ) -> None:
        """Fill ``box``, bytes, with rows of a piece from ``first`` on, and compare the copies."""
        direct = box if box.is_contiguous() else torch.empty(box.shape, dtype=torch.uint8)
        self._read_rows(piece, first, direct)
        for copy in piece.copies:
            other = torch.empty(box.shape, dtype=torch.uint8)
            self._read_rows(copy, first, other)
            if not torch.equal(direct, other):
                raise StateMismatch(
                    [
                        f"{whole.name}: rank {copy.rank} has other values than rank {piece.rank}, "
                        "and nothing says whose are meant: as_rank() chooses"
                    ]
                )
        if direct is not box:
            box.copy_(direct)

    def _read_rows(self, piece: CatalogPiece, first: int, target: torch.Tensor) -> None:
        row_bytes = math.prod(target.shape[1:])
        view: Any = target.view(-1).numpy()
        self._readers[piece.rank].read(piece.begin + first * row_bytes, memoryview(view))


class Rows:
    """The first dimension of a tensor that is not read yet; ``rows[start:stop]`` reads."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[int, int], torch.Tensor]) -> None:
        self.shape = shape
        self._read = read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """A tensor of these rows; steps other than 1 are refused (``InvalidConfig``)."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise InvalidConfig(f"{rows!r}: only [start:stop] is read lazily")
        start, stop, _ = rows.indices(self.shape[0])
        return self._read(start, max(start, stop))


def open(  # noqa: A001  (what it does, and where the user finds it: ecckpt.open)
    run: str,
    agents: Sequence[str],
    *,
    step: int | None = None,
    generation: Generation | str | None = None,
    token: str = "",
    timeout_s: float = 10.0,
) -> Opened:
    """Open the newest generation of ``run`` that survives, or the newest of ``step``.

    Args:
        run: name of the training job.
        agents: addresses of its nodes' agents (``host:port``), all that are known: what none of
            these holds is taken for lost. Those that do not answer are passed over.
        step, generation: open this step (its newest timeline), or this generation, instead of the
            newest.
        token: the agents' credential, if they have one.
        timeout_s: for each request. A node that misses it once is not asked again.

    Raises:
        NothingToRestore: none of its generations can be read whole.
        AgentUnreachable: no agent answers.
        CorruptFragment, TooFewFragments: a shard cannot be proven; the newest before it may be
            opened by its step.
    """
    check_name("run", run)
    addresses = [agents] if isinstance(agents, str) else list(agents)
    if not addresses:
        raise InvalidConfig("no agents to ask", hint="host:port of at least one")
    clients = [AgentClient(address, token, timeout_s) for address in dict.fromkeys(addresses)]
    found, silent = _inventories(run, clients)
    if isinstance(generation, str):
        generation = Generation.parse(generation)
    inventories = [inventory for inventory, _ in found.values()]
    plan = plan_recovery(run, inventories, step=step, generation=generation)
    if plan.chosen is None:
        missing = {f"agent {address}": why for address, why in silent.items()}
        raise NothingToRestore(run, plan.rejected() | dict(plan.ruins) | missing)
    peers = Peers({node: client for node, (_, client) in found.items()}, request_s=timeout_s)
    return Opened(run, plan.chosen, peers)


def _inventories(
    run: str, clients: Sequence[AgentClient]
) -> tuple[dict[str, tuple[Inventory, AgentClient]], dict[str, str]]:
    """What each node holds, and the agents that did not answer."""

    def ask(client: AgentClient) -> Inventory | EcckptError:
        try:
            client.node()  # another version is refused by name
            return client.call(INVENTORY, run)
        except AgentUnreachable as error:
            return error

    with ThreadPoolExecutor(min(32, len(clients)), thread_name_prefix="open") as pool:
        answers = list(pool.map(ask, clients))
    found, silent = {}, {}
    for client, answer in zip(clients, answers, strict=True):
        if isinstance(answer, Inventory):
            found[answer.node] = (answer, client)
        else:
            silent[client.address] = str(answer)
            _log.warning("not asked again: %s", answer)
    errors = [answer for answer in answers if isinstance(answer, EcckptError)]
    if not found:
        raise errors[0]
    return found, silent


def _header(reader: ShardReader) -> tuple[ShardHeader, ShardNotes]:
    """Header and notes of a shard, from its first blocks."""
    prefix = bytearray(min(8, len(reader.data)))
    reader.read(0, memoryview(prefix))
    buffer = bytearray(header_bytes(memoryview(prefix), len(reader.data)))
    reader.read(0, memoryview(buffer))
    header = parse_header(memoryview(buffer), len(reader.data))
    header.require_values()
    return header, parse_notes(header.metadata)


def _plain(node: Any, place: Callable[[StoredTensor], Any]) -> Any:
    """A saved tree without what marks its tensors and objects."""
    if isinstance(node, StoredObject):
        return _plain(node.state, place)
    if isinstance(node, StoredTensor):
        return place(node)
    if type(node) not in CONTAINERS:
        return node
    if isinstance(node, dict):
        return dict_like(node, ((key, _plain(each, place)) for key, each in node.items()))
    return items_like(node, (_plain(each, place) for each in node))
