"""Reads archives of ``torch.save`` without unpickling; ``importer.py`` uses it.

An archive is a zip file with a pickle (``data.pkl``) and the bytes of each storage. The pickle's
opcodes are interpreted as data (``pickle_opcodes.py``); tensors are views of the storages. Values
may be of the types that a shard can hold.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from ecckpt.errors import InvalidFolder, UnsupportedState
from ecckpt.integrations.dcp.pickle_opcodes import (
    MALFORMED,
    Members,
    Name,
    Outside,
    Pairs,
    PickledCall,
    read_opcodes,
)
from ecckpt.state.paths import Path, describe
from ecckpt.state.tree.values import DEPTH_MAX, FACTORIES, PLAIN

# Limits against damaged or malicious archives.
_PICKLE_BYTES_MAX = 1 << 28
_NODES_LEAST = 1_000_000  # values that any archive may have; a long pickle may have more

_LOCAL_HEADER_BYTES = 30  # of a member in a zip file, without its name and extra field
_BUILTINS = frozenset({"__builtin__", "builtins"})
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# The dtype behind torch's (deprecated) storage classes, which pickles still name.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


def read_archive(buffer: memoryview, path: Path) -> Any:
    """Read the archive that fills ``buffer``; its tensors are views of the buffer.

    Args:
        buffer: the archive; owned by the caller, who keeps it alive and unchanged.
        path: place of the value in the checkpoint, for error messages.

    Raises:
        InvalidFolder: the bytes are not an archive of ``torch.save``.
        UnsupportedState: something in it is neither a value nor a strided tensor.
    """
    try:
        archive = _Archive(buffer)
        pickled = archive.pickle()
        return _Reader(archive, len(pickled)).value(read_opcodes(pickled), path)
    except (*MALFORMED, RuntimeError, zipfile.BadZipFile, struct.error) as error:
        if isinstance(error, InvalidFolder | UnsupportedState):
            raise
        raise InvalidFolder(
            f"{describe(path)}: not an archive of torch.save: {error!r:.200}"
        ) from error


class _Archive:
    """The members of a zip file in memory; torch stores them uncompressed."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        with zipfile.ZipFile(_Window(buffer)) as opened:
            members = {member.filename: member for member in opened.infolist()}
        (main,) = (name for name in members if name.endswith("/data.pkl"))
        root = main.removesuffix("data.pkl")
        self._members = {
            name.removeprefix(root): member
            for name, member in members.items()
            if name.startswith(root)
        }
        order = bytes(self.member("byteorder")) if "byteorder" in self._members else b"little"
        if order.decode() != sys.byteorder:
            raise ValueError(f"byte order {order!r:.20}")

    def pickle(self) -> bytes:
        """Return the pickle of the whole value."""
        member = self.member("data.pkl")
        if len(member) > _PICKLE_BYTES_MAX:
            raise ValueError(f"a pickle of {len(member):,} bytes")
        return bytes(member)

    def member(self, name: str) -> memoryview:
        """Return a view of a member's bytes in the buffer."""
        info = self._members[name]
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"member {name!r:.80} is compressed")
        # The local header may have another extra field than the directory: torch pads it there, to
        # align the data.
        header = self._buffer[info.header_offset :][:_LOCAL_HEADER_BYTES]
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        member = self._buffer[start : start + info.file_size]
        if len(member) != info.file_size:
            raise ValueError(f"member {name!r:.80} is cut off")
        return member


