"""The id of a node's memory: drawn when the folder is empty, and lost with the memory."""

from __future__ import annotations

import logging
import re
import secrets
from pathlib import Path

from ecckpt.errors import AgentMismatch, InvalidConfig
from ecckpt.format.ids import check_name

_log = logging.getLogger(__name__)

_SPELLING = re.compile(r"([0-9a-f]{16}) ([ -~]+)")


def instance_of(root: Path, node: str) -> str:
    """Return the id of the memory in that folder; a new one if the file is missing or damaged.

    Raises ``AgentMismatch`` if the folder is another node's, because peers know it by that name.
    """
    path = root / "instance"
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    found = _SPELLING.fullmatch(text)
    if found is None or not _is_name(found[2]):
        if path.exists():
            _log.warning("%s: %r is no id of a node's memory; drawn anew", path, text[:80])
        return _draw(path, node)
    if found[2] != node:
        raise AgentMismatch(
            f"{root} is the memory of node {found[2]}, not of {node}",
            hint=f"give --node {found[2]}, or another --root",
        )
    return found[1]


def _is_name(text: str) -> bool:
    try:
        return bool(check_name("node", text))
    except InvalidConfig:
        return False


def _draw(path: Path, node: str) -> str:
    """Write a new id by rename: an agent that is killed meanwhile leaves no half of one."""
    instance = secrets.token_hex(8)
    draft = path.with_suffix(".draft")
    draft.write_text(f"{instance} {node}")
    draft.replace(path)
    return instance
