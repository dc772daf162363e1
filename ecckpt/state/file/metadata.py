"""The ``__metadata__`` of a shard: facts about its tensors that safetensors has no fields for.

``snapshot/plan.py`` renders it, ``shard.py`` and ``client/read/open.py`` parse it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ecckpt.errors import CorruptFragment, VersionMismatch
from ecckpt.state.tensors.sharding import Sharding

FORMAT = 1

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class ShardNotes:
    """Facts about tensors, by tensor name.

    Attributes:
        dtypes: the torch dtype of a tensor that is stored as bytes.
        aliases: another name of a tied tensor -> the name that it is stored under.
        shardings: the place of a tensor that is a part of a global tensor.
        layouts: the dimensions of a tensor from the slowest to the fastest in memory, where that is
            not their order; its bytes in the shard are in C order all the same.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    layouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def render(self) -> dict[str, str]:
        """Return the notes as texts: safetensors metadata maps texts to texts only."""
        parts = {
            "ecckpt.dtypes": dict(self.dtypes),
            "ecckpt.aliases": dict(self.aliases),
            "ecckpt.sharding": {name: _fields(part) for name, part in self.shardings.items()},
            "ecckpt.layouts": dict(self.layouts),
        }
        texts = {
            key: json.dumps(part, separators=(",", ":")) for key, part in parts.items() if part
        }
        return {"format": "pt", "ecckpt.format": str(FORMAT), **texts}


def parse_notes(metadata: Mapping[str, str]) -> ShardNotes:
    """Parse the metadata of a shard.

    Raises:
        VersionMismatch: another version of ecckpt's format.
        CorruptFragment: the file is not a shard, or a note is malformed.
    """
    version = metadata.get("ecckpt.format", "")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise CorruptFragment(f"not a shard: its metadata has the format {version!r:.40}")
    if int(version) != FORMAT:
        raise VersionMismatch("a shard", found=int(version), known=FORMAT)
    return ShardNotes(
        dtypes=_part(metadata, "ecckpt.dtypes", _text),
        aliases=_part(metadata, "ecckpt.aliases", _text),
        shardings=_part(metadata, "ecckpt.sharding", _sharding),
        layouts=_part(metadata, "ecckpt.layouts", _order),
    )


def _fields(sharding: Sharding) -> dict[str, Any]:
    fields = asdict(sharding)
    # `plain` is written only where it is true: older shards, and most tensors, do not have it.
    return fields if sharding.plain else {name: fields[name] for name in fields if name != "plain"}


def _part(metadata: Mapping[str, str], key: str, parse: Callable[[Any], _Part]) -> dict[str, _Part]:
    try:
        entries = json.loads(metadata.get(key, "{}"))
        return {name: parse(entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptFragment(f"{key} of a shard cannot be read: {error}") from error


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("not a text")
    return value


def _sharding(fields: Any) -> Sharding:
    coordinate, offset = fields["coordinate"], fields["offset"]
    held, plain = fields.get("held"), fields.get("plain", False)
    if type(plain) is not bool:
        raise TypeError("plain is not a bool")
    if held is not None and len(held) != 3:
        raise TypeError("held is not a dimension, a start and a length")
    return Sharding(
        shape=_sizes(fields["shape"]),
        stride=_sizes(fields["stride"]),
        placements=tuple(map(_text, fields["placements"])),
        mesh_shape=_sizes(fields["mesh_shape"]),
        coordinate=None if coordinate is None else _sizes(coordinate),
        offset=None if offset is None else _sizes(offset),
        held=None if held is None else (*_sizes(held),),  # type: ignore[arg-type]
        plain=plain,
    )


def _order(values: Any) -> tuple[int, ...]:
    order = _sizes(values)
    if sorted(order) != list(range(len(order))):
        raise TypeError("not an order of dimensions")
    return order


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in values):
        raise TypeError("not a list of sizes")
    return tuple(values)