class _Window(io.RawIOBase):
    """A buffer as a file object, without a copy."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._buffer)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        part = self._buffer[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)


class _Reader:
    """Turns the nodes of ``read_opcodes`` into values and tensors."""

    def __init__(self, archive: _Archive, pickled_bytes: int) -> None:
        self._archive = archive
        # A pickle can refer to one list many times with few bytes, and each reference makes a copy
        # here: without a limit, nesting would multiply them.
        self._nodes_left = max(_NODES_LEAST, 2 * pickled_bytes)

    def value(self, node: Any, path: Path) -> Any:
        self._nodes_left -= 1
        if self._nodes_left < 0 or len(path) > DEPTH_MAX + 8:
            raise UnsupportedState(
                describe(path[:4]), "values this many or this deep", hint=_HINT_REPLACE
            )
        if node is None or type(node) in (bool, int, float, str, bytes):
            return node
        if isinstance(node, list | tuple):
            return type(node)(self._items(node, path))
        if isinstance(node, Pairs):
            return dict(self._pairs(node.pairs, path))
        if isinstance(node, Members):
            return (frozenset if node.frozen else set)(self._items(node.items, path))
        if isinstance(node, Name):
            return self._constant(node, path)
        if (
            isinstance(node, PickledCall)
            and isinstance(node.call, Name)
            and type(node.args) is tuple
        ):
            return self._call_result(node, path)
        raise _refused(node, path)

    def _items(self, nodes: Any, path: Path) -> list[Any]:
        if PLAIN.issuperset(map(type, nodes)):
            self._nodes_left -= len(nodes)
            return list(nodes)
        return [self.value(node, (*path, index)) for index, node in enumerate(nodes)]

    def _pairs(self, pairs: list[tuple[Any, Any]], path: Path) -> list[tuple[Any, Any]]:
        keyed = [(self.value(key, path), node) for key, node in pairs]
        return [(key, self.value(node, (*path, key))) for key, node in keyed]

    def _constant(self, node: Name, path: Path) -> torch.dtype:
        dtype = _DTYPES.get(node.name) if node.module == "torch" else None
        if dtype is None:
            raise _refused(node, path)
        return dtype

    def _call_result(self, node: PickledCall, path: Path) -> Any:
        """Make what a pickled call returns, for the functions and classes that torch uses."""
        call, args = node.call, node.args
        if call.module == "torch._utils" and call.name in _TENSORS:
            return _TENSORS[call.name](self, args, path)
        if (call.module in _BUILTINS and call.name in _PLAIN) or str(call) == "_codecs.encode":
            return self._plain(call.name, args, path)
        if call.module == "collections" and call.name in ("OrderedDict", "defaultdict", "Counter"):
            return self._dict(node, path)
        if str(call) == "collections.deque":
            _, maxlen = args or ((), None)
            return deque(self._items(node.items, path), maxlen)
        if str(call) == "torch.Size":
            return torch.Size(self._sizes(args[0]))
        if str(call) == "torch.device":
            return torch.device(*self._items(args, path))
        raise _refused(node, path)

    def _plain(self, name: str, args: tuple[Any, ...], path: Path) -> Any:
        if name == "encode":
            text, encoding = args
            if type(text) is not str or encoding != "latin1":
                raise ValueError("bytes in a form that torch does not write")
            return text.encode("latin1")
        items = self._items(args, path)
        if name == "complex":
            real, imaginary = items
            return complex(float(real), float(imaginary))
        (content,) = items or [b""]
        wanted = bytes if name in ("bytes", "bytearray") else list
        if type(content) is not wanted:
            raise ValueError(f"{name} of a {type(content).__name__}, not of {wanted.__name__}")
        return _PLAIN[name](content)

    def _dict(self, node: PickledCall, path: Path) -> Any:
        pairs = self._pairs(node.pairs, path)
        if node.call.name == "OrderedDict":
            return OrderedDict(pairs)
        if node.call.name == "Counter":
            counter: Counter[Any] = Counter()
            counts = node.args[0].pairs if node.args else []
            dict.update(counter, self._pairs(counts, path) + pairs)
            return counter
        factory = node.args[0] if node.args else None
        if isinstance(factory, Name) and factory.name in FACTORIES:
            return defaultdict(FACTORIES[factory.name], pairs)
        if factory is not None:
            raise _refused(node, path)
        return defaultdict(None, pairs)

    # -- tensors ----------------------------------------------------------------------------------

    def _parameter(self, args: tuple[Any, ...], path: Path) -> torch.Tensor:
        value = self.value(args[0], path)
        if not isinstance(value, torch.Tensor):
            raise TypeError("a parameter is not a tensor")
        return value

    def _tensor(self, args: tuple[Any, ...], path: Path) -> torch.Tensor:
        return self._strided(args[:4], None, args[6:], path)

    def _tensor_of_bytes(self, args: tuple[Any, ...], path: Path) -> torch.Tensor:
        return self._strided(args[:4], self._constant(args[6], path), args[7:], path)

    def _strided(
        self, args: tuple[Any, ...], dtype: torch.dtype | None, rest: tuple[Any, ...], path: Path
    ) -> torch.Tensor:
        outside, start, sizes, strides = args
        if not isinstance(outside, Outside):
            raise TypeError("a tensor without a storage")
        kind, storage, key, _, _ = outside.id
        if kind != "storage" or not isinstance(storage, Name) or type(key) is not str:
            raise TypeError("a malformed reference to a storage")
        dtype = dtype or _STORAGES.get(storage.name)
        if dtype is None:
            raise _refused(storage, path)
        shape, steps = self._sizes(sizes), self._sizes(strides)
        (start,) = self._sizes((start,))
        data = self._archive.member(f"data/{key}")
        count = len(data) // dtype.itemsize
        last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if 0 not in shape and start + last >= count:
            raise ValueError(f"a tensor of shape {shape} in a storage of {count} elements")
        if 0 in shape:
            return torch.empty(math.prod(shape), dtype=torch.uint8).view(dtype).view(shape)
        # torch warns that writing to a read-only buffer is undefined; these views are only read.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            flat = torch.frombuffer(data, dtype=torch.uint8)[: count * dtype.itemsize]
        # DCP writes archives back to back, so a storage may be misaligned in memory.
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        tensor = flat.view(dtype).as_strided(shape, steps, start)
        for flag in rest:
            tensor = self._flagged(tensor, flag, path)
        return tensor

    def _flagged(self, tensor: torch.Tensor, flags: Any, path: Path) -> torch.Tensor:
        """Apply the lazy flags of a view: conjugated, negated."""
        bits = self.value(flags, path) if flags is not None else {}
        if not isinstance(bits, dict) or not bits.keys() <= {"conj", "neg"}:
            raise _refused(flags, path)
        if bits.get("conj"):
            tensor = tensor.conj()
        return torch._neg_view(tensor) if bits.get("neg") else tensor

    def _sizes(self, sizes: Any) -> tuple[int, ...]:
        if isinstance(sizes, PickledCall) and str(sizes.call) == "torch.Size":
            (sizes,) = sizes.args
        if not isinstance(sizes, list | tuple) or not all(
            type(size) is int and 0 <= size < 2**63 for size in sizes
        ):
            raise TypeError("not a tuple of sizes")
        return tuple(sizes)


def _refused(node: Any, path: Path) -> UnsupportedState:
    what = node.call if isinstance(node, PickledCall) else node
    named = what if isinstance(what, Name) else type(what).__name__
    return UnsupportedState(describe(path), f"a pickled {named}", hint=_HINT_REPLACE)


_HINT_REPLACE = "load the folder with torch, replace this by plain values, and save it again"
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "set": set,
    "frozenset": frozenset,
    "complex": complex,
    "bytes": bytes,
    "bytearray": bytearray,
}
_TENSORS: dict[str, Callable[[_Reader, tuple[Any, ...], Path], torch.Tensor]] = {
    "_rebuild_tensor_v2": _Reader._tensor,
    "_rebuild_tensor_v3": _Reader._tensor_of_bytes,
    "_rebuild_parameter": _Reader._parameter,
}
