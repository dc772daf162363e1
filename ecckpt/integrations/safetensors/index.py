"""Reads and checks the listing of a folder of weights in the layout of Hugging Face's tools.

    model-00001-of-00002.safetensors, ...   tensors; or model.safetensors alone
    model.safetensors.index.json            which tensor is in which file; only with several files
    ecckpt-manifest.json                    length and SHA-256 of these files; ecckpt's, optional

``importer.py`` uses it; ``export.py`` writes the same layout. The index decides which files belong
to the folder: a missing file is an error, and so is a file of the same naming that the index does
not name (left by an earlier export).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecckpt.errors import InvalidFolder, VersionMismatch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "ecckpt-manifest.json"
MANIFEST_FORMAT = 1
# Keys of the metadata that are not names of tied tensors.
METADATA_KEYS = frozenset({"format", "total_size", "total_parameters"})

_LIMIT_BYTES = 256 << 20  # of an index or manifest: bounds the memory that a damaged one can take
_SHARD = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a folder.

    ``files`` maps each file to its tensor names. For a single file without an index the names are
    empty: the file's own header has them, and its aliases. ``aliases`` maps tied names to names
    with a tensor.
    """

    files: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str]


def read_listing(folder: Path) -> Listing:
    """Read the listing of ``folder`` and check its files; tensors are not read.

    Raises:
        InvalidFolder: a file is missing, left over, or differs from the manifest.
        VersionMismatch: a manifest of another format version.
    """
    if not folder.is_dir():
        raise InvalidFolder(f"{folder} is not a folder")
    if (folder / INDEX).exists():
        listing = _index(folder / INDEX)
    elif (folder / SINGLE).exists():
        listing = Listing({SINGLE: ()}, {})
    else:
        raise InvalidFolder(f"{folder} has neither {INDEX} nor {SINGLE}")
    missing = [file for file in listing.files if not (folder / file).is_file()]
    if missing:
        raise InvalidFolder(f"{folder}: {_some(missing)} named in the index, but missing")
    present = {path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name)}
    extra = sorted(present - listing.files.keys())
    if extra:
        raise InvalidFolder(
            f"{folder}: {_some(extra)} in the folder, but not named in the index",
            hint="they may be left from another export: remove those that do not belong here",
        )
    if (folder / MANIFEST).exists():
        _check_manifest(folder, listing)
    return listing


def aliases_in(metadata: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, str]:
    """Return the tied names in a file's metadata: name without a tensor -> name with one."""
    return {
        alias: name
        for alias, name in metadata.items()
        if alias not in METADATA_KEYS and alias not in names and name in names
    }


def digest(path: Path) -> str:
    """Return the SHA-256 of a file as a hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _index(path: Path) -> Listing:
    fields = _json(path)
    places, metadata = fields.get("weight_map"), fields.get("metadata", {})
    if not isinstance(places, dict) or not places or not isinstance(metadata, dict):
        raise InvalidFolder(f"{path} has no weight_map")
    files: dict[str, list[str]] = {}
    for name, file in places.items():
        if type(file) is not str or Path(file).name != file:  # no path out of the folder
            raise InvalidFolder(f"{path}: {file!r:.80} is not a file name")
        files.setdefault(file, []).append(name)
    texts = {key: value for key, value in metadata.items() if type(value) is str}
    return Listing({file: tuple(names) for file, names in files.items()}, aliases_in(texts, places))


def _check_manifest(folder: Path, listing: Listing) -> None:
    path = folder / MANIFEST
    fields = _json(path)
    version, files = fields.get("format"), fields.get("files")
    if type(version) is not int or not isinstance(files, dict):
        raise InvalidFolder(f"{path} is not a manifest")
    if version != MANIFEST_FORMAT:
        raise VersionMismatch(str(path), found=version, known=MANIFEST_FORMAT)
    unknown = sorted(listing.files.keys() - files.keys())
    if unknown:
        raise InvalidFolder(f"{path} does not have {_some(unknown)}")
    for file, facts in files.items():
        part = folder / file
        if Path(file).name != file or not part.is_file():
            raise InvalidFolder(f"{path} names {file!r:.80}, which does not exist")
        if not isinstance(facts, dict) or part.stat().st_size != facts.get("bytes"):
            raise InvalidFolder(
                f"{part} has {part.stat().st_size} bytes, but another length in {MANIFEST}"
            )
        if digest(part) != facts.get("sha256"):
            raise InvalidFolder(f"{part} was changed: its SHA-256 differs from that in {MANIFEST}")


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise ValueError(f"more than {_LIMIT_BYTES} bytes")
        fields = json.loads(path.read_bytes())
        if not isinstance(fields, dict):
            raise TypeError("not a JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InvalidFolder(f"{path} cannot be read: {error}") from error
    return fields


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    verb = "are" if len(names) > 1 else "is"
    return f"{', '.join(names[:4])}{more} {verb}"
