"""Exports a checkpoint for Hugging Face's tools: ``ecckpt export --to safetensors DIR``.

Files are written front to back, some rows of a tensor at a time. So the memory does not depend on
the size of the model: it is a piece of 64 MiB (or one row if that is longer) and the blocks that
its bytes lie in. ``atomic_folder.py`` makes the folder appear only when it is complete and synced.
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
_ALIGN_BYTES = 64  # of the data in a file: readers map it

_Facts = dict[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export.

    ``aliases`` maps each name that was left out to the name that its tensor was written under.
    """

    folder: str
    generation: str
    files: tuple[str, ...]
    tensors: int
    total_bytes: int
    aliases: Mapping[str, str]


def export_safetensors(
    opened: Opened, folder: Path, *, prefix: str = "model.", max_file_bytes: int = 5 * 10**9
) -> Exported:
    """Write all tensors whose names begin with ``prefix``, an index and a manifest.

    Names are written without the prefix. Tied tensors are written once, under the first name; the
    files' metadata has the other names. Values are not exported.

    Args:
        opened: the checkpoint.
        folder: must not exist, or be empty. It appears only when it is complete.
        prefix: of the names to export.
        max_file_bytes: size of a file; a larger tensor gets its own file.

    Raises:
        InvalidConfig: ``folder`` is in use, or the prefix leaves no names, or reserved ones.
        UnsupportedState: a dtype that safetensors does not have.
        StateMismatch: ranks have different tensors under a name (see ``Opened.as_rank``).
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
    return Exported(
        folder=str(folder),
        generation=str(opened.generation),
        files=tuple(files),
        tensors=len(names),
        total_bytes=total_bytes,
        aliases=aliases,
    )


def _select(opened: Opened, prefix: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return (name in the files -> name in the checkpoint, tied name -> name in the files)."""
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name in opened:  # aliases come after the names that tensors are stored under
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
    """Raise for tensors that cannot be exported, before anything is written."""
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
    """Distribute names over files, in the order of the checkpoint; return file -> its names."""
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
    """Write a safetensors file, arranged as a shard: widest elements first, then by name."""
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
    """Write and sync a new file; return its length and SHA-256 for the manifest."""
    sha256 = hashlib.sha256()
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            sha256.update(part)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": sha256.hexdigest()}


def _pieces(opened: Opened, name: str) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, some rows at a time."""
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
