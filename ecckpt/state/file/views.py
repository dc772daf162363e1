"""The tensors of a shard: their forms, where each lies, and views of them.

Views are made when somebody asks for one. To fill the tensors of a state nobody does, and of 20,000
tensors views take far longer to make than their bytes to copy.
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


@dataclass(frozen=True, slots=True, eq=False)
class Views(Mapping[str, torch.Tensor]):
    """Tensors by name. The buffer must outlive the views and stay unchanged; it is kept alive."""

    buffer: memoryview  # all bytes of the shard
    _data: torch.Tensor  # the same
    _forms: Sequence[TensorForm]
    _begins: Sequence[int]  # in the shard
    _index: dict[str, int]
    _made: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, buffer: memoryview, header: ShardHeader, notes: ShardNotes) -> Self:
        """The tensors of a shard; only its header need be in ``buffer`` yet.

        Raises ``CorruptFragment`` for what the notes cannot have said of such tensors.
        """
        with warnings.catch_warnings():  # nobody writes through these views, read-only or not
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            data = torch.frombuffer(buffer, dtype=torch.uint8)
        index = dict(zip(header.names[:-1], range(len(header.names)), strict=False))
        begins = (header.begins + header.data_start).tolist()
        views = cls(buffer, data, tensor_forms(header, notes), begins, index)
        for name, sharding in notes.shardings.items():
            form = views.form(name) if name in index else None
            rank = len(sharding.shape) if sharding.coordinate is not None else None
            if form and form.size_bytes and rank not in (None, len(form.shape)):
                raise CorruptFragment(f"{name!r:.80} is a part of a tensor of another rank")
        return views

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor; the same one every time, and for tied names."""
        index = self._index[name]
        if index not in self._made:
            dtype, shape, size_bytes = self._forms[index]
            begin = self._begins[index]
            self._made[index] = (
                self._data[begin : begin + size_bytes].view(dtype).view(shape)
                if size_bytes
                else torch.empty(shape, dtype=dtype)
            )
        return self._made[index]

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def form(self, name: str) -> TensorForm:
        """Dtype and shape of a tensor."""
        return self._forms[self._index[name]]

    def place(self, name: str) -> tuple[int, int]:
        """Where the tensor's bytes begin in the shard, and where they end."""
        begin = self._begins[self._index[name]]
        return begin, begin + self.form(name).size_bytes

    def with_aliases(self, aliases: Mapping[str, str]) -> Views:
        """The same tensors, some under other names too."""
        more = {alias: self._index[name] for alias, name in aliases.items()}
        return Views(
            self.buffer, self._data, self._forms, self._begins, self._index | more, self._made
        )

    def stored(self, names: Sequence[str], shardings: Mapping[str, Sharding]) -> list[StoredTensor]:
        """The nodes of a saved tree that stand for these tensors."""
        indices = list(map(self._index.__getitem__, names))
        forms = map(self._forms.__getitem__, indices)
        begins = map(self._begins.__getitem__, indices)
        addresses = map(self._data.data_ptr().__add__, begins)
        parts = map(shardings.get, names) if shardings else repeat(None)
        return list(map(StoredTensor, names, forms, parts, addresses, repeat(self)))


def tensor_forms(header: ShardHeader, notes: ShardNotes) -> list[TensorForm]:
    """What torch calls the dtypes and shapes of a shard's tensors, in the order of the header.

    Raises ``CorruptFragment`` for those that torch, this version of it, does not know.
    """
    try:
        forms = [_form(form) for form in header.forms]
        each = [forms[index] for index in header.form_of.tolist()[:-1]]
        if notes.dtypes:
            begins = header.begins.tolist()
            for index, name in enumerate(header.names[:-1]):
                if name in notes.dtypes:
                    code = header.forms[header.form_of[index]][0]
                    dtype = BYTES_DTYPES[notes.dtypes[name]]
                    each[index] = _as_bytes(name, code, each[index], dtype, begins[index])
    except MALFORMED as error:
        raise CorruptFragment(f"a tensor of a shard cannot be read: {error}") from error
    return each


def _form(form: Form) -> TensorForm:
    dtype, shape = DTYPE_OF[form[0]], torch.Size(form[1])
    return TensorForm(dtype, shape, shape.numel() * dtype.itemsize)


def _as_bytes(name: str, code: str, form: TensorForm, dtype: torch.dtype, begin: int) -> TensorForm:
    """The form of a tensor that was stored as bytes."""
    shape = form.shape
    if code != "U8" or shape[-1] != dtype.itemsize or (begin % dtype.itemsize and form.size_bytes):
        raise ValueError(f"{name!r:.80} is no {dtype} as bytes")
    return TensorForm(dtype, torch.Size(shape[:-1]), form.size_bytes)
