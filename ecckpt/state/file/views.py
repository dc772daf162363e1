"""The tensors of a shard as a mapping that makes views lazily; used by ``shard.py``.

To fill the tensors of a state, a load needs only their addresses (``Views.stored``). Making views
of 20,000 tensors would take far longer than copying their bytes, so a view is made when a caller
asks for that tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Self

import torch

from ecckpt.errors import CorruptFragment
from ecckpt.state.file.header import Form, ShardHeader
from ecckpt.state.file.metadata import ShardNotes
from ecckpt.state.tensors.dtypes import BYTES_DTYPES, DTYPE_OF
from ecckpt.state.tensors.sharding import Sharding
from ecckpt.state.tree.decoding import MALFORMED
from ecckpt.state.tree.nodes import StoredTensor, TensorForm


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Views(Mapping[str, torch.Tensor]):
    """Views of a shard's tensors by name.

    The caller owns the buffer and must keep its content while views are in use. The views keep the
    buffer object alive.
    """

    buffer: memoryview  # all bytes of the shard
    _data: torch.Tensor  # the same memory, as uint8
    _forms: Sequence[TensorForm]
    _begins: Sequence[int]  # bytes from the start of the shard
    _index: dict[str, int]  # by name, into _forms and _begins; aliases share an index
    _cache: dict[int, torch.Tensor] = field(default_factory=dict)  # views made so far

    @classmethod
    def of_shard(cls, buffer: memoryview, header: ShardHeader, notes: ShardNotes) -> Self:
        """Make the mapping; only the shard's header has to be in ``buffer`` yet.

        Raises ``CorruptFragment`` if the notes do not fit the tensors in the header.
        """
        # torch warns that writing to a read-only buffer is undefined. ecckpt only reads the views.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            data = torch.frombuffer(buffer, dtype=torch.uint8)
        index = dict(zip(header.names[:-1], range(len(header.names)), strict=False))
        begins = (header.begins + header.data_start).tolist()
        views = cls(
            buffer=buffer,
            _data=data,
            _forms=tensor_forms(header, notes),
            _begins=begins,
            _index=index,
        )
        for name, sharding in notes.shardings.items():
            form = views.form(name) if name in index else None
            rank = len(sharding.shape) if sharding.coordinate is not None else None
            if form and form.size_bytes and rank not in (None, len(form.shape)):
                raise CorruptFragment(
                    f"{name!r:.80} has {len(form.shape)} dimensions, "
                    f"the tensor it is a part of has {rank}"
                )
        return views

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the view of a tensor; repeated calls and aliases get the same object."""
        index = self._index[name]
        if index not in self._cache:
            dtype, shape, size_bytes = self._forms[index]
            begin = self._begins[index]
            self._cache[index] = (
                self._data[begin : begin + size_bytes].view(dtype).view(shape)
                if size_bytes
                else torch.empty(shape, dtype=dtype)
            )
        return self._cache[index]

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def form(self, name: str) -> TensorForm:
        """Return dtype, shape and length of a tensor."""
        return self._forms[self._index[name]]

    def place(self, name: str) -> tuple[int, int]:
        """Return where a tensor begins and ends, in bytes from the start of the shard."""
        begin = self._begins[self._index[name]]
        return begin, begin + self.form(name).size_bytes

    def with_aliases(self, aliases: Mapping[str, str]) -> Views:
        """Return the same tensors, with aliases (other name -> name) added."""
        more = {alias: self._index[name] for alias, name in aliases.items()}
        return Views(
            buffer=self.buffer,
            _data=self._data,
            _forms=self._forms,
            _begins=self._begins,
            _index=self._index | more,
            _cache=self._cache,
        )

    def stored(self, names: Sequence[str], shardings: Mapping[str, Sharding]) -> list[StoredTensor]:
        """Make the nodes of a saved tree that stand for the named tensors, in that order."""
        indices = list(map(self._index.__getitem__, names))
        forms = map(self._forms.__getitem__, indices)
        begins = map(self._begins.__getitem__, indices)
        addresses = map(self._data.data_ptr().__add__, begins)
        parts = map(shardings.get, names) if shardings else repeat(None)
        return list(map(StoredTensor, names, forms, parts, addresses, repeat(self)))


def tensor_forms(header: ShardHeader, notes: ShardNotes) -> list[TensorForm]:
    """Return dtype, shape and length of a shard's tensors, in the order of the header.

    Raises ``CorruptFragment`` for a dtype that this version of torch does not have.
    """
    try:
        distinct = [_form(form) for form in header.forms]
        forms = [distinct[index] for index in header.form_of.tolist()[:-1]]
        if notes.dtypes:
            begins = header.begins.tolist()
            for index, name in enumerate(header.names[:-1]):
                if name in notes.dtypes:
                    code = header.forms[header.form_of[index]][0]
                    dtype = BYTES_DTYPES[notes.dtypes[name]]
                    forms[index] = _as_bytes(name, code, forms[index], dtype, begins[index])
    except MALFORMED as error:
        raise CorruptFragment(f"a tensor of a shard cannot be read: {error}") from error
    return forms


def _form(form: Form) -> TensorForm:
    dtype, shape = DTYPE_OF[form[0]], torch.Size(form[1])
    return TensorForm(dtype, shape, shape.numel() * dtype.itemsize)


def _as_bytes(name: str, code: str, form: TensorForm, dtype: torch.dtype, begin: int) -> TensorForm:
    """Return the form of a tensor that is stored as bytes: the last dimension is an element."""
    shape = form.shape
    if code != "U8" or shape[-1] != dtype.itemsize or (begin % dtype.itemsize and form.size_bytes):
        raise ValueError(f"{name!r:.80} does not hold elements of {dtype} as bytes")
    return TensorForm(dtype, torch.Size(shape[:-1]), form.size_bytes)
