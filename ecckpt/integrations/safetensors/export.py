"""A checkpoint as a folder that Hugging Face's tools load: ``ecckpt export --to safetensors DIR``.

Files are filled from front to back, a few rows of a tensor at a time, so a model of any size is
exported in little memory: pieces of 64 MiB (or one row, where that is more) and the blocks that
their bytes come in. The folder is made beside its place, and moved there when it is whole and on
the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ecckpt.client.read.open import Opened
from ecckpt.errors import InvalidConfig, StateMismatch, UnsupportedState
from ecckpt.integrations.atomic_folder import finished_folder, require_unused
from ecckpt.integrations.safetensors.index import (
    INDEX,
    MANIFEST,
    MANIFEST_FORMAT,
    METADATA_KEYS,
    SINGLE,
)
from ecckpt.state.file.layout import arrange, render_entries
from ecckpt.state.tensors.dtypes import CODE_OF

_PIECE_BYTES = 64 << 20
_ALIGN_BYTES = 64

_Facts = dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written; ``aliases`` maps names left out to the names that they are tied to."""

    folder: str
    generation: str
    files: tuple[str, ...]
    tensors: int
    total_bytes: int
    aliases: Mapping[str, str]


def export_safetensors(
    opened: Opened, folder: Path, *, prefix: str = "model.", max_file_bytes: int = 5 * 10**9
) -> Exported:
    """Write the tensors whose names begin with ``prefix``, without it, an index and a manifest.

    A tensor larger than ``max_file_bytes`` gets a file of its own. Tied tensors are written once,
    under the first name; metadata tells the others. What is no tensor is not exported. ``folder``
    must not exist, or be empty, and is not seen before it is whole.

    Raises:
        InvalidConfig: ``folder`` is in use, or the prefix gives no names that can be used.
        UnsupportedState: a dtype that safetensors files cannot name.
        StateMismatch: tensors that ranks disagree on (see ``Opened.as_rank``).
    """
    require_unused(folder)
    names, aliases = _select(opened, prefix)
    _check(opened, names)
    files = _divide(opened, names, max_file_bytes)
    total_bytes = sum(_size_bytes(opened, name) for name in names.values())
    with finished_folder(folder) as unfinished:
        facts = {
            file: _write_tensors(opened, unfinished / file, members, aliases)
            for file, members in files.items()
        }
        if len(files) > 1:
            places = {name: file for file, members in files.items() for name in members}
            metadata = {"total_size": total_bytes, **aliases}
            facts[INDEX] = _write_json(
                unfinished / INDEX, {"metadata": metadata, "weight_map": places}
            )
        _write_json(unfinished / MANIFEST, _manifest(opened, facts, aliases))
    written = tuple(files)
    generation = str(opened.generation)
    return Exported(str(folder), generation, written, len(names), total_bytes, aliases)


def _select(opened: Opened, prefix: str) -> tuple[dict[str, str], dict[str, str]]:
    """Names in the files -> names in the checkpoint, and tied names -> names in the files."""
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name in opened:  # those that are stored come first
        if not name.startswith(prefix):
            continue
        stored, short = opened.aliases.get(name, name), name[len(prefix) :]
        if stored in kept:
            aliases[short] = kept[stored]
        else:
            kept[stored] = short
            names[short] = name
    if not names:
        entries = sorted({name.split(".")[0] for name in opened})
        raise InvalidConfig(
            f"no tensor of run {opened.run!r} begins with {prefix!r}",
            hint=f"its tensors are in {', '.join(entries[:20]) or 'no entry'}",
        )
    reserved = {"", "__metadata__"} & {*names, *aliases} | METADATA_KEYS & aliases.keys()
    if reserved:
        raise InvalidConfig(f"{sorted(reserved)} cannot be names in an export")
    return names, aliases


def _check(opened: Opened, names: Mapping[str, str]) -> None:
    """Raise for what cannot be exported, before anything is written."""
    problems: list[str] = []
    for name in names.values():
        try:
            opened.shape(name)
        except StateMismatch as error:
            problems += error.problems
        if opened.dtype(name) not in CODE_OF:
            raise UnsupportedState(
                name,
                f"{opened.dtype(name)} in a safetensors file",
                hint="convert it in the model, or choose another --prefix",
            )
    if problems:
        raise StateMismatch(problems)


def _divide(
    opened: Opened, names: Mapping[str, str], max_file_bytes: int
) -> dict[str, dict[str, str]]:
    """File -> its names, filled one after another in the order of the checkpoint."""
    groups: list[dict[str, str]] = []
    room_bytes = 0
    for short, name in names.items():
        size_bytes = _size_bytes(opened, name)
        if not groups or size_bytes > room_bytes:
            groups.append({})
            room_bytes = max_file_bytes
        groups[-1][short] = name
        room_bytes -= size_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _write_tensors(
    opened: Opened, path: Path, names: Mapping[str, str], aliases: Mapping[str, str]
) -> _Facts:
    """A safetensors file. Its order is that of a shard: the widest elements first, then by name."""
    described = [
        (short, CODE_OF[opened.dtype(name)], opened.shape(name), opened.dtype(name).itemsize)
        for short, name in names.items()
    ]
    entries = sorted(arrange(described), key=lambda entry: (entry.begin, entry.end))
    tied = {alias: short for alias, short in aliases.items() if short in names}
    text = (render_entries(entries, {"format": "pt", **tied}) + "}").encode()
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)

    def parts() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for entry in entries:
            yield from _pieces(opened, names[entry.name])

    return _write(path, parts())


def _write_json(path: Path, fields: dict[str, Any]) -> _Facts:
    return _write(path, [json.dumps(fields, indent=2, ensure_ascii=False).encode() + b"\n"])


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> _Facts:
    """A new file, on the disk; returns what the manifest says of it."""
    sha256 = hashlib.sha256()
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            sha256.update(part)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": sha256.hexdigest()}


def _pieces(opened: Opened, name: str) -> Iterator[memoryview]:
    """The bytes of a tensor, some rows at a time."""
    shape = opened.shape(name)
    if not math.prod(shape):
        return
    if not shape:
        yield _bytes(opened[name])
        return
    row_bytes = _size_bytes(opened, name) // shape[0]
    rows = opened.slice(name)
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        yield _bytes(rows[start : start + step])


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(view)


def _size_bytes(opened: Opened, name: str) -> int:
    return math.prod(opened.shape(name)) * opened.dtype(name).itemsize


def _manifest(
    opened: Opened, facts: Mapping[str, _Facts], aliases: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "format": MANIFEST_FORMAT,
        "run": opened.run,
        "generation": str(opened.generation),
        "files": dict(facts),
        "aliases": dict(aliases),
    }
