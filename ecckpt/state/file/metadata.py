"""What the ``__metadata__`` of a shard says about its tensors, beyond what safetensors knows."""

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
    """By name: true dtypes of tensors stored as bytes, aliases (tied names), shardings."""

    dtypes: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    shardings: Mapping[str, Sharding] = field(default_factory=dict)

    def render(self) -> dict[str, str]:
        """As texts, the only thing that safetensors metadata holds."""
        parts = {
            "ecckpt.dtypes": dict(self.dtypes),
            "ecckpt.aliases": dict(self.aliases),
            "ecckpt.sharding": {name: _fields(part) for name, part in self.shardings.items()},
        }
        texts = {
            key: json.dumps(part, separators=(",", ":")) for key, part in parts.items() if part
        }
        return {"format": "pt", "ecckpt.format": str(FORMAT), **texts}


def parse_notes(metadata: Mapping[str, str]) -> ShardNotes:
    """The notes of a shard; ``VersionMismatch`` or ``CorruptFragment`` if they are not ours."""
    version = metadata.get("ecckpt.format", "")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise CorruptFragment(f"no shard: its metadata gives {version!r:.40} as the format")
    if int(version) != FORMAT:
        raise VersionMismatch("a shard", found=int(version), known=FORMAT)
    return ShardNotes(
        dtypes=_part(metadata, "ecckpt.dtypes", _text),
        aliases=_part(metadata, "ecckpt.aliases", _text),
        shardings=_part(metadata, "ecckpt.sharding", _sharding),
    )


def _fields(sharding: Sharding) -> dict[str, Any]:
    fields = asdict(sharding)
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
        raise TypeError("plain is a bool")
    if held is not None and len(held) != 3:
        raise TypeError("a share is dimension, start and length")
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


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in values):
        raise TypeError("not a list of sizes")
    return tuple(values)
